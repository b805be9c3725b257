"""A table of the paper made of what was measured, for the terminal, the figures and the page."""

from dataclasses import dataclass
from pathlib import Path

from paper.evidence import Cell, Evidence, baseline
from paper.experiments import Column, Row, Table
from paper.statistic import Agreement, Comparison
from support.text import short_number
from support.text import table as text_table


@dataclass(frozen=True)
class Entry:
    """One cell: what was measured, what the paper prints, and how they stand to the baseline."""

    cell: Cell
    column: Column
    comparison: Comparison | None  # with the table's baseline; None for the baseline itself
    paper: float | None
    paper_gap: float | None
    agreement: Agreement | None
    decimals: int

    @property
    def text(self) -> str:
        if not self.cell.n:
            return ""
        if self.cell.mean is None:
            return "none" if self.column.quantity == "constant" else "overflow"
        return fixed(self.cell.mean, self.decimals)

    @property
    def spread(self) -> str:
        return "" if self.cell.sd is None else f"±{fixed(self.cell.sd, self.decimals)}"


@dataclass(frozen=True)
class Line:
    row: Row
    entries: list[Entry]
    missing: bool  # of some of its seeds, or of all

    @property
    def seeds(self) -> int:
        return max((entry.cell.n for entry in self.entries), default=0)


@dataclass(frozen=True)
class Built:
    table: Table
    title: str
    unit: str
    columns: list[tuple[Column, str]]  # with their headings
    lines: list[Line]
    notes: list[str]

    @property
    def measured(self) -> bool:
        return any(line.seeds for line in self.lines)


def build(evidence: Evidence, table: Table) -> Built:
    """The columns and, of controls, the rows that have a number; every row of the paper."""
    columns = [c for c in table.columns if not c.title or _any(evidence, table, column=c)]
    rows = [r for r in table.rows if not r.control or _any(evidence, table, row=r)]
    lines = []
    for row in rows:
        entries = [entry(evidence, table, row, column) for column in columns]
        missing = any(evidence.is_missing(table, row, column) for column in columns)
        lines.append(Line(row, entries, missing))
    paper = evidence.paper[table.label]
    unit = evidence.scale.unit if paper["unit"] == "nats per token" else paper["unit"]
    return Built(
        *(table, table.title or paper["title"], unit),
        [(c, heading(evidence, table, c)) for c in columns],
        lines,
        [*table.notes, *equations(evidence, table)],
    )


def _any(evidence: Evidence, table: Table, row: Row | None = None, column: Column | None = None):
    return any(
        evidence.cell(table, r, c).n
        for r in ([row] if row else table.rows)
        for c in ([column] if column else table.columns)
    )


def entry(evidence: Evidence, table: Table, row: Row, column: Column) -> Entry:
    base, paper = baseline(table), evidence.printed(table, row, column)
    theirs = base and evidence.printed(table, base, column)
    known = base is not None and base is not row
    return Entry(
        cell=evidence.cell(table, row, column),
        column=column,
        comparison=evidence.compare(table, row, base, column) if known else None,
        paper=paper,
        paper_gap=paper - theirs if known and None not in (paper, theirs) else None,
        agreement=evidence.agreement(table, row, column),
        decimals=decimals_of(evidence, table, column),
    )


def decimals_of(evidence: Evidence, table: Table, column: Column) -> int:
    values = [
        abs(v) for row in table.rows for v in evidence.cell(table, row, column).values.values() if v
    ]
    if column.percent:
        return 0 if all(v == int(v) for v in values) else 1
    return 3 if max(values, default=0) < 20 else 1


def fixed(value: float, decimals: int) -> str:
    if abs(value) >= 1e9:
        return f"{value:.4g}"
    return f"{value:,.{decimals}f}"


def heading(evidence: Evidence, table: Table, column: Column) -> str:
    if column.title:
        return column.title
    length = f"{short_number(evidence.length(table, column))} ({column.factor:g}x)"
    return f"context gain at {length}" if column.quantity == "context_gain" else length


def equations(evidence: Evidence, table: Table) -> list[str]:
    """The laws that symbolic regression found, in words."""
    column = next((c for c in table.columns if c.quantity == "constant"), None)
    found = []
    for row in table.rows if column else ():
        for one in evidence.measured(table, row, column).values():
            listed = one.record.details.get("equations")
            listed = listed if isinstance(listed, list) else []
            texts = [str(e["equation"]) for e in listed if isinstance(e, dict) and "equation" in e]
            found += [f"{row.title}: {'; '.join(texts)}."] if texts else []
    return found


SCRIPTS = {
    "headline": "scripts/reproduce_all.sh",
    "p_sweep": "scripts/figure_p_sweep.sh",
    "passkey": "scripts/figure_passkey.sh",
    "pi_passkey": "scripts/table_pi.sh",
    "adaptive_p": "scripts/figure_adaptive_p.sh",
    "attention_maps": "scripts/figure_attention_maps.sh",
    "scaling_edu": "scripts/scaling_edu.sh",
    "scaling_edu_passkey": "scripts/scaling_edu.sh",
    "downstream_edu": "scripts/table_downstream.sh",
    "symbolic_regression": "scripts/table_physics.sh",
}


def script_of(name: str) -> str:
    return SCRIPTS.get(name, f"scripts/table_{name}.sh")


def pictures_of(evidence: Evidence, table: Table) -> list[Path]:
    return sorted(evidence.folder.glob(table.pictures)) if table.pictures else []


# --- for the terminal ----------------------------------------------------------------------------


def show(built: Built) -> str:
    """The table as text; the paper's values in a line of their own under each row that has any."""
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
