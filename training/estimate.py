"""What a run will take: memory, time and arithmetic, before anything starts."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from data.loader import TrainLoader, validation_windows
from data.records import open_data
from lssar.backends import Call, choose_backend
from lssar.errors import UserError
from lssar.reference import resolve
from model import GPT
from training.config import BatchPlan, Config

# Peak dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}
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
    parameters: int
    tokens: int
    flops: float
    state_bytes: float  # weights, gradients, AdamW's two moments
    activation_bytes: float
    logits_bytes: float
    attention_bytes: float  # attention maps; 0 where a fused or row-block backend keeps none

    @property
    def memory(self) -> float:
        return self.state_bytes + self.activation_bytes + self.logits_bytes + self.attention_bytes

    @property
    def gpu_hours(self) -> float:
        return self.flops / (PEAK_FLOPS[ASSUMED_DEVICE] * ASSUMED_MFU) / 3600


# Maps of B x H x L x L floats that eager training keeps for the backward pass: none where the
# backend recomputes, three for a two-stage mechanism (stage one, its shift, its power).
def _kept_maps(config: Config, backend: str) -> int:
    if backend != "eager":
        return 0
    return 3 if config.mechanism().sharpened else 2


def estimate(config: Config, backend: str) -> Estimate:
    """For one process of the run; `backend` is the attention backend that it will use."""
    with torch.device("meta"):
        model = GPT(config.model_config())
    m, t = model.config, config.train
    rows = t.micro_batch * t.length
    parameters = model.parameter_count()
    half = 2 if t.precision != "fp32" else 4  # bytes of an activation under autocast
    # A block keeps: norms (fp32 in and out), q k v before and after RoPE, out, and the MLP's two.
    activations = rows * m.width * m.layers * (4 * 4 + half * (2 * 3 + 1 + 2 * 4 + 2))
    return Estimate(
        parameters=parameters,
        tokens=t.steps * t.batch_tokens,
        flops=model.flops_per_token(t.length) * t.steps * t.batch_tokens,
        state_bytes=16 * parameters,
        activation_bytes=activations,
        logits_bytes=0
        if m.outputs
        else min(rows * m.vocab_rows, 2**28) * (4 + half) + 4 * m.channels * m.vocab_rows * m.width,
        attention_bytes=4
        * _kept_maps(config, backend)
        * m.layers
        * m.heads
        * t.micro_batch
        * t.length**2,
    )


def refuse_too_large(config: Config, device: torch.device) -> None:
    """One line instead of a failed allocation, or of being killed, while the weights are drawn."""
    m = config.model_config()
    parameters = m.vocab_rows * m.width + 12 * m.layers * m.width**2  # but for the norms
    # The weights are drawn in main memory; only on a CPU gradients and moments stay there too.
    needed = parameters * (16 if device.type == "cpu" else 4)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UserError(
            f"a model of {parameters:,} parameters takes {needed / GIB:,.0f} GiB of main memory, "
            f"this machine has {there / GIB:,.0f}; lower model.width ({m.width}), model.layers "
            f"({m.layers}) or model.vocab_rows ({m.vocab_rows})"
        )


def planned_backend(config: Config, device: str, *, everywhere: bool = True) -> str:
    """The attention backend of the training step; `everywhere`: as if all were installed."""
    if config.attention.backend != "auto":
        return config.attention.backend
    m, t = config.model_config(), config.train
    fp32 = t.precision == "fp32" or (t.precision == "auto" and device != "cuda")
    call = Call(
        device=device,
        dtype=torch.float32 if fp32 else torch.bfloat16,
        entries=t.micro_batch * m.heads * t.length**2,
        head_dim=m.head_dim,
        compiled=t.compile,
    )
    return choose_backend(resolve(m.attention, t.length), call, everywhere=everywhere)


def summary(
    config: Config, plan: BatchPlan, device: torch.device, *, planned: bool = False
) -> list[str]:
    """The lines that a run shows before its first step, whose attention then names its backend.

    `planned`: for a device that need not be here, with the backend that it would take.
    """
    backend = planned_backend(config, device.type, everywhere=planned)
    e, t, m = estimate(config, backend), config.train, config.model_config()
    p = f" (p = {m.attention.p:g})" if m.attention.sharpened else ""
    plans = f", planned for {device.type}: backend {backend}" if planned else ""
    return [
        f"model      {m.layers} layers, {m.heads} heads, width {m.width}: "
        f"{e.parameters:,} parameters",
        f"attention  {m.attention.name}{p}{plans}",
        f"batch      {t.batch_tokens:,} tokens a step = {plan.world_size} processes x "
        f"{plan.accumulation} accumulation x {plan.micro_batch} sequences x {t.length} tokens",
        f"schedule   {t.steps:,} steps = {e.tokens:,} tokens, lr {t.lr:g} {t.schedule}, "
        f"{t.warmup} warm-up",
        f"memory     about {e.memory / GIB:,.2f} GiB a process: state {e.state_bytes / GIB:,.2f}, "
        f"activations {e.activation_bytes / GIB:,.2f}, attention maps "
        f"{e.attention_bytes / GIB:,.2f}, head {e.logits_bytes / GIB:,.2f}",
        f"work       {e.flops:.2e} FLOPs = {e.gpu_hours:,.2f} {ASSUMED_DEVICE}-hours "
        f"at {ASSUMED_MFU:.0%} MFU" + _hours_here(e, plan.world_size, device),
    ]


def _hours_here(e: Estimate, processes: int, device: torch.device) -> str:
    peak = peak_flops(device) if torch.cuda.is_available() else None
    if peak is None:
        return ""
    hours = e.flops / (peak * ASSUMED_MFU * processes) / 3600
    return f", {hours:,.2f} hours on the {processes} GPUs here"


def dry_run(config: Config, world_size: int, device: str) -> list[str]:
    """The summary for a device that need not be here, and the state of the data."""
    plan, t = config.batch_plan(world_size), config.train
    lines = summary(config, plan, torch.device(device), planned=True)
    directory = Path(config.data.directory)
    if not directory.exists():
        return [*lines, f"data       {directory} is not there yet"]
    ends = config.data_ends()
    sets = {split: open_data(directory, split, **ends) for split in ("train", "val")}
    tokens = {split: tokens.total_tokens for split, tokens in sets.items()}
    # Sets that are too small for a batch or a validation are refused as in a run.
    options = {"global_batch": plan.sequences, "micro_batch": plan.micro_batch, "seed": t.seed}
    TrainLoader(sets["train"], length=t.length, world_size=world_size, **options)
    validation_windows(sets["val"], length=t.length, total_tokens=config.eval.tokens, batch=1)
    epochs = t.steps * t.batch_tokens / tokens["train"]
    return [
        *lines,
        f"data       {directory}: {tokens['train']:,} training tokens ({epochs:.3f} epochs), "
        f"{tokens['val']:,} for validation",
    ]
