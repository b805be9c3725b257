"""How numbers are judged: the tolerance at paper scale, the direction and its noise elsewhere."""

import math

import pytest
import report_results as made

from reporting.chart import axis_ticks, headline_rows, series, tick_text
from reporting.chart import measured_points as points
from reporting.records import read_table
from reporting.verdicts import judge, signed


def table(rows, columns=("1K",), **fields):
    return read_table(made.table("t", list(columns), rows, **fields), "nano/t.json", "nano")


def verdict(measured, baseline, paper, paper_baseline, **fields):
    """The verdict on one row beside a baseline, each cell given as (mean, sd, n)."""
    rows = [
        made.row("softmax", [paper_baseline], [made.cell(*baseline)]),
        made.row("lssar", [paper], [made.cell(*measured)]),
    ]
    built = table(rows, **fields)
    return judge(built, built.rows[1], 0)


@pytest.mark.parametrize(
    ("measured", "paper", "expected"),
    [
        (3.2111, 3.1911, "reproduced"),  # 0.02 exactly, which binary fractions overshoot
        (3.1711, 3.1911, "reproduced"),
        (3.2112, 3.1911, "differs by +0.020"),
        (3.2251, 3.1911, "differs by +0.034"),
        (3.1571, 3.1911, "differs by −0.034"),
        (3.1911, None, "not in the paper"),
    ],
)
def test_paper_scale_compares_numbers_within_the_tolerance(measured, paper, expected):
    built = table([made.row("softmax", [paper], [made.cell(measured)])], scale="paper")
    assert judge(built, built.rows[0], 0).text == expected


def test_paper_scale_without_a_tolerance_judges_nothing():
    row = made.row("softmax", [3.1911], [made.cell(3.2)])
    built = table([row], scale="paper", tolerance=None)
    found = judge(built, built.rows[0], 0)
    assert found.text == "no tolerance stated"
    assert math.isclose(found.difference, 0.0089, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("gap", "paper_gap", "expected"),
    [
        (-0.3, -2.9, "same direction"),
        (+0.3, +2.9, "same direction"),
        (+0.3, -2.9, "opposite direction"),
        (-0.3, +2.9, "opposite direction"),
        (-0.3, -0.0006, "within noise"),  # of the paper
        (-0.01, -2.9, "within noise"),  # of the measurement
        (0.0, -2.9, "within noise"),
    ],
)
def test_other_scales_compare_directions_against_the_baseline(gap, paper_gap, expected):
    found = verdict((1.7 + gap,), (1.7,), 3.2 + paper_gap, 3.2)
    assert found.text == expected
    assert math.isclose(found.difference, gap, abs_tol=1e-12)
    assert math.isclose(found.paper_difference, paper_gap, abs_tol=1e-12)


def test_noise_over_seeds_is_two_standard_errors_of_the_difference():
    # sd 0.03 over 4 and 0.04 over 4: standard error 0.5 * 0.05 = 0.025, noise 0.05
    assert verdict((1.651, 0.03, 4), (1.7, 0.04, 4), 3.0, 3.2).text == "within noise"
    assert verdict((1.649, 0.03, 4), (1.7, 0.04, 4), 3.0, 3.2).text == "same direction"


def test_a_single_seed_has_the_noise_that_the_table_states():
    one_seed = (1.66,), (1.7, 0.001, 3), 3.0, 3.2
    assert verdict(*one_seed).text == "same direction"  # 0.02 where nothing is stated
    assert verdict(*one_seed, seed_noise=0.05).text == "within noise"
    column = {"key": "1K", "title": "1K", "noise": 0.03}
    rows = [
        made.row("softmax", [3.2], [made.cell(1.7)]),
        made.row("lssar", [3.0], [made.cell(1.66)]),
    ]
    found = made.table("t", ["1K"], rows, seed_noise=0.05) | {"columns": [column]}
    built = read_table(found, "t.json", "nano")
    assert judge(built, built.rows[1], 0).text == "same direction", "a column's own noise"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"baseline": None}, "no baseline"),
        ({}, "baseline"),
    ],
)
def test_without_another_row_there_is_nothing_to_judge(change, expected):
    built = table([made.row("softmax", [3.2], [made.cell(1.7)])], **change)
    assert judge(built, built.rows[0], 0).text == expected


def test_an_unmeasured_baseline_or_cell_is_said():
    rows = [made.row("softmax", [3.2], [None]), made.row("lssar", [3.0], [made.cell(1.7)])]
    built = table(rows)
    assert [judge(built, row, 0).text for row in built.rows] == [
        "no number",
        "baseline not measured",
    ]


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0341, "+0.034"), (-0.0341, "−0.034"), (-0.0001, "±0.000")]
)
def test_differences_carry_their_sign_and_zero_has_none(value, expected):
    assert signed(value) == expected


# --- the chart -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [(1.64, 3.4), (3.19, 6.44), (0, 100), (-0.8, 0.2), (5, 5), (0, 0), (9609, 16685)]
)
def test_axis_covers_every_value_with_a_few_round_ticks(values):
    cells = [made.cell(v) for v in values]
    built = table([made.row("a", [None, None], cells)], ("1", "2"), baseline=None)
    ticks = axis_ticks([series(built.rows[0], 0, points(built, built.rows[0]))])
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    assert 3 <= len(ticks) <= 8
    texts = [tick_text(t, ticks) for t in ticks]
    assert len(set(texts)) == len(texts)
    assert all(
        math.isclose(float(x.replace("−", "-").replace(",", "")), t, abs_tol=1e-9)
        for x, t in zip(texts, ticks, strict=True)
    )


def test_the_chart_keeps_to_one_metric_and_to_the_rows_with_most_seeds():
    cells = [made.cell(v, 0.1, 3) for v in (1, 2, 9)]
    rows = [
        made.row("softmax", [None] * 3, cells),
        made.row("once", [None] * 3, [made.cell(1), made.cell(2), made.cell(3)]),
        made.row("lssar", [None] * 3, cells),
        made.row("missing", [None] * 3, [None] * 3, status="missing"),
    ]
    built = table(rows, ("loss@128", "loss@256", "gain@256"))
    assert [row.key for row in headline_rows(built)] == ["softmax", "lssar"]
    assert [p.y for p in points(built, built.rows[0])] == [1, 2]
