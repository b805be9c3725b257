"""Shares the sequences of one optimiser step among processes and micro-batches."""

import math
from typing import NamedTuple

from lssar.errors import UserError


class BatchPlan(NamedTuple):
    """Holds a plan in which sequences = world_size * accumulation * micro_batch."""

    sequences: int
    world_size: int
    accumulation: int
    micro_batch: int


def batch_plan(config, world_size: int = 1) -> BatchPlan:
    """Return the accumulation that makes exactly train.batch_tokens of a training Config."""
    t = config.train
    micro_batch = config.micro_batch
    if t.batch_tokens % t.length:
        nearest = max(1, round(t.batch_tokens / t.length)) * t.length
        raise UserError(
            f"train.batch_tokens = {t.batch_tokens} is not a multiple of length = {t.length}; "
            f"nearest: {nearest}"
        )
    sequences = t.batch_tokens // t.length
    step = f"{sequences} sequences per step ({t.batch_tokens} tokens / {t.length})"
    if sequences % world_size:
        raise UserError(
            f"{step} cannot be shared by {world_size} processes; "
            f"nearest number that can: {_nearest_divisor(sequences, world_size)}"
        )
    share = sequences // world_size
    if share % micro_batch:
        raise UserError(
            f"train.micro_batch = {t.micro_batch} does not divide {share} of the {step} for each "
            f"of {world_size} processes; nearest that does: {_nearest_divisor(share, micro_batch)}"
        )
    return BatchPlan(sequences, world_size, share // micro_batch, micro_batch)


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    large = [number // d for d in small]
    return min((*small, *large), key=lambda d: abs(d - wanted))
