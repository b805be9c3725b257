"""python eval_extrapolation.py CKPT [CKPT ...] --data DIR --out results/x.json

Validation loss at and beyond the training length (`--lengths 1024,2048,4096,8192,16384`).
`torchrun --nproc_per_node=N` shares the work and gives the same numbers.

Protocol. The targets are the first 10,485,760 tokens of the validation set (or `--tokens`), or as
many segments spread evenly over the set (`--spread`, for sets whose beginning is no fair sample).
A segment is as long as the longest length (or `--segment`, to predict the same tokens as an
evaluation at longer lengths does), and each length cuts it into windows that do not overlap: every
length, model and variant predicts the same tokens. Reported per length:

    loss            mean over tokens; its standard error is over segments
    by position     mean over tokens at a range of positions in their window
    context gain    loss on the last half training length of every window, minus the loss on the
                    same tokens when the model sees only the last training length of the window;
                    below zero, the far context helps
    paired          loss minus that of the first checkpoint, segment by segment, with its error

`--p`, `--alpha`, `--window` and `--position-interpolation` add variants of each checkpoint. A
window of the training length is the control that any claim of extrapolation has to beat.
"""

if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

import hashlib
import math
import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

import distributed
import extrapolation_report as report
from data.loader import validation_windows
from data.shards import TokenSet, describe_set, open_split
from distributed import World
from errors import UserError, positive, run
from evaluation import (
    BATCH_TOKENS,
    Checkpoint,
    EvaluationParser,
    Variant,
    add_variant_arguments,
    arithmetic,
    configure,
    kept_on_interrupt,
    lengths,
    open_checkpoints,
    progress,
    series_label,
    variants,
)
from model import GPT, ModelConfig
from results_io import Results

PAPER_TOKENS = 10_485_760
Spans = list[tuple[int, int]]  # ranges of positions in a window, first included, last not


class Targets:
    """The tokens to predict: segments of the validation set, read in batches of fixed shape."""

    def __init__(self, data: TokenSet, segment: int, tokens: int, spread: bool):
        self.data, self.segment, self.tokens, self.spread = data, segment, tokens, spread
        self.count = tokens // segment
        self.batch = min(self.count, max(1, BATCH_TOKENS // segment))

    def batches(self):
        """(first segment, inputs, targets), both (segments, length of one)."""
        pairs = validation_windows(
            self.data,
            length=self.segment,
            total_tokens=self.tokens,
            batch=self.batch,
            segment=self.segment if self.spread else None,
        )
        return ((self.batch * i, *pair) for i, pair in enumerate(pairs))

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for _, inputs, targets in self.batches():
            digest.update(inputs.numpy().tobytes() + targets[:, -1].numpy().tobytes())
        return digest.hexdigest()


def choose_targets(
    data: TokenSet, wanted: list[int], tokens: int | None, spread: bool, segment: int | None = None
) -> Targets:
    """As many whole segments as were asked for and the set has, or an error with the numbers."""
    segment = segment or wanted[-1]
    for length in wanted:
        if segment % length:
            raise UserError(
                f"--lengths: {length} does not divide {segment}, so the two could not predict the "
                "same tokens; use lengths that divide the longest, or the --segment"
            )
    available = data.total_tokens - 1  # the last token has no successor to predict
    if available < segment:
        raise UserError(
            f"{data.directory} has {data.total_tokens} validation tokens, too few for one window "
            f"of {segment} and the token after it; use shorter --lengths or more data"
        )
    asked = PAPER_TOKENS if tokens is None else tokens
    if asked < segment:
        raise UserError(f"--tokens {asked} is less than one window of {segment} tokens")
    return Targets(data, segment, min(asked, available) // segment * segment, spread)


def position_buckets(length: int) -> Spans:
    """1..16, then four equal parts of each octave: 16-20-24-28-32-40-..., up to the length."""
    edges, octave = [0, 16], 16
    while octave < length:
        edges += [octave + octave * quarter // 4 for quarter in (1, 2, 3, 4)]
        octave *= 2
    edges = [e for e in edges if e < length] + [length]
    return list(pairwise(edges))


# --- measuring -----------------------------------------------------------------------------------


def segment_sums(
    model: GPT, targets: Targets, length: int, keep: int, spans: Spans, world: World, label: str
) -> Tensor:
    """Summed losses (segments, spans) of the last `keep` tokens of every window of `length`.

    Batches have the same shape whoever computes them, and each fills its own rows of a matrix
    that is zero elsewhere: the sum over processes is exact, so their number changes nothing.
    """
    sums = torch.zeros(targets.count, len(spans), dtype=torch.float64)
    bar = progress(targets.tokens, label, "tok", world.is_main)
    with bar:
        for number, (first, inputs, wanted) in enumerate(targets.batches()):
            if number % world.size == world.rank:
                segments = len(inputs)
                inputs, wanted = (
                    t.reshape(-1, length)[:, -keep:].to(world.device) for t in (inputs, wanted)
                )
                losses = model.token_losses(inputs, wanted).cpu().double()  # (windows, keep)
                for column, (start, stop) in enumerate(spans):
                    part = losses[:, start:stop].reshape(segments, -1)
                    sums[first : first + segments, column] = part.sum(1)
            bar.update(wanted.numel() if keep == length else len(wanted) * length)
    return world.sum(sums)


def measure(
    model: GPT,
    checkpoint: Checkpoint,
    variant: Variant,
    targets: Targets,
    length: int,
    world,
    label,
) -> dict:
    """One row: everything that is reported of a model, a variant and a length."""
    trained, train_length = checkpoint.config, checkpoint.info.train_length
    buckets = position_buckets(length)
    tail = train_length // 2 if length > train_length else 0
    spans = buckets + ([(length - tail, length)] if tail else [])
    configure(model, variant.config(trained, train_length, length))
    sums = segment_sums(model, targets, length, length, spans, world, label).numpy()
    by_bucket = sums[:, : len(buckets)]
    segment_losses = by_bucket.sum(1) / targets.segment
    loss, error = mean_and_error(segment_losses)
    windows = targets.tokens // length
    row = {
        "length": length,
        "loss": loss,
        "standard_error": error,
        "perplexity": float(np.exp(np.float64(loss))) if loss < 700 else math.inf,
        "by_position": [
            {"from": a + 1, "to": b, "loss": float(total) / (windows * (b - a))}
            for (a, b), total in zip(buckets, by_bucket.sum(0), strict=True)
        ],
        "context_gain": None,
        "segment_losses": segment_losses.tolist(),
    }
    if tail:
        configure(model, variant.config(trained, train_length, train_length))
        span = [(train_length - tail, train_length)]
        near = segment_sums(
            model, targets, length, train_length, span, world, f"{label}, near context"
        )
        scored = tail * targets.segment // length  # tokens a segment
        full, near = sums[:, -1] / scored, near.numpy()[:, 0] / scored
        gain, gain_error = mean_and_error(full - near)
        row["context_gain"] = {
            "gain": gain,
            "standard_error": gain_error,
            "full_context": float(full.mean()),
            "near_context": float(near.mean()),
            "tokens_a_window": tail,
        }
    return row


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Mean over segments and its standard error, which one segment alone cannot have."""
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


# --- the command ---------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    world = distributed.start(arguments.device)
    try:
        evaluate(arguments, world)
    finally:
        distributed.finish()


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__)
    parser.add_run_arguments()
    parser.add_argument("--data", required=True, help="folder of token shards")
    parser.add_argument("--lengths", type=lengths, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=positive, help=f"targets; default {PAPER_TOKENS:,}")
    parser.add_argument("--spread", action="store_true", help="segments from all over the set")
    parser.add_argument("--segment", type=positive, help="default: the longest length")
    parser.add_argument("--no-figures", action="store_true")
    add_variant_arguments(parser)
    return parser


def evaluate(arguments, world: World) -> None:
    checkpoints = open_checkpoints(arguments.checkpoints)
    chosen = variants(arguments, checkpoints)
    for checkpoint in checkpoints:
        if checkpoint.config.channels > 1 or checkpoint.config.outputs:
            raise UserError(f"{checkpoint.path} is no text model: it reads orbits; see physics/")
    vocabularies = {c.config.vocab_size: c for c in checkpoints}
    for vocab_size, checkpoint in vocabularies.items():
        try:
            data = open_split(arguments.data, "val", vocab_size=vocab_size)
        except UserError as error:
            raise UserError(f"{checkpoint.path}: {error}") from None
    if len(vocabularies) > 1:
        (a, first), (b, other) = list(vocabularies.items())[:2]
        raise UserError(
            f"{first.path} has a vocabulary of {a}, {other.path} one of {b}: losses of different "
            "tokens cannot be compared; evaluate them separately"
        )
    targets = choose_targets(
        data, arguments.lengths, arguments.tokens, arguments.spread, arguments.segment
    )
    with arithmetic(arguments.precision, world.device) as precision:
        results = open_results(arguments, targets, precision)
        announce(arguments, targets, results, world)
        world.barrier()  # everyone has read the file before the first writes to it
        with kept_on_interrupt(results.path):
            for checkpoint in checkpoints:
                fill(results, checkpoint, chosen, arguments.lengths, targets, world)
    if world.is_main:
        results.extra = {"paired": report.paired_differences(results, checkpoints[0].identity)}
        results.save()
        print(report.tables(results, checkpoints[0].identity))
        for figure in () if arguments.no_figures else report.figures(results):
            print(f"figure: {figure}")


def announce(arguments, targets: Targets, results: Results, world: World) -> None:
    if not world.is_main:
        return
    asked = PAPER_TOKENS if arguments.tokens is None else arguments.tokens
    if targets.tokens != asked:
        print(
            f"{targets.tokens:,} target tokens instead of {asked:,}: the largest multiple of "
            f"{targets.segment} that was asked for and {arguments.data} has"
        )
    if results.rows:
        print(f"continuing {results.path}: {len(results.rows)} finished rows are kept")


def open_results(arguments, targets: Targets, precision: str) -> Results:
    settings = {
        "tokens": targets.tokens,
        "segment": targets.segment,
        "spread": targets.spread,
        "targets_sha256": targets.sha256(),
        "precision": precision,
    }
    about = describe_set(arguments.data) | {"seed": None}  # nothing here is drawn at random
    return Results(arguments.out, report.KIND, settings, about)


def fill(
    results: Results,
    checkpoint: Checkpoint,
    chosen: list[Variant],
    wanted: list[int],
    targets: Targets,
    world: World,
) -> None:
    """Measure what the results do not have yet of one checkpoint."""
    results.checkpoints.setdefault(checkpoint.identity, checkpoint.describe())
    model: GPT | None = None
    done: dict[ModelConfig, dict] = {}  # a variant that changes nothing at a length is not run
    for length in wanted:
        done.clear()
        for variant in (v for v in chosen if v.suits(checkpoint.config)):
            key = {"checkpoint": checkpoint.identity, "variant": variant.name, "length": length}
            config = variant.config(checkpoint.config, checkpoint.info.train_length, length)
            row = results.find(**key)
            label = f"{series_label(checkpoint.info.run, variant.name)} at {length}"
            if row is None:
                if config not in done:
                    model = model or checkpoint.load(world.device)
                    begun = time.monotonic()
                    done[config] = measure(
                        model, checkpoint, variant, targets, length, world, label
                    )
                    done[config]["seconds"] = round(time.monotonic() - begun, 2)
                row = done[config] | key
                if world.is_main:
                    results.add(row)
                    print(f"{label}: loss {row['loss']:.4f}", file=sys.stderr)
            done.setdefault(config, row)


if __name__ == "__main__":
    run(main)
