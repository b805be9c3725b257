"""Which tokens of a validation set an evaluation predicts: whole segments of a fixed length."""

import functools
import hashlib

import numpy as np

from data.loader import Windows
from data.shards import TokenSet, open_split
from data.tokeniser import text_bytes
from evaluating.checkpoints import Checkpoint
from evaluating.protocol import BATCH_TOKENS
from lssar.errors import UserError


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


def open_data(directory: str, checkpoints: list[Checkpoint]) -> TokenSet:
    """The validation set, once all checkpoints are known to read its tokens."""
    for checkpoint in checkpoints:
        if not checkpoint.config.reads_text:
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
