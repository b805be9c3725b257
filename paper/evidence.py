"""What was measured at one scale, looked up and compared by table, row and column.

A table, a claim, a figure and the page that ask for the same comparison get the same object, so
they cannot disagree.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from evaluating.results import Measured, collect
from paper.experiments import SCALES, Column, Row, Table, all_tables
from paper.statistic import BySeed, Comparison, compare, margin_of
from support.files import finite, json_record, refuse_wrong_types

RUNS = "runs.json"  # beside the results of a scale: what every training run was
LARGEST = 1e12  # anything beyond is no result, and would flatten all others in a figure


def paper_numbers() -> dict:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cell:
    values: BySeed = field(default_factory=dict)
    sources: dict[int | None, Path] = field(default_factory=dict)
    mechanism: str = ""  # decides the colour; empty where the file does not say

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
        self._found: dict[tuple, dict[int | None, Measured]] = defaultdict(dict)
        for one in sorted(measured, key=lambda m: math.inf if m.seed is None else m.seed):
            self._add(one)
        self.cell, self.compare = cache(self._cell), cache(self._compare)

    def _add(self, one: Measured) -> None:
        record, folder = one.record, one.source.relative_to(self.folder).parts[0]
        run = re.sub(r"-s\d+$", "", one.name)  # `run_name` without the seed
        place = (folder.removesuffix(".json"), record.quantity, run, record.variant, record.task)
        self._found[*place, record.length][one.seed] = one
        # Asked for without a length, a quantity is the one at the longest.
        longest = self._found[*place, None]
        if (longest.get(one.seed, one).record.length or 0) <= (record.length or 0):
            longest[one.seed] = one

    def measured(self, table: Table, row: Row, column: Column) -> dict[int | None, Measured]:
        """The records of a cell by seed."""
        variant = re.sub("^window", f"window={self.scale.train_length}", row.variant)
        place = (table.folder, column.quantity, column.run(row.run), variant, column.task)
        return self._found.get((*place, self.scale.length(column.factor)), {})

    def _cell(self, table: Table, row: Row, column: Column) -> Cell:
        found, values, mechanism = self.measured(table, row, column), {}, ""
        for seed, one in found.items():
            value = one.record.value
            sound = value is not None and abs(value) < LARGEST
            values[seed] = value * (100 if column.percent else 1) if sound else None
            mechanism = mechanism or mechanism_of(one.run)
        return Cell(values, {seed: one.source for seed, one in found.items()}, mechanism)

    def is_missing(self, table: Table, row: Row, column: Column) -> bool:
        """Whether there are fewer seeds than `reproduce.py` trains for this cell."""
        if column.quantity == "bits_per_byte":  # of older results only the loss is known
            return False
        wanted = len(self.scale.seeds_of(column.run(row.run))) if table.runs else 1
        return self.cell(table, row, column).n < wanted

    def _compare(self, table: Table, row: Row, other: Row, column: Column) -> Comparison:
        margin = margin_of(column.quantity, column.factor)
        mine, theirs = (self.cell(table, r, column).values for r in (row, other))
        return compare(mine, theirs, lower_is_better=column.lower_is_better, margin=margin)

    def printed(self, table: Table, row: Row, column: Column) -> float | None:
        """The paper's own number."""
        rows, columns = (self.paper[table.label][part] for part in ("rows", "columns"))
        known = row.key in rows and column.paper in columns
        return rows[row.key][columns.index(column.paper)] if known else None

    def printed_gap(self, table: Table, row: Row, other: Row, column: Column) -> float | None:
        ours, theirs = (self.printed(table, r, column) for r in (row, other))
        return None if None in (ours, theirs) else ours - theirs


def mechanism_of(run: dict) -> str:
    try:
        name = run["model"]["attention"]["name"]
    except (KeyError, TypeError):
        return ""
    return name if isinstance(name, str) else ""


_FIELDS = {"config": dict} | dict.fromkeys(("commit", "torch", "device", "status"), str)
_FIELDS |= dict.fromkeys(("seed", "tokens", "seconds", "loss"), int | float | None)


def read_runs(path: Path) -> dict[str, dict]:
    """The runs of runs.json by name, their fields checked; none without the file."""
    if not path.exists():
        return {}
    with json_record(path, what="is damaged or is not a list of runs") as record:
        found = finite(record["runs"])
        for name, run in found.items():
            refuse_wrong_types(run, _FIELDS, f" in the run {name!r}")
            if not all(isinstance(section, dict) for section in run["config"].values()):
                raise TypeError(f"a setting without a section in the run {name!r}")
    return found
