"""Changes one setting of a trained model for an evaluation, and names the change in records."""

from dataclasses import dataclass, replace

from evaluating.results import AS_TRAINED
from lssar.mechanisms import uses_setting
from modelling.config import ModelConfig

CURRENT_LENGTH = "L=current"
# Ways to stretch RoPE to the evaluation length, by their setting of the model.
STRETCHES = {"pi": "PI", "ntk": "NTK", "yarn": "YaRN"}
NTK = STRETCHES["ntk"]
YARN = STRETCHES["yarn"]


def exponent_name(p: float) -> str:
    """Name another sharpening exponent."""
    return f"p={p:g}"


def alpha_name(alpha: float) -> str:
    """Name an adaptive exponent p_i."""
    return f"alpha={alpha:g}"


def window_name(window: int, sinks: int = 0) -> str:
    """Name a sliding window, with the number of first tokens kept beside it."""
    name = f"window={window}"
    return f"{name}, sinks={sinks}" if sinks else name


@dataclass(frozen=True)
class Variant:
    """Changes one setting of a trained model, without retraining.

    In a model with local and global layers, p and alpha change in every layer that re-weights, a
    window narrows every layer that sees farther, and RoPE is stretched in every layer that has it.
    """

    name: str = AS_TRAINED
    key: str | None = None  # p, alpha, window, length, or how RoPE is stretched: pi, ntk, yarn
    value: float | int | str | None = None
    sinks: int = 0  # beside a window

    def needs(self, config: ModelConfig) -> str | None:
        """Return the property that this variant needs and the model lacks; None if it fits."""
        layers = config.all_layers
        wide = [layer for layer in layers if not layer.attention.window]
        rotary = [layer for layer in wide if layer.positions == "rope"]
        if self.key in ("p", "alpha") and not any(x.attention.sharpened for x in layers):
            return "re-weights its attention"
        if self.key == "length" and not uses_setting("length", config.attention):
            return "has an L in its attention"
        if self.key in STRETCHES and not rotary:
            return "has RoPE in a layer without a window"
        if self.key in ("ntk", "yarn") and config.interpolation != 1:
            return "was trained without position interpolation"
        if self.key == "yarn" and any(layer.attention.cosine for layer in rotary):
            return "has scores of q.k (YaRN scales q and k, and a cosine ignores scale)"
        if self.sinks and config.shift:
            return "does not shift its keys (a sink's would be that of another token)"
        if self.sinks and config.documents:
            return "sees all documents (the first tokens may be another document's)"
        if self.sinks and config.attention.cosine and config.positions == "rope":
            return "has scores of q.k, or cosines without RoPE (which turns a sink away)"
        return None

    def config(self, trained: ModelConfig, train_length: int, length: int) -> ModelConfig:
        """Return the model's config at this length; `trained` itself where nothing changes."""
        attention = trained.attention
        local = trained.local
        acts_beyond = {
            "p": 0,
            "window": self.value,
            "alpha": attention.train_length,
            "length": attention.train_length,
            **dict.fromkeys(STRETCHES, train_length),
        }
        if length <= acts_beyond.get(self.key, length):
            return trained
        if self.key in STRETCHES:
            stretch = trained.interpolation * length / train_length
            return replace(trained, interpolation=stretch, scaling=self.key)
        changes = {self.key: self.value}
        if self.key == "window":
            changes["sinks"] = self.sinks
        sharpens = self.key in ("p", "alpha")
        if sharpens and local is not None and local.attention.sharpened:
            local = replace(local, attention=replace(local.attention, **changes))
        if attention.sharpened or not sharpens:
            attention = replace(attention, **changes)
        changed = replace(trained, attention=attention, local=local)
        changed.check()
        return changed
