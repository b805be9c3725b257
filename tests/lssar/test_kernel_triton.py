"""The Triton kernels without a GPU: interpreted against float64, compiled for A100 and H100.

Either way needs a process of its own: TRITON_INTERPRET is read when triton is first imported.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmark
from benchmarks import triton_compile
from lssar import attend, triton_op
from lssar.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
RESOURCES = ROOT / "results" / "triton_resources.json"


def python(*arguments, interpret, cwd=ROOT):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def interpreted(tests, marks):
    report = python(
        "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning",
        "-k", tests, "-m", marks, "tests/triton_interpreted.py", "tests/triton_mechanisms.py",
        interpret=True,
    )  # fmt: skip
    assert " passed" in report and "skipped" not in report


@pytest.mark.parametrize("tests", ["hostile", "accuracy and not hostile", "not accuracy"])
def test_interpreted_kernels_equal_float64(tests):
    interpreted(tests, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("span", ["full", "window", "documents", "random"])
def test_every_mechanism_equals_float64_with_every_span_in_every_type(span):
    interpreted(f"exhaustive and {span}", "slow")


@pytest.mark.slow
def test_more_mechanisms_equal_float64_on_hostile_input():
    interpreted("hostile", "slow")


def compiled(*arguments, tmp_path, cwd=ROOT):
    out = tmp_path / "resources.json"
    command = ("benchmark.py", "compile", "--head-dim", 64, *arguments, "--out", out)
    python(*command, interpret=False, cwd=cwd)
    return json.loads(out.read_text())["kernels"]


@pytest.fixture
def elsewhere(tmp_path):
    """The code in a place unlike any checkout; its path goes into debug information."""
    place = tmp_path / "a path with spaces" / "Überlänge-".ljust(100, "x") / "deeper"
    data = ("corpora", "results", "runs", "site", "tests", "wandb")
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", *data))
    return place


def test_first_configurations_compile_anywhere_for_a100_and_h100_as_recorded_without_a_spill(
    tmp_path, elsewhere
):
    rows = compiled("--first", tmp_path=tmp_path, cwd=elsewhere)
    assert {(row["kernel"], row["sm"], row["dtype"]) for row in rows} == {
        (kernel, sm, "bf16") for kernel in ("forward", "dq", "dkv") for sm in (80, 90)
    }
    assert all(row["spilled_bytes"] == 0 for row in rows)
    recorded = json.loads(RESOURCES.read_text())["kernels"]
    assert all(row in recorded for row in rows)


@pytest.mark.slow
def test_every_configuration_of_head_dim_64_compiles_as_recorded(tmp_path):
    rows = compiled("--workers", 2, tmp_path=tmp_path)
    recorded = json.loads(RESOURCES.read_text())["kernels"]
    assert rows == [row for row in recorded if row["head_dim"] == 64]


def test_recorded_resources_cover_every_shipped_configuration():
    table = json.loads(RESOURCES.read_text())
    assert "not run on hardware" in table["status"]
    keys = ("kernel", "head_dim", "dtype", "variant", "rows", "keys", "warps", "stages", "sm")
    recorded = {tuple(row[key] for key in keys) for row in table["kernels"]}
    shipped = {
        (job["kernel"], d, job["dtype"], job["variant"], *job["config"], sm)
        for d in triton_compile.HEAD_DIMS
        for job in triton_compile.jobs(d, first_only=False)
        for sm in triton_compile.ARCHITECTURES
    }
    assert recorded == shipped
    assert {row["dtype"] for row in table["kernels"]} == {"bf16", "fp16", "fp32"}
    variants = triton_compile.VARIANTS | triton_compile.OTHERS
    assert {row["variant"] for row in table["kernels"]} == set(variants)


def test_configurations_of_head_dim_64_do_not_spill():
    rows = [r for r in json.loads(RESOURCES.read_text())["kernels"] if r["head_dim"] == 64]
    assert len(rows) > 50
    assert not [row for row in rows if row["spilled_bytes"]]
    # 163 KiB is what an A100 gives a block; an H100 gives more.
    assert all(row["shared_bytes"] <= 163 * 1024 for row in rows)


def test_the_first_choice_of_head_dim_128_does_not_spill():
    chosen = []
    for row in json.loads(RESOURCES.read_text())["kernels"]:
        width = 4 if row["dtype"] == "fp32" else 2
        config = (row["rows"], row["keys"], row["warps"], row["stages"])
        if row["head_dim"] == 128 and config == triton_op.CONFIGS[row["kernel"], 128, width][0]:
            chosen.append(row)
    assert len(chosen) >= 2 * 3 * (len(triton_compile.VARIANTS) + 4)
    assert not [row for row in chosen if row["spilled_bytes"]]


def test_a_gpu_has_configurations_to_tune_for_every_kernel_type_and_head_dim():
    code = (
        "from lssar import triton_op as t\n"
        "for name in ('forward', 'dq', 'dkv'):\n"
        "    for d in (16, 32, 64, 128, 256):\n"
        "        for width in (2, 4):\n"
        "            for decode in (False, True):\n"
        "                tuner, fixed = t._kernel(name, d, width, decode)\n"
        "                assert tuner.configs and not fixed\n"
        "                shipped = t.CONFIGS[name, max(d, 64), width]\n"
        "                assert decode or len(tuner.configs) == len(shipped)\n"
    )
    python("-c", code, interpret=False)


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_one(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    places = {"HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    code = (
        "import os\n"
        f"os.environ |= {places}\n"
        "for name in ('TRITON_HOME', 'TRITON_CACHE_DIR'):\n"
        "    os.environ.pop(name, None)\n"
        "from benchmarks import triton_compile as t\n"
        "job = t.jobs(64, first_only=True)[0]\n"
        "print(t.resources(job | {'sm': 80})['registers'])\n"
    )
    assert int(python("-c", code, interpret=False)) > 0
    (private,) = (tmp_path / "tmp").glob("lssar-*")
    assert private.stat().st_mode & 0o777 == 0o700
    assert list(private.glob("triton/*/*.cubin"))


def test_compiling_under_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="unset it"):
        benchmark.main(["compile"])


def test_why_the_kernel_is_unavailable_is_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(UserError, match=r"not on cpu$"):
        attend(q, q, q, "lssar", backend="triton")
    assert triton_op.unavailable() == "no GPU is visible"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_op.unavailable() is None
    for x, reason in ((q.double(), "float64$"), (torch.zeros(1, 1, 2, 257), "256, not 257$")):
        with pytest.raises(UserError, match=reason):
            attend(x, x, x, "lssar", backend="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_op.unavailable() == "triton is not installed; pip install triton"


def test_a_triton_that_cannot_be_imported_is_unavailable(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise OSError('no symbol\\nfound')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from lssar import triton_op\n"
        "print(triton_op.unavailable())"
    )
    said = python("-c", code, interpret=False)
    assert said.count("\n") == 1 and "triton cannot be imported: OSError('no symbol" in said


def test_importing_the_operator_does_not_import_triton():
    code = "import sys; from lssar import triton_op; assert 'triton' not in sys.modules"
    python("-c", code, interpret=False)
