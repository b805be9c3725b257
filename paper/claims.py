"""Judges the sentences of claims.toml, and the two rules for the headline.

The rules are those of docs/reproduction.md.

Every comparison is `paper.tables.compare`: paired by seed, with an interval over seeds and text.
"""

import itertools
import textwrap
from typing import NamedTuple

from evaluating.statistic import Interval, signed
from paper.experiments import SCALES, Column, load_toml, of_scale
from paper.tables import Cell, FilledTable, compare

# Verdicts on a sentence.
AGREES = "agrees"
DISAGREES = "disagrees"
UNDECIDED = "undecided"
NOT_TESTABLE = "not testable"
NOT_MEASURED = "not measured"  # none of its comparisons
# Verdicts by the rules for the headline and for sharpening, beside "undecided".
CONFIRMED = "confirmed"
REFUTED = "refuted"
CREDITED = "credited"
NOT_CREDITED = "not credited"
EXPLANATION = (
    "Runs are paired by seed. A 95 % interval by Student's t counts seeds and, for losses, pieces "
    "of text. A sentence agrees if every interval lies on the stated side, disagrees if one lies "
    "on the other, and is undecided otherwise: docs/reproduction.md."
)


class Verdict(NamedTuple):
    """Holds a sentence and the verdict on it."""

    text: str
    where: str  # in the paper; empty for our controls
    table: str
    verdict: str
    points: list[str]  # the comparisons, or why there are none


def judge_all(filled: dict[str, FilledTable], scale: str) -> dict[str, list[Verdict]]:
    """Return the verdicts under "rules", "paper" and "controls"; none for tables not measured."""
    judged = {}
    for kind, sentences in load_toml("claims.toml").items():
        here = [sentence for sentence in sentences if sentence["table"] in filled]
        judged[kind] = [judge(sentence, filled[sentence["table"]], scale) for sentence in here]
    return judged


def judge(sentence: dict, table: FilledTable, scale: str) -> Verdict:
    """Judge one sentence."""
    named = (sentence["text"], sentence.get("where", ""), sentence["table"])
    if "rule" in sentence:
        return Verdict(*named, *RULES[sentence["rule"]](table))
    if why := of_scale(sentence.get("not_testable"), SCALES[scale]):
        return Verdict(*named, NOT_TESTABLE, [why])
    comparisons = of_scale(sentence["compare"], SCALES[scale])
    if why := not_learned(sentence, comparisons[0]["row"], table):
        return Verdict(*named, NOT_TESTABLE, [why])
    sides = []
    points = []
    for comparison in comparisons:
        for length in comparison["lengths"]:
            side, point = compare_rows(comparison, length, table)
            sides.append(side)
            points.append(point)
    return Verdict(*named, combine(sides), points)


def combine(sides: list[str]) -> str:
    """Return the verdict on a sentence of several comparisons."""
    if set(sides) == {NOT_MEASURED}:
        return NOT_MEASURED
    if DISAGREES in sides:
        return DISAGREES
    return AGREES if set(sides) == {AGREES} else UNDECIDED


def not_learned(sentence: dict, row: str, table: FilledTable) -> str:
    """Say that the model has not learned the task at 1x; empty where it has or need not."""
    least = sentence.get("learned")
    if least is None:
        return ""
    accuracy = cell_of(table, row, "accuracy", 1).mean
    if accuracy is None or accuracy >= least:
        return ""
    return f"{row} finds {accuracy:.0f} % at 1x, and less than {least} % is not learned"


def cell_of(table: FilledTable, row: str, quantity: str, length: float) -> Cell:
    """Return the cell of a row and a column; an empty one where the table has no such column."""
    for column in table.table.columns:
        if (column.quantity, column.factor) == (quantity, length):
            return table.cell(table.table.row(row), column)
    share = quantity.endswith("accuracy")
    asked = Column(length, quantity, percent=share, lower_is_better=not share)
    return table.cell(table.table.row(row), asked)


def compare_rows(comparison: dict, length: float, table: FilledTable) -> tuple[str, str]:
    """Return the verdict on one comparison, and the comparison in words."""
    quantity = comparison.get("quantity", "loss")
    margin = comparison.get("margin", 0.0)
    first = cell_of(table, comparison["row"], quantity, length)
    second = cell_of(table, comparison["other"], quantity, length)
    found = compare(first, second)
    words = f"{comparison['row']} against {comparison['other']} at {length:g}x"
    if found is None:
        if any(cell.n and not cell.finite for cell in (first, second)):
            return UNDECIDED, f"{words}: a seed overflowed"
        return NOT_MEASURED, f"{words}: not measured"
    point = f"{words}: {found.text()}"
    if comparison.get("is") == "alike":
        return alike(found, margin), f"{point}, margin {margin:g}"
    gain = found
    if quantity == "loss":  # less is better
        gain = found._replace(mean=-found.mean)
    return better(gain, margin), point


def better(gain: Interval, margin: float) -> str:
    """Judge whether a gain is more than the margin."""
    if gain.low > margin:
        return AGREES
    return DISAGREES if gain.high < margin else UNDECIDED


def alike(found: Interval, margin: float) -> str:
    """Judge whether a difference is within the margin."""
    if -margin <= found.low and found.high <= margin:
        return AGREES
    return DISAGREES if found.low > margin or found.high < -margin else UNDECIDED


def headline(table: FilledTable) -> tuple[str, list[str]]:
    """Return the verdict on the paper's headline by the rule of docs/reproduction.md, and why."""
    lssar = {n: cell_of(table, "lssar-p15", "loss", n) for n in (1, 8, 16)}
    softmax = {n: cell_of(table, "softmax", "loss", n) for n in (1, 8)}
    cost = compare(lssar[1], softmax[1])
    # A rise by less than 4 % is a loss below 1.04 times that of 1x.
    rise_8x = compare(lssar[8], lssar[1], 1.04)
    rise_16x = compare(lssar[16], lssar[1], 1.08)
    refuting_rise = compare(lssar[8], lssar[1], 1.08)
    softmax_rise = compare(softmax[8], softmax[1], 1.25)
    found = (cost, rise_8x, rise_16x, refuting_rise, softmax_rise)
    if None in found:
        return NOT_MEASURED, ["its rows are not all there"]
    verdict = UNDECIDED
    if cost.high <= 0.02 and rise_8x.high <= 0 and rise_16x.high <= 0 and softmax_rise.low > 0:
        verdict = CONFIRMED
    elif refuting_rise.low > 0 or cost.low > 0.05:
        verdict = REFUTED
    points = [
        f"cost at 1x over softmax: {cost.text()}; at most 0.02",
        f"rise at 8x: {rise(lssar[8], lssar[1])}; beyond 4 %: {rise_8x.text()}",
        f"rise at 16x: {rise(lssar[16], lssar[1])}; beyond 8 %: {rise_16x.text()}",
        f"softmax's rise at 8x: {rise(softmax[8], softmax[1])}; beyond 25 %: {softmax_rise.text()}",
    ]
    return verdict, points


def rise(far: Cell, near: Cell) -> str:
    """Write how much higher the loss is, in per cent."""
    return f"{signed(100 * (far.mean / near.mean - 1), 1)} %"


def sharpening(table: FilledTable) -> tuple[str, list[str]]:
    """Return the verdict on whether LSSAR's sharpening does more than the cosine alone, and why."""
    cosine = cell_of(table, "cos-softmax", "loss", 8)
    lssar = cell_of(table, "lssar-p15", "loss", 8)
    gain = compare(cosine, lssar)
    if gain is None:
        return NOT_MEASURED, ["its rows are not all there"]
    verdicts = {AGREES: CREDITED, DISAGREES: NOT_CREDITED}
    verdict = verdicts.get(better(gain, 0.03), UNDECIDED)
    return verdict, [f"gain at 8x: {gain.text()}"]


RULES = {"headline": headline, "sharpening": sharpening}


def summary(scales: dict[str, dict[str, FilledTable]]) -> str:
    """Return README's table as Markdown: sentences, the paper's numbers, and ours by scale.

    `scales` has the filled tables of each. Shown are the two rows that a sentence compares first,
    at the first and the last length.
    """
    header = ["", "compared", "the paper"]
    for scale in scales:
        header += [scale, "verdict"]
    lines = [header, ["---"] * len(header)]
    for sentence in itertools.chain(*load_toml("claims.toml").values()):
        if "short" not in sentence:
            continue
        comparison = of_scale(sentence["compare"], SCALES["nano"])[0]
        table = scales["nano"][sentence["table"]]
        line = [
            sentence["short"],
            f"{comparison['row']}, {comparison['other']}",
            paper_numbers_of(comparison, table),
        ]
        for scale, filled in scales.items():
            table = filled.get(sentence["table"])
            numbers = measured_numbers(comparison, table) if table else ""
            line += [numbers, judge(sentence, table, scale).verdict if numbers else NOT_MEASURED]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ends(comparison: dict) -> list[float]:
    """Return the first and the last length of a comparison."""
    return sorted({comparison["lengths"][0], comparison["lengths"][-1]})


def measured_numbers(comparison: dict, table: FilledTable) -> str:
    """Write the means of both rows of a comparison at each of its lengths; empty if one lacks."""
    quantity = comparison.get("quantity", "loss")
    shown = []
    for length in ends(comparison):
        cells = [cell_of(table, comparison[key], quantity, length) for key in ("row", "other")]
        if not all(cell.n for cell in cells):
            return ""
        decimals = 3 if quantity == "loss" else 0
        means = [f"{cell.mean:.{decimals}f}" if cell.finite else "overflow" for cell in cells]
        shown.append(f"{length:g}x {', '.join(means)}")
    return "; ".join(shown)


def paper_numbers_of(comparison: dict, table: FilledTable) -> str:
    """Write the paper's numbers of both rows at these lengths, where it has them."""
    shown = []
    for column in table.table.columns:
        rows = [table.table.row(comparison[key]) for key in ("row", "other")]
        printed = [table.printed(row, column) for row in rows]
        if column.factor in ends(comparison) and None not in printed:
            shown.append(f"{column.factor:g}x {', '.join(f'{value:.4g}' for value in printed)}")
    return "; ".join(dict.fromkeys(shown))


def show(judged: dict[str, list[Verdict]]) -> str:
    """Return all verdicts for the terminal."""
    titles = {"rules": "The headline", "paper": "The paper's sentences", "controls": "Our controls"}
    lines = []
    for kind, title in titles.items():
        lines.append(f"\n{title}")
        measured = [found for found in judged[kind] if found.verdict != NOT_MEASURED]
        for found in measured:
            lines.append(f"  {found.verdict}: {textwrap.shorten(found.text, 110)}")
            lines += [f"      {point}" for point in found.points]
        missing = len(judged[kind]) - len(measured)
        if missing:
            lines.append(f"  {NOT_MEASURED}: {missing}")
    return "\n".join(lines)
