"""Makes batches of a token set: a pure function of (seed, step, global batch, length).

A split of T tokens has S = (T - 1) // length sequences of `length` inputs and the `length` tokens
that follow them; sequences do not overlap and may cross shard borders. A run takes them one after
another: the g-th, in epoch g // S, is sequence permute(g % S), a permutation drawn from (seed,
epoch), so that nothing repeats within an epoch. Step s takes the next global_batch of them from
g = s * global_batch on. How many processes and micro-batches share a step only decides who reads
what.

With `train.long_length`, every `train.long_interval`-th step takes longer sequences of the same
stream, in an order of their own.

`shuffle=False` takes sequences in order, as llm.c does, whatever the seed.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.shards import TokenSet, open_split
from lssar.errors import UserError

ROUNDS = 6


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Permute range(size) pseudo-randomly, computing the permutation at these indices only.

    A Feistel network permutes the next larger range of 4^k numbers; a result outside range(size)
    is permuted again until it falls inside, which keeps the map one-to-one.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    bits = np.uint64(half)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    result = np.asarray(indices, dtype=np.uint64).copy()
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left = result[outside] >> bits
        right = result[outside] & mask
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


class Sequences:
    """Reads a token stream as sequences of `length` inputs and the tokens that follow them."""

    def __init__(self, tokens: TokenSet, length: int):
        self.tokens = tokens
        self.directory = tokens.directory
        self.total_tokens = tokens.total_tokens
        self.length = length
        self.stride = length  # from one sequence's first token to the next one's
        self.shape = (length + 1,)
        self.count = (tokens.total_tokens - 1) // length

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """Read (len(offsets), *shape) int64 tokens, copied once, from the mapped file."""
        batch = torch.empty((len(offsets), *self.shape), dtype=torch.int64, pin_memory=pin)
        self.tokens.fill(batch.numpy(), offsets)
        return batch

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of a batch that `read` returned."""
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


class TrainLoader:
    """Reads this rank's micro-batches of any step."""

    def __init__(
        self,
        source: Sequences,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        shuffle: bool = True,
        prefetch: bool | None = None,
    ):
        """Share a global batch of sequences; refuse one that cannot be shared, or too few of them.

        `prefetch`: read one micro-batch ahead in a thread; default: on a GPU only.
        """
        self.source = source
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.shuffle = shuffle
        at_once = micro_batch * world_size
        if global_batch % at_once:
            raise UserError(
                f"a global batch of {global_batch} sequences for {world_size} processes x "
                f"micro-batch {micro_batch} must be a multiple of {at_once}"
            )
        self.accumulation = global_batch // at_once
        self._refuse_too_few_sequences(at_once)
        if prefetch is None:
            prefetch = self.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1) if prefetch else None
        self._ahead: dict[tuple[int, int], Future] = {}  # by step and part

    def _refuse_too_few_sequences(self, at_once: int) -> None:
        """Refuse too little data; name the largest step of whole micro-batches that it allows."""
        source = self.source
        length = source.length
        if source.count < 1:
            tokens = source.total_tokens
            raise UserError(
                f"{source.directory} has {tokens} training tokens, too few for length {length} "
                f"and its targets; set train.length = {max(1, tokens - 1)} or less"
            )
        if source.count >= self.global_batch:
            return
        fitting = source.count // at_once * at_once * length
        if fitting:
            remedy = f"set train.batch_tokens to {fitting} (now {self.global_batch * length})"
        else:
            remedy = f"lower train.micro_batch (now {self.micro_batch}) and train.batch_tokens"
        raise UserError(
            f"{source.directory} has {source.count} training sequences of length {length}, "
            f"fewer than the {self.global_batch} of one step; {remedy} or add data"
        )

    def offsets(self, step: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return the offsets at which this step's sequences begin: `count` from `first`, or all."""
        if count is None:
            count = self.global_batch
        begin = step * self.global_batch + first
        epochs, indices = np.divmod(np.arange(begin, begin + count), self.source.count)
        if self.shuffle:
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                indices[chosen] = permute(indices[chosen], self.source.count, self.seed, int(epoch))
        return indices * self.source.stride

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), each (micro_batch, length) int64, per accumulation step."""
        for part in range(self.accumulation):
            yield self.source.split(self._take(step, part).to(self.device, non_blocking=True))

    def divisors(self, step: int) -> list[float]:
        """Return one divisor per micro-batch.

        Mean losses over them, summed, then averaged over ranks, are the mean over the global batch.
        """
        return [self.accumulation] * self.accumulation

    def _take(self, step: int, part: int) -> Tensor:
        """Return the micro-batch, which may be read already, and start to read the one after."""
        if self._thread is None:
            return self._read(step, part)
        batch = self._ahead.pop((step, part), None)
        if batch is None:
            batch = self._thread.submit(self._read, step, part)
        following = (step, part + 1) if part + 1 < self.accumulation else (step + 1, 0)
        self._ahead = {following: self._thread.submit(self._read, *following)}
        return batch.result()

    def _read(self, step: int, part: int) -> Tensor:
        first = (part * self.world_size + self.rank) * self.micro_batch
        offsets = self.offsets(step, first, self.micro_batch)
        return self.source.read(offsets, pin=self.device.type == "cuda")


class MixedLoader:
    """Takes every `interval`-th step from `long`, the others from `usual`.

    Each of the two counts its own steps.
    """

    def __init__(self, usual: TrainLoader, long: TrainLoader, interval: int):
        self.usual = usual
        self.long = long
        self.interval = interval

    def _at(self, step: int) -> tuple[TrainLoader, int]:
        """Return the loader of a step, and the step's number in it."""
        rounds, place = divmod(step, self.interval)
        if place == self.interval - 1:
            return self.long, rounds
        return self.usual, step - rounds

    def offsets(self, step: int) -> np.ndarray:
        loader, own = self._at(step)
        return loader.offsets(own)

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader, own = self._at(step)
        return loader.micro_batches(own)

    def divisors(self, step: int) -> list[float]:
        loader, own = self._at(step)
        return loader.divisors(own)


def validation_batches(
    source: Sequences, *, total_tokens: int, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) of this rank's share of the first sequences of the split.

    They do not overlap: the same `total_tokens` targets at every length.
    """
    length = source.length
    if total_tokens < 1 or total_tokens % length:
        raise UserError(
            f"{total_tokens} validation tokens in sequences of {length}: "
            "the first must be a multiple of the second"
        )
    most = source.count * length
    if most < total_tokens:
        change = f"set eval.tokens to at most {most} or " if most > 0 else ""
        raise UserError(
            f"{source.directory} has {source.total_tokens} validation tokens, too few for "
            f"{total_tokens} targets in sequences of {length}; "
            f"{change}prepare a larger validation set"
        )
    offsets = np.arange(total_tokens // length) * source.stride
    mine = offsets[rank::world_size]
    batches = (mine[first : first + batch] for first in range(0, len(mine), batch))
    return (source.split(source.read(chosen)) for chosen in batches)


class Batches:
    """Opens both sets of a run, and makes their batches as its config says."""

    loader_type = TrainLoader

    def __init__(self, config, plan, rank: int = 0, device: str | torch.device = "cpu"):
        """Open both sets; refuse one that is too small for a step or a validation."""
        t = config.train
        self.config = config
        self.plan = plan
        self.rank = rank
        self.device = device
        self.notices: list[str] = []
        self.train_set = self.open_set("train")
        self.val_set = self.open_set("val")
        self.loader = self.make_loader(t.length)
        if t.long_length:
            self.loader = MixedLoader(self.loader, self.make_loader(t.long_length), t.long_interval)
        self.validation_tokens = self.count_validation_tokens()
        self.validation()  # refuses what it cannot read

    def open_set(self, split: str) -> TokenSet:
        """Open the train or val split."""
        return open_split(
            self.config.data.directory,
            split,
            vocab_size=self.config.model_config().vocab_size,
            command=self.config.data_command(),
        )

    def sequences(self, tokens: TokenSet, length: int) -> Sequences:
        """Cut a split into sequences."""
        return Sequences(tokens, length)

    def make_loader(self, length: int) -> TrainLoader:
        """Make the loader of sequences of a length, with as many tokens per step at any length."""
        t = self.config.train
        return self.loader_type(
            self.sequences(self.train_set, length),
            global_batch=self.plan.sequences * t.length // length,
            micro_batch=self.plan.micro_batch * t.length // length,
            seed=t.seed,
            rank=self.rank,
            world_size=self.plan.world_size,
            device=self.device,
            shuffle=self.config.data.shuffle,
        )

    def count_validation_tokens(self) -> int:
        """Return eval.tokens; if there are fewer, their number, with a notice."""
        wanted = self.config.eval.tokens
        length = self.config.train.length
        there = self.sequences(self.val_set, length).count * length
        if 0 < there < wanted:
            self.notices.append(
                f"validation takes the {there:,} tokens there are, not eval.tokens = {wanted:,}"
            )
            return there
        return wanted

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the validation batches."""
        return validation_batches(
            self.sequences(self.val_set, self.config.train.length),
            total_tokens=self.validation_tokens,
            batch=self.config.eval.batch or self.plan.micro_batch,
            rank=self.rank,
            world_size=self.plan.world_size,
        )
