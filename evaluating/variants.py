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


def series_label(run: str, variant: str) -> str:
    return run if variant == AS_TRAINED else f"{run}, {variant}"


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
        if self.interpolated and length > train_length:
            factor = trained.interpolation * length / train_length
            return ModelConfig.from_dict(trained.to_dict() | {"interpolation": factor})
        acts = {
            None: False,
            "p": True,
            "alpha": length > trained.attention.train_length,
            "window": length > (self.value or 0),
        }
        if not acts[self.key]:
            return trained
        settings = trained.to_dict()
        settings["attention"] |= {self.key: self.value}
        return ModelConfig.from_dict(settings)


def variants(arguments: argparse.Namespace, checkpoints: list[Checkpoint]) -> list[Variant]:
    """As trained, then what the command line adds; every value checked on the models at once."""
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


def configure(model: GPT, config: ModelConfig) -> GPT:
    return model.configure(attention=config.attention, interpolation=config.interpolation)
