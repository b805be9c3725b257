"""Computes exact fused attention on the CPU, every mechanism, forward and backward.

The kernel is `lssar_cpu.cpp`, built by `cpu_build.py` at the first call (seconds) and called
through ctypes. Importing this module builds nothing; `unavailable()` says why the kernel cannot be
used.

Memory is linear in the length. The output and dq have the same bits for any number of threads; dk
and dv have the same bits for the same number of threads. A row that sees NaN or inf in its query or
in a key is NaN, and so are the gradients of everything it sees; no other row is.
"""

import ctypes
import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lssar import fused
from lssar.cpu_build import Unavailable, build
from lssar.fused import Settings, readable, room_for_gradients, room_like
from lssar.mechanisms import Mechanism
from lssar.spans import Span

MAX_SCORE = 125.9  # |s| <= log(d) log2(N) of a cosine, and 2^-|s| must be a normal float32
ROW_STATISTICS = 8  # STATS in cpu_call.h
NO_MEMORY = 1  # Status in lssar_cpu.cpp
UNKNOWN_ACTIVATION = 2


def compute(q, k, v, m: Mechanism, head_scale: Tensor | None, span: Span) -> Tensor:
    """Compute any mechanism that `fused.unfused` lets through, in float32."""
    dtype = v.dtype
    q, k, settings = fused.kernel_inputs(q.float(), k.float(), m, head_scale, span, cosines=True)
    v = v.float()
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    plain = type(q) is type(k) is type(v) is Tensor
    if torch.compiler.is_compiling() or not plain or is_in_torch_dispatch_mode():
        out = _forward_operator(q, k, v, span.first, *settings, save)[0]
    elif save:
        out = _Direct.apply(q, k, v, span.first, settings)
    else:
        out = room_like(q, v.shape[3])
        _run(_kernel().lssar_forward, settings, span.first, (q, k, v), (out,))
    return fused.finish(out, q, k, m, head_scale, span).to(dtype)


def most_keys(head_dim: int) -> int:
    """Return how many keys a row can have: 6.8 million where the head dimension is 256."""
    return int(2 ** (MAX_SCORE / math.log(max(head_dim, 2))))


TENSORS = ("q", "k", "v", "out", "stats", "guide", "grad_out", "grad_q", "grad_k", "grad_v")
VIEW = ("data", "batch_stride", "head_stride", "row_stride")


class KernelCall(ctypes.Structure):
    """Holds the arguments of the kernel's functions: `Call` of cpu_call.h, field by field."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        # From here to train_length: `Settings`
        ("window", ctypes.c_int64),
        ("phi", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("p", ctypes.c_double),
        ("alpha", ctypes.c_double),
        ("bias", ctypes.c_double),
        ("train_length", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("first_stride", ctypes.c_int64),
        # Of each tensor, (B, H, L, d) in float32 with unit stride along d; zeros: there is none
        *((f"{tensor}.{field}", ctypes.c_int64) for tensor in TENSORS for field in VIEW),
    )


def view_of(x: Tensor) -> tuple[int, int, int, int]:
    """Return the fields of a call for one of its tensors; an empty one stands for none."""
    if x.ndim != 4:
        return 0, 0, 0, 0
    batch, head, row, _ = x.stride()
    return x.data_ptr(), batch, head, row


def call_layout() -> list[str]:
    """Return `FIELD=OFFSET` of every field of a call, and its size."""
    layout = [f"{field}={getattr(KernelCall, field).offset}" for field, *_ in KernelCall._fields_]
    return [*layout, f"bytes={ctypes.sizeof(KernelCall)}"]


def load(*extra: str) -> ctypes.CDLL:
    """Build the kernel if need be and load its two functions, which take a `KernelCall`."""
    library = build(*extra)
    try:
        kernel = ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"cannot load {library}: {error}") from None
    kernel.lssar_call_layout.restype = ctypes.c_char_p
    taken = kernel.lssar_call_layout().decode().split()
    given = call_layout()
    other = sorted({*taken} ^ {*given})
    if other:
        raise Unavailable(
            f"{library} does not take the call of this version ({', '.join(other[:4])}); "
            "KernelCall in cpu.py and Call in cpu_call.h differ"
        )
    for function in (kernel.lssar_forward, kernel.lssar_backward):
        function.argtypes = [ctypes.POINTER(KernelCall)]
        function.restype = ctypes.c_int
    return kernel


_kernel = functools.cache(load)


@functools.cache
def unavailable() -> str | None:
    """Return why the kernel cannot be built and loaded here, in one line; None: it can."""
    try:
        _kernel()
    except Unavailable as error:
        return str(error)
    return None


def _run(function, settings: Settings, first: Tensor | None, inputs: tuple, outputs: tuple) -> None:
    """Call a function of the kernel, which fills the outputs.

    Inputs and outputs are in the order of TENSORS.
    """
    inputs = tuple(map(readable, inputs))
    q, _, v, *_ = inputs
    if not (q.numel() and v.numel()):
        for x in outputs:
            x.zero_()
        return
    batch, heads, queries, head_dim = q.shape
    _, groups, keys, value_dim = v.shape
    first_place, first_stride = None, 0
    if first is not None:
        first = first.contiguous()
        first_place = first.data_ptr()
        first_stride = queries if len(first) > 1 else 0
    sizes = (batch, heads, groups, queries, keys, head_dim, value_dim)
    threads = torch.get_num_threads()
    views: list[int] = []
    for x in (*inputs, *outputs):
        views.extend(view_of(x))
    call = KernelCall(*sizes, threads, *settings, first_place, first_stride, *views)
    status = function(ctypes.byref(call))
    if status == UNKNOWN_ACTIVATION:
        raise NotImplementedError(f"the CPU kernel has no case for phi = {fused.PHI[call.phi]!r}")
    if status == NO_MEMORY:
        raise MemoryError(f"the attention kernel found no scratch memory for {keys} keys")


def _outputs(q, k, v, first, *settings_and_save):
    """Allocate the output, the row statistics and, where the mean is subtracted, the guide."""
    *settings, save = settings_and_save
    nothing = q.new_empty(0)
    stats = q.new_empty((*q.shape[:3], ROW_STATISTICS)) if save else nothing
    guided = save and Settings(*settings).guided
    guide = room_like(q, v.shape[3]) if guided else nothing.clone()
    return room_like(q, v.shape[3]), stats, guide


def _forward(q, k, v, first, *settings_and_save):
    out, stats, guide = _outputs(q, k, v, first, *settings_and_save)
    outputs = (out, stats, guide)
    _run(_kernel().lssar_forward, Settings(*settings_and_save[:-1]), first, (q, k, v), outputs)
    return outputs


def _backward(grad, q, k, v, first, out, stats, guide, *settings):
    grads = room_for_gradients(grad, q, k, v)
    inputs = (q, k, v, out, stats, guide, grad)
    _run(_kernel().lssar_backward, Settings(*settings), first, inputs, grads)
    return grads


def _kept(q, out, stats, guide):
    return out, stats, guide


_forward_operator, _backward_operator = fused.operators(
    "lssar::cpu_{}_v4",
    device="cpu",
    forward=_forward,
    outputs=_outputs,
    results=3,
    keep=_kept,
    kept="out stats guide",
    backward=_backward,
)


class _Direct(torch.autograd.Function):
    """Calls both operators without the dispatcher, which costs more than a small call does."""

    @staticmethod
    def forward(ctx, q, k, v, first, settings):
        results = _forward(q, k, v, first, *settings, True)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, first, *results)
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        # With create_graph the operator is recorded, and refuses when it is differentiated.
        run = _backward_operator if torch.is_grad_enabled() else _backward
        return *run(grad, *ctx.saved_tensors, *ctx.settings), None, None
