"""results/SCALE/runs.json: the config, revision, device and outcome of every training run."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path

from data.shards import MANIFEST, describe_set
from paper.evidence import RUNS, read_runs
from paper.experiments import all_runs, run_name
from paper.plan import Workspace
from support.files import read_text, write_json
from training.config import parse_config
from training.run_log import read_metrics


def write_runs(space: Workspace) -> None:
    """Add the runs and corpora that are here to those that the file already has."""
    path, runs, corpora = space.folder / RUNS, {}, {}
    if path.exists():
        runs, corpora = read_runs(path), json.loads(read_text(path)).get("corpora", {})
    for key in all_runs(space.scale.name):
        for seed in space.seeds_of(key):
            if record := run_record(space.run_directory(key, seed), seed):
                runs[run_name(key, seed)] = record
    for directory in space.scale.corpora:
        if (Path(directory) / MANIFEST).exists():
            corpora[directory] = describe_set(directory)
    write_json(path, {"kind": "runs", "scale": space.scale.name, "corpora": corpora, "runs": runs})


def run_record(directory: Path, seed: int) -> dict | None:
    """What the run's own directory says about it; None for a run that has not begun."""
    try:
        about = json.loads(read_text(directory / "run.json"))
        text = read_text(directory / "config.toml")
    except (OSError, ValueError):
        return None
    metrics, config = read_metrics(directory), parse_config(text, str(directory / "config.toml"))
    losses = [m["val_loss"] for m in metrics if "val_loss" in m]
    speeds = [m["tokens_per_s"] for m in metrics if "tokens_per_s" in m]
    tokens = config.train.steps * config.train.batch_tokens
    finished = bool(metrics) and metrics[-1]["step"] >= config.train.steps
    sections = {name: values for name, values in asdict(config).items() if name != "log"}
    return {
        "config": {s: {k: v for k, v in d.items() if v is not None} for s, d in sections.items()},
        "commit": about["revision"],
        "seed": seed,
        "tokens": tokens,
        "seconds": round(tokens / statistics.harmonic_mean(speeds), 1) if speeds else None,
        "loss": losses[-1] if losses else None,
        "torch": about["torch"],
        "device": about["device"],
        "status": "done" if finished else "unfinished",
    }
