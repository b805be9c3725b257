"""Runs an evaluation: which cases are to be measured, in which precision, into which file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from evaluating.checkpoints import Checkpoint, open_checkpoints, series_label
from evaluating.results import Results, continue_results
from evaluating.variants import (
    CURRENT_LENGTH,
    STRETCHES,
    Variant,
    alpha_name,
    exponent_name,
    window_name,
)
from lssar.backends import forget_used_backends, used_backends
from lssar.errors import UserError
from model import GPT
from modelling.config import ModelConfig
from training import distributed
from training.distributed import World

# Tokens in one forward pass, or one sequence if that is longer. Fixed, because a matrix product
# can round differently in another shape, and results must be the same every time.
BATCH_TOKENS = 16384


def progress(total: int, label: str, unit: str, enabled: bool = True):
    """Return a progress bar, shown on a terminal only."""
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
    """Return the version, threads and backends that the last digits of numbers depend on."""
    found = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    attention = run.get("model", {}).get("attention", {})
    if "name" in attention:
        found["attention"] = used_backends(attention["name"])
    return found


def open_results(path: Path, kind: str, settings: dict, about: dict, say: bool = True) -> Results:
    """Begin or continue a results file; its records say what computed them."""
    results = continue_results(path, kind, settings, about)
    results.made_with = made_with
    if results.records and say:
        print(f"continuing {path}: {len(results.records)} finished numbers are kept")
    return results


@contextmanager
def opened(arguments) -> Iterator[tuple]:
    """Yield (world, checkpoints, variants) of a command, in each process that torchrun started."""
    world = distributed.start(arguments.device)
    try:
        checkpoints = open_checkpoints(arguments.checkpoints)
        chosen = chosen_variants(arguments, checkpoints)
        if world.is_main:
            say_left_out(checkpoints, chosen)
        yield world, checkpoints, chosen
    finally:
        distributed.finish()


def chosen_variants(arguments, checkpoints: list[Checkpoint]) -> list[Variant]:
    """List the variants: as trained, then those of the command line, checked on the models."""
    chosen = [Variant()]
    sinks = arguments.sinks
    chosen += [Variant(exponent_name(p), "p", p) for p in arguments.p]
    chosen += [Variant(alpha_name(alpha), "alpha", alpha) for alpha in arguments.alpha]
    chosen += [Variant(window_name(window), "window", window) for window in arguments.window]
    if sinks and not arguments.window:
        raise UserError(f"--sinks {sinks} are kept beside a window; give --window too")
    for window in arguments.window if sinks else ():
        chosen.append(Variant(window_name(window, sinks), "window", window, sinks))
    chosen += [Variant(STRETCHES[key], key) for key in STRETCHES if getattr(arguments, key)]
    if arguments.current_length:
        chosen.append(Variant(CURRENT_LENGTH, "length", "current"))
    for variant in chosen:
        lacking = [variant.needs(checkpoint.config) for checkpoint in checkpoints]
        if all(lacking):
            raise UserError(f"{variant.name}: no checkpoint given {lacking[-1]}; leave it out")
        for checkpoint, needs in zip(checkpoints, lacking, strict=True):
            if not needs:  # raises for an impossible value
                variant.config(checkpoint.config, checkpoint.info.train_length, length=2**40)
    return chosen


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
    """Open a command's results file, and compute in the precision that its arguments ask for."""
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


@dataclass(frozen=True)
class Case:
    """Holds what is measured at a time: one checkpoint under one variant at one length."""

    checkpoint: Checkpoint
    variant: Variant
    length: int

    @property
    def key(self) -> dict:
        """Return the fields that its records share."""
        return {
            "run": self.checkpoint.identity,
            "variant": self.variant.name,
            "length": self.length,
        }

    @property
    def label(self) -> str:
        """Name the run and the variant."""
        return series_label(self.checkpoint.info.run, self.variant.name)

    @property
    def config(self) -> ModelConfig:
        """Return the config of the model under the variant at this length."""
        trained = self.checkpoint.config
        return self.variant.config(trained, self.checkpoint.info.train_length, self.length)

    def configure(self, model: GPT) -> None:
        """Set the model to this case."""
        model.configure(**vars(self.config))


def unmeasured(results: Results, checkpoints, variants, lengths, world) -> Iterator[tuple]:
    """Yield (case, configured model) of the cases that the results lack, short lengths first."""
    for checkpoint in checkpoints:
        results.runs.setdefault(checkpoint.identity, checkpoint.describe())
        suited = [v for v in variants if not v.needs(checkpoint.config)]
        cases = [Case(checkpoint, v, n) for n in lengths for v in suited]
        missing = [case for case in cases if not results.find(**case.key)]
        model = checkpoint.load(world.device) if missing else None
        for case in missing:
            case.configure(model)
            forget_used_backends()  # a record names the backends of its own measurement
            yield case, model
