"""Exact fused attention on the CPU, every mechanism, forward and backward.

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
        _run(_kernel().lssar_forward, settings, span.first, {"q": q, "k": k, "v": v}, {"out": out})
    return fused.finish(out, q, k, m, head_scale, span).to(dtype)


def most_keys(head_dim: int) -> int:
    """Return how many keys a row can have: 6.8 million where the head dimension is 256."""
    return int(2 ** (MAX_SCORE / math.log(max(head_dim, 2))))


# --- the library ---------------------------------------------------------------------------------


class View(ctypes.Structure):
    """Describes a float32 tensor (B, H, L, d) with unit stride along d: `View` of cpu_call.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> "View":
        """Return the view of a tensor (B, H, L, d)."""
        batch, head, row, _ = x.stride()
        return cls(x.data_ptr(), batch, head, row)


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
        ("train_length", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("phi", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("p", ctypes.c_double),
        ("alpha", ctypes.c_double),
        ("bias", ctypes.c_double),
        ("first", ctypes.c_void_p),
        ("first_stride", ctypes.c_int64),
        ("q", View),
        ("k", View),
        ("v", View),
        ("out", View),
        ("stats", View),
        ("guide", View),
        ("grad_out", View),
        ("grad_q", View),
        ("grad_k", View),
        ("grad_v", View),
    )


def call_layout() -> list[str]:
    """Return `STRUCTURE.FIELD=OFFSET` of every field of a call, and its size."""
    layout = []
    for structure, name in ((View, "View"), (KernelCall, "KernelCall")):
        for field, *_ in structure._fields_:
            layout.append(f"{name}.{field}={getattr(structure, field).offset}")
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


# --- the operators -------------------------------------------------------------------------------


def _run(function, settings: Settings, first: Tensor | None, inputs: dict, outputs: dict) -> None:
    """Call a function of the kernel: fill the outputs from the inputs, tensors by field."""
    inputs = {name: readable(x) for name, x in inputs.items()}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if not (q.numel() and v.numel()):
        for x in outputs.values():
            x.zero_()
        return
    batch, heads, queries, head_dim = q.shape
    groups, keys = k.shape[1:3]
    call = KernelCall(
        batch=batch,
        heads=heads,
        groups=groups,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=v.shape[3],
        threads=torch.get_num_threads(),
        **settings._asdict(),
    )
    for name, x in (*inputs.items(), *outputs.items()):
        if x.ndim == 4:  # else it is empty, and stands for none
            setattr(call, name, View.of(x))
    if first is not None:
        first = first.contiguous()
        call.first = first.data_ptr()
        call.first_stride = q.shape[2] if len(first) > 1 else 0
    status = function(ctypes.byref(call))
    if status == UNKNOWN_ACTIVATION:
        raise NotImplementedError(f"the CPU kernel has no case for phi = {fused.PHI[call.phi]!r}")
    if status == NO_MEMORY:
        raise MemoryError(f"the attention kernel found no scratch memory for {call.keys} keys")


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
    inputs = {"q": q, "k": k, "v": v}
    outputs = {"out": out, "stats": stats, "guide": guide}
    _run(_kernel().lssar_forward, Settings(*settings_and_save[:-1]), first, inputs, outputs)
    return out, stats, guide


def _backward(grad, q, k, v, first, out, stats, guide, *settings):
    grad_q, grad_k, grad_v = room_for_gradients(grad, q, k, v)
    inputs = {"q": q, "k": k, "v": v, "out": out, "stats": stats, "guide": guide, "grad_out": grad}
    outputs = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    _run(_kernel().lssar_backward, Settings(*settings), first, inputs, outputs)
    return grad_q, grad_k, grad_v


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
    """The two operators without the dispatcher, whose Python side costs more than a small call."""

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
