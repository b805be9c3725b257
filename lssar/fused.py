"""What the fused kernels of the CPU and the GPU share: how a mechanism is passed to a kernel."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lssar.mechanisms import SIGNED, Mechanism
from lssar.reference import over_root_d
from lssar.spans import Span

PHI = ("exp", "sigmoid", "softplus", "identity", "relu", "relu2", "relu6", "gelu", "mish")
# What both kernels compute: a value that is added to PARTS is the reference's until it is here.
KNOWN = {
    "bias": ("none", "-log L", "-log N"),
    "phi": PHI,
    "norm": ("l1", "none", "L", "gamma sqrt(N/2)"),
    "post": ("none", "negate", "recentre", "recentre, l1"),
    "numerics": ("safe",),
}
OWN_SCALES = ("1/sqrt(d)", "log d log N")  # others are factors of q
CAN_SHARPEN = ("exp", "sigmoid", "softplus")
LARGEST_HEAD_DIM = 256
COSINE, L1, LOG_N, RECENTRE, RECENTRE_L1 = 1, 2, 4, 8, 16  # Flags in cpu_call.h


class Settings(NamedTuple):
    """What a call asks besides its tensors, in the order of the operators' arguments."""

    window: int  # 0: none
    phi: int
    flags: int
    p: float  # 0: not sharpened
    alpha: float
    bias: float
    train_length: int

    @property
    def guided(self) -> bool:
        """Whether a backward pass needs more than the output and the row statistics."""
        return self.p != 0 or bool(self.flags & RECENTRE)


def unfused(m: Mechanism) -> str | None:
    """Why no kernel computes this combination of parts, though it knows each of them."""
    if m.sharpened and m.phi not in CAN_SHARPEN:
        return f"it does not re-weight phi = {m.phi!r}"
    if m.post.startswith("recentre") and (m.norm != "l1" or m.phi in SIGNED):
        return f"it does not re-centre phi = {m.phi!r}, norm = {m.norm!r}"
    return None


def attend(run: Callable, q, k, v, m: Mechanism, params: Tensor | None, span: Span) -> Tensor:
    """Any mechanism that `unfused` lets through, by `run(q, k, v, first, settings, save)`.

    What is a factor of a query or of an output row is multiplied outside of the kernel.
    """
    divisor: Tensor | float | None = m.train_length if m.norm == "L" else None
    count = None
    if params is not None:
        count = span.counts(q, k)
        if m.norm == "gamma sqrt(N/2)":
            divisor = params.view(-1, 1, 1) * (count / 2).sqrt()
    if m.scale not in OWN_SCALES:
        q, k = over_root_d(q, k, m, params, count)
    flags = {
        COSINE: m.scale == "log d log N",
        L1: m.norm == "l1",
        LOG_N: m.bias == "-log N",
        RECENTRE: m.post.startswith("recentre"),
        RECENTRE_L1: m.post == "recentre, l1",
    }
    settings = Settings(
        window=span.window or 0,
        phi=PHI.index(m.phi),
        flags=sum(flag for flag, on in flags.items() if on),
        p=0.0 if m.p is None else float(m.p),
        alpha=float(m.alpha) if m.sharpened else 0.0,
        bias=-math.log(m.train_length) if m.bias == "-log L" else 0.0,
        train_length=m.train_length,
    )
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out = run(q, k, v, span.first, settings, save)
    if m.phi == "softplus" and m.norm != "l1":
        out = out * math.log(2)  # the kernel's is over ln 2
    if divisor is not None:
        out = out / divisor
    return -out if m.post == "negate" else out


# --- room for tensors ----------------------------------------------------------------------------

FARTHEST_ROWS = 2**23  # elements apart: offsets within a tile of 256 rows stay in 32 bits


def _fits(x: Tensor) -> bool:
    return x.stride(-1) == 1 and max(x.stride()[-2:]) < FARTHEST_ROWS


def readable(x: Tensor) -> Tensor:
    """A kernel takes any strides but the last, which is one, and of rows those that fit."""
    return x if _fits(x) else x.contiguous()


def room_like(x: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a result in the layout of x, so that merging the heads again needs no copy."""
    if width is not None and width != x.shape[3]:
        batch, heads, length, _ = x.shape
        return x.new_empty((batch, length, heads, width), dtype=dtype).transpose(1, 2)
    room = torch.empty_like(x, dtype=dtype)
    return room if _fits(room) else x.new_empty(x.shape, dtype=dtype)


def room_for_gradients(grad, q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    return room_like(q), room_like(k), room_like(v)


# --- operators of torch --------------------------------------------------------------------------

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? first"
_KINDS = {int: "SymInt", float: "float"}
_SETTINGS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in Settings.__annotations__.items())


def operators(
    name: str, device: str | None, forward: Callable, outputs: Callable, results: int,
    keep: Callable, kept: str, backward: Callable,
) -> tuple[Callable, Callable]:  # fmt: skip
    """The operators `name`, with "forward" and "backward" in its braces.

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
    """An operator of torch, registered once.

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
