"""kill -9 at random instants: the next start continues, to the same bits, and tidies up."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import train_helpers as training
from data_sets import contents

import data.prepare
import train
from evaluating.checkpoints import open_checkpoints
from training.checkpoint import Store, read_trainer
from training.run_log import read_metrics

from .attack import Told, attack
from .children import PATIENCE, Child, killed_until_done, leftovers
from .subjects import a_preparation, a_training, evaluations, fresh, small_chunks


@attack("crashes", "training, `kill -9` at random instants, `--resume`", full=60, short=2)
def training_killed(times: int, folder: Path) -> Told:
    subject, chance, kills, runs = a_training(), random.Random(1), 0, 0
    while kills < times:
        place = fresh(folder / "runs")
        # Between one and six steps from one checkpoint to the next.
        interval = f"--checkpoint.interval={chance.randint(1, 6)}"
        command = subject.arguments(place, interval, "--resume")
        limit, log = most(times, kills), folder / "log"
        for _ in killed_until_done(train.main, command, log, chance, subject.cpu, limit):
            kills += 1
        runs += 1
        subject.assert_same(place)
        assert not leftovers(place), leftovers(place)
    return Told(
        f"every start continued; {runs} runs ended with the weights and measurements of the "
        "undisturbed run, bit for bit; no temporary file left",
        times=kills,
        kills=kills,
        figures={"runs": runs},
    )


@attack("crashes", "`kill -9` while a checkpoint is being written", full=60, short=2)
def checkpoint_writing(times: int, folder: Path) -> Told:
    subject, chance, seen, runs = a_training(), random.Random(2), [], 0
    while len(seen) < times:
        place = fresh(folder / "runs")
        command = subject.arguments(place, "--checkpoint.interval=1", "--resume")
        store = Store(place / "nano-lssar")
        enough = len(seen) + most(times, len(seen))
        while (
            written := killed_while_saving(command, folder, store, chance, len(seen) < enough)
        ) is not None:
            seen.append(written)
            for checkpoint in store.candidates():  # whole, whatever the instant
                open_checkpoints([str(checkpoint)])
                read_trainer(checkpoint)
        runs += 1
        subject.assert_same(place)
        assert not leftovers(place), leftovers(place)
    stages = {f"{n} of 3 files there": seen.count(n) for n in sorted(set(seen))}
    shown = ", ".join(f"{count} with {stage}" for stage, count in stages.items())
    return Told(
        f"killed {shown}; every checkpoint with a final name was whole, and {runs} runs ended bit "
        "for bit as undisturbed; no temporary file left",
        times=len(seen),
        kills=len(seen),
        figures=stages,
    )


def most(times: int, kills: int) -> int:
    """Return the most kills of one subject: then it is let through and looked at."""
    return min(20, times - kills)


def killed_while_saving(command, folder: Path, store: Store, chance, kill: bool) -> int | None:
    """Return the files that the killed checkpoint had; None when the run got to its end."""
    child, before = Child(train.main, command, folder / "log"), None
    target, end = chance.randint(1, 5) if kill else 0, time.monotonic() + PATIENCE
    while child.poll() is None:
        assert time.monotonic() < end or not child.kill(), f"hung: {child.shown()}"
        unfinished = next(store.directory.glob(".step-*.tmp"), None)
        if unfinished is not None and unfinished != before:
            before, target = unfinished, target - 1
            if target == 0:
                time.sleep(chance.uniform(0, 0.02))
                if not child.kill():
                    return None
                return len(list(unfinished.glob("*"))) if unfinished.exists() else 3
        time.sleep(0.002)
    assert child.code == 0, f"exit code {child.code}: {child.shown()}"
    return None


@attack("crashes", "data preparation, `kill -9` at random instants", full=50, short=2)
def preparation(times: int, folder: Path) -> Told:
    subject, chance, kills, sets = a_preparation(), random.Random(3), 0, 0
    while kills < times:
        shutil.rmtree(folder / "out", ignore_errors=True)
        command = [*subject.arguments, "--out", str(folder / "out")]
        limit, log = most(times, kills), folder / "log"
        for _ in killed_until_done(
            data.prepare.main, command, log, chance, subject.cpu, limit, small_chunks
        ):
            kills += 1
        sets += 1
        assert contents(folder / "out") == subject.whole, "other bytes"
    return Told(
        f"every start continued; {sets} sets ended with the same bytes as undisturbed, no other "
        "file beside them",
        times=kills,
        kills=kills,
        figures={"sets": sets},
    )


@attack("crashes", "evaluation (loss, passkey), `kill -9` at random instants", full=40, short=2)
def evaluation(times: int, folder: Path) -> Told:
    subjects, chance, kills, number = evaluations(), random.Random(4), 0, 0
    while kills < times:
        subject = subjects[number % 2]
        place = fresh(folder / "results")
        command = [*subject.arguments, "--out", str(place / "x.json")]
        limit, log = most(times, kills), folder / "log"
        for _ in killed_until_done(subject.main, command, log, chance, subject.cpu, limit):
            kills += 1
        number += 1
        subject.assert_same(place / "x.json")
        assert not leftovers(place), leftovers(place)
    return Told(
        f"every start kept what was finished; {number} results files ended with the numbers of the "
        "undisturbed ones, bit for bit; no temporary file left",
        times=kills,
        kills=kills,
        figures={"files": number},
    )


@attack("crashes", "one rank of two under torchrun, `kill -9`, `--max-restarts=1`", full=2)
def rank_of_two(times: int, folder: Path) -> Told:
    corpus = training.make_corpus(folder / "corpus")
    more = ("--train.micro_batch=4", "--train.steps=60", "--log.interval=5")
    arguments = training.arguments(corpus, folder / "whole", *more, config="nano-softmax")
    two_ranks(arguments, kill=None)
    expected = folder / "whole/nano-softmax"
    for number in range(times):
        place = folder / f"runs-{number}"
        command = training.arguments(corpus, place, *more, config="nano-softmax")
        shown = two_ranks(command, kill=str(number % 2))
        run = place / "nano-softmax"
        assert training.losses(run) == training.losses(expected), shown
        assert weights_of(run) == weights_of(expected), "other weights"
        assert not leftovers(place), leftovers(place)
    return Told(
        "torchrun restarted both ranks, they went on from the last checkpoint and ended with the "
        "weights and measurements of two undisturbed ranks, bit for bit",
        times=times,
        kills=times,
    )


@attack("crashes", "one node of two (two torchrun over loopback), `kill -9` with its ranks", full=2)
def node_of_two(times: int, folder: Path) -> Told:
    corpus = training.make_corpus(folder / "corpus")
    more = ("--train.micro_batch=4", "--train.steps=60", "--device=cpu", "--resume")
    two_ranks(training.arguments(corpus, folder / "whole", *more), kill=None)
    expected = folder / "whole/nano-lssar"
    for number in range(times):
        run = folder / f"runs-{number}/nano-lssar"
        command = ("train.py", *training.arguments(corpus, run.parent, *more))
        shown = training.on_two_nodes(
            folder / f"log-{number}",
            *command,
            kill=number % 2,
            when=lambda run=run: run.exists() and any(m["step"] == 20 for m in read_metrics(run)),
        )
        assert training.losses(run) == training.losses(expected), shown
        assert weights_of(run) == weights_of(expected), "other weights"
        assert not leftovers(run.parent), leftovers(run.parent)
    return Told(
        "the node that stayed waited for the other to be started again (where it was the one that "
        "they meet at, both were started again); the runs ended with the weights and measurements "
        "of two undisturbed ranks, bit for bit",
        times=times,
        kills=times,
    )


def weights_of(run: Path) -> bytes:
    return (Store(run).candidates()[0] / "model.safetensors").read_bytes()


def two_ranks(arguments: list[str], kill: str | None) -> str:
    """Start two ranks, kill one after step 20, wait for the end."""
    process = subprocess.Popen(
        training.command(*arguments, processes=2, torchrun=("--max-restarts=1",)),
        stderr=subprocess.PIPE,
        text=True,
        env=training.environment(),
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if kill and line.startswith("step 20/"):
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ranks = {rank_of(pid): pid for pid in workers}
            os.kill(int(ranks[kill]), signal.SIGKILL)
            kill = None  # after the restart it comes by again
    shown = "".join(lines)
    assert process.wait() == 0, shown
    assert "Traceback" not in shown, shown
    return shown


def rank_of(pid: str) -> str | None:
    """Return RANK in the environment of a worker."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((e.partition(b"=")[2].decode() for e in entries if e.startswith(b"RANK=")), None)
