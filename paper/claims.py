"""How a claim becomes a verdict: which comparisons it asks for, and what keeps it open.

The claims are in claims.toml. Comparisons come from `evidence.py`, as those of tables, figures and
page do, and are judged by `statistic.py` alone.
"""

import re
import textwrap
from dataclasses import dataclass, field
from typing import NamedTuple

from paper.evidence import Evidence
from paper.experiments import SWEPT_P, Table, load_toml
from paper.statistic import BETTER, OPEN, WORSE, BySeed, Comparison, compare, judge, settles, signed
from paper.tables import decimals_of, heading

COMPARISON = re.compile(r"(.+) (better|worse|as good) (?:than|as) (.+) at (.+)")
# The paper's LSSAR goes from 3.1905 to 3.45: what it calls nearly constant is a rise by 8 %.
NEARLY = 3.45 / 3.1905


@dataclass(frozen=True)
class Claim:
    """An entry of claims.toml."""

    text: str
    table: str
    where: str = ""
    compare: tuple[str, ...] = ()
    rule: str = ""
    caveat: str = ""
    open: dict[str, str] = field(default_factory=dict)
    finding: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[str, str, str, list[float | str]]]:
        """(row, "better", "worse" or "as good", other row, lengths or quantities)"""
        found = []
        for sentence in self.compare:
            rows, wanted, others, places = COMPARISON.fullmatch(sentence).groups()
            at = [float(p) if p[0].isdigit() else p for p in places.split(", ")]
            for row in rows.split(", "):
                found += [(row, wanted, other, at) for other in others.split(", ")]
        return found


class Point(NamedTuple):
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


class Judged(NamedTuple):
    claim: Claim
    verdict: str
    points: list[Point]
    settles: str  # what would settle an open one


def judged(claim: Claim, evidence: Evidence) -> Judged:
    table, caveat = evidence.tables[claim.table], ""
    points = RULES[claim.rule](evidence, table) if claim.rule else of_pairs(claim, evidence, table)
    if any(point.found.n for point in points):
        caveat = claim.open.get(evidence.scale.name, "")
        caveat = CAVEATS[claim.caveat](evidence, table) if claim.caveat else caveat
    found = [(point.found, point.wanted) for point in points]
    verdict = OPEN if caveat else judge(found)
    return Judged(claim, verdict, points, (caveat or settles(found)) if verdict == OPEN else "")


def of_pairs(claim: Claim, evidence: Evidence, table: Table) -> list[Point]:
    points = []
    for key, wanted, other_key, at in claim.pairs:
        row, other = table.row(key), table.row(other_key)
        for column in table.columns if row and other else ():
            place = column.factor if column.quantity in ("loss", "accuracy") else column.quantity
            if place in at and (not column.task or evidence.cell(table, table.rows[0], column).n):
                paper = evidence.printed_gap(table, row, other, column)
                label = f"{row.title} − {other.title}, {heading(evidence, table, column)}"
                found = evidence.compare(table, row, other, column)
                decimals = decimals_of(evidence, table, column)
                points.append(Point(label, wanted, found, decimals, paper))
    return points


def values_of(evidence: Evidence, table: Table, key: str, factor, quantity="loss") -> BySeed:
    column = next(c for c in table.columns if (c.factor, c.quantity) == (factor, quantity))
    return evidence.cell(table, table.row(key), column).values


def nearly_constant(evidence: Evidence, table: Table) -> list[Point]:
    near, far = (values_of(evidence, table, "lssar-p15", factor) for factor in (1, 16))
    allowed = {seed: v and NEARLY * v for seed, v in near.items()}
    label = f"loss at 16x − {NEARLY:.2f} times the loss at 1x (the paper's own rise)"
    return [Point(label, BETTER, compare(far, allowed))]


def far_context_harms(evidence: Evidence, table: Table) -> list[Point]:
    points = []
    for row in (row for row in table.rows if not row.control):
        gains = values_of(evidence, table, row.key, 16, "context_gain")
        found = compare(gains, dict.fromkeys(gains, 0.0))
        points.append(Point(f"{row.title}, context gain at 16x", WORSE, found))
    return points


def constant_found(evidence: Evidence, table: Table) -> list[Point]:
    """1 where symbolic regression found a law of Newton's form, else 0."""
    found = []
    for key in ("lssar", "softmax"):
        constants = values_of(evidence, table, key, None, "constant")
        found.append({seed: float(value is not None) for seed, value in constants.items()})
    label = "law of the form m1 / r^2 found (1) or not (0), LSSAR − Softmax"
    return [Point(label, BETTER, compare(*found, lower_is_better=False))]


def edge_of_the_sweep(evidence: Evidence, table: Table) -> str:
    cells = {p: values_of(evidence, table, f"lssar-p{p}", 16) for p in SWEPT_P}
    shared = {p: values[0] for p, values in cells.items() if values.get(0) is not None}
    best = min(shared, key=shared.get) if shared else None
    if best not in (SWEPT_P[0], SWEPT_P[-1]):
        return ""
    return f"the best exponent here, p = {best}, is the edge of the sweep: others were not tried"


def no_sink(evidence: Evidence, table: Table) -> str:
    sink = evidence.cell(table, table.row("softmax"), table.columns[0]).mean
    if sink is None or sink >= 0.1:
        return ""
    here = f"softmax has no sink here (mean weight on token 1 {sink:.3f})"
    return f"{here}: a larger scale would settle it"


RULES = {f.__name__: f for f in (nearly_constant, far_context_harms, constant_found)}
CAVEATS = {f.__name__: f for f in (edge_of_the_sweep, no_sink)}
DATA = load_toml("claims.toml")
PAPER_CLAIMS, OUR_CONTROLS = ([Claim(**c) for c in DATA[key]] for key in ("paper", "controls"))


def judge_all(evidence: Evidence) -> tuple[list[Judged], list[Judged]]:
    """The paper's claims and our controls, but for those of a table that the scale has not."""
    return tuple(
        [judged(c, evidence) for c in group if c.table in evidence.tables]
        for group in (PAPER_CLAIMS, OUR_CONTROLS)
    )


def findings(evidence: Evidence) -> list[str]:
    """What was found, by the same judgements; nothing where nothing was measured."""
    sentences = []
    for found in (j for group in judge_all(evidence) for j in group if j.claim.finding):
        if all(point.found.n for point in found.points):
            closest = min(found.points, key=lambda point: abs(point.found.mean))
            sentences.append(f"{found.claim.finding[found.verdict]} ({closest.text}).")
    return sentences


def show_claims(evidence: Evidence) -> str:
    """Every claim with its verdict, and what would settle an open one, for the terminal."""
    lines, (claims, controls) = [], judge_all(evidence)
    for title, group in {"the paper's claims": claims, "our controls": controls}.items():
        lines.append(f"\n{title}")
        for found in group:
            text = textwrap.shorten(found.claim.text, 84, placeholder=" …")
            lines.append(f"  {found.verdict:14s} {text}")
            lines += [f"{'':17s}{found.settles}"] if found.settles else []
    return "\n".join(lines)
