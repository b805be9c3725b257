"""Checks that everything works on this device: `python benchmark.py gpu-check --out FILE.json`.

To be run first on a new GPU. Correctness against float64, then speed and memory beside PyTorch's
softmax, FlexAttention and a plain flash softmax in Triton; at the end a block to paste into an
issue. Each group runs in a process of its own, so that a crash does not end the others. Exits with
1 if anything is wrong. `--device cpu` rehearses it. docs/kernels.md says what it is to find out.
"""

import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.attention_study import FUSED
from benchmarks.flex import flex_lssa
from benchmarks.measure import DTYPES
from benchmarks.precision import inputs, judge
from lssar import spans
from lssar.backends import BACKENDS, Call, attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS
from model import GPT, preset
from support.command import revision
from support.files import finite, first_line, write_json
from training.distributed import autocast

PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"


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
    """Return the lines to paste: every failure, every skipped check, all speeds and memory."""
    machine = head["machine"]
    shown = ", ".join(f"{count} {status}" for status, count in head["counts"].items())
    lines = [f"{machine['name']}, torch {machine['torch']}, revision {head['revision']}: {shown}"]
    measured = ("speed: ", "decode: ", "model: ")
    for r in rows:
        if r["status"] != PASS or r["name"].startswith(measured):
            lines.append(f"{r['status']:7} {r['name']}: {r['detail']}")
    return "\n".join(lines)


def check_correct(options: Namespace) -> Iterator[dict]:
    """Check every mechanism, type, span and hostile input, with shared heads, at odd shapes."""
    device = options.device
    backend = FUSED[device]
    names = ("lssar", "lssa", "softmax") if options.quick else tuple(MECHANISMS)
    kinds = ("random", "parallel keys", "one-hot rows", "far below zero", "tiny and huge")
    for name, dtype in itertools.product(names, DTYPES):
        call = Call(device, DTYPES[dtype], 1, 64)
        refused = BACKENDS[backend].refuses(MECHANISMS[name], call) or BACKENDS[backend].missing()
        if refused:
            yield row(f"{name} {dtype}", SKIPPED, refused)
            continue
        shapes = [("full", kind, 203, 203, 64, 4) for kind in kinds]
        shapes += [("full", "random", n, n, 40, 2) for n in (1, 2, 3, 4)]
        shapes += [(s, "random", 130, 333, 128, 1) for s in ("window", "documents")]
        for span, kind, rows, keys, d, groups in shapes[:5] if options.quick else shapes:
            tensors = inputs(kind, rows, keys, d, groups, device)
            tokens = torch.arange(keys, device=device)[None] % 50
            first = spans.documents(tokens, 0)[:, -rows:] if span == "documents" else None
            window = 19 if span == "window" else None
            good, detail = judge(name, tensors, dtype, backend, first, window)
            what = f"{name} {dtype}, {span}, {kind}, {rows} of {keys}, d {d}"
            yield row(what, PASS if good else FAIL, detail)


def milliseconds(steps: dict, options: Namespace) -> str:
    seconds = measure.round_seconds(steps, options.device, 3 if options.quick else 15)
    return ", ".join(f"{name} {1000 * median(times):.3g} ms" for name, times in seconds.items())


def check_decode(options: Namespace) -> Iterator[dict]:
    """Compare one row over a long cache with a whole pass, and time it."""
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
    """Compare a training step, compiled and not, with the same step on the CPU."""
    device = options.device
    for name, compiled in itertools.product(("softmax", "lssar"), (False, True)):
        if compiled and options.quick:
            continue
        torch.manual_seed(0)
        model = GPT(preset("nano", name))
        tokens = torch.randint(257, (2, 130))
        expected = model(tokens[:, :-1], tokens[:, 1:]).item()
        model, tokens = model.to(device), tokens.to(device)
        if compiled:
            model.compile()
        step = partial(train_step, model, tokens)
        began = time.perf_counter()
        error = abs(step() - expected)
        took = time.perf_counter() - began
        detail = f"loss off by {error:.1e}, first step {took:.0f} s, "
        detail += milliseconds({"step": step}, options)
        how = "compiled" if compiled else "plain"
        yield row(f"{name}, {how}", PASS if error < 0.02 else FAIL, detail)


def train_step(model: GPT, tokens: Tensor) -> float:
    with autocast(tokens.device, "bf16"):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item()


def backward(function: Callable, leaves: list[Tensor]) -> None:
    function(*leaves).sum().backward()


def check_speed(options: Namespace) -> Iterator[dict]:
    """Measure forward, forward and backward, and memory, at two head dimensions."""
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda and torch.cuda.get_device_capability() < (8, 0):
        dtype = torch.float16
    lengths = (2048, 16384) if cuda and not options.quick else (256,)
    for d, length in itertools.product((64, 128), lengths):
        qkv = [torch.randn(2, 8, length, d, device=options.device, dtype=dtype) for _ in range(3)]
        calls = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True)}
        calls |= {name: partial(attend, mechanism=name) for name in ("lssa", "lssar")}
        only_forward = {"FlexAttention LSSA": partial(flex_lssa, compiled=cuda)}
        if cuda:
            from benchmarks.flash_softmax import forward  # which needs Triton

            only_forward["flash softmax"] = forward
        with torch.no_grad():
            steps = {name: partial(f, *qkv) for name, f in (calls | only_forward).items()}
            error = (steps["FlexAttention LSSA"]() - steps["lssa"]()).abs().max().item()
            status = PASS if error < (0.1 if cuda else 1e-4) else FAIL
            yield row(f"FlexAttention at {length}, d {d}", status, f"outputs differ by {error:.1e}")
            yield row(f"forward at {length}, d {d}", PASS, milliseconds(steps, options))
        leaves = [x.requires_grad_() for x in qkv]
        both = {name: partial(backward, f, leaves) for name, f in calls.items()}
        yield row(f"forward+backward at {length}, d {d}", PASS, milliseconds(both, options))
        for name, step in both.items() if cuda else ():
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() / 1e6
            yield row(f"{name}, memory at {length}, d {d}", PASS, f"{peak:.0f} MB")
