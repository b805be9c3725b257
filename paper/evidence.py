"""What was measured at one scale, asked by table, row and column; comparisons of it, each once.

Whoever asks for the same comparison, a table, a claim, a figure or the page, gets the same object,
so that they cannot disagree.
"""

import json
import statistics
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from evaluating.results import AS_TRAINED, Measured, collect
from paper.experiments import EXTRAPOLATION, PASSKEY, Column, Row, Table, all_tables
from paper.runs import SCALES, run_name, run_seeds
from paper.statistic import MARGIN, Comparison, compare
from support.files import finite, json_record, refuse_wrong_types

PAPER = Path(__file__).with_name("paper.json")
RUNS = "runs.json"  # beside the results of a scale: what every training run was
LARGEST = 1e12  # anything beyond is no result, and would flatten all others in a figure


def paper_numbers() -> dict:
    return json.loads(PAPER.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cell:
    values: dict[int | None, float | None] = field(default_factory=dict)  # by seed; None: overflow
    sources: dict[int | None, Path] = field(default_factory=dict)
    mechanism: str = ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def finite(self) -> bool:
        return self.n > 0 and None not in self.values.values()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.finite else None

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.values.values()) if self.finite and self.n > 1 else None


class Evidence:
    def __init__(self, scale: str, folder: str | Path):
        """Read everything that was measured below results/SCALE."""
        self.scale, self.folder = SCALES[scale], Path(folder)
        self.tables, self.paper = all_tables(scale), paper_numbers()
        measured, self.problems = collect(self.folder)
        self.problems.pop(self.folder / RUNS, None)
        self._seeds = sorted({s for m in measured if (s := seed_of(m)) is not None})
        self._found: dict[tuple, Measured] = {}
        for one in measured:
            self._add(one)
        self.cell, self.compare = cache(self._cell), cache(self._compare)

    def _add(self, one: Measured) -> None:
        record, path = one.record, one.source.relative_to(self.folder)
        folder = path.parts[0].removesuffix(".json")
        place = (folder, record.quantity, one.name, record.variant, record.task)
        self._found[*place, record.length] = one
        # Asked for without a length, a quantity is the one at the longest.
        known = self._found.get((*place, None))
        if known is None or (known.record.length or 0) <= (record.length or 0):
            self._found[*place, None] = one

    def length(self, table: Table, factor: float | None) -> int | None:
        return None if factor is None else self.scale.length(factor, table.folder == PASSKEY)

    def measured(self, table: Table, row: Row, column: Column) -> dict[int | None, Measured]:
        """The records of a cell by seed."""
        key = column.run(row.run)
        variant = f"window={self.length(table, 1)}" if row.variant == "window" else row.variant
        place = (variant, column.task, self.length(table, column.factor))
        names = [*(run_name(key, seed) for seed in self._seeds), key]
        found = (self._found.get((table.folder, column.quantity, n, *place)) for n in names)
        return {seed_of(m): m for m in found if m is not None}

    def _cell(self, table: Table, row: Row, column: Column) -> Cell:
        found, values = self.measured(table, row, column), {}
        for seed, m in found.items():
            sound = m.record.value is not None and abs(m.record.value) < LARGEST
            values[seed] = m.record.value * (100 if column.percent else 1) if sound else None
        sources = {seed: m.source for seed, m in found.items()}
        mechanisms = (mechanism_of(m.run) for m in found.values())
        return Cell(values, sources, next(filter(None, mechanisms), ""))

    def is_missing(self, table: Table, row: Row, column: Column) -> bool:
        """Whether there are fewer seeds than `reproduce.py` trains for this cell."""
        wanted = 1
        if table.folder in (EXTRAPOLATION, PASSKEY) and row.variant in (AS_TRAINED, "window"):
            wanted = len(run_seeds(self.scale, column.run(row.run), None))
        return self.cell(table, row, column).n < wanted

    def _compare(self, table: Table, row: Row, other: Row, column: Column) -> Comparison:
        margin = MARGIN if (column.quantity, column.factor) == ("loss", 1) else None
        mine, theirs = (self.cell(table, r, column).values for r in (row, other))
        return compare(mine, theirs, lower_is_better=column.lower_is_better, margin=margin)

    def printed(self, table: Table, row: Row, column: Column) -> float | None:
        """The paper's own number."""
        paper = self.paper[table.label]
        found = paper["rows"].get(row.key)
        if found is None or column.paper not in paper["columns"] or row.variant == "window":
            return None
        return found[paper["columns"].index(column.paper)]


def seed_of(one: Measured) -> int | None:
    return one.seed if isinstance(one.seed, int) else None


def mechanism_of(run: dict) -> str:
    """The name of its attention, which decides its colour; empty where the file does not say."""
    found = run
    for key in ("model", "attention", "name"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""


_FIELDS = dict.fromkeys(("commit", "torch", "device", "status"), str) | {"config": dict}
_FIELDS |= dict.fromkeys(("seed", "tokens", "seconds", "loss"), (int, float, type(None)))


def read_runs(path: Path) -> dict[str, dict]:
    """The runs of runs.json by name, their fields checked."""
    with json_record(path, what="is damaged or is not a list of runs") as record:
        found = finite(record["runs"])
        for name, run in found.items():
            refuse_wrong_types(run, _FIELDS, f" in the run {name!r}")
            if not all(isinstance(section, dict) for section in run["config"].values()):
                raise TypeError(f"a setting without a section in the run {name!r}")
    return found
