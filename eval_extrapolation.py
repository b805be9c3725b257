"""python eval_extrapolation.py CKPT [CKPT ...] --data DIR --out results/x.json

Validation loss at and beyond the training length (`--lengths 1024,2048,4096,8192,16384`).
`torchrun --nproc_per_node=N` shares the work and gives the same numbers.

The targets are the first 10,485,760 tokens of the validation set (or `--tokens`), or as many spread
evenly over it (`--spread`, for sets whose beginning is not a fair sample), in segments of the
longest length (or of `--segment`, to predict the same tokens as an evaluation at longer lengths).
With `--within-documents`, a segment never crosses an end-of-text token: where most documents are
shorter than a segment, its far context is other documents, which cannot help.
Each length cuts a segment into windows that do not overlap, so every length, model and variant
predicts the same tokens. Reported per length:

    loss            mean over tokens; its standard error is over segments
    bits per byte   the same over the bytes of the tokens' text (0 for an end of text, whose loss
                    counts): comparable between tokenisers
    by position     mean over tokens at a range of positions in their window
    context gain    loss on the last half training length of every window, minus the loss on the
                    same tokens when the model sees only the last training length of the window;
                    below zero, the far context helps
    paired          loss minus that of the first checkpoint, by segment, with its error

`--p`, `--alpha`, `--window`, `--position-interpolation`, `--ntk` and `--yarn` add variants of each
checkpoint. A window of the training length is the control that any claim of extrapolation has to
beat; `--sinks 4` adds it with the first 4 tokens in view (StreamingLLM). Of a model with layers of
two kinds, a window narrows the global ones.
"""

import functools
import hashlib
import math
import sys
import time
from dataclasses import replace
from itertools import count, pairwise, takewhile

from evaluating import EvaluationParser
from support.command import answer_early, lengths, positive, run


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, variants=True)
    parser.add_argument("--data", required=True, help="folder of token shards")
    parser.add_argument("--lengths", type=lengths, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=positive, default=10_485_760, help="targets; %(default)s")
    parser.add_argument("--spread", action="store_true", help="segments from all over the set")
    parser.add_argument("--segment", type=positive, help="default: the longest length")
    parser.add_argument("--within-documents", action="store_true", help="long documents only")
    parser.add_argument("--no-figures", action="store_true")
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import numpy as np
import torch

from data.loader import Windows
from data.shards import TokenSet, describe_set, open_split
from data.tokeniser import text_bytes
from evaluating import extrapolation_report as report
from evaluating.checkpoints import Case, Checkpoint, Variant, unmeasured
from evaluating.protocol import BATCH_TOKENS, measuring, opened, progress
from evaluating.results import Record
from lssar.errors import UserError
from model import GPT
from training.distributed import World

Spans = list[tuple[int, int]]  # ranges of positions in a window, first included, last not


class Targets:
    """The tokens to predict: whole segments of the validation set, in batches of fixed shape."""

    def __init__(self, data: TokenSet, arguments):
        """As many segments as asked for and available, or an error with the numbers."""
        asked, segment = arguments.tokens, arguments.segment or arguments.lengths[-1]
        if bad := [length for length in arguments.lengths if segment % length]:
            rule = "use lengths that divide the longest, or the --segment"
            raise UserError(f"--lengths: {bad[0]} does not divide {segment}; {rule}")
        available = data.total_tokens - 1  # the last token has no successor to predict
        if available < segment:
            few = f"{data.total_tokens} validation tokens, too few for one window of {segment} + 1"
            raise UserError(f"{data.directory} has {few}; use shorter ones or more data")
        if asked < segment:
            raise UserError(f"--tokens {asked} is less than one window of {segment} tokens")
        self.data, self.segment, self.spread = data, segment, arguments.spread
        self.documents: dict = {}  # with --within-documents, how much of the set is left
        within = arguments.within_documents
        starts = self._within_documents() if within else np.arange(available // segment) * segment
        self.count = min(asked // segment, len(starts))
        if self.spread:
            last = len(starts) - 1 if within else available - segment
            places = np.arange(self.count) * last // max(1, self.count - 1)
            starts = starts[places] if within else places
        self.starts, self.tokens = starts[: self.count], self.count * segment
        self.batch = min(self.count, max(1, BATCH_TOKENS // segment))

    def _within_documents(self) -> np.ndarray:
        """The starts of all segments that lie, with their last target, within one document."""
        borders = self.data.documents()
        sizes = np.diff(borders)
        counts = (sizes - 1) // self.segment
        if not counts.any():
            few = f"no document of {self.segment} + 1 tokens, the longest has {sizes.max()}"
            remedy = "use shorter ones or leave --within-documents out"
            raise UserError(f"{self.data.directory} has {few}; {remedy}")
        found = {"long_documents": int((counts > 0).sum()), "documents": len(sizes)}
        used = int(counts.sum()) * self.segment / self.data.total_tokens
        self.documents = found | {"share_of_tokens": used}
        number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        return np.repeat(borders[:-1], counts) + number * self.segment

    def coverage(self) -> str:
        """How much of the set has documents long enough; empty without --within-documents."""
        if not self.documents:
            return ""
        long, all_of_them, share = self.documents.values()
        hold = f"hold a segment of {self.segment:,} tokens"
        return f"{long:,} of {all_of_them:,} documents {hold}: {share:.1%} of the set\n"

    def batches(self):
        """(first segment, inputs, targets), both (segments, length of one)."""
        source = Windows(self.data, self.segment)
        for first in range(0, self.count, self.batch):
            yield first, *source.split(source.read(self.starts[first : first + self.batch]))

    @functools.cached_property
    def bytes(self) -> int:
        """Of the text that the targets stand for; 0 if their tokeniser is not known."""
        lengths = text_bytes(self.data.tokeniser)
        if lengths is None:
            return 0
        return sum(int(lengths[targets.numpy()].sum()) for _, _, targets in self.batches())

    def settings(self) -> dict:
        """What has to be equal for losses to be comparable."""
        digest = hashlib.sha256()
        for _, inputs, targets in self.batches():
            digest.update(inputs.numpy().tobytes() + targets[:, -1].numpy().tobytes())
        named = {key: getattr(self, key) for key in ("tokens", "segment", "spread")}
        named |= {"within_documents": True} if self.documents else {}
        return named | {"targets_sha256": digest.hexdigest()}


def position_buckets(length: int) -> Spans:
    """1..16, then four equal parts of each octave: 16-20-24-28-32-40-..., up to the length."""
    quarters = (2**octave * quarter for octave in count(2) for quarter in (4, 5, 6, 7))
    return list(pairwise([0, *takewhile(lambda edge: edge < length, quarters), length]))


def segment_sums(model: GPT, case: Case, keep: int, spans: Spans, targets: Targets, world: World):
    """Summed losses (segments, spans) of the last `keep` tokens of every window of a length.

    Batches have the same shape on any process, and each fills its own rows of a matrix that is zero
    elsewhere: the sum over processes is exact, so their number changes nothing.
    """
    sums = torch.zeros(targets.count, len(spans), dtype=torch.float64)
    length, near = case.length, ", near context" if keep < case.length else ""
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
    """The loss, beyond the training length the context gain, and bits per byte where known."""
    begun = time.monotonic()
    length, train_length = case.length, case.checkpoint.info.train_length
    windows, buckets = targets.tokens // length, position_buckets(length)
    tail = train_length // 2 if length > train_length else 0
    spans = buckets + ([(length - tail, length)] if tail else [])
    sums = segment_sums(model, case, length, spans, targets, world)
    by_bucket = sums[:, : len(buckets)]
    segment_losses = by_bucket.sum(1) / targets.segment
    loss, error = report.mean_and_error(segment_losses)
    by_position = []
    for (a, b), total in zip(buckets, by_bucket.sum(0), strict=True):
        by_position.append({"from": a + 1, "to": b, "loss": float(total) / (windows * (b - a))})
    details = {"by_position": by_position, "segment_losses": segment_losses.tolist()}
    size = {"tokens": targets.tokens, "details": details}
    found = [Record("loss", value=loss, error=error, **size, **case.key)]
    if tail:
        replace(case, length=train_length).configure(model)
        span = [(train_length - tail, train_length)]
        near = segment_sums(model, case, train_length, span, targets, world)
        scored = tail * targets.segment // length  # tokens per segment
        full, near = sums[:, -1] / scored, near[:, 0] / scored
        gain, error = report.mean_and_error(full - near)
        means = {"full_context": float(full.mean()), "near_context": float(near.mean())}
        size = {"tokens": tail * windows, "details": means | {"tokens_per_window": tail}}
        found.append(Record("context_gain", value=gain, error=error, **size, **case.key))
    details["seconds"] = round(time.monotonic() - begun, 2)
    return found + in_bits(found[:1], targets)


def in_bits(losses: list[Record], targets: Targets) -> list[Record]:
    """Losses as bits per byte, where the bytes are known."""
    found = []
    for loss in losses if targets.bytes else ():
        scale = targets.tokens / targets.bytes / math.log(2)
        value, error = (x if x is None else x * scale for x in (loss.value, loss.error))
        numbers = {"value": value, "error": error, "details": {"bytes": targets.bytes}}
        new = {"quantity": "bits_per_byte", "command": "", "revision": ""}
        found.append(replace(loss, **numbers, **new))
    return found


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    with opened(arguments) as (world, checkpoints, chosen):
        targets = Targets(open_data(arguments.data, checkpoints), arguments)
        if world.is_main and targets.tokens != arguments.tokens:
            asked = f"{targets.tokens:,} target tokens instead of {arguments.tokens:,}"
            most = f"the largest multiple of {targets.segment} within --tokens"
            print(f"{asked}: {most} and the size of {arguments.data}")
        if world.is_main:
            print(targets.coverage(), end="")
        about = describe_set(arguments.data) | targets.documents
        with measuring(arguments, "extrapolation", targets.settings(), about, world) as results:
            measured = {r.key[1:] for r in results.select(quantity="bits_per_byte")}
            old = [r for r in results.select(quantity="loss") if r.key[1:] not in measured]
            if added := in_bits(old, targets):  # measured before there were bits per byte
                results.add(*added, save=world.is_main)
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
    if world.is_main:
        print(report.tables(results, checkpoints[0].identity))
        if not arguments.no_figures:
            report.figures(results)


def open_data(directory: str, checkpoints: list[Checkpoint]) -> TokenSet:
    """The validation set, once all checkpoints are known to read its tokens."""
    for checkpoint in checkpoints:
        if checkpoint.config.channels > 1 or checkpoint.config.outputs:
            raise UserError(f"{checkpoint.path} is not a text model: it reads orbits; see physics/")
    (size, first), *others = {c.config.vocab_size: c for c in checkpoints}.items()
    if others:
        other_size, other = others[0]
        sizes = f"{first.path} has a vocabulary of {size}, {other.path} one of {other_size}"
        raise UserError(f"{sizes}: their losses cannot be compared; evaluate them separately")
    try:
        return open_split(directory, "val", vocab_size=size)
    except UserError as error:
        raise UserError(f"{first.path}: {error}") from None


if __name__ == "__main__":
    run(main)
