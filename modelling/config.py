"""Says what a model is: its sizes, and the mechanism, positions and keys of every layer.

    config = preset("124m", "lssar")
    config.all_layers  # one Layer for each layer of the model

Nothing here needs torch. Values are checked once, where they come in: by `preset`, which builds
the models of config files, and by `ModelConfig.from_dict`, which reads checkpoints.
"""

import math
import re
from dataclasses import dataclass, fields, replace

from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism

# Raised by every change after which the same weights compute something else. Checkpoints and
# exports carry it (under "meaning"); another version is refused.
#   1, or none: RoPE turns dimension i together with i + d/2
#   2: RoPE turns dimensions 2i and 2i + 1
WEIGHTS_VERSION = 2
LARGEST = 2**31  # the most that any size can be
MOST_LAYERS = 1000  # a mistyped number should not build modules for an hour

# How a layer knows where tokens are. With "rope", queries and keys are turned; with "none" it does
# not know (NoPE). With "alibi" and "fox" scores fall with the distance: at a fixed rate per head
# (ALiBi), or by a gate per token (FoX, the forgetting transformer).
POSITIONS = ("rope", "none", "alibi", "fox")
SCALINGS = ("pi", "ntk", "yarn")  # ways to stretch RoPE: see modelling/positions.py


@dataclass(frozen=True)
class Layer:
    """Says how a layer attends; layers of one model can differ in nothing else."""

    attention: Mechanism  # its `window` is how far the layer sees
    positions: str = "rope"  # one of POSITIONS
    shift: bool = False  # a value is kept under the previous token's key

    def narrowed(self, window: int) -> "Layer":
        """Return the layer with a sliding window."""
        return replace(self, attention=replace(self.attention, window=window, sinks=0))


@dataclass(frozen=True)
class ModelConfig:
    """Says what a model is."""

    layers: int
    heads: int
    width: int
    vocab_size: int
    vocab_rows: int  # rows of the embedding table: vocab_size, or more to be a multiple of 64
    attention: Mechanism
    interpolation: float = 1.0  # position interpolation: RoPE position m becomes m / interpolation
    scaling: str = "pi"  # one of SCALINGS: how RoPE is stretched by `interpolation`
    positions: str = "rope"  # one of POSITIONS
    pattern: tuple[str, ...] = ("global",)  # repeated over the layers: "global", or "local:WINDOW"
    local: Layer | None = None  # settings of the local layers; None: `attention` and `positions`
    shift: bool = False  # global layers keep a value under the previous token's key
    documents: bool = False  # a token sees its own document only, from the end-of-text token on

    @property
    def head_dim(self) -> int:
        """Return the dimension of a head."""
        return self.width // self.heads

    @property
    def head_rows(self) -> int:
        """Return how many numbers the head gives for each position."""
        return self.vocab_rows

    @property
    def end_of_text(self) -> int:
        """Return the end-of-text token, the last one of both our tokenisers."""
        return self.vocab_size - 1

    @property
    def all_layers(self) -> list[Layer]:
        """Return the settings of every layer, from the first to the last."""
        wide = Layer(self.attention, self.positions, self.shift)
        local = self.local or replace(wide, shift=False)
        kinds = []
        for entry in self.pattern:
            if entry == "global":
                kinds.append(wide)
            else:
                window = int(entry.removeprefix("local:"))
                kinds.append(local.narrowed(min(window, self.attention.window or window)))
        return [kinds[number % len(kinds)] for number in range(self.layers)]

    def to_dict(self) -> dict:
        """Return plain JSON values; mechanisms by their names and changed settings."""
        # Without defaults, so that a field added later does not change older models' identity.
        defaults = {f.name: f.default for f in fields(self) if f.name != "interpolation"}
        plain = {k: v for k, v in vars(self).items() if v != defaults.get(k)}
        plain["attention"] = _description(self.attention)
        if "pattern" in plain:
            plain["pattern"] = list(self.pattern)
        if self.local is not None:
            attention = _description(self.local.attention)
            plain["local"] = {"attention": attention, "positions": self.local.positions}
        return plain

    @classmethod
    def from_dict(cls, values: dict) -> "ModelConfig":
        """Read values that `to_dict` wrote, and check them."""
        try:
            found = values | {"attention": get_mechanism(**values["attention"])}
            if "pattern" in values:
                found["pattern"] = tuple(values["pattern"])
            if local := values.get("local"):
                found["local"] = Layer(get_mechanism(**local["attention"]), local["positions"])
            unknown = found.keys() - {f.name for f in fields(cls)}
            if unknown:
                raise UserError(
                    f"model config: {min(unknown)!r} is no setting of {cls.__name__}; "
                    "is it a model of another type?"
                )
            config = cls(**found)
            config.check()
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"model config: missing or mistyped key: {error}") from None
        return config

    def check(self) -> None:
        """Refuse values that no model can have."""
        check_sizes(self)
        check_layers(self)


def _description(m: Mechanism) -> dict:
    """Return the arguments of `get_mechanism` that make this mechanism."""
    entry = MECHANISMS[m.name]
    changed = {k: getattr(m, k) for k in OVERRIDES if getattr(m, k) != getattr(entry, k)}
    return {"name": m.name, **changed}


def check_count(name: str, value, least: int = 1) -> None:
    """Refuse a size that is no whole number from `least` to LARGEST."""
    if type(value) is not int:
        raise UserError(f"model: {name} = {value!r} is of a wrong type, must be int")
    if value < least:
        raise UserError(f"model: {name} = {value} must be at least {least}")
    if value > LARGEST:
        raise UserError(f"model: {name} = {value} must be at most {LARGEST}")


def check_sizes(m: ModelConfig) -> None:
    """Refuse sizes that no model can have."""
    for key in ("layers", "heads", "width", "vocab_size", "vocab_rows"):
        check_count(key, getattr(m, key))
    if m.layers > MOST_LAYERS:
        raise UserError(f"model: layers = {m.layers} must be at most {MOST_LAYERS}")
    if m.width % (2 * m.heads):
        raise UserError(
            f"model: width = {m.width} must be an even multiple of heads = {m.heads} "
            "(RoPE turns pairs of dimensions)"
        )
    if m.vocab_rows < m.vocab_size:
        raise UserError(
            f"model: vocab_rows = {m.vocab_rows} must be at least vocab_size = {m.vocab_size}"
        )
    if type(m.documents) is not bool:
        raise UserError(f"model: documents = {m.documents!r} must be true or false")


def check_layers(m: ModelConfig) -> None:
    """Refuse settings that layers cannot have, or cannot have together."""
    pattern = list(m.pattern)
    for entry in pattern:
        if not re.fullmatch(r"global|local:[1-9][0-9]{0,11}", str(entry)):
            raise UserError(
                f"model: pattern has {entry!r:.50}; write 'global', or 'local:32' for a window"
            )
    if not 1 <= len(pattern) <= m.layers:
        raise UserError(f"model: pattern = {pattern} must have 1 to layers = {m.layers} entries")
    if m.local is not None and set(pattern) == {"global"}:
        raise UserError(f"model: [local] is for local layers, and pattern = {pattern} has none")
    if type(m.shift) is not bool:
        raise UserError(f"model: shift = {m.shift!r} must be true or false")
    if m.shift and m.attention.sinks:
        raise UserError(
            f"model: shifted keys and sinks = {m.attention.sinks} do not go together; leave one out"
        )
    if m.positions not in POSITIONS:
        raise UserError(f"model: positions = {m.positions!r}; choose from {', '.join(POSITIONS)}")
    if m.local is not None and m.local.positions not in POSITIONS:
        raise UserError(
            f"model: positions = {m.local.positions!r} of local layers; "
            f"choose from {', '.join(POSITIONS)}"
        )
    if not 0 < m.interpolation < math.inf:
        raise UserError(f"model: interpolation = {m.interpolation} must be positive")
    if m.scaling not in SCALINGS:
        raise UserError(f"model: scaling = {m.scaling!r}; choose from {', '.join(SCALINGS)}")
    has_rope = any(layer.positions == "rope" for layer in m.all_layers)
    if m.interpolation != 1 and not has_rope:
        raise UserError(
            f"model: interpolation = {m.interpolation} stretches RoPE, positions = {m.positions} "
            "replaces it; leave one out"
        )


BYTES = {"vocab_size": 257, "vocab_rows": 257}
GPT2 = {"vocab_size": 50257, "vocab_rows": 50304}
VOCABULARIES = {"bytes": BYTES, "gpt2": GPT2}
PRESETS: dict[str, dict[str, int]] = {
    "nano": {"layers": 3, "heads": 2, "width": 128, **BYTES},
    "mid": {"layers": 4, "heads": 3, "width": 192, **BYTES},
    "45m": {"layers": 6, "heads": 8, "width": 512, **GPT2},
    "124m": {"layers": 12, "heads": 12, "width": 768, **GPT2},
    "355m": {"layers": 24, "heads": 16, "width": 1024, **GPT2},
}


def preset(
    name: str, attention: str | Mechanism = "softmax", tokeniser: str | None = None, **changes
) -> ModelConfig:
    """Return a model of the paper by its size.

    `tokeniser` chooses another vocabulary; `changes` are other values for ModelConfig's fields.
    """
    if name not in PRESETS:
        raise UserError(f"unknown model preset {name!r}; {did_you_mean(name, PRESETS)}")
    sizes = PRESETS[name]
    if tokeniser is not None:
        if tokeniser not in VOCABULARIES:
            guess = did_you_mean(tokeniser, VOCABULARIES)
            raise UserError(f"model: unknown tokeniser {tokeniser!r}; {guess}")
        sizes = sizes | VOCABULARIES[tokeniser]
        asked = changes.get("vocab_size", sizes["vocab_size"])
        if asked != sizes["vocab_size"]:
            raise UserError(
                f"model: tokeniser = {tokeniser!r} has {sizes['vocab_size']} ids, "
                f"vocab_size = {asked} contradicts it; leave one out"
            )
    if isinstance(attention, str):
        attention = get_mechanism(attention)
    if "pattern" in changes:
        changes["pattern"] = tuple(changes["pattern"])  # TOML has lists
    config = ModelConfig(**(sizes | changes), attention=attention)
    config.check()
    return config
