"""Does everything work on this device? `python benchmark.py gpu-check --out results/gpu_check.json`

For the first time on a new GPU. Every backend against the float64 reference in fp32, bf16 and fp16,
compiled and not, at odd and decode shapes, output and gradients; the model compiled, under autocast
and decoding from its cache; training under torchrun on two devices (nccl; gloo on a CPU); the
attention benchmark. Prints a table of pass, fail and skipped with reasons, writes it all into one
JSON as it goes if --out names one, and exits with 1 if anything failed. Each group runs in its own
process, so that one that dies does not take the others with it. `--device cpu` rehearses it on a
CPU, in ten minutes or, with --quick, in two.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

import benchmark
from attention import KVCache
from benchmarks import device_accuracy, measure
from benchmarks.device_accuracy import FAIL, PASS, SKIPPED, first_line, row, say
from lssar.backends import BACKENDS
from lssar.errors import UserError
from model import GPT, preset
from support.command import revision
from support.files import finite, write_json

ROOT = Path(__file__).parent.parent
LOSS_TOLERANCE = {"cpu": 2e-3, "cuda": 2e-2}  # of losses about 5, fp32 and bf16
TINY_RUN = (
    *("--model.layers=2", "--model.heads=2", "--model.width=64", "--train.length=64"),
    *("--train.batch_tokens=512", "--train.micro_batch=4", "--train.steps=6", "--train.warmup=2"),
    *("--eval.interval=6", "--eval.tokens=512", "--checkpoint.interval=6", "--log.interval=1"),
)


def main(options: Namespace) -> int:
    options.device = options.device or "cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no GPU was found: see nvidia-smi, and whether the torch that is installed "
            f"({torch.__version__}) was built for it; --device cpu rehearses the checks on a CPU"
        )
    report = Report(options.out, options.device)
    for backend in BACKENDS:
        report.group(f"{backend}:", device_accuracy.check, backend, options.device, options.quick)
    report.group("model:", check_model, options.device, options.quick)
    report.group("torchrun:", check_torchrun, options.device)
    report.group("benchmark:", check_benchmark, options.device, options.quick, options.out)
    print(report.text())
    if options.out:
        print(f"written: {options.out}")
    return 1 if report.count(FAIL) else 0


class Report:
    """Results as they come, on disk after every group if there is a path."""

    def __init__(self, path: Path | None, device: str):
        self.path, self.rows = path, []
        self.head = {
            "kind": "gpu check",
            "machine": measure.machine(device) | {"cuda": torch.version.cuda},
            "revision": revision(),
        }
        if path:
            measure.check_writable(path)

    def group(self, name: str, check: Callable[..., list[dict]], *arguments) -> None:
        """Run one group of checks; whatever it raises is a failure of that group."""
        print(f"== {name.rstrip(':')}", flush=True)
        began = time.perf_counter()
        try:
            found = measure.in_new_process(check, *arguments)
        except Exception as error:  # a check may fail in any way, and the others must still run
            found = [row("all", FAIL, first_line(error))]
        for entry in found:
            entry["name"] = f"{name} {entry['name']}"
        self.rows += found
        print(f"   {len(found)} checks in {time.perf_counter() - began:.0f} s", flush=True)
        counts = {status: self.count(status) for status in (PASS, FAIL, SKIPPED)}
        if self.path:
            write_json(self.path, finite(self.head | {"counts": counts, "checks": self.rows}))

    def count(self, status: str) -> int:
        return sum(r["status"] == status for r in self.rows)

    def text(self) -> str:
        wide = max(len(r["name"]) for r in self.rows)
        lines = [f"{r['name']:{wide}}  {r['status']:7}  {r['detail']}" for r in self.rows]
        counts = ", ".join(f"{self.count(s)} {s}" for s in (PASS, FAIL, SKIPPED))
        machine = self.head["machine"]
        return "\n".join([*lines, f"\n{machine['name']}, torch {machine['torch']}: {counts}"])


def check_model(device: str, quick: bool) -> list[dict]:
    """Compiled equals eager, autocast stays near, the cache gives what the whole pass gives."""
    torch.manual_seed(0)
    rows = []
    for name in ("lssar",) if quick else ("softmax", "lssa", "lssar"):
        model = GPT(preset("nano", name)).to(device)
        tokens = torch.randint(257, (2, 130), device=device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        plain = loss_and_gradient(model, inputs, targets)
        with torch.autocast(device, torch.bfloat16):
            near = loss_and_gradient(model, inputs, targets)
        # The loss only: rounding q and k moves the gradient of near-uniform rows a lot.
        near = near[:1] if near.isfinite().all() else near.fill_(math.nan)
        rows.append(say(_compare(f"{name}, bf16 autocast", near[:1], plain[:1], 2e-3)))
        rows.append(say(_compare(f"{name}, decoding", *_decoded(model, tokens), 1e-3)))
        if device == "cpu" and " " in torch.__file__:  # torch gives the compiler its path unquoted
            reason = f"torch.compile cannot build C++ in a path with a space: {torch.__file__}"
            rows.append(say(row(f"{name}, compiled", SKIPPED, reason)))
            continue
        model.compile()
        compiled = loss_and_gradient(model, inputs, targets)
        rows.append(say(_compare(f"{name}, compiled", compiled, plain, 1e-3)))
    return rows


def loss_and_gradient(model: GPT, inputs, targets) -> torch.Tensor:
    """The loss and every gradient as one float64 vector."""
    model.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    parts = [loss.detach(), *(p.grad for p in model.parameters())]
    return torch.cat([x.double().flatten() for x in parts])


@torch.no_grad()
def _decoded(model: GPT, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states with the last 30 tokens one at a time through the cache, and in one pass."""
    cache = KVCache(tokens.shape[1])
    parts = [model.hidden(tokens[:, :100], cache)]
    parts += [model.hidden(tokens[:, i : i + 1], cache) for i in range(100, tokens.shape[1])]
    return torch.cat(parts, 1).double(), model.hidden(tokens).double()


def _compare(name: str, got: torch.Tensor, expected: torch.Tensor, limit: float) -> dict:
    error = ((got - expected).norm() / expected.norm()).item()
    good = error <= limit  # NaN fails
    return row(name, PASS if good else FAIL, f"error {error:.1e}, limit {limit:.0e}")


def check_torchrun(device: str) -> list[dict]:
    """train.py on one device and under torchrun on two, which must give the same losses."""
    backend = "nccl" if device == "cuda" else "gloo"
    names = ["train.py on one device", f"DDP on two over {backend}"]
    with tempfile.TemporaryDirectory() as folder:
        corpus, text = Path(folder) / "corpus", Path(folder) / "sources.txt"
        text.write_text("\n".join(f.read_text(encoding="utf-8") for f in sorted(ROOT.glob("*.py"))))
        prepare = ["data/prepare.py", "text", str(text), "--out", str(corpus)]
        _run([*prepare, "--tokeniser", "bytes", "--val-tokens", "4000"])
        alone = _train(folder, corpus, device, 1)
        rows = [say(row(names[0], PASS, f"losses {_range(alone)}", losses=alone))]
        count = torch.cuda.device_count() if device == "cuda" else 2
        if count < 2:
            return [*rows, row(names[1], SKIPPED, f"{count} GPU visible, two are needed")]
        both = _train(folder, corpus, device, 2)
    worst = max(abs(a - b) for a, b in zip(alone, both, strict=True))
    limit = LOSS_TOLERANCE[device]
    detail = f"losses {_range(both)}, off by {worst:.1e}, limit {limit:.0e}"
    return [*rows, row(names[1], PASS if worst <= limit else FAIL, detail, losses=both)]


def _train(folder: str, corpus: Path, device: str, processes: int) -> list[float]:
    """The training losses of a tiny LSSAR run."""
    name = f"world-{processes}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    _run(
        [
            *(launcher if processes > 1 else ()),
            *("train.py", "configs/nano-lssar.toml", "--device", device, *TINY_RUN),
            *(f"--data.directory={corpus}", f"--log.directory={folder}", f"--log.name={name}"),
        ]
    )
    lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
    return [m["loss"] for m in map(json.loads, lines) if "loss" in m]


def _run(arguments: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(f"{' '.join(arguments[:3])}: exit {done.returncode}: {said[-1:]}")


def _range(losses: list[float]) -> str:
    return f"{losses[0]:.4f} to {losses[-1]:.4f}"


def check_benchmark(device: str, quick: bool, out: Path | None) -> list[dict]:
    """The attention benchmark, beside the report; its numbers also go into it."""
    arguments = ["attention", "--device", device]
    if quick:
        arguments += ["--lengths", "64,128", "--mechanisms", "lssar", "--rounds", "2"]
    elif device == "cuda":
        arguments += ["--lengths", "1024,2048,4096,8192,16384", "--batch", "4"]
    if not out:
        benchmark.main(arguments)
        return [row("attention", PASS, "its table is above")]
    path = out.with_name(f"{out.stem}_attention.json")
    path.unlink(missing_ok=True)  # like the report: of this check, not of an earlier one
    benchmark.main([*arguments, "--out", str(path)])
    result = json.loads(path.read_text())
    return [row("attention", PASS, f"{len(result['records'])} numbers in {path}", result=result)]
