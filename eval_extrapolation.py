"""python eval_extrapolation.py CKPT [CKPT ...] --data DIR --out results/x.json

Measures the validation loss at and beyond the training length (`--lengths
1024,2048,4096,8192,16384`). `torchrun --nproc_per_node=N` shares the work and gives the same
numbers.

The targets are the first 10,485,760 tokens of the validation set (or `--tokens`). With `--spread`
they are spread evenly over the set, whose beginning may not be a fair sample. They are predicted in
segments of the longest length, or of `--segment`, to predict the same tokens as an evaluation at
longer lengths. Each length cuts a segment into sequences that do not overlap, so every length,
model and variant predicts the same tokens.

With `--within-documents`, a segment never crosses an end-of-text token: where most documents are
shorter than a segment, its far context is other documents, which cannot help.

Reported per length:

    loss            mean over tokens; its standard error is over segments
    bits per byte   the same over the bytes of the tokens' text (0 for an end of text, whose loss
                    counts): comparable between tokenisers
    by position     mean over tokens at a range of positions in their sequence
    far-context     loss on the last half training length of every sequence when the model sees only
      benefit       the last training length of it, minus the loss on the same tokens with all of
                    the sequence in view; it is positive where far context helps
    paired          loss minus that of the first checkpoint, by segment, with its error

`--p`, `--alpha`, `--window`, `--position-interpolation`, `--ntk` and `--yarn` add variants of each
checkpoint. A sliding window of the training length is the control that any claim of extrapolation
has to beat; `--sinks 4` adds one with the first 4 tokens in view (StreamingLLM). In a model with
local and global layers, a window narrows the global ones.
"""

import math
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from data.shards import describe_set
from evaluating import report
from evaluating.arguments import EvaluationParser
from evaluating.protocol import Case, measuring, opened, progress, unmeasured
from evaluating.results import Record
from evaluating.targets import Targets, open_data
from evaluating.variants import Variant
from model import GPT
from support.command import lengths, positive, run
from training.distributed import World

Ranges = list[tuple[int, int]]  # of positions in a sequence: first included, last not


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, variants=True)
    parser.add_argument("--data", required=True, help="folder of token shards")
    parser.add_argument("--lengths", type=lengths, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=positive, default=10_485_760, help="targets; %(default)s")
    parser.add_argument("--spread", action="store_true", help="segments from all over the set")
    parser.add_argument("--segment", type=positive, help="default: the longest length")
    parser.add_argument("--within-documents", action="store_true", help="long documents only")
    parser.add_argument("--no-figures", action="store_true", help="print and record only")
    parser.add_argument("--short", action="store_true", help="print one table, draw nothing")
    return parser


def position_ranges(length: int) -> Ranges:
    """Return the ranges 0-16-20-24-28-32-40-..., up to the length: four parts of each octave."""
    edges = [0]
    edge = 16
    while edge < length:
        edges.append(edge)
        edge += 2 ** (edge.bit_length() - 3)  # a quarter of the octave
    return list(pairwise([*edges, length]))


def summed_losses(
    model: GPT, case: Case, keep: int, ranges: Ranges, targets: Targets, world: World
) -> np.ndarray:
    """Return the summed losses (segments, ranges) of the last `keep` tokens of every sequence.

    Batches have the same shape on any process, and each fills its own rows of a matrix that is zero
    elsewhere: the sum over processes is exact, so their number changes nothing.
    """
    sums = torch.zeros(targets.count, len(ranges), dtype=torch.float64)
    length = case.length
    near = ", near context" if keep < length else ""
    with progress(targets.tokens, f"{case.label} at {length}{near}", "tok", world.is_main) as bar:
        for number, (first, inputs, wanted) in enumerate(targets.batches()):
            if number % world.size == world.rank:
                segments = len(inputs)
                last_inputs = inputs.reshape(-1, length)[:, -keep:].to(world.device)
                last_wanted = wanted.reshape(-1, length)[:, -keep:].to(world.device)
                losses = model.token_losses(last_inputs, last_wanted)  # (sequences, keep)
                losses = losses.cpu().double()
                for column, (start, stop) in enumerate(ranges):
                    part = losses[:, start:stop].reshape(segments, -1)
                    sums[first : first + segments, column] = part.sum(1)
            bar.update(inputs.numel())
    return world.sum(sums).numpy()


def measure(model: GPT, case: Case, targets: Targets, world: World) -> list[Record]:
    """Measure the loss, bits per byte and, beyond the training length, the far-context benefit."""
    begun = time.monotonic()
    length = case.length
    train_length = case.checkpoint.info.train_length
    ranges = position_ranges(length)
    if length <= train_length:
        sums = summed_losses(model, case, length, ranges, targets, world)
        records = [loss_record(case, ranges, sums, targets)]
    else:
        tail = train_length // 2  # tokens of each sequence that the benefit is about
        in_full = (length - tail, length)
        sums = summed_losses(model, case, length, [*ranges, in_full], targets, world)
        replace(case, length=train_length).configure(model)
        in_near = (train_length - tail, train_length)
        near = summed_losses(model, case, train_length, [in_near], targets, world)
        records = [
            loss_record(case, ranges, sums[:, :-1], targets),
            benefit_record(case, tail, sums[:, -1], near[:, 0], targets),
        ]
    records[0].details["seconds"] = round(time.monotonic() - begun, 2)
    if targets.bytes:
        records.append(in_bits(records[0], targets))
    return records


def loss_record(case: Case, ranges: Ranges, sums: np.ndarray, targets: Targets) -> Record:
    """Return the mean loss, also by range of positions and by segment."""
    by_segment = sums.sum(1) / targets.segment
    loss, error = report.mean_and_error(by_segment)
    sequences = targets.tokens // case.length
    by_position = []
    for (start, stop), total in zip(ranges, sums.sum(0), strict=True):
        mean = float(total) / (sequences * (stop - start))
        by_position.append({"from": start + 1, "to": stop, "loss": mean})
    return Record(
        "loss",
        value=loss,
        error=error,
        tokens=targets.tokens,
        details={"by_position": by_position, "by_segment": by_segment.tolist()},
        **case.key,
    )


def benefit_record(
    case: Case, tail: int, full_sums: np.ndarray, near_sums: np.ndarray, targets: Targets
) -> Record:
    """Return the loss on the last tokens of every sequence in near context minus in full."""
    tokens_per_segment = tail * targets.segment // case.length
    full = full_sums / tokens_per_segment
    near = near_sums / tokens_per_segment
    benefit, error = report.mean_and_error(near - full)
    return Record(
        "far_context_benefit",
        value=benefit,
        error=error,
        tokens=tail * (targets.tokens // case.length),
        details={
            "full_context": float(full.mean()),
            "near_context": float(near.mean()),
            "tokens_per_sequence": tail,
            "by_segment": (near - full).tolist(),
        },
        **case.key,
    )


def in_bits(loss: Record, targets: Targets) -> Record:
    """Return a loss in nats per token as bits per byte of the tokens' text."""
    scale = targets.tokens / targets.bytes / math.log(2)
    return replace(
        loss,
        quantity="bits_per_byte",
        value=loss.value * scale,
        error=None if loss.error is None else loss.error * scale,
        details={"bytes": targets.bytes},
    )


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    with opened(arguments) as (world, checkpoints, chosen):
        targets = Targets(
            open_data(arguments.data, checkpoints),
            arguments.lengths,
            tokens=arguments.tokens,
            segment=arguments.segment,
            spread=arguments.spread,
            within_documents=arguments.within_documents,
        )
        if world.is_main and targets.tokens != arguments.tokens:
            print(
                f"{targets.tokens:,} target tokens instead of {arguments.tokens:,}: the largest "
                f"multiple of {targets.segment} within --tokens and the size of {arguments.data}"
            )
        if world.is_main:
            print(targets.coverage(), end="")
        about = describe_set(arguments.data) | targets.documents
        with measuring(arguments, "extrapolation", targets.settings(), about, world) as results:
            for case, model in unmeasured(results, checkpoints, chosen, arguments.lengths, world):
                trained = replace(case, variant=Variant())
                # A variant may change nothing at a length.
                found = results.select(**trained.key) if case.config == trained.config else []
                found = found or measure(model, case, targets, world)
                found = [replace(record, variant=case.variant.name) for record in found]
                results.add(*found, save=world.is_main)
                if world.is_main:
                    shown = report.number(found[0].value, ".4f")
                    print(f"{case.label} at {case.length}: loss {shown}", file=sys.stderr)
    if world.is_main and arguments.short:
        print(report.short_table(results))
    elif world.is_main:
        print(report.tables(results, checkpoints[0].identity))
        if not arguments.no_figures:
            report.figures(results)


if __name__ == "__main__":
    run(main)
