"""A command leaves its process as it found it: precision, threads, random numbers, signals."""

import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from eval_helpers import tiny_model, write_checkpoint, write_tokens

import attention_maps
import benchmark
import eval_extrapolation
import generate
import passkey
from evaluating.protocol import arithmetic
from far import audit

SHORT = ("--rounds", "1", "--threads", "2", "--out", "b.json")
COMMANDS = {
    "eval_extrapolation": (eval_extrapolation.main, "m", "--data", "d", "--lengths", "8,16"),
    "passkey": (passkey.main, "m", "--lengths", "400", "--trials", "1"),
    "audit": (audit.main, "m", "--task", "mqar", "--near", "64", "--times", "4", "--segments", "9"),
    "attention_maps": (attention_maps.main, "m"),
    "generate": (generate.main, "m", "--tokens", "3"),
    "attention": (benchmark.main, "attention", "--lengths", "8", "--backends", "sdpa", *SHORT),
    "train": (benchmark.main, "train", "--batch", "1", "--length", "8", "--rounds", "1"),
}


def state() -> dict:
    return {
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "torch's numbers": torch.get_rng_state().tolist(),
        "numpy's numbers": repr(np.random.get_state()),  # noqa: NPY002 - it must not be touched
        "python's numbers": random.getstate(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "folder": Path.cwd(),
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_its_process_as_it_was(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "m", tiny_model(), tokeniser="bytes")
    write_tokens(tmp_path / "d", 99)
    main, *options = COMMANDS[name]
    if name in ("eval_extrapolation", "passkey", "audit", "attention_maps"):
        options += ["--out", "x.json", "--device", "cpu"]
    torch.set_float32_matmul_precision("high")
    try:
        before = state()
        main(options)
        after = state()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {key: after[key] for key in before if after[key] != before[key]} == {}


def test_the_precision_is_put_back_after_a_failure():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyboardInterrupt), arithmetic("fp32", torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyboardInterrupt
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
