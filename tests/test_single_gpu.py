"""scripts/single_gpu.sh: refused without a GPU at once, and rehearsed whole on a CPU."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.prepare import main as prepare
from training.run_log import read_metrics

ROOT = Path(__file__).parent.parent
# A real interpreter, except that nothing is installed and every command is written down.
PYTHON = f"""#!/usr/bin/env bash
[ "$2" = pip ] && exit 0
echo "$@" >>started.log
exec {shlex.quote(sys.executable)} "$@"
"""
STUB = PYTHON.replace("exec ", ": ")


@pytest.fixture
def checkout(tmp_path):
    """Copy the repository, with a .venv, runs and results of its own."""

    def make(python: str) -> Path:
        place = tmp_path / "checkout"
        place.mkdir()
        for path in ROOT.iterdir():
            if path.name not in (".venv", ".venv.lock", "runs", "results", "corpora", "site"):
                (place / path.name).symlink_to(path)
        (place / "scripts").unlink()
        shutil.copytree(ROOT / "scripts", place / "scripts")
        (place / ".venv/bin").mkdir(parents=True)
        (place / ".venv/bin/python").write_text(python)
        (place / ".venv/bin/python").chmod(0o755)
        activate = 'VIRTUAL_ENV="$PWD/.venv"\nPATH="$PWD/.venv/bin:$PATH"\n'
        (place / ".venv/bin/activate").write_text(activate)
        return place

    return make


def run(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "scripts/single_gpu.sh", *arguments],
        cwd=place,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )


def started(place: Path) -> list[str]:
    log = place / "started.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        ([], {"DEVICE": "cuda"}, "no GPU was found"),
        ([], {"HOURS": "0"}, "HOURS=0 is not a number of hours"),
        ([], {"DATA": "corpora/mistyped"}, "DATA=corpora/mistyped is not a prepared set"),
        (["--plan"], {}, "takes --section.key=value of train.py, not '--plan'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_starts_nothing(checkout, arguments, environment, said):
    if Path("/dev/nvidia0").exists() and "DEVICE" in environment:
        pytest.skip("there is a GPU")
    place = checkout(STUB)
    done = run(place, *arguments, **environment)
    assert (done.returncode, started(place), done.stdout) == (2, [], "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_another_number_of_hours_than_it_was_begun_with_is_refused(checkout):
    place = checkout(STUB)
    (place / "runs/single_gpu").mkdir(parents=True)
    (place / "runs/single_gpu/steps").write_text("1 1200\n")
    done = run(place, HOURS="5")
    assert (done.returncode, started(place), done.stdout) == (2, [], "")
    assert "runs/single_gpu was begun with HOURS=1" in done.stderr


SMALL = (
    *("--model.layers=3", "--model.heads=1", "--model.width=16", "--model.vocab_size=257"),
    *("--model.vocab_rows=257", "--train.batch_tokens=896", "--train.micro_batch=2"),
    *("--train.compile=false", "--eval.tokens=896", "--eval.interval=20"),
)


@pytest.mark.slow
def test_every_step_runs_in_order_and_again_does_nothing_twice(checkout, tmp_path):
    place, text = checkout(PYTHON), tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text that is easy to learn.\n" for i in range(3000)))
    data = ["text", str(text), "--out", str(tmp_path / "mine"), "--tokeniser", "bytes"]
    prepare([*data, "--val-tokens", "10000"])
    small = {"DEVICE": "cpu", "HOURS": "0.0002", "LENGTH": "448", "TOKENS": "7168"}
    done = run(place, *SMALL, DATA=str(tmp_path / "mine"), **small)
    assert done.returncode == 0, done.stdout + done.stderr
    scripts = [command.split()[0] for command in started(place)]
    evaluations = [
        "eval_extrapolation.py",
        "passkey.py",
        "attention_maps.py",
        "eval_extrapolation.py",
    ]
    assert scripts == [*["train.py"] * 3, "-", *["train.py"] * 3, *evaluations]
    hours, steps = (place / "runs/single_gpu/steps").read_text().split()
    assert hours == "0.0002"
    for name in ("softmax", "lssar", "far"):
        assert read_metrics(place / f"runs/single_gpu/{name}")[-1]["step"] == int(steps)
    losses = json.loads((place / "results/single_gpu/extrapolation.json").read_text())["records"]
    lengths = {r["length"] for r in losses if r["quantity"] == "loss"}
    assert lengths == {448, 896, 1792, 3584, 7168}
    pictures = [path.name for path in (place / "results/single_gpu").glob("*.png")]
    assert {"extrapolation.png", "passkey.png"} < set(pictures)
    assert sum(name.startswith("maps-") for name in pictures) == 3
    weights = sorted(place.glob("runs/single_gpu/*/checkpoints/*/*"))
    times = [path.stat().st_mtime_ns for path in weights]
    again = run(place, *SMALL, DATA=str(tmp_path / "mine"), **small)
    assert again.returncode == 0, again.stdout + again.stderr
    assert weights and [path.stat().st_mtime_ns for path in weights] == times
