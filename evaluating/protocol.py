"""Shared by the evaluation commands: processes, precision, progress, opening the results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from evaluating.checkpoints import Checkpoint, Variant, open_checkpoints, variants
from evaluating.results import Results
from lssar.backends import used_backends
from training import distributed
from training.distributed import World

# Tokens in one forward pass, or one sequence if that is longer. Fixed, because a matrix product
# can round differently in another shape, and results must be the same every time.
BATCH_TOKENS = 16384


def progress(total: int, label: str, unit: str, enabled: bool = True):
    """Return a bar that shows on a terminal; a log file has the finished numbers anyway."""
    return tqdm(
        total=total,
        desc=label,
        unit=unit,
        disable=not (enabled and sys.stderr.isatty()),
        unit_scale=total > 10_000,
        leave=False,
        dynamic_ncols=True,
    )


@contextmanager
def arithmetic(precision: str, device) -> Iterator[str]:
    """Compute in bf16 under autocast or in full fp32 (no TF32), and yield which of them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with distributed.autocast(device, precision):
            yield "bf16" if torch.is_autocast_enabled(device.type) else "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


def made_with(run: dict) -> dict:
    """Return what the last digits of a run's numbers depend on besides its settings."""
    found = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    attention = run.get("model", {}).get("attention", {})
    if "name" in attention:
        found["attention"] = used_backends(attention["name"])
    return found


def open_results(path: Path, kind: str, settings: dict, about: dict, say: bool = True) -> Results:
    """Begin or continue a results file whose records say what computed them."""
    results = Results(path, kind, settings, about, made_with=made_with)
    if results.records and say:
        print(f"continuing {path}: {len(results.records)} finished numbers are kept")
    return results


@contextmanager
def opened(arguments) -> Iterator[tuple]:
    """Yield (world, checkpoints, variants) of a command, in each process that torchrun started."""
    world = distributed.start(arguments.device)
    try:
        checkpoints = open_checkpoints(arguments.checkpoints)
        chosen = variants(arguments, checkpoints)
        if world.is_main:
            say_left_out(checkpoints, chosen)
        yield world, checkpoints, chosen
    finally:
        distributed.finish()


def say_left_out(checkpoints: list[Checkpoint], chosen: list[Variant]) -> None:
    """Name the variants that mean nothing for a model, and why."""
    for checkpoint in checkpoints:
        for variant in chosen:
            if needs := variant.needs(checkpoint.config):
                print(
                    f"{variant.name} is left out for {checkpoint.info.run}: "
                    f"it needs a model that {needs}",
                    file=sys.stderr,
                )


@contextmanager
def measuring(arguments, kind: str, settings: dict, about: dict, world: World) -> Iterator[Results]:
    """Open the results file of a command, to be filled in the precision of its arguments."""
    with arithmetic(arguments.precision, world.device) as precision:
        settings = settings | {"precision": precision}
        results = open_results(arguments.out, kind, settings, about, world.is_main)
        world.barrier()  # everyone has read the file before the first writes to it
        with kept_on_interrupt(results.path):
            yield results


@contextmanager
def kept_on_interrupt(path: Path) -> Iterator[None]:
    """Say where the finished numbers are, on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nwhat is finished is in {path}; the same command continues it")
        raise
