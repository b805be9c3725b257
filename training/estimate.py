"""Estimates before a run what it takes: parameters, FLOPs, memory, disk and GPU-hours."""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from lssar.arguments import resolve
from lssar.backends import BACKENDS, Call, choose_backend
from lssar.errors import UserError
from lssar.mechanisms import Mechanism
from modelling.config import ModelConfig
from modelling.losses import CHUNK_LOGITS
from training.batch_plan import batch_plan
from training.config import Config
from training.distributed import World, product_type
from training.gpus import GPUS, UTILISATION, Gpu, gpu_called, gpu_hours

__all__ = ["UTILISATION", "estimate", "gpu_hours"]

GIB = 2**30


@functools.cache
def model_without_weights(model_type: type[nn.Module], m: ModelConfig) -> nn.Module:
    """Make a model on PyTorch's meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return model_type(m)


def flops_per_token(model: nn.Module, length: int) -> float:
    """Count the FLOPs of a training step per token in sequences of `length`.

    6 per weight of a product, and what attention sees: the causal half, or less through a window.
    """
    seen = 0.0  # keys per token
    for layer in model.config.all_layers:
        window = min(layer.attention.window or length, length)
        seen += window * (1 - window / max(2 * length, 1))
    return 6 * model.weights_per_token() + 12 * model.config.width * seen


class Estimate(NamedTuple):
    """Says what a run takes: tokens and FLOPs of all processes, memory of one."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, int]  # bytes by use


def estimate(config: Config, backends: list[str], device: str = "cuda") -> Estimate:
    """Estimate the run if `backends` compute the attention of its layers."""
    m = config.model_config()
    t = config.train
    model = model_without_weights(config.model_type, m)
    rows = config.micro_batch * t.length
    parameters = model.parameter_count()
    half = product_type(device, t.precision).itemsize  # bytes of an activation under autocast
    # Maps of B x H x L x L floats that eager keeps for the backward pass, three for a two-stage
    # mechanism (stage one, its shift, its power). The other backends recompute them.
    layers = zip(m.all_layers, backends, strict=True)
    maps = sum(2 + layer.attention.sharpened for layer, name in layers if name == "eager")
    chunk = CHUNK_LOGITS.get(device, CHUNK_LOGITS["default"])
    # Logits, and the gradient of the head's weight.
    head = min(rows * m.head_rows, chunk) * (4 + half) + 4 * m.head_rows * m.width
    state = 16 * parameters  # weights, gradients and two moments
    if t.optimiser == "muon":  # one moment where it is used: for the matrices of blocks
        state -= 4 * sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    memory = {
        "state": state,
        # Per block: norms (fp32 in and out), q k v before and after RoPE, out, the MLP's two.
        "activations": rows * m.width * m.layers * (4 * 4 + half * (2 * 3 + 1 + 2 * 4 + 2)),
        "attention maps": 4 * maps * m.heads * rows * max(t.length, t.long_length),
        "head": head,
    }
    tokens = t.steps * t.batch_tokens
    flops = tokens * t.per_token(functools.partial(flops_per_token, model))
    return Estimate(parameters, tokens, flops, memory)


def checkpoint_bytes(config: Config, e: Estimate) -> float:
    """Count weights and AdamW's moments, in the newest checkpoints and the best."""
    return 12.0 * e.parameters * (config.checkpoint.keep + 1)


def disk_line(checkpoints: float, data: float = 0) -> str:
    """Say how much will be written, and how much space is free."""
    free = shutil.disk_usage(".").free
    written = f"{checkpoints / GIB:,.1f} GiB of checkpoints"
    if data:
        written += f", {data / GIB:,.2f} GiB of data"
    short = "" if checkpoints + data < free else "; too little: make room before starting"
    return f"{written}; {free / GIB:,.0f} GiB are free{short}"


CARDS = (24, 40, 80)  # GB of common GPUs
REMEDIES = {  # where one sequence is too much, by the largest use of memory
    "state": "lower model.width or model.layers",
    "activations": "lower train.length, model.width or model.layers",
    "attention maps": "leave attention.backend at auto, or lower train.length",
    "head": "lower train.length or model.vocab_rows",
}
ROOM = 0.9  # of the free memory that an estimate may fill


def free_memory(device: torch.device) -> int:
    """Return the bytes for this process: of its GPU, or its share of the main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = main_memory() // 2
    info = Path("/proc/meminfo")
    if info.exists():
        free = 1024 * int(info.read_text().split("MemAvailable:")[1].split()[0])
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fit(config: Config, world_size: int, free: float, device: str, most: int = 0) -> Config | None:
    """Choose the largest micro-batch that fits `free` bytes.

    It is a power of two, or `most` or one of its halves. None: even the smallest is too much.
    """
    share = batch_plan(config.with_micro_batch(1), world_size).accumulation
    largest_power = share & -share
    sequences = most if most and share % most == 0 else largest_power
    while sequences and sequences % config.train.least_micro_batch == 0:
        fitted = config.with_micro_batch(sequences)
        e = estimate(fitted, planned_backends(fitted, device), device)
        if sum(e.memory.values()) <= ROOM * free:
            return fitted
        sequences //= 2
    return None


def choose_micro_batch(config: Config, world: World, before: int, say: Callable) -> Config:
    """Choose for the rank with the least memory; if `before` fits, which the run had, keep it."""
    free = int(min(world.gather(torch.tensor(free_memory(world.device)))))
    fitted = fit(config, world.size, free, world.device.type, before)
    chosen = fitted or config.with_micro_batch(1)
    fits = "fits" if fitted else "is the smallest there is and may not fit"
    say(
        f"memory     train.micro_batch = {chosen.micro_batch} (auto) {fits} "
        f"the {free / GIB:,.1f} GiB free per process"
    )
    return chosen


def on_cards(config: Config, world_size: int) -> str:
    """Say what fits common GPUs, and what to do where it does not."""
    asked = config.train.micro_batch
    parts = []
    remedy = ""
    for card in CARDS:
        # Driver and context take a part of what the card is sold with.
        fitted = fit(config, world_size, (card - 1) * GIB, "cuda")
        if fitted is None:
            one = config.with_micro_batch(1)
            memory = estimate(one, planned_backends(one, "cuda")).memory
            remedy = f"; {REMEDIES[max(memory, key=memory.get)]}"
            parts.append(f"{card} GB: too small")
        elif asked == "auto":
            parts.append(f"{card} GB: micro-batch {fitted.micro_batch}")
        elif asked <= fitted.micro_batch:
            parts.append(f"{card} GB: micro-batch up to {fitted.micro_batch}")
        else:
            auto = "" if config.train.long_length else " or auto"
            parts.append(f"{card} GB: too small; --train.micro_batch={fitted.micro_batch}{auto}")
    return ", ".join(parts) + remedy


def refuse_too_large(config: Config, device: torch.device) -> None:
    """Refuse in one line a model whose weights would not fit while they are initialised."""
    m = config.model_config()
    parameters = m.vocab_rows * m.width + 12 * m.layers * m.width**2  # without norms and biases
    # Weights are initialised in main memory; on a CPU gradients and moments are there too.
    needed = parameters * (16 if device.type == "cpu" else 4)
    there = main_memory()
    if needed > there:
        raise UserError(
            f"a model of {parameters:,} parameters takes {needed / GIB:,.0f} GiB of main memory, "
            f"this machine has {there / GIB:,.0f}; lower model.width ({m.width}), model.layers "
            f"({m.layers}) or model.vocab_rows ({m.vocab_rows})"
        )


def attention_calls(config: Config, device: str) -> Iterator[tuple[Mechanism, Call]]:
    """Yield the mechanism and the call of each layer, in the longest sequences of training."""
    m = config.model_config()
    t = config.train
    length = max(t.length, t.long_length)
    entries = config.micro_batch * m.heads * t.length * length  # as many tokens at any length
    call = Call(device, product_type(device, t.precision), entries, m.head_dim, compiled=t.compile)
    for layer in m.all_layers:
        spans = m.documents or (layer.attention.window or length) < length
        decays = layer.positions in ("alibi", "fox")
        yield resolve(layer.attention, length), call._replace(spans=spans, decays=decays)


def planned_backends(config: Config, device: str, *, everywhere: bool = True) -> list[str]:
    """Return the attention backend of each layer; `everywhere`: as if all were installed."""
    if config.attention.backend != "auto":
        return [config.attention.backend] * config.model_config().layers
    calls = attention_calls(config, device)
    return [choose_backend(m, call, everywhere=everywhere) for m, call in calls]


def refuse_backend(config: Config, device: str) -> None:
    """Refuse a backend that cannot compute the attention, before the first step does."""
    name = config.attention.backend
    if name == "auto":
        return
    one = config.with_micro_batch(1)  # it may be "auto", and no backend asks how large it is
    for m, call in attention_calls(one, device):
        if reason := BACKENDS[name].refuses(m, call):
            other = "; --device cpu plans for a CPU" if name == "cpu" else ""
            raise UserError(f"attention.backend = {name!r} cannot compute this: {reason}{other}")


def described_layers(m: ModelConfig) -> str:
    """Return `lssar (p = 15)`, or each kind of layer after the numbers of those layers."""
    kinds: dict[str, list[str]] = {}
    for number, layer in enumerate(m.all_layers, start=1):
        text = layer.attention.name
        if layer.attention.sharpened:
            text += f" (p = {layer.attention.p:g})"
        if (m.positions, layer.positions) != ("rope", "rope"):
            text += f", positions {layer.positions}"
        if layer.attention.window:
            text += f", window {layer.attention.window}"
        if layer.shift:
            text += ", shifted keys"
        kinds.setdefault(text, []).append(str(number))
    if len(kinds) == 1:
        return next(iter(kinds))
    shown = []
    for kind, found in kinds.items():
        shown.append(f"{'layers' if len(found) > 1 else 'layer'} {', '.join(found)}: {kind}")
    return "; ".join(shown)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak, None when it is not in the table."""
    if device.type != "cuda":
        return None
    gpu = gpu_called(torch.cuda.get_device_name(device))
    return None if gpu is None else GPUS[gpu].flops


def planned_gpu(name: str | None) -> Gpu:
    """Return the GPU asked for, else the one that is here, else an A100."""
    if name is None and torch.cuda.is_available():
        name = gpu_called(torch.cuda.get_device_name())
    return GPUS[name or "a100"]


def summary(config: Config, processes: int, device: str, planned=False) -> list[str]:
    """Return the lines that a run prints first; `planned`: the device need not be here."""
    plan = batch_plan(config, processes)
    # A planned GPU need not be this machine's, a CPU is.
    backends = planned_backends(config, device, everywhere=planned and device == "cuda")
    e = estimate(config, backends, device)
    t = config.train
    m = config.model_config()
    chosen = ", ".join(dict.fromkeys(backends))
    plans = f", planned for {device}: backend {chosen}" if planned else ""
    memory = ", ".join(f"{use} {size / GIB:,.2f}" for use, size in e.memory.items())
    lengths = f"{t.length} tokens"
    if t.long_length:
        lengths += f"; 1 step in {t.long_interval} at length {t.long_length}"
    ranks = "1 process" if processes == 1 else f"{processes} processes"
    return [
        f"model      {m.layers} layers, {m.heads} heads, width {m.width}: "
        f"{e.parameters:,} parameters",
        f"attention  {described_layers(m)}{plans}",
        f"batch      {t.batch_tokens:,} tokens per step = {ranks} x "
        f"{plan.accumulation} accumulation x {plan.micro_batch} sequences x {lengths}",
        f"schedule   {t.steps:,} steps = {e.tokens:,} tokens, lr {t.lr:g} {t.schedule}, "
        f"{t.warmup} warm-up",
        f"memory     about {sum(e.memory.values()) / GIB:,.2f} GiB per process: {memory}",
        f"work       {e.flops:.2e} FLOPs",
    ]


def dry_run(config: Config, world_size: int, device: str, gpu: str | None = None) -> list[str]:
    """Plan for a device that need not be here, a GPU if "auto": the summary, disk and data."""
    device = "cuda" if device == "auto" else device
    refuse_backend(config, device)
    t = config.train
    cards = on_cards(config, world_size)
    card = planned_gpu(gpu)
    if t.micro_batch == "auto":
        on_gpu = device == "cuda"
        free = card.memory * GIB if on_gpu else free_memory(torch.device(device))
        config = fit(config, world_size, free, device) or config.with_micro_batch(1)
    lines = summary(config, world_size, device, planned=True)
    e = estimate(config, planned_backends(config, device), device)
    hours = gpu_hours(e.flops, card.key)
    shared = f", {hours / world_size:,.2f} hours on {world_size}" if world_size > 1 else ""
    lines += [
        f"time       {hours:,.2f} {card.name}-hours at {UTILISATION:.0%} of its peak{shared}",
        f"GPUs       {cards}",
        f"disk       {disk_line(checkpoint_bytes(config, e))}",
    ]
    directory = Path(config.data.directory)
    if not directory.exists():
        return [
            *lines,
            f"data       {directory} is not there yet; {config.data_command()} makes it",
        ]
    data = config.make_batches(batch_plan(config, world_size))
    tokens = data.train_set.total_tokens
    epochs = t.steps * t.batch_tokens / tokens
    return [
        *lines,
        f"data       {directory}: {tokens:,} training tokens ({epochs:.3f} epochs), "
        f"{data.val_set.total_tokens:,} for validation",
        *data.notices,
    ]
