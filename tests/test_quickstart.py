"""The quickstart: its table of measured and expected losses, and how it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

from checkout import ROOT, write_committed

from paper import quickstart as table

STUB = """#!/usr/bin/env bash
case "$*" in
  *prepare.py*) echo prepared ;;
  *train.py*)
    trap 'echo saved "$*" >>saved.log; exit 75' TERM INT
    echo started "$*" >>started.log
    if [ "${TRAINS:-}" ]; then exit "$TRAINS"; fi
    for _ in {1..300}; do sleep 0.1; done ;;
esac
"""


def results(path: Path, runs: dict[str, dict], losses: dict[tuple, float]) -> Path:
    """Write a results file; `losses` by run, variant and length."""
    records = []
    for (run, variant, length), value in losses.items():
        record = {"quantity": "loss", "run": run, "length": length, "value": value}
        records.append(record if variant == "as trained" else record | {"variant": variant})
    path.write_text(json.dumps({"runs": runs, "records": records}))
    return path


def cases(runs: dict[str, float]) -> dict[tuple, float]:
    """Return made-up losses: that of the run, plus a thousandth for each doubling of the length."""
    return {
        (run, variant, length): loss + (length // 256).bit_length() / 1000
        for run, loss in runs.items()
        for variant in ("as trained", "window=256")
        for length in table.LENGTHS
    }


def test_losses_stand_beside_those_of_the_headline(tmp_path, capsys):
    models = {n: {"model": {"attention": {"name": n}}} for n in ("softmax", "lssar")}
    mine = results(tmp_path / "mine.json", models, cases({"softmax": 2.0, "lssar": 1.0}))
    seeds = {"a": 1.0, "b": 3.0, "c": 1.0, "d": 1.5, "e": 9.0}
    names = ("softmax", "softmax", "lssar-p15", "lssar-p15", "lssar-p3")
    runs = {key: {"run": name, "config": "c"} for key, name in zip(seeds, names, strict=True)}
    headline = results(tmp_path / "headline.json", runs, cases(seeds))
    table.main([str(mine)], headline)
    shown = capsys.readouterr().out
    assert "means of 2 seeds" in shown
    rows = {line.split("  ")[0]: line.split()[-10:] for line in shown.splitlines()}
    assert rows["softmax"][:4] == ["2.001", "(2.001)", "2.002", "(2.002)"]
    assert rows["LSSAR, window"][-2:] == ["1.005", "(1.255)"]


def test_the_expected_losses_are_those_of_the_papers_claim(tmp_path):
    """Zeros once stood there."""
    write_committed(tmp_path, "results")
    losses = table.read_losses(tmp_path / "results/nano/headline.json")
    for title, row in table.ROWS.items():
        first = fmean(losses[*row, 256])
        rise = fmean(losses[*row, 4096]) / first
        assert 1.4 < first < 1.7, title
        assert rise > 1.5 if title == "softmax" else 0.95 < rise < 1.08, title


def quickstart(folder: Path, **variables) -> subprocess.Popen:
    """Start the script in a checkout whose python only writes down what it was asked."""
    shutil.copytree(ROOT / "scripts", folder / "scripts", dirs_exist_ok=True)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(
        'VIRTUAL_ENV="$PWD/.venv"\nPATH="$PWD/.venv/bin:$PATH"\n'
    )
    python = folder / ".venv/bin/python"
    python.write_text(STUB)
    python.chmod(0o755)
    for name in ("requirements.txt", "requirements-bpe.txt"):
        (folder / name).touch()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHON": sys.executable} | variables
    command = ["bash", str(folder / "scripts/quickstart.sh")]
    options = {"start_new_session": True, "preexec_fn": heed_interrupts}
    return subprocess.Popen(command, cwd="/", env=environment, **options, **streams)


def heed_interrupts() -> None:
    """Undo what a shell does to what it starts in the background; bash cannot."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_quickstart_that_is_stopped_stops_both_trainings(tmp_path):
    """The one in the background went on and kept its run locked."""
    for number, to_all in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        folder = tmp_path / f"a checkout {number}"
        script = quickstart(folder)
        while len(lines(folder / "started.log")) < 2:
            time.sleep(0.05)
        (os.killpg if to_all else os.kill)(script.pid, number)  # Ctrl-C reaches the whole group
        script.communicate(timeout=30)
        assert script.returncode != 0, number
        assert len(lines(folder / "saved.log")) == 2, number


def test_a_training_that_fails_is_named(tmp_path):
    script = quickstart(tmp_path / "a checkout", TRAINS="2")
    _, said = script.communicate(timeout=30)
    assert script.returncode == 1
    assert said.splitlines()[-1].startswith("error: training LSSAR ended early")
