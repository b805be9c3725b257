"""What a run will take: memory, time and arithmetic, before anything starts."""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from data.loader import Batches
from lssar.backends import BACKENDS, Call, choose_backend
from lssar.errors import UserError
from lssar.mechanisms import Mechanism
from lssar.reference import resolve
from model import ModelConfig
from training.config import Config
from training.distributed import World, product_type
from training.hours import device_called, gpu_hours, model_of, planned_device, source
from training.losses import CHUNK_LOGITS

GIB = 2**30


class BatchPlan(NamedTuple):
    """How one optimiser step is split: sequences = world_size * accumulation * micro_batch."""

    sequences: int
    world_size: int
    accumulation: int
    micro_batch: int


def batch_plan(config: Config, world_size: int = 1) -> BatchPlan:
    """The accumulation that makes exactly train.batch_tokens, or an error with the numbers."""
    t, micro_batch = config.train, config.micro_batch
    if t.batch_tokens % t.length:
        nearest = max(1, round(t.batch_tokens / t.length)) * t.length
        what = f"train.batch_tokens = {t.batch_tokens} is not a multiple of length = {t.length}"
        raise UserError(f"{what}; nearest: {nearest}")
    sequences = t.batch_tokens // t.length
    step = f"{sequences} sequences per step ({t.batch_tokens} tokens / {t.length})"
    if sequences % world_size:
        can = f"nearest number that can: {_nearest_divisor(sequences, world_size)}"
        raise UserError(f"{step} cannot be shared by {world_size} processes; {can}")
    share = sequences // world_size
    if share % micro_batch:
        does = f"nearest that does: {_nearest_divisor(share, t.micro_batch)}"
        each = f"{share} of the {step} for each of {world_size} processes"
        raise UserError(f"train.micro_batch = {t.micro_batch} does not divide {each}; {does}")
    return BatchPlan(sequences, world_size, share // micro_batch, micro_batch)


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: abs(d - wanted))


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, None when it is not in the table."""
    known = device_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known and known.flops


class Estimate(NamedTuple):
    """For one process of a run."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, int]  # bytes by use


def estimate(config: Config, backends: list[str], device: str = "cuda") -> Estimate:
    """What the run takes if these compute the attention of its layers."""
    model, t = model_of(config), config.train
    m = model.config
    rows, parameters = config.micro_batch * t.length, model.parameter_count()
    half = product_type(device, t.precision).itemsize  # bytes of an activation under autocast
    # Maps of B x H x L x L floats that eager keeps for the backward pass, three for a two-stage
    # mechanism (stage one, its shift, its power). The other backends recompute them.
    layers = zip(m.all_layers, backends, strict=True)
    maps = sum(2 + layer.attention.sharpened for layer, name in layers if name == "eager")
    chunk = CHUNK_LOGITS.get(device, CHUNK_LOGITS["default"])
    head = min(rows * m.vocab_rows, chunk) * (4 + half) + 4 * m.channels * m.vocab_rows * m.width
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    memory = {
        # Weights, gradients and two moments, of which Muon has one.
        "state": 16 * parameters - (4 * matrices if t.optimiser == "muon" else 0),
        # Per block: norms (fp32 in and out), q k v before and after RoPE, out, the MLP's two.
        "activations": rows * m.width * m.layers * (4 * 4 + half * (2 * 3 + 1 + 2 * 4 + 2)),
        "attention maps": 4 * maps * m.heads * rows * max(t.length, t.long_length),
        "head": 0 if m.outputs else head,
    }
    tokens = t.steps * t.batch_tokens
    flops = t.per_token(model.flops_per_token) * tokens
    return Estimate(parameters, tokens, flops, memory)


def checkpoint_bytes(config: Config, e: Estimate) -> float:
    """Weights and AdamW's moments, in the newest checkpoints and the best."""
    return 12.0 * e.parameters * (config.checkpoint.keep + 1)


def disk_line(checkpoints: float, data: float = 0) -> str:
    """What is to be written beside what is free here."""
    free = shutil.disk_usage(".").free
    written = f"{checkpoints / GIB:,.1f} GiB of checkpoints"
    written += f", {data / GIB:,.2f} GiB of data" if data else ""
    short = "" if checkpoints + data < free else "; too little: make room before starting"
    return f"{written}; {free / GIB:,.0f} GiB are free{short}"


CARDS = (24, 40, 80)  # GB of common GPUs
REMEDIES = {  # where one sequence is too much, by what takes most of the memory
    "state": "lower model.width or model.layers",
    "activations": "lower train.length, model.width or model.layers",
    "attention maps": "leave attention.backend at auto, or lower train.length",
    "head": "lower train.length or model.vocab_rows",
}
ROOM = 0.9  # of the free memory that an estimate may fill


def free_memory(device: torch.device) -> int:
    """Bytes for this process: of its GPU, or its share of the main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, info = main_memory() // 2, Path("/proc/meminfo")
    if info.exists():
        free = 1024 * int(info.read_text().split("MemAvailable:")[1].split()[0])
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fit(config: Config, world_size: int, free: float, device: str, most: int = 0) -> Config | None:
    """With the largest micro-batch that fits `free` bytes: a power of two, or `most` and its
    halves; None if even the smallest is too much."""
    share = batch_plan(config.with_micro_batch(1), world_size).accumulation
    sequences = most if most and share % most == 0 else share & -share
    while sequences and sequences % config.train.least_micro_batch == 0:
        fitted = config.with_micro_batch(sequences)
        e = estimate(fitted, planned_backends(fitted, device), device)
        if sum(e.memory.values()) <= ROOM * free:
            return fitted
        sequences //= 2
    return None


def choose_micro_batch(config: Config, world: World, before: int, say: Callable) -> Config:
    """For the rank with the least memory: that of `before`, the run's own so far, if it fits."""
    free = int(min(world.gather(torch.tensor(free_memory(world.device)))))
    fitted = fit(config, world.size, free, world.device.type, before)
    chosen = fitted or config.with_micro_batch(1)
    fits = "fits" if fitted else "is the smallest there is and may not fit"
    what = f"train.micro_batch = {chosen.micro_batch} (auto) {fits}"
    say(f"memory     {what} the {free / GIB:,.1f} GiB free per process")
    return chosen


def on_cards(config: Config, world_size: int) -> str:
    """What fits common GPUs, and what to do where it does not."""
    asked, parts, none = config.train.micro_batch, [], ""
    for card in CARDS:
        # Driver and context take a part of what the card is sold with.
        fitted = fit(config, world_size, (card - 1) * GIB, "cuda")
        what = "too small"
        if fitted is not None and (asked == "auto" or asked <= fitted.micro_batch):
            what = f"micro-batch {'' if asked == 'auto' else 'up to '}{fitted.micro_batch}"
        elif fitted is not None:
            auto = "" if config.train.long_length else " or auto"
            what = f"too small; --train.micro_batch={fitted.micro_batch}{auto}"
        else:
            one = config.with_micro_batch(1)
            memory = estimate(one, planned_backends(one, "cuda")).memory
            none = f"; {REMEDIES[max(memory, key=memory.get)]}"
        parts.append(f"{card} GB: {what}")
    return ", ".join(parts) + none


def refuse_too_large(config: Config, device: torch.device) -> None:
    """One line instead of running out of memory while the weights are initialised."""
    m = config.model_config()
    parameters = m.vocab_rows * m.width + 12 * m.layers * m.width**2  # without norms and biases
    # Weights are initialised in main memory; on a CPU gradients and moments are there too.
    needed = parameters * (16 if device.type == "cpu" else 4)
    if needed > (there := main_memory()):
        takes = f"{parameters:,} parameters takes {needed / GIB:,.0f} GiB of main memory"
        sizes = f"model.width ({m.width}), model.layers ({m.layers})"
        remedy = f"lower {sizes} or model.vocab_rows ({m.vocab_rows})"
        raise UserError(f"a model of {takes}, this machine has {there / GIB:,.0f}; {remedy}")


def attention_calls(config: Config, device: str) -> Iterator[tuple[Mechanism, Call]]:
    """What training asks of the attention in each layer, in its longest sequences."""
    m, t = config.model_config(), config.train
    length = max(t.length, t.long_length)
    entries = config.micro_batch * m.heads * t.length * length  # as many tokens at any length
    call = Call(device, product_type(device, t.precision), entries, m.head_dim, compiled=t.compile)
    for attention, positions in m.all_layers:
        spans = m.documents or (attention.window or length) < length
        here = replace(call, spans=spans, decays=positions in ("alibi", "fox"))
        yield resolve(attention, length), here


def planned_backends(config: Config, device: str, *, everywhere: bool = True) -> list[str]:
    """The attention backend of each layer in training; `everywhere`: as if all were installed."""
    if config.attention.backend != "auto":
        return [config.attention.backend] * config.model_config().layers
    calls = attention_calls(config, device)
    return [choose_backend(m, call, everywhere=everywhere) for m, call in calls]


def refuse_backend(config: Config, device: str) -> None:
    """What the first step would be refused for."""
    name = config.attention.backend
    one = config.with_micro_batch(1)  # it may be "auto", and no backend asks how large it is
    for m, call in attention_calls(one, device) if name != "auto" else ():
        if reason := BACKENDS[name].refuses(m, call):
            other = "; --device cpu plans for a CPU" if name == "cpu" else ""
            raise UserError(f"attention.backend = {name!r} cannot compute this: {reason}{other}")


def described_layers(m: ModelConfig) -> str:
    """`lssar (p = 15)`, or each kind of layer after the numbers of those that are of it."""
    kinds: dict[str, list[str]] = {}
    for number, (attention, positions) in enumerate(m.all_layers, start=1):
        p = f" (p = {attention.p:g})" if attention.sharpened else ""
        place = "" if m.positions == positions == "rope" else f", positions {positions}"
        window = f", window {attention.window}" if attention.window else ""
        shift = ", shifted keys" if m.shifts(number - 1) else ""
        kinds.setdefault(f"{attention.name}{p}{place}{window}{shift}", []).append(str(number))
    if len(kinds) == 1:
        return next(iter(kinds))
    shown = []
    for kind, found in kinds.items():
        shown.append(f"{'layers' if len(found) > 1 else 'layer'} {', '.join(found)}: {kind}")
    return "; ".join(shown)


def summary(config: Config, processes: int, device: str, planned=False, gpu=None) -> list[str]:
    """What a run prints before its first step; `planned`: for a device that need not be here,
    a GPU of the kind `gpu` where it is one."""
    plan = batch_plan(config, processes)
    # A planned GPU need not be this machine's, a CPU is.
    backends = planned_backends(config, device, everywhere=planned and device == "cuda")
    e, t, m = estimate(config, backends, device), config.train, config.model_config()
    chosen = ", ".join(dict.fromkeys(backends))
    plans = f", planned for {device}: backend {chosen}" if planned else ""
    memory = ", ".join(f"{use} {size / GIB:,.2f}" for use, size in e.memory.items())
    lengths = f"{t.length} tokens"
    if t.long_length:
        lengths += f"; 1 step in {t.long_interval} at length {t.long_length}"
    ranks = "1 process" if processes == 1 else f"{processes} processes"
    hours = f" = {hours_line(config, backends, e, processes, gpu)}" if device == "cuda" else ""
    return [
        f"model      {m.layers} layers, {m.heads} heads, width {m.width}: "
        f"{e.parameters:,} parameters",
        f"attention  {described_layers(m)}{plans}",
        f"batch      {t.batch_tokens:,} tokens per step = {ranks} x "
        f"{plan.accumulation} accumulation x {plan.micro_batch} sequences x {lengths}",
        f"schedule   {t.steps:,} steps = {e.tokens:,} tokens, lr {t.lr:g} {t.schedule}, "
        f"{t.warmup} warm-up",
        f"memory     about {sum(e.memory.values()) / GIB:,.2f} GiB per process: {memory}",
        f"work       {e.flops:.2e} FLOPs{hours}",
    ]


def hours_line(config: Config, backends: list[str], e: Estimate, processes: int, gpu) -> str:
    device = planned_device(gpu)
    hours = gpu_hours(config, backends, device, processes)
    took = f"{hours:,.2f} {device.name}-hours with validation"
    took += f", {hours / processes:,.2f} hours on {processes}" if processes > 1 else ""
    return f"{took} ({e.flops / (hours * 3600 * device.flops):.0%} MFU, {source(device)})"


def dry_run(config: Config, world_size: int, device: str, gpu: str | None = None) -> list[str]:
    """The summary for a device that need not be here (a GPU if "auto"), the disk and the data."""
    device = "cuda" if device == "auto" else device
    refuse_backend(config, device)
    t, cards, on_gpu = config.train, on_cards(config, world_size), device == "cuda"
    if t.micro_batch == "auto":
        free = planned_device(gpu).memory * GIB if on_gpu else free_memory(torch.device(device))
        config = fit(config, world_size, free, device) or config.with_micro_batch(1)
    lines = summary(config, world_size, device, planned=True, gpu=gpu)
    e = estimate(config, planned_backends(config, device), device)
    lines += [f"GPUs       {cards}", f"disk       {disk_line(checkpoint_bytes(config, e))}"]
    directory = Path(config.data.directory)
    if not directory.exists():
        command = config.data_ends()["command"]
        return [*lines, f"data       {directory} is not there yet; {command} makes it"]
    data = Batches(config, batch_plan(config, world_size))
    tokens, validation = data.train_set.total_tokens, data.val_set.total_tokens
    found = f"{tokens:,} training tokens ({t.steps * t.batch_tokens / tokens:.3f} epochs)"
    return [*lines, f"data       {directory}: {found}, {validation:,} for validation"]
