"""A corpus and a model small enough to train for real within a test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
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
    """Prepare 20,000 bytes of sentences with a structure that a tiny model can learn."""
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


def command(
    *arguments: str, processes: int = 0, torchrun: tuple[str, ...] = (), script: str = "train.py"
) -> list[str]:
    if not processes:
        return [sys.executable, str(ROOT / script), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun]
    return [*launcher, f"--nproc_per_node={processes}", str(ROOT / script), *arguments]


def node(number: int, port: int, log: Path, script: str, *arguments: str) -> subprocess.Popen:
    """Start one of two machines by a torchrun of its own; they meet at the first."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test")
    meet += (f"--rdzv-conf=is_host={int(number == 0)}",)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += ["--max-restarts=3", *meet, "--local-addr=127.0.0.1", str(ROOT / script)]
    several = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("a") as output:
        command, streams = [*launcher, *arguments], {"stdout": output, "stderr": output}
        return subprocess.Popen(command, env=environment() | several, **streams)


def kill_node(agent: subprocess.Popen) -> None:
    """Kill the torchrun and its workers at once, as when a machine goes down."""
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def on_two_nodes(log: Path, *command: str, kill: int | None = None, when=lambda: True) -> str:
    """Run a script on two nodes to its end; one is killed `when`. Nodes that fail start again."""
    port = free_port()
    nodes = [node(i, port, log, *command) for i in range(2)]
    end = time.monotonic() + 300
    try:
        while any(n.poll() != 0 for n in nodes):
            assert time.monotonic() < end, log.read_text()
            if kill is not None and when():
                kill_node(nodes[kill])
                kill = None
            for i, n in enumerate(nodes):
                if n.poll():  # killed, or it lost the one that was
                    assert when(), log.read_text()
                    nodes[i] = node(i, port, log, *command)
            time.sleep(0.05)
    finally:
        for n in nodes:
            if n.poll() is None:
                kill_node(n)
    return log.read_text()


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_process(*arguments: str, processes: int = 0, **options):
    return subprocess.run(
        command(*arguments, processes=processes, **options),
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
    """Return (step, training or validation loss) of every measurement, exactly as written."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    return [(m["step"], m.get("loss"), m.get("val_loss")) for m in measured]


def assert_close_run(run, other, tolerance):
    """Check for the same measurements at the same steps, equal to a relative tolerance."""
    mine, theirs = losses(run), losses(other)
    assert [m[0] for m in mine] == [m[0] for m in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert [x for x in a if x is not None] == pytest.approx(
            [x for x in b if x is not None], rel=tolerance
        )
