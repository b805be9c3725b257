"""Time and memory of a benchmark's contestants, and the machine they run on.

To be timed, contestants take turns in one process, so that a noisy machine is noisy for all of
them. For its memory each gets a process of its own, free of what others left behind.
"""

import contextlib
import ctypes
import math
import multiprocessing
import platform
import re
import resource
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Step = Callable[[], object]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_ROUNDS = 3
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def machine(device: str) -> dict:
    """What a number depends on besides the code: for the head of a results file."""
    processor = _proc("cpuinfo", "model name") or platform.processor() or platform.machine()
    name = torch.cuda.get_device_name() if device == "cuda" else processor
    versions = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return {"device": device, "name": name} | versions


def _proc(file: str, key: str) -> str | None:
    """The value of the first `key: value` line of a file in /proc; None if there is none."""
    path = Path("/proc", file)
    text = path.read_text() if path.exists() else ""
    found = re.search(rf"^{key}[ \t]*:[ \t]*(.+)", text, re.MULTILINE)
    return found and found[1].strip()


def round_seconds(steps: dict[Any, Step], device: str, rounds: int, budget=math.inf) -> dict:
    """The times of each step. One that has used up `budget` seconds takes no further turn."""
    for step in tqdm(steps.values(), desc="warm-up", leave=False, disable=None):
        step()  # compilation, autotuning, caches, optimiser state
    seconds: dict[Any, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, step in steps.items():
            if number < LEAST_ROUNDS or sum(seconds[name]) < budget:
                seconds[name].append(seconds_of(step, device))
    return seconds


def seconds_of(step: Step, device: str) -> float:
    """The time of one call; on a GPU, from its first kernel to its last."""
    if device != "cuda":
        return timeit.timeit(step, number=1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


class Crashed(RuntimeError):
    """A new process ended without an answer."""


def in_new_process(function: Callable, *arguments, **options):
    """`function(*arguments, **options)` in a fresh process with as many threads as this one."""
    # Forked from a server that has only imported modules: no threads, GPU state or tensors yet.
    context = multiprocessing.get_context("forkserver")
    modules = ["benchmarks.attention_study", "benchmarks.model_step"]
    context.set_forkserver_preload([function.__module__, *modules])
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        try:
            return pool.submit(function, *arguments, **options).result()
        except BrokenProcessPool:
            raise Crashed("its process was killed, probably out of memory") from None


def peak_megabytes(device: str, make_steps: Callable, *arguments, warm_up=None) -> list[float]:
    """The peak after each of the steps that `make_steps(*arguments)` makes; for a new process.

    Inputs and weights count, what making them took does not. A peak never falls: order the steps by
    what they need. `warm_up(*arguments)` runs first, uncounted, to load libraries.
    """
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        # Freed blocks go back at once: the holes of a heap are its history, not what is needed.
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)
    if warm_up:
        warm_up(*arguments)
    _reset_peak(device)
    before = _peak(device)
    steps = make_steps(*arguments)
    _reset_peak(device)
    peaks = []
    for step in steps:
        step()
        step()
        peaks.append((_peak(device) - before) / 1e6)
    return peaks


def _reset_peak(device: str) -> None:
    """Forget the peak so far, where the system can: imports have one of their own."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5")


def _peak(device: str) -> float:
    """Bytes. getrusage's maximum is inherited from the parent on Linux, VmHWM is not."""
    if device == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    if kilobytes := _proc("self/status", "VmHWM"):
        return 1024 * float(kilobytes.split()[0])
    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def free_bytes(device: str) -> float:
    """What a new contestant could allocate; infinite where the system does not tell."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return 1024 * float((_proc("meminfo", "MemAvailable") or "inf").split()[0])
