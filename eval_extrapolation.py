"""python eval_extrapolation.py CKPT [CKPT ...] --data DIR --out results/x.json

Measures the validation loss at and beyond the training length (`--lengths
1024,2048,4096,8192,16384`). `torchrun --nproc_per_node=N` shares the work and gives the same
numbers.

The targets are the first 10,485,760 tokens of the validation set (or `--tokens`). With `--spread`
they are spread evenly over the set, whose beginning may not be a fair sample. They are predicted in
segments of the longest length, or of `--segment`, to predict the same tokens as an evaluation at
longer lengths. Each length cuts a segment into windows that do not overlap, so every length, model
and variant predicts the same tokens.

With `--within-documents`, a segment never crosses an end-of-text token: where most documents are
shorter than a segment, its far context is other documents, which cannot help.

Reported per length:

    loss            mean over tokens; its standard error is over segments
    bits per byte   the same over the bytes of the tokens' text (0 for an end of text, whose loss
                    counts): comparable between tokenisers
    by position     mean over tokens at a range of positions in their window
    far-context     loss on the last half training length of every window when the model sees only
      benefit       the last training length of the window, minus the loss on the same tokens with
                    all of the window in view; it is positive where far context helps
    paired          loss minus that of the first checkpoint, by segment, with its error

`--p`, `--alpha`, `--window`, `--position-interpolation`, `--ntk` and `--yarn` add variants of each
checkpoint. A window of the training length is the control that any claim of extrapolation has to
beat; `--sinks 4` adds one with the first 4 tokens in view (StreamingLLM). In a model with local and
global layers, a window narrows the global ones.
"""

import math
import sys
import time
from dataclasses import replace
from itertools import count, pairwise, takewhile

import torch

from data.shards import describe_set
from evaluating import EvaluationParser
from evaluating import extrapolation_report as report
from evaluating.checkpoints import Case, Variant, unmeasured
from evaluating.protocol import measuring, opened, progress
from evaluating.results import Record
from evaluating.targets import Targets, open_data
from model import GPT
from support.command import lengths, positive, run
from training.distributed import World

Spans = list[tuple[int, int]]  # ranges of positions in a window, first included, last not


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


def position_buckets(length: int) -> Spans:
    """Return the ranges 0-16-20-24-28-32-40-..., up to the length: four parts of each octave."""
    quarters = (2**octave * quarter for octave in count(2) for quarter in (4, 5, 6, 7))
    return list(pairwise([0, *takewhile(lambda edge: edge < length, quarters), length]))


def segment_sums(model: GPT, case: Case, keep: int, spans: Spans, targets: Targets, world: World):
    """Return the summed losses (segments, spans) of the last `keep` tokens of every window.

    Batches have the same shape on any process, and each fills its own rows of a matrix that is zero
    elsewhere: the sum over processes is exact, so their number changes nothing.
    """
    sums = torch.zeros(targets.count, len(spans), dtype=torch.float64)
    length = case.length
    near = ", near context" if keep < length else ""
    with progress(targets.tokens, f"{case.label} at {length}{near}", "tok", world.is_main) as bar:
        for number, (first, *pair) in enumerate(targets.batches()):
            if number % world.size == world.rank:
                segments = len(pair[0])
                inputs, wanted = (t.reshape(-1, length)[:, -keep:].to(world.device) for t in pair)
                losses = model.token_losses(inputs, wanted).cpu().double()  # (windows, keep)
                for column, (start, stop) in enumerate(spans):
                    part = losses[:, start:stop].reshape(segments, -1)
                    sums[first : first + segments, column] = part.sum(1)
            bar.update(pair[0].numel())
    return world.sum(sums).numpy()


def measure(model: GPT, case: Case, targets: Targets, world: World) -> list[Record]:
    """Measure the loss, bits per byte and, beyond the training length, the far-context benefit."""
    begun = time.monotonic()
    length = case.length
    train_length = case.checkpoint.info.train_length
    windows = targets.tokens // length
    buckets = position_buckets(length)
    tail = train_length // 2 if length > train_length else 0  # tokens that the benefit is about
    spans = buckets + ([(length - tail, length)] if tail else [])
    sums = segment_sums(model, case, length, spans, targets, world)
    by_bucket = sums[:, : len(buckets)]
    segment_losses = by_bucket.sum(1) / targets.segment
    loss, error = report.mean_and_error(segment_losses)
    by_position = []
    for (a, b), total in zip(buckets, by_bucket.sum(0), strict=True):
        by_position.append({"from": a + 1, "to": b, "loss": float(total) / (windows * (b - a))})
    details = {"by_position": by_position, "by_segment": segment_losses.tolist()}
    found = [
        Record("loss", value=loss, error=error, tokens=targets.tokens, details=details, **case.key)
    ]
    if tail:
        replace(case, length=train_length).configure(model)
        span = [(train_length - tail, train_length)]
        near_sums = segment_sums(model, case, train_length, span, targets, world)
        scored = tail * targets.segment // length  # tokens per segment
        full = sums[:, -1] / scored
        near = near_sums[:, 0] / scored
        benefit, error = report.mean_and_error(near - full)
        about = {
            "full_context": float(full.mean()),
            "near_context": float(near.mean()),
            "tokens_per_window": tail,
            "by_segment": (near - full).tolist(),
        }
        found.append(
            Record(
                "far_context_benefit",
                value=benefit,
                error=error,
                tokens=tail * windows,
                details=about,
                **case.key,
            )
        )
    details["seconds"] = round(time.monotonic() - begun, 2)
    if targets.bytes:
        found.append(in_bits(found[0], targets))
    return found


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
        targets = Targets(open_data(arguments.data, checkpoints), arguments)
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
