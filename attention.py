"""Every attention mechanism of the paper, as values.

    from attention import attend
    out = attend(q, k, v, "lssar")  # q, k, v: (batch, heads, length, head_dim), causal

A mechanism is a frozen record of a few orthogonal parts. One row of the attention matrix, for a
query that sees N keys (itself included, N counted from 1), is computed as

    x = scale * similarity + bias        q.k / sqrt(d), or log d log N cos(q, k), ...
    A = phi(x)                           activation, on the visible keys only
    A = A / sum|A|                       normalisation (l1, by a length, or none)
    A = -A, A - 1/N, ...                 post-step
    A = l1(relu(N A - 1[N > 3])^p)       sharpening, the paper's re-weighting

`MECHANISMS` holds one entry per row of the paper's tables; adding a mechanism is adding an entry.
`attention_weights` is the reference that every backend in `kernels/` must equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, did_you_mean
from kernels.backends import CPU, SDPA, TRITON, Backend, Call, chosen, fastest, used
from kernels.rowblock import attend_by_row_blocks

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
}

# Rows 1..3 are not shifted: with so few keys nothing would be left above the mean.
UNSHIFTED_ROWS = 3


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism. `get_mechanism(name, **overrides)` makes a variant of an entry."""

    name: str
    label: str  # for tables and figures
    scale: str = "1/sqrt(d)"  # or "s log N / sqrt(d)", or "log d log N" (on the cosine)
    bias: str = "none"  # or "-log L", "-log N"
    phi: str = "exp"  # a key of ACTIVATIONS
    norm: str = "l1"  # what a row is divided by; or "none", "L", "gamma sqrt(N/2)"
    post: str = "none"  # or "negate", "recentre", "recentre, l1"
    p: float | None = None  # sharpening exponent; None: no sharpening stage
    parameter_init: float | None = None  # initial value of the one learnable scalar a head

    # What a user may change, besides p:
    alpha: float = 0.0  # p_i = p (1 + alpha (sqrt(N/train_length) - 1)) for N > train_length
    train_length: int = 1024
    length: str = "train"  # what L is: train_length, or the "current" number of keys
    numerics: str = "safe"  # "naive": the paper's literal x**p, which overflows
    window: int | None = None  # a query sees only the last `window` keys, and N <= window

    @property
    def sharpened(self) -> bool:
        return self.p is not None

    def exponents(self, row_count: Tensor) -> Tensor | float:
        """The sharpening exponent of each row: p, or the adaptive p_i."""
        if self.alpha == 0:
            return self.p
        growth = (row_count / self.train_length).sqrt() - 1
        return self.p * (1 + self.alpha * growth.clamp(min=0))


_LSSA = {"scale": "log d log N", "phi": "softplus"}
_SIGMOID_LOGN = {"phi": "sigmoid", "bias": "-log N"}

MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        Mechanism("softmax", "Softmax"),
        Mechanism("ssmax", "SSMax", scale="s log N / sqrt(d)", parameter_init=0.43),
        Mechanism("sigmoid", "Sigmoid (b=-log L)", phi="sigmoid", bias="-log L", norm="none"),
        Mechanism("sigmoid-logn", "Sigmoid (b=-log N)", **_SIGMOID_LOGN, norm="none"),
        Mechanism("sigmoid-logn-l1", "Sigmoid (b=-log N, l1)", **_SIGMOID_LOGN),
        Mechanism("relu-length", "ReLU / L", phi="relu", norm="L"),
        Mechanism(
            "relu-shen", "ReLU (Shen)", phi="relu", norm="gamma sqrt(N/2)", parameter_init=1.0
        ),
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
        Mechanism("softmax-inverse", "-Softmax", post="negate"),
        Mechanism("softmax-recentred", "Softmax, re-centred", post="recentre"),
        Mechanism("softmax-recentred-l1", "Softmax, re-centred, l1", post="recentre, l1"),
        Mechanism("lssa", "LSSA", **_LSSA),
        Mechanism("lssar", "LSSAR", **_LSSA, p=15),
        Mechanism("softmax-reweighted", "Softmax, re-weighted", p=15),
        Mechanism("sigmoid-logn-l1-reweighted", "Sigmoid, re-weighted", **_SIGMOID_LOGN, p=15),
    )
}

OVERRIDES = ("p", "alpha", "train_length", "length", "numerics", "window")


def get_mechanism(name: str, **overrides) -> Mechanism:
    """The registry's entry `name` with `overrides` (any of `OVERRIDES`; None: the default)."""
    if name not in MECHANISMS:
        raise UserError(f"unknown attention {name!r}; {did_you_mean(name, MECHANISMS)}")
    mechanism = MECHANISMS[name]
    for key, value in overrides.items():
        if key not in OVERRIDES:
            raise UserError(
                f"unknown attention setting {key!r} = {value!r}; {did_you_mean(key, OVERRIDES)}"
            )
        if value is not None and not _has_meaning(key, mechanism):
            raise UserError(
                f"attention {name!r} does not use {key} = {value!r}; leave it out, or use one of "
                + ", ".join(n for n, m in MECHANISMS.items() if _has_meaning(key, m))
            )
    given = {key: value for key, value in overrides.items() if value is not None}
    mechanism = replace(mechanism, **given)
    _check(mechanism)
    return mechanism


def _has_meaning(key: str, m: Mechanism) -> bool:
    if key in ("p", "alpha", "numerics"):
        return m.sharpened
    return key != "length" or m.bias == "-log L" or m.norm == "L"


def _check(m: Mechanism) -> None:
    def refuse(key: str, rule: str):
        raise UserError(f"attention {m.name!r}: {key} = {getattr(m, key)!r}; {rule}")

    def is_number(value, kinds):
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)

    if m.sharpened and not (is_number(m.p, (int, float)) and m.p >= 1):
        refuse("p", "the exponent must be a number >= 1 (below 1 the gradient at zero is infinite)")
    if not (is_number(m.alpha, (int, float)) and m.alpha >= 0):
        refuse("alpha", "the growth of p_i must be a number >= 0")
    if not (is_number(m.train_length, int) and m.train_length >= 1):
        refuse("train_length", "it must be a whole number >= 1")
    if m.window is not None and not (is_number(m.window, int) and m.window >= 1):
        refuse("window", "it must be a whole number >= 1, or None for no window")
    if m.length not in ("train", "current"):
        refuse("length", "choose 'train' or 'current'")
    if m.numerics not in ("safe", "naive"):
        refuse("numerics", "choose 'safe' or 'naive'")


# --- the reference -------------------------------------------------------------------------------


def attention_weights(
    q: Tensor, k: Tensor, mechanism: str | Mechanism, *, params: Tensor | None = None
) -> Tensor:
    """The attention matrix (B, H, Lq, Lk) of queries (B, H, Lq, d) over keys (B, H, Lk, d).

    Causal, the last query aligned with the last key: query i of Lq sees Lk - Lq + i + 1 keys.
    float64 in, float64 out; any other type is computed, and returned, in float32.
    """
    _check_shapes(q, k)
    mechanism = resolve(mechanism, keys=k.shape[2])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        return _weights(q.to(dtype), k.to(dtype), mechanism, _parameters(mechanism, params, q))


def _weights(q: Tensor, k: Tensor, m: Mechanism, params: Tensor | None) -> Tensor:
    length, keys = q.shape[-2], k.shape[-2]
    position = torch.arange(keys - length + 1, keys + 1, device=q.device).unsqueeze(-1)  # (Lq, 1)
    key = torch.arange(1, keys + 1, device=q.device)
    visible = key <= position  # (Lq, Lk)
    if m.window is not None:
        visible &= key > position - m.window
        position = position.clamp(max=m.window)
    row_count = position.to(q.dtype)

    x = _scores(q, k, m, row_count, params)
    a = _normalise(_activate(x, visible, m), m, row_count, params)
    a = _post_step(a, m, row_count, visible)
    return sharpen(a, m, row_count, _score_bound(q, k, m, row_count)) if m.sharpened else a


@torch.no_grad()
def _score_bound(q: Tensor, k: Tensor, m: Mechanism, row_count: Tensor) -> Tensor:
    """The largest score each row could have; its rounding is a few eps of that."""
    d = q.shape[-1]
    if m.scale == "log d log N":
        return math.log(d) * row_count.log()
    longest = k.norm(dim=-1).cummax(-1).values[..., k.shape[-2] - q.shape[-2] :]
    return (q.norm(dim=-1) * longest / math.sqrt(d)).unsqueeze(-1)


def _scores(q, k, m: Mechanism, row_count: Tensor, params: Tensor | None) -> Tensor:
    d = q.shape[-1]
    if m.scale == "log d log N":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q = q * (math.log(d) * row_count.log())
    elif m.scale == "s log N / sqrt(d)":
        q = q * (_per_head(params) * row_count.log() / math.sqrt(d))
    else:
        q = q / math.sqrt(d)
    x = q @ k.mT
    if m.bias == "-log N":
        x = x - row_count.log()
    elif m.bias == "-log L":
        x = x - math.log(m.train_length)
    return x


def _activate(x: Tensor, visible: Tensor, m: Mechanism) -> Tensor:
    """phi(x) on the visible keys, zero elsewhere."""
    if m.phi == "exp":
        x = x.masked_fill(~visible, -torch.inf)
        # l1 removes any factor of a row, so shifting by its maximum is exact and cannot overflow.
        return (x - x.detach().amax(-1, keepdim=True) if m.norm == "l1" else x).exp()
    return ACTIVATIONS[m.phi](x).masked_fill(~visible, 0)


def _normalise(a: Tensor, m: Mechanism, row_count: Tensor, params: Tensor | None) -> Tensor:
    if m.norm == "l1":
        return _l1(a, signed=m.phi in ("gelu", "mish", "identity"))
    if m.norm == "L":
        return a / m.train_length
    if m.norm == "gamma sqrt(N/2)":
        return a / (_per_head(params) * (row_count / 2).sqrt())
    return a


def _l1(a: Tensor, signed: bool) -> Tensor:
    """Rows divided by their l1-norm; a row of zeros attends to nothing and stays zero."""
    total = (a.abs() if signed else a).sum(-1, keepdim=True)
    return a / total.masked_fill(total == 0, 1)


def _post_step(a: Tensor, m: Mechanism, row_count: Tensor, visible: Tensor) -> Tensor:
    if m.post == "none":
        return a
    if m.post == "negate":
        return -a
    mean = (row_count > UNSHIFTED_ROWS) / row_count
    a = (a - mean).masked_fill(~visible, 0)
    return _l1(a, signed=True) if m.post == "recentre, l1" else a


def sharpen(
    stage_one: Tensor, m: Mechanism, row_count: Tensor, score_bound: Tensor | float = 0.0
) -> Tensor:
    """l1(relu(N A - 1[N > 3])^p), the re-weighting of stage-one rows A.

    Scaling a row changes nothing, so the safe form raises y / max(y) in [0, 1] to the power. A row
    whose largest excess over its mean is rounding noise (all keys alike) has nothing to sharpen:
    it stays the stage-one row. Scores up to `score_bound` are off by that many eps, and phi far
    below zero passes all of it on to the weights.
    """
    p = m.exponents(row_count)
    shift = (row_count > UNSHIFTED_ROWS).to(row_count.dtype)
    if m.numerics == "naive":
        x = F.relu(row_count * stage_one - shift) ** p
        return x / x.sum(-1, keepdim=True)
    y = F.relu(stage_one - shift / row_count)
    # l1 removes the maximum again, so no gradient needs to pass through it.
    y_max = y.detach().amax(-1, keepdim=True)
    eps = (8 + 2 * score_bound) * torch.finfo(y.dtype).eps
    noise = eps * stage_one.detach().amax(-1, keepdim=True)
    uniform = y_max <= noise
    z = (y / y_max.masked_fill(uniform, 1)) ** p
    w = z / z.sum(-1, keepdim=True).masked_fill(uniform, 1)
    return torch.where(uniform, stage_one, w)


def _per_head(params: Tensor) -> Tensor:
    return params.view(-1, 1, 1)  # against (B, H, Lq, Lk)


# --- the call everybody makes --------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    *,
    params: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention: q (B, H, Lq, d) over k, v (B, H, Lk, d), the last query at the last key.

    v may be of another width than q and k. `mechanism` is a name or a `Mechanism`. `params` holds
    the learnable scalar of each head (H,) for `ssmax` and `relu-shen`; absent, the paper's initial
    value. `backend` is "auto" for the fastest that supports the call, or one of `BACKENDS` to
    insist on it.
    """
    _check_shapes(q, k, v)
    m = resolve(mechanism, keys=k.shape[2])
    params = _parameters(m, params, q)
    return chosen(BACKENDS, backend, m, q, k, v).run(q, k, v, m, params)


def resolve(mechanism: str | Mechanism, keys: int) -> Mechanism:
    """The mechanism of this call: L is a number, and a window that hides nothing is dropped."""
    m = mechanism if isinstance(mechanism, Mechanism) else get_mechanism(mechanism)
    if m.length == "current":
        m = replace(m, length="train", train_length=keys)
    return replace(m, window=None) if m.window is not None and m.window >= keys else m


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        rule = "attention takes q (B, H, Lq, d) and k, v (B, H, Lk, d)"
    elif v is not None and (v.dim() != 4 or v.shape[:3] != k.shape[:3]):
        rule = "attention needs one value for each key"
    elif not 1 <= q.shape[2] <= k.shape[2]:
        rule = "causal attention needs 1 <= Lq <= Lk"
    else:
        return
    shapes = [
        f"{n} {tuple(t.shape)}" for n, t in zip("qkv", (q, k, v), strict=True) if t is not None
    ]
    raise UserError(f"{rule}; got {', '.join(shapes)}")


def _parameters(m: Mechanism, params: Tensor | None, q: Tensor) -> Tensor | None:
    """The learnable scalar of each head, (H,), in the type the weights are computed in."""
    if m.parameter_init is None:
        if params is not None:
            raise UserError(f"attention {m.name!r} has no learnable parameter; leave params out")
        return None
    heads, dtype = q.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    if params is None:
        return torch.full((heads,), m.parameter_init, device=q.device, dtype=dtype)
    if params.shape != (heads,):
        raise UserError(
            f"attention {m.name!r} takes params of shape ({heads},), not {tuple(params.shape)}"
        )
    return params.to(dtype)


# --- backends ------------------------------------------------------------------------------------


def _eager(q, k, v, m: Mechanism, params: Tensor | None) -> Tensor:
    weights = attention_weights(q, k, m, params=params)
    with torch.autocast(q.device.type, enabled=False):
        return (weights @ v.to(weights.dtype)).to(v.dtype)


def _rowblock(q, k, v, m: Mechanism, params: Tensor | None) -> Tensor:
    return attend_by_row_blocks(_eager, q, k, v, m, params)


# In order of preference.
BACKENDS: dict[str, Backend] = {
    "sdpa": SDPA,
    "triton": TRITON,
    "cpu": CPU,
    "rowblock": Backend(_rowblock),
    "eager": Backend(_eager),
}


def choose_backend(m: Mechanism, call: Call, *, everywhere: bool = False) -> str:
    """The fastest backend that can take the call; `everywhere`: as if all were installed."""
    return fastest(BACKENDS, m, call, everywhere)


def used_backend(m: Mechanism) -> str | None:
    """The backend that the latest call of the mechanism in this process took."""
    return used.get(m.name)
