"""results/SCALE/runs.json: what every run was, for the page and for whoever doubts a number."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path

from data.shards import MANIFEST, describe_set
from paper.evidence import RUNS, read_runs
from paper.plan import Workspace
from paper.runs import Run, all_runs, run_name
from support.files import read_text, write_json
from training.config import parse_config
from training.run_log import read_metrics


def write_runs(space: Workspace) -> None:
    """Add the runs whose directories are here to those that the file has already."""
    path = space.folder / RUNS
    found = read_runs(path) if path.exists() else {}
    for key, run in all_runs(space.scale.name).items():
        for seed in space.seeds_of(key):
            record = run_record(run, seed, space)
            if record is not None:
                found[run_name(key, seed)] = record
    corpora = json.loads(read_text(path)).get("corpora", {}) if path.exists() else {}
    corpora |= {
        directory: describe_set(directory)
        for directory in space.scale.corpora
        if (Path(directory) / MANIFEST).exists()
    }
    write_json(path, {"kind": "runs", "scale": space.scale.name, "corpora": corpora, "runs": found})


def run_record(run: Run, seed: int, space: Workspace) -> dict | None:
    """What the run's own directory says of it; None for a run that has not begun."""
    directory = space.run_directory(run.key, seed)
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
    sections = asdict(config)
    del sections["log"]
    return {
        "config": {
            section: {key: value for key, value in values.items() if value is not None}
            for section, values in sections.items()
        },
        "commit": about["revision"],
        "seed": seed,
        "tokens": tokens,
        "seconds": round(tokens / statistics.harmonic_mean(speeds), 1) if speeds else None,
        "loss": losses[-1] if losses else None,
        "torch": about["torch"],
        "device": about["device"],
        "status": "done" if finished else "unfinished",
    }
