"""All results as one HTML page: findings, claims as cards, every table folded, runs, the rest.

What the page says is asked of `evidence.py`, `claims.py` and `tables.py`; nothing is judged here.
"""

import base64
import hashlib
import json
import os
import re
import struct
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lssar.errors import UserError
from paper.claims import Judged, findings, judge_all
from paper.evidence import RUNS, Evidence, read_runs
from paper.experiments import Row
from paper.runs import SCALES
from paper.statistic import EXPLANATION, signed
from paper.table_figures import draw
from paper.tables import Built, build
from support import plots
from support.files import read_text, unseal

HERE = Path(__file__).parent
REPOSITORY = HERE.parent / "README.md"
HEADLINE = "headline"
PIXELS = 135  # per inch of a figure, where there is room
ABOUT = {
    "paper": ("Paper scale", "The paper's models, data and schedules."),
    "nano": (
        "Nano scale",
        "Byte-level models of 0.4 million parameters, trained in minutes on a CPU on the Python "
        "standard library's sources.",
    ),
}
GOOD, BAD, OPEN = "good", "bad", "open"
KINDS = {
    **dict.fromkeys(("holds", "reproduced", "same direction"), GOOD),
    **dict.fromkeys(("does not hold", "differs", "opposite direction"), BAD),
    "open": OPEN,
}
MARKS = {GOOD: "✓", BAD: "✗"}


@dataclass(frozen=True)
class View:
    """A table as the page shows it."""

    built: Built
    counts: dict[str, int]
    base: Row | None
    tolerance: float | None
    svg: str | None  # its figure, below the site
    size: tuple[int, int] | None
    pictures: list[tuple[Path, tuple[int, int]]]
    script: str


@dataclass(frozen=True)
class Scale:
    name: str
    suffix: str  # tells the scales apart in the navigation
    findings: list[str]
    claims: list[Judged]
    controls: list[Judged]
    counts: dict[str, dict[str, int]]
    tables: list[View]
    runs: dict[str, dict]

    @property
    def title(self) -> str:
        return ABOUT[self.name][0]

    @property
    def about(self) -> str:
        return ABOUT[self.name][1]

    @property
    def headline(self) -> View | None:
        return next((v for v in self.tables if v.built.table.name == HEADLINE and v.svg), None)


class Page:
    def __init__(self, root: Path, out: Path, figures: str):
        """Read the results below `root`; draw their figures into the folder `figures` of `out`."""
        self.root, self.out, self.folder = root, out, figures
        self.problems: dict[Path, str] = {}
        self.figures: set[str] = set()
        folders = {root.name: root} if root.name in SCALES else {n: root / n for n in SCALES}
        found = [name for name in ABOUT if name in folders and folders[name].is_dir()]
        self.scales = [self._scale(n, folders[n], n if len(found) > 1 else "") for n in found]
        self.others = self._others([folders[name] for name in found])

    # --- what there is ---------------------------------------------------------------------------

    def _scale(self, name: str, folder: Path, suffix: str) -> Scale:
        evidence = Evidence(name, folder)
        self.problems |= evidence.problems
        claims, controls = judge_all(evidence)
        tables = [self._view(evidence, build(evidence, t)) for t in evidence.tables.values()]
        counts = {
            "claims": tally(c.verdict for c in claims),
            "controls": tally(c.verdict for c in controls),
            # The headline table is a part of another, with more seeds.
            "cells": tally(
                verdict
                for view in tables
                if view.built.table.name != HEADLINE
                for verdict in Counter(view.counts).elements()
            ),
        }
        runs = self._runs(folder / RUNS)
        suffix = f" ({suffix})" if suffix else ""
        return Scale(name, suffix, findings(evidence), claims, controls, counts, tables, runs)

    def _view(self, evidence: Evidence, built: Built) -> View:
        table, figure = built.table, draw(built, evidence)
        svg = size = None
        if figure is not None:
            svg = f"{self.folder}/{evidence.scale.name}-{table.name}.svg"
            size = tuple(round(PIXELS * inches) for inches in figure.get_size_inches())
            (self.out / self.folder).mkdir(parents=True, exist_ok=True)
            plots.save_svg(figure, self.out / svg)
            self.figures.add(svg)
        judged = [e.agreement for line in built.lines for e in line.entries if e.agreement]
        return View(
            built=built,
            counts=tally(found.verdict for found in judged),
            base=table.base,
            tolerance=evidence.paper[table.label]["tolerance"],
            svg=svg,
            size=size,
            pictures=self._pictures(
                sorted(evidence.folder.glob(table.pictures)) if table.pictures else []
            ),
            script=table.script,
        )

    def _runs(self, path: Path) -> dict[str, dict]:
        try:
            return read_runs(path) if path.exists() else {}
        except UserError as error:
            self.problems[path] = str(error)
            return {}

    def _others(self, folders: list[Path]) -> dict[Path, list]:
        """Results that are in no table: benchmarks, the drill; with the pictures beside them."""
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
                size = png_size(path)
                if size is None:
                    self.problems[path] = "it is not a PNG picture"
                else:
                    found.append((path, size))
        return found

    # --- the text --------------------------------------------------------------------------------

    def html(self) -> str:
        environment = Environment(
            loader=FileSystemLoader(HERE),
            autoescape=True,
            finalize=printable,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        style, script = (Markup(read_text(HERE / f"page.{kind}")) for kind in ("css", "js"))
        environment.globals |= {
            "KINDS": KINDS,
            "MARKS": MARKS,
            "EXPLANATION": EXPLANATION,
            "anchor": anchor,
            "hash": source_hash,
            "link": self.link,
            "name": self.name,
            "plain": plain,
            "signed": signed,
        }
        return environment.get_template("page.html").render(
            style=style,
            script=script,
            scales=self.scales,
            others=self.others,
            problems=self.problems,
            repository=REPOSITORY,
        )

    def link(self, path: Path) -> str:
        """Where a file is as seen from the page; the page holds no copies."""
        return quote(Path(os.path.relpath(path.resolve(), self.out.resolve())).as_posix())

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def tally(verdicts) -> dict[str, int]:
    """Verdicts and how many there are of each, in the order of KINDS."""
    found = Counter(verdicts)
    return {verdict: found[verdict] for verdict in KINDS if found[verdict]}


def anchor(name: str, scale: str = "") -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", f"{scale}-{name}" if scale else name)


def source_hash(source: str) -> str:
    """What the page's policy allows to run: exactly this text, and nothing that a result says."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def printable(value):
    """Text without what UTF-8 cannot hold or a page cannot show."""
    if value is None or isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    shown = value.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if unicodedata.category(c) != "Cc" or c in "\n\t" else "�" for c in shown)


def plain(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if abs(value) < 1e15 else f"{value:.4g}"


def png_size(path: Path) -> tuple[int, int] | None:
    """Width and height on a page: figures are drawn at twice its pixels and more."""
    with path.open("rb") as file:
        head = file.read(24)
    if head[:8] != b"\x89PNG\r\n\x1a\n" or len(head) < 24:
        return None
    width, height = struct.unpack(">II", head[16:])
    return width // 2, height // 2
