"""A corpus and a model small enough to train for real within a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from data.prepare import main as prepare
from training.checkpoint import WEIGHTS, find

ROOT = Path(__file__).parents[1]

# 24 steps of 8 sequences: long enough to see a checkpoint, a validation and an end.
TINY = (
    *("--model.layers=2", "--model.heads=2", "--model.width=32", "--train.length=32"),
    *("--train.batch_tokens=256", "--train.micro_batch=8", "--train.steps=24", "--train.warmup=4"),
    *("--eval.interval=8", "--eval.tokens=512", "--checkpoint.interval=5", "--log.interval=1"),
)


def make_corpus(
    directory: Path, words: tuple[str, ...] = ("the sun", "a moon", "one star", "this sea")
) -> Path:
    """20,000 bytes of sentences with a structure that a tiny model can learn."""
    text = directory / "text"
    text.mkdir(parents=True)
    for i in range(40):
        lines = [f"{words[(i + j) % 4]} is {words[(i * j) % 4]} and {j % 10}." for j in range(20)]
        (text / f"{i:02d}.txt").write_text("\n".join(lines))
    out = directory / "shards"
    assert not prepare(
        ["text", str(text), "--out", str(out), "--tokeniser", "bytes", "--val-tokens", "4000"]
    )
    return out


def arguments(corpus: Path, runs: Path, *more: str, config: str = "nano-lssar") -> list[str]:
    places = (f"--data.directory={corpus}", f"--log.directory={runs}")
    return [str(ROOT / f"configs/{config}.toml"), *TINY, *places, *more]


def command(*arguments: str, processes: int = 0, torchrun: tuple[str, ...] = ()) -> list[str]:
    if not processes:
        return [sys.executable, str(ROOT / "train.py"), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun]
    return [*launcher, f"--nproc_per_node={processes}", str(ROOT / "train.py"), *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_process(*arguments: str, processes: int = 0, torchrun: tuple[str, ...] = ()):
    return subprocess.run(
        command(*arguments, processes=processes, torchrun=torchrun),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )


def train_here(*arguments: str) -> int:
    return train.main(list(arguments))


def weights(run: Path) -> dict:
    return load_file(find(run) / WEIGHTS)


def losses(run: Path) -> list[tuple]:
    """(step, training or validation loss) of every measurement, exactly as written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    return [(m["step"], m.get("loss"), m.get("val_loss")) for m in measured]


def assert_close_run(run, other, tolerance):
    """The same measurements at the same steps, equal to a relative tolerance."""
    mine, theirs = losses(run), losses(other)
    assert [m[0] for m in mine] == [m[0] for m in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert [x for x in a if x is not None] == pytest.approx(
            [x for x in b if x is not None], rel=tolerance
        )
