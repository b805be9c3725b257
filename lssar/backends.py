"""`attend`, and the ways to compute it.

A backend declares what it computes: the parts of a mechanism, and its device if it is a kernel. It
takes a call only if every part of it is declared; whatever nobody declares is computed by the
reference, row block by row block or at once, and never by something else.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from lssar import cpu, fused, triton_op
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import PARTS, Mechanism
from lssar.reference import (
    check_shapes,
    decay_of,
    grouped_product,
    no_autocast,
    over_root_d,
    parameters_of,
    resolve,
    weights_of_span,
)
from lssar.rowblock import attend_by_row_blocks
from lssar.spans import (
    Arrangement,
    Span,
    arrange,
    reordered,
    shifted_keys,
    span_of,
    zero_unseen_values,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    *,
    first: Tensor | None = None,
    params: Tensor | None = None,
    decay: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal attention of q (B, H, Lq, d) over k, v (B, G, Lk, d).

    The last query stands at the last key. Each of the G heads of k and v serves H / G heads of q in
    turn; v may be of another width than q and k.

    `mechanism` is a name or a `Mechanism`.
    `first` (B, Lq) or (Lq,) is the place of the first key that each row sees; `lssar.spans` makes
    it: windows, packed documents, padding.
    `params` (H,) holds the learnable scalar of each head, for `ssmax` and `relu-shen`; absent, the
    paper's initial value.
    `decay` (B, H, Lk) or (1, H, Lk) is the log of what each step forward leaves of the keys before
    it: a score gains the decays of the steps from its key to its query. A constant per head is
    ALiBi, a gate made of the hidden state a forgetting transformer.
    `backend` is "auto" for the fastest that supports the call, or one of `BACKENDS` to insist on.
    """
    check_shapes(q, k, v)
    if torch.jit.is_tracing():
        raise UserError(
            "torch.jit.trace cannot record attention; use torch.export or torch.compile"
        )
    m = resolve(mechanism, keys=k.shape[2])
    params = parameters_of(m, params, q)
    decay = decay_of(decay, q, k)
    span = span_of(first, m, q, k)
    chosen = _chosen(backend, m, _describe(q, k, v, span, decay))
    if decay is None:
        return chosen.run(q, k, v, m, params, span)
    return chosen.run(q, k, v, m, params, span, decay)


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism,
    mask: Tensor | Arrangement | None,
    *,
    shift: bool = False,
    **options: Any,
) -> Tensor:
    """Attend to the keys that `mask` (B, n) allows; the queries are the last Lq of these n.

    Keys from n on do not exist yet: a cache with room for more may be given whole. Padding may be
    to the left, to the right or, in a cache, between the two; a row gives what its sequence gives
    alone. The result is zero where a query is padding. `arrange` makes what several layers share
    from a mask once. With `shift`, the keys are shifted (`shifted_keys`).
    """
    if mask is None:
        return attend(q, shifted_keys(k) if shift else k, v, mechanism, **options)
    if options.pop("first", None) is not None:
        raise UserError("attend_padded makes first from its mask; give one of the two")
    if not isinstance(mask, Arrangement):
        mask = arrange(mask, q.shape[2])
    end, first, keys, queries = mask
    k, v = k[:, :, :end], v[:, :, :end]
    decay = options.pop("decay", None)
    if decay is not None:
        decay = decay[:, :, :end]
    if keys is not None and queries is not None:
        q = reordered(q, queries)
        k = reordered(k, keys)
        v = reordered(v, keys)
        if decay is not None:
            decay = decay.expand(len(q), -1, -1).unsqueeze(-1)
            decay = reordered(decay, keys).squeeze(-1)
    if shift:
        k = shifted_keys(k, first)
    out = attend(q, k, v, mechanism, first=first, decay=decay, **options)
    return out if queries is None else reordered(out, queries.argsort(dim=1))


# --- a call and what a backend offers ------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on, besides the mechanism."""

    device: str  # "cpu", "cuda", "mps"
    dtype: torch.dtype
    entries: int  # B * H * Lq * Lk
    head_dim: int
    compiled: bool = False
    value_dim: int | None = None  # None: as wide as the keys
    mixed: bool = False  # q, k and v differ in type, and no autocast makes them alike
    keys: int = 0  # Lk
    spans: bool = False  # some rows do not see all keys up to their own
    grouped: bool = False  # heads of q share one of k and v
    decays: bool = False  # scores fall with the steps between key and query
    transformed: bool = False  # inside torch.func.grad, vmap, jvp, ..., or forward-mode AD


def _describe(q: Tensor, k: Tensor, v: Tensor, span: Span, decay: Tensor | None) -> Call:
    alike = q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)
    return Call(
        device=q.device.type,
        dtype=q.dtype,
        entries=q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2],
        head_dim=q.shape[3],
        compiled=torch.compiler.is_compiling(),
        value_dim=v.shape[3],
        mixed=not alike,
        keys=k.shape[2],
        spans=not span.full,
        grouped=q.shape[1] != k.shape[1],
        decays=decay is not None,
        transformed=_is_transformed(),
    )


def _is_transformed() -> bool:
    """Tell whether torch.func or forward-mode AD computes with these tensors."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: `run(q, k, v, mechanism, params, span)` and what it supports.

    Of a part of mechanisms that is not named in `parts`, the first value of PARTS is supported.
    """

    run: Callable[..., Tensor]
    parts: dict[str, tuple[str, ...]] | None = None  # None: every call, and `run` takes a decay too
    device: str | None = None  # of a fused kernel; None, with parts: full rows, not re-weighted
    missing: Callable[[], str | None] = lambda: None
    transforms: bool = False  # made of operations that torch.func can transform

    def refuses(self, m: Mechanism, call: Call) -> str | None:
        """Return why it cannot take the call; None: it can."""
        if call.transformed and not self.transforms:
            return "torch.func and forward-mode AD cannot transform it; use backend='eager'"
        if self.parts is None:
            return None
        for part, values in PARTS.items():
            if getattr(m, part) not in self.parts.get(part, values[:1]):
                return f"it does not compute {m.name!r}: {part} = {getattr(m, part)!r}"
        if m.sharpened and self.device is None:
            return f"it does not compute {m.name!r}: p = {m.p!r}"
        if m.softcap is not None:
            return f"it does not cap scores: softcap = {m.softcap!r}"
        if call.decays:
            return "its scores do not decay"
        if m.sinks and call.spans:
            return f"it sees nothing outside of a window: sinks = {m.sinks}"
        if self.device is not None:
            return self._kernel_refuses(m, call)
        if call.spans:
            return "it has no windows, packed documents or padding"
        if call.grouped:
            return "it takes one head of k and v for each of q"
        return "it takes q, k and v of one type" if call.mixed else None

    def _kernel_refuses(self, m: Mechanism, call: Call) -> str | None:
        interpreted = self.device == "cuda" and triton_op.interpreting()
        if call.device != self.device and not interpreted:
            place = "the CPU" if self.device == "cpu" else "a GPU"
            return f"it computes on {place}, not on {call.device}"
        if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it computes in float32, not {call.dtype}"
        widest = max(call.head_dim, call.value_dim or 0)
        if widest > fused.LARGEST_HEAD_DIM:
            return f"it takes head dimensions up to {fused.LARGEST_HEAD_DIM}, not {widest}"
        limited = self.device == "cpu" and m.scale == "log d log N"
        if limited and call.keys > (most := cpu.most_keys(call.head_dim)):
            return f"it takes up to {most} keys of head dimension {call.head_dim}, not {call.keys}"
        if reason := fused.unfused(m):
            return reason
        mixed = call.mixed and self.device != "cpu"
        return "it takes q, k and v of one type" if mixed else None


def _constant(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which would import all of torch's compiler now."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- the choice ----------------------------------------------------------------------------------

# Below this many attention weights, holding them is cheaper than computing them twice. A compiled
# graph fuses the eager form, and cannot hold the row-block loop.
EAGER_ENTRIES = 2**22
EAGER_ENTRIES_COMPILED = 2**28


def choose_backend(m: Mechanism, call: Call, *, everywhere: bool = False) -> str:
    """Return the fastest backend that can take the call; `everywhere`: as if all were installed."""
    limit = EAGER_ENTRIES_COMPILED if call.compiled else EAGER_ENTRIES
    for name, backend in BACKENDS.items():
        if name == "triton" and call.device != "cuda":  # the interpreter is for tests
            continue
        if name == "rowblock" and (call.entries <= limit or call.device == "meta"):
            continue
        if backend.refuses(m, call) is None and (everywhere or backend.missing() is None):
            return name
    raise AssertionError("eager takes every call")


def _chosen(name: str, m: Mechanism, call: Call) -> Backend:
    """Return the backend that a caller named, or the fastest one for "auto"."""
    if name == "auto":
        name = choose_backend(m, call)
    elif name not in BACKENDS:
        raise UserError(
            f"unknown attention backend {name!r}; {did_you_mean(name, ['auto', *BACKENDS])}"
        )
    elif reason := BACKENDS[name].refuses(m, call) or BACKENDS[name].missing():
        raise UserError(f"attention backend {name!r} cannot take this call: {reason}")
    _record(m.name, m.window, name)
    return BACKENDS[name]


_used: dict[tuple[str, int | None], str] = {}


@_constant  # in a compiled graph the choice is made while tracing
def _record(mechanism: str, window: int | None, backend: str) -> None:
    _used[mechanism, window] = backend


def used_backend(m: Mechanism) -> str | None:
    """Return the backend that this process' latest call of the mechanism and its window took."""
    return _used.get((m.name, m.window))


# --- the backends --------------------------------------------------------------------------------


def _eager(q, k, v, m: Mechanism, params, span: Span, decay: Tensor | None = None) -> Tensor:
    if span.first is not None and not span.sinks:
        v = zero_unseen_values(v, span.first)
    with no_autocast(q):
        weights = weights_of_span(q, k, m, params, span, decay)
        return grouped_product(weights, v.to(weights.dtype)).to(v.dtype)


def _sdpa(q, k, v, m: Mechanism, params, span: Span) -> Tensor:
    """Compute softmax with PyTorch's flash attention; other scales are factors of q."""
    length, keys = q.shape[-2], k.shape[-2]
    if m.scale != "1/sqrt(d)":
        dtype = k.dtype
        row_count = span.counts(q, k).to(torch.promote_types(q.dtype, torch.float32))
        q, k = over_root_d(q, k, m, params, row_count)
        q, k = q.to(dtype), k.to(dtype)
    if length == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # SDPA aligns is_causal with the first key, a cache needs the last.
    visible = None
    if length > 1:
        visible = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


@_constant
def _cpu_missing() -> str | None:
    return _with_notice("CPU", cpu.unavailable())


@_constant
def _triton_missing() -> str | None:
    return _with_notice("GPU", triton_op.unavailable())


@functools.cache
def _with_notice(device: str, reason: str | None) -> str | None:
    if reason:
        text = f"attention runs without its fused {device} kernel, several times slower: {reason}"
        warnings.warn_explicit(text, UserWarning, "lssar", 0)  # without a line of our code below it
    return reason


_SOFTMAX = {"scale": PARTS["scale"], "length": PARTS["length"]}
# `fused.unfused` says which of these do not go together.
_FUSED = _SOFTMAX | fused.KNOWN

# In order of preference.
BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(_sdpa, _SOFTMAX),
    "triton": Backend(triton_op.compute, _FUSED, "cuda", _triton_missing),
    "cpu": Backend(cpu.compute, _FUSED, "cpu", _cpu_missing),
    "rowblock": Backend(functools.partial(attend_by_row_blocks, _eager)),
    "eager": Backend(_eager, transforms=True),
}
