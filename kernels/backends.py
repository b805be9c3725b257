"""The ways to compute one attention call, and what each of them can take.

`attention.py` lists them in order of preference; a mechanism is described there.
"""

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, did_you_mean


@dataclass(frozen=True)
class Call:
    """What the choice of a backend depends on, besides the mechanism."""

    device: str  # "cpu", "cuda", "mps"
    dtype: torch.dtype
    entries: int  # B * H * Lq * Lk
    head_dim: int
    compiled: bool = False
    keys: int = 0  # Lk
    value_dim: int | None = None  # None: as wide as the keys
    mixed: bool = False  # q, k and v differ in type, and no autocast makes them alike


def _none(*_) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """`run(q, k, v, mechanism, params)`, and when it cannot."""

    run: Callable[..., Tensor]
    refuses: Callable[..., str | None] = _none  # (mechanism, call): why not; None: it can
    missing: Callable[[], str | None] = _none  # why not on this machine; None: it is here


# --- the choice ----------------------------------------------------------------------------------

# Below this many attention weights, holding them is cheaper than computing them twice. A compiled
# graph fuses the eager form, and cannot hold the row-block loop.
EAGER_ENTRIES = 2**22
EAGER_ENTRIES_COMPILED = 2**28


def fastest(backends: dict[str, Backend], m, call: Call, everywhere: bool = False) -> str:
    """The first of `backends` that can take the call; `everywhere`: as if all were installed."""
    limit = EAGER_ENTRIES_COMPILED if call.compiled else EAGER_ENTRIES
    for name, backend in backends.items():
        if name == "triton" and call.device != "cuda":  # the interpreter is for tests
            continue
        if name == "rowblock" and call.entries <= limit:
            continue
        if backend.refuses(m, call) is None and (everywhere or backend.missing() is None):
            return name
    raise AssertionError("eager takes every call")


def chosen(backends: dict[str, Backend], name: str, m, q: Tensor, k: Tensor, v: Tensor) -> Backend:
    """The backend a caller named, or the fastest one for "auto"."""
    call = _describe(q, k, v)
    if name == "auto":
        name = fastest(backends, m, call)
    elif name not in backends:
        raise UserError(
            f"unknown attention backend {name!r}; {did_you_mean(name, ['auto', *backends])}"
        )
    elif reason := backends[name].refuses(m, call) or backends[name].missing():
        raise UserError(f"attention backend {name!r} cannot take this call: {reason}")
    _record(m.name, name)
    return backends[name]


def _describe(q: Tensor, k: Tensor, v: Tensor) -> Call:
    alike = q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)
    return Call(
        device=q.device.type,
        dtype=q.dtype,
        entries=q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2],
        head_dim=q.shape[3],
        compiled=torch.compiler.is_compiling(),
        keys=k.shape[2],
        value_dim=v.shape[3],
        mixed=not alike,
    )


# The backend of the latest call of each mechanism, by name: what a run has really used.
used: dict[str, str] = {}


@torch.compiler.assume_constant_result  # in a compiled graph the choice is made while tracing
def _record(mechanism: str, backend: str) -> None:
    used[mechanism] = backend


# --- PyTorch's flash attention -------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor, m, params: Tensor | None) -> Tensor:
    length, keys = q.shape[-2], k.shape[-2]
    if m.scale == "s log N / sqrt(d)":
        row_count = torch.arange(keys - length + 1, keys + 1, device=q.device, dtype=params.dtype)
        q = (q * (params.view(-1, 1, 1) * row_count.log().unsqueeze(-1))).to(q.dtype)
    if length == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # SDPA aligns is_causal with the first key, a cache needs the last.
    visible = None
    if length > 1:
        visible = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _not_softmax(m, call: Call) -> str | None:
    if (m.phi, m.norm, m.bias, m.post, m.p) != ("exp", "l1", "none", "none", None):
        return f"it computes softmax and ssmax, not {m.name!r}"
    if call.mixed:
        return "it takes q, k and v of one type"
    return "it has no sliding window" if m.window else None


# --- fused LSSA and LSSAR ------------------------------------------------------------------------


def _not_lssar(m, call: Call) -> str | None:
    if (m.scale, m.phi, m.norm, m.post) != ("log d log N", "softplus", "l1", "none"):
        return f"it computes lssa and lssar, not {m.name!r}"
    if m.window:
        return "it has no sliding window"
    if m.numerics != "safe":
        return "it has no naive numerics"
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, not {call.dtype}"
    if call.mixed:
        return "it takes q, k and v of one type"
    if call.value_dim not in (None, call.head_dim):
        return f"it takes values as wide as the keys ({call.head_dim}), not {call.value_dim}"
    return None


def _cpu(q: Tensor, k: Tensor, v: Tensor, m, params: None) -> Tensor:
    from kernels import cpu

    return cpu.lssar(q, k, v, p=m.p, alpha=m.alpha, train_length=m.train_length)


def _not_cpu_call(m, call: Call) -> str | None:
    if call.device != "cpu":
        return f"it computes on the CPU, not on {call.device}"
    if call.head_dim > 256:
        return f"it takes head dimensions up to 256, not {call.head_dim}"
    if call.keys > 2**22 and call.keys > (most := _cpu_most_keys(call.head_dim)):
        return f"it takes up to {most} keys of head dimension {call.head_dim}, not {call.keys}"
    return _not_lssar(m, call)


def _cpu_most_keys(head_dim: int) -> int:
    from kernels import cpu

    return cpu.most_keys(head_dim)


@torch.compiler.assume_constant_result
def _cpu_missing() -> str | None:
    from kernels import cpu

    reason = cpu.unavailable()
    if reason:
        _notice(f"LSSAR runs without its fused CPU kernel, several times slower: {reason}")
    return reason


@functools.cache
def _notice(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _triton(q: Tensor, k: Tensor, v: Tensor, m, params: None) -> Tensor:
    from kernels import triton_op

    return triton_op.lssar(q, k, v, p=m.p, alpha=m.alpha, train_length=m.train_length)


def _not_triton_call(m, call: Call) -> str | None:
    if call.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it computes on a GPU, not on {call.device}"
    if call.head_dim > 128:
        return f"it takes head dimensions up to 128, not {call.head_dim}"
    return _not_lssar(m, call)


@torch.compiler.assume_constant_result
def _triton_missing() -> str | None:
    from kernels import triton_op

    reason = triton_op.unavailable()
    if reason:
        _notice(f"LSSAR runs without its fused GPU kernel, several times slower: {reason}")
    return reason


SDPA = Backend(_sdpa, _not_softmax)
CPU = Backend(_cpu, _not_cpu_call, _cpu_missing)
TRITON = Backend(_triton, _not_triton_call, _triton_missing)
