"""Exact fused attention on the CPU, every mechanism, forward and backward.

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

from lssar import fused
from lssar.cache import private_folder
from lssar.fused import Settings, readable, room_for_gradients, room_like
from lssar.mechanisms import Mechanism
from lssar.reference import FLAT
from lssar.spans import Span

SOURCE = Path(__file__).with_name("lssar_cpu.cpp")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
CONSTANTS = (f"-DLSSAR_FLAT={FLAT}f",)
# Tried in this order: an Arm clang knows only -mcpu, and some compilers come without OpenMP.
VARIANTS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
MAX_SCORE = 125.9  # |s| <= log(d) log2(N) of a cosine, and 2^-|s| must be a normal float32
ROW_STATISTICS = 8  # STATS in cpu_call.h


class Unavailable(RuntimeError):
    """The kernel cannot be built or loaded here; the message is one line that says why."""


_ask = functools.partial(subprocess.run, capture_output=True, text=True, errors="replace")


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
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("LSSAR_CACHE") or f"{base}/lssar").expanduser().absolute()
    except RuntimeError:
        raise FileNotFoundError("no home folder") from None


def prebuilt(folder: Path, level: str) -> Path:
    """Where a kernel hub's folder has the library for torch's kind of processor, `level`."""
    return folder / f"lssar_cpu-{level}.so"


def build(*extra: str) -> Path:
    """The shared library for this machine, from the cache or compiled now."""
    compiler = _compiler()
    try:
        version = _ask([*compiler, "--version"]).stdout
    except OSError as error:
        raise Unavailable(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}") from None
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("cpu_*.h")))]
    flags = repr((compiler, FLAGS, CONSTANTS, VARIANTS, extra))
    parts = [*sources, flags, version, _cpu_features()]
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
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        partial = Path(temporary) / "kernel.so"
        for variant in VARIANTS:
            flags = [*FLAGS, *CONSTANTS, *variant, *extra]
            result = _ask([*compiler, *flags, str(SOURCE), "-o", str(partial)])
            if result.returncode == 0:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                    library = _named(file.read(), folder, name)
                partial.replace(library)  # atomic: another process sees all of it or nothing
                return library
    errors = [line.strip() for line in result.stderr.splitlines() if "error" in line.lower()]
    problem = errors[0] if errors else "no message"
    raise Unavailable(f"{shlex.join(compiler)} cannot build the kernel: {problem}")


def load(*extra: str) -> ctypes.CDLL:
    """The kernel's two functions, ready to be called with a `_Call` and a `_Numbers` array."""
    library = prebuilt(SOURCE.parent, torch.backends.cpu.get_cpu_capability())
    if extra or not library.is_file():
        library = build(*extra)
    try:
        kernel = ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(f"cannot load {library}: {error}") from None
    for function in (kernel.lssar_forward, kernel.lssar_backward):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        function.restype = ctypes.c_int
    return kernel


_kernel = functools.cache(load)


@functools.cache
def unavailable() -> str | None:
    """Why the kernel cannot be built and loaded here, in one line; None: it can."""
    try:
        _kernel()
    except Unavailable as error:
        return str(error)
    return None


_Call = ctypes.c_int64 * 54  # struct Call: 12 numbers, `first` and its stride, 10 views of 4
_Numbers = ctypes.c_double * 3  # struct Numbers


def _view(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride()[:3]) if x.ndim == 4 else (0, 0, 0, 0)


def _call(function, first: Tensor | None, settings, inputs, outputs) -> None:
    """Fill the outputs; inputs and outputs are the views of a struct Call, in its order."""
    q, k, v, *rest = map(readable, inputs)
    (b, h, lq, d), (_, groups, lk, d_v) = q.shape, (*k.shape[:3], v.shape[3])
    if not (q.numel() and v.numel()):
        for x in outputs:
            x.zero_()
        return
    s = Settings(*settings)
    shape = (b, h, groups, lq, lk, d, d_v, torch.get_num_threads())
    span = (0, 0)
    if first is not None:
        first = first.contiguous()
        span = (first.data_ptr(), lq if len(first) > 1 else 0)
    views = [number for x in (q, k, v, *rest, *outputs) for number in _view(x)]
    call = _Call(*shape, s.train_length, s.window, s.phi, s.flags, *span, *views)
    if function(call, _Numbers(s.p, s.alpha, s.bias)):
        raise MemoryError(f"the attention kernel found no scratch memory for {lk} keys")


def _outputs(q, k, v, first, *settings_and_save):
    """The output, and what a backward pass needs of the rows: statistics, and a guide."""
    *settings, save = settings_and_save
    nothing = q.new_empty(0)
    stats = q.new_empty((*q.shape[:3], ROW_STATISTICS)) if save else nothing
    guided = save and Settings(*settings).guided
    guide = room_like(q, v.shape[3]) if guided else nothing.clone()
    return room_like(q, v.shape[3]), stats, guide


def _forward(q, k, v, first, *settings_and_save):
    results = _outputs(q, k, v, first, *settings_and_save)
    _call(_kernel().lssar_forward, first, settings_and_save[:-1], (q, k, v), results)
    return results


def _backward(grad, q, k, v, first, out, stats, guide, *settings):
    grads = room_for_gradients(grad, q, k, v)
    inputs = (q, k, v, out, stats, guide, grad)
    _call(_kernel().lssar_backward, first, settings, inputs, grads)
    return grads


_forward_operator, _backward_operator = fused.operators(
    "lssar::cpu_{}_v3", "cpu", _forward, _outputs, 3,
    lambda q, *results: results, "out stats guide", _backward,
)  # fmt: skip


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


def _run(q, k, v, first: Tensor | None, settings: Settings, save: bool) -> Tensor:
    """Whoever traces or intercepts operators gets the operator; an ordinary call goes straight."""
    plain = type(q) is type(k) is type(v) is Tensor
    if torch.compiler.is_compiling() or not plain or is_in_torch_dispatch_mode():
        return _forward_operator(q, k, v, first, *settings, save)[0]
    if save:
        return _Direct.apply(q, k, v, first, settings)
    return _forward(q, k, v, first, *settings, save)[0]


def most_keys(head_dim: int) -> int:
    """The keys that a row can have: 6.8 million where the head dimension is 256."""
    return int(2 ** (MAX_SCORE / math.log(max(head_dim, 2))))


def attend(q, k, v, m: Mechanism, params: Tensor | None, span: Span) -> Tensor:
    """Any mechanism that `unfused` lets through; half-precision input is computed in float32."""
    q, k, v, dtype = q.float(), k.float(), v.float(), v.dtype
    return fused.attend(_run, q, k, v, m, params, span).to(dtype)
