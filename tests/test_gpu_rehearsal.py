"""The GPU paths on a stand-in device: tests/gpu_rehearsal*.py, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_gpu_paths_on_a_stand_in_device(tier):
    rehearse("tests/gpu_rehearsal.py", tier)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")
def test_models_of_transformers_on_a_stand_in_device():
    pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")
    rehearse("tests/gpu_rehearsal_hf.py", "not slow")


def rehearse(script: str, tier: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "tests/stand_in.py", script, "-m", tier]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
