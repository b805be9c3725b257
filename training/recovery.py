"""Finds steps whose numbers are not finite, and stops a run that has diverged."""

import math

import torch
from torch import Tensor, nn

from training.checkpoint import Progress, Store
from training.config import Config


class Diverged(RuntimeError):
    """Says that the numbers are no longer finite."""


def diverged(what: str, config: Config, store: Store) -> Diverged:
    """Return the error: what happened, the last good checkpoint, and what to change."""
    saved = store.candidates()
    last = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was saved"
    return Diverged(f"{what}; {last}; lower train.lr (now {config.train.lr:g})")


class UncheckedSteps:
    """Keeps the gradient norms and the losses by rank of steps that nobody has waited for yet."""

    def __init__(self):
        self._numbers: list[Tensor] = []
        self.norm = math.nan  # of the last checked step, as are the losses
        self.losses: list[float] = []

    def add(self, numbers: Tensor) -> None:
        """Take (norm, losses by rank) of one step, without waiting for them."""
        self._numbers.append(numbers)

    def check_finished_steps(self, progress: Progress, config, store, loader, say) -> None:
        """Wait for the steps so far; name the skipped ones, and stop a diverged run."""
        if not self._numbers:
            return
        first = progress.step - len(self._numbers)
        rows = torch.stack(self._numbers).tolist()
        self._numbers.clear()
        for step, row in enumerate(rows, start=first):
            if all(map(math.isfinite, row)):
                progress.skipped = 0
                continue
            progress.skipped += 1
            offsets = loader.offsets(step)
            say(
                f"warning: step {step} is not finite and was skipped: gradient norm {row[0]}, "
                f"loss by rank {row[1:]}, batch of token offsets {offsets.min()}..{offsets.max()}"
            )
            if progress.skipped > config.train.max_skipped_steps:
                raise diverged(
                    f"{progress.skipped} steps in a row were not finite, the last was {step} "
                    "(their batches are above)",
                    config,
                    store,
                )
        self.norm = rows[-1][0]
        self.losses = rows[-1][1:]


def refuse_infinite_weights(model: nn.Module, step: int, config: Config, store: Store) -> None:
    """Stop a run before it saves weights that are not finite."""
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise diverged(
            f"after step {step - 1} the weights are not finite, nor saved", config, store
        )
