"""Batches from a token set: a pure function of (seed, step, global batch, length).

A split of T tokens has W = (T - 1) // length windows of `length` inputs and the `length` tokens
that follow them; windows do not overlap and may cross shard borders. The sequences of the whole
run are numbered: number g, in epoch g // W, is window permute(g % W), a permutation drawn from
(seed, epoch), so that nothing repeats within an epoch. Step s takes the numbers from
s * global_batch on. How many processes and micro-batches share a step only decides who reads what.

With `train.long_length`, every `train.long_interval`-th step takes longer windows of the same
stream, in an order of their own.

In a set of records the windows are the records. `shuffle=False` takes windows in order, as llm.c
does, whatever the seed.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.shards import DESCRIPTION, SIMULATE, TokenSet, describe, open_split
from lssar.errors import UserError
from support.files import open_regular, reading

ROUNDS = 6


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Permute range(size) pseudo-randomly, computing the permutation at these indices only.

    A Feistel network permutes the next larger range of 4^k numbers; a result outside range(size)
    is permuted again until it falls inside, which keeps the map one-to-one.
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

    labels = None

    def __init__(self, tokens: TokenSet, length: int):
        self.tokens, self.shape, self.stride = tokens, (length + 1,), length
        self.count = (tokens.total_tokens - 1) // length

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """Read (len(offsets), *shape) int64 tokens, copied once, from the mapped file."""
        batch = torch.empty((len(offsets), *self.shape), dtype=torch.int64, pin_memory=pin)
        self.tokens.fill(batch.numpy(), offsets)
        return batch

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


class Records(Windows):
    """A split of independent sequences of one length, perhaps with labels.

    A record has `points` positions of `channels` tokens. A model reads all positions but the last
    and predicts each one's successor or label. Records lie in ordinary shards; beside them

        records.json        {"points": 1000, "channels": 2, "outputs": 0, "settings": {...}}
        labels_train.npy    if outputs > 0: float32 (records, points - 1, outputs), NaN for "none"
    """

    def __init__(self, tokens: TokenSet, points: int, channels: int, labels: np.ndarray | None):
        self.tokens, self.shape, self.labels = tokens, (points, channels), labels
        self.directory, self.tokeniser = tokens.directory, None
        self.files = tokens.files | {DESCRIPTION: None}
        if labels is not None:
            self.files[Path(labels.filename).name] = None
        self.stride = points * channels
        self.count, rest = divmod(tokens.total_tokens, self.stride)
        if rest or (labels is not None and labels.shape[:2] != (self.count, points - 1)):
            wrong = f"{tokens.total_tokens} tokens are not records of {self.stride} with labels"
            raise UserError(f"{self.directory} is damaged: {wrong}; simulate it again")
        if labels is not None and np.isinf(labels).any():
            raise UserError(f"{self.directory} has infinite labels; simulate it again")
        self.total_tokens = self.count * (points - 1)  # positions that a model reads

    def labels_of(self, offsets: np.ndarray) -> np.ndarray:
        """Count the labels of each of these records."""
        return (~np.isnan(self.labels[offsets // self.stride])).sum(axis=(1, 2))

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """Read tokens; with labels, both in one float32 tensor, which is exact for tokens."""
        batch = super().read(offsets, pin)
        if self.labels is None:
            return batch
        labels = torch.from_numpy(self.labels[offsets // self.stride])
        both = torch.cat((batch[:, :-1].float(), labels), dim=-1)
        return both.pin_memory() if pin else both

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (records, points - 1, channels) and targets of the same leading shape."""
        if self.labels is None:
            return super().split(batch)
        channels = self.shape[1]
        return batch[..., :channels].long(), batch[..., channels:].contiguous()


Tokens = TokenSet | Records


def open_data(
    directory: str | Path, split: str, *, vocab_size: int, channels=1, outputs=0, command=SIMULATE
) -> Tokens:
    """Open what a model with these inputs and outputs reads: a stream of tokens, or records.

    `command` makes the folder: it is named where that is missing.
    """
    directory = Path(directory)
    if channels == 1 and not outputs:
        return open_split(directory, split, vocab_size=vocab_size, command=command)
    about = describe(directory, command)
    for key, wanted in {"channels": channels, "outputs": outputs}.items():
        if about[key] != wanted:
            has = f"{directory} has {about[key]} {key} per position, the model {wanted}"
            raise UserError(f"{has}; set model.{key} = {about[key]} or choose other data")
    tokens, labels = open_split(directory, split, vocab_size=vocab_size), None
    if outputs:
        path = directory / f"labels_{split}.npy"
        with reading(path), open_regular(path):
            labels = np.load(path, mmap_mode="r", allow_pickle=False)
    return Records(tokens, about["points"], channels, labels)


def windows_of(data: Tokens, length: int) -> Windows:
    if not isinstance(data, Records):
        return Windows(data, length)
    if length != (only := data.shape[0] - 1):
        has = f"{data.directory} has records of {only + 1} points"
        raise UserError(f"{has}, to be read at train.length = {only}, not {length}")
    return data


@dataclass(eq=False)
class TrainLoader:
    """This rank's micro-batches of any step."""

    tokens: Tokens
    _: KW_ONLY
    global_batch: int
    length: int
    seed: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    device: str | torch.device = "cpu"
    shuffle: bool = True
    prefetch: bool | None = None  # read one micro-batch ahead in a thread; default: on a GPU only

    def __post_init__(self):
        at_once = self.micro_batch * self.world_size
        self.accumulation, rest = divmod(self.global_batch, at_once)
        if rest:
            shared = f"for {self.world_size} processes x micro-batch {self.micro_batch}"
            batch = f"a global batch of {self.global_batch} sequences"
            raise UserError(f"{batch} {shared} must be a multiple of {at_once}")
        self.source = windows_of(self.tokens, self.length)
        self.windows = self.source.count
        if self.windows < self.global_batch:
            self._refuse_too_little(at_once)
        self.device = torch.device(self.device)
        ahead = self.device.type == "cuda" if self.prefetch is None else self.prefetch
        self._thread = ThreadPoolExecutor(1) if ahead else None
        self._ahead: dict[tuple[int, int], Future] = {}  # by step and part

    def _refuse_too_little(self, at_once: int) -> None:
        """Refuse too little data; name the largest step of whole micro-batches that they allow."""
        directory, tokens, length = self.tokens.directory, self.tokens.total_tokens, self.length
        if self.windows < 1:
            few = f"has {tokens} training tokens, too few for length {length} and its targets"
            raise UserError(f"{directory} {few}; set train.length = {max(1, tokens - 1)} or less")
        few = f"fewer than the {self.global_batch} of one step"
        remedy = f"lower train.micro_batch (now {self.micro_batch}) and train.batch_tokens"
        if fitting := self.windows // at_once * at_once * length:
            remedy = f"set train.batch_tokens to {fitting} (now {self.global_batch * length})"
        has = f"{directory} has {self.windows} training sequences of length {length}"
        raise UserError(f"{has}, {few}; {remedy} or add data")

    def offsets(self, step: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return the offsets at which this step's sequences begin: `count` from `first`, or all."""
        begin = step * self.global_batch + first
        numbers = np.arange(begin, begin + (self.global_batch if count is None else count))
        epochs, indices = np.divmod(numbers, self.windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                indices[chosen] = permute(indices[chosen], self.windows, self.seed, int(epoch))
        return indices * self.source.stride

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), each (micro_batch, length) int64, per accumulation step."""
        for part in range(self.accumulation):
            yield self.source.split(self._take(step, part).to(self.device, non_blocking=True))

    def divisors(self, step: int) -> list[float]:
        """Return one divisor per micro-batch.

        Mean losses over them, summed, then averaged over ranks, are the mean over the global batch
        (over its labels where some are missing).
        """
        if self.source.labels is None:
            return [self.accumulation] * self.accumulation
        labels = self.source.labels_of(self.offsets(step))
        mine = labels.reshape(self.accumulation, self.world_size, -1)[:, self.rank].sum(axis=1)
        # A micro-batch without labels has the loss 0, whatever it is divided by.
        return (max(1, labels.sum()) / (self.world_size * np.maximum(mine, 1))).tolist()

    def _take(self, step: int, part: int) -> Tensor:
        """Return the micro-batch, which may be read already, and start to read the one after."""
        if self._thread is None:
            return self._read(step, part)
        batch = self._ahead.get((step, part)) or self._thread.submit(self._read, step, part)
        following = (step, part + 1) if part + 1 < self.accumulation else (step + 1, 0)
        self._ahead = {following: self._thread.submit(self._read, *following)}
        return batch.result()

    def _read(self, step: int, part: int) -> Tensor:
        first = (part * self.world_size + self.rank) * self.micro_batch
        offsets = self.offsets(step, first, self.micro_batch)
        return self.source.read(offsets, pin=self.device.type == "cuda")


class MixedLoader:
    """A loader whose every `interval`-th step is one of `long`; each counts its own steps."""

    def __init__(self, usual: TrainLoader, long: TrainLoader, interval: int):
        self.usual, self.long, self.interval = usual, long, interval

    def _at(self, step: int) -> tuple[TrainLoader, int]:
        before, place = divmod(step, self.interval)
        return (self.long, before) if place == self.interval - 1 else (self.usual, step - before)

    def offsets(self, step: int) -> np.ndarray:
        loader, own = self._at(step)
        return loader.offsets(own)

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader, own = self._at(step)
        return loader.micro_batches(own)

    def divisors(self, step: int) -> list[float]:
        loader, own = self._at(step)
        return loader.divisors(own)


def validation_windows(
    data: Tokens, *, length: int, total_tokens: int, batch: int, rank=0, world_size=1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) of this rank's share of the first windows of the split.

    They do not overlap: the same `total_tokens` targets at every length.
    """
    if total_tokens < 1 or total_tokens % length:
        sizes = f"{total_tokens} validation tokens in windows of {length}"
        raise UserError(f"{sizes}: the first must be a multiple of the second")
    source = windows_of(data, length)
    if (most := source.count * length) < total_tokens:
        has = f"{data.directory} has {data.total_tokens} validation tokens"
        few = f"too few for {total_tokens} targets in windows of {length}"
        change = f"set eval.tokens to at most {most} or " if most > 0 else ""
        raise UserError(f"{has}, {few}; {change}prepare a larger validation set")
    windows = np.arange(total_tokens // length) * source.stride
    if source.labels is not None and not data.labels_of(windows).any():
        first = f"the first {len(windows)} validation records of {data.directory}"
        raise UserError(f"{first} have no label; raise eval.tokens")
    mine = windows[rank::world_size]
    batches = (mine[first : first + batch] for first in range(0, len(mine), batch))
    return (source.split(source.read(offsets)) for offsets in batches)


class Batches:
    """Both sets of a run and their batches, as its config describes them."""

    def __init__(self, config, plan, rank: int = 0, device="cpu"):
        """Open both sets; refuse one that is too small for a step or a validation."""
        t = config.train
        directory, needs = config.data.directory, config.data_requirements()
        self.train_set, self.val_set = (open_data(directory, s, **needs) for s in ("train", "val"))
        share = {"length": t.length, "rank": rank, "world_size": plan.world_size}
        order = {"seed": t.seed, "shuffle": config.data.shuffle, "device": device}

        def loader(length: int) -> TrainLoader:  # as many tokens per micro-batch at any length
            sizes = {"global_batch": plan.sequences * t.length // length}
            sizes |= {"micro_batch": plan.micro_batch * t.length // length, "length": length}
            return TrainLoader(self.train_set, **(share | order | sizes))

        self.loader = loader(t.length)
        if t.long_length:
            self.loader = MixedLoader(self.loader, loader(t.long_length), t.long_interval)
        # This rank's share of the first eval.tokens of the validation set, or of all there are.
        self.notices: list[str] = []
        tokens = config.eval.tokens
        there = windows_of(self.val_set, t.length).count * t.length
        if 0 < there < tokens:
            asked = f"eval.tokens = {tokens:,}"
            self.notices.append(f"validation takes the {there:,} tokens there are, not {asked}")
            tokens = there
        first = {"total_tokens": tokens, "batch": config.eval.batch or plan.micro_batch}
        self.validation = functools.partial(validation_windows, self.val_set, **first, **share)
        self.validation()
