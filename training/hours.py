"""How long a model takes on a GPU that need not be here.

The attention as `scripts/gpu_check.sh` measured it, where that has run on such a GPU; everything
else by the estimate of devices.toml: products, attention and memory traffic one after another.
"""

import functools
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from lssar.mechanisms import Mechanism
from support.files import json_record, lookup
from training.config import Config

RESULTS = Path(__file__).parents[1] / "results"
_DATA = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
ASSUMED = _DATA["assumed"]


@dataclass(frozen=True)
class Device:
    name: str  # a part of what the driver calls it
    flops: float  # the fields of devices.toml
    memory: float
    bandwidth: float
    counts: str

    def moving(self, size: float) -> float:
        """Seconds for a number of bytes."""
        return size / (self.bandwidth * ASSUMED["bandwidth"])


DEVICES = {key: Device(**fields) for key, fields in _DATA["devices"].items()}


def device_called(name: str) -> Device | None:
    return next((device for device in DEVICES.values() if device.name in name), None)


def planned_device(key: str | None, otherwise: str = "a100") -> Device:
    """The one asked for, else the one that is here, else another."""
    import torch  # the names of devices are needed before, by --help

    here = device_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return DEVICES[key] if key else here or DEVICES[otherwise]


def gpu_hours(config: Config, backends: list[str], device: Device, processes: int = 1) -> float:
    """Of training with its validations, on all GPUs together; `backends`: of the layers."""
    model, t, e = model_of(config), config.train, config.eval
    seconds = t.per_token(lambda n: token_seconds(model, backends, device, n, t.compile))
    seconds *= t.steps * t.batch_tokens
    reading = token_seconds(model, backends, device, t.length, t.compile, training=False)
    seconds += -(-t.steps // e.interval) * e.tokens * reading
    stepping = device.moving(ASSUMED["optimiser_bytes"] * model.parameter_count())
    return (seconds + t.steps * processes * stepping) / 3600


def model_of(config: Config):
    """The model without its weights."""
    return _without_weights(config.model_config())


@functools.cache  # a plan asks for the same one hundreds of times
def _without_weights(model_config):
    import torch

    from model import GPT

    with torch.device("meta"):
        return GPT(model_config)


def token_seconds(model, backends, device, length, compiled=True, training=True) -> float:
    """Of one token in a sequence of `length`: its part of a training step or of a forward pass."""
    m, dense = model.config, model.flops_per_token(0)
    moved = ASSUMED["block_bytes"] * m.layers * m.width * (1 if compiled else ASSUMED["uncompiled"])
    moved += 0 if m.outputs else ASSUMED["head_bytes"] * m.channels * m.vocab_rows
    seconds = dense / (device.flops * ASSUMED["products"]) + device.moving(moved)
    attention = sum(
        attention_seconds(m, mechanism, backend, device, length, training)
        for (mechanism, _), backend in zip(m.all_layers, backends, strict=True)
    )
    return (1 if training else 1 / 3) * seconds + attention


def attention_seconds(
    m, mechanism: Mechanism, backend: str, device: Device, length: int, training: bool
) -> float:
    """Of one token in one layer of the model `m`."""
    share, window = 1 if training else 1 / 3, min(mechanism.window or length, length)
    seen = window * (1 - window / (2 * length))  # keys, on average
    scores = m.heads * 2 * seen  # of a square, of which causal rows are half
    if found := measured(device).get((mechanism.name, backend, training)):
        return scores * found[min(found, key=lambda known: abs(known - length))]
    if backend in ("eager", "rowblock"):
        stages = "two_stage" if mechanism.sharpened else "one_stage"
        kind = "softmax" if mechanism.name == "softmax" else stages
        return share * device.moving(scores * _DATA["map_bytes"][kind])
    ratio = 1.0 if backend == "sdpa" else counted_ratio(mechanism, device, m.head_dim, training)
    return share * 12 * m.width * seen * ratio / (device.flops * ASSUMED["flash"])


def counted_ratio(mechanism: Mechanism, device: Device, head_dim: int, training: bool) -> float:
    """Time of the Triton kernel relative to flash softmax, from the instructions it compiles to."""
    rows = _DATA["counts"]
    row = rows["two_stage"] if mechanism.sharpened else rows.get(mechanism.phi, rows["other"])
    phase = "forward+backward" if training else "forward"
    return counts()[row, f"{phase}, D={64 if head_dim <= 64 else 128}, {device.counts}"]


@functools.cache
def counts() -> dict[tuple[str, str], float]:
    with json_record(RESULTS / "triton_counts.json") as found:
        ratios = [r for r in found["records"] if r["quantity"] == "ratio"]
        return {(r["run"], r["variant"]): r["value"] for r in ratios}


QUANTITIES = {"forward_ms": False, "forward_backward_ms": True}  # whether in training


@functools.cache
def measured(device: Device) -> dict[tuple[str, str, bool], dict[int, float]]:
    """(mechanism, backend, training) -> seconds per score by length, if gpu_check ran on one."""
    path, found = RESULTS / "gpu_check.json", defaultdict(dict)
    if device.name not in (lookup(path, "machine", "name") or ""):
        return found
    with json_record(path) as check:
        for result in (row["result"] for row in check["checks"] if "result" in row):
            s, runs = result["settings"], result["runs"]
            for r in result["records"]:
                backend, *others = r["variant"].split(", ")
                if r["quantity"] in QUANTITIES and len(others) < 3:  # a third: not full rows
                    name, training = runs[r["run"]]["attention"]["name"], QUANTITIES[r["quantity"]]
                    scores = s["batch"] * s["heads"] * r["length"] ** 2
                    found[name, backend, training][r["length"]] = r["value"] / 1000 / scores
    return found


def source(device: Device) -> str:
    """Where the hours come from, for a reader."""
    seen = "attention measured by gpu_check, the rest estimated"
    return seen if measured(device) else "estimated, not run on hardware"
