"""What a run will take: memory, time and arithmetic, before anything starts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data.loader import Batches
from lssar.backends import Call, choose_backend
from lssar.errors import UserError
from lssar.reference import resolve
from model import GPT, ModelConfig
from training.config import BatchPlan, Config

# Peak dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
PEAK_FLOPS |= {"A10G": 70e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12}
ASSUMED_DEVICE, ASSUMED_MFU = "A100", 0.40
GIB = 2**30


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, None when it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


@dataclass(frozen=True)
class Estimate:
    """For one process of a run."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, int]  # bytes by use

    @property
    def gpu_hours(self) -> float:
        return self.flops / (PEAK_FLOPS[ASSUMED_DEVICE] * ASSUMED_MFU) / 3600


def estimate(config: Config, backends: list[str]) -> Estimate:
    """What the run takes if these compute the attention of its layers."""
    with torch.device("meta"):
        model = GPT(config.model_config())
    m, t = model.config, config.train
    rows, parameters = t.micro_batch * t.length, model.parameter_count()
    half = 2 if t.precision != "fp32" else 4  # bytes of an activation under autocast
    # Maps of B x H x L x L floats that eager keeps for the backward pass, three for a two-stage
    # mechanism (stage one, its shift, its power). The other backends recompute them.
    maps = sum(
        3 if layer.attention.sharpened else 2
        for layer, backend in zip(m.all_layers, backends, strict=True)
        if backend == "eager"
    )
    head = min(rows * m.vocab_rows, 2**28) * (4 + half) + 4 * m.channels * m.vocab_rows * m.width
    memory = {
        "state": 16 * parameters,  # weights, gradients, AdamW's two moments
        # Per block: norms (fp32 in and out), q k v before and after RoPE, out, the MLP's two.
        "activations": rows * m.width * m.layers * (4 * 4 + half * (2 * 3 + 1 + 2 * 4 + 2)),
        "attention maps": 4 * maps * m.heads * rows * t.length,
        "head": 0 if m.outputs else head,
    }
    tokens = t.steps * t.batch_tokens
    return Estimate(parameters, tokens, model.flops_per_token(t.length) * tokens, memory)


def refuse_too_large(config: Config, device: torch.device) -> None:
    """One line instead of running out of memory while the weights are initialised."""
    m = config.model_config()
    parameters = m.vocab_rows * m.width + 12 * m.layers * m.width**2  # without norms and biases
    # Weights are initialised in main memory; on a CPU gradients and moments are there too.
    needed = parameters * (16 if device.type == "cpu" else 4)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        takes = f"{parameters:,} parameters takes {needed / GIB:,.0f} GiB of main memory"
        sizes = f"model.width ({m.width}), model.layers ({m.layers})"
        remedy = f"lower {sizes} or model.vocab_rows ({m.vocab_rows})"
        raise UserError(f"a model of {takes}, this machine has {there / GIB:,.0f}; {remedy}")


def planned_backends(config: Config, device: str, *, everywhere: bool = True) -> list[str]:
    """The attention backend of each layer in the training step; `everywhere`: as if all were
    installed."""
    m, t = config.model_config(), config.train
    if config.attention.backend != "auto":
        return [config.attention.backend] * m.layers
    fp32 = t.precision == "fp32" or (t.precision == "auto" and device != "cuda")
    dtype = torch.float32 if fp32 else torch.bfloat16
    entries = t.micro_batch * m.heads * t.length**2
    call = Call(device, dtype, entries, m.head_dim, compiled=t.compile)
    backends = []
    for attention, positions in m.all_layers:
        spans = m.documents or (attention.window or t.length) < t.length
        here = replace(call, spans=spans, decays=positions in ("alibi", "fox"))
        attention = resolve(attention, t.length)
        backends.append(choose_backend(attention, here, everywhere=everywhere))
    return backends


def described_layers(m: ModelConfig) -> str:
    """`lssar (p = 15)`, or each kind of layer after the numbers of those that are of it."""
    kinds: dict[str, list[str]] = {}
    for number, (attention, positions) in enumerate(m.all_layers, start=1):
        p = f" (p = {attention.p:g})" if attention.sharpened else ""
        place = "" if m.positions == positions == "rope" else f", positions {positions}"
        window = f", window {attention.window}" if attention.window else ""
        kinds.setdefault(f"{attention.name}{p}{place}{window}", []).append(str(number))
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"layers {', '.join(found)}: {kind}" for kind, found in kinds.items())


def summary(config: Config, plan: BatchPlan, device: torch.device, planned=False) -> list[str]:
    """What a run prints before its first step; `planned`: for a device that need not be here."""
    backends = planned_backends(config, device.type, everywhere=planned)
    e, t, m = estimate(config, backends), config.train, config.model_config()
    chosen = ", ".join(dict.fromkeys(backends))
    plans = f", planned for {device.type}: backend {chosen}" if planned else ""
    memory = ", ".join(f"{use} {size / GIB:,.2f}" for use, size in e.memory.items())
    hours_here = ""
    if torch.cuda.is_available() and (peak := peak_flops(device)):
        hours = e.flops / (peak * ASSUMED_MFU * plan.world_size) / 3600
        hours_here = f", {hours:,.2f} hours on the {plan.world_size} GPUs here"
    return [
        f"model      {m.layers} layers, {m.heads} heads, width {m.width}: "
        f"{e.parameters:,} parameters",
        f"attention  {described_layers(m)}{plans}",
        f"batch      {t.batch_tokens:,} tokens per step = {plan.world_size} processes x "
        f"{plan.accumulation} accumulation x {plan.micro_batch} sequences x {t.length} tokens",
        f"schedule   {t.steps:,} steps = {e.tokens:,} tokens, lr {t.lr:g} {t.schedule}, "
        f"{t.warmup} warm-up",
        f"memory     about {sum(e.memory.values()) / GIB:,.2f} GiB per process: {memory}",
        f"work       {e.flops:.2e} FLOPs = {e.gpu_hours:,.2f} {ASSUMED_DEVICE}-hours "
        f"at {ASSUMED_MFU:.0%} MFU{hours_here}",
    ]


def dry_run(config: Config, world_size: int, device: str) -> list[str]:
    """The summary for a device that need not be here, and the state of the data."""
    plan, t = config.batch_plan(world_size), config.train
    lines = summary(config, plan, torch.device(device), planned=True)
    directory = Path(config.data.directory)
    if not directory.exists():
        return [*lines, f"data       {directory} is not there yet"]
    data = Batches(config, plan)
    tokens, validation = data.train_set.total_tokens, data.val_set.total_tokens
    found = f"{tokens:,} training tokens ({t.steps * t.batch_tokens / tokens:.3f} epochs)"
    return [*lines, f"data       {directory}: {found}, {validation:,} for validation"]
