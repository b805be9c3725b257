"""Fits the micro-batch to the memory that there really is."""

from collections.abc import Callable

import torch

from lssar.errors import UserError
from support.command import out_of_memory
from training.config import Config
from training.distributed import World


def halve_until_it_fits(
    config: Config,
    world: World,
    rehearse: Callable[[Config], None],
    say: Callable[[str], None],
) -> Config:
    """Halve the micro-batch until every rank has room for a step; a step computes the same.

    `rehearse(config)` runs the micro-batches of a step without collectives: a rank that runs out of
    memory must not leave the others waiting.
    """
    while any(world.gather(torch.tensor(not _has_room(config, rehearse)))):
        sequences = config.micro_batch
        failed = f"out of memory with train.micro_batch = {sequences}"
        if sequences == 1:
            raise UserError(f"{failed}; lower train.length, model.width or model.layers")
        say(f"warning: {failed}; the step starts again with {sequences // 2}")
        torch.cuda.empty_cache()
        if config.train.compile:  # or the second shape would be compiled for any shape
            torch.compiler.reset()
        config = config.with_micro_batch(sequences // 2)
    return config


def _has_room(config: Config, rehearse: Callable[[Config], None]) -> bool:
    try:
        rehearse(config)
        return True
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
