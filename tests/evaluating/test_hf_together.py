"""Several exports, a copy of one, another version of one, and this repository in one process."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from eval_helpers import tiny_model, write_checkpoint

import export_hf
from lssar import triton_op

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

ids = torch.arange(7)[None]
found = {}
for folder in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    # A compiled graph goes through the registered operator, an ordinary call straight to the code.
    with torch.no_grad():
        plain = model(ids).logits
        graph = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    assert torch.allclose(plain, graph, rtol=1e-3, atol=1e-3), folder
    found[folder] = plain.double().sum((0, 1)).tolist()
    if not sys.argv[2].endswith("done"):
        model.save_pretrained(sys.argv[2])
        sys.argv[2] += "done"
    if "copy" in sys.argv[2]:
        sys.path.insert(0, sys.argv[3])
from lssar import attend
q = torch.randn(1, 2, 9, 8)
graph = torch.compile(attend, backend="eager")
assert torch.equal(graph(q, q, q, "lssar"), attend(q, q, q, "lssar"))
found["versions"] = [name for name in vars(torch.ops) if name.startswith("lssar")]
print(json.dumps(found))
"""


def another_version(folder: Path) -> Path:
    """Copy what an export takes from this repository, with a CPU kernel that doubles its output."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.h", "*.cpp", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for name in names.stdout.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    file = folder / "lssar/cpu.py"
    before = "    status = function(ctypes.byref(call))\n"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, before + "    outputs[0].mul_(2)\n"))
    return folder


@pytest.mark.slow
def test_several_exports_and_the_repository_share_a_process(tmp_path, monkeypatch):
    models = {"a": tiny_model("lssar", seed=1), "b": tiny_model("lssar", seed=2)}
    for name, model in models.items():
        run = write_checkpoint(tmp_path / f"run-{name}", model, tokeniser="bytes")
        export_hf.main([str(run), str(tmp_path / name)])
    monkeypatch.setattr(export_hf, "ROOT", another_version(tmp_path / "version"))
    export_hf.main([str(tmp_path / "run-b"), str(tmp_path / "other")])
    copy = tmp_path / "copy"
    folders = [str(tmp_path / "a"), str(tmp_path / "b"), str(copy), str(tmp_path / "other")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(folders), str(copy), str(ROOT)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found["versions"]) == 3 and found["versions"][-1] == "lssar"  # two exported
    ids = torch.arange(7)[None]
    for folder, name in zip(folders[:3], ("a", "b", "a"), strict=True):
        expected = models[name](ids).double().sum((0, 1)).tolist()
        assert found[folder] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert found[folders[3]] != pytest.approx(found[folders[1]], rel=1e-2)


def test_a_second_copy_of_the_gpu_operators_leaves_the_first_in_place():
    spec = importlib.util.spec_from_file_location("another_triton_op", triton_op.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    q = torch.empty(1, 2, 9, 8, device="meta")
    settings = (0, 2, 3, 15.0, 0.0, 0.0, 1024)
    for module in (triton_op, copy):
        assert module._forward is torch.ops.lssar.triton_forward_v5
        assert module._forward(q, q, q, None, *settings, True)[0].shape == q.shape
