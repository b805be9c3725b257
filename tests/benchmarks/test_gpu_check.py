"""benchmark.py gpu-check on the CPU: all of it in small, and that a fault in a kernel is found."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark
from benchmarks import gpu_check
from benchmarks.flex import flex_lssa
from benchmarks.gpu_check import FAIL, PASS, SKIPPED
from benchmarks.precision import inputs
from lssar.backends import attend
from lssar.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    out = tmp_path_factory.mktemp("check") / "check.json"
    command = ["benchmark.py", "gpu-check", "--device", "cpu", "--quick", "--out", str(out)]
    # Without what conftest.py sets for processors that announce AMX and lack it: the check does it.
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())


def test_everything_passes_on_the_cpu_and_ends_with_a_block_to_paste(rehearsed):
    done, result = rehearsed
    assert not [c for c in result["checks"] if c["status"] == FAIL]
    assert done.returncode == 0
    for group in ("correct", "decode", "model", "speed"):
        assert any(c["name"].startswith(f"{group}: ") for c in result["checks"]), group
    _, _, pasted = done.stdout.partition("== to paste into an issue\n")
    assert result["revision"] in pasted and f"torch {torch.__version__}" in pasted
    assert "speed: forward+backward at 256, d 64: SDPA" in pasted
    assert f"{result['counts'][PASS]} pass, 0 FAIL" in pasted


def test_without_a_gpu_it_says_so_at_once_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"no GPU was found.*--device cpu") as caught:
        benchmark.main(["gpu-check", "--out", str(tmp_path / "check.json")])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_the_script_says_at_once_that_there_is_no_gpu_and_installs_nothing(tmp_path):
    for name in ("gpu_check.sh", "env.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    command = ["bash", str(tmp_path / "scripts/gpu_check.sh"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"error: no GPU was found.*--device cpu.*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


def test_lssa_in_flex_attention_is_lssa():
    q, k, v, _ = inputs("random", 130, 130, 32, 4, "cpu")
    with torch.no_grad():
        found = flex_lssa(q, k, v, compiled=False)
        torch.testing.assert_close(found, attend(q, k, v, "lssa"), rtol=1e-4, atol=1e-5)


def crash(*_):
    os._exit(9)


def fine(*_):
    return [gpu_check.row("x", PASS, "fine"), gpu_check.row("y", SKIPPED, "no need")]


def test_a_group_that_dies_is_a_failure_and_the_next_one_still_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "check_correct", crash)
    for name in ("check_decode", "check_model", "check_speed"):
        monkeypatch.setattr(gpu_check, name, fine)
    out = tmp_path / "new" / "x.json"
    assert benchmark.main(["gpu-check", "--device", "cpu", "--out", str(out)]) == 1
    saved = json.loads(out.read_text())
    assert [c["status"] for c in saved["checks"]] == [FAIL, *3 * (PASS, SKIPPED)]
    assert "killed" in saved["checks"][0]["detail"]
    assert "3 pass, 1 FAIL, 3 skipped" in capsys.readouterr().out
