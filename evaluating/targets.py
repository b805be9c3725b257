"""Chooses the tokens of a validation set to predict: whole segments of one length."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from data.loader import Sequences
from data.shards import TokenSet, open_split
from data.tokeniser import text_bytes
from evaluating.checkpoints import Checkpoint
from evaluating.protocol import BATCH_TOKENS
from lssar.errors import UserError


class Targets:
    """Holds the segments of a validation set to predict, in batches of fixed shape."""

    def __init__(
        self,
        data: TokenSet,
        lengths: Sequence[int],
        *,
        tokens: int,
        segment: int | None = None,
        spread: bool = False,
        within_documents: bool = False,
    ):
        """Choose segments with at most so many tokens, each a multiple of all lengths.

        `segment` is their length, by default the last of the lengths. They stand one after another
        from the beginning, or with `spread` all over the set. `within_documents` leaves out those
        that would cross an end-of-text token.
        """
        segment = segment or lengths[-1]
        for length in lengths:
            if segment % length:
                raise UserError(
                    f"--lengths: {length} does not divide {segment}; "
                    "use lengths that divide the longest, or the --segment"
                )
        available = data.total_tokens - 1  # the last token has no successor to predict
        if available < segment:
            raise UserError(
                f"{data.directory} has {data.total_tokens} validation tokens, too few for one "
                f"segment of {segment} + 1; use shorter ones or more data"
            )
        if tokens < segment:
            raise UserError(f"--tokens {tokens} is less than one segment of {segment} tokens")
        self.data = data
        self.segment = segment
        self.spread = spread
        self.documents: dict = {}  # with --within-documents, the part of the set that is left
        if within_documents:
            starts = self._within_documents()
        else:
            starts = np.arange(available // segment) * segment
        self.count = min(tokens // segment, len(starts))
        if spread and within_documents:
            starts = starts[self._spread_to(len(starts) - 1)]
        elif spread:
            starts = self._spread_to(available - segment)
        self.starts = starts[: self.count]
        self.tokens = self.count * segment
        self.batch = min(self.count, max(1, BATCH_TOKENS // segment))

    def _spread_to(self, last: int) -> np.ndarray:
        """Return as many whole numbers as there are segments, from 0 to `last`."""
        return np.arange(self.count) * last // max(1, self.count - 1)

    def _within_documents(self) -> np.ndarray:
        """Return the starts of the segments that lie, with their last target, in one document."""
        borders = self.data.documents()
        sizes = np.diff(borders)
        counts = (sizes - 1) // self.segment
        if not counts.any():
            raise UserError(
                f"{self.data.directory} has no document of {self.segment} + 1 tokens, the longest "
                f"has {sizes.max()}; use shorter ones or leave --within-documents out"
            )
        self.documents = {
            "long_documents": int((counts > 0).sum()),
            "documents": len(sizes),
            "share_of_tokens": int(counts.sum()) * self.segment / self.data.total_tokens,
        }
        earlier = counts.cumsum() - counts  # segments of all documents before each
        place = np.arange(counts.sum()) - np.repeat(earlier, counts)  # in its own document
        return np.repeat(borders[:-1], counts) + place * self.segment

    def coverage(self) -> str:
        """Say how much of the set lies in long documents; empty without --within-documents."""
        if not self.documents:
            return ""
        found = self.documents
        return (
            f"{found['long_documents']:,} of {found['documents']:,} documents hold a segment of "
            f"{self.segment:,} tokens: {found['share_of_tokens']:.1%} of the set\n"
        )

    def batches(self):
        """Yield (first segment, inputs, targets), both (segments, length of a segment)."""
        source = Sequences(self.data, self.segment)
        for first in range(0, self.count, self.batch):
            yield first, *source.split(source.read(self.starts[first : first + self.batch]))

    @functools.cached_property
    def bytes(self) -> int:
        """Count the bytes of the targets' text; 0 if their tokeniser is not known."""
        lengths = text_bytes(self.data.tokeniser)
        if lengths is None:
            return 0
        return sum(int(lengths[targets.numpy()].sum()) for _, _, targets in self.batches())

    def settings(self) -> dict:
        """Return the settings that comparable losses share."""
        digest = hashlib.sha256()
        for _, inputs, targets in self.batches():
            digest.update(inputs.numpy().tobytes() + targets[:, -1].numpy().tobytes())
        named = {"tokens": self.tokens, "segment": self.segment, "spread": self.spread}
        if self.documents:
            named["within_documents"] = True
        return named | {"targets_sha256": digest.hexdigest()}


def open_data(directory: str, checkpoints: list[Checkpoint]) -> TokenSet:
    """Open the validation set, after a check that all checkpoints read its tokens."""
    (size, first), *others = {c.config.vocab_size: c for c in checkpoints}.items()
    if others:
        other_size, other = others[0]
        raise UserError(
            f"{first.path} has a vocabulary of {size}, {other.path} one of {other_size}: "
            "their losses cannot be compared; evaluate them separately"
        )
    try:
        return open_split(directory, "val", vocab_size=size)
    except UserError as error:
        raise UserError(f"{first.path}: {error}") from None
