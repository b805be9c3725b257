"""What the jobs that are still to be done will take: hours, memory and disk."""

import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from paper.evidence import RUNS, read_runs
from paper.jobs import Job, is_done
from paper.plan import Workspace
from training.config import Config
from training.estimate import GIB, checkpoint_bytes, disk_line, estimate, fit, planned_backends
from training.hours import Device, device_called, gpu_hours, model_of, source, token_seconds

TOKENISED = 400_000  # tokens per second and core, GPT-2's BPE; a cautious estimate


class Cost(NamedTuple):
    """Of a run that is still to be trained."""

    tokens: int
    hours: float  # of a GPU, or of a CPU core
    disk: float  # bytes of checkpoints
    memory: float  # bytes per process
    backends: list[str]  # of the layers
    processes: int


@dataclass(frozen=True)
class Speed:
    """How long runs and evaluations take: as recorded here before, else as estimated."""

    device: Device | None  # None: a core of this CPU
    tokens_per_second: float | None = None  # in training, of a core
    recorded: Mapping[str, dict] = field(default_factory=dict)  # runs by name

    def cost(self, config: Config, processes: int = 1) -> Cost:
        where = "cuda" if self.device else "cpu"
        if config.train.micro_batch == "auto" and self.device:
            fitted = fit(config, processes, self.device.memory * GIB, where)
            config = fitted or config.with_micro_batch(1)
        backends = planned_backends(config, where)
        e, rate = estimate(config, backends, where), self.recorded_rate(config)
        if rate is not None:
            hours = e.tokens * rate / 3600
        elif self.device:
            hours = gpu_hours(config, backends, self.device, processes)
        else:
            hours = e.tokens / self.tokens_per_second / 3600
        disk, memory = checkpoint_bytes(config, e), sum(e.memory.values())
        return Cost(e.tokens, hours, disk, memory, backends, processes)

    def recorded_rate(self, config: Config) -> float | None:
        """Seconds per token of this run with other seeds; on a CPU, which has no estimate, else of
        runs of its size and length."""
        same, alike, wanted = [], [], kind_of(config.log.name, asdict(config))
        for name, run in self.recorded.items():
            gpu, found = device_called(run["device"]), kind_of(name, run["config"])
            if run["seconds"] and (gpu == self.device if self.device else run["device"] == "cpu"):
                rate = run["seconds"] * run.get("processes", 1) / run["tokens"]
                same += [rate] if found == wanted else []
                alike += [rate] if found[1:] == wanted[1:] and not self.device else []
        return statistics.median(same or alike) if same or alike else None

    def reading(self, config: Config, tokens: Mapping[int, float]) -> float:
        """Hours to evaluate the run on so many tokens in sequences of each length."""
        model, cost = model_of(config), self.cost(config)
        if self.device:
            place = (model, cost.backends, self.device)
            seconds = (n * token_seconds(*place, m, training=False) for m, n in tokens.items())
            return sum(seconds) / 3600
        work = sum(n * model.flops_per_token(m) / 3 for m, n in tokens.items())
        return cost.hours * work / (cost.tokens * config.train.per_token(model.flops_per_token))

    def total(self, hours: float, elapsed: float, where: str) -> str:
        name = self.device.name if self.device else "core"
        how = source(self.device) if self.device else "estimated"
        how = f"as recorded, else {how}" if self.recorded else how
        return f"time        {hours:,.1f} {name}-hours ({how}), {elapsed:,.1f} hours on {where}"


def kind_of(name: str, config: dict) -> tuple:
    """A run without its seed, and what its speed depends on most."""
    sizes = map(config["model"].get, ("preset", "layers", "width"))
    return re.sub(r"-s\d+$", "", name), *sizes, config["train"]["length"]


def describe(names: list[str], jobs: list[Job], space: Workspace, device: Device | None) -> str:
    """Runs, tokens, hours, memory and disk of what is still to be done."""
    speed = Speed(device, space.scale.tokens_per_second, read_runs(space.folder / RUNS))
    left, costs = {job.name for job in jobs if not is_done(job)}, {}
    for job in (job for job in jobs if job.trains):
        cost = speed.cost(job.trains, space.processes) if job.name in left else None
        costs[job.trains.log.name] = cost
    sizes = {f"prepare {Path(d).name}": c["tokens"] for d, c in space.scale.corpora.items()}
    tokens = sum(size for name, size in sizes.items() if name in left)
    others = [job for job in jobs if not job.trains and job.name not in sizes]
    todo = [job for job in others if job.name in left]
    reading = [(speed.reading(*job.reads[:2]), job.reads[2]) for job in todo if job.reads]
    taken = reading + [(cost.hours, cost.processes) for cost in costs.values() if cost]
    cores = os.cpu_count() or 1
    preparing = tokens / TOKENISED / cores / 3600
    count, unit = (space.processes, "GPU") if device else (space.parallel, "core")
    elapsed = preparing + sum(h / n for h, n in taken) / (1 if device else space.parallel)
    where = f"{count} {unit}{'s' if count > 1 else ''}"
    lines = [
        f"tables      {', '.join(names)}",
        *training_lines(costs),
        f"evaluations {len(others)}, of which {len(todo)} are still to be made: "
        f"{sum(h for h, _ in reading):,.1f} hours",
        f"data        {tokens:,.0f} tokens to prepare: {preparing:,.1f} hours on {cores} cores"
        f"{', without the download' if device else ''}",
        speed.total(sum(h for h, _ in taken), elapsed, where),
        *room_lines(costs, 2 * tokens, device),
    ]
    return "\n".join(lines)


def training_lines(costs: dict[str, Cost | None]) -> list[str]:
    """What the runs take; None is a finished run."""
    left = [cost for cost in costs.values() if cost]
    wide = max(map(len, costs), default=0)
    lines = [f"runs        {len(costs)}, of which {len(left)} are still to be trained"]
    for name, cost in costs.items():
        shown = "done"
        if cost:
            backends = ", ".join(dict.fromkeys(cost.backends))
            shown = f"{cost.tokens:>15,} tokens  {backends:8s} {cost.hours:8.2f} h"
        lines.append(f"  {name:{wide}s} {shown}")
    total = f"{sum(c.tokens for c in left):,}, {sum(c.hours for c in left):,.1f} hours of training"
    return [*lines, f"tokens      {total}"]


def room_lines(costs: dict[str, Cost | None], data: float, device: Device | None) -> list[str]:
    """Memory and disk that are needed beside those that are there."""
    left = [cost for cost in costs.values() if cost]
    lines = []
    if device and left:
        memory = max(c.memory for c in left) / GIB
        short = "" if memory < device.memory else "; too little: lower train.micro_batch"
        there = f"{device.memory:g} GiB of one {device.name}"
        lines.append(f"memory      at most {memory:,.1f} of the {there}{short}")
    return [*lines, f"disk        {disk_line(sum(c.disk for c in left), data)}"]
