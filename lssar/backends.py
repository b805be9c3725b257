"""`attend`, and the ways to compute it.

    attend                        checks the arguments; makes a Mechanism and a Span of them
      _chosen                     the backend that is named, else the fastest:
        choose_backend            the first of BACKENDS that does not refuse the call
      Backend.run, one of
        cpu.compute               the C++ kernel, lssar_cpu.cpp
        triton_op.compute         the Triton kernels
        _sdpa                     F.scaled_dot_product_attention
        attend_by_row_blocks      the reference, one block of rows at a time
        _eager                    the reference, at once

A backend declares the values of each part of a mechanism that it computes, and refuses a call with
any other. The reference computes all of them.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar import cpu, fused, triton_op
from lssar.arguments import check_shapes, decay_of, head_scale_of, renamed_head_scale, resolve
from lssar.errors import UserError, did_you_mean
from lssar.limits import Backend, Call, describe
from lssar.mechanisms import Mechanism
from lssar.reference import FACTORS, grouped_product, no_autocast, over_root_d, weights_of_span
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
from lssar.tracing import exporting_to_onnx, trace_constant


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism = "lssar",
    *,
    first: Tensor | None = None,
    head_scale: Tensor | None = None,
    decay: Tensor | None = None,
    backend: str = "auto",
    params: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of q (B, H, Lq, d) over k, v (B, G, Lk, d).

        q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind()
        out = attend(q, k, v)  # LSSAR

    The last query stands at the last key. Each of the G heads of k and v serves H / G heads of q in
    turn; v may be of another width than q and k.

    `mechanism` is a name or a `Mechanism`.
    `first` (B, Lq) or (Lq,) is the place of the first key that each row sees; `lssar.spans` makes
    it: windows, packed documents, padding.
    `head_scale` (H,) holds the learnable scalar of each head, for `ssmax` and `relu-shen`; absent,
    the paper's initial value.
    `decay` (B, H, Lk) or (1, H, Lk): decay[j] is added to the score of every query from j on with
    every key before j. A constant per head is ALiBi, a gate made of the hidden state a forgetting
    transformer.
    `backend` is one of `BACKENDS` to insist on, or "auto" for what `lssar.backend` or the variable
    LSSAR_BACKEND names, and else for the fastest that supports the call.
    `params` is the old name of `head_scale`.
    """
    check_shapes(q, k, v)
    if torch.jit.is_tracing():
        raise UserError(
            "torch.jit.trace cannot record attention; use torch.export, torch.compile, or "
            "torch.onnx.export(..., dynamo=True)"
        )
    if params is not None:
        head_scale = renamed_head_scale(head_scale, params)
    m = resolve(mechanism, k.shape[2])
    head_scale = head_scale_of(m, head_scale, q)
    decay = decay_of(decay, q, k)
    span = span_of(first, m, q, k)
    chosen = _chosen(backend, m, describe(q, k, v, span, decay))
    if decay is None:
        return chosen.run(q, k, v, m, head_scale, span)
    return chosen.run(q, k, v, m, head_scale, span, decay)


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

        mask = tokens != PADDING  # (B, n)
        out = attend_padded(q, k, v, "lssar", mask)

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


_preferred = "auto"  # by `backend`, in this process
_FROM_ENVIRONMENT = os.environ.get("LSSAR_BACKEND") or "auto"


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute attention by the named backend, in every thread, wherever a call names none.

        with lssar.backend("eager"):
            model(tokens)

    The name is one of `BACKENDS`, or "auto". A call that the backend cannot take is a `UserError`.
    The environment variable LSSAR_BACKEND does the same for a whole process.
    """
    global _preferred
    _check_name(name, "")
    before = _preferred
    _preferred = name
    try:
        yield
    finally:
        _preferred = before


def _check_name(name: str, source: str) -> None:
    if name != "auto" and name not in BACKENDS:
        options = ["auto", *BACKENDS]
        raise UserError(
            f"{source}unknown attention backend {name!r}; {did_you_mean(name, options)}"
        )


def _chosen(name: str, m: Mechanism, call: Call) -> Backend:
    """Return the backend that the call, `backend` or the environment names, or the fastest."""
    source = ""
    if name == "auto":
        name = _preferred
    if name == "auto":
        name = _FROM_ENVIRONMENT
        source = "LSSAR_BACKEND: "
    if name == "auto":
        name = _fastest(m, call)
    else:
        _check_name(name, source)
        if reason := BACKENDS[name].refuses(m, call) or BACKENDS[name].missing():
            raise UserError(f"{source}attention backend {name!r} cannot take this call: {reason}")
    _record(m.name, m.window, name)
    return BACKENDS[name]


def _fastest(m: Mechanism, call: Call) -> str:
    if call.compiled and exporting_to_onnx():
        return "eager"
    name = choose_backend(m, call)
    kernel = KERNELS.get(call.device)
    if name == "rowblock" and kernel is not None:
        reason = BACKENDS[kernel].refuses(m, call)
        if reason is not None:
            _say_row_blocks(m.name, kernel, reason)
    return name


KERNELS = {"cpu": "cpu", "cuda": "triton"}  # by device


@trace_constant
@functools.cache
def _say_row_blocks(mechanism: str, kernel: str, reason: str) -> None:
    _warn(
        f"attention {mechanism!r} is computed row block by row block, several times slower than "
        f"by the {kernel} kernel: {reason}"
    )


def _warn(text: str) -> None:
    """Warn without a line of our code below the message."""
    warnings.warn_explicit(text, UserWarning, "lssar", 0)


_used: dict[tuple[str, int | None], str] = {}


@trace_constant  # in a compiled graph the choice is made while tracing
def _record(mechanism: str, window: int | None, backend: str) -> None:
    _used[mechanism, window] = backend


def used_backend(m: Mechanism) -> str | None:
    """Return the backend that this process' latest call of the mechanism and its window took."""
    return _used.get((m.name, m.window))


def forget_used_backends() -> None:
    """Forget which backends the calls so far took."""
    _used.clear()


def used_backends(name: str) -> list[str]:
    """Return the backends that calls of the mechanism took since they were forgotten."""
    return sorted({backend for (used, _), backend in _used.items() if used == name})


def _eager(q, k, v, m: Mechanism, head_scale, span: Span, decay: Tensor | None = None) -> Tensor:
    if span.first is not None and not span.sinks:
        v = zero_unseen_values(v, span.first)
    with no_autocast(q):
        weights = weights_of_span(q, k, m, head_scale, span, decay)
        return grouped_product(weights, v.to(weights.dtype)).to(v.dtype)


def _sdpa(q, k, v, m: Mechanism, head_scale, span: Span) -> Tensor:
    """Compute softmax with PyTorch's flash attention; other scales are factors of q."""
    length, keys = q.shape[-2], k.shape[-2]
    if m.scale != "1/sqrt(d)":
        dtype = k.dtype
        row_count = span.counts(q, k).to(torch.promote_types(q.dtype, torch.float32))
        q, k = over_root_d(q, k, m, head_scale, row_count)
        q, k = q.to(dtype), k.to(dtype)
    if length == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # SDPA aligns is_causal with the first key, a cache needs the last.
    visible = None
    if length > 1:
        visible = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


@trace_constant
def _cpu_missing() -> str | None:
    return _with_notice("CPU", cpu.unavailable())


@trace_constant
def _triton_missing() -> str | None:
    return _with_notice("GPU", triton_op.unavailable())


@functools.cache
def _with_notice(device: str, reason: str | None) -> str | None:
    if reason:
        _warn(f"attention runs without its fused {device} kernel, several times slower: {reason}")
    return reason


_SOFTMAX = {"scale": FACTORS, "length": ("train", "current")}
# `fused.unfused` says which of these do not go together.
_FUSED = _SOFTMAX | fused.KNOWN

# In order of preference. On a CPU our kernel comes before PyTorch's, which takes twice as long and
# stands in where ours cannot be built. On a GPU PyTorch's comes first: ours has not run there yet.
BACKENDS: dict[str, Backend] = {
    "cpu": Backend(cpu.compute, _FUSED, "cpu", _cpu_missing),
    "sdpa": Backend(_sdpa, _SOFTMAX),
    "triton": Backend(triton_op.compute, _FUSED, "cuda", _triton_missing),
    "rowblock": Backend(functools.partial(attend_by_row_blocks, _eager)),
    "eager": Backend(_eager, transforms=True),
}
