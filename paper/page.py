"""Writes all results as one HTML page: verdicts, every table folded, figures.

Nothing is judged here: verdicts come from claims.py, cells from tables.py.
"""

import base64
import hashlib
import os
import unicodedata
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lssar.errors import UserError
from paper.claims import EXPLANATION, judge_all
from paper.experiments import SCALES
from paper.figures import draw
from paper.tables import FilledTable, fill_all
from support import plots
from support.files import read_text, write_text, writing

HERE = Path(__file__).parent
REPOSITORY = HERE.parent / "README.md"
INDEX = "index.html"
FIGURES = "figures"
GENERATOR = '<meta name="generator" content="reproduce.py">'
PIXELS = 135  # per inch of a figure, where there is room


def write_page(results: Path, out: Path) -> None:
    """Write OUT/index.html and its figures; the page comes last, so that none is missing."""
    check_out(out, results)
    with writing(out):
        (out / FIGURES).mkdir(parents=True, exist_ok=True)
        page = Page(results, out)
        write_text(out / INDEX, page.html())
        for path in (out / FIGURES).glob("*.svg"):
            if f"{FIGURES}/{path.name}" not in page.figures:
                path.unlink()
    print(f"page: {out / INDEX}")


def check_out(out: Path, results: Path) -> None:
    """Accept a new or empty folder or an earlier page, nothing else."""
    if out.resolve().is_relative_to(results.resolve()):
        raise UserError(f"--page {out} is inside {results}; give another folder")
    if out.exists() and not out.is_dir():
        raise UserError(f"--page {out} is a file; give a folder")
    if not out.exists() or {path.name for path in out.iterdir()} <= {FIGURES}:
        return
    index = out / INDEX
    if not index.is_file() or GENERATOR not in read_text(index, errors="replace"):
        raise UserError(f"--page {out} holds other things than a page; give a new folder")


class Page:
    """Holds what page.html shows."""

    def __init__(self, results: Path, out: Path):
        self.results = results
        self.out = out
        self.problems: dict[Path, str] = {}
        self.figures: set[str] = set()
        self.scales = [self._scale(name) for name in SCALES if (results / name).is_dir()]

    def _scale(self, name: str) -> dict:
        """Return the verdicts and the tables of one scale."""
        filled, problems = fill_all(name, self.results / name)
        self.problems |= problems
        tables = [self._view(table, name) for table in filled.values()]
        return {"name": name, "judged": judge_all(filled, name), "tables": tables}

    def _view(self, filled: FilledTable, scale: str) -> dict:
        """Return one table with its source and its figure, and write the figure."""
        name = filled.table.name
        source = self.results / scale / f"{filled.table.records or name}.json"
        view = {"id": f"{scale}-{name}", "filled": filled, "svg": None, "source": source}
        figure = draw(filled)
        if figure is not None:
            view["svg"] = f"{FIGURES}/{scale}-{name}.svg"
            view["size"] = tuple(round(PIXELS * inches) for inches in figure.get_size_inches())
            plots.save(figure, self.out / view["svg"], (".svg",))
            self.figures.add(view["svg"])
        return view

    def html(self) -> str:
        """Return the page."""
        environment = Environment(
            loader=FileSystemLoader(HERE),
            finalize=printable,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html").render(
            page=self,
            repository=REPOSITORY,
            style=Markup(read_text(HERE / "page.css")),
            script=Markup(read_text(HERE / "page.js")),
            EXPLANATION=EXPLANATION,
            hash=source_hash,
        )

    def link(self, path: Path) -> str:
        """Return where a file is as seen from the page; the page holds no copies."""
        return quote(Path(os.path.relpath(path.resolve(), self.out.resolve())).as_posix())


def source_hash(source: str) -> str:
    """Return the hash by which the page's security policy lets exactly this text run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def printable(value):
    """Replace characters that UTF-8 cannot hold or a page cannot show."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    shown = value.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if unicodedata.category(c) != "Cc" or c in "\n\t" else "�" for c in shown)
