"""Does everything work on this device? `python benchmark.py gpu-check --out results/gpu_check.json`

To be run first on a new GPU. Every backend against the float64 reference in fp32, bf16 and fp16,
compiled and not, at odd and decode shapes, output and gradients; the model compiled, under autocast
and decoding from its cache; training under torchrun on two devices (nccl; gloo on a CPU); time and
memory of mechanisms, windows, packed documents, shared heads and decoding, with PyTorch's softmax
and FlexAttention beside; at the end a block to paste into a report. Each group runs in its own
process, so that a crash does not end the others. `--device cpu` rehearses it on a CPU, in a quarter
of an hour or, with --quick, in two minutes.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import KVCache
from benchmarks import attention_study as bench
from benchmarks import measure, study
from benchmarks.measure import DTYPES
from evaluating.results import Record
from lssar.backends import BACKENDS, Call, attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS as REGISTRY
from lssar.mechanisms import Mechanism, get_mechanism
from model import GPT, preset
from support.command import revision
from support.files import finite, first_line, write_json
from training.distributed import autocast

ROOT = Path(__file__).parent.parent
PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"


def main(options: Namespace) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no GPU was found: check nvidia-smi, and that the installed torch "
            f"({torch.__version__}) was built for it; --device cpu rehearses the checks on a CPU"
        )
    autocast(torch.device(options.device), "bf16")  # guards against a missing AMX
    machine = measure.machine(options.device) | {"cuda": torch.version.cuda}
    head = {"kind": "gpu check", "machine": machine, "revision": revision()}
    groups = {backend: partial(check_backend, backend) for backend in BACKENDS}
    groups |= {"model": check_model, "torchrun": check_torchrun}
    groups |= {"flex": check_flex, "benchmark": check_benchmark}
    rows = []
    for name, check in groups.items():
        rows += rows_of_group(name, check, options)
        head["counts"] = {s: sum(r["status"] == s for r in rows) for s in (PASS, FAIL, SKIPPED)}
        if options.out:
            write_json(options.out, finite(head | {"checks": rows}))
    wide = max(len(r["name"]) for r in rows)
    for r in rows:
        print(f"{r['name']:{wide}}  {r['status']:7}  {r['detail']}")
    print(f"\n== to paste into a report\n{block(head, rows)}\n")
    if options.out:
        print(f"written: {options.out}")
    return 1 if head["counts"][FAIL] else 0


def rows_of_group(name: str, check: Callable, options: Namespace) -> list[dict]:
    """The rows of one group of checks; whatever it raises is a failure of that group."""
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    try:
        found = measure.in_new_process(rows_of, check, options)
    except Exception as error:  # a check may fail in any way, and the others must still run
        found = [row("all", FAIL, f"{type(error).__name__}: {first_line(error)}")]
    print(f"   {len(found)} checks in {time.perf_counter() - began:.0f} s", flush=True)
    return [r | {"name": f"{name}: {r['name']}"} for r in found]


def row(name: str, status: str, detail: str, **more) -> dict:
    """The result of one check: one line of the report."""
    return {"name": name, "status": status, "detail": detail, **more}


def rows_of(check: Callable, options: Namespace) -> list[dict]:
    """The rows of a group, each printed as soon as it is known."""
    rows = []
    for found in check(options):
        print(f"   {found['status']:7}  {found['name']}", flush=True)
        rows.append(found)
    return rows


# Near-uniform rows are ill-conditioned for any implementation, so the limit is twice what eager
# loses on the same input in the same type, plus a few roundings of float32 for sums in another
# order. The input is rounded to the type first: only the computation is judged.
FLOOR = 2**-22
# PyTorch's flash softmax is not ours to fix: in 16 bits it rounds the weights and the gradient of
# the scores before it multiplies, where eager computes in float32. Half a unit of the type.
SDPA_SLACK = {"fp32": 0, "bf16": 2**-8, "fp16": 2**-11}

# Batch, heads, query rows, keys, head dim. Few rows need many heads: a row whose gradient nearly
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
    "sigmoid-logn-l1": {},
    "lssar": {"p": 15},
    "lssar p=2.5": {"p": 2.5},
    "softmax-reweighted": {"p": 3},
    "lssar adaptive": {"alpha": 0.3, "train_length": 100},
}
# Compiling takes seconds per case, so a selection, and an even smaller one for --quick.
COMPILED_SHAPES = ("odd", "few tokens")
COMPILED_MECHANISMS = ("softmax", "lssa", "lssar")
QUICK_SHAPES = ("odd", "one token", "few tokens")
QUICK_MECHANISMS = ("softmax", "lssar")
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

    @property
    def value(self) -> Mechanism:
        return get_mechanism(self.mechanism.split()[0], **MECHANISMS[self.mechanism])

    def refuses(self) -> str | None:
        backend, call = BACKENDS[self.backend], Call(self.device, DTYPES[self.dtype], 1, 64)
        return backend.refuses(self.value, call) or backend.missing()

    def shapes(self, quick: bool) -> tuple[str, ...]:
        if self.compiled:
            return COMPILED_SHAPES[:1] if quick or self.backend in PORTABLE else COMPILED_SHAPES
        return QUICK_SHAPES if quick else tuple(SHAPES)


def check_backend(backend: str, options: Namespace) -> Iterator[dict]:
    """One row per mechanism, type and way of running; each covers every shape."""
    refused = []
    for case in cases(backend, options.device, options.quick):
        if (reason := case.refuses()) is None:
            yield judge(case, case.shapes(options.quick))
        elif (found := row(case.mechanism, SKIPPED, reason)) not in refused:  # once for all types
            refused.append(found)
            yield found


def cases(backend: str, device: str, quick: bool) -> Iterator[Case]:
    for mechanism in QUICK_MECHANISMS if quick else MECHANISMS:
        for dtype in DTYPES:
            yield Case(backend, mechanism, dtype, False, device)
            kept = mechanism == "lssar" and dtype == "fp32" and backend not in PORTABLE
            if mechanism in COMPILED_MECHANISMS and (kept or not quick):
                yield Case(backend, mechanism, dtype, True, device)


def judge(case: Case, shapes: tuple[str, ...]) -> dict:
    """The worst of all shapes and of output and gradients, relative to what is allowed."""
    worst, where = 0.0, "exact"
    for shape in shapes:
        try:
            for name, error, limit in errors(case, SHAPES[shape]):
                share = error / limit if math.isfinite(error) else math.inf
                if share >= worst:
                    worst, where = share, f"{name} at {shape}: {error:.1e} of {limit:.1e} allowed"
        except Exception as error:  # whatever a device or a compiler raises is the finding
            return row(case.name, FAIL, f"{shape}: {type(error).__name__}: {first_line(error)}")
    return row(case.name, PASS if worst <= 1 else FAIL, where, share_of_limit=worst)


def errors(case: Case, shape: tuple[int, ...]) -> Iterator[tuple[str, float, float]]:
    """(name, error, limit) of the output and each gradient, as relative norms."""
    batch, heads, rows, keys, d = shape
    generator = torch.Generator().manual_seed(rows + keys)
    dtype = DTYPES[case.dtype]
    shapes = [(batch, heads, n, d) for n in (rows, keys, keys, rows)]
    tensors = [torch.randn(s, generator=generator).to(case.device, dtype) for s in shapes]
    eager = replace(case, backend="eager", compiled=False)
    exact, plain = (results(eager, tensors, kind) for kind in (torch.float64, dtype))
    got = results(case, tensors, dtype)
    slack = FLOOR + (SDPA_SLACK[case.dtype] if case.backend == "sdpa" else 0)
    for name, e, p, g in zip(("out", "dq", "dk", "dv"), exact, plain, got, strict=True):
        # Gradients that are zero but for rounding are measured against the size of the others.
        size = e.norm().clamp(min=1e-6 * max(x.norm() for x in exact))
        limit = 2 * ((p - e).norm() / size).item() + slack
        yield name, ((g - e).norm() / size).item(), limit


def results(case: Case, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, dq, dk, dv in float64."""
    mechanism, backend = case.value, case.backend

    def function(q, k, v):
        return attend(q, k, v, mechanism, backend=backend)

    if case.compiled:
        torch.compiler.reset()  # past a few versions of one function it would silently not compile
        function = torch.compile(function, dynamic=False)
    *qkv, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def check_model(options: Namespace) -> Iterator[dict]:
    """Compiled equals eager, autocast stays near, the cache gives what the whole pass gives."""
    torch.manual_seed(0)
    device = options.device
    for name in ("lssar",) if options.quick else COMPILED_MECHANISMS:
        model = GPT(preset("nano", name)).to(device)
        tokens = torch.randint(257, (2, 130), device=device)
        plain = loss_and_gradient(model, tokens)
        with autocast(torch.device(device), "bf16"):
            near = loss_and_gradient(model, tokens)
        if not near.isfinite().all():
            near.fill_(math.nan)
        # The loss only: rounding q and k moves the gradient of near-uniform rows a lot.
        yield compare(f"{name}, bf16 autocast", near[:1], plain[:1], 2e-3)
        yield compare(f"{name}, decoding", *decoded(model, tokens), 1e-3)
        if device == "cpu" and " " in torch.__file__:  # torch gives the compiler its path unquoted
            reason = f"torch.compile cannot build C++ in a path with a space: {torch.__file__}"
            yield row(f"{name}, compiled", SKIPPED, reason)
            continue
        model.compile()
        yield compare(f"{name}, compiled", loss_and_gradient(model, tokens), plain, 1e-3)


def loss_and_gradient(model: GPT, tokens: Tensor) -> Tensor:
    """The loss and every gradient as one float64 vector."""
    model.zero_grad()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    parts = [loss.detach(), *(p.grad for p in model.parameters())]
    return torch.cat([x.double().flatten() for x in parts])


@torch.no_grad()
def decoded(model: GPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states with the last 30 tokens one at a time through the cache, and in one pass."""
    cache = KVCache(tokens.shape[1])
    parts = [model.hidden(part, cache) for part in tokens.split([100] + [1] * 30, dim=1)]
    return torch.cat(parts, 1).double(), model.hidden(tokens).double()


def compare(name: str, got: Tensor, expected: Tensor, limit: float) -> dict:
    error = ((got - expected).norm() / expected.norm()).item()
    good = error <= limit  # NaN fails
    return row(name, PASS if good else FAIL, f"error {error:.1e}, limit {limit:.0e}")


LOSS_TOLERANCE = {"cpu": 2e-3, "cuda": 2e-2}  # of losses about 5, fp32 and bf16
TINY_RUN = (
    *("--model.layers=2", "--model.heads=2", "--model.width=64", "--train.length=64"),
    *("--train.batch_tokens=512", "--train.micro_batch=4", "--train.steps=6", "--train.warmup=2"),
    *("--eval.interval=6", "--eval.tokens=512", "--checkpoint.interval=6", "--log.interval=1"),
)


def check_torchrun(options: Namespace) -> Iterator[dict]:
    """train.py on one device and under torchrun on two, which must give the same losses."""
    device = options.device
    with tempfile.TemporaryDirectory() as folder:
        corpus, text = Path(folder) / "corpus", Path(folder) / "sources.txt"
        text.write_text("\n".join(f.read_text(encoding="utf-8") for f in sorted(ROOT.glob("*.py"))))
        prepare = ("data/prepare.py", "text", str(text), "--out", str(corpus))
        run(*prepare, "--tokeniser", "bytes", "--val-tokens", "4000")
        alone = losses_of_training(folder, corpus, device, 1)
        shown = f"losses {alone[0]:.4f} to {alone[-1]:.4f}"
        yield row("train.py on one device", PASS, shown, losses=alone)
        name = f"DDP on two over {'nccl' if device == 'cuda' else 'gloo'}"
        count = torch.cuda.device_count() if device == "cuda" else 2
        if count < 2:
            yield row(name, SKIPPED, f"{count} GPU visible, two are needed")
            return
        both = losses_of_training(folder, corpus, device, 2)
    worst = max(abs(a - b) for a, b in zip(alone, both, strict=True))
    limit = LOSS_TOLERANCE[device]
    shown = f"losses {both[0]:.4f} to {both[-1]:.4f}, off by {worst:.1e}, limit {limit:.0e}"
    yield row(name, PASS if worst <= limit else FAIL, shown, losses=both)


def losses_of_training(folder: str, corpus: Path, device: str, processes: int) -> list[float]:
    """The training losses of a tiny LSSAR run."""
    name = f"world-{processes}"
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    run(
        *(launcher if processes > 1 else ()),
        *("train.py", "configs/nano-lssar.toml", "--device", device, *TINY_RUN),
        *(f"--data.directory={corpus}", f"--log.directory={folder}", f"--log.name={name}"),
    )
    lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    return [m["loss"] for m in map(json.loads, lines) if "loss" in m]


def run(*arguments: str) -> None:
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(f"{' '.join(arguments[:3])}: exit {done.returncode}: {said[-1:]}")


FLEX_ROUNDS = 7
FLEX_TOLERANCE = {"cuda": 0.05, "cpu": 1e-4}  # of outputs about one, in bf16 and fp32


def check_flex(options: Namespace) -> Iterator[dict]:
    """Softmax by FlexAttention, by PyTorch's call and by our kernel, with every span, in turns."""
    device = options.device
    quick = options.quick
    seen = (bench.FULL, bench.WINDOW, bench.DOCUMENTS, bench.GROUPED)
    options = Namespace(device=device, dtype=None, inputs="random", batch=1)
    bench.complete_options(options)
    for length in (300,) if device == "cpu" else (2048, 16384):
        inputs = bench.make_inputs(options, length)
        for span in seen[1:2] if quick else seen:
            ours = bench.Case(get_mechanism("softmax"), bench.FUSED[device], length, seen=span)
            steps = {"SDPA, full rows": bench.steps_of(ours.baseline, inputs)}
            steps["FlexAttention"] = bench.steps_of(ours, inputs, flex_call(span, inputs[0]))
            steps["ours"] = bench.steps_of(ours, inputs)
            error = (steps["FlexAttention"][0]() - steps["ours"][0]()).abs().max().item()
            phases = bench.PHASES[: 1 if device == "cpu" else 2]  # it has no backward on a CPU
            turns = {(w, p): steps[w][i] for w in steps for i, p in enumerate(phases)}
            seconds = measure.round_seconds(turns, device, 2 if quick else FLEX_ROUNDS)
            found = {f"{w} {study.title(p)} ms": 1000 * median(t) for (w, p), t in seconds.items()}
            if span == bench.GROUPED:
                for case in (ours, ours.without):
                    task = (measure.peak_megabytes, device, bench.make_steps, case, options)
                    peaks = measure.in_new_process(*task, warm_up=bench.warm_up)
                    found[f"{case.seen} MB"] = peaks[-1]
            numbers = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
            status = PASS if error <= FLEX_TOLERANCE[device] else FAIL
            detail = f"{numbers}; outputs differ by {error:.1e}"
            yield row(f"{span} at {length}", status, detail, numbers=found)


def flex_call(span: str, q: Tensor) -> Callable[..., Tensor]:
    """FlexAttention of (q, k, v) over a span."""
    flex = flex_attention
    if q.is_cuda:
        torch.compiler.reset()
        flex = torch.compile(flex_attention, dynamic=False)

    def visible(batch, head, row, key):
        seen = key <= row
        if span == bench.WINDOW:
            seen = seen & (key > row - 128)
        if span == bench.DOCUMENTS:
            seen = seen & (key // 256 == row // 256)
        return seen

    mask = create_block_mask(visible, None, None, q.shape[2], q.shape[2], device=q.device)
    return partial(flex, block_mask=mask, enable_gqa=span == bench.GROUPED)


def check_benchmark(options: Namespace) -> Iterator[dict]:
    """Time and memory beside PyTorch's softmax, in files beside the report and in it."""
    device = options.device
    lengths = ["--lengths", "1024,2048,4096,8192,16384", "--batch", "4"] if device == "cuda" else []
    studies = {"attention": ["attention", *lengths]}
    every = ["--mechanisms", ",".join(REGISTRY), "--backends", f"sdpa,{bench.FUSED[device]}"]
    studies["mechanisms"] = ["attention", *every, "--lengths", "2048"]
    studies["spans"] = ["spans", "--lengths", "2048,16384" if device == "cuda" else "2048"]
    if options.quick:
        few = ["--lengths", "64,128", "--mechanisms", "lssar", "--rounds", "2"]
        studies = {"attention": ["attention", *few], "spans": ["spans", *few]}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder, "check.json")
        for name, arguments in studies.items():
            path = out.with_name(f"{out.stem}_{name}.json")
            path.unlink(missing_ok=True)  # like the report: of this check, not of an earlier one
            run("benchmark.py", *arguments, "--device", device, "--out", str(path))
            result = json.loads(path.read_text())
            detail = f"{len(result['records'])} numbers in {path.name}"
            yield row(name, PASS, detail, result=result)


def block(head: dict, rows: list[dict]) -> str:
    """What to paste into a report: what failed, and what every bar of speed and memory is about."""
    machine, counts = head["machine"], head["counts"]
    shown = ", ".join(f"{count} {status}" for status, count in counts.items())
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, revision {head['revision']}"
    parts = [f"{machine['name']}, {versions}: {shown}"]
    parts += [f"{r['name']}: {r['detail']}" for r in rows if r["status"] == FAIL or "numbers" in r]
    for r in rows:
        if "result" in r:
            records = [Record(**found) for found in r["result"]["records"]]
            kept = [x for x in records if x.quantity.endswith(("_ratio", "_share", "_MB"))]
            parts.append(f"{r['name']}\n{study.text(kept, [])}")
    return "\n\n".join(parts)
