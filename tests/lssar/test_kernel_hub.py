"""`python scripts/build_kernel_hub.py OUT`: what it writes, loaded by Hugging Face's package."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels", reason="pip install -r requirements-test.txt")

from lssar.errors import UserError

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/build_kernel_hub.py"), run_name="scripts.hub")

PROGRAM = """
import sys
from pathlib import Path

import torch
from kernels import get_loaded_kernels, get_local_kernel

kernel, names = get_local_kernel(Path(sys.argv[1])), sys.argv[3:]
q, k, v = torch.randn(3, 2, 4, 19, 8).unbind()
for name in names or kernel.MECHANISMS:
    backend = sys.argv[2] if names else "auto"
    out = kernel.attend(q.requires_grad_(), k[:, :2], v[:, :2], name, backend=backend)
    grouped = [x[:, :2].repeat_interleave(2, 1) for x in (k, v)]
    weights = kernel.attention_weights(q, grouped[0], name)
    torch.testing.assert_close(out, weights @ grouped[1], rtol=1e-3, atol=1e-4)
    out.sum().backward()
assert q.grad.isfinite().all()
assert not [m for m in sys.modules if m.partition(".")[0] == "lssar"]  # not the installed one
(loaded,) = get_loaded_kernels()
print(Path(kernel.__file__).parent.name, loaded.metadata.id.rpartition("_")[0],
      kernel.used_backend(kernel.MECHANISMS["lssar"]))
"""


def load(folder, *arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
    options = {"cwd": folder, "env": clean | environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_the_variant_of_a_processor_is_found_and_computes_the_reference(tmp_path):
    for name, backend in (("torch-cpu", "cpu"), ("torch-cuda", "cuda")):
        SCRIPT["write_variant"](tmp_path / "build" / name, backend)
    assert load(tmp_path) == ["torch-cpu", "_lssar_cpu", "cpu"]


def test_the_variant_of_gpus_computes_the_reference_in_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="pip install -r requirements-test.txt")
    variant = tmp_path / "torch-cuda"
    SCRIPT["write_variant"](variant, "cuda")
    found = load(variant, "triton", "lssar", "softmax", TRITON_INTERPRET="1")
    assert found[:2] == ["torch-cuda", "_lssar_cuda"]


@pytest.mark.slow
def test_what_is_compiled_needs_no_compiler(tmp_path):
    SCRIPT["main"]([str(tmp_path / "hub")])
    nothing = {"PATH": str(tmp_path), "CXX": "", "LSSAR_CACHE": str(tmp_path / "cache")}
    variant, name, backend = load(tmp_path / "hub", **nothing)
    assert variant.startswith("torch-stable-abi") and variant.endswith("-cpu-x86_64-linux")
    assert (name, backend) == ("_lssar_cpu", "cpu") and not (tmp_path / "cache").exists()
    assert load(tmp_path / "hub", ATEN_CPU_CAPABILITY="avx2", **nothing)[2] == "cpu"
    with pytest.raises(UserError, match="hub is not empty; give a new folder"):
        SCRIPT["main"]([str(tmp_path / "hub")])
