"""The shell scripts: they parse, install once, and fail with what to do. No network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda p: p.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_ci_runs_exactly_the_command_of_the_readme():
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "bash scripts/test.sh"


@pytest.fixture
def checkout(tmp_path):
    """scripts/ beside a .venv whose `python -m pip` only writes down what it was asked."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/usr/bin/env bash\necho "$@" >>pip.log\nexit "${PIP_EXIT:-0}"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/bin/activate").write_text("echo activated\n")
    for name in ("a.txt", "b.txt", "requirements-bpe.txt"):
        (tmp_path / name).write_text(f"{name}-package==1\n")
    return tmp_path


def source(checkout, *files, **environment):
    """What a script does: `source scripts/env.sh files...` under its strict settings."""
    command = f"set -euo pipefail; source scripts/env.sh {' '.join(files)}; echo ready"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
    )


def installs(checkout):
    log = checkout / "pip.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_environment_is_installed_once_and_again_when_a_file_changes(checkout):
    first = source(checkout, "a.txt", "b.txt")
    assert first.returncode == 0, first.stderr
    assert "installing -r a.txt" in first.stdout
    assert first.stdout.splitlines()[-2:] == ["activated", "ready"]
    assert installs(checkout) == 3

    second = source(checkout, "a.txt", "b.txt")
    assert second.stdout.splitlines() == ["activated", "ready"]
    assert installs(checkout) == 3

    (checkout / "b.txt").write_text("b.txt-package==2\n")
    third = source(checkout, "a.txt", "b.txt")
    assert "installing -r b.txt" in third.stdout
    assert installs(checkout) == 4


def test_a_failed_installation_is_said_and_tried_again(checkout):
    failed = source(checkout, "a.txt", PIP_EXIT="1")
    assert failed.returncode == 2
    assert "could not install -r a.txt" in failed.stderr
    assert "ready" not in failed.stdout
    assert source(checkout, "a.txt").returncode == 0
    assert installs(checkout) == 3


def test_a_missing_requirement_file_is_named(checkout):
    failed = source(checkout, "nowhere.txt", PIP_EXIT="1")
    assert failed.returncode != 0
    assert "nowhere.txt" in failed.stderr


def test_a_missing_python_is_named(checkout):
    failed = source(checkout, "a.txt", PYTHON="no-such-python")
    assert failed.returncode == 2
    assert "Python 3.11" in failed.stderr
    assert "no-such-python" in failed.stderr
    assert installs(checkout) == 0


def test_torch_is_pinned_and_everything_else_bounded_below():
    lines = [
        line.split("#")[0].strip()
        for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    ]
    lines = [line for line in lines if line]
    assert "torch==2.13.0" in lines
    assert all(">=" in line for line in lines if not line.startswith("torch=="))
    names = {line.split(">=")[0].split("==")[0] for line in lines}
    core = {"torch", "tiktoken", "numpy", "datasets", "wandb", "tqdm", "safetensors", "matplotlib"}
    assert names == core
