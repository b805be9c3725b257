"""Batches from a token set: a pure function of (seed, step, global batch, length).

A split of T tokens has W = (T - 1) // length windows of `length` inputs and the `length` tokens
that follow them; windows do not overlap and know nothing of shard borders. The sequences of the
whole run are numbered: number g of epoch g // W is window permute(g % W), a permutation drawn from
(seed, epoch), so that nothing repeats within an epoch. Step s takes numbers
s * global_batch ... (s + 1) * global_batch - 1, whoever reads them: how many processes share a
step and in how many micro-batches changes nothing but who sees what.

A set of records (data/records.py) has its records for windows, and what else is said here holds.
`shuffle=False` walks the windows in order instead, as llm.c does, and the seed has no say.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.records import Records
from data.shards import TokenSet, check_ids
from lssar.errors import UserError

ROUNDS = 6


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random permutation of range(size), computed where it is asked for.

    A Feistel network permutes the next larger range of 4^k numbers; a result outside
    range(size) is permuted again until it falls inside, which keeps the map one-to-one.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    result = np.asarray(indices, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> bits, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << bits) | right
        outside = result >= size
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every bit of x over all others; products wrap modulo 2^64."""
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(31))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(32))


class Windows:
    """A token stream as windows of `length` inputs and the tokens that follow them."""

    def __init__(self, tokens: TokenSet, length: int):
        self.tokens, self.length, self.stride = tokens, length, length
        self.count = (tokens.total_tokens - 1) // length

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """(len(offsets), length + 1) int64 tokens, copied once, from the mapped file."""
        tokens, span = self.tokens, self.length + 1
        batch = torch.empty((len(offsets), span), dtype=torch.int64, pin_memory=pin)
        for row, offset in zip(batch.numpy(), offsets, strict=True):
            row[:] = tokens.slice(int(offset), span)
        if tokens.vocab_size is not None and int(batch.max()) >= tokens.vocab_size:
            row, column = divmod(int(batch.argmax()), span)
            where = tokens.locate(int(offsets[row]) + column)
            check_ids(batch.numpy(), tokens.vocab_size, where)
        return batch

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def windows_of(tokens: TokenSet | Records, length: int) -> Windows | Records:
    return tokens.of_length(length) if isinstance(tokens, Records) else Windows(tokens, length)


class TrainLoader:
    """This rank's micro-batches of any step."""

    def __init__(
        self,
        tokens: TokenSet | Records,
        *,
        global_batch: int,
        length: int,
        seed: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        shuffle: bool = True,
        prefetch: bool | None = None,
    ):
        """`prefetch` reads one micro-batch ahead in a thread; by default on a GPU only."""
        if global_batch % (micro_batch * world_size):
            raise UserError(
                f"a global batch of {global_batch} sequences cannot be shared by {world_size} "
                f"processes in micro-batches of {micro_batch}: it must be a multiple of "
                f"{micro_batch * world_size}"
            )
        self.source = windows_of(tokens, length)
        self.windows = self.source.count
        if self.windows < 1:
            raise UserError(
                f"{tokens.directory} has {tokens.total_tokens} training tokens, too few for one "
                f"sequence of length {length} and its targets; the longest they allow: "
                f"train.length = {max(1, tokens.total_tokens - 1)}"
            )
        if self.windows < global_batch:
            step = micro_batch * world_size
            fitting = self.windows // step * step * length
            raise UserError(
                f"{tokens.directory} has {self.windows} training sequences of length {length}, "
                f"fewer than the {global_batch} of one step; "
                + (f"set train.batch_tokens to {fitting}" if fitting else "lower train.micro_batch")
                + f" (now {global_batch * length if fitting else micro_batch}) or add data"
            )
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.accumulation = global_batch // (micro_batch * world_size)
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1) if prefetch or (prefetch is None and on_gpu) else None
        self._ahead: tuple[tuple[int, int], Future] | None = None

    def offsets(self, step: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Token offsets at which the sequences of this step begin: `count` from `first`, or all."""
        begin = step * self.global_batch + first
        numbers = np.arange(begin, begin + (self.global_batch if count is None else count))
        epochs, indices = np.divmod(numbers, self.windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                indices[chosen] = permute(indices[chosen], self.windows, self.seed, int(epoch))
        return indices * self.source.stride

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets), each (micro_batch, length) int64, for every accumulation step."""
        for part in range(self.accumulation):
            batch = self._take(step, part).to(self.device, non_blocking=True)
            yield self.source.split(batch)

    def divisors(self, step: int) -> list[float]:
        """For each micro-batch of this rank, what its mean loss is to be divided by.

        The sum over a rank's micro-batches, averaged over the ranks, is then the mean over the
        whole global batch: of its tokens, or of its labels, which may lie unevenly.
        """
        if isinstance(self.source, Windows) or self.source.labels is None:
            return [self.accumulation] * self.accumulation
        labels = self.source.labels_of(self.offsets(step))
        mine = labels.reshape(self.accumulation, self.world_size, -1)[:, self.rank].sum(axis=1)
        # A micro-batch without labels has the loss 0, whatever it is divided by.
        return (max(1, labels.sum()) / (self.world_size * np.maximum(mine, 1))).tolist()

    def _take(self, step: int, part: int) -> Tensor:
        """The micro-batch, from the reading thread when it has it; sets the thread to the next."""
        if self._thread is None:
            return self._read(step, part)
        if self._ahead is not None and self._ahead[0] == (step, part):
            batch = self._ahead[1].result()
        else:
            batch = self._read(step, part)
        following = (step, part + 1) if part + 1 < self.accumulation else (step + 1, 0)
        self._ahead = following, self._thread.submit(self._read, *following)
        return batch

    def _read(self, step: int, part: int) -> Tensor:
        first = (part * self.world_size + self.rank) * self.micro_batch
        offsets = self.offsets(step, first, self.micro_batch)
        return self.source.read(offsets, pin=self.device.type == "cuda")


def validation_windows(
    tokens: TokenSet | Records,
    *,
    length: int,
    total_tokens: int,
    batch: int,
    rank: int = 0,
    world_size: int = 1,
    segment: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) of this rank's share of fixed, non-overlapping windows.

    The same `total_tokens` targets at every length. By default they are the first of the split;
    with `segment` they are runs of that many tokens spread evenly over the whole split, for sets
    whose beginning is not a fair sample. Ranks take windows in turn; the last batch may be smaller.
    """
    segment = total_tokens if segment is None else segment
    if total_tokens < 1 or total_tokens % segment or segment % length:
        raise UserError(
            f"{total_tokens} validation tokens in segments of {segment} cannot be cut into windows "
            f"of {length}: each must be a multiple of the next"
        )
    source = windows_of(tokens, length)
    if (most := source.count * length) < total_tokens:
        raise UserError(
            f"{tokens.directory} has {tokens.total_tokens} validation tokens, too few for "
            f"{total_tokens} targets in windows of {length}; "
            + (f"set eval.tokens to at most {most} or " if most > 0 else "")
            + "prepare a larger validation set"
        )
    count = total_tokens // segment
    starts = np.arange(count) * (tokens.total_tokens - 1 - segment) // max(1, count - 1)
    windows = (starts[:, None] + np.arange(0, segment, length)).ravel()
    if isinstance(tokens, Records):
        windows = np.arange(total_tokens // length) * source.stride
        if tokens.labels is not None and not tokens.labels_of(windows).any():
            raise UserError(
                f"the first {len(windows)} validation records of {tokens.directory} have no label; "
                "raise eval.tokens"
            )
    return _read_in_batches(source, windows[rank::world_size], batch)


def _read_in_batches(
    source: Windows | Records, offsets: np.ndarray, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(offsets), batch):
        yield source.split(source.read(offsets[first : first + batch]))
