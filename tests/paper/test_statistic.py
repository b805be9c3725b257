"""The one rule of comparison: paired by seed, Student's t, and open wherever that says nothing."""

import math

import pytest

from paper.statistic import (
    AS_GOOD,
    BETTER,
    FAILS,
    HOLDS,
    MARGIN,
    NO_WORSE,
    OPEN,
    WORSE,
    Comparison,
    agreement,
    compare,
    direction,
    judge,
    settles,
    signed,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("tail", [0.25, 0.005, 0.0005])
def test_quantiles_of_student_are_those_of_scipy(freedom, tail):
    stats = pytest.importorskip("scipy.stats")
    assert t_quantile(freedom, tail) == pytest.approx(stats.t.isf(tail, freedom), rel=1e-9)


def test_an_interval_is_that_of_the_differences_and_not_of_the_two_means():
    first, second = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.1, 1: 2.2, 2: 3.3}
    found = compare(first, second)
    assert found.mean == pytest.approx(-0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert found.verdict == OPEN, "0.2 +- 0.25, though all three are below"
    assert compare(first, {0: 1.1, 1: 2.1, 2: 3.1}).verdict == BETTER


def test_seeds_are_paired_by_their_number_and_others_do_not_count():
    found = compare({0: 1.0, 2: 3.0, 7: 0.0, 8: None}, {2: 2.0, 1: 5.0, 0: 1.5})
    assert found.differences == (-0.5, 1.0)


def test_a_seed_that_overflowed_is_not_left_out_of_a_comparison():
    others = {seed: 2 + seed / 100 for seed in range(5)}
    found = compare({0: 1.0, 1: 1.02, 2: None, 3: 1.01, 4: 1.0}, others, margin=MARGIN)
    assert (found.n, found.verdict, found.settles) == (0, OPEN, "a seed overflowed")
    assert judge([(found, BETTER)]) == OPEN
    assert settles([(found, BETTER)]) == "a seed overflowed"


def test_what_no_margin_was_fixed_for_cannot_be_as_good_and_says_so():
    assert settles([(Comparison((1.0, 1.1, 1.2)), AS_GOOD)]) == "no margin was fixed"


@pytest.mark.parametrize(
    ("differences", "lower", "expected"),
    [
        ((-0.5, -0.6, -0.4), True, BETTER),
        ((-0.5, -0.6, -0.4), False, WORSE),
        ((0.5, 0.6, 0.4), True, WORSE),
        ((0.5, -0.6, 0.4), True, OPEN),
        ((0.001, -0.001, 0.002), True, AS_GOOD),
        ((-5.0,), True, OPEN),
        ((), True, OPEN),
    ],
)
def test_a_verdict_needs_the_whole_interval(differences, lower, expected):
    assert Comparison(differences, lower, MARGIN).verdict == expected


def test_without_a_margin_fixed_beforehand_nothing_is_as_good():
    assert Comparison((0.001, -0.001, 0.002)).verdict == OPEN


def test_a_small_but_certain_difference_is_said_to_be_small():
    found = Comparison((-0.010, -0.011, -0.012), margin=MARGIN)
    assert found.words == "better by less than 0.02"
    assert Comparison((-0.10, -0.11, -0.12), margin=MARGIN).words == "better"


def test_an_open_comparison_says_what_would_settle_it():
    assert Comparison(()).settles == "not measured"
    assert "one run: at least 3 seeds" in Comparison((-0.4,)).settles
    # sd 0.1, mean 0.1: (2.8)^2 + 2 = 9.84
    assert Comparison((0.0, 0.1, 0.2)).settles == "about 10 seeds would settle it, there are 3"
    assert "more than 50 seeds" in Comparison((0.1, -0.1, 0.001)).settles
    assert Comparison((-0.5, -0.6, -0.4)).settles == ""


def test_equivalence_may_be_nearer_than_a_difference():
    # sd 0.01, mean 0.001: (2.8 * 0.01 / 0.019)^2 + 2 = 4.2 for the margin, 786 for the difference
    found = Comparison((-0.009, 0.001, 0.011), margin=MARGIN)
    assert found.verdict == OPEN
    assert "about 5 seeds" in found.settles


def test_another_text_is_in_the_interval_as_another_seed_is():
    seeds = Comparison((-0.10, -0.11, -0.12), margin=0.2)
    text = Comparison(seeds.differences, margin=0.2, text_error=0.03, pieces=64)
    assert text.half_width == pytest.approx(math.hypot(seeds.half_width, 1.99834 * 0.03))
    assert text.verdict == BETTER
    few = Comparison(seeds.differences, margin=0.2, text_error=0.03, pieces=3)
    assert few.text_half_width() == pytest.approx(4.302653 * 0.03)
    assert few.verdict == OPEN
    wanted = [(few, BETTER)]
    assert judge(wanted) == OPEN
    assert settles(wanted) == "more text would settle it: this one leaves ±0.129"


def test_of_many_comparisons_one_that_is_the_opposite_by_chance_refutes_nothing():
    better, worse = Comparison((-0.3, -0.31, -0.29)), Comparison((0.05, 0.08, 0.11))
    assert worse.verdict == WORSE
    assert judge([(worse, BETTER)]) == FAILS
    many = [(better, BETTER)] * 9 + [(worse, BETTER)]
    assert worse.sign_among(10) == 0
    assert judge(many) == OPEN
    assert settles(many) == "about 4 seeds would settle it, there are 3"
    assert judge([*many[:-1], (Comparison((0.3, 0.31, 0.29)), BETTER)]) == FAILS


def test_what_would_settle_a_claim_is_what_it_asks_for():
    # sd 0.01, mean 0.002: (2.8 * 0.01 / 0.018)^2 + 2 for the margin, / 0.002 for a difference
    found = Comparison((-0.008, 0.002, 0.012), margin=MARGIN)
    assert "about 5 seeds" in settles([(found, AS_GOOD)])
    assert "more than 50 seeds" in settles([(found, BETTER)])
    # One comparison that goes the other way is enough to refute, so it is the one to settle.
    against = Comparison((0.0, 0.1, 0.2))
    assert "about 10 seeds" in settles([(found, BETTER), (against, BETTER)])


@pytest.mark.parametrize(
    ("measured", "tolerance", "expected"),
    [
        (3.2111, 0.02, "reproduced"),  # 0.02 exactly, which binary fractions overshoot
        (3.1711, 0.02, "reproduced"),
        (3.2112, 0.02, "differs"),
        (3.2251, None, OPEN),
    ],
)
def test_at_the_papers_scale_its_number_is_compared_within_a_tolerance(
    measured, tolerance, expected
):
    assert agreement(measured, 3.1911, tolerance).verdict == expected


@pytest.mark.parametrize(
    ("differences", "paper_gap", "expected"),
    [
        ((-0.3, -0.31, -0.29), -2.9, "same direction"),
        ((0.3, 0.31, 0.29), 2.9, "same direction"),
        ((0.3, 0.31, 0.29), -2.9, "opposite direction"),
        ((-0.3, -0.31, -0.29), -0.02, OPEN),  # the paper's own gap is within its tolerance
        ((-0.3,), -2.9, OPEN),
        ((-0.3, 0.31, 0.0), -2.9, OPEN),
        ((0.001, -0.001, 0.002), -2.9, OPEN),
    ],
)
def test_at_another_scale_the_side_of_the_baseline_is_compared(differences, paper_gap, expected):
    found = direction(Comparison(differences, margin=MARGIN), paper_gap, 0.02)
    assert found.verdict == expected
    assert bool(found.reason) == (expected == OPEN)


BELOW, EQUAL, ABOVE = (-0.3, -0.31, -0.29), (0.001, -0.001, 0.002), (0.3, 0.31, 0.29)
NEARLY, ONE, CROSSING = (-0.010, -0.011, -0.012), (-0.3,), (0.015, 0.020, 0.025)


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        ([BELOW], BETTER, HOLDS),
        ([BELOW], WORSE, FAILS),
        ([ABOVE], BETTER, FAILS),
        ([EQUAL], BETTER, OPEN),
        ([NEARLY], BETTER, HOLDS),
        ([EQUAL], AS_GOOD, HOLDS),
        ([NEARLY], AS_GOOD, HOLDS),
        ([BELOW], AS_GOOD, FAILS),  # "similar" is not "better"
        ([ABOVE], AS_GOOD, FAILS),
        ([CROSSING], AS_GOOD, OPEN),
        ([BELOW], NO_WORSE, HOLDS),
        ([EQUAL], NO_WORSE, HOLDS),
        ([ABOVE], NO_WORSE, FAILS),
        ([CROSSING], NO_WORSE, OPEN),  # certainly worse, perhaps by less than the margin
        ([ONE], NO_WORSE, OPEN),
        ([ONE], BETTER, OPEN),
        ([ONE], AS_GOOD, OPEN),
        ([BELOW, ONE], BETTER, OPEN),
        ([BELOW, ONE, ABOVE], BETTER, FAILS),
        ([], BETTER, OPEN),
    ],
)
def test_a_claim_of_several_comparisons_holds_only_with_all_of_them(found, wanted, expected):
    pairs = [(Comparison(d, margin=MARGIN), wanted) for d in found]
    assert judge(pairs) == expected
    if expected == OPEN:
        assert settles(pairs)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0341, "+0.034"), (-0.0341, "−0.034"), (-0.0001, "±0.000")]
)
def test_differences_carry_their_sign_and_zero_has_none(value, expected):
    assert signed(value) == expected
