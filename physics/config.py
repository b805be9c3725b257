"""Reads configs of runs on orbits: train.py's sections, and [orbits] for embedding and head."""

import shlex
from dataclasses import dataclass, field

from data.loader import Batches
from lssar.errors import UserError
from physics.loader import OrbitBatches
from physics.model import OrbitModel, OrbitModelConfig
from training.batch_plan import BatchPlan
from training.config import Config


@dataclass(frozen=True)
class OrbitSection:
    """Holds the keys of [orbits]."""

    channels: int = 2  # tokens per position: x and y
    learned_positions: int = 999  # rows of the table
    outputs: int = 0  # numbers per position from a regression head; 0: the next tokens


@dataclass(frozen=True)
class OrbitConfig(Config):
    """Says what one run on orbits is."""

    model_type = OrbitModel

    orbits: OrbitSection = field(default_factory=OrbitSection)

    def model_config(self) -> OrbitModelConfig:
        """Return the checked model of [model], [attention] and [orbits]."""
        config = OrbitModelConfig(**vars(super().model_config()), **vars(self.orbits))
        config.check()
        longest = max(self.train.length, self.train.long_length)
        if longest > config.learned_positions:
            raise UserError(
                f"orbits.learned_positions = {config.learned_positions} are too few for "
                f"train.length = {longest}; raise it"
            )
        return config

    def make_batches(self, plan: BatchPlan, rank: int = 0, device="cpu") -> Batches:
        """Open the orbits, and refuse orbits that do not fit this run."""
        return OrbitBatches(self, plan, rank, device)

    def fresh_parameters(self) -> tuple[str, ...]:
        """Return how the names of parameters begin that no checkpoint gives: a regression head."""
        return ("head.",) if self.orbits.outputs else ()

    def data_command(self) -> str:
        """Return the command that simulates the data."""
        if self.data.prepare:
            return super().data_command()
        return f"python physics/simulate.py orbits --out {shlex.quote(self.data.directory)}"
