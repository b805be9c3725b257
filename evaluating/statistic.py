"""Computes means with 95 % intervals by Student's t, over seeds and over pieces of text."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

TAIL = 0.025  # on either side of a 95 % interval


def _probability_within(t: float, freedom: int) -> float:
    """Return the probability that Student's |T| is below t, by the series for whole degrees."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    total = 0.0
    term = cosine if odd else 1.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


@cache
def t_quantile(freedom: int) -> float:
    """Return the value that Student's T exceeds with the probability TAIL, by bisection."""
    low = 0.0
    high = 1e3
    for _ in range(60):
        middle = (low + high) / 2
        if _probability_within(middle, freedom) < 1 - 2 * TAIL:
            low = middle
        else:
            high = middle
    return low


class Interval(NamedTuple):
    """Holds a mean over seeds, with half of its 95 % interval."""

    mean: float
    half_width: float | None  # None below two seeds
    n: int

    @property
    def low(self) -> float:
        """Return the lower end."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Return the upper end."""
        return math.inf if self.half_width is None else self.mean + self.half_width

    def text(self, decimals: int = 3) -> str:
        """Write the mean and its interval."""
        if self.half_width is None:
            return f"{signed(self.mean, decimals)} (one seed)"
        low = signed(self.low, decimals)
        high = signed(self.high, decimals)
        return f"{signed(self.mean, decimals)} [{low}, {high}]"


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of independent values, two or more."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return t_quantile(len(values) - 1) * error


def interval(by_seed: Sequence[float], by_segment: Sequence[float] = ()) -> Interval:
    """Return the mean over seeds with its interval.

    `by_segment` has the mean over seeds for each piece of text. Another text would change the
    number as another seed does, so both half widths are added as independent errors are.
    """
    mean = statistics.fmean(by_seed)
    if len(by_seed) < 2:
        return Interval(mean, None, len(by_seed))
    text = half_width(by_segment) if len(by_segment) > 1 else 0.0
    return Interval(mean, math.hypot(half_width(by_seed), text), len(by_seed))


def signed(value: float, decimals: int = 3) -> str:
    """Write +0.034 or −0.034, with a minus sign as wide as the plus."""
    shown = f"{value:+,.{decimals}f}".replace("-", "−")
    return shown if any(c in "123456789" for c in shown) else shown[1:]
