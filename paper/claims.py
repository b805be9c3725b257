"""How a claim becomes a verdict: which comparisons it asks for, and what keeps it open.

The claims are in claims.toml. Comparisons come from `evidence.py`, as those of tables, figures and
page do, and are judged by `statistic.py` alone.
"""

import math
import operator
import re
import statistics
import textwrap
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paper.evidence import Evidence, Sheet
from paper.experiments import Column, Table, load_toml, of_scale
from paper.statistic import (
    BETTER,
    LEARNED,
    OPEN,
    WORSE,
    BySeed,
    Comparison,
    apply,
    compare,
    far_verdict,
    judge,
    settles,
    signed,
)

COMPARISON = re.compile(r"(.+?) (better|no worse|worse|as good) (?:than|as) (.+) at (.+)")
CHECK = re.compile(r"(\S+) (\w+)(?:@(\S+))? (within|below|above) (\S+)(?: of (\S+))?")
# The paper's LSSAR goes from 3.1905 to 3.45: what it calls nearly constant is a rise by 8 %.
NEARLY = 3.45 / 3.1905
PREDICTS = 0.8  # R^2 from which on a model predicts the force at all
POINTS = 0.5  # mean cosine with the true force from which on a model knows its direction at all
ALIKE = 6  # seeds that all have to agree where a count decides: by chance, less than once in twenty
SATURATED = 95  # per cent of the passkeys at the training length: they were learned


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
    seen: tuple[int, ...] = ()  # seeds that do not count
    finding: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[str, str, str, list[str]]]:
        """(row, "better", "worse", "no worse" or "as good", other row, places)"""
        found = []
        for sentence in self.compare:
            rows, wanted, others, places = COMPARISON.fullmatch(sentence).groups()
            for row in rows.split(", "):
                found += [(row, wanted, other, places.split(", ")) for other in others.split(", ")]
        return found


def places(column: Column) -> set[str]:
    """What a claim may call a column: its length, quantity or task."""
    at_length = {"loss": "", "accuracy": "", "far_accuracy": "far "}.get(column.quantity)
    name = column.quantity if at_length is None else f"{at_length}{column.factor:g}"
    return {name, column.task} - {""}


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
            return f"{self.label}: {self.found.absent}"
        paper = "" if self.paper is None else f"; paper {signed(self.paper, self.decimals)}"
        seeds = f"{self.found.n} seeds" if self.found.n > 1 else "one seed"
        return f"{self.label}: {self.shown or self.found.text(self.decimals)}, {seeds}{paper}"


class Judged(NamedTuple):
    claim: Claim
    verdict: str
    points: list[Point]
    settles: str  # what would settle an open one


def judged(claim: Claim, evidence: Evidence) -> Judged:
    unseen = [tuple(claim.seen)] if claim.seen else []
    sheet = evidence.sheet(evidence.tables[claim.table], *unseen)
    points = of_pairs(claim, sheet) + of_checks(claim, sheet)
    points += RULES[claim.rule](sheet) if claim.rule else []
    caveat = of_scale(claim.open, evidence.scale)
    if claim.caveat and sheet.is_measured:
        caveat = CAVEATS[claim.caveat](sheet)
    found = [(point.found, point.wanted) for point in points]
    verdict = OPEN if caveat else judge(found)
    return Judged(claim, verdict, points, (caveat or settles(found)) if verdict == OPEN else "")


def of_pairs(claim: Claim, sheet: Sheet) -> list[Point]:
    points, table = [], sheet.table
    for key, wanted, other_key, at in claim.pairs:
        row, other = table.row(key), table.row(other_key)
        for column in table.columns if row and other else ():
            measured = not column.task or sheet.cell(table.rows[0], column).n
            if places(column) & set(at) and (measured or column.task in at):
                label = f"{row.title} − {other.title}, {sheet.heading(column)}"
                which = (row, other, column)
                found, paper = sheet.compare(*which), sheet.printed_gap(*which)
                points.append(Point(label, wanted, found, sheet.decimals(column), paper))
    return points


def of_checks(claim: Claim, sheet: Sheet) -> list[Point]:
    """A quantity of one row, or the ratio of two, against a number."""
    points = []
    for sentence in of_scale(claim.check, sheet.scale):
        keys, quantity, place, kind, limit, centre = CHECK.fullmatch(sentence).groups()
        rows = [sheet.table.row(key) for key in keys.split("/")]
        if None in rows:
            continue
        column = column_of(sheet.table, place, quantity)
        values = [sheet.cell(row, column).values for row in rows]
        values = apply(lambda value, base=1.0: value / base, *values)
        off = apply(lambda value, at=centre: abs(value - float(at)) if at else value, values)
        text = sheet.text_error(column, *rows) if len(rows) == 1 and not centre else {}
        limits, lower = dict.fromkeys(off, float(limit)), kind != "above"
        found = compare(off, limits, lower_is_better=lower, **text)
        mean = f"{statistics.fmean(values.values()):.4g}" if found.n else ""
        unit = " %" if column.percent and len(rows) == 1 else ""
        rule = f"{kind} {limit}" + (f" of {centre}" if centre else "")
        label = f"{' / '.join(row.title for row in rows)}, {sheet.heading(column)}"
        shown = f"{mean}{unit} ({rule})".replace("-", "−")
        by_itself = float(limit) == 0 and not centre  # the difference is the quantity
        points.append(Point(label, BETTER, found, shown="" if by_itself else shown))
    return points


def column_of(table: Table, place, quantity: str) -> Column:
    """That of a quantity at a length or on a task."""
    for column in table.columns:
        at = column.task or (f"{column.factor:g}" if column.factor is not None else "")
        if column.quantity == quantity and (place is None or at == f"{place}"):
            return column
    raise KeyError(f"{table.name} has no column of {quantity} at {place}")


def values_of(sheet: Sheet, key: str, place, quantity: str = "loss") -> BySeed:
    return sheet.cell(sheet.table.row(key), column_of(sheet.table, place, quantity)).values


def nearly_constant(sheet: Sheet) -> list[Point]:
    near, far = (values_of(sheet, "lssar-p15", factor) for factor in (1, 16))
    allowed = apply(lambda loss: NEARLY * loss, near)
    label = f"loss at 16x − {NEARLY:.2f} times the loss at 1x (the paper's own rise)"
    return [Point(label, BETTER, compare(far, allowed))]


def most_of_the_effect(sheet: Sheet) -> list[Point]:
    """What softmax of cosines gains over softmax at 16x, and half of what LSSAR gains."""
    keys = ("softmax", "cos-softmax", "lssar-p15")
    softmax, cosines, lssar = (values_of(sheet, key, 16) for key in keys)
    gains = apply(operator.sub, softmax, cosines)
    half = apply(lambda loss, best: (loss - best) / 2, softmax, lssar)
    label = "gain of softmax of cosines over softmax at 16x − half of LSSAR's"
    return [Point(label, BETTER, compare(gains, half, lower_is_better=False))]


def best_exponent_grows(sheet: Sheet) -> list[Point]:
    """The best p of each seed at one and two own training lengths, long minus short training."""
    points = []
    for times, short, stem in ((1, 128, "lssar-p"), (2, 64, "lssar-L64-p")):
        places = {"lssar-L512-p": 4 * times, stem: 1}  # in training lengths of the scale, 128
        best = [best_exponents(swept(sheet, *place)) for place in places.items()]
        found = counted(compare(*best, lower_is_better=False))
        label = f"best p trained at 512 − trained at {short}, at {times}x"
        points.append(Point(label, BETTER, found, 0))
    return points


def counted(found: Comparison) -> Comparison:
    """Of counts, which have no spread where all seeds agree: it takes ALIKE of them."""
    if found.n >= ALIKE or len(set(found.differences)) != 1:
        return found
    return replace(found, differences=(), absent=f"{found.n} seeds alike, {ALIKE} would settle it")


def swept(sheet: Sheet, stem: str, place: int) -> dict[int, BySeed]:
    """Losses by exponent, of the rows whose keys are the stem with an exponent."""
    keys = [row.key for row in sheet.table.rows if row.key.startswith(stem)]
    return {int(k.removeprefix(stem)): values_of(sheet, k, place) for k in keys}


def best_exponents(losses: dict[int, BySeed]) -> BySeed:
    found: dict[int | None, dict[int, float]] = {}
    for p, values in losses.items():
        for seed, loss in values.items():
            found.setdefault(seed, {})[p] = math.inf if loss is None else loss
    return {seed: min(at, key=at.get) for seed, at in found.items() if len(at) > 2}


def constant_found(sheet: Sheet) -> list[Point]:
    """Whether symbolic regression finds a law of Newton's form with LSSAR, and not with softmax."""
    points = []
    for key, title, wanted in (("lssar", "LSSAR", BETTER), ("softmax", "Softmax", WORSE)):
        constants = values_of(sheet, key, None, "constant")
        found = {seed: float(k is not None) for seed, k in constants.items()}
        half = counted(compare(found, dict.fromkeys(found, 0.5), lower_is_better=False))
        share = f"{sum(found.values()):.0f} of {len(found)}"
        label = f"{title}: seeds with a law of the form m1 / r^2, {share}"
        points.append(Point(label, wanted, half, shown=share))
    return points


def most_tasks(sheet: Sheet) -> list[Point]:
    """The share of the paper's tasks on which LSSAR is ahead of softmax, above a half."""
    points = []
    for row in (row for row in sheet.table.rows if "lssar" in row.key):
        other = sheet.table.row(re.sub("lssar(-p15)?", "softmax", row.key))
        tasks = {c.task: c for c in reversed(sheet.table.columns) if sheet.printed(row, c)}
        wins: dict[int | None, list[bool]] = {}
        for column in tasks.values():  # the first metric of each, which is the paper's
            differences = apply(operator.sub, *(sheet.cell(r, column).values for r in (row, other)))
            for seed, gap in differences.items():
                ahead = bool(gap) and (gap < 0) == column.lower_is_better  # an overflow is not
                wins.setdefault(seed, []).append(ahead)
        shares = {seed: sum(won) / len(won) for seed, won in wins.items() if len(won) == len(tasks)}
        found = compare(shares, dict.fromkeys(shares, 0.5), lower_is_better=False)
        label = f"{row.title}: share of the tasks ahead of {other.title}, above a half"
        points.append(Point(label, BETTER, found, 2))
    return points


def edge_of_the_sweep(sheet: Sheet) -> str:
    """Whether the best exponent, over the seeds that all have, is the first or last."""
    found = swept(sheet, "lssar-p", 16).items()
    losses = {p: values for p, values in found if values and None not in values.values()}
    shared = set.intersection(*map(set, losses.values())) if losses else set()
    sums = {p: sum(values[seed] for seed in shared) for p, values in losses.items()}
    best = min(sums, key=sums.get) if shared else None
    if best is None or best not in (min(sums), max(sums)):
        return ""
    return f"the best exponent here, p = {best}, is the edge of the sweep: others were not tried"


def no_sink(sheet: Sheet) -> str:
    sink = sheet.cell(sheet.table.row("softmax"), sheet.table.columns[0]).mean
    if sink is None or sink >= 0.1:
        return ""
    here = f"softmax has no sink here (mean weight on token 1 {sink:.3f})"
    return f"{here}: a larger scale would settle it"


def no_force(sheet: Sheet) -> str:
    """Whether no model predicts the force better than what knows all but the planet's mass."""
    found = [values_of(sheet, key, None, "R2") for key in ("softmax", "lssar")]
    best = max((v for values in found for v in values.values() if v is not None), default=None)
    blind = sheet.cell(sheet.table.row("blind"), column_of(sheet.table, None, "R2")).mean
    least = max(PREDICTS, blind or 0)
    if best is None or best >= least:
        return ""
    here = f"no model here predicts the force (R^2 at most {best:.2f}, {least:.2f} wanted)"
    return f"{here}: a setting in which one does would settle it"


def no_direction(sheet: Sheet) -> str:
    found = [values_of(sheet, key, None, "cosine").values() for key in ("softmax", "lssar")]
    best = max((v for values in found for v in values if v is not None), default=1.0)
    here = f"no model here knows the direction of the force (cosine at most {best:.2f})"
    return "" if best >= POINTS else f"{here}: a setting in which one does would settle it"


def task_not_learned(sheet: Sheet) -> str:
    """As in audit.py, of the model that the claims on tasks are about, and also of the answers that
    lie farthest back within the training length."""
    row = sheet.table.row("far-cos-softmax")
    (column,) = (c for c in sheet.table.columns if c.quantity == "far_gain")
    found = sheet.measured(row, column).values()
    shares = [one.record.details.get("accuracy_at_near", 1.0) for one in found]
    near = max((c for c in sheet.table.columns if c.factor <= 1), key=lambda c: c.factor)
    shares += [one.record.value for one in sheet.measured(row, near).values()]
    right = min((share for share in shares if share is not None), default=1.0)
    return far_verdict(Comparison(()), right) if right < LEARNED else ""


def at_the_ceiling(sheet: Sheet) -> str:
    right = sheet.cell(sheet.table.row("softmax"), column_of(sheet.table, 1, "accuracy")).mean
    if right is None or right < SATURATED:
        return ""
    here = f"softmax finds {right:.1f} % of the keys at the training length"
    return f"{here}, and nothing can be much better: a harder task would settle it"


def passkey_not_learned(sheet: Sheet) -> str:
    """Whether softmax or LSSAR fails at the training length: then nothing is shown beyond it."""
    for key in ("softmax", "lssar-p15"):
        row, column = sheet.table.row(key), column_of(sheet.table, 1, "accuracy")
        right = min(
            (v for v in sheet.cell(row, column).values.values() if v is not None), default=100
        )
        if sheet.scale.name == "nano" and right < SATURATED:
            few = f"a seed of {row.title} finds {right:.0f} % of the keys at the training length"
            return f"{few}, below {SATURATED} %: more steps would settle it"
    return ""


def edge_at_every_length(sheet: Sheet) -> str:
    """Whether the best exponent at 1x is the same end of those tried, trained at 128 and at 512."""
    best, tried = set(), []
    for stem, place in (("lssar-p", 1), ("lssar-L512-p", 4)):
        losses = swept(sheet, stem, place)
        tried = sorted(losses)
        best |= set(best_exponents(losses).values())
    for edge, end in ((tried[0], "smallest"), (tried[-1], "largest")):
        if best == {edge}:
            here = f"p = {edge}, the {end} tried, is best at 1x, trained at 128 and at 512"
            return f"{here}: others would settle it"
    return ""


RULES = nearly_constant, most_of_the_effect, best_exponent_grows, constant_found, most_tasks
RULES = {f.__name__: f for f in RULES}
CAVEATS = edge_of_the_sweep, edge_at_every_length, no_sink, no_force, no_direction
CAVEATS += task_not_learned, passkey_not_learned, at_the_ceiling
CAVEATS = {f.__name__: f for f in CAVEATS}
DATA = load_toml("claims.toml")
PAPER_CLAIMS, OUR_CONTROLS = ([Claim(**c) for c in DATA[key]] for key in ("paper", "controls"))


def judge_all(evidence: Evidence) -> tuple[list[Judged], list[Judged]]:
    """The paper's claims and our controls, but for those of a table that the scale has not."""
    groups, known = (PAPER_CLAIMS, OUR_CONTROLS), evidence.tables
    return tuple([judged(c, evidence) for c in group if c.table in known] for group in groups)


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
