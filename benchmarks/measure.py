"""Measures the time and memory of a benchmark's contestants, and names the machine.

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
    """Describe the machine for the head of a results file, as numbers depend on it."""
    processor = _proc("cpuinfo", "model name") or platform.processor() or platform.machine()
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _proc(file: str, key: str) -> str | None:
    """Return the value of the first `key: value` line of a file in /proc; None without one."""
    path = Path("/proc", file)
    text = path.read_text() if path.exists() else ""
    found = re.search(rf"^{key}[ \t]*:[ \t]*(.+)", text, re.MULTILINE)
    return found and found[1].strip()


def round_seconds(steps: dict[Any, Step], device: str, rounds: int, budget=math.inf) -> dict:
    """Return the times of each step; one that has used up `budget` seconds takes no more turns."""
    for step in tqdm(steps.values(), desc="warm-up", leave=False, disable=None):
        step()  # compilation, autotuning, caches, optimiser state
    seconds: dict[Any, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, step in steps.items():
            if number < LEAST_ROUNDS or sum(seconds[name]) < budget:
                seconds[name].append(seconds_of(step, device))
    return seconds


def seconds_of(step: Step, device: str) -> float:
    """Time one call; on a GPU, from its first kernel to its last."""
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
    """Says that a new process ended without an answer."""


def in_new_process(function: Callable, *arguments, **options):
    """Call `function(*arguments, **options)` in a fresh process with as many threads as here."""
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
    """Return the peak after each step that `make_steps(*arguments)` makes; run in a new process.

    Inputs and weights count, but not the memory that it took to make them. A peak never falls:
    order the steps by their need. `warm_up(*arguments)` runs first, uncounted, to load libraries.
    """
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        # Freed blocks go back at once, so that holes in the heap do not count as needed memory.
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
    """Return the peak in bytes. On Linux getrusage's includes the parent's, VmHWM does not."""
    if device == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    if kilobytes := _proc("self/status", "VmHWM"):
        return 1024 * float(kilobytes.split()[0])
    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def free_bytes(device: str) -> float:
    """Return the bytes that a new contestant could allocate; inf if the system does not tell."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return 1024 * float((_proc("meminfo", "MemAvailable") or "inf").split()[0])
