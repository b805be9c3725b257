"""A trained model under another evaluation setting, without retraining.

Another sharpening exponent, the adaptive p_i, a sliding window, or position interpolation: each
changes one thing, so that its effect can be seen.
"""

import argparse
from dataclasses import dataclass

from evaluating.checkpoints import Checkpoint
from evaluating.results import AS_TRAINED
from lssar.errors import UserError
from model import GPT, ModelConfig


@dataclass(frozen=True)
class Variant:
    name: str = AS_TRAINED
    key: str | None = None  # an attention setting: p, alpha or window
    value: float | int | None = None
    interpolated: bool = False

    def suits(self, config: ModelConfig) -> bool:
        return self.key not in ("p", "alpha") or config.attention.sharpened

    def config(self, trained: ModelConfig, train_length: int, length: int) -> ModelConfig:
        """The model's config at this evaluation length; `trained` itself where nothing changes."""
        settings = trained.to_dict()
        if self.interpolated and length > train_length:
            settings["interpolation"] = trained.interpolation * length / train_length
        elif (
            self.key == "p"
            or (self.key == "alpha" and length > trained.attention.train_length)
            or (self.key == "window" and length > self.value)
        ):
            settings["attention"] |= {self.key: self.value}
        else:
            return trained
        return ModelConfig.from_dict(settings)


@dataclass(frozen=True)
class Case:
    """One checkpoint under one variant at one length: what is measured at a time."""

    checkpoint: Checkpoint
    variant: Variant
    length: int

    @property
    def key(self) -> dict:
        """The fields that its records share."""
        run = self.checkpoint.identity
        return {"run": run, "variant": self.variant.name, "length": self.length}

    @property
    def label(self) -> str:
        return series_label(self.checkpoint.info.run, self.variant.name)

    @property
    def config(self) -> ModelConfig:
        checkpoint = self.checkpoint
        return self.variant.config(checkpoint.config, checkpoint.info.train_length, self.length)

    def configure(self, model: GPT) -> None:
        model.configure(attention=self.config.attention, interpolation=self.config.interpolation)


def series_label(run: str, variant: str) -> str:
    return run if variant == AS_TRAINED else f"{run}, {variant}"


def variants(arguments: argparse.Namespace, checkpoints: list[Checkpoint]) -> list[Variant]:
    """As trained, then what the command line adds; every value is checked on the models."""
    chosen = [Variant()]
    for key in ("p", "alpha", "window"):
        chosen += [Variant(f"{key}={v:g}", key, v) for v in getattr(arguments, key)]
    if arguments.position_interpolation:
        chosen.append(Variant("PI", interpolated=True))
    for variant in chosen:
        suited = [c for c in checkpoints if variant.suits(c.config)]
        if not suited:
            raise UserError(
                f"--{variant.key} {variant.value:g}: no checkpoint given re-weights its attention, "
                "so there is no exponent to change; leave it out"
            )
        for c in suited:  # raises for an impossible value
            variant.config(c.config, c.info.train_length, length=2**40)
    return chosen
