"""Gives a mechanism to the fused kernels of the CPU and the GPU: the part that they share."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lssar.mechanisms import SIGNED, Mechanism
from lssar.reference import over_root_d
from lssar.spans import Span

PHI = ("exp", "sigmoid", "softplus", "identity", "relu", "relu2", "relu6", "gelu", "mish")
# Parts that the fused kernels support; others fall back to the reference.
KNOWN = {
    "bias": ("none", "-log L", "-log N"),
    "phi": PHI,
    "norm": ("l1", "none", "L", "gamma sqrt(N/2)"),
    "post": ("none", "negate", "recentre", "recentre, l1"),
    "numerics": ("safe",),
}
OWN_SCALES = ("1/sqrt(d)", "log d log N")  # of every kernel; others are factors of q
CAN_SHARPEN = ("exp", "sigmoid", "softplus")
LARGEST_HEAD_DIM = 256
# Flags in cpu_call.h
COSINE = 1
L1 = 2
LOG_N = 4
RECENTRE = 8
RECENTRE_L1 = 16
LOG_L = 32
ROOT_D = 64
UNIT_KEYS = 128
# The cosines that the CPU kernel makes of q and k itself; with a scale per head, of k alone.
COSINE_FLAGS = {
    "log d log N": COSINE,
    "log d log L": COSINE | LOG_L,
    "sqrt(d)": COSINE | ROOT_D,
    "s log d log N": UNIT_KEYS,
}


class Settings(NamedTuple):
    """Holds the arguments of the operators that are not tensors, in order."""

    window: int  # 0: none
    phi: int
    flags: int
    p: float  # 0: not sharpened
    alpha: float
    bias: float
    train_length: int

    @property
    def guided(self) -> bool:
        """Tell whether a backward pass needs more than the output and the row statistics."""
        return self.p != 0 or bool(self.flags & RECENTRE)


def unfused(m: Mechanism) -> str | None:
    """Return why no kernel computes this combination of parts, each of which it knows."""
    if m.sharpened and m.phi not in CAN_SHARPEN:
        return f"it does not re-weight phi = {m.phi!r}"
    if m.post.startswith("recentre") and (m.norm != "l1" or m.phi in SIGNED):
        return f"it does not re-centre phi = {m.phi!r}, norm = {m.norm!r}"
    return None


def kernel_inputs(
    q, k, m: Mechanism, head_scale: Tensor | None, span: Span, *, cosines: bool = False
) -> tuple[Tensor, Tensor, Settings]:
    """Return q, k and the settings with which a kernel computes the mechanism.

    A factor of a query is multiplied here, outside of the kernel; see `finish` for the output.
    `cosines`: the kernel knows COSINE_FLAGS.
    """
    scaling = COSINE if m.scale == "log d log N" else 0
    if cosines and not m.sharpened:
        scaling = COSINE_FLAGS.get(m.scale, 0)
    if m.scale not in OWN_SCALES and not scaling & COSINE:
        count = None if head_scale is None else span.counts(q, k)
        keys = k[:, :, :0] if scaling else k  # which the kernel divides by their lengths
        q, keys = over_root_d(q, keys, m, head_scale, count)
        k = k if scaling else keys
    flags = scaling
    if m.norm == "l1":
        flags |= L1
    if m.bias == "-log N":
        flags |= LOG_N
    if m.post in ("recentre", "recentre, l1"):
        flags |= RECENTRE
    if m.post == "recentre, l1":
        flags |= RECENTRE_L1
    settings = Settings(
        window=span.window or 0,
        phi=PHI.index(m.phi),
        flags=flags,
        p=0.0 if m.p is None else float(m.p),
        alpha=float(m.alpha) if m.sharpened else 0.0,
        bias=-math.log(m.train_length) if m.bias == "-log L" else 0.0,
        train_length=m.train_length,
    )
    return q, k, settings


def finish(out: Tensor, q, k, m: Mechanism, head_scale: Tensor | None, span: Span) -> Tensor:
    """Multiply a kernel's output by the factors of its rows that the kernel leaves out."""
    if m.phi == "softplus" and m.norm != "l1":
        out = out * math.log(2)  # the kernel's softplus is over ln 2
    if m.norm == "L":
        out = out / m.train_length
    elif m.norm == "gamma sqrt(N/2)" and head_scale is not None:
        out = out / (head_scale.view(-1, 1, 1) * (span.counts(q, k) / 2).sqrt())
    return -out if m.post == "negate" else out


FARTHEST_ROWS = 2**23  # elements apart: offsets within a tile of 256 rows stay in 32 bits


def _fits(x: Tensor) -> bool:
    if x.ndim < 2:
        return True
    strides = x.stride()
    return strides[-1] == 1 and strides[-2] < FARTHEST_ROWS


def readable(x: Tensor) -> Tensor:
    """Return x, copied if a kernel could not read its strides."""
    return x if _fits(x) else x.contiguous()


def room_like(x: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return room for a result in the layout of x: merging the heads again needs no copy."""
    if width is not None and width != x.shape[3]:
        batch, heads, length, _ = x.shape
        return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)
    room = torch.empty_like(x, dtype=dtype)
    return room if _fits(room) else x.new_empty(x.shape, dtype=dtype)


def room_for_gradients(grad, q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    return room_like(q), room_like(k), room_like(v)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? first"
_KINDS = {int: "SymInt", float: "float"}
_SETTINGS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in Settings.__annotations__.items())


def operators(
    name: str,
    *,
    device: str | None,
    forward: Callable,
    outputs: Callable,
    results: int,
    keep: Callable,
    kept: str,
    backward: Callable,
) -> tuple[Callable, Callable]:
    """Return the operators `name`, with "forward" and "backward" in its braces.

    `forward(q, k, v, first, *settings, save)` returns `results` tensors, for which `outputs` makes
    room; `backward(grad, q, k, v, first, *kept, *settings)` is given what `keep(q, *results)` says.
    """

    def setup_context(ctx, inputs, output):
        q, k, v, first, *ctx.settings, save = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, first, *(keep(q, *output) if save else ()))

    def differentiate(ctx, grad, *_):
        grads = (None, None, None)
        if grad is not None:
            grads = back(grad, *ctx.saved_tensors, *ctx.settings)
        return *grads, None, *[None] * (len(ctx.settings) + 1)

    def refuse(ctx, *_):
        raise RuntimeError("the fused kernel has no second derivative; use backend='eager' for it")

    saved = ", ".join(f"Tensor {x}" for x in kept.split())
    schema = f"(Tensor grad, {_TENSORS}, {saved}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
    back = _operator(name.format("backward"), device, schema, backward, room_for_gradients, refuse)
    schema = f"({_TENSORS}, {_SETTINGS}, bool save) -> ({', '.join(['Tensor'] * results)})"
    name = name.format("forward")
    return _operator(name, device, schema, forward, outputs, differentiate, setup_context), back


def _operator(name, device, schema, compute, outputs, differentiate, setup_context=None):
    """Return an operator of torch, registered once.

    torch.compile's cache on disk knows an operator by its name: with a change of what is saved
    the name changes, or compiled code of an older version would be loaded and refuse the new
    shapes. Every exported checkpoint brings a copy of this file; the first that is imported
    registers.
    """
    space, short = name.split("::")
    if not hasattr(getattr(torch.ops, space), short):
        made = torch.library.custom_op(
            name, compute, mutates_args=(), device_types=device, schema=schema
        )
        made.register_fake(outputs)
        made.register_autograd(differentiate, setup_context=setup_context)
    return getattr(getattr(torch.ops, space), short)
