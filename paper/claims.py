"""How a claim becomes a verdict: which comparisons it asks for, and what keeps it open.

The claims are in claims.toml. Comparisons come from `evidence.py`, as those of tables, figures and
page do, and are judged by `statistic.py` alone.
"""

import re
import statistics
import textwrap
from dataclasses import dataclass, field
from typing import NamedTuple

from paper.evidence import Evidence
from paper.experiments import Column, Table, load_toml, of_scale
from paper.statistic import BETTER, OPEN, WORSE, BySeed, Comparison, compare, judge, settles, signed
from paper.tables import decimals_of, heading

COMPARISON = re.compile(r"(.+) (better|worse|as good) (?:than|as) (.+) at (.+)")
CHECK = re.compile(r"(\S+) (\w+)(?:@(\S+))? (within|below|above) (\S+)(?: of (\S+))?")
# The paper's LSSAR goes from 3.1905 to 3.45: what it calls nearly constant is a rise by 8 %.
NEARLY = 3.45 / 3.1905
PREDICTS = 0.8  # R^2 from which on a model predicts the force at all


@dataclass(frozen=True)
class Claim:
    """An entry of claims.toml."""

    text: str
    table: str
    where: str = ""
    compare: tuple[str, ...] = ()
    check: tuple[str, ...] | dict[str, tuple[str, ...]] = ()  # the latter: by scale
    rule: str = ""
    caveat: str = ""
    note: str = ""
    open: dict[str, str] = field(default_factory=dict)
    finding: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[str, str, str, list[str]]]:
        """(row, "better", "worse" or "as good", other row, places)"""
        found = []
        for sentence in self.compare:
            rows, wanted, others, places = COMPARISON.fullmatch(sentence).groups()
            for row in rows.split(", "):
                found += [(row, wanted, other, places.split(", ")) for other in others.split(", ")]
        return found


def places(column: Column) -> set[str]:
    """What a claim may call a column: its length, quantity or task."""
    if column.quantity == "far_accuracy":
        return {f"far {column.factor:g}"}
    at_length = column.quantity in ("loss", "accuracy")
    return {f"{column.factor:g}" if at_length else column.quantity, column.task} - {""}


class Point(NamedTuple):
    label: str
    wanted: str
    found: Comparison
    decimals: int = 3
    paper: float | None = None  # the paper's own difference
    shown: str = ""  # in place of the difference

    @property
    def text(self) -> str:
        if self.found.mean is None:
            return f"{self.label}: not measured"
        paper = "" if self.paper is None else f"; paper {signed(self.paper, self.decimals)}"
        seeds = f"{self.found.n} seeds" if self.found.n > 1 else "one seed"
        return f"{self.label}: {self.shown or self.found.text(self.decimals)}, {seeds}{paper}"


class Judged(NamedTuple):
    claim: Claim
    verdict: str
    points: list[Point]
    settles: str  # what would settle an open one


def judged(claim: Claim, evidence: Evidence) -> Judged:
    table, caveat = evidence.tables[claim.table], of_scale(claim.open, evidence.scale)
    points = of_pairs(claim, evidence, table) + of_checks(claim, evidence, table)
    points += RULES[claim.rule](evidence, table) if claim.rule else []
    if claim.caveat and any(point.found.n for point in points):
        caveat = CAVEATS[claim.caveat](evidence, table)
    found = [(point.found, point.wanted) for point in points]
    verdict = OPEN if caveat else judge(found)
    return Judged(claim, verdict, points, (caveat or settles(found)) if verdict == OPEN else "")


def of_pairs(claim: Claim, evidence: Evidence, table: Table) -> list[Point]:
    points = []
    for key, wanted, other_key, at in claim.pairs:
        row, other = table.row(key), table.row(other_key)
        for column in table.columns if row and other else ():
            measured = not column.task or evidence.cell(table, table.rows[0], column).n
            if places(column) & set(at) and (measured or column.task in at):
                paper = evidence.printed_gap(table, row, other, column)
                label = f"{row.title} − {other.title}, {heading(evidence, table, column)}"
                found = evidence.compare(table, row, other, column)
                decimals = decimals_of(evidence, table, column)
                points.append(Point(label, wanted, found, decimals, paper))
    return points


def of_checks(claim: Claim, evidence: Evidence, table: Table) -> list[Point]:
    """A quantity of one row, or the ratio of two, against a number."""
    points = []
    for sentence in of_scale(claim.check, evidence.scale):
        keys, quantity, place, kind, limit, centre = CHECK.fullmatch(sentence).groups()
        rows = [table.row(key) for key in keys.split("/")]
        if None in rows:
            continue
        column, title = column_of(evidence, table, place, quantity)
        values = ratio(*(evidence.cell(table, row, column).values for row in rows))
        off = {s: abs(v - float(centre)) if centre else v for s, v in values.items()}
        found = compare(off, dict.fromkeys(off, float(limit)), lower_is_better=kind != "above")
        mean = f"{statistics.fmean(values.values()):.4g}" if values else ""
        unit = " %" if column.percent and len(rows) == 1 else ""
        rule = f"{kind} {limit}" + (f" of {centre}" if centre else "")
        label = f"{' / '.join(row.title for row in rows)}, {title}"
        shown = f"{mean}{unit} ({rule})".replace("-", "−")
        by_itself = float(limit) == 0 and not centre  # the difference is the quantity
        points.append(Point(label, BETTER, found, shown="" if by_itself else shown))
    return points


def ratio(values: BySeed, base: BySeed | None = None) -> BySeed:
    """The values over those of the base, if there is one, where both are known."""
    base = dict.fromkeys(values, 1.0) if base is None else base
    known = [seed for seed, value in values.items() if None not in (value, base.get(seed))]
    return {seed: values[seed] / base[seed] for seed in known}


def column_of(evidence: Evidence, table: Table, place, quantity="loss") -> tuple[Column, str]:
    """The column of a quantity at a length or on a task, with its heading."""
    for column in table.columns:
        at = column.task or (f"{column.factor:g}" if column.factor is not None else "")
        if column.quantity == quantity and (place is None or at == f"{place}"):
            return column, heading(evidence, table, column)
    raise KeyError(f"{table.name} has no column of {quantity} at {place}")


def values_of(evidence: Evidence, table: Table, key: str, place, quantity="loss") -> BySeed:
    column, _ = column_of(evidence, table, place, quantity)
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


def most_of_the_effect(evidence: Evidence, table: Table) -> list[Point]:
    """What softmax of cosines gains over softmax at 16x, and half of what LSSAR gains."""
    keys = ("softmax", "cos-softmax", "lssar-p15")
    softmax, cosines, lssar = (values_of(evidence, table, key, 16) for key in keys)
    seeds = [s for s in softmax if None not in (softmax[s], cosines.get(s), lssar.get(s))]
    gains = {s: softmax[s] - cosines[s] for s in seeds}
    half = {s: (softmax[s] - lssar[s]) / 2 for s in seeds}
    label = "gain of softmax of cosines over softmax at 16x − half of LSSAR's"
    return [Point(label, BETTER, compare(gains, half, lower_is_better=False))]


def best_exponent_grows(evidence: Evidence, table: Table) -> list[Point]:
    """The best p of each seed at one and two own training lengths, long minus short training."""
    points = []
    for times, short in ((1, "128"), (2, "64")):
        best = [best_exponents(evidence, table, length, times) for length in ("512", short)]
        label = f"best p trained at 512 − trained at {short}, at {times}x"
        points.append(Point(label, BETTER, compare(*best, lower_is_better=False), 0))
    return points


# Keys of the rows trained at a length, and the length in the scale's training lengths.
TRAINED = {"64": ("lssar-L64-p", 0.5), "128": ("lssar-p", 1), "512": ("lssar-L512-p", 4)}


def best_exponents(evidence: Evidence, table: Table, length: str, times: int) -> BySeed:
    found, (stem, factor) = {}, TRAINED[length]
    for row in (row for row in table.rows if row.key.startswith(stem)):
        losses = values_of(evidence, table, row.key, f"{times * factor:g}")
        for seed, loss in losses.items():
            if loss is not None:
                found.setdefault(seed, {})[float(row.key.removeprefix(stem))] = loss
    return {seed: min(losses, key=losses.get) for seed, losses in found.items() if len(losses) > 2}


def constant_found(evidence: Evidence, table: Table) -> list[Point]:
    """1 where symbolic regression found a law of Newton's form, else 0."""
    found = []
    for key in ("lssar", "softmax"):
        constants = values_of(evidence, table, key, None, "constant")
        found.append({seed: float(value is not None) for seed, value in constants.items()})
    label = "law of the form m1 / r^2 found (1) or not (0), LSSAR − Softmax"
    return [Point(label, BETTER, compare(*found, lower_is_better=False))]


def edge_of_the_sweep(evidence: Evidence, table: Table) -> str:
    """Whether the best exponent, over the seeds that all have, is the first or last."""
    keys = [row.key for row in table.rows if re.fullmatch(r"lssar-p\d+", row.key)]
    cells = {int(key.removeprefix("lssar-p")): values_of(evidence, table, key, 16) for key in keys}
    cells = {p: v for p, v in sorted(cells.items()) if v and None not in v.values()}
    shared = set.intersection(*(set(values) for values in cells.values())) if cells else set()
    sums = {p: sum(values[s] for s in shared) for p, values in cells.items()}
    best = min(sums, key=sums.get) if shared else None
    if best is None or best not in (min(sums), max(sums)):
        return ""
    return f"the best exponent here, p = {best}, is the edge of the sweep: others were not tried"


def no_sink(evidence: Evidence, table: Table) -> str:
    sink = evidence.cell(table, table.row("softmax"), table.columns[0]).mean
    if sink is None or sink >= 0.1:
        return ""
    here = f"softmax has no sink here (mean weight on token 1 {sink:.3f})"
    return f"{here}: a larger scale would settle it"


def no_force(evidence: Evidence, table: Table) -> str:
    found = [values_of(evidence, table, key, None, "R2") for key in ("softmax", "lssar")]
    best = max((v for values in found for v in values.values() if v is not None), default=None)
    if best is None or best >= PREDICTS:
        return ""
    here = f"no model here predicts the force (R^2 at most {best:.2f})"
    return f"{here}: a setting in which one does would settle it"


RULES = nearly_constant, far_context_harms, most_of_the_effect, best_exponent_grows, constant_found
RULES = {f.__name__: f for f in RULES}
CAVEATS = {f.__name__: f for f in (edge_of_the_sweep, no_sink, no_force)}
DATA = load_toml("claims.toml")
PAPER_CLAIMS, OUR_CONTROLS = ([Claim(**c) for c in DATA[key]] for key in ("paper", "controls"))


def judge_all(evidence: Evidence) -> tuple[list[Judged], list[Judged]]:
    """The paper's claims and our controls, but for those of a table that the scale has not."""
    known = evidence.tables
    groups = ([c for c in group if c.table in known] for group in (PAPER_CLAIMS, OUR_CONTROLS))
    return tuple([judged(claim, evidence) for claim in group] for group in groups)


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
    titles = {"the paper's claims": claims, "our controls and findings": controls}
    for title, group in titles.items():
        lines.append(f"\n{title}")
        for found in group:
            text = textwrap.shorten(found.claim.text, 84, placeholder=" …")
            lines.append(f"  {found.verdict:14s} {text}")
            lines += [f"{'':17s}{found.settles}"] if found.settles else []
    return "\n".join(lines)
