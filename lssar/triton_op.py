"""`lssar(q, k, v, p=15.0)`: exact fused LSSAR and LSSA on a GPU, differentiable, in linear memory.

Forward and backward are one torch.library operator each, so torch.compile, checkpointing and DDP
see single nodes. The kernels are in `triton_forward.py` and `triton_backward.py`; nothing here
imports Triton before the first call. TRITON_INTERPRET=1 in the environment runs them on CPU
tensors, slowly, with the products of `triton_interpreter.py`.
"""

import functools
import importlib.util
import math
import os
from contextlib import nullcontext

import torch
from torch import Tensor

from lssar.cache import ensure_writable
from lssar.errors import UserError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 128
MAX_INTEGER_P = 64  # integers up to here are multiplied out, one compiled kernel each
ROW_STATISTICS = 6  # planes of the saved row statistics; named in triton_math

# (BLOCK_M rows, BLOCK_N keys, warps, stages) that a GPU chooses from, by padded head dim and bytes
# an element. `python benchmark.py compile` lists the resources of each.
CONFIGS = {
    ("forward", 64, 2): [(128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3)],
    ("forward", 128, 2): [(64, 32, 8, 2), (64, 64, 8, 2)],
    ("forward", 64, 4): [(32, 32, 8, 2), (16, 32, 4, 2)],
    ("forward", 128, 4): [(16, 32, 4, 2)],
    ("dq", 64, 2): [(64, 32, 4, 3), (128, 32, 8, 3)],
    ("dq", 128, 2): [(64, 32, 8, 2), (64, 32, 4, 2)],
    ("dq", 64, 4): [(32, 32, 4, 2)],
    ("dq", 128, 4): [(16, 32, 4, 2)],
    ("dkv", 64, 2): [(64, 32, 4, 2), (32, 64, 8, 3), (32, 32, 4, 3)],
    ("dkv", 128, 2): [(64, 32, 8, 2), (32, 32, 4, 2)],
    ("dkv", 64, 4): [(32, 32, 8, 2)],
    ("dkv", 128, 4): [(32, 16, 4, 2)],
}
# A few query rows at the end of a long cache: the smallest row block that tl.dot has.
DECODE_ROWS = 16
DECODE_CONFIGS = {
    "forward": [(16, 32, 4, 3)],
    "dq": [(16, 32, 4, 2)],
    "dkv": [(16, 32, 4, 2)],
}
INTERPRETED = {"BLOCK_M": 64, "BLOCK_N": 64}


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(q: Tensor | None = None) -> str | None:
    """Why the kernel cannot run here (on q's device, type and head dim), or None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if problem := _broken():
        return problem
    if q is None:
        return None if interpreting() or torch.cuda.is_available() else "no GPU is visible"
    if q.dtype not in DTYPES:
        return f"{q.dtype} is not one of bfloat16, float16, float32"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head dim {q.shape[-1]} is above {MAX_HEAD_DIM}"
    if not q.is_cuda and not interpreting():
        return f"the tensors are on {q.device.type}, not on a GPU"
    return None


@functools.cache
def _broken() -> str | None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # whatever a damaged installation raises
        return f"triton cannot be imported: {error!r}"
    return None


def lssar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    p: float | None,
    alpha: float = 0.0,
    train_length: int = 1024,
) -> Tensor:
    """Attention of q (B, H, Lq, d) to k, v (B, H, Lk, d), the last query at the last key.

    p None is LSSA; with alpha, p grows with the row beyond train_length: the paper's adaptive p_i.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check(q, k, v, p)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _forward(q, k, v, p, alpha, train_length, save)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, p: float | None) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q, k, v must share a type, got {q.dtype}, {k.dtype}, {v.dtype}")
    rest = (*q.shape[:2], k.shape[2], q.shape[3])
    if k.shape != rest or v.shape != rest:
        raise UserError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: B, H, d must match, and Lk of k, v"
        )
    if k.shape[2] < q.shape[2]:
        raise UserError(f"{q.shape[2]} queries but only {k.shape[2]} keys")
    if p is not None and not p >= 1:
        raise UserError(f"p must be at least 1, got {p}")


@torch.library.custom_op("lssa::triton_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float | None,
    alpha: float,
    train_length: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and for the backward: it unrounded, G, row statistics, 1/|k|."""
    out, exact, guide, stats, inv_k = _forward_outputs(q, k, v, p, alpha, train_length, save)
    torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32, out=inv_k)
    inv_k.clamp_(min=1e-12).reciprocal_()
    if out.numel():
        d, rows = q.shape[-1], q.shape[2]
        tensors = [q, k, v, inv_k, out, exact, guide, stats]
        strides = [x.stride()[:3] for x in (q, k, v, out)]
        _launch(
            "forward", q, rows, k.shape[2], tensors, strides, [math.log(d)],
            p, alpha, train_length, SAVE=save,
        )  # fmt: skip
    return out, exact, guide, stats, inv_k


@_forward.register_fake
def _forward_outputs(q, k, v, p, alpha, train_length, save):
    batch, heads, rows, _ = q.shape

    def like_q(needed: bool) -> Tensor:
        empty = torch.empty_like if needed else torch.Tensor.new_empty
        return empty(q, *(() if needed else (0,)), dtype=torch.float32)

    exact, guide = like_q(save and q.dtype != torch.float32), like_q(save and p is not None)
    # Zeros: LSSA leaves what belongs to the sharpening unwritten, and an output must be determined.
    stats = q.new_zeros((save * ROW_STATISTICS, batch, heads, rows), dtype=torch.float32)
    inv_k = q.new_empty((batch, heads, k.shape[2]), dtype=torch.float32)
    return torch.empty_like(q), exact, guide, stats, inv_k


@torch.library.custom_op("lssa::triton_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exact: Tensor,
    guide: Tensor,
    stats: Tensor,
    inv_k: Tensor,
    p: float | None,
    alpha: float,
    train_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from the one of the output, which is `exact` in fp32."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not exact.numel():
        return dq, dk.zero_(), dv.zero_()
    half = q.dtype == torch.float16  # its few exponents: scores' gradients are kept near one
    delta = stats.new_empty((4 if half else 2, *stats.shape[1:]))  # D and E of every row
    sizes = torch.stack([_largest(v), inv_k.amin(-1)]) if half else delta
    rest = (p, alpha, train_length)
    tensors = [q, k, v, inv_k, exact, guide, stats, grad, dq, delta, sizes]
    strides = [x.stride()[:3] for x in (q, k, v, exact, grad, dq)]
    _launch("dq", q, q.shape[2], k.shape[2], tensors, strides, [], *rest)
    sizes = delta[2:].amax(-1) if half else delta
    tensors = [q, k, v, inv_k, stats, grad, dk, dv, delta, sizes]
    strides = [x.stride()[:3] for x in (q, k, v, grad, dk, dv)]
    _launch("dkv", q, k.shape[2], k.shape[2], tensors, strides, [], *rest)
    return dq, dk, dv


def _largest(x: Tensor) -> Tensor:
    """The largest element of each head, in absolute value."""
    return torch.linalg.vector_norm(x, torch.inf, dim=(2, 3), dtype=torch.float32)


@_backward.register_fake
def _(grad, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx, inputs, output):
    q, k, v, p, alpha, train_length, save = inputs
    out, exact, *rest = output
    ctx.set_materialize_grads(False)
    ctx.settings = (p, alpha, train_length)
    saved = (out if q.dtype == torch.float32 else exact, *rest) if save else ()
    ctx.save_for_backward(q, k, v, *saved)


def _autograd(ctx, grad, *_):
    if grad is None:
        return (None,) * 7
    return (*_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _launch(name, q, blocked, k_length, tensors, strides, extra, p, alpha, train_length, **flags):
    """Run a kernel with one program a head and block of `blocked` rows (dkv: keys)."""
    batch, heads, rows, d = q.shape
    block_d = padded(d)
    side = "BLOCK_N" if name == "dkv" else "BLOCK_M"
    kernel, fixed = _kernel(name, block_d, q.element_size(), rows <= DECODE_ROWS)
    adaptive = alpha != 0 and k_length > train_length
    integer = p is not None and not adaptive and p == int(p) and p <= MAX_INTEGER_P
    power = 1.0 if p is None else p
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[lambda meta: (-(-blocked // meta[side]), batch * heads)](
            *tensors, *strides, heads, rows, k_length, batch * heads * rows, k_length.bit_length(),
            *extra, power, alpha, float(train_length),
            P=int(power) if integer or p is None else 0, REWEIGHT=p is not None, d=d,
            BLOCK_D=block_d, **flags, **fixed,
        )  # fmt: skip


def padded(d: int) -> int:
    """The head dim of the tiles: the next power of two, and tl.dot's smallest is 16."""
    return max(16, 1 << (d - 1).bit_length())


def kernel_function(name: str):
    """The Triton function "forward", "dq" or "dkv"."""
    _ensure_cache()
    from lssar import triton_backward, triton_forward

    return getattr(triton_forward if name == "forward" else triton_backward, f"{name}_kernel")


@functools.cache
def _ensure_cache() -> None:
    """Triton keeps what it compiles below the home folder, and fails where that cannot be."""
    home = os.environ.get("TRITON_HOME") or "~"
    default = f"{home}/.triton/cache"
    ensure_writable("TRITON_CACHE_DIR", default, "triton", "Triton's compiled kernels")


@functools.cache
def _kernel(name: str, block_d: int, width: int, decode: bool):
    """The kernel and its block sizes: tuned among CONFIGS on a GPU, fixed in the interpreter."""
    import triton

    kernel = kernel_function(name)
    if interpreting():
        from lssar import triton_interpreter

        triton_interpreter.install()
        return kernel, INTERPRETED
    configs = DECODE_CONFIGS[name] if decode else CONFIGS[name, 64 if block_d <= 64 else 128, width]
    choices = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in configs
    ]
    return triton.autotune(choices, key=["length_class", "heads", "P"])(kernel), {}
