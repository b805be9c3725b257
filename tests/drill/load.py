"""For long: memory and descriptors stay flat, and thousands of files open in seconds."""

import statistics
import time
from pathlib import Path

import numpy as np
import train_helpers as training
from data_sets import write_shard

import train
from data.loader import Sequences, TrainLoader
from data.shards import open_split

from .attack import Told, attack
from .children import Child


@attack("load", "soak: steps with a validation and a checkpoint at every fourth", full=2000)
def soak(times: int, folder: Path) -> Told:
    corpus = training.make_corpus(folder / "corpus")
    command = training.arguments(
        corpus,
        folder / "runs",
        *("--model.layers=1", "--model.width=16", "--train.batch_tokens=64"),
        *("--train.micro_batch=2", f"--train.steps={times}", "--eval.interval=4"),
        *("--eval.tokens=64", "--checkpoint.interval=4", "--log.interval=4"),
    )
    child, samples = Child(train.main, command, folder / "log"), []
    while child.poll() is None:
        if found := sample(child.pid):
            samples.append(found)
        time.sleep(0.05)
    assert child.code == 0, child.shown()
    memory, files = ([s[i] for s in samples] for i in (0, 1))
    quarter = len(samples) // 4
    middle = statistics.median(memory[quarter : 2 * quarter])
    # Before the end, where the loss curve is drawn.
    last = slice(-quarter - quarter // 4, -quarter // 4)
    end = statistics.median(memory[last])
    growth = end - middle
    assert growth < 8, f"{growth:.1f} MB more in the last quarter than in the second"
    opened = statistics.median(files[quarter : 2 * quarter]), statistics.median(files[last])
    assert opened[1] <= opened[0], f"open files: {opened}"
    kept = list((folder / "runs/nano-lssar/checkpoints").iterdir())
    assert len(kept) <= 6, kept
    figures = {"MB in the second quarter": middle, "MB in the last": end, "open files": opened[1]}
    return Told(
        f"{times // 4:,} validations and checkpoints: {middle:.1f} MB resident in the second "
        f"quarter, {end:.1f} MB in the last; {opened[1]:g} open files throughout",
        times=times,
        figures=figures,
    )


def sample(pid: int) -> tuple[float, int] | None:
    """Return the resident MB and the open files of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    line = next((x for x in status.splitlines() if x.startswith("VmRSS")), None)
    return (int(line.split()[1]) / 1024, opened) if line else None


@attack("load", "loader over 10,000 shards", full=10_000, short=1_000)
def many_shards(times: int, folder: Path) -> Told:
    generator = np.random.default_rng(0)
    for index in range(times):
        write_shard(folder / f"x_train_{index:06d}.bin", generator.integers(0, 257, 100))
    began, computing = time.perf_counter(), time.process_time()
    tokens = open_split(folder, "train", vocab_size=257)
    loader = TrainLoader(Sequences(tokens, 64), global_batch=64, seed=0, micro_batch=64)
    batches = [next(iter(loader.micro_batches(step))) for step in range(3)]
    seconds, computing = time.perf_counter() - began, time.process_time() - computing
    assert tokens.total_tokens == 100 * times
    assert all(inputs.shape == (64, 64) for inputs, _ in batches)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    assert opened < 400, f"{opened} open files"
    return Told(
        f"opened, checked, and three batches read in {computing:.1f} s of computing ({seconds:.1f} "
        f"s on this machine, with what else it did), with {opened} open files",
        times=times,
        figures={
            "seconds": round(seconds, 2),
            "seconds of computing": round(computing, 2),
            "open files": opened,
        },
    )
