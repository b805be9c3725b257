"""Made-up measurements in the schema of `evaluating/results.py`, for tests of tables and page."""

import json
import random
from pathlib import Path

from evaluating.results import AS_TRAINED
from support import plots

LENGTHS = [128, 256, 512, 1024, 2048]
WINDOW = "window=128"
CURVES = {
    "softmax": [1.66, 1.75, 2.02, 2.41, 2.77],
    "ssmax": [1.67, 1.74, 1.99, 2.33, 2.67],
    "lssa": [1.69, 1.92, 2.41, 2.95, 3.40],
    "lssar-p3": [1.67, 1.85, 2.29, 2.81, 3.25],
    "lssar-p15": [1.69, 1.70, 1.76, 1.88, 2.01],
}
ATTENTION = {"lssar-p3": "lssar", "lssar-p15": "lssar"}


def write(path: Path, value) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def record(quantity: str, value: float | None, **fields) -> dict:
    return {"quantity": quantity, "run": "id", "value": value} | fields


def results(path: Path, name: str, seed: int | None, records: list[dict], **fields) -> Path:
    """A results file of one run."""
    model = {"attention": {"name": fields.pop("attention", name)}}
    run = {"run": name, "seed": seed, "train_length": 128, "model": model}
    whole = {"kind": "extrapolation", "settings": {}, "about": {}, "runs": {"id": run}} | fields
    return write(path, whole | {"records": records})


def losses(root: Path, key: str, seed: int, found: dict[tuple[str, int], float | None]) -> Path:
    """root/extrapolation/KEY-sSEED.json with losses by (variant, length)."""
    records = [record("loss", x, variant=v, length=n) for (v, n), x in found.items()]
    path = root / f"extrapolation/{key}-s{seed}.json"
    return results(path, f"{key}-s{seed}", seed, records, attention=ATTENTION.get(key, key))


def curve(root: Path, key: str, seed: int, values: list[float], gain: float = 0.5) -> Path:
    """Losses at 1x to 16x as trained, that of 1x with a window, and a context gain at 16x."""
    records = [record("loss", x, length=n) for x, n in zip(values, LENGTHS, strict=True)]
    records += [record("loss", values[0], variant=WINDOW, length=n) for n in LENGTHS]
    records.append(record("context_gain", gain, length=2048))
    path = root / f"extrapolation/{key}-s{seed}.json"
    return results(path, f"{key}-s{seed}", seed, records, attention=ATTENTION.get(key, key))


def run(seed: int, **fields) -> dict:
    config = {
        "model": {"layers": 3, "heads": 3, "width": 96},
        "attention": {"name": "lssar", "p": 15},
        "train": {"lr": 0.003, "warmup": 100, "steps": 600},
    }
    return {
        "config": config,
        "commit": "3d5c3b0a1b2c3d4e",
        "seed": seed,
        "tokens": 1_228_800,
        "seconds": 71.2,
        "loss": 1.6831256803125143,
        "torch": "2.13.0+cpu",
        "device": "cpu",
        "threads": 1,
        "status": "done",
    } | fields


def draw_figure(path: Path) -> None:
    figure, axes = plots.figure()
    axes.plot([1, 2, 4, 8, 16], CURVES["softmax"], **plots.style("softmax"), label="softmax")
    plots.save(figure, path)


def nano(found: Path) -> Path:
    """results/nano: headline runs of three seeds, one of the other runs, runs.json; a benchmark."""
    root, rng = found / "nano", random.Random(7)
    for key, values in CURVES.items():
        for seed in range(3):
            curve(root, key, seed, [v + rng.gauss(0, 0.015) for v in values])
    for key, loss in (("softmax-inverse", 1.67), ("softmax-recentred", 1.72)):
        losses(root, key, 0, {(AS_TRAINED, 128): loss})
    losses(root, "relu-length", 0, {(AS_TRAINED, 128): None})
    runs = {f"{key}-s{seed}": run(seed) for key in CURVES for seed in range(3)}
    runs["exp-s0"] = run(0, status="unfinished", loss=None)
    runs["exp-s0"]["config"]["attention"] = {"name": "exp"}
    write(root / "runs.json", {"kind": "runs", "scale": "nano", "runs": runs})
    write(found / "cpu/attention.json", {"kind": "attention", "rows": []})
    draw_figure(found / "cpu/attention.png")
    return found


def paper(found: Path) -> Path:
    """results/paper: values that are reproduced and values that are not."""
    lengths = [1024, 2048, 4096, 8192]
    for key, values in (
        ("softmax", [3.2011, 4.2662, 3.9, 6.2823]),
        ("lssar-p15", [3.1905, 3.2251, 3.2105, 3.2205]),
    ):
        at = {(AS_TRAINED, n): v for n, v in zip(lengths, values, strict=True)}
        losses(found / "paper", key, 0, at)
    return found
