"""Tells whether a backend can take a call of a mechanism, and why not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lssar import cpu, fused, triton_op
from lssar.mechanisms import PARTS, Mechanism
from lssar.spans import Span
from lssar.tracing import is_transformed

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """Holds the properties of a call on which the choice of a backend depends."""

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


def describe(q: Tensor, k: Tensor, v: Tensor, span: Span, decay: Tensor | None) -> Call:
    """Return the properties of a call on which the choice of a backend depends."""
    device = q.device.type
    dtype = q.dtype
    batch, heads, queries, head_dim = q.shape
    _, groups, keys, value_dim = v.shape
    alike = dtype == k.dtype == v.dtype or torch.is_autocast_enabled(device)
    return Call(  # by place: names take a third of the time
        device,
        dtype,
        batch * heads * queries * keys,
        head_dim,
        torch.compiler.is_compiling(),
        value_dim,
        not alike,
        keys,
        not span.full,
        heads != groups,
        decay is not None,
        is_transformed(),
    )


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, `run(q, k, v, mechanism, head_scale, span)`, and its limits.

    A part of mechanisms that `parts` leaves out is supported at its default only.
    """

    run: Callable[..., Tensor]
    # The values of each part that it computes; None: it takes every call, and a decay too.
    parts: dict[str, tuple[str, ...]] | None = None
    # Of a fused kernel. Other backends with `parts` take full rows, and do not re-weight.
    device: str | None = None
    missing: Callable[[], str | None] = lambda: None
    transforms: bool = False  # made of operations that torch.func can transform

    def refuses(self, m: Mechanism, call: Call) -> str | None:
        """Return why it cannot take the call; None: it can."""
        if call.transformed and not self.transforms:
            return "torch.func and forward-mode AD cannot transform it; use backend='eager'"
        if self.parts is None:
            return None
        if m.sharpened and self.device is None:
            return f"it does not compute {m.name!r}: p = {m.p!r}"
        for part, values in PARTS.items():
            supported = self.parts.get(part) or values[:1]
            if getattr(m, part) not in supported:
                return f"it does not compute {m.name!r}: {part} = {getattr(m, part)!r}"
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
        if call.dtype not in KERNEL_TYPES:
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
