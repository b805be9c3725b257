"""All results as one HTML page: findings, claims as cards, every table folded, runs, the rest.

Nothing is judged here: verdicts come from `claims.py` and `evidence.py`.
"""

import base64
import hashlib
import json
import os
import struct
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lssar.errors import UserError
from paper.claims import findings, judge_all
from paper.evidence import RUNS, Evidence, read_runs
from paper.experiments import SCALES, Table
from paper.statistic import EXPLANATION, signed
from paper.table_figures import draw
from support import plots
from support.files import read_text, unseal

HERE = Path(__file__).parent
REPOSITORY = HERE.parent / "README.md"
PIXELS = 135  # per inch of a figure, where there is room


class Page:
    def __init__(self, root: Path, out: Path, figures: str):
        """Read the results below `root`; draw their figures into the folder `figures` of `out`."""
        self.root, self.out, self.folder = root, out, figures
        self.problems: dict[Path, str] = {}
        self.figures: set[str] = set()
        folders = {root.name: root} if root.name in SCALES else {n: root / n for n in SCALES}
        folders = {n: folders[n] for n in reversed(SCALES) if n in folders and folders[n].is_dir()}
        self.scales = [self._scale(name, folder) for name, folder in folders.items()]
        self.others = self._others(folders.values())

    def _scale(self, name: str, folder: Path) -> dict:
        evidence = Evidence(name, folder)
        self.problems |= evidence.problems
        shown = {"name": name, "findings": findings(evidence)}
        shown |= {"runs": {}, "runs_file": folder / RUNS}
        shown["claims"], shown["controls"] = judge_all(evidence)
        tables = {n: self._view(evidence, table) for n, table in evidence.tables.items()}
        # The headline table is part of another, with more seeds.
        verdicts = [v for n, view in tables.items() if n != "headline" for v in view["verdicts"]]
        try:
            shown["runs"] = with_own_settings(read_runs(folder / RUNS))
        except UserError as error:
            self.problems[folder / RUNS] = str(error)
        return shown | {"tables": tables, "verdicts": verdicts}

    def _view(self, evidence: Evidence, table: Table) -> dict:
        """A table as the page shows it, with its figure and the evaluations' pictures."""
        sheet = evidence.sheet(table)
        figure, svg, size = draw(sheet), None, None
        if figure is not None:
            svg = f"{self.folder}/{evidence.scale.name}-{table.name}.svg"
            size = tuple(round(PIXELS * inches) for inches in figure.get_size_inches())
            (self.out / self.folder).mkdir(parents=True, exist_ok=True)
            plots.save(figure, self.out / svg, (".svg",))
            self.figures.add(svg)
        entries = (entry for line in sheet.lines for entry in line.entries)
        verdicts = [entry.agreement.verdict for entry in entries if entry.agreement]
        found = sorted(evidence.folder.glob(table.pictures)) if table.pictures else []
        drawn = {"svg": svg, "size": size, "pictures": self._pictures(found)}
        return {"sheet": sheet, "verdicts": verdicts} | drawn

    def _others(self, folders: Collection[Path]) -> dict[Path, list]:
        """Results in no table, such as benchmarks, with the pictures beside them."""
        found = {}
        for path in sorted(self.root.rglob("*.json")):
            hidden = any(p.startswith(".") for p in path.relative_to(self.root).parts)
            if hidden or any(path.is_relative_to(folder) for folder in folders):
                continue
            try:
                if path.is_symlink() or not path.is_file():
                    raise ValueError("it is a link or a device, not a file")
                unseal(json.loads(read_text(path)))
                found[path] = self._pictures([path.with_suffix(".png")])
            except (OSError, ValueError, RecursionError) as error:
                self.problems[path] = str(error)
        return found

    def _pictures(self, paths: list[Path]) -> list[tuple[Path, tuple[int, int]]]:
        found = []
        for path in paths:
            if path.is_file() and not path.is_symlink():
                try:
                    found.append((path, png_size(path)))
                except (OSError, ValueError) as error:
                    self.problems[path] = str(error)
        return found

    def html(self) -> str:
        options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
        environment = Environment(loader=FileSystemLoader(HERE), finalize=printable, **options)
        style, script = (Markup(read_text(HERE / f"page.{end}")) for end in ("css", "js"))
        values = {"page": self, "repository": REPOSITORY, "style": style, "script": script}
        values |= {"EXPLANATION": EXPLANATION, "hash": source_hash, "signed": signed}
        return environment.get_template("page.html").render(values)

    def link(self, path: Path) -> str:
        """Where a file is as seen from the page; the page holds no copies."""
        return quote(Path(os.path.relpath(path.resolve(), self.out.resolve())).as_posix())


def with_own_settings(runs: dict[str, dict]) -> dict[str, dict]:
    """Runs with `own`: the settings in which one differs from most of them, as text."""
    lines = {}
    for name, run in runs.items():
        sections = run["config"].items()
        lines[name] = [f"{part}.{key} = {v}" for part, of in sections for key, v in of.items()]
    count = Counter(line for own in lines.values() for line in own)
    usual = {line for line, times in count.items() if 2 * times > len(runs)}
    return {n: run | {"own": [s for s in lines[n] if s not in usual]} for n, run in runs.items()}


def source_hash(source: str) -> str:
    """For the page's security policy: exactly this text may run, and nothing that a result says."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def printable(value):
    """Replace what UTF-8 cannot hold or a page cannot show."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    shown = value.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if unicodedata.category(c) != "Cc" or c in "\n\t" else "�" for c in shown)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height on the page, half of the picture's."""
    with path.open("rb") as file:
        head = file.read(24)
    if head[:8] != b"\x89PNG\r\n\x1a\n" or len(head) < 24:
        raise ValueError("it is not a PNG picture")
    width, height = struct.unpack(">II", head[16:])
    return width // 2, height // 2
