"""How a claim becomes a verdict: which comparisons it asks for, and what keeps it open.

The comparisons come from `evidence.py`, as those of tables, figures and page do, and are judged by
`statistic.py` alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paper.evidence import Evidence
from paper.experiments import Column, Row, Table
from paper.runs import HEADLINE, SWEPT_P
from paper.statistic import BETTER, OPEN, WORSE, Comparison, compare, judge, settles, signed
from paper.tables import decimals_of, heading


@dataclass(frozen=True)
class Pair:
    """Row `row` is better or worse than, or as good as, row `other`.

    `at` are lengths over the training length, or quantities of tables without lengths.
    """

    row: str
    wanted: str
    other: str
    at: tuple[float | str, ...] = (1,)


@dataclass(frozen=True)
class Point:
    """One comparison of a claim."""

    label: str
    wanted: str
    found: Comparison
    decimals: int = 3
    paper: float | None = None  # the paper's own difference

    @property
    def text(self) -> str:
        if self.found.mean is None:
            return f"{self.label}: not measured"
        paper = "" if self.paper is None else f"; paper {signed(self.paper, self.decimals)}"
        seeds = f"{self.found.n} seeds" if self.found.n > 1 else "one seed"
        return f"{self.label}: {self.found.text(self.decimals)}, {seeds}{paper}"


Rule = Callable[[Evidence, Table], list[Point]]


@dataclass(frozen=True)
class Claim:
    text: str  # the paper's own words; ours where `where` is empty
    where: str
    table: str
    pairs: tuple[Pair, ...] = ()
    rule: Rule | None = None  # where pairs do not do
    caveat: Callable[[Evidence, Table], str] | None = None  # why it stays open, if it does


@dataclass(frozen=True)
class Judged:
    claim: Claim
    verdict: str
    points: list[Point]
    settles: str  # what would settle an open one


def judged(claim: Claim, evidence: Evidence) -> Judged:
    table = evidence.tables[claim.table]
    points = claim.rule(evidence, table) if claim.rule else of_pairs(claim.pairs, evidence, table)
    found = [(point.found, point.wanted) for point in points]
    measured = any(point.found.n for point in points)
    caveat = claim.caveat(evidence, table) if claim.caveat and measured else ""
    verdict = OPEN if caveat else judge(found)
    return Judged(claim, verdict, points, (caveat or settles(found)) if verdict == OPEN else "")


def of_pairs(pairs: tuple[Pair, ...], evidence: Evidence, table: Table) -> list[Point]:
    rows = {row.key: row for row in table.rows}
    return [
        of_rows(evidence, table, rows[pair.row], pair.wanted, rows[pair.other], column)
        for pair in pairs
        if pair.row in rows and pair.other in rows
        for column in columns_at(evidence, table, pair.at)
    ]


def columns_at(evidence: Evidence, table: Table, at: tuple) -> list[Column]:
    found = [c for c in table.columns if (c.factor if c.quantity in LENGTHS else c.quantity) in at]
    return [c for c in found if not c.task or evidence.cell(table, table.rows[0], c).n]


LENGTHS = ("loss", "accuracy")  # quantities that a length tells apart


def of_rows(
    evidence: Evidence, table: Table, row: Row, wanted: str, other: Row, column: Column
) -> Point:
    ours, theirs = (evidence.printed(table, r, column) for r in (row, other))
    return Point(
        f"{row.title} − {other.title}, {heading(evidence, table, column)}",
        wanted,
        evidence.compare(table, row, other, column),
        decimals_of(evidence, table, column),
        None if None in (ours, theirs) else ours - theirs,
    )


# --- rules that are no comparison of two rows ----------------------------------------------------


def values_of(evidence: Evidence, table: Table, key: str, factor: float, quantity: str = "loss"):
    row = next(r for r in table.rows if r.key == key)
    columns = [c for c in table.columns if (c.factor, c.quantity) == (factor, quantity)]
    return evidence.cell(table, row, columns[0]).values


# The paper's LSSAR goes from 3.1905 to 3.45: what it calls nearly constant is a rise by 8 %.
NEARLY = 3.45 / 3.1905


def nearly_constant(key: str) -> Rule:
    def rule(evidence: Evidence, table: Table) -> list[Point]:
        near, far = (values_of(evidence, table, key, factor) for factor in (1, 16))
        allowed = {seed: v and NEARLY * v for seed, v in near.items()}
        label = f"loss at 16x − {NEARLY:.2f} times the loss at 1x (the paper's own rise)"
        return [Point(label, BETTER, compare(far, allowed))]

    return rule


def far_context_harms(evidence: Evidence, table: Table) -> list[Point]:
    points = []
    for row in table.rows:
        if row.key in HEADLINE:
            gains = values_of(evidence, table, row.key, 16, "context_gain")
            found = compare(gains, dict.fromkeys(gains, 0.0))
            points.append(Point(f"{row.title}, context gain at 16x", WORSE, found))
    return points


def edge_of_the_sweep(evidence: Evidence, table: Table) -> str:
    cells = {p: values_of(evidence, table, f"lssar-p{p}", 16) for p in SWEPT_P}
    shared = {p: values[0] for p, values in cells.items() if values.get(0) is not None}
    best = min(shared, key=shared.get) if shared else None
    if best not in (SWEPT_P[0], SWEPT_P[-1]):
        return ""
    return f"the best exponent here, p = {best}, is the edge of the sweep: others were not tried"


def unequal_budgets(evidence: Evidence, table: Table) -> str:
    if evidence.scale.name != "nano":
        return ""
    return (
        "LSSAR was trained for 10,000 steps and softmax for 5,000, one seed each: equal budgets "
        "and more seeds would settle it"
    )


def no_sink(evidence: Evidence, table: Table) -> str:
    row = next(r for r in table.rows if r.key == "softmax")
    sink = evidence.cell(table, row, table.columns[0]).mean
    if sink is None or sink >= 0.1:
        return ""
    return f"softmax has no sink here (mean weight on token 1 {sink:.3f}): a larger scale"


def constant_found(evidence: Evidence, table: Table) -> list[Point]:
    """1 where symbolic regression found a law of Newton's form, else 0."""
    rows = {row.key: row for row in table.rows}
    known = {
        key: evidence.cell(table, rows[key], table.columns[0]).values
        for key in ("lssar", "softmax")
    }
    as_share = {k: {s: float(v is not None) for s, v in cell.items()} for k, cell in known.items()}
    found = compare(as_share["lssar"], as_share["softmax"], lower_is_better=False)
    return [Point("law of the form m1 / r^2 found (1) or not (0), LSSAR − Softmax", BETTER, found)]
