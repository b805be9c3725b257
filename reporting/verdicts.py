"""How a measured number is judged against the paper's; the rules are printed on the page.

At paper scale the numbers themselves are compared: |measured - paper| <= tolerance. At any other
scale they belong to another data set, and what is compared is the direction of a row's gap to the
table's baseline row in the same column, where both gaps are larger than their noise.
"""

import math
from dataclasses import dataclass

from reporting.records import Cell, Row, Table

PAPER_SCALE = "paper"

GOOD, BAD, NOISE, OPEN = "good", "bad", "noise", "open"  # OPEN: there is nothing to judge


@dataclass(frozen=True)
class Verdict:
    kind: str
    text: str
    difference: float | None = None  # paper scale: to the paper; elsewhere: to the baseline
    paper_difference: float | None = None  # the paper's own gap to its baseline


def judge(table: Table, row: Row, column: int) -> Verdict:
    cell, paper = row.measured[column], row.paper[column]
    if cell is None:
        return Verdict(OPEN, "no number")
    if cell.mean is None:
        return Verdict(BAD if paper is not None else OPEN, "not finite")
    if table.scale == PAPER_SCALE:
        return judge_value(cell.mean, paper, table.tolerance)
    return judge_direction(table, row, column)


def judge_value(measured: float, paper: float | None, tolerance: float | None) -> Verdict:
    if paper is None:
        return Verdict(OPEN, "not in the paper")
    difference = measured - paper
    if tolerance is None:
        return Verdict(OPEN, "no tolerance stated", difference)
    # 3.21 - 3.19 is 0.02 to a reader, whatever binary fractions make of it.
    if abs(difference) <= tolerance + 1e-9:
        return Verdict(GOOD, "reproduced", difference)
    return Verdict(BAD, f"differs by {signed(difference)}", difference)


def judge_direction(table: Table, row: Row, column: int) -> Verdict:
    baseline = table.baseline_row()
    if baseline is None:
        return Verdict(OPEN, "not in the paper" if row.paper[column] is None else "no baseline")
    if row is baseline:
        return Verdict(OPEN, "baseline")
    base, paper_base = baseline.measured[column], baseline.paper[column]
    if base is None or base.mean is None:
        return Verdict(OPEN, "baseline not measured")
    cell, paper = row.measured[column], row.paper[column]
    gap = cell.mean - base.mean
    if paper is None or paper_base is None:
        return Verdict(OPEN, "not in the paper", gap)
    paper_gap = paper - paper_base
    single = table.noise_of(column)
    if is_noise(gap, measured_noise(cell, base, single)) or is_noise(paper_gap, single):
        return Verdict(NOISE, "within noise", gap, paper_gap)
    if (gap > 0) == (paper_gap > 0):
        return Verdict(GOOD, "same direction", gap, paper_gap)
    return Verdict(BAD, "opposite direction", gap, paper_gap)


def measured_noise(cell: Cell, base: Cell, single: float) -> float:
    """Two standard errors of a difference of means over seeds; one seed has a stated noise."""
    if cell.n >= 2 and base.n >= 2 and cell.sd is not None and base.sd is not None:
        return 2 * math.hypot(cell.sd / math.sqrt(cell.n), base.sd / math.sqrt(base.n))
    return single


def is_noise(gap: float, noise: float) -> bool:
    return gap == 0 or abs(gap) < noise - 1e-9


def signed(value: float, decimals: int = 3) -> str:
    """+0.034, −0.034: with a sign that is as wide as a plus."""
    shown = f"{value:+,.{decimals}f}".replace("-", "−")
    return shown if any(c in "123456789" for c in shown) else f"±{shown[1:]}"
