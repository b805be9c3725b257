"""One attention backend against the float64 reference on one device: `check(backend, device)`.

The input is rounded to the type under test first, so that only the computation is judged. As near-
uniform rows are ill-conditioned for any implementation, the limit is twice what the eager form
loses on the same input in the same type, plus a few roundings of float32.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.measure import DTYPES
from lssar.backends import BACKENDS, Call, attend
from lssar.mechanisms import get_mechanism

PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"
# Beyond twice eager: a few roundings of float32, which is all that sums in another order cost.
FLOOR = 2**-22
# PyTorch's flash softmax is not ours to mend: in 16 bits it rounds the weights and the gradient of
# the scores before it multiplies, where eager computes in float32. Half a unit of the type.
SDPA_SLACK = {"fp32": 0, "bf16": 2**-8, "fp16": 2**-11}
NAMES = ("out", "dq", "dk", "dv")

# (batch, heads, query rows, keys, head dim). Few rows need many heads: a row whose gradient nearly
# cancels has any relative error in 16 bits, and must not be all there is to judge.
SHAPES = {
    "square": (2, 3, 256, 256, 64),
    "odd": (1, 3, 203, 203, 40),
    "wide heads": (1, 2, 193, 193, 128),
    "one token": (2, 32, 1, 501, 64),
    "few tokens": (1, 16, 5, 333, 64),
    "a chunk": (1, 2, 70, 257, 64),
    "shortest": (2, 32, 3, 3, 16),
}
MECHANISMS = {
    "softmax": {},
    "ssmax": {},
    "lssa": {},
    "lssar": {"p": 15},
    "lssar p=2.5": {"p": 2.5},
    "lssar adaptive": {"alpha": 0.3, "train_length": 100},
    "softmax-reweighted": {"p": 3},
    "sigmoid-logn-l1": {},
}
# Compiling takes seconds a case, so a selection; and a smaller one of all for a quick look.
COMPILED_SHAPES, COMPILED_MECHANISMS = ("odd", "few tokens"), ("softmax", "lssa", "lssar")
QUICK_SHAPES, QUICK_MECHANISMS = ("odd", "one token", "few tokens"), ("softmax", "lssar")
PORTABLE = ("rowblock", "eager")  # what the compiler takes apart; the others are one operator


@dataclass(frozen=True)
class Case:
    backend: str
    mechanism: str  # of MECHANISMS
    dtype: str
    compiled: bool
    device: str

    @property
    def name(self) -> str:
        return f"{self.mechanism} {self.dtype}{', compiled' if self.compiled else ''}"

    @functools.cached_property
    def value(self):
        return get_mechanism(self.mechanism.split()[0], **MECHANISMS[self.mechanism])

    def refuses(self) -> str | None:
        backend, call = BACKENDS[self.backend], Call(self.device, DTYPES[self.dtype], 1, 64)
        return backend.refuses(self.value, call) or backend.missing()

    def shapes(self, quick: bool) -> tuple[str, ...]:
        if self.compiled:
            return COMPILED_SHAPES[:1] if quick or self.backend in PORTABLE else COMPILED_SHAPES
        return QUICK_SHAPES if quick else tuple(SHAPES)


def check(backend: str, device: str, quick: bool = False) -> list[dict]:
    """One row a mechanism, type and way of running; each covers every shape."""
    rows, said = [], set()
    for case in cases(backend, device, quick):
        reason = case.refuses()
        if reason is None:
            rows.append(say(judge(case, case.shapes(quick))))
        elif (case.mechanism, reason) not in said:  # once, not for every type
            said.add((case.mechanism, reason))
            rows.append(row(case.mechanism, SKIPPED, reason))
    return rows


def cases(backend: str, device: str, quick: bool) -> Iterator[Case]:
    for mechanism in QUICK_MECHANISMS if quick else MECHANISMS:
        for dtype in DTYPES:
            yield Case(backend, mechanism, dtype, False, device)
            kept = mechanism == "lssar" and dtype == "fp32" and backend not in PORTABLE
            if mechanism in COMPILED_MECHANISMS and (kept or not quick):
                yield Case(backend, mechanism, dtype, True, device)


def row(name: str, status: str, detail: str = "", **more) -> dict:
    """One line of the report."""
    return {"name": name, "status": status, "detail": detail, **more}


def say(entry: dict) -> dict:
    """Show a line of the report while the others are still to come."""
    print(f"   {entry['status']:7}  {entry['name']}", flush=True)
    return entry


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def judge(case: Case, shapes: tuple[str, ...]) -> dict:
    """The worst of all shapes and of output and gradients, relative to what is allowed."""
    worst, where = 0.0, "exact"
    for shape in shapes:
        try:
            found = list(errors(case, SHAPES[shape]))
        except Exception as error:  # whatever a device or a compiler raises is the finding
            return row(case.name, FAIL, f"{shape}: {first_line(error)}")
        for name, error, limit in found:
            share = error / limit if math.isfinite(error) else math.inf
            if share >= worst:
                worst, where = share, f"{name} at {shape}: {error:.1e} of {limit:.1e} allowed"
    return row(case.name, PASS if worst <= 1 else FAIL, where, share_of_limit=worst)


def errors(case: Case, shape: tuple[int, ...]) -> Iterator[tuple[str, float, float]]:
    """(name, error, limit) of the output and each gradient, as relative norms."""
    batch, heads, rows, keys, d = shape
    generator = torch.Generator().manual_seed(rows + keys)
    dtype = DTYPES[case.dtype]
    tensors = [
        torch.randn(batch, heads, n, d, generator=generator).to(case.device, dtype)
        for n in (rows, keys, keys, rows)
    ]
    eager = run_of(replace(case, backend="eager", compiled=False))
    exact, plain = (results(eager, tensors, kind) for kind in (torch.float64, dtype))
    got = results(run_of(case), tensors, dtype)
    slack = FLOOR + (SDPA_SLACK[case.dtype] if case.backend == "sdpa" else 0)
    for name, e, p, g in zip(NAMES, exact, plain, got, strict=True):
        # Gradients that are zero but for rounding are measured against the size of the others.
        size = e.norm().clamp(min=1e-6 * max(x.norm() for x in exact))
        limit = 2 * ((p - e).norm() / size).item() + slack
        yield name, ((g - e).norm() / size).item(), limit


def run_of(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mechanism, backend = case.value, case.backend

    def function(q, k, v):
        return attend(q, k, v, mechanism, backend=backend)

    if not case.compiled:
        return function
    torch.compiler.reset()  # past a few versions of one function it would silently not compile
    return torch.compile(function, dynamic=False)


def results(function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, dq, dk, dv in float64."""
    *qkv, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]
