"""What every benchmark shares: contestants take turns in one process, each has its own for memory.

A noisy machine is then noisy for all contestants alike, and no allocator's leftovers of one are
counted for another.
"""

import contextlib
import multiprocessing
import platform
import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from tqdm import tqdm

from evaluating.results import Record, Results
from support.files import temporary_of, writing

Step = Callable[[], object]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_ROUNDS = 3


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine(device: str) -> dict:
    """What a number depends on besides the code: for the head of a results file."""
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def check_writable(out: Path) -> None:
    """Before measuring: what cannot be written down would have been measured for nothing."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        trial = temporary_of(out)
        trial.touch()
        trial.unlink()


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads, or as many as before, and leave the number as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_results(options: Namespace) -> Results | None:
    """Where --out says, checked before anything is measured; None, to write nowhere, without it."""
    if options.out is None:
        return None
    check_writable(options.out)
    kept = {k: v for k, v in vars(options).items() if k not in ("benchmark", "out")}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in kept.items()}
    return Results(options.out, options.benchmark, settings, machine(options.device))


def write(results: Results, runs: dict[str, dict], records: list[Record]) -> None:
    """These numbers, in the place of those of an earlier measurement with the same settings."""
    results.runs, results.records = runs, []
    results.add(*records)


def median_seconds(steps: dict[Hashable, Step], **options) -> dict[Hashable, float]:
    """The median of what `round_seconds` gives."""
    found = round_seconds(steps, **options)
    return {name: statistics.median(values) for name, values in found.items()}


def round_seconds(
    steps: dict[Hashable, Step], *, device: str, rounds: int, budget: float = float("inf")
) -> dict[Hashable, list[float]]:
    """The times of each step. One that has used up `budget` seconds takes no further turn."""
    for step in tqdm(steps.values(), desc="warm-up", leave=False, disable=None):
        step()  # compilation, autotuning, caches, optimiser state
    seconds: dict[Hashable, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, step in steps.items():
            if number < LEAST_ROUNDS or sum(seconds[name]) < budget:
                seconds[name].append(seconds_of(step, device))
    return seconds


def seconds_of(step: Step, device: str) -> float:
    """One call, on a GPU from the first to the last of its kernels."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


class Crashed(RuntimeError):
    """The process of one contestant ended without an answer."""


def in_new_process(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process with as many threads as this one."""
    # Forked from a server that has only imported things: no thread, no GPU, no tensor in it yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [function.__module__, "benchmarks.attention_study", "benchmarks.cost"]
    )
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise Crashed("its process was killed, as a rule for want of memory") from None


def peak_megabytes(
    make_steps: Callable[..., list[Step]], *arguments, device: str, warm_up: tuple | None = None
) -> list[float]:
    """The peak after each of the steps that `make_steps(*arguments)` makes, in a fresh process.

    Counted from before they are made, so with inputs and weights, but not what making them took.
    A peak never falls: give the steps in the order of what they need. `warm_up`: other arguments,
    whose steps run first and uncounted, so that libraries are loaded.
    """
    return in_new_process(_peaks, make_steps, arguments, device, warm_up)


def _peaks(make_steps, arguments, device: str, warm_up) -> list[float]:
    if warm_up is not None:
        for step in make_steps(*warm_up):
            step()
    _begin_peak(device)
    before = _peak(device)
    steps = make_steps(*arguments)
    _begin_peak(device)
    peaks = []
    for step in steps:
        step()
        step()
        peaks.append((_peak(device) - before) / 1e6)
    return peaks


def _begin_peak(device: str) -> None:
    """Forget the peak so far, where the system can: imports have one of their own."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _peak(device: str) -> float:
    """Bytes. getrusage's maximum is inherited from the parent on Linux, VmHWM is not."""
    if device == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def free_bytes(device: str) -> float:
    """What a new contestant could take; infinite where the system does not tell."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024 * float(next(found, "inf"))
