"""Computes exact fused attention on a GPU: every mechanism, differentiable, in linear memory.

Forward and backward are one torch.library operator each, so torch.compile, checkpointing and DDP
see single nodes. The kernels are in `triton_forward.py` and `triton_backward.py`; nothing here
imports Triton before the first call. TRITON_INTERPRET=1 in the environment runs them on CPU
tensors, slowly, with the products of `triton_interpreter.py`.
"""

import functools
import importlib.util
from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor

from lssar import fused, key_parts, triton_table
from lssar.errors import UserError
from lssar.fused import COSINE, Settings, readable, room_like
from lssar.mechanisms import Mechanism
from lssar.reference import UNSHIFTED_ROWS
from lssar.spans import Span, zero_unseen_values
from lssar.triton_form import (
    Form,
    form_of,
    interpreting,
    kernel_function,
    launch,
    padded,
    scale_and_bias,
    sum_unit,
)

ROW_STATISTICS = 7  # planes of the saved row statistics; named in `tiles.py`
MOST_HEADS = 65535  # of a launch: programs along the second axis of a grid
MOST_STATISTICS = 2**31 // ROW_STATISTICS - 1  # rows of all heads: places have 32 bits
INTERPRETED = {"BLOCK_M": 64, "BLOCK_N": 64}


def unavailable() -> str | None:
    """Return why the kernel cannot run here; None: it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if problem := _broken():
        return problem
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return "no GPU is visible"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < triton_table.OLDEST:
        return f"Triton has no tensor cores on sm_{major}{minor}; sm_{triton_table.OLDEST} has"
    return None


@functools.cache
def _broken() -> str | None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # whatever a damaged installation raises
        return f"triton cannot be imported: {error!r}"
    return None


def compute(q, k, v, m: Mechanism, head_scale: Tensor | None, span: Span) -> Tensor:
    """Compute any mechanism that `fused.unfused` lets through."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    dtype = q.dtype
    if _needs_float32(m, dtype):
        q, k, v = q.float(), k.float(), v.float()
    with torch.autocast(q.device.type, enabled=False):
        q, k, settings = fused.kernel_inputs(q, k, m, head_scale, span)
        save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        size = _largest_batch(q)
        if q.shape[0] <= size:
            out = _forward(q, k, v, span.first, *settings, save)[0]
        else:
            parts = _split(q, k, v, span.first, size)
            out = torch.cat([_forward(*part, *settings, save)[0] for part in parts])
        if m.post == "recentre":
            out = out - _mean_value(v, span, q)
        return fused.finish(out, q, k, m, head_scale, span).to(dtype)


def _needs_float32(m: Mechanism, dtype: torch.dtype) -> bool:
    """Tell whether 16 bits are too few.

    They are for factors and means outside of the kernel, and in fp16 for weights without a bound.
    """
    outside = m.scale not in fused.OWN_SCALES or m.norm in ("L", "gamma sqrt(N/2)")
    outside = outside or m.post == "recentre" or (m.phi == "softplus" and m.norm == "none")
    return outside or (dtype == torch.float16 and m.norm != "l1")


def _largest_batch(q: Tensor) -> int:
    """Return how many sequences a launch can take."""
    _, heads, rows, _ = q.shape
    most = min(MOST_HEADS // heads, MOST_STATISTICS // max(1, heads * rows))
    if most == 0:
        raise UserError(
            f"a sequence of {heads} heads and {rows} rows is too large for the Triton kernel; "
            "use backend='rowblock'"
        )
    return most


def _split(q, k, v, first: Tensor | None, size: int) -> Iterator[tuple]:
    """Yield q, k, v and first of at most `size` sequences at a time."""
    firsts = first.split(size) if first is not None and len(first) > 1 else repeat(first)
    return zip(q.split(size), k.split(size), v.split(size), firsts, strict=False)


def _mean_value(v: Tensor, span: Span, q: Tensor) -> Tensor:
    """Return the mean of the values that each row sees: re-centring takes it off the output."""
    counts, first = span.counts(q, v), span.firsts(q, v)
    end = torch.arange(v.shape[2] - q.shape[2] + 1, v.shape[2] + 1, device=q.device)
    if first is not None:
        v = zero_unseen_values(v, first)
    sums = torch.nn.functional.pad(v.double().cumsum(2), (0, 0, 1, 0))
    total = sums[:, :, end]
    if first is not None:
        start = torch.minimum(first, end)[:, None, :, None].expand_as(total)
        total = total - sums.gather(2, start)
    mean = total * ((counts > UNSHIFTED_ROWS) / counts)
    return mean.to(q.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)


# --- the operators -------------------------------------------------------------------------------


def _compute_forward(q, k, v, first, *settings_and_save):
    """Return the output, and for the backward its rounding error, row and key statistics."""
    *settings, save = settings_and_save
    s = Settings(*settings)
    out, rest, stats, keys = _forward_outputs(q, k, v, first, *settings_and_save)
    q, k, v = readable(q), readable(k), readable(v)
    if _splits_keys(q, k, save):
        if out.numel():
            first, *_ = _spans(first, s.window, q, k)
            key_parts.attend_few_rows(q, k, v, first, s, out)
        return out, rest, stats, keys
    if keys.numel():
        torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32, out=keys)
        if s.flags & COSINE:
            keys.clamp_(min=1e-12).reciprocal_()
        else:
            keys.copy_(keys.nan_to_num(nan=0.0).cummax(-1).values)
    if out.numel():
        first, first_stride, *_ = _spans(first, s.window, q, k)
        form = form_of(s, k.shape[2], first is not None, q.dtype)
        numbers = [*scale_and_bias(form, s, q.shape[3]), sum_unit(form, q, k.shape[2])]
        tensors = [q, k, v, keys, first, out, rest, stats]
        strides = [*(x.stride()[:3] for x in (q, k, v, out)), first_stride]
        _launch("forward", form, q, k, v, q.shape[2], tensors, strides, numbers, s, SAVE=save)
    return out, rest, stats, keys


def _splits_keys(q: Tensor, k: Tensor, save: bool) -> bool:
    """Tell whether a few rows at the end of a cache are computed, without gradients."""
    return not save and k.shape[2] > q.shape[2] and key_parts.takes(q, k)


def _forward_outputs(q, k, v, first, *settings_and_save):
    *settings, save = settings_and_save
    s = Settings(*settings)
    # Zeros: a mechanism leaves what it does not need unwritten, and an output must be determined.
    stats = q.new_zeros((save * ROW_STATISTICS, *q.shape[:3]), dtype=torch.float32)
    key_norms = (bool(s.flags & COSINE) or s.p != 0) and not _splits_keys(q, k, save)
    keys = q.new_empty(k.shape[:3] if key_norms else (0,), dtype=torch.float32)
    rounded = save and q.dtype != torch.float32
    rest = room_like(q, v.shape[3]) if rounded else q.new_empty(0)
    return room_like(q, v.shape[3]), rest, stats, keys


def _compute_backward(grad, q, k, v, first, out, rest, stats, keys, *settings):
    """Return the gradients of q, k and v from the one of the output."""
    s = Settings(*settings)
    dq, dk, dv = fused.room_for_gradients(grad, q, k, v)
    if not out.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, grad, out = (readable(x) for x in (q, k, v, grad, out))
    if not rest.numel():
        rest = out
    first, first_stride, ends, ends_stride = _spans(first, s.window, q, k)
    form = form_of(s, k.shape[2], first is not None, q.dtype)
    half = q.dtype == torch.float16  # its few exponents: scores' gradients are kept near one
    delta = stats.new_empty((5 if half else 3, *stats.shape[1:]))  # of every row, see dq_kernel
    sizes = _sizes(v, keys, ends, q.shape[2], form) if half else delta
    tensors = [q, k, v, keys, first, out, rest, stats, grad, dq, delta, sizes]
    strides = [*(x.stride()[:3] for x in (q, k, v, out, rest, grad, dq)), first_stride]
    _launch("dq", form, q, k, v, q.shape[2], tensors, strides, [], s)
    if half:
        delta[3] *= delta[4]  # the bounds of ds, times the sizes of q
        sizes = delta[3:].view(2, *k.shape[:2], -1).amax(-1).movedim(0, -1).contiguous()
    tensors = [q, k, v, keys, first, ends, stats, grad, dk, dv, delta, sizes]
    strides = [*(x.stride()[:3] for x in (q, k, v, grad, dk, dv)), first_stride, ends_stride]
    _launch("dkv", form, q, k, v, k.shape[2], tensors, strides, [], s)
    return dq, dk, dv


def _sizes(v: Tensor, keys: Tensor, ends: Tensor | None, queries: int, form: Form) -> Tensor:
    """Return the largest |v| and the smallest 1/|k| of the seen keys of each head, (B, G, 2)."""
    largest = torch.linalg.vector_norm(v, torch.inf, dim=3, dtype=torch.float32)
    smallest = keys if form.cosine else torch.ones_like(largest)
    if ends is not None:
        rows = torch.arange(v.shape[2], device=v.device) - (v.shape[2] - queries)
        seen = (ends[:, 0] >= rows.clamp(min=0))[:, None]
        largest = torch.where(seen, largest, 0.0)
        smallest = torch.where(seen, smallest, torch.inf)
    return torch.stack([largest.amax(-1), smallest.amin(-1)], -1)


def _kept(q, out, rest, stats, keys):
    return out, rest, stats, keys


_forward, _ = fused.operators(
    "lssar::triton_{}_v5",
    device=None,
    forward=_compute_forward,
    outputs=_forward_outputs,
    results=4,
    keep=_kept,
    kept="out rest stats keys",
    backward=_compute_backward,
)


def _spans(first: Tensor | None, window: int, q: Tensor, k: Tensor):
    """Return the first key that each row sees, and the ends of the rows that see each key.

    Each comes with its stride over the batch. None: every row sees all keys up to its own. The ends
    (B, 2, Lk) are the last row that may see a key, and the row from which on not all rows that see
    anything see it.
    """
    first = Span(first, window or None).firsts(q, k)
    if first is None:
        return None, 0, None, 0
    queries, keys = q.shape[2], k.shape[2]
    rows = torch.arange(queries, device=q.device)
    last = first.new_full((len(first), keys + 1), -1)
    last = last.scatter_reduce(1, first, rows.expand_as(first), "amax").cummax(1).values[:, :keys]
    sees = first <= rows + (keys - queries)
    least = first.where(sees, 0).cummax(1).values
    places = torch.arange(keys, device=q.device).expand(len(first), keys).contiguous()
    until = torch.searchsorted(least, places, right=True)
    ends = torch.stack((last, until), 1).to(torch.int32)
    several = len(first) > 1
    return first.to(torch.int32).contiguous(), several * queries, ends, several * keys


def _launch(name, form, q, k, v, blocked, tensors, strides, numbers, s: Settings, **flags):
    """Run a kernel with one program per head and block of `blocked` rows (dkv: keys)."""
    (batch, heads, rows, d), (groups, keys), d_v = q.shape, k.shape[1:3], v.shape[3]
    block_d, block_v = padded(d), padded(d_v)
    side, programs = ("BLOCK_N", groups) if name == "dkv" else ("BLOCK_M", heads)
    kernel, options = _kernel(name, form, max(block_d, block_v), q)
    numbers = [heads, heads // groups, rows, keys, batch * heads * rows, *numbers]
    arguments = [*tensors, *strides, *numbers, s.p, s.alpha, float(s.train_length)]
    grid = (-(-blocked // options[side]), batch * programs)
    widths = {"d": d, "d_v": d_v, "BLOCK_D": block_d, "BLOCK_V": block_v}
    launch(name, kernel, grid, arguments, q, FORM=form, **widths, **flags, **options)


def _kernel(name: str, form: Form, block_d: int, q: Tensor):
    """Return the kernel and its tiles: of `triton_table.py` on a GPU, fixed in the interpreter."""
    kernel = kernel_function(name)
    if interpreting():
        return kernel, INTERPRETED
    major, minor = torch.cuda.get_device_capability(q.device)
    bits = 8 * q.element_size()
    shape = triton_table.tiles(name, block_d, bits, not form.centred, 10 * major + minor)
    return kernel, dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), shape, strict=True))
