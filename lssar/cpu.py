"""Exact fused LSSA and LSSAR on the CPU: `lssar(q, k, v, p=15)`, forward and backward.

The kernel is `lssar_cpu.cpp`, built once by the system's C++ compiler (seconds) into a cache
folder ($LSSAR_CACHE, else $XDG_CACHE_HOME/lssar, else ~/.cache/lssar, else a private temporary one)
and loaded with ctypes. Importing this module builds nothing; `unavailable()` says why the kernel
cannot be used.

Memory is linear in the length. The output and dq have the same bits for any number of threads; dk
and dv have the same bits for the same number of threads.
"""

import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lssar.cache import private_folder
from lssar.reference import FLAT

SOURCE = Path(__file__).with_name("lssar_cpu.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"),
    f"-DLSSAR_FLAT={FLAT}f",
)
# Tried in this order: an Arm clang knows only -mcpu, and some compilers come without OpenMP.
VARIANTS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
MAX_HEAD_DIM = 256
MAX_SCORE = 125.9  # a score s has |s| <= log(d) log2(N), and 2^-|s| must be a normal float32
ROW_STATISTICS = 6  # named in lssar_cpu.cpp


class Unavailable(RuntimeError):
    """The kernel cannot be built or loaded here; the message is one line that says why."""


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise Unavailable("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def _cpu_features() -> str:
    """What -march=native depends on, so that a cache shared between machines stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(found)])


def _cache_dir() -> Path:
    if chosen := os.environ.get("LSSAR_CACHE"):
        return Path(chosen).absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "lssar"
    try:
        return Path.home() / ".cache" / "lssar"
    except RuntimeError:
        raise FileNotFoundError("no home folder") from None


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return lines[0] if lines else "no message"


def build(*extra: str) -> Path:
    """The shared library for this machine, from the cache or compiled now."""
    compiler = _compiler()
    try:
        version = _run_compiler([*compiler, "--version"]).stdout
    except OSError as error:
        raise Unavailable(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}") from None
    parts = [SOURCE.read_text(), repr((compiler, FLAGS, VARIANTS, extra)), version, _cpu_features()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    name = f"lssar_cpu-{key}"
    problems = []
    for place in (_cache_dir, private_folder):
        try:
            folder = place()
            library = _intact(folder, name) or _compile(compiler, extra, folder, name)
        except OSError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(
                f"the built CPU kernel is kept in {folder}, as its cache folder cannot be used "
                f"({problems[0]}); set LSSAR_CACHE to a folder that can be written",
                stacklevel=2,
            )
        return library
    raise Unavailable(
        f"no folder can keep the built kernel ({'; '.join(problems)}); set LSSAR_CACHE to one"
    )


def _run_compiler(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, errors="replace")


def _intact(folder: Path, name: str) -> Path | None:
    """A library built before that still has the sha256 in its name: loading half of one would end
    the process with SIGBUS."""
    for library in folder.glob(f"{name}-*.so"):
        if library.is_file() and library == _named(library.read_bytes(), folder, name):
            return library
    return None


def _named(contents: bytes, folder: Path, name: str) -> Path:
    return folder / f"{name}-{hashlib.sha256(contents).hexdigest()}.so"


def _compile(compiler: list[str], extra: tuple[str, ...], folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    partial = Path(temporary)
    try:
        for variant in VARIANTS:
            result = _run_compiler(
                [*compiler, *FLAGS, *variant, *extra, str(SOURCE), "-o", str(partial)]
            )
            if result.returncode == 0:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                    library = _named(file.read(), folder, name)
                partial.replace(library)  # atomic: another process sees all of it or nothing
                return library
    finally:
        partial.unlink(missing_ok=True)
    raise Unavailable(
        f"{shlex.join(compiler)} cannot build the kernel: {_first_error(result.stderr)}"
    )


def load(*extra: str) -> ctypes.CDLL:
    """The kernel's two functions, ready to be called with a `_Call` array, p and alpha."""
    library = build(*extra)
    try:
        kernel = ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"cannot load {library}: {error}") from None
    for function in (kernel.lssar_forward, kernel.lssar_backward):
        function.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
        function.restype = ctypes.c_int
    return kernel


@functools.cache
def _kernel() -> ctypes.CDLL:
    return load()


@functools.cache
def unavailable() -> str | None:
    """None when the kernel can be built and loaded here, else one line that says why not."""
    try:
        _kernel()
    except Unavailable as error:
        return str(error)
    return None


_Call = ctypes.c_int64 * 47  # struct Call: 7 numbers, then 10 views of (pointer, 3 strides)
_NO_VIEW = (0, 0, 0, 0)


def _view(x: Tensor) -> tuple[int, ...]:
    if x.ndim != 4:
        return _NO_VIEW
    b, h, l, _ = x.stride()
    return x.data_ptr(), b, h, l


def _call(function, q: Tensor, k: Tensor, train_length: int, views, p: float, alpha: float) -> None:
    b, h, lq, d = q.shape
    numbers = (b, h, lq, k.shape[2], d, torch.get_num_threads(), train_length)
    flat = [x for view in views for x in view]
    if q.numel() and function(_Call(*numbers, *flat), p, alpha):
        raise MemoryError(f"the attention kernel found no scratch memory for {k.shape[2]} keys")


def _readable(x: Tensor) -> Tensor:
    """The kernel takes any strides but the last, which is one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Room for a result in the layout of x, so that merging the heads again needs no copy."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else x.new_empty(x.shape)


# torch.compile's cache on disk knows an operator by its name: with a change of what is saved the
# name changes, or compiled code of an older version would be loaded and refuse the new shapes.
_library = torch.library.Library("lssar", "DEF")
_library.define(
    "cpu_forward_v2(Tensor q, Tensor k, Tensor v, float p, float alpha, int train_length,"
    " bool save) -> (Tensor out, Tensor stats, Tensor guide)"
)
_library.define(
    "cpu_backward_v2(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats,"
    " Tensor guide, float p, float alpha, int train_length) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _fake_forward(q, k, v, p, alpha, train_length, save):
    """The output, and what a backward pass needs of the rows: statistics, and G unless LSSA."""
    guide = _like(q) if save and p else q.new_empty(0)
    return _like(q), q.new_empty((*q.shape[:3], ROW_STATISTICS)), guide


def _fake_backward(dout, q, k, v, *_):
    return _like(q), _like(k), _like(v)


def _forward(q, k, v, p, alpha, train_length, save):
    out, stats, guide = _fake_forward(q, k, v, p, alpha, train_length, save)
    q, k, v = _readable(q), _readable(k), _readable(v)
    views = [_view(x) for x in (q, k, v, out, stats, guide)]
    _call(_kernel().lssar_forward, q, k, train_length, [*views, *[_NO_VIEW] * 4], p, alpha)
    return out, stats, guide


def _backward(dout, q, k, v, out, stats, guide, p, alpha, train_length):
    grads = _fake_backward(dout, q, k, v)
    tensors = [_readable(x) for x in (q, k, v, out, stats, guide, dout)]
    views = [_view(x) for x in (*tensors, *grads)]
    _call(_kernel().lssar_backward, q, k, train_length, views, p, alpha)
    return grads


def _setup_context(ctx, inputs, output):
    q, k, v, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _autograd(ctx, dout, *_):
    grads = torch.ops.lssar.cpu_backward_v2(dout, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None


def _no_second_derivative(ctx, *_):
    raise RuntimeError("the fused kernel has no second derivative; use backend='eager' for it")


_library.impl("cpu_forward_v2", _forward, "CPU")
_library.impl("cpu_backward_v2", _backward, "CPU")
torch.library.register_fake("lssar::cpu_forward_v2", _fake_forward, lib=_library)
torch.library.register_fake("lssar::cpu_backward_v2", _fake_backward, lib=_library)
torch.library.register_autograd(
    "lssar::cpu_forward_v2", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("lssar::cpu_backward_v2", _no_second_derivative, lib=_library)


class _Direct(torch.autograd.Function):
    """The two operators without the dispatcher, whose Python side costs more than a small call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx, dout):
        # With create_graph the operator is recorded, and refuses when it is differentiated.
        run = torch.ops.lssar.cpu_backward_v2 if torch.is_grad_enabled() else _backward
        return *run(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _run(q: Tensor, k: Tensor, v: Tensor, p: float, alpha: float, train_length: int) -> Tensor:
    """Whoever traces or intercepts operators gets the operator; an ordinary call goes straight."""
    options = (p, alpha, train_length)
    plain = type(q) is type(k) is type(v) is Tensor
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_compiling() or not plain or is_in_torch_dispatch_mode():
        return torch.ops.lssar.cpu_forward_v2(q, k, v, *options, save)[0]
    if save:
        return _Direct.apply(q, k, v, *options, save)
    return _forward(q, k, v, *options, save)[0]


def most_keys(head_dim: int) -> int:
    """The keys that a row can have: 6.8 million where the head dimension is 256."""
    return int(2 ** (MAX_SCORE / math.log(max(head_dim, 2))))


def _check(q: Tensor, k: Tensor, v: Tensor, p: float | None, train_length: int) -> None:
    if q.ndim != 4 or k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"q must be (B, H, Lq, d), k and v (B, H, Lk, d), not {shapes}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries need at least as many keys, not {k.shape[2]}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head dimension {q.shape[3]}: the kernel takes 1 to {MAX_HEAD_DIM}")
    if k.shape[2] > most_keys(q.shape[3]):
        limit = f"the kernel takes up to {most_keys(q.shape[3])} of this head dimension"
        raise ValueError(f"{k.shape[2]} keys of dimension {q.shape[3]}: {limit}")
    if p is not None and not p >= 1:
        raise ValueError(f"p = {p}: the gradient of y^p at 0 needs p >= 1")
    if train_length < 1:
        raise ValueError(f"train_length = {train_length} must be at least 1")
    for x in (q, k, v):
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"the CPU kernel takes float32, not {x.dtype} on {x.device}")


def lssar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    p: float | None,
    alpha: float = 0.0,
    train_length: int = 1024,
) -> Tensor:
    """Causal LSSAR attention, l1(relu(N_i A - 1[N_i > 3])^p_i) v with A the LSSA weights.

    q is (B, H, Lq, d), k and v (B, H, Lk, d), the last query aligned with the last key:
    N_i = Lk - Lq + i + 1. `p=None` is LSSA, A v. p_i = p up to `train_length` keys and
    p (1 + alpha (sqrt(N_i / train_length) - 1)) beyond. A row whose keys are all alike takes its
    stage-one weights A. Half-precision input is computed in float32.
    """
    _check(q, k, v, p, train_length)
    power = 0.0 if p is None else float(p)
    return _run(q.float(), k.float(), v.float(), power, float(alpha), train_length).to(q.dtype)
