"""The one rule by which numbers are compared, in claims, tables, figures and on the page."""

import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Values this close are as good as each other, by quantity; fixed before the runs.
MARGIN, FAR_MARGIN = 0.02, 0.1  # nats: of a loss at the training length, and beyond it
MARGINS = {"accuracy": 10, "far_accuracy": 10, "acc": 2, "cosine_needed": 0.05}
TASK_MARGIN = 0.05  # of the share of a task's answers that far context brings

BETTER, WORSE, AS_GOOD, OPEN = "better", "worse", "as good", "open"
NO_WORSE = "no worse"  # what a claim may ask for besides
SAME, OPPOSITE = "same direction", "opposite direction"
REPRODUCED, DIFFERS = "reproduced", "differs"
HOLDS, FAILS = "holds", "does not hold"

EXPLANATION = (
    "Runs are paired by seed, and the mean of their differences is given with a 95 % interval by "
    "Student's t. One is better than the other when the whole interval lies beyond zero, as good "
    f"when it lies within a margin (±{MARGIN} nats at the training length, ±{FAR_MARGIN} beyond "
    f"it, ±{MARGINS['accuracy']} points of passkey accuracy, ±{MARGINS['acc']} of a task's, "
    f"±{MARGINS['cosine_needed']} of a cosine), and no worse when it crosses that margin on the "
    "better side alone. Everything else is open, in particular whatever rests on one seed, and "
    "says what would settle it; a claim of several comparisons fails with one that is the opposite."
)

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
POWER = 2.8  # 1.96 + 0.84: a difference is found in four of five experiments
MANY_SEEDS = 50


def t_quantile(freedom: int) -> float:
    if freedom <= len(T):
        return T[freedom - 1]
    z = 1.959964  # and the first terms of its expansion in 1 / freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class Comparison:
    """Differences of two series of values, paired by seed."""

    differences: tuple[float, ...]
    lower_is_better: bool = True
    margin: float | None = None  # of equivalence; None where none was fixed beforehand
    absent: str = "not measured"  # why there are no differences, where there are none

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.differences) if self.n else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval; None below two seeds."""
        if self.n < 2:
            return None
        return t_quantile(self.n - 1) * statistics.stdev(self.differences) / math.sqrt(self.n)

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def equivalent(self) -> bool:
        known = self.interval is not None and self.margin is not None
        return known and max(map(abs, self.interval)) <= self.margin

    @property
    def beyond(self) -> int:
        """As `sign`, of what lies outside the margin as a whole."""
        if self.margin is None or not self.sign:
            return 0
        return self.sign if min(map(abs, self.interval)) > self.margin else 0

    @property
    def no_worse(self) -> bool:
        """Whether the interval ends before the margin on the worse side."""
        if self.interval is None or self.margin is None:
            return False
        low, high = self.interval
        return high <= self.margin if self.lower_is_better else low >= -self.margin

    @property
    def sign(self) -> int:
        """+1 where certainly better, -1 where certainly worse, else 0."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return 0
        return 1 if (self.mean < 0) == self.lower_is_better else -1

    @property
    def verdict(self) -> str:
        if self.sign:
            return BETTER if self.sign > 0 else WORSE
        return AS_GOOD if self.equivalent else OPEN

    @property
    def words(self) -> str:
        """The verdict, and whether a certain difference is inside the margin."""
        small = f" by less than {self.margin:g}" if self.sign and self.equivalent else ""
        return self.verdict + small

    def text(self, decimals: int = 3) -> str:
        shown = self.absent if self.mean is None else signed(self.mean, decimals)
        if self.interval is None:
            return shown
        low, high = (signed(end, decimals) for end in self.interval)
        return f"{shown} [{low}, {high}]"

    @property
    def settles(self) -> str:
        """What would settle an open comparison; empty for a settled one."""
        if self.verdict != OPEN:
            return ""
        if self.n < 2:
            one = "it rests on one run: at least 3 seeds would show the spread"
            return one if self.n else self.absent
        seeds = self.seeds_needed()
        if seeds > MANY_SEEDS:
            return f"more than {MANY_SEEDS} seeds would be needed to show so small a difference"
        return f"about {seeds} seeds would settle it, there are {self.n}"

    def seeds_needed(self) -> int:
        """To confirm the difference that was seen, or that it is inside the margin."""
        spread, size = statistics.stdev(self.differences), abs(self.mean)
        target = max(size, (self.margin or 0) - size)
        needed = (POWER * spread / target) ** 2 + 2 if target else math.inf
        return max(self.n + 1, math.ceil(min(needed, MANY_SEEDS + 1)))


def margin_of(quantity: str, factor: float | None) -> float | None:
    """The margin of equivalence of a quantity at so many training lengths; None: none is fixed."""
    if quantity == "loss":
        return MARGIN if factor is not None and factor <= 1 else FAR_MARGIN
    return MARGINS.get(quantity)


BySeed = dict[int | None, float | None]  # a value may have overflowed


def apply(function: Callable[..., float], *series: BySeed) -> BySeed:
    """A function of the values of each seed that all series have; None where one overflowed."""
    shared = [seed for seed in series[0] if all(seed in values for values in series)]
    found = {seed: [values[seed] for values in series] for seed in shared}
    return {seed: None if None in values else function(*values) for seed, values in found.items()}


def compare(first: BySeed, second: BySeed, **options) -> Comparison:
    """Paired by seed; options: of Comparison. With an overflow there is no comparison: the other
    seeds alone are those that went well."""
    differences = apply(operator.sub, first, second)
    if None in differences.values():
        return Comparison((), absent="a seed overflowed", **options)
    return Comparison(tuple(differences.values()), **options)


USES, IGNORES, HARMED = "uses far context", "ignores far context", "harmed by far context"
LEARNED = 0.9  # of a task's answers at the training length: what a verdict on it requires


def far_verdict(gain: Comparison, right: float = 1.0) -> str:
    """What a model does with far context; `right`: its share of right answers at 1x, of a task."""
    if right < LEARNED:
        return f"not learned at 1x ({right:.1%} right, the bar is {LEARNED:.0%})"
    if gain.equivalent:
        return IGNORES
    return HARMED if gain.mean is None else {1: USES, -1: HARMED, 0: OPEN}[gain.sign]


class Agreement(NamedTuple):
    verdict: str
    reason: str = ""


def agreement(measured: float, paper: float, tolerance: float | None) -> Agreement:
    """At the paper's own scale: the number itself, within a tolerance."""
    if tolerance is None:
        return Agreement(OPEN, "no tolerance was fixed")
    # 3.21 - 3.19 is 0.02 to a reader, though not in binary fractions.
    if abs(measured - paper) <= tolerance + 1e-9:
        return Agreement(REPRODUCED)
    return Agreement(DIFFERS, f"by {signed(measured - paper)}, more than {tolerance:g}")


def direction(found: Comparison, paper_gap: float, tolerance: float | None) -> Agreement:
    """At another scale: whether a row lies on the same side of the baseline as in the paper."""
    if tolerance is None or abs(paper_gap) <= tolerance + 1e-9:
        return Agreement(OPEN, "the paper's gap is within its tolerance, and it has one seed")
    if found.verdict in (OPEN, AS_GOOD):
        return Agreement(OPEN, found.settles or "here they are as good as each other")
    return Agreement(SAME if (found.mean < 0) == (paper_gap < 0) else OPPOSITE)


def judge(found: list[tuple[Comparison, str]]) -> str:
    """HOLDS if all comparisons are as wanted, FAILS if one is the opposite, else OPEN."""
    sides = [side(*one) for one in found]
    return FAILS if FAILS in sides else HOLDS if sides and set(sides) == {HOLDS} else OPEN


def side(found: Comparison, wanted: str) -> str:
    """Whether one comparison is as wanted."""
    if wanted == AS_GOOD:
        return HOLDS if found.equivalent else FAILS if found.beyond else OPEN
    if wanted == NO_WORSE:
        return HOLDS if found.no_worse else FAILS if found.beyond < 0 else OPEN
    if found.sign == 0:
        return OPEN
    return HOLDS if (found.sign > 0) == (wanted == BETTER) else FAILS


def settles(found: list[tuple[Comparison, str]]) -> str:
    """What an open claim still needs: what its least settled comparison needs."""
    open_ones = [comparison for comparison, wanted in found if side(comparison, wanted) == OPEN]
    if absent := [comparison.absent for comparison in open_ones if not comparison.n]:
        return absent[0]
    if not open_ones:
        return Comparison.absent
    least = max(open_ones, key=lambda c: (c.n == 1, c.n > 1 and c.seeds_needed()))
    if least.margin is None:
        return least.settles or "no margin was fixed"
    smaller = "a smaller difference needs more seeds"
    return least.settles or f"as good within {least.margin:g}: {smaller}"


def signed(value: float, decimals: int = 3) -> str:
    """+0.034 or −0.034, with a minus sign as wide as the plus."""
    shown = f"{value:+,.{decimals}f}".replace("-", "−")
    return shown if any(c in "123456789" for c in shown) else f"±{shown[1:]}"
