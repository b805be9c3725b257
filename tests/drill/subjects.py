"""What is attacked: the smallest corpus, run, prepared set and evaluation that are still real."""

import atexit
import functools
import gc
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import data_sets
import train_helpers as training
from data_sets import contents
from eval_helpers import tiny_model, write_checkpoint, write_tokens

import data.pipeline
import data.prepare
import eval_extrapolation
import passkey
import train
from lssar import cpu
from lssar.folders import ensure_hub_cache
from support.command import revision
from training.checkpoint import WEIGHTS, find
from training.run_log import plot_losses

from .attack import memory
from .children import finished


@functools.cache
def drill_folder() -> Path:
    """Return a folder that goes when the drill ends."""
    folder = Path(tempfile.mkdtemp(prefix="drill-", dir=memory()))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def shared() -> Path:
    """Return a folder for what a process of the drill makes once and attacks in copies."""
    folder = drill_folder() / str(os.getpid())
    folder.mkdir(mode=0o755)
    return folder


@dataclass(frozen=True)
class Training:
    """Hold a corpus, a command line, and the run that nothing disturbed."""

    corpus: Path
    whole: Path
    cpu: float  # seconds that it takes

    def arguments(self, runs: Path, *more: str) -> list[str]:
        return training.arguments(self.corpus, runs, *more)

    def assert_same(self, runs: Path) -> None:
        """Check for the same weights to the bit, the same measurements, and nothing left behind."""
        run = runs / "nano-lssar"
        assert training.losses(run) == training.losses(self.whole), "other measurements"
        mine, reference = ((find(r) / WEIGHTS).read_bytes() for r in (run, self.whole))
        assert mine == reference, "other weights"


@functools.cache
def a_training() -> Training:
    corpus = training.make_corpus(shared() / "corpus")
    whole = shared() / "runs"
    done = finished(train.main, training.arguments(corpus, whole), shared() / "log")
    return Training(corpus, whole / "nano-lssar", done.cpu)


@dataclass(frozen=True)
class Preparation:
    arguments: list[str]
    whole: dict[str, bytes]
    cpu: float

    def copy(self, folder: Path) -> Path:
        """Copy the whole set, to be spoilt."""
        folder.mkdir()
        for name, content in self.whole.items():
            (folder / name).write_bytes(content)
        return folder


@functools.cache
def a_preparation() -> Preparation:
    """Prepare Parquet, JSON lines and plain text into a handful of shards."""
    texts = data_sets.text_corpus(shared() / "texts", 120)
    arguments = ["text", str(texts), "--tokeniser=bytes", "--workers=0"]
    arguments += ["--shard-tokens=60K", "--val-tokens=7K"]
    whole = shared() / "set"
    command = [*arguments, "--out", str(whole)]
    done = finished(data.prepare.main, command, shared() / "log", small_chunks)
    return Preparation(arguments, contents(whole), done.cpu)


def small_chunks() -> None:
    """Make many records in a small set, so that a kill finds all of its states."""
    data.pipeline.CHUNK_CHARS = 20_000
    data.prepare.SECONDS_BETWEEN_RECORDS = 0.0


@dataclass(frozen=True)
class Evaluation:
    main: object
    arguments: list[str]
    whole: dict
    name: str
    cpu: float

    def assert_same(self, out: Path) -> None:
        assert numbers_of(out) == self.whole, f"other numbers in {self.name}"


def numbers_of(path: Path) -> dict:
    """Return a results file without what a clock and the command line wrote into it."""
    found = json.loads(path.read_text())
    for record in found["records"]:
        record["details"].pop("seconds", None)
        record["details"].pop("attention", None)  # what the process that wrote it computed with
        del record["command"]
    return found


@functools.cache
def evaluations() -> list[Evaluation]:
    tokens = write_tokens(shared() / "tokens", 2000)
    names = ("softmax", "lssar")
    models = [str(write_checkpoint(shared() / name, tiny_model(name))) for name in names]
    commands = {
        "eval_extrapolation.py": (
            eval_extrapolation.main,
            [*models, "--data", str(tokens), "--lengths=16,32,64,128", "--window=16"],
        ),
        "passkey.py": (passkey.main, [*models, "--lengths=400,405,410", "--trials=4"]),
    }
    found = []
    for name, (main, arguments) in commands.items():
        out = shared() / f"{Path(name).stem}.json"
        done = finished(main, [*arguments, "--out", str(out)], shared() / "log")
        found.append(Evaluation(main, arguments, numbers_of(out), name, done.cpu))
    return found


@functools.cache
def warm() -> None:
    """Import what a child would otherwise import for seconds; starts no thread."""
    ensure_hub_cache()
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch._dynamo  # noqa: F401 - by every optimiser

    cpu.unavailable()
    revision()
    plot_losses([{"step": 1, "loss": 2.0}], shared() / "warm.png", "fonts and their readers")
    gc.freeze()  # a child would look through all of this


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
