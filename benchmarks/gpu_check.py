"""Does everything work on this device? `python benchmark.py gpu-check --out results/gpu_check.json`

To be run first on a new GPU. Correctness against float64, then speed and memory beside PyTorch's
softmax, FlexAttention and a plain flash softmax in Triton; at the end a block to paste into an
issue. Each group runs in a process of its own, so that a crash does not end the others. Exits with
1 if anything is wrong. `--device cpu` rehearses it. What it is to find out, as no kernel here has
run on hardware: UNKNOWN.
"""

import itertools
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import measure
from benchmarks.measure import DTYPES
from lssar import backends, reference, spans
from lssar.backends import BACKENDS, Call, attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism
from model import GPT, preset
from support.command import revision
from support.files import finite, first_line, write_json
from training.distributed import autocast

PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"
FUSED = {"cuda": "triton", "cpu": "cpu"}
FLOOR = 2**-22  # a few roundings of fp32, for sums in another order
UNKNOWN = (
    "whether ptxas' code runs as the interpreter does: barriers, asynchronous copies, WGMMA",
    "how tensor cores round their sums; the bars below allow for it",
    "which tile shapes are fast: those of lssar/triton_table.py were chosen by counting",
    "how the counted instructions overlap, which decides between the estimates of docs/kernels.md",
)


def main(options: Namespace) -> int:
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no GPU was found: check nvidia-smi, and that the installed torch "
            f"({torch.__version__}) was built for it; --device cpu rehearses the checks on a CPU"
        )
    autocast(torch.device(device), "bf16")  # guards against a missing AMX
    head = {"kind": "gpu check", "machine": measure.machine(device), "revision": revision()}
    groups = {"correct": check_correct, "decode": check_decode}
    groups |= {"model": check_model, "speed": check_speed}
    rows = []
    for name, check in groups.items():
        print(f"== {name}", flush=True)
        try:
            found = measure.in_new_process(rows_of, check, options)
        except Exception as error:  # a check may fail in any way, and the others must still run
            found = [row("all", FAIL, f"{type(error).__name__}: {first_line(error)}")]
        rows += [r | {"name": f"{name}: {r['name']}"} for r in found]
        head["counts"] = {s: sum(r["status"] == s for r in rows) for s in (PASS, FAIL, SKIPPED)}
        if options.out:
            write_json(options.out, finite(head | {"checks": rows}))
    print(f"\n== to paste into an issue\n{block(head, rows)}\n")
    if options.out:
        print(f"written: {options.out}")
    return 1 if head["counts"][FAIL] else 0


def row(name: str, status: str, detail: str) -> dict:
    return {"name": name, "status": status, "detail": detail}


def rows_of(check: Callable, options: Namespace) -> list[dict]:
    rows = []
    for found in check(options):
        print(f"   {found['status']:7}  {found['name']}: {found['detail']}", flush=True)
        rows.append(found)
    return rows


def block(head: dict, rows: list[dict]) -> str:
    """What failed or was skipped, and every number of speed and memory."""
    machine, counts = head["machine"], head["counts"]
    shown = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines = [f"{machine['name']}, torch {machine['torch']}, revision {head['revision']}: {shown}"]
    measured = ("speed: ", "decode: ", "model: ")
    for r in rows:
        if r["status"] != PASS or r["name"].startswith(measured):
            lines.append(f"{r['status']:7} {r['name']}: {r['detail']}")
    return "\n".join(lines)


# --- correctness ---------------------------------------------------------------------------------


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Let eager multiply as it does under autocast: operands and products in 16 bits."""
    exact = reference.grouped_product

    def product(a: Tensor, b: Tensor) -> Tensor:
        return exact(a.to(dtype).float(), b.to(dtype).float()).to(dtype).float()

    with (
        mock.patch.object(reference, "grouped_product", product),
        mock.patch.object(backends, "grouped_product", product),
    ):
        yield


def inputs(kind: str, rows: int, keys: int, d: int, groups: int, options: Namespace):
    """q, k, v and the gradient of the output, of four heads."""
    generator = torch.Generator().manual_seed(rows + d)
    shapes = ((2, 4, rows, d), (2, groups, keys, d), (2, groups, keys, d), (2, 4, rows, d))
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    if kind == "parallel keys":
        k = k[:, :, :1] + k * 1e-2
    elif kind == "one-hot rows":
        q = 3 * k.repeat_interleave(4 // groups, 1)[:, :, -rows:] + 0.1 * q
    elif kind == "far below zero":
        q = q * 0.02 - 1
        k = k * 0.02 + 1
    elif kind == "tiny and huge":
        q = q * 1e-3
        k = k * 500
    return [x.to(options.device) for x in (q, k, v, grad)]


def results(function: Callable, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, dq, dk, dv in float64."""
    *qkv, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def judge(name: str, tensors: list[Tensor], dtype: str, backend: str, first, window) -> dict:
    """Compare what a backend and eager lose: twice as much of the output, thrice of gradients."""
    m = get_mechanism(name, window=window)
    eager = partial(attend, mechanism=m, first=first, backend="eager")
    tensors = [x.to(DTYPES[dtype]) for x in tensors]
    exact = results(eager, tensors, torch.float64)
    with rounded_products(DTYPES[dtype]):
        plain = results(eager, tensors, DTYPES[dtype])
    ours = partial(attend, mechanism=m, first=first, backend=backend)
    worst, where = 0.0, "exact"
    floor = FLOOR if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps / 4
    got = results(ours, tensors, DTYPES[dtype])
    for part, e, p, g in zip(("out", "dq", "dk", "dv"), exact, plain, got, strict=True):
        size = e.norm().clamp(min=1e-6 * max(x.norm() for x in exact))
        limit = (2 if part == "out" else 3) * ((p - e).norm() / size).nan_to_num(1.0).item() + floor
        error = ((g - e).norm() / size).item()
        share = error / limit if math.isfinite(error) else math.inf
        if share >= worst:
            worst, where = share, f"{part}: {error:.1e} of {limit:.1e} allowed"
    return row(f"{name} {dtype}", PASS if worst <= 1 else FAIL, where)


def check_correct(options: Namespace) -> Iterator[dict]:
    """Every mechanism, type, span and hostile input, with heads shared, at odd shapes."""
    backend = FUSED[options.device]
    names = ("lssar", "lssa", "softmax") if options.quick else tuple(MECHANISMS)
    kinds = ("random", "parallel keys", "one-hot rows", "far below zero", "tiny and huge")
    for name, dtype in itertools.product(names, DTYPES):
        call = Call(options.device, DTYPES[dtype], 1, 64)
        refused = BACKENDS[backend].refuses(MECHANISMS[name], call) or BACKENDS[backend].missing()
        if refused:
            yield row(f"{name} {dtype}", SKIPPED, refused)
            continue
        shapes = [("full", kind, 203, 203, 64, 4) for kind in kinds]
        shapes += [("full", "random", n, n, 40, 2) for n in (1, 2, 3, 4)]
        shapes += [(s, "random", 130, 333, 128, 1) for s in ("window", "documents")]
        for span, kind, rows, keys, d, groups in shapes[:5] if options.quick else shapes:
            tensors = inputs(kind, rows, keys, d, groups, options)
            tokens = torch.arange(keys, device=options.device)[None] % 50
            first = spans.documents(tokens, 0)[:, -rows:] if span == "documents" else None
            window = 19 if span == "window" else None
            found = judge(name, tensors, dtype, backend, first, window)
            yield found | {"name": f"{found['name']}, {span}, {kind}, {rows} of {keys}, d {d}"}


# --- decoding, a model, speed --------------------------------------------------------------------


def milliseconds(steps: dict, options: Namespace) -> str:
    seconds = measure.round_seconds(steps, options.device, 3 if options.quick else 15)
    return ", ".join(f"{name} {1000 * median(times):.3g} ms" for name, times in seconds.items())


def check_decode(options: Namespace) -> Iterator[dict]:
    """One row over a long cache: what a whole pass gives, and its time."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for keys in (300,) if options.quick or device == "cpu" else (1024, 16384, 131072):
        q, k, v = (torch.randn(1, h, keys, 64, device=device, dtype=dtype) for h in (32, 8, 8))
        row_of = q[:, :, -1:]
        steps = {"SDPA": partial(F.scaled_dot_product_attention, row_of, k, v, enable_gqa=True)}
        with torch.no_grad():
            for name in ("lssa", "lssar"):
                steps[name] = partial(attend, row_of, k, v, name)
                exact = attend(row_of.double(), k.double(), v.double(), name, backend="eager")
                error = ((steps[name]().double() - exact).norm() / exact.norm()).item()
                status = PASS if error < torch.finfo(dtype).eps + 1e-5 else FAIL
                yield row(f"{name} at {keys}", status, f"error {error:.1e}")
            yield row(f"time at {keys}", PASS, milliseconds(steps, options))


def check_model(options: Namespace) -> Iterator[dict]:
    """One training step, compiled and not, beside the same on the CPU."""
    torch.manual_seed(0)
    for name in ("softmax", "lssar"):
        model = GPT(preset("nano", name))
        tokens = torch.randint(257, (2, 130))
        expected = model(tokens[:, :-1], tokens[:, 1:]).item()
        model, tokens = model.to(options.device), tokens.to(options.device)

        def step(model=model, tokens=tokens):
            with autocast(torch.device(options.device), "bf16"):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            return loss

        for how in ("plain",) if options.quick else ("plain", "compiled"):
            if how == "compiled":
                model.compile()
            began = time.perf_counter()
            error = abs(step().item() - expected)
            took = time.perf_counter() - began
            detail = f"loss off by {error:.1e}, first step {took:.0f} s, "
            detail += milliseconds({"step": step}, options)
            yield row(f"{name}, {how}", PASS if error < 0.02 else FAIL, detail)


def flex_lssa(q: Tensor, k: Tensor, v: Tensor, mask, compiled: bool) -> Tensor:
    """LSSA as softmax(log softplus(score)) in FlexAttention."""
    count = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]
    q = F.normalize(q.float(), dim=-1) * count.log() * math.log(q.shape[3])
    k = F.normalize(k.float(), dim=-1)

    def score(x, batch, head, row, key):
        return F.softplus(x).log()

    flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return flex(q.to(v.dtype), k.to(v.dtype), v, score_mod=score, block_mask=mask, scale=1.0)


def flash_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The forward pass of benchmarks/flash_softmax.py."""
    from benchmarks import flash_softmax as flash

    m, n, warps, stages = flash.CONFIGS["forward", q.shape[3]]
    out, stats = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, rows, d = q.shape
    arguments = (q, k, v, out, stats, q.stride()[:3], heads, rows, d**-0.5)
    grid = (-(-rows // m), batch * heads)
    flash.forward_kernel[grid](*arguments, d, m, n, num_warps=warps, num_stages=stages)
    return out


def backward(function: Callable, leaves: list[Tensor]) -> None:
    function(*leaves).sum().backward()


def check_speed(options: Namespace) -> Iterator[dict]:
    """Forward, forward and backward, and memory, at two head dimensions."""
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda and torch.cuda.get_device_capability() < (8, 0):
        dtype = torch.float16
    lengths = (2048, 16384) if cuda and not options.quick else (256,)
    for d, length in itertools.product((64, 128), lengths):
        qkv = [torch.randn(2, 8, length, d, device=options.device, dtype=dtype) for _ in range(3)]
        calls = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True)}
        calls |= {name: partial(attend, mechanism=name) for name in ("lssa", "lssar")}
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=options.device
        )
        only_forward = {"FlexAttention LSSA": partial(flex_lssa, mask=mask, compiled=cuda)}
        if cuda:
            only_forward["flash softmax"] = flash_softmax
        with torch.no_grad():
            steps = {name: partial(f, *qkv) for name, f in (calls | only_forward).items()}
            error = (steps["FlexAttention LSSA"]() - steps["lssa"]()).abs().max().item()
            status = PASS if error < (0.1 if cuda else 1e-4) else FAIL
            yield row(f"FlexAttention at {length}, d {d}", status, f"outputs differ by {error:.1e}")
            yield row(f"forward at {length}, d {d}", PASS, milliseconds(steps, options))
        leaves = [x.requires_grad_() for x in qkv]
        both = {name: partial(backward, f, leaves) for name, f in calls.items()}
        yield row(f"forward+backward at {length}, d {d}", PASS, milliseconds(both, options))
        if cuda:
            peaks = []
            for name, step in both.items():
                torch.cuda.reset_peak_memory_stats()
                step()
                peaks.append(f"{name} {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")
            yield row(f"memory at {length}, d {d}", PASS, ", ".join(peaks))
