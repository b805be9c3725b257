"""Exact fused attention on a GPU: every mechanism, differentiable, in linear memory.

Forward and backward are one torch.library operator each, so torch.compile, checkpointing and DDP
see single nodes. The kernels are in `triton_forward.py` and `triton_backward.py`; nothing here
imports Triton before the first call. TRITON_INTERPRET=1 in the environment runs them on CPU
tensors, slowly, with the products of `triton_interpreter.py`.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from lssar import fused
from lssar.errors import UserError
from lssar.folders import ensure_writable
from lssar.fused import COSINE, L1, LOG_N, PHI, RECENTRE_L1, Settings, readable, room_like
from lssar.mechanisms import SIGNED, Mechanism
from lssar.reference import UNSHIFTED_ROWS
from lssar.spans import Span, zero_unseen_values

ROW_STATISTICS = 7  # planes of the saved row statistics; named in `tiles.py`
MOST_HEADS = 65535  # of a launch: programs along the second axis of a grid
MOST_STATISTICS = 2**31 // ROW_STATISTICS - 1  # rows of all heads: places have 32 bits

# (BLOCK_M rows, BLOCK_N keys, warps, stages) that a GPU chooses from, by padded head dim and bytes
# an element. `python benchmark.py compile` lists the resources of each.
CONFIGS = {
    ("forward", 64, 2): [(128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3)],
    ("forward", 128, 2): [(128, 16, 8, 2), (32, 32, 4, 2)],
    ("forward", 256, 2): [(32, 32, 8, 2), (16, 32, 4, 2)],
    ("forward", 64, 4): [(16, 32, 4, 2)],
    ("forward", 128, 4): [(16, 32, 8, 2)],
    ("forward", 256, 4): [(16, 16, 8, 1)],
    ("dq", 64, 2): [(128, 32, 8, 3), (64, 32, 4, 3)],
    ("dq", 128, 2): [(32, 32, 4, 2), (128, 16, 8, 2)],
    ("dq", 256, 2): [(32, 32, 8, 2)],
    ("dq", 64, 4): [(16, 32, 4, 2)],
    ("dq", 128, 4): [(16, 32, 8, 2)],
    ("dq", 256, 4): [(16, 16, 8, 1)],
    ("dkv", 64, 2): [(16, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 3)],
    ("dkv", 128, 2): [(64, 32, 8, 2), (16, 128, 8, 2)],
    ("dkv", 256, 2): [(16, 32, 8, 2)],
    ("dkv", 64, 4): [(32, 32, 8, 2)],
    ("dkv", 128, 4): [(32, 16, 8, 2)],
    ("dkv", 256, 4): [(16, 16, 8, 1)],
}
# A few query rows at the end of a long cache: the smallest row block that tl.dot has.
DECODE_ROWS = 16
DECODE_CONFIGS = {"forward": [(16, 32, 4, 3)], "dq": [(16, 32, 4, 2)], "dkv": [(16, 32, 4, 2)]}
INTERPRETED = {"BLOCK_M": 64, "BLOCK_N": 64}


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Why the kernel cannot run here, or None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if problem := _broken():
        return problem
    return None if interpreting() or torch.cuda.is_available() else "no GPU is visible"


@functools.cache
def _broken() -> str | None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # whatever a damaged installation raises
        return f"triton cannot be imported: {error!r}"
    return None


def compute(q, k, v, m: Mechanism, params: Tensor | None, span: Span) -> Tensor:
    """Compute any mechanism that `fused.unfused` lets through."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    dtype = q.dtype
    if _needs_float32(m, dtype):
        q, k, v = q.float(), k.float(), v.float()
    with torch.autocast(q.device.type, enabled=False):
        q, k, settings = fused.kernel_inputs(q, k, m, params, span)
        save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        size = _largest_batch(q)
        if q.shape[0] <= size:
            out = _forward(q, k, v, span.first, *settings, save)[0]
        else:
            parts = _split(q, k, v, span.first, size)
            out = torch.cat([_forward(*part, *settings, save)[0] for part in parts])
        if m.post == "recentre":
            out = out - _mean_value(v, span, q)
        return fused.finish(out, q, k, m, params, span).to(dtype)


def _needs_float32(m: Mechanism, dtype: torch.dtype) -> bool:
    """Whether 16 bits are too few: for what is multiplied or subtracted outside of the kernel, and
    in fp16 for weights without a bound."""
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


# --- what a kernel is compiled for ---------------------------------------------------------------

MAX_INTEGER_P = 64  # integers up to here are multiplied out, one compiled kernel each


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its tiles."""

    phi: str
    power: int | None = None  # None: not sharpened; 0: a real p, or one for each row
    cosine: bool = False
    l1: bool = True
    recentre: bool = False  # subtract the mean and normalise again
    bias: bool = False
    log_n: bool = False  # the bias is a multiple of log N
    spans: bool = False
    sums: bool = False  # dq computes D and E alone, for a second launch to take

    @property
    def sharp(self) -> bool:
        return self.power is not None

    @property
    def centred(self) -> bool:
        """The row's mean is subtracted, and the backward has a term for it."""
        return self.sharp or self.recentre

    @property
    def signed(self) -> bool:
        return self.recentre or self.phi in SIGNED

    @property
    def online(self) -> bool:
        """exp relative to the largest score so far."""
        return self.phi == "exp" and self.l1 and not self.centred

    @property
    def biased(self) -> bool:
        return (self.bias or self.log_n) and not (self.phi == "exp" and self.l1)

    @property
    def shifted(self) -> bool:
        """The backward adds something to a row's scores."""
        return self.biased or (self.phi == "exp" and self.l1)


def form_of(s: Settings, keys: int, spans: bool) -> Form:
    power = None
    if s.p:
        adaptive = s.alpha != 0 and keys > s.train_length
        whole = not adaptive and s.p == int(s.p) and s.p <= MAX_INTEGER_P
        power = int(s.p) if whole else 0
    return Form(
        phi=PHI[s.phi],
        power=power,
        cosine=bool(s.flags & COSINE),
        l1=bool(s.flags & L1),
        recentre=bool(s.flags & RECENTRE_L1),
        bias=s.bias != 0,
        log_n=bool(s.flags & LOG_N),
        spans=spans,
    )


# --- the operators -------------------------------------------------------------------------------


def _compute_forward(q, k, v, first, *settings_and_save):
    """The output, and for the backward: it unrounded, the guide, row and key statistics."""
    *settings, save = settings_and_save
    s = Settings(*settings)
    out, exact, guide, stats, keys = _forward_outputs(q, k, v, first, *settings_and_save)
    q, k, v = readable(q), readable(k), readable(v)
    if keys.numel():
        torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32, out=keys)
        if s.flags & COSINE:
            keys.clamp_(min=1e-12).reciprocal_()
        else:
            keys.copy_(keys.nan_to_num(nan=0.0).cummax(-1).values)
    if out.numel():
        first, first_stride, *_ = _spans(first, s.window, q, k)
        form = form_of(s, k.shape[2], first is not None)
        d, base_2 = q.shape[3], 1.0 if form.phi in ("exp", "sigmoid", "softplus") else math.log(2)
        scale = math.log(d) * base_2 if form.cosine else base_2 / math.sqrt(d) / math.log(2)
        bias = -base_2 if form.log_n else s.bias * base_2 / math.log(2)
        tensors = [q, k, v, keys, first, out, exact, guide, stats]
        strides = [*(x.stride()[:3] for x in (q, k, v, out)), first_stride]
        numbers = [scale, bias, _sum_unit(form, q, k)]
        _launch("forward", form, q, k, v, q.shape[2], tensors, strides, numbers, s, SAVE=save)
    return out, exact, guide, stats, keys


def _sum_unit(form: Form, q: Tensor, k: Tensor) -> float:
    """What weights are multiplied by while they are summed: sums are below one then, and with
    values near the largest float32 stay finite. In fp16 small weights would be subnormal."""
    if q.dtype == torch.float16:
        return 2.0**14
    keys = k.shape[2]
    largest = 1 + math.log(q.shape[3]) * math.log2(keys)
    return 2.0 ** -math.ceil(math.log2(keys * largest)) if form.l1 else 1.0


def _forward_outputs(q, k, v, first, *settings_and_save):
    *settings, save = settings_and_save
    s = Settings(*settings)

    def room(needed: bool) -> Tensor:
        dtype = torch.float32
        return room_like(q, v.shape[3], dtype) if needed else q.new_empty(0, dtype=dtype)

    # Zeros: a mechanism leaves what it does not need unwritten, and an output must be determined.
    stats = q.new_zeros((save * ROW_STATISTICS, *q.shape[:3]), dtype=torch.float32)
    key_norms = bool(s.flags & COSINE) or s.p != 0
    keys = q.new_empty(k.shape[:3] if key_norms else (0,), dtype=torch.float32)
    rounded = save and q.dtype != torch.float32
    exact, guide = room(rounded), room(rounded and (s.p != 0 or bool(s.flags & RECENTRE_L1)))
    return room_like(q, v.shape[3]), exact, guide, stats, keys


def _compute_backward(grad, q, k, v, first, exact, guide, stats, keys, *settings):
    """Gradients of q, k, v from the one of the output, which is `exact` in fp32."""
    s = Settings(*settings)
    dq, dk, dv = fused.room_for_gradients(grad, q, k, v)
    if not exact.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, grad = (readable(x) for x in (q, k, v, grad))
    first, first_stride, last, last_stride = _spans(first, s.window, q, k)
    form = form_of(s, k.shape[2], first is not None)
    half = q.dtype == torch.float16  # its few exponents: scores' gradients are kept near one
    delta = stats.new_empty((4 if half else 2, *stats.shape[1:]))  # D and E of every row
    sizes = _sizes(v, keys, last, q.shape[2], form) if half else delta
    tensors = [q, k, v, keys, first, exact, guide, stats, grad, dq, delta, sizes]
    strides = [*(x.stride()[:3] for x in (q, k, v, exact, grad, dq)), first_stride]
    if form.centred and q.dtype == torch.float32:
        _launch("dq", replace(form, sums=True), q, k, v, q.shape[2], tensors, strides, [], s)
    _launch("dq", form, q, k, v, q.shape[2], tensors, strides, [], s)
    if half:
        sizes = delta[2:].view(2, *k.shape[:2], -1).amax(-1).movedim(0, -1).contiguous()
    tensors = [q, k, v, keys, first, last, stats, grad, dk, dv, delta, sizes]
    strides = [*(x.stride()[:3] for x in (q, k, v, grad, dk, dv)), first_stride, last_stride]
    _launch("dkv", form, q, k, v, k.shape[2], tensors, strides, [], s)
    return dq, dk, dv


def _sizes(v: Tensor, keys: Tensor, last: Tensor | None, queries: int, form: Form) -> Tensor:
    """The largest |v| and the smallest 1/|k| of each head, (B, G, 2), of the keys that are seen."""
    largest = torch.linalg.vector_norm(v, torch.inf, dim=3, dtype=torch.float32)
    smallest = keys if form.cosine else torch.ones_like(largest)
    if last is not None:
        rows = torch.arange(v.shape[2], device=v.device) - (v.shape[2] - queries)
        seen = (last >= rows.clamp(min=0))[:, None]
        largest = torch.where(seen, largest, 0.0)
        smallest = torch.where(seen, smallest, torch.inf)
    return torch.stack([largest.amax(-1), smallest.amin(-1)], -1)


def _kept(q, out, exact, guide, stats, keys):
    return out if q.dtype == torch.float32 else exact, guide, stats, keys


_forward, _ = fused.operators(
    "lssar::triton_{}_v4",
    device=None,
    forward=_compute_forward,
    outputs=_forward_outputs,
    results=5,
    keep=_kept,
    kept="exact guide stats keys",
    backward=_compute_backward,
)


def _spans(first: Tensor | None, window: int, q: Tensor, k: Tensor):
    """The first key that each row sees and the last row that sees each key, with their strides
    over the batch; None where every row sees all keys up to its own."""
    first = Span(first, window or None).firsts(q, k)
    if first is None:
        return None, 0, None, 0
    queries, keys = q.shape[2], k.shape[2]
    rows = torch.arange(queries, device=q.device)
    last = first.new_full((len(first), keys + 1), -1)
    last = last.scatter_reduce(1, first, rows.expand_as(first), "amax").cummax(1).values
    several = len(first) > 1
    first, last = first.to(torch.int32).contiguous(), last[:, :keys].to(torch.int32).contiguous()
    return first, several * queries, last, several * keys


def _launch(name, form, q, k, v, blocked, tensors, strides, numbers, s: Settings, **flags):
    """Run a kernel with one program per head and block of `blocked` rows (dkv: keys)."""
    (batch, heads, rows, d), (groups, keys), d_v = q.shape, k.shape[1:3], v.shape[3]
    block_d, block_v = padded(d), padded(d_v)
    side, programs = ("BLOCK_N", groups) if name == "dkv" else ("BLOCK_M", heads)
    kernel, fixed = _kernel(name, max(block_d, block_v), q.element_size(), rows <= DECODE_ROWS)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[lambda meta: (-(-blocked // meta[side]), batch * programs)](
            *tensors, *strides, heads, heads // groups, rows, keys, batch * heads * rows,
            keys.bit_length(), *numbers, s.p, s.alpha, float(s.train_length),
            FORM=form, d=d, d_v=d_v, BLOCK_D=block_d, BLOCK_V=block_v, **flags, **fixed,
        )  # fmt: skip


def padded(d: int) -> int:
    """The head dim of the tiles: the next power of two, and tl.dot's smallest is 16."""
    return max(16, 1 << (d - 1).bit_length())


def kernel_function(name: str):
    """The Triton function "forward", "dq" or "dkv"."""
    # Triton keeps what it compiles below the home folder, and fails where that cannot be.
    home, kept = os.environ.get("TRITON_HOME") or "~", "Triton's compiled kernels"
    ensure_writable("TRITON_CACHE_DIR", f"{home}/.triton/cache", "triton", kept)
    from lssar import triton_backward, triton_forward

    return getattr(triton_forward if name == "forward" else triton_backward, f"{name}_kernel")


@functools.cache
def _kernel(name: str, block_d: int, width: int, decode: bool):
    """The kernel and its block sizes: tuned among CONFIGS on a GPU, fixed in the interpreter."""
    import triton

    kernel = kernel_function(name)
    if interpreting():
        from lssar import triton_interpreter

        triton_interpreter.install()
        return kernel, INTERPRETED
    configs = DECODE_CONFIGS[name] if decode else CONFIGS[name, max(block_d, 64), width]
    choices = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in configs
    ]
    return triton.autotune(choices, key=["length_class", "heads", "FORM"])(kernel), {}
