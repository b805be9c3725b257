"""What was measured at one scale, and the paper's tables filled with it.

A table, a claim, a figure and the page that ask for the same comparison get the same object, so
they cannot disagree.
"""

import itertools
import math
import operator
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evaluating.results import Measured, collect, read_results
from paper import paper_numbers
from paper.experiments import SCALES, Column, Row, Scale, Table, all_tables
from paper.statistic import (
    MARGIN,
    TASK_MARGIN,
    Agreement,
    BySeed,
    Comparison,
    agreement,
    compare,
    direction,
    far_verdict,
    margin_of,
)
from support.files import finite, json_record, refuse_wrong_types
from support.text import short_number
from support.text import table as text_table

RUNS = "runs.json"  # beside the results of a scale: what every training run was
UNEQUAL = "not measured with the same settings (tokens, trials, ...)"
LARGEST = 1e12  # anything beyond is no result, and would flatten all others in a figure
# What a value that is None means; elsewhere it overflowed.
NO_VALUE = {"constant": "none", "cosine_needed": "impossible"}


class Evidence:
    def __init__(self, scale: str, folder: str | Path):
        """Read everything that was measured below results/SCALE."""
        self.scale, self.folder = SCALES[scale], Path(folder)
        self.tables, paper = all_tables(scale), paper_numbers()
        measured, self.problems = collect(self.folder)
        self.problems.pop(self.folder / RUNS, None)
        found: dict[tuple, dict[int | None, Measured]] = defaultdict(dict)
        for one in sorted(measured, key=lambda m: math.inf if m.seed is None else m.seed):
            r, folder = one.record, one.source.relative_to(self.folder).parts[0]
            run = re.sub(r"-s\d+$", "", one.name)  # without the seed
            place = (folder.removesuffix(".json"), r.quantity, run, r.variant, r.task)
            found[*place, r.length][one.seed] = one
            # Asked for without a length, a quantity is the one at the longest.
            longest = found[*place, None]
            if (longest.get(one.seed, one).record.length or 0) <= (r.length or 0):
                longest[one.seed] = one
        self.found, self.paper, self.sheet = found, paper, cache(self._sheet)

    def _sheet(self, table: Table, without: tuple[int, ...] = ()) -> "Sheet":
        """The table filled with what was measured, without some seeds."""
        found = self.found
        if without:
            kept = {p: {s: m for s, m in by.items() if s not in without} for p, by in found.items()}
            found = {place: by_seed for place, by_seed in kept.items() if by_seed}
        return Sheet(table, self.scale, self.paper[table.label], found)


class Cell(NamedTuple):
    values: BySeed
    sources: dict[int | None, Path]
    mechanism: str  # decides the colour; empty where the file does not say

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

    @property
    def half_width(self) -> float | None:
        """Half of the mean's 95 % interval; None below two seeds."""
        return Comparison(tuple(self.values.values())).half_width if self.finite else None


class Entry(NamedTuple):
    """One cell: what was measured, what the paper prints, and how both compare to the baseline."""

    cell: Cell
    column: Column
    decimals: int
    paper: float | None
    comparison: Comparison | None = None  # with the table's baseline; None for the baseline itself
    paper_gap: float | None = None  # from the baseline, in the paper
    agreement: Agreement | None = None  # with the paper; None where one of them has no number

    @property
    def text(self) -> str:
        if self.cell.n and self.cell.mean is None:
            return NO_VALUE.get(self.column.quantity, "overflow")
        if not self.cell.n:
            return ""
        if "gain" in self.column.quantity:  # rounded, as a gain of 1e-18 is none
            return f"{round(self.cell.mean, self.decimals) + 0.0:,.{self.decimals}f}"
        return fixed(self.cell.mean, self.decimals)

    @property
    def by_seed(self) -> str:
        """What the mean is of."""
        values = self.cell.values.values()
        return " ".join("none" if value is None else f"{value:.6g}" for value in values)

    @property
    def spread(self) -> str:
        return "" if self.cell.sd is None else f"±{self.cell.sd:,.{self.decimals}f}"


class Line(NamedTuple):
    row: Row
    entries: list[Entry]
    missing: bool  # some of the seeds that `reproduce.py` trains, or all

    @property
    def seeds(self) -> int:
        return max((entry.cell.n for entry in self.entries), default=0)

    @property
    def sources(self) -> dict[int | None, Path]:
        """The files of all cells, where they are the same; else none."""
        found = [entry.cell.sources for entry in self.entries if entry.cell.n]
        return found[0] if found and all(sources == found[0] for sources in found) else {}

    @property
    def mechanism(self) -> str:
        return next((entry.cell.mechanism for entry in self.entries if entry.cell.n), "")


class Sheet:
    """A table with what was measured: titled columns and controls only where they have a number."""

    def __init__(self, table: Table, scale: Scale, paper: dict, found: dict[tuple, dict]):
        """`paper`: what it prints; `found`: the records of a place by seed, see `measured`."""
        self.table, self.scale, self.paper, self.found = table, scale, paper, found
        self.cell, self.compare = cache(self._cell), cache(self._compare)
        self.title = table.title or paper["title"]
        self.unit = scale.unit if paper["unit"] == "nats per token" else paper["unit"]
        given = paper["tolerance"]  # of the paper's numbers
        given = ", ".join(map(str, given)) if isinstance(given, list) else given
        self.tolerance = "" if given is None else f"{given} ({paper['reason']})"
        self.is_measured = self.has_number(table.rows, table.columns)
        columns = [c for c in table.columns if not c.title or self.has_number(table.rows, [c])]
        self.columns = [(c, self.heading(c)) for c in columns]
        rows = [r for r in table.rows if not r.control or self.has_number([r], table.columns)]
        self.lines = [self._line(row, columns) for row in rows]
        self.notes = [*table.notes, *self._far_verdicts(), *self._equations()]

    def has_number(self, rows, columns) -> bool:
        return any(self.cell(row, column).n for row in rows for column in columns)

    def measured(self, row: Row, column: Column) -> dict[int | None, Measured]:
        """The records of a cell by seed."""
        variant = re.sub("^window(?!=)", f"window={self.scale.train_length}", row.variant)
        place = (self.table.folder, column.quantity, column.run(row.run), variant, column.task)
        return self.found.get((*place, self.scale.length(column.factor)), {})

    def _cell(self, row: Row, column: Column) -> Cell:
        found, values, mechanism = self.measured(row, column), {}, ""
        for seed, one in found.items():
            value = one.record.value
            sound = value is not None and abs(value) < LARGEST
            values[seed] = value * (100 if column.percent else 1) if sound else None
            mechanism = mechanism or mechanism_of(one.run)
        return Cell(values, {seed: one.source for seed, one in found.items()}, mechanism)

    def _compare(self, row: Row, other: Row, column: Column) -> Comparison:
        options = {"lower_is_better": column.lower_is_better}
        options["margin"] = margin_of(column.quantity, column.factor)
        found = [one for r in (row, other) for one in self.measured(r, column).values()]
        if any(one.settings != found[0].settings for one in found):
            return Comparison((), absent=UNEQUAL, **options)
        options |= self.text_error(column, row, other)
        return compare(*(self.cell(r, column).values for r in (row, other)), **options)

    def text_error(self, column: Column, *rows: Row) -> dict:
        """Of the mean of a row, or of the difference of two: its standard error over the pieces of
        text that were read, and their number; nothing where these are not recorded."""
        if column.quantity == "bits_per_byte":  # the loss in another unit
            loss = replace(column, quantity="loss")
            bits, nats = (self.cell(rows[0], c).mean for c in (column, loss))
            found = self.text_error(loss, *rows) if bits and nats else {}
            return found and found | {"text_error": found["text_error"] * bits / nats}
        found = [self.measured(row, column) for row in rows]
        shared = [[one[seed] for seed in one if all(seed in o for o in found)] for one in found]
        means = [by_piece(measured) for measured in shared]
        if all(means) and len(set(map(len, means))) == 1:
            apart = (
                [operator.sub(*both) for both in zip(*means, strict=True)] if rows[1:] else means[0]
            )
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            return {"text_error": error * (100 if column.percent else 1), "pieces": len(apart)}
        if column.quantity != "context_gain" or not shared[0]:
            return {}
        errors = [statistics.fmean(m.record.error or 0.0 for m in measured) for measured in shared]
        return {"text_error": math.hypot(*errors), "pieces": pieces_of(shared[0][0].settings)}

    def printed(self, row: Row, column: Column) -> float | None:
        """The paper's own number."""
        rows, columns = self.paper["rows"], self.paper["columns"]
        known = row.key in rows and column.paper in columns
        return rows[row.key][columns.index(column.paper)] if known else None

    def printed_gap(self, row: Row, other: Row, column: Column) -> float | None:
        ours, theirs = (self.printed(r, column) for r in (row, other))
        return None if None in (ours, theirs) else ours - theirs

    def _line(self, row: Row, columns: list[Column]) -> Line:
        missing, runs = [], self.table.runs
        for column in columns:
            wanted = len(self.scale.seeds_of(column.run(row.run))) if runs else 1
            older = column.quantity == "bits_per_byte"  # of older results only the loss is known
            missing.append(self.cell(row, column).n < wanted and not older)
        # What was computed once need not fill every column.
        some = any(missing) if runs else all(missing)
        return Line(row, [self._entry(row, column) for column in columns], some)

    def _entry(self, row: Row, column: Column) -> Entry:
        cell, paper, base = self.cell(row, column), self.printed(row, column), self.table.base
        comparison = gap = agrees = None
        if base not in (None, row):
            comparison = self.compare(row, base, column)
            gap = self.printed_gap(row, base, column)
        if None not in (paper, cell.mean):
            tolerance = tolerance_of(self.paper, column, paper)
            if self.scale.name == "paper":
                agrees = agreement(cell.mean, paper, tolerance)
            elif gap is not None:
                agrees = direction(comparison, gap, tolerance)
        return Entry(cell, column, self.decimals(column), paper, comparison, gap, agrees)

    def decimals(self, column: Column) -> int:
        cells = (self.cell(row, column) for row in self.table.rows)
        values = [abs(v) for cell in cells for v in cell.values.values() if v]
        if column.percent:
            return 0 if all(v == int(v) for v in values) else 1
        return 3 if max(values, default=0) < 20 else 1

    def heading(self, column: Column) -> str:
        if column.title:
            return column.title
        at = f"{short_number(self.scale.length(column.factor))} ({column.factor:g}x)"
        names = {"context_gain": f"context gain at {at}", "far_accuracy": f"far keys at {at}"}
        reach = self.reach(column) if column.quantity == "accuracy" else None
        shown = names.get(column.quantity, at)
        return shown if reach is None else f"{shown}, {reach:.0f} % in reach"

    def reach(self, column: Column) -> float | None:
        """The share of the passkeys within a training length, which is the same for every run."""
        cells = (self.cell(row, replace(column, quantity="reach")) for row in self.table.rows)
        return next((cell.mean for cell in cells if cell.n), None)

    def _far_verdicts(self) -> list[str]:
        """What each model of an audit does with far context, by the rule of audit.py."""
        found: dict[str, list[str]] = {}
        for row, c in itertools.product(self.table.rows, self.table.columns):
            if c.quantity != "far_gain" or not (measured := self.measured(row, c)):
                continue
            options = {"lower_is_better": c.lower_is_better}
            options["margin"] = TASK_MARGIN if c.task else MARGIN
            gains = tuple(one.record.value for one in measured.values())
            options |= self.text_error(c, row)
            gain = Comparison(gains if None not in gains else (), **options)
            shares = [one.record.details.get("accuracy_at_near") for one in measured.values()]
            right = min((s for s in shares if isinstance(s, int | float)), default=1.0)
            found.setdefault(far_verdict(gain, right), []).append(row.title)
        named = ((verdict.capitalize(), "; ".join(titles)) for verdict, titles in found.items())
        return [f"{verdict}: {titles}." for verdict, titles in named]

    def _equations(self) -> list[str]:
        """The laws that symbolic regression found, in words."""
        columns, found = [c for c in self.table.columns if c.quantity == "constant"], []
        for row, column in itertools.product(self.table.rows, columns):
            for one in self.measured(row, column).values():
                listed = one.record.details.get("equations")
                laws = listed if isinstance(listed, list) else []
                whole = (law for law in laws if isinstance(law, dict) and "equation" in law)
                texts = [str(law["equation"]) for law in whole]
                engine = read_results(one.source).settings.get("engine", "symbolic regression")
                found += [f"{row.title}, by {engine}: {'; '.join(texts)}."] if texts else []
        return found

    def __str__(self) -> str:
        """For the terminal; the paper's values on a line below each row that has any."""
        body = []
        for line in self.lines:
            cells = [f"{e.text} {e.spread}".strip() for e in line.entries]
            mark = " *" if line.row.control else ""
            body.append([line.row.title + mark, *cells, str(line.seeds or "missing")])
            if any(e.paper is not None for e in line.entries):
                paper = ["" if e.paper is None else f"{e.paper:g}" for e in line.entries]
                body.append(["  the paper, at its own scale", *paper, ""])
        unit = f"{self.unit}; mean ±sd over seeds; * not in the paper"
        shown = text_table(["", *(title for _, title in self.columns), "seeds"], body)
        return f"\n{self.table.label}: {self.title} ({unit})\n{shown}"


def by_piece(found: list[Measured]) -> list[float]:
    """The mean over seeds of what was measured on each piece of text; empty where that is not
    recorded of all seeds."""
    kept = [one.record.details for one in found]
    lists = [details.get("segment_losses", details.get("by_block")) for details in kept]
    numbers = (isinstance(v, list) and all(isinstance(x, int | float) for x in v) for v in lists)
    if not lists or not all(numbers) or len(set(map(len, lists))) > 1:
        return []
    means = [statistics.fmean(values) for values in zip(*lists, strict=True)]
    return means if len(means) > 1 else []


def pieces_of(settings: dict) -> int:
    """Of an evaluation by segments; the fewest there can be where that is not recorded."""
    tokens, segment = settings.get("tokens"), settings.get("segment")
    known = isinstance(tokens, int) and isinstance(segment, int) and segment > 0
    return max(2, tokens // segment) if known else 2


def mechanism_of(run: dict) -> str:
    try:
        name = run["model"]["attention"]["name"]
    except (KeyError, TypeError):
        return ""
    return name if isinstance(name, str) else ""


def tolerance_of(printed: dict, column: Column, value: float) -> float | None:
    """Of a number of the paper: the table's or the column's; "10 %" is a share of the number."""
    found = printed["tolerance"]
    found = found[printed["columns"].index(column.paper)] if isinstance(found, list) else found
    return float(found[:-1]) / 100 * value if isinstance(found, str) else found


def fixed(value: float, decimals: int) -> str:
    tiny = 0 < abs(value) < 0.5 * 10**-decimals
    return f"{value:.2g}" if tiny or abs(value) >= 1e9 else f"{value:,.{decimals}f}"


_FIELDS = dict.fromkeys(("commit", "torch", "device", "status"), str) | {"config": dict}
_FIELDS |= dict.fromkeys(("seed", "threads", "tokens", "seconds", "loss"), int | float | None)


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
