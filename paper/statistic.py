"""The one rule by which numbers are compared, in claims, tables, figures and on the page."""

import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
    "Student's t, over seeds and, where losses were compared, over pieces of the text too. One is "
    "better than the other when the whole interval lies beyond zero, as good "
    f"when it lies within a margin (±{MARGIN} nats at the training length, ±{FAR_MARGIN} beyond "
    f"it, ±{MARGINS['accuracy']} points of passkey accuracy, ±{MARGINS['acc']} of a task's, "
    f"±{MARGINS['cosine_needed']} of a cosine), and no worse when it crosses that margin on the "
    "better side alone. Everything else is open, in particular whatever rests on one seed, and "
    "says what would settle it; a claim of several comparisons fails with one that is the opposite "
    "at a level divided by their number."
)

TAIL = 0.025  # on either side of a 95 % interval
POWER = 2.8  # 1.96 + 0.84: a difference is found in four of five experiments
MANY_SEEDS = 50


def within(t: float, freedom: int) -> float:
    """The probability that Student's |T| is below t: a finite series for whole degrees."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    cosine, total = math.cos(angle), 0.0
    term = cosine if odd else 1.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


@cache
def t_quantile(freedom: int, tail: float = TAIL) -> float:
    """What Student's T exceeds with the probability `tail`, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 1 - 2 * tail else (low, middle)
    return low


@dataclass(frozen=True)
class Comparison:
    """Differences of two series of values, paired by seed."""

    differences: tuple[float, ...]
    lower_is_better: bool = True
    margin: float | None = None  # of equivalence; None where none was fixed beforehand
    absent: str = "not measured"  # why there are no differences, where there are none
    text_error: float = 0.0  # standard error of the mean over pieces of text; 0 where unknown
    pieces: int = 2

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.differences) if self.n else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval; None below two seeds."""
        return self.half_width_at(TAIL)

    def half_width_at(self, tail: float) -> float | None:
        if self.n < 2:
            return None
        seeds = t_quantile(self.n - 1, tail) * statistics.stdev(self.differences)
        return math.hypot(seeds / math.sqrt(self.n), self.text_half_width(tail))

    def text_half_width(self, tail: float = TAIL) -> float:
        return self.text_error and t_quantile(self.pieces - 1, tail) * self.text_error

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    @property
    def equivalent(self) -> bool:
        known = self.interval is not None and self.margin is not None
        return known and max(map(abs, self.interval)) <= self.margin

    def sign_among(self, count: int, margin: float = 0.0) -> int:
        """+1 where certainly better, -1 where certainly worse, both by more than a margin, else 0;
        as one of so many comparisons."""
        half = self.half_width_at(TAIL / count)
        if half is None or abs(self.mean) - half <= margin:
            return 0
        return 1 if (self.mean < 0) == self.lower_is_better else -1

    @property
    def no_worse(self) -> bool:
        """Whether the interval ends before the margin on the worse side."""
        if self.interval is None or self.margin is None:
            return False
        low, high = self.interval
        return high <= self.margin if self.lower_is_better else low >= -self.margin

    @property
    def sign(self) -> int:
        return self.sign_among(1)

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
        return self.settled_by() if self.verdict == OPEN else ""

    def settled_by(self, wanted: str = "") -> str:
        if self.n < 2:
            one = "it rests on one run: at least 3 seeds would show the spread"
            return one if self.n else self.absent
        if wanted in (AS_GOOD, NO_WORSE) and self.margin is None:
            return "no margin was fixed"
        if self.text_half_width() >= max(self.distance(wanted), 5e-4):
            return f"more text would settle it: this one leaves ±{self.text_half_width():.3f}"
        seeds = self.seeds_needed(wanted)
        if seeds > MANY_SEEDS:
            return f"more than {MANY_SEEDS} seeds would be needed to show so small a difference"
        return f"about {seeds} seeds would settle it, there are {self.n}"

    def distance(self, wanted: str) -> float:
        """From the mean to what decides: zero or, for some claims, the margin."""
        size, margin = abs(self.mean), self.margin or 0.0
        worse = self.mean if self.lower_is_better else -self.mean
        found = {BETTER: size, WORSE: size, AS_GOOD: abs(margin - size)}
        found[NO_WORSE] = abs(margin - worse)
        return found.get(wanted, max(size, margin - size))

    def seeds_needed(self, wanted: str = "") -> int:
        """To confirm the difference that was seen, or on which side of the margin it is."""
        spread, target = statistics.stdev(self.differences), self.distance(wanted)
        left = target**2 - self.text_half_width() ** 2
        needed = (POWER * spread) ** 2 / left + 2 if left > 0 else math.inf
        return max(self.n + 1, math.ceil(min(needed, MANY_SEEDS + 1)))

    def is_against(self, wanted: str) -> bool:
        """Whether the mean, if it were certain, would be the opposite of what is wanted."""
        worse = self.mean if self.lower_is_better else -self.mean
        margin = self.margin or 0.0
        found = {BETTER: worse > 0, WORSE: worse < 0, AS_GOOD: abs(worse) > margin}
        return found.get(wanted, worse > margin)


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
    sides = [side(*one, len(found)) for one in found]
    return FAILS if FAILS in sides else HOLDS if sides and set(sides) == {HOLDS} else OPEN


def side(found: Comparison, wanted: str, among: int = 1) -> str:
    """Whether one comparison is as wanted. Of many, one is the opposite by chance: that has to be
    certain for their number."""
    if wanted in (BETTER, WORSE):
        sign = 1 if wanted == BETTER else -1
        holds, fails = found.sign == sign, found.sign_among(among) == -sign
    else:
        beyond = 0 if found.margin is None else found.sign_among(among, found.margin)
        as_good = wanted == AS_GOOD
        holds, fails = (found.equivalent, beyond) if as_good else (found.no_worse, beyond < 0)
    return HOLDS if holds else FAILS if fails else OPEN


def settles(found: list[tuple[Comparison, str]]) -> str:
    """What an open claim still needs: the comparison that is nearest to refuting it or, where none
    points that way, the least settled one."""
    open_ones = [one for one in found if side(*one, len(found)) == OPEN]
    if absent := [comparison.absent for comparison, _ in open_ones if not comparison.n]:
        return absent[0]
    if not open_ones:
        return Comparison.absent
    single = [one for one in open_ones if one[0].n == 1]
    against = [(c, wanted) for c, wanted in open_ones if c.n > 1 and c.is_against(wanted)]
    pick = min if against else max
    least = (
        single[0] if single else pick(against or open_ones, key=lambda o: o[0].seeds_needed(o[1]))
    )
    return least[0].settled_by(least[1])


def signed(value: float, decimals: int = 3) -> str:
    """+0.034 or −0.034, with a minus sign as wide as the plus."""
    shown = f"{value:+,.{decimals}f}".replace("-", "−")
    return shown if any(c in "123456789" for c in shown) else f"±{shown[1:]}"
