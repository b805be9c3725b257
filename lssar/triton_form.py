"""Says what the Triton kernels are compiled for, and launches them.

Nothing here imports Triton before the first launch.
"""

import functools
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lssar.folders import ensure_writable
from lssar.fused import COSINE, L1, LOG_N, PHI, RECENTRE_L1, Settings
from lssar.mechanisms import SIGNED


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


MAX_INTEGER_P = 64  # integers up to here are multiplied out, one compiled kernel each


@dataclass(frozen=True)
class Form:
    """Says what a kernel is compiled for, besides its tiles."""

    phi: str
    power: int | None = None  # None: not sharpened; 0: a real p, or one for each row
    cosine: bool = False
    l1: bool = True
    recentre: bool = False  # subtract the mean and normalise again
    bias: bool = False
    log_n: bool = False  # the bias is a multiple of log N
    spans: bool = False
    online: bool = False  # sums are relative to the largest |f| so far (of exp, the largest score)

    @property
    def sharp(self) -> bool:
        return self.power is not None

    @property
    def centred(self) -> bool:
        """Tell whether the row's mean is subtracted; the backward has a term for it then."""
        return self.sharp or self.recentre

    @property
    def signed(self) -> bool:
        return self.recentre or self.phi in SIGNED

    @property
    def biased(self) -> bool:
        return (self.bias or self.log_n) and not (self.phi == "exp" and self.l1)

    @property
    def shifted(self) -> bool:
        """Tell whether the backward adds something to a row's scores."""
        return self.biased or (self.phi == "exp" and self.l1)

    @property
    def loose(self) -> bool:
        """Tell whether one key may have all of a row's weight, and the others none."""
        return self.l1 and not (self.centred or self.online or self.cosine)


def form_of(s: Settings, keys: int, spans: bool, dtype: torch.dtype) -> Form:
    power = None
    if s.p:
        adaptive = s.alpha != 0 and keys > s.train_length
        whole = not adaptive and s.p == int(s.p) and s.p <= MAX_INTEGER_P
        power = int(s.p) if whole else 0
    l1 = bool(s.flags & L1)
    recentre = bool(s.flags & RECENTRE_L1)
    plain = l1 and power is None and not recentre
    return Form(
        phi=PHI[s.phi],
        power=power,
        cosine=bool(s.flags & COSINE),
        l1=l1,
        recentre=recentre,
        bias=s.bias != 0,
        log_n=bool(s.flags & LOG_N),
        spans=spans,
        online=plain and (PHI[s.phi] == "exp" or dtype == torch.float16),
    )


def scale_and_bias(form: Form, s: Settings, d: int) -> tuple[float, float]:
    """Return the factor and the bias that turn q.k into a score in the units of the kernels."""
    base_2 = 1.0 if form.phi in ("exp", "sigmoid", "softplus") else math.log(2)
    scale = math.log(d) * base_2 if form.cosine else base_2 / math.sqrt(d) / math.log(2)
    bias = -base_2 if form.log_n else s.bias * base_2 / math.log(2)
    return scale, bias


def sum_unit(form: Form, q: Tensor, keys: int) -> float:
    """Return the factor of weights while they are summed.

    Sums are below one then, and stay finite with values near the largest float32. In fp16 small
    weights would be subnormal.
    """
    if q.dtype == torch.float16:
        return 2.0**14
    largest = 1 + math.log(q.shape[3]) * math.log2(keys)
    return 2.0 ** -math.ceil(math.log2(keys * largest)) if form.l1 else 1.0


def padded(d: int) -> int:
    """Return the head dim of the tiles: the next power of two, at least tl.dot's smallest, 16."""
    return max(16, 1 << (d - 1).bit_length())


# --- launches ------------------------------------------------------------------------------------


@functools.cache
def kernel_function(name: str):
    """Return a Triton function by its name in FILES."""
    # Triton keeps what it compiles below the home folder, and fails where that cannot be.
    home = os.environ.get("TRITON_HOME") or "~"
    kept = "Triton's compiled kernels"
    ensure_writable("TRITON_CACHE_DIR", f"{home}/.triton/cache", "triton", kept)
    if interpreting():
        from lssar import triton_interpreter

        triton_interpreter.install()
    from lssar import triton_backward, triton_decode, triton_forward

    for module in (triton_forward, triton_backward, triton_decode):
        if hasattr(module, f"{name}_kernel"):
            return getattr(module, f"{name}_kernel")
    raise KeyError(name)


_launched: set[tuple] = set()
SLOW_LAUNCH = 1.0  # seconds; a kernel that was compiled before is loaded in less


def launch(name: str, kernel, grid: tuple, arguments: list, q: Tensor, **constants) -> None:
    """Run a kernel on the device of q, and say so if it had to be compiled first."""
    key = (name, q.dtype, q.shape[-1], *constants.values())
    new = key not in _launched
    began = time.perf_counter()
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[grid](*arguments, **constants)
    took = time.perf_counter() - began
    if new and took > SLOW_LAUNCH and not interpreting():
        form = constants["FORM"]
        what = (
            f"{form.phi}{' re-weighted' if form.sharp else ''}, head dim {q.shape[-1]}, {q.dtype}"
        )
        print(f"lssar: compiled {name} ({what}) in {took:.0f} s, once", file=sys.stderr)
    _launched.add(key)
