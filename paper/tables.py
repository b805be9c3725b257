"""A table of the paper built from what was measured, for the terminal, the figures and the page."""

import itertools
from dataclasses import replace
from typing import NamedTuple

from paper.evidence import Cell, Evidence
from paper.experiments import Column, Row, Table
from paper.statistic import Agreement, Comparison, agreement, direction
from support.text import short_number
from support.text import table as text_table

# What a value that is None means; elsewhere it overflowed.
NO_VALUE = {"constant": "none", "cosine_needed": "impossible"}


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
        return fixed(self.cell.mean, self.decimals) if self.cell.n else ""

    @property
    def spread(self) -> str:
        return "" if self.cell.sd is None else f"±{self.cell.sd:,.{self.decimals}f}"


class Line(NamedTuple):
    row: Row
    entries: list[Entry]
    missing: bool  # some of its seeds, or all

    @property
    def seeds(self) -> int:
        return max((entry.cell.n for entry in self.entries), default=0)

    @property
    def mechanism(self) -> str:
        return next((entry.cell.mechanism for entry in self.entries if entry.cell.n), "")


class Built(NamedTuple):
    table: Table
    title: str
    unit: str
    tolerance: str  # of the paper's numbers, and why that much; empty: none
    columns: list[tuple[Column, str]]  # with their headings
    lines: list[Line]
    notes: list[str]

    @property
    def measured(self) -> bool:
        return any(line.seeds for line in self.lines)


def build(evidence: Evidence, table: Table) -> Built:
    """All rows of the paper; titled columns and controls only where they have a number."""

    def measured(rows, columns) -> bool:
        return any(evidence.cell(table, row, column).n for row in rows for column in columns)

    columns = [c for c in table.columns if not c.title or measured(table.rows, [c])]
    lines = []
    for row in table.rows:
        if not row.control or measured([row], table.columns):
            entries = [entry(evidence, table, row, column) for column in columns]
            missing = [evidence.is_missing(table, row, column) for column in columns]
            # What was computed once need not fill every column.
            lines.append(Line(row, entries, any(missing) if table.runs else all(missing)))
    paper = evidence.paper[table.label]
    unit = evidence.scale.unit if paper["unit"] == "nats per token" else paper["unit"]
    headings = [(c, heading(evidence, table, c)) for c in columns]
    notes = [*table.notes, *equations(evidence, table)]
    given = paper["tolerance"] if isinstance(paper["tolerance"], list) else [paper["tolerance"]]
    tolerance = "" if given == [None] else f"{', '.join(map(str, given))} ({paper['reason']})"
    title = table.title or paper["title"]
    return Built(table, title, unit, tolerance, headings, lines, notes)


def entry(evidence: Evidence, table: Table, row: Row, column: Column) -> Entry:
    cell, paper = evidence.cell(table, row, column), evidence.printed(table, row, column)
    comparison = gap = agrees = None
    if table.base not in (None, row):
        comparison = evidence.compare(table, row, table.base, column)
        gap = evidence.printed_gap(table, row, table.base, column)
    if None not in (paper, cell.mean):
        tolerance = tolerance_of(evidence.paper[table.label], column, paper)
        if evidence.scale.name == "paper":
            agrees = agreement(cell.mean, paper, tolerance)
        elif gap is not None:
            agrees = direction(comparison, gap, tolerance)
    decimals = decimals_of(evidence, table, column)
    return Entry(cell, column, decimals, paper, comparison, gap, agrees)


def tolerance_of(printed: dict, column: Column, value: float) -> float | None:
    """Of a number of the paper: the table's or the column's; "10 %" is a share of the number."""
    found = printed["tolerance"]
    found = found[printed["columns"].index(column.paper)] if isinstance(found, list) else found
    return float(found[:-1]) / 100 * value if isinstance(found, str) else found


def decimals_of(evidence: Evidence, table: Table, column: Column) -> int:
    cells = (evidence.cell(table, row, column) for row in table.rows)
    values = [abs(v) for cell in cells for v in cell.values.values() if v]
    if column.percent:
        return 0 if all(v == int(v) for v in values) else 1
    return 3 if max(values, default=0) < 20 else 1


def fixed(value: float, decimals: int) -> str:
    tiny = 0 < abs(value) < 0.5 * 10**-decimals
    return f"{value:.2g}" if tiny or abs(value) >= 1e9 else f"{value:,.{decimals}f}"


def heading(evidence: Evidence, table: Table, column: Column) -> str:
    if column.title:
        return column.title
    length = f"{short_number(evidence.scale.length(column.factor))} ({column.factor:g}x)"
    named = {"context_gain": f"context gain at {length}", "far_accuracy": f"far keys at {length}"}
    if column.quantity != "accuracy":
        return named.get(column.quantity, length)
    reach = reach_of(evidence, table, column)
    return length if reach is None else f"{length}, {reach:.0f} % in reach"


def reach_of(evidence: Evidence, table: Table, column: Column) -> float | None:
    """The share of the passkeys within a training length, which is the same for every run."""
    cells = (evidence.cell(table, row, replace(column, quantity="reach")) for row in table.rows)
    return next((cell.mean for cell in cells if cell.n), None)


def equations(evidence: Evidence, table: Table) -> list[str]:
    """The laws that symbolic regression found, in words."""
    columns, found = [c for c in table.columns if c.quantity == "constant"], []
    for row, column in itertools.product(table.rows, columns):
        for one in evidence.measured(table, row, column).values():
            listed = one.record.details.get("equations")
            laws = [x for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
            texts = [str(law["equation"]) for law in laws if "equation" in law]
            found += [f"{row.title}: {'; '.join(texts)}."] if texts else []
    return found


def show(built: Built) -> str:
    """The table for the terminal; the paper's values on a line below each row that has any."""
    header = ["", *(title for _, title in built.columns), "seeds"]
    body = []
    for line in built.lines:
        cells = [f"{e.text} {e.spread}".strip() for e in line.entries]
        mark = " *" if line.row.control else ""
        body.append([line.row.title + mark, *cells, str(line.seeds or "missing")])
        if any(e.paper is not None for e in line.entries):
            paper = ["" if e.paper is None else f"{e.paper:g}" for e in line.entries]
            body.append(["  the paper, at its own scale", *paper, ""])
    unit = f"{built.unit}; mean ±sd over seeds; * not in the paper"
    return f"\n{built.table.label}: {built.title} ({unit})\n{text_table(header, body)}"
