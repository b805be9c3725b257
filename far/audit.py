"""python far/audit.py CKPT [CKPT ...] --data DIR --out results/audit.json
python far/audit.py CKPT [CKPT ...] --task mqar --out results/audit-mqar.json

Tests whether a model uses context beyond its training length L. Tokens that far context could
predict are scored twice, with everything in view and with only the last L tokens. Scores are
grouped by the distance to the earlier occurrence: (L, 2L], (2L, 4L], ... up to `--times 16` L.

    --data   natural text, any model. A token counts if the k-gram before it (8 bytes, or 3 tokens
             of BPE) last occurred at such a distance within its segment of 16 L tokens. The same
             token may have followed then, or another: these cases are reported apart, and so are
             tokens whose k-gram is new. The score is the loss. `--segments 256` are spread over the
             set; with `--within-documents` none crosses an end-of-text token.
    --task   mqar, flipflop, copy or passkey, for a model trained on it (data/prepare.py): the
             answers in `--segments` sequences of 16 L. The score is 1 for the right token, else 0,
             as the loss means nothing where the answer is out of view. Only answers farther than
             layers x L count, which stacked windows of L do not reach. In the benefit, an accuracy
             below chance counts as chance.

"Only the last L" is a fresh context: the L tokens before the target, computed alone. A sliding
window of L would be cheaper, but each layer passes on what its own window saw: the last of n layers
sees n L tokens. It is a way to use far context, not the control (`--window` adds it as a variant).
The fresh context costs L tokens per target; at most 4,096 targets are drawn.

The far-context benefit is positive when far context helps: the loss in near minus in full context,
or the right answers in full minus in near. The verdict is the first that fits its 95 % interval by
Student's t, over 30 blocks of neighbouring segments, or over seeds where several are given:

    ignores far context     the interval lies within 0.02 nats, or 0.05 in accuracy, of zero
    uses far context        the interval lies above zero
    harmed by far context   the interval lies below zero, or the loss overflows
    open                    anything else

A task is judged only where it was learned: if any seed gives fewer than 90 % right answers in
sequences of L tokens (1x), the verdict is "not learned at 1x", whatever the benefit.
"""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from data.far_tasks import PASSKEY, TASKS, chance_accuracy
from data.loader import Sequences
from data.shards import describe_set
from evaluating import report
from evaluating.arguments import EvaluationParser
from evaluating.checkpoints import Checkpoint, labels, series_label
from evaluating.protocol import Case, measuring, opened, unmeasured
from evaluating.results import Record, Results
from evaluating.statistic import Interval, interval
from evaluating.targets import Targets, open_data
from far.far_targets import (
    GRAM,
    LOSSES,
    RIGHT,
    UNSEEN,
    FarTargets,
    score_targets,
    task_targets,
    text_targets,
)
from lssar.errors import UserError
from model import GPT
from support import plots
from support.command import positive, run, seed_number, whole
from support.text import table
from training import distributed

BLOCKS = 30  # of neighbouring segments, over which an interval is taken
OCTAVES_WITHIN = 4  # octaves of distance up to 1x in which a task's accuracy is shown too
MARGINS = {"nats": 0.02, "accuracy": 0.05}  # within them far context counts as ignored
LEARNED = 0.9  # share of right answers at the training length that a verdict on a task requires
# Verdicts.
USES = "uses far context"
IGNORES = "ignores far context"
HARMED = "harmed by far context"
OPEN = "open"


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, variants=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="folder of token shards: natural text")
    source.add_argument("--task", choices=(*TASKS, PASSKEY))
    parser.add_argument("--within-documents", action="store_true", help="long documents only")
    parser.add_argument("--segments", type=whole(1, 100_000), default=256, help="%(default)s")
    parser.add_argument("--near", type=positive, help="L; default: the training length")
    parser.add_argument("--times", type=whole(2, 2**20), default=16, help="a power of 2")
    parser.add_argument("--seed", type=seed_number, default=0, help="of a task's sequences")
    return parser


def far_verdict(benefit: Interval | None, margin: float, right: float = 1.0) -> str:
    """Say what a model does with far context; `right`: its share of right answers at 1x."""
    if right < LEARNED:
        return f"not learned at 1x ({right:.1%} right, the bar is {LEARNED:.0%})"
    if benefit is None:
        return HARMED
    if -margin <= benefit.low and benefit.high <= margin:
        return IGNORES
    if benefit.low > 0:
        return USES
    return HARMED if benefit.high < 0 else OPEN


def interval_of(values) -> Interval | None:
    """Return the interval of independent values: seeds, or blocks; None if one is not finite."""
    if any(value is None or not np.isfinite(value) for value in values):
        return None
    return interval([float(value) for value in values])


def by_block(values: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return one value per block, whose mean is the mean over all targets.

    Blocks have unequal numbers of targets. A block's value is therefore the mean over all targets,
    plus the difference between the block's sum and the sum that this mean would give.
    """
    numbers = np.unique(block, return_inverse=True)[1]
    sums = np.bincount(numbers, values)
    counts = np.bincount(numbers)
    mean = values.mean()
    return mean + (sums - mean * counts) / counts.mean()


def mean_record(targets: FarTargets, scores: np.ndarray, chosen: np.ndarray) -> dict:
    """Return value, error, tokens and details of a record of the chosen targets."""
    block = targets.segment[chosen] * BLOCKS // max(BLOCKS, len(targets.tokens))
    blocks = by_block(scores[chosen], block)
    found = interval_of(blocks)
    details = {"interval": None, "by_segment": blocks.tolist() if found else []}
    error = None
    if found and found.half_width is not None:
        details["interval"] = (found.low, found.high)
        error = float(np.std(blocks, ddof=1) / np.sqrt(len(blocks)))
    value = found.mean if found else None
    return {"value": value, "error": error, "tokens": int(chosen.sum()), "details": details}


class Audit:
    """Scores the same targets for every model, and judges the scores."""

    def __init__(self, arguments, checkpoints: list[Checkpoint]):
        lengths = sorted({c.info.train_length for c in checkpoints})
        if arguments.near is None and len(lengths) > 1:
            raise UserError(
                f"the models were trained at {' and '.join(map(str, lengths))} tokens; "
                "give --near, or audit them separately"
            )
        if arguments.times & (arguments.times - 1):
            raise UserError(f"--times {arguments.times} is not a power of 2")
        names = {c.tokeniser().name: c for c in checkpoints}
        if len(names) > 1:
            raise UserError(f"the models read {' and '.join(names)}; audit them separately")
        self.arguments = arguments
        self.unit = "accuracy" if arguments.task else "nats"
        self.task = arguments.task
        self.near = arguments.near or lengths[0]
        self.length = self.near * arguments.times
        self.settings = {"near": self.near, "times": arguments.times, "task": self.task}
        self.about = {}
        self.coverage = ""
        self.chance = 0.0
        self.targets = self._answers(checkpoints) if self.task else self._text(checkpoints)
        self.settings["segments"] = len(self.targets.tokens)
        self.settings["targets_sha256"] = self.targets.sha256

    def _text(self, checkpoints: list[Checkpoint]) -> FarTargets:
        """Choose the targets of a text."""
        asked = self.arguments
        data = open_data(asked.data, checkpoints)
        segments = Targets(
            data,
            [self.length],
            tokens=asked.segments * self.length,
            spread=True,
            within_documents=asked.within_documents,
        )
        gram = GRAM[checkpoints[0].tokeniser().name]
        self.settings |= {"gram": gram, "within_documents": asked.within_documents}
        self.about = describe_set(asked.data) | segments.documents
        self.coverage = segments.coverage()
        tokens = Sequences(data, self.length).read(segments.starts).numpy()
        return text_targets(tokens, self.near, gram)

    def _answers(self, checkpoints: list[Checkpoint]) -> FarTargets:
        """Choose the targets of a task at the full length, and others at the training length."""
        asked = self.arguments
        reader = checkpoints[0].tokeniser()
        if asked.within_documents:
            raise UserError("--within-documents is about --data; the sequences of a task are whole")
        deepest = max(c.config.layers for c in checkpoints)
        shortest = deepest * (2 if self.task == "copy" else 1)  # copies begin after half of it
        if shortest >= asked.times:
            raise UserError(
                f"windows of {self.near} reach {deepest * self.near} tokens in {deepest} layers; "
                f"raise --times to at least {2 ** shortest.bit_length()}"
            )
        self.chance = chance_accuracy(self.task, reader)
        self.settings |= {"tokeniser": reader.name, "seed": asked.seed}

        def targets(length: int, beyond: int) -> FarTargets:
            return task_targets(self.task, reader, length, asked.segments, beyond, asked.seed)

        self.targets_at_1x = targets(self.near, beyond=0)
        found = targets(self.length, beyond=self.near)
        if not (found.distance > deepest * self.near).any():
            raise UserError(
                f"no answer stands farther than {deepest * self.near} tokens from its question in "
                f"{asked.segments} sequences; raise --segments"
            )
        return found

    def measure(self, model: GPT, case: Case, device) -> list[Record]:
        """Measure each range of distances, then the benefit that the verdict rests on."""
        begun = time.monotonic()
        label = f"{case.label} at {self.length}"
        targets = self.targets
        kind = LOSSES if self.task is None else RIGHT
        full = score_targets(model, targets, device, label)[kind]
        replace(case, length=self.near).configure(model)
        near = score_targets(model, targets, device, label, self.near)[kind]
        found = np.stack((full, near))
        key = case.key | {"task": self.task or ""}
        right = 1.0  # share of right answers at 1x; a text has none
        parts = list(ranges(targets, self.length, self.arguments.times.bit_length() - 1))

        def record(quantity: str, numbers: dict, length: int = self.length) -> Record:
            return Record(quantity, **(key | numbers | {"length": length}))

        records = []
        for upper, chosen in parts:
            records.append(record("benefit_by_distance", self.far_benefit(found, chosen), upper))
        stacked = self.near * case.checkpoint.config.layers
        beyond = stacked if self.task else self.near
        overall = self.far_benefit(found, targets.distance > beyond)
        details = overall["details"]
        details["beyond"] = beyond
        if self.task is None:
            details["beyond_stacked_windows"] = self.benefit(found, targets.distance > stacked)
            details["new"] = self.benefit(found, targets.distance == UNSEEN)
        else:
            at_1x = f"{case.label} at {self.near}"
            answers = score_targets(model, self.targets_at_1x, device, at_1x)[RIGHT]
            right = float(answers.mean())
            details["accuracy_at_near"] = right
            for upper, chosen in ranges(self.targets_at_1x, self.near, OCTAVES_WITHIN):
                mean = mean_record(self.targets_at_1x, answers, chosen)
                records.append(record("accuracy_by_distance", mean, upper))
            for upper, chosen in parts:
                mean = mean_record(targets, full, chosen)
                records.append(record("accuracy_by_distance", mean, upper))
        blocks = interval_of(details["by_segment"]) if details["by_segment"] else None
        details["verdict"] = far_verdict(blocks, MARGINS[self.unit], right)
        details["seconds"] = round(time.monotonic() - begun, 2)
        return [*records, record("far_benefit", overall)]

    def benefit(self, scores: np.ndarray, chosen: np.ndarray) -> dict:
        """Return the fields of a record; scores (2, targets): in full and in near context."""
        if not chosen.any():
            return {"value": None, "tokens": 0}
        full, near = scores
        if self.task is None:
            benefits = near - full
        else:
            # A share below chance counts as chance: to answer with a bit at random is no gain over
            # an answer that is no bit at all.
            full_raise = max(0.0, self.chance - full[chosen].mean())
            near_raise = max(0.0, self.chance - near[chosen].mean())
            benefits = full - near + full_raise - near_raise
        found = mean_record(self.targets, benefits, chosen)
        found["details"] |= {"full": full[chosen].mean(), "near": near[chosen].mean()}
        return found

    def far_benefit(self, scores: np.ndarray, chosen: np.ndarray) -> dict:
        """Return the benefit; for a text, also apart by whether the same token followed before."""
        found = self.benefit(scores, chosen)
        if self.task is None:
            same = self.targets.same
            found["details"]["same"] = self.benefit(scores, chosen & same)
            found["details"]["differs"] = self.benefit(scores, chosen & ~same)
        return found


def ranges(targets: FarTargets, longest: int, octaves: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (upper end, mask of targets) of each octave of distance up to `longest` with any."""
    for upper in (longest // 2**i for i in reversed(range(octaves))):
        chosen = (targets.distance > upper // 2) & (targets.distance <= upper)
        if chosen.any():
            yield upper, chosen


def benefits_by_model(results: Results) -> Iterator[tuple[str, list[Record]]]:
    """Yield (name, benefits) of each run; runs that differ only in their seed count as one."""
    groups: dict[tuple, list[Record]] = {}
    for record in results.select(quantity="far_benefit"):
        run = results.runs[record.run]
        name = re.sub(rf"[-_]?s?(eed)?[-_=]?{run['seed']}$", "", run["run"])
        recipe = (name, str(run["model"]), run["train_length"], run["step"], record.variant)
        groups.setdefault(recipe, []).append(record)
    names = labels(results.runs)
    for (name, *_, variant), records in groups.items():
        seeds = {results.runs[r.run]["seed"] for r in records}
        if 1 < len(seeds) == len(records):
            yield series_label(f"{name}, {len(seeds)} seeds", variant), records
        else:
            yield from ((series_label(names[r.run], variant), [r]) for r in records)


def verdicts(results: Results, unit: str) -> str:
    """Return the table of verdicts, one row per model."""
    rows = []
    task = results.settings["task"]
    for name, records in benefits_by_model(results):
        details = [r.details for r in records]
        values = details[0]["by_segment"] if len(records) == 1 else [r.value for r in records]
        found = interval_of(values) if values else None
        targets = f"{sum(r.tokens for r in records)} > {details[0]['beyond']}"
        kinds = ("accuracy_at_near", "full", "near") if task else ()
        shares = [f"{np.mean([one[kind] for one in details]):.0%}" for kind in kinds]
        right = min(one.get("accuracy_at_near", 1.0) for one in details)
        shown = found.text() if found else "overflow"
        verdict = far_verdict(found, MARGINS[unit], right)
        rows.append([name, targets, *shares, shown, verdict])
    shares = ["at 1x", "far", "near only"] if task else []
    return table(["", "targets > distance", *shares, f"benefit ({unit})", "verdict"], rows)


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    if distributed.world_size() > 1:
        raise UserError("far/audit.py runs in one process; start it without torchrun")
    with opened(arguments) as (world, checkpoints, chosen):
        audit = Audit(arguments, checkpoints)
        count = (audit.targets.distance > audit.near).sum()
        segments = len(audit.targets.tokens)
        print(
            f"{audit.coverage}{count:,} targets in {segments:,} segments of {audit.length:,} tokens"
        )
        with measuring(arguments, "audit", audit.settings, audit.about, world) as results:
            for case, model in unmeasured(results, checkpoints, chosen, [audit.length], world):
                found = audit.measure(model, case, world.device)
                results.add(*found)
                print(f"{case.label}: {found[-1].details['verdict']}", file=sys.stderr)
    show(results, audit.unit)


def show(results: Results, unit: str) -> None:
    """Print the benefit on a text or the accuracy in a task by distance; then the verdicts."""
    near = results.settings["near"]
    task = results.settings["task"]
    if task is None:
        quantity = "benefit_by_distance"
        title = f"nats with the last {near} tokens minus with everything in view (targets)"
        axis = "far-context benefit (nats): near − full"
        form = "+.3f"
    else:
        quantity = "accuracy_by_distance"
        title = "right answers with everything in view"
        axis = "right answers"
        form = ".2f"

    def cell(record: Record) -> str:
        half = with_interval(record)[1]
        shown = f" ±{half:{form.lstrip('+')}}" if record.details["interval"] else ""
        count = "" if task else f" ({record.tokens})"  # a task's eight columns leave no room
        return f"{report.number(record.value, form)}{shown}{count}"

    title += ", ± 95 % interval, by distance up to"
    print(report.table_by_length(results, title, quantity, cell))
    print("\n" + verdicts(results, unit))
    figure, axes = report.figure_by_length(
        results, quantity, axis, "distance up to (tokens)", with_interval
    )
    level = 0.0
    if task:
        axes.set_ylim(0, 1)
        level = np.mean([r.details["near"] for r in results.select(quantity="far_benefit")])
        axes.annotate(
            f"with the last {near} tokens only",
            (0, level),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(2, 2),
            fontsize=6,
            color="#555555",
        )
    axes.axhline(level, color="#777777", linewidth=0.9, zorder=1)
    plots.publish(figure, results.sibling(".png"))


def with_interval(record: Record) -> tuple[float, float, float]:
    """Return the value and half of its interval, below and above it; 0 where there is none."""
    low, high = record.details["interval"] or (0, 0)
    return record.value, (high - low) / 2, (high - low) / 2


if __name__ == "__main__":
    run(main)
