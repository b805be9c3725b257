"""Training by several processes, and what happens when they are stopped or killed."""

import signal
import subprocess

import pytest
from train_helpers import (
    arguments,
    assert_close_run,
    command,
    environment,
    losses,
    on_two_nodes,
    run_process,
    train_here,
    weights,
)

from train import EXIT_PREEMPTED
from training.checkpoint import load_model
from training.run_log import read_metrics


def test_eight_processes_train_the_nano_model_as_one_does(corpus, tmp_path):
    more = ("--train.micro_batch=1", "--train.steps=6", "--eval.interval=3")
    assert train_here(*arguments(corpus, tmp_path / "one", *more, config="nano-softmax")) == 0
    eight = arguments(corpus, tmp_path / "eight", *more, config="nano-softmax")
    result = run_process(*eight, processes=8)
    assert result.returncode == 0, result.stderr
    assert_close_run(tmp_path / "one/nano-softmax", tmp_path / "eight/nano-softmax", 1e-5)


def test_muon_on_two_processes_equals_one(corpus, tmp_path):
    more = ("--train.micro_batch=4", "--train.steps=6", "--train.optimiser=muon")
    one, two = (arguments(corpus, tmp_path / n, *more, config="nano-softmax") for n in "12")
    assert train_here(*one) == 0
    result = run_process(*two, processes=2)
    assert result.returncode == 0, result.stderr
    ends = [losses(tmp_path / n / "nano-softmax")[-1][2] for n in "12"]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


def test_sigterm_under_torchrun_saves_too(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.micro_batch=4", "--train.steps=4000")
    process = subprocess.Popen(
        command(*given, processes=2), stderr=subprocess.PIPE, text=True, env=environment()
    )
    for line in process.stderr:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    process.wait()
    assert "stopped by SIGTERM" in rest
    step = load_model(tmp_path / "nano-lssar")[1].step
    assert 3 <= step < 4000
    assert train_here(*given, "--status") == EXIT_PREEMPTED  # where torchrun's own code is 1


def test_torchrun_restarts_after_a_rank_dies_and_goes_on_from_the_checkpoint(corpus, tmp_path):
    given = arguments(
        corpus, tmp_path, "--train.micro_batch=4", "--train.steps=200", "--log.interval=5"
    )
    process = subprocess.Popen(
        command(*given, processes=2, torchrun=("--max-restarts=1",)),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step 20/"):
            children = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
            )
            subprocess.run(["kill", "-9", children.stdout.split()[-1]], check=True)
            break
    rest = process.stderr.read()
    assert process.wait() == 0, rest
    assert "finished 200 steps" in rest
    assert 'train.py", line' not in rest  # the surviving rank says what happened in one line
    assert "lost contact with another rank" in rest or "stopped by SIGTERM" in rest
    steps = [m[0] for m in losses(tmp_path / "nano-lssar") if m[1] is not None]
    assert steps == list(range(5, 201, 5))


def test_a_killed_node_comes_back_and_the_run_continues_to_the_same_bits(corpus, tmp_path):
    """The node that stayed waits for it; both continue from the last checkpoint."""
    more = ("--train.micro_batch=4", "--train.steps=60", "--device=cpu", "--resume")
    both, one = tmp_path / "both/nano-lssar", tmp_path / "one/nano-lssar"

    def well_under_way():
        return both.exists() and any(m["step"] == 12 for m in read_metrics(both))

    command = ("train.py", *arguments(corpus, tmp_path / "both", *more))
    shown = on_two_nodes(tmp_path / "log", *command, kill=1, when=well_under_way)
    assert "lost contact with another rank" in shown
    # Two halves of a batch, on two nodes or one after the other, have the same sum; the validation
    # set is summed in another order.
    assert train_here(*arguments(corpus, tmp_path / "one", *more)) == 0
    assert [m[:2] for m in losses(both)] == [m[:2] for m in losses(one)]
    assert all(weights(one)[name].equal(w) for name, w in weights(both).items())
