"""Fills a table with records: record -> cell -> Markdown, figure, page.

results/SCALE/TABLE.json has the records of a table, in the schema of evaluating/results.py. Its
`runs` give every model's key in runs.toml, its seed and the commit that trained it; a record gives
the commit that measured it.
"""

import statistics
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

from evaluating.results import Record, Results, read_results
from evaluating.statistic import Interval, interval, signed
from lssar.errors import UserError
from paper.experiments import SCALES, Column, Row, Table, all_tables, paper_numbers
from support.text import short_number
from support.text import table as text_table

LARGEST = 1e12  # anything beyond is no result, and would flatten all others in a figure
# The meaning of a value that is None; elsewhere it overflowed.
NO_VALUE = {"constant": "none", "cosine_needed": "impossible"}
SIGNED = ("far_context_benefit", "benefit_by_distance", "far_benefit")


@dataclass(frozen=True)
class Cell:
    """Holds one number of a table: its values by seed, and the paper's value."""

    values: dict[int | None, float | None] = field(default_factory=dict)  # by seed
    segments: dict[int | None, list[float]] = field(default_factory=dict)  # by seed: of each piece
    paper: float | None = None
    mechanism: str = ""  # decides the colour
    rate: float | None = None  # the learning rate of its runs
    commits: frozenset[tuple[str, str]] = frozenset()  # (of training, of evaluation)

    @property
    def n(self) -> int:
        """Return the number of seeds."""
        return len(self.values)

    @property
    def finite(self) -> bool:
        """Tell whether there is a value, and none overflowed."""
        return self.n > 0 and None not in self.values.values()

    @property
    def mean(self) -> float | None:
        """Return the mean over seeds; None if one overflowed."""
        return statistics.fmean(self.values.values()) if self.finite else None

    @property
    def half_width(self) -> float | None:
        """Return half of the mean's 95 % interval over seeds; None below two."""
        return interval(list(self.values.values())).half_width if self.finite else None


def compare(first: Cell, second: Cell, factor: float = 1.0) -> Interval | None:
    """Return first - factor * second, paired by seed, with its interval over seeds and text.

    Return None if no seed is shared or a shared seed overflowed: dropping it would keep only the
    runs that went well. A factor of 1.04 asks whether `first` rose by less than 4 %: the result is
    then below zero.
    """
    seeds = [seed for seed in first.values if seed in second.values]
    pairs = [(first.values[seed], second.values[seed]) for seed in seeds]
    if not pairs or any(None in pair for pair in pairs):
        return None
    by_seed = [a - factor * b for a, b in pairs]
    pieces = []  # of every seed: the difference on each piece of text
    for seed in seeds:
        a = first.segments.get(seed, [])
        b = second.segments.get(seed, [])
        if not a or len(a) != len(b):
            return interval(by_seed)
        pieces.append([x - factor * y for x, y in zip(a, b, strict=True)])
    if len({len(one) for one in pieces}) > 1:
        return interval(by_seed)
    return interval(by_seed, [statistics.fmean(values) for values in zip(*pieces, strict=True)])


class FilledTable:
    """Holds a table with its cells; controls and titled columns only where they have a number."""

    def __init__(self, table: Table, scale: str, results: Results | None):
        self.table = table
        self.scale = SCALES[scale]
        self._found: dict[tuple, list[tuple[dict, Record]]] = {}
        for record in results.records if results else ():
            run = results.runs[record.run]
            place = (run_key(run), record.quantity, record.variant, record.task, record.length)
            self._found.setdefault(place, []).append((run, record))
        self.cell = cache(self._cell)
        self.rows = []
        for row in table.rows:
            if not row.control or self._has_number([row], table.columns):
                self.rows.append(row)
        self.columns = []
        for column in table.columns:
            if not column.title or self._has_number(table.rows, [column]):
                self.columns.append(column)

    @property
    def is_measured(self) -> bool:
        """Tell whether there is any number."""
        return self._has_number(self.table.rows, self.table.columns)

    def _has_number(self, rows, columns) -> bool:
        return any(self.cell(row, column).n for row in rows for column in columns)

    def _records(self, row: Row, column: Column) -> list[tuple[dict, Record]]:
        """Return (run, record) of a cell; without a length, those at the longest length."""
        variant = row.variant_at(self.scale.train_length)
        place = (column.run(row.run), column.quantity, variant, column.task)
        length = self.scale.length(column.factor)
        if length is not None:
            return self._found.get((*place, length), [])
        lengths = [key[-1] for key in self._found if key[:-1] == place]
        longest = max(lengths, key=lambda n: n or 0, default=None)
        return self._found.get((*place, longest), [])

    def _cell(self, row: Row, column: Column) -> Cell:
        scale = 100 if column.percent else 1
        values = {}
        segments = {}
        commits = set()
        mechanism = ""
        rate = None
        for run, record in self._records(row, column):
            seed = run.get("seed")
            sound = record.value is not None and abs(record.value) < LARGEST
            values[seed] = scale * record.value if sound else None
            segments[seed] = segments_of(record, scale)
            commits.add((str(run.get("trained_at", "")), record.revision))
            mechanism = mechanism or mechanism_of(run)
            rate = rate or run.get("lr")
        by_seed = {seed: values[seed] for seed in sorted(values, key=lambda seed: seed or 0)}
        paper = self.printed(row, column)
        return Cell(by_seed, segments, paper, mechanism, rate, frozenset(commits))

    def printed(self, row: Row, column: Column) -> float | None:
        """Return the number that the paper prints; None where it has none."""
        paper = paper_numbers().get(self.table.label)
        if paper is None or row.key not in paper["rows"] or column.paper not in paper["columns"]:
            return None
        return paper["rows"][row.key][paper["columns"].index(column.paper)]

    def difference(self, row: Row, column: Column) -> Interval | None:
        """Return the row's difference from the table's baseline, None for the baseline itself."""
        base = self.table.base
        if base is None or row.key == base.key:
            return None
        return compare(self.cell(row, column), self.cell(base, column))

    def missing(self, row: Row) -> bool:
        """Tell whether some of the row's seeds are still to be measured."""
        if not self.table.has_runs:
            return self.seeds(row) == 0
        for column in self.columns:
            wanted = self.scale.seeds_of(column.run(row.run))
            if self.cell(row, column).n < len(wanted):
                return True
        return False

    def seeds(self, row: Row) -> int:
        """Return the number of seeds of a row."""
        return max((self.cell(row, column).n for column in self.columns), default=0)

    def rate(self, row: Row) -> str:
        """Write the learning rate of a row's runs."""
        rates = {self.cell(row, column).rate for column in self.columns} - {None}
        return ", ".join(f"{rate:g}" for rate in sorted(rates))

    def about_runs(self, row: Row) -> list[str]:
        """Return the last columns of a row: its rate, if rows differ in it, and its seeds."""
        seeds = str(self.seeds(row) or "missing")
        return [self.rate(row), seeds] if self.rates_differ else [seeds]

    @property
    def rates_differ(self) -> bool:
        """Tell whether the rows were trained with different learning rates."""
        return len({self.rate(row) for row in self.rows} - {""}) > 1

    def header(self) -> list[str]:
        """Return the headings of all columns."""
        last = ["rate", "seeds"] if self.rates_differ else ["seeds"]
        return ["", *map(self.heading, self.columns), *last]

    def heading(self, column: Column) -> str:
        """Return the heading of a column of numbers."""
        if column.title:
            return column.title
        at = f"{short_number(self.scale.length(column.factor))} ({column.factor:g}x)"
        if column.quantity == "far_context_benefit":
            return f"far-context benefit at {at}"
        if column.quantity == "far_accuracy":
            return f"far keys at {at}"
        reach = self.reach(column) if column.quantity == "accuracy" else None
        return at if reach is None else f"{at}, {reach:.0f} % in reach"

    def reach(self, column: Column) -> float | None:
        """Return the share of the passkeys within a training length, the same for every run."""
        asked = Column(column.factor, "reach", percent=True)
        cells = (self.cell(row, asked) for row in self.table.rows)
        return next((cell.mean for cell in cells if cell.n), None)

    def decimals(self, column: Column) -> int:
        """Return how many digits the column shows after the point."""
        cells = (self.cell(row, column) for row in self.rows)
        values = [abs(v) for cell in cells for v in cell.values.values() if v]
        if column.percent:
            return 0 if all(v == int(v) for v in values) else 1
        return 3 if max(values, default=0) < 20 else 1

    def shown(self, row: Row, column: Column) -> str:
        """Write the mean and half of its 95 % interval."""
        cell = self.cell(row, column)
        decimals = self.decimals(column)
        if not cell.n:
            return ""
        if not cell.finite:
            return NO_VALUE.get(column.quantity, "overflow")
        if column.quantity in SIGNED:
            text = signed(cell.mean, decimals)
        elif 0 < abs(cell.mean) < 0.5 * 10**-decimals or abs(cell.mean) >= 1e9:
            text = f"{cell.mean:.2g}"
        else:
            text = f"{cell.mean:,.{decimals}f}"
        return text if cell.half_width is None else f"{text} ±{cell.half_width:,.{decimals}f}"

    def commits(self) -> list[tuple[str, str]]:
        """Return the commits of training and of evaluation of all cells, shortened."""
        found = set()
        for row, column in product(self.rows, self.columns):
            for trained, evaluated in self.cell(row, column).commits:
                found.add((short_commit(trained), short_commit(evaluated)))
        return sorted(found)

    def caption(self) -> str:
        """Say the unit, what ± means, and which commits made the numbers."""
        unit = f"{self.table.unit}; mean ± half of the 95 % interval over seeds"
        made = [f"trained at {a or 'no commit'}, evaluated at {b}" for a, b in self.commits()]
        return "; ".join([unit, *made])

    def text(self) -> str:
        """Return the table for the terminal; the paper's values stand below each row."""
        body = []
        for row in self.rows:
            cells = [self.shown(row, column) for column in self.columns]
            mark = " *" if row.control else ""
            last = self.about_runs(row)
            body.append([row.title + mark, *cells, *last])
            printed = [self.printed(row, column) for column in self.columns]
            if any(value is not None for value in printed):
                shown = ["" if value is None else f"{value:g}" for value in printed]
                body.append(["  the paper, at its own scale", *shown, *[""] * len(last)])
        title = f"\n{self.table.label}: {self.table.title} ({self.caption()}; * not in the paper)"
        return f"{title}\n{text_table(self.header(), body)}"

    def markdown(self) -> str:
        """Return the table for README and docs."""
        header = self.header()
        lines = [header, ["---"] * len(header)]
        for row in self.rows:
            cells = [self.shown(row, column) for column in self.columns]
            lines.append([row.title, *cells, *self.about_runs(row)])
        drawn = [f"| {' | '.join(line)} |" for line in lines]
        source = f"`python reproduce.py {self.table.name} --scale {self.scale.name}`"
        return "\n".join([*drawn, "", f"*{self.caption()} ({source}).*"])


def run_key(run: dict) -> str:
    """Return a run's name without its seed, which is a field of its own."""
    return run["run"].removesuffix(f"-s{run.get('seed')}")


def short_commit(commit: str) -> str:
    """Shorten a commit's name; a + at its end, for uncommitted changes, stays."""
    return commit[:7] + ("+" if commit.endswith("+") else "")


def mechanism_of(run: dict) -> str:
    """Return the name of a run's mechanism; empty where it has none."""
    attention = run.get("model", {}).get("attention", {}) if isinstance(run, dict) else {}
    name = attention.get("name") if isinstance(attention, dict) else None
    return name if isinstance(name, str) else ""


def segments_of(record: Record, scale: float) -> list[float]:
    """Return the value of each piece of text; empty where they are not recorded or overflowed."""
    values = record.details.get("by_segment", [])
    if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        return []
    return [scale * value for value in values]


def fill_all(scale: str, folder: Path) -> tuple[dict[str, FilledTable], dict[Path, str]]:
    """Fill every table of a scale; also return which files could not be read, and why."""
    filled = {}
    problems = {}
    for name, table in all_tables(scale).items():
        path = folder / f"{table.records or name}.json"
        try:
            results = read_results(path) if path.exists() else None
        except UserError as error:
            problems[path] = str(error).removesuffix("; give another --out")
            results = None
        filled[name] = FilledTable(table, scale, results)
    return filled, problems
