"""Defines every attention mechanism of the paper as a value.

A mechanism is a frozen record of a few parts. Parts that do not go together are refused when it is
made. One row of the attention matrix, for a query that sees N keys (itself included, N counted from
1), is computed as

    x = scale * similarity + bias        q.k / sqrt(d), or log d log N cos(q, k), ...
                                         and the log decay from the key to the query, if given
    A = phi(x)                           activation, on the visible keys only
    A = A / sum|A|                       normalisation (l1, by a length, or none)
    A = -A, A - 1/N, ...                 post-step
    A = l1(relu(N A - 1[N > 3])^p)       sharpening, the paper's re-weighting

`MECHANISMS` holds the mechanisms of the paper's tables, and the controls and baselines beside them.
Rows that differ in p share an entry. Adding a mechanism is adding an entry.
Nothing here needs torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lssar.errors import UserError, did_you_mean

# Scales of cos(q, k), the others are of q.k; L is train_length.
COSINES = ("log d log N", "s log d log N", "log d log L", "sqrt(d)")
# What each part can be. `reference.py` computes all of them; a backend declares which it does.
PARTS: dict[str, tuple[str, ...]] = {
    "scale": ("1/sqrt(d)", "s log N / sqrt(d)", *COSINES),
    "bias": ("none", "-log L", "-log N"),
    "phi": ("exp", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"),
    # How a row is normalised. "stick": walking back from the query, each key takes the share phi
    # of what is left; the query's own key takes the rest.
    "norm": ("l1", "none", "L", "gamma sqrt(N/2)", "stick"),
    "post": ("none", "negate", "recentre", "recentre, l1"),
    "length": ("train", "current"),  # what L is: train_length, or the number of keys
    "numerics": ("safe", "naive"),  # naive: the paper's literal x**p, which overflows
}
SIGNED = ("identity", "gelu", "mish")  # activations with negative values

# A row is flat, and has nothing to sharpen, where its largest excess over the mean is within the
# rounding of its scores: excess <= FLAT (4 + largest possible |score|) eps * maximum. The reference
# and the fused kernels take the constant from here.
FLAT = 2.0


@dataclass(frozen=True)
class Mechanism:
    """Describes one mechanism. `get_mechanism(name, **overrides)` makes a variant of an entry.

    mine = Mechanism("mine", "Mine", scale="sqrt(d)", phi="softplus", p=4)
    out = attend(q, k, v, mine)
    """

    name: str
    label: str  # for tables and figures
    scale: str = "1/sqrt(d)"
    bias: str = "none"
    phi: str = "exp"
    norm: str = "l1"
    post: str = "none"
    p: float | None = None  # sharpening exponent; None: no sharpening stage
    parameter_init: float | None = None  # initial value of the one learnable scalar per head

    # What a user may change, besides p:
    alpha: float = 0.0  # p_i = p (1 + alpha (sqrt(N/train_length) - 1)) for N > train_length
    train_length: int = 1024
    length: str = "train"
    numerics: str = "safe"
    window: int | None = None  # a query sees only the last `window` keys, and N <= window
    sinks: int = 0  # of the first keys, which a window keeps in view (StreamingLLM)
    softcap: float | None = None  # c: a score x becomes c tanh(x / c), as in Gemma 2

    def __post_init__(self) -> None:
        for part, known in PARTS.items():
            value = getattr(self, part)
            if value not in known:
                self._refuse(part, f"choose from {', '.join(map(repr, known))}")
        if self.p is not None and not (_is_number(self.p) and self.p >= 1):
            self._refuse("p", "it must be a number >= 1: below 1 the gradient at zero is infinite")
        are_probabilities = (self.norm, self.post) == ("l1", "none") and self.phi not in SIGNED
        if self.sharpened and not are_probabilities:
            self._refuse("p", "re-weighting takes probabilities: norm 'l1', no post-step, phi >= 0")
        if not (_is_number(self.alpha) and self.alpha >= 0):
            self._refuse("alpha", "the growth of p_i must be a number >= 0")
        if not (_is_whole(self.train_length) and self.train_length >= 1):
            self._refuse("train_length", "it must be a whole number >= 1")
        if self.window is not None and not (_is_whole(self.window) and self.window >= 1):
            self._refuse("window", "it must be a whole number >= 1, or None for no window")
        if self.softcap is not None:
            if not (_is_number(self.softcap) and self.softcap > 0):
                self._refuse("softcap", "it must be a number > 0, or None for no cap")
            if self.cosine:
                self._refuse("softcap", "scores on the cosine are bounded already; leave it out")
        if not (_is_whole(self.sinks) and self.sinks >= 0 and (self.window or not self.sinks)):
            self._refuse("sinks", "it must be a whole number >= 0, and needs a window")
        if self.norm == "stick" and (self.phi, self.post) != ("sigmoid", "none"):
            self._refuse("norm", "what breaks off a stick is phi = 'sigmoid', and there is no post")
        learnable = self.scale.startswith("s ") or self.norm == "gamma sqrt(N/2)"
        init = self.parameter_init
        if not (_is_number(init) if learnable else init is None):
            rule = "must be a number" if learnable else "has no use: no part has a parameter"
            self._refuse("parameter_init", rule)

    def _refuse(self, key: str, rule: str) -> NoReturn:
        raise UserError(f"attention {self.name!r}: {key} = {getattr(self, key)!r}; {rule}")

    @property
    def cosine(self) -> bool:
        return self.scale in COSINES

    @property
    def title(self) -> str:
        """Return the label, with p where there is one."""
        return f"{self.label} p={self.p:g}" if self.sharpened else self.label

    @property
    def sharpened(self) -> bool:
        return self.p is not None

    def exponents(self, row_count: Any) -> Any:
        """Return the sharpening exponent of each row: p, or the adaptive p_i for its count."""
        if self.alpha == 0:
            return self.p
        growth = (row_count / self.train_length).sqrt() - 1
        return self.p * (1 + self.alpha * growth.clamp(min=0))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value is not True and abs(value) < math.inf


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LSSA: dict[str, Any] = {"scale": "log d log N", "phi": "softplus"}
_SIGMOID_LOGN: dict[str, Any] = {"phi": "sigmoid", "bias": "-log N"}


def _registry(*entries: Mechanism) -> dict[str, Mechanism]:
    found = {m.name: m for m in entries}
    if len(found) < len(entries):
        names = [m.name for m in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two mechanisms are named {twice!r}; rename one")
    return found


MECHANISMS = _registry(
    Mechanism("softmax", "Softmax"),
    Mechanism("ssmax", "SSMax", scale="s log N / sqrt(d)", parameter_init=0.43),
    Mechanism("sigmoid", "Sigmoid (b=-log L)", phi="sigmoid", bias="-log L", norm="none"),
    Mechanism("sigmoid-logn", "Sigmoid (b=-log N)", **_SIGMOID_LOGN, norm="none"),
    Mechanism("sigmoid-logn-l1", "Sigmoid (b=-log N, l1)", **_SIGMOID_LOGN),
    Mechanism("relu-length", "ReLU / L", phi="relu", norm="L"),
    Mechanism("relu-shen", "ReLU (Shen)", phi="relu", norm="gamma sqrt(N/2)", parameter_init=1.0),
    Mechanism("relu-l1", "ReLU (l1)", phi="relu"),
    Mechanism("relu2-l1", "ReLU^2 (l1)", phi="relu2"),
    Mechanism("relu6-l1", "ReLU6 (l1)", phi="relu6"),
    Mechanism("gelu-l1", "GeLU (l1)", phi="gelu"),
    Mechanism("sigmoid-l1", "Sigmoid (l1)", phi="sigmoid"),
    Mechanism("softplus-l1", "Softplus (l1)", phi="softplus"),
    Mechanism("mish-l1", "Mish (l1)", phi="mish"),
    Mechanism("identity", "x", phi="identity", norm="none"),
    Mechanism("exp", "exp(x)", norm="none"),
    Mechanism("identity-l1", "x (l1)", phi="identity"),
    Mechanism("cos-softmax", "Softmax of cosines", scale="log d log N"),
    Mechanism("cos-softmax-constant", "Softmax of cosines, constant scale", scale="sqrt(d)"),
    Mechanism("cos-softmax-fixed", "Softmax of cosines, scale log d log L", scale="log d log L"),
    Mechanism("cos-ssmax", "SSMax of cosines", scale="s log d log N", parameter_init=1.0),
    Mechanism("stick-breaking", "Stick-breaking", phi="sigmoid", norm="stick"),
    Mechanism("softmax-inverse", "-Softmax", post="negate"),
    Mechanism("softmax-recentred", "Softmax, re-centred", post="recentre"),
    Mechanism("softmax-recentred-l1", "Softmax, re-centred, l1", post="recentre, l1"),
    Mechanism("lssa", "LSSA", **_LSSA),
    Mechanism("lssar", "LSSAR", **_LSSA, p=15),
    Mechanism("softmax-reweighted", "Softmax, re-weighted", p=15),
    Mechanism("sigmoid-logn-l1-reweighted", "Sigmoid, re-weighted", **_SIGMOID_LOGN, p=15),
)

OVERRIDES = ("p", "alpha", "train_length", "length", "numerics", "window", "sinks")


def get_mechanism(name: str, **overrides: Any) -> Mechanism:
    """Return the registry's entry `name` with `overrides` (of `OVERRIDES`; None: the default).

    gentle = get_mechanism("lssar", p=3, window=256)
    """
    if name not in MECHANISMS:
        raise UserError(f"unknown attention {name!r}; {did_you_mean(name, MECHANISMS)}")
    mechanism = MECHANISMS[name]
    if not overrides:
        return mechanism
    for key, value in overrides.items():
        if key not in OVERRIDES:
            raise UserError(
                f"unknown attention setting {key!r} = {value!r}; {did_you_mean(key, OVERRIDES)}"
            )
        if value is not None and not uses_setting(key, mechanism):
            raise UserError(
                f"attention {name!r} does not use {key} = {value!r}; leave it out, or use one of "
                + ", ".join(n for n, m in MECHANISMS.items() if uses_setting(key, m))
            )
    given = {key: value for key, value in overrides.items() if value is not None}
    return replace(mechanism, **given)


def uses_setting(key: str, m: Mechanism) -> bool:
    """Tell whether a mechanism has a part that the setting changes."""
    if key in ("p", "alpha", "numerics"):
        return m.sharpened
    return key != "length" or m.bias == "-log L" or m.norm == "L"
