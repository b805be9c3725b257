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
from lssar import attend, triton_op, triton_table
from lssar.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "triton_kernels.json"


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


def test_sums_of_16_bit_products_may_be_truncated(monkeypatch):
    """Some tensor cores cut digits off; the bar stays that of eager, which rounds."""
    monkeypatch.setenv("LSSAR_TRUNCATE", "1")
    interpreted("hostile_input_is_eagers and (dtype1 or dtype2) or random_16_bit", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("span", ["full", "window", "documents", "random"])
def test_every_mechanism_equals_float64_with_every_span_in_every_type(span):
    interpreted(f"exhaustive and {span}", "slow")


@pytest.mark.slow
def test_more_mechanisms_equal_float64_on_hostile_input():
    interpreted("hostile", "slow")


def test_kernels_of_an_a100_and_an_h100_compile_anywhere_as_recorded(tmp_path):
    """In a place unlike any checkout; its path goes into debug information."""
    place = tmp_path / "a path with spaces" / "Überlänge-".ljust(100, "x") / "deeper"
    data = ("corpora", "results", "runs", "site", "tests", "wandb")
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", *data))
    out = tmp_path / "kernels.json"
    python("benchmark.py", "kernels", "--first", "--out", out, interpret=False, cwd=place)
    rows = json.loads(out.read_text())["kernels"]
    assert {(row["kernel"], row["sm"]) for row in rows} == {
        (kernel, sm) for kernel in ("forward", "dq", "dkv") for sm in (80, 90)
    }
    recorded = json.loads(RECORDED.read_text())["kernels"]
    assert all(row in recorded for row in rows)


def test_kernels_of_keys_in_parts_compile():
    code = """
from benchmarks.triton_compile import FORMS, compile_for
from lssar.triton_form import kernel_function
for sm, name, form in (
    (80, "sums", "lssar"), (90, "values", "lssar"), (80, "values", "lssa"),
    (90, "combine", "softmax"), (80, "values", "softmax"),
):
    compiled = compile_for(sm, kernel_function(name), 64, "bf16", FORMS[form], (16, 64, 4, 2))
    print(name, form, compiled.metadata.shared)
"""
    assert python("-c", code, interpret=False).count("\n") == 5


def test_recorded_kernels_are_those_of_the_table_and_fit_their_cards():
    table = json.loads(RECORDED.read_text())
    assert "not run on hardware" in table["status"]
    keys = ("kernel", "sm", "head_dim", "dtype", "form", "config")
    recorded = [{key: row[key] for key in keys} for row in table["kernels"]]
    assert recorded == triton_compile.jobs()
    assert {row["sm"] for row in recorded} == set(triton_table.TILES)
    for row in table["kernels"]:
        name = {key: row[key] for key in keys}
        if row["form"] == triton_compile.FLASH:
            continue
        assert row["shared_bytes"] <= 1024 * triton_table.SHARED_KIB[row["sm"]], name
        assert row["spilled_bytes"] == 0, name


def test_a_card_without_an_entry_takes_the_next_smaller_one_with_a_notice():
    triton_table.entry_of.cache_clear()
    for card, entry in ((87, 86), (103, 100), (121, 120)):
        with pytest.warns(UserWarning, match=f"sm_{card}; they take those of sm_{entry}"):
            assert triton_table.entry_of(card) == entry
    for card in triton_table.TILES:
        for name in ("forward", "dq", "dkv"):
            for d in (16, 64, 128, 256):
                for bits in (16, 32):
                    for plain in (False, True):
                        assert len(triton_table.tiles(name, d, bits, plain, card)) == 4


def test_a_growing_cache_or_prompt_compiles_nothing_anew():
    """By Triton's own key of what a launch is compiled for, over a thousand lengths."""
    code = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from lssar import key_parts, triton_form, triton_op
from lssar.backends import attend

triton_form.interpreting = triton_op.interpreting = lambda: True
found, binders = {}, {}
def launch(name, kernel, grid, arguments, q, **constants):
    if name not in binders:
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        binders[name] = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialisation, _ = binders[name](*arguments, **constants)
    found.setdefault((what, name), set()).add(str(specialisation))
triton_form.launch = triton_op.launch = launch
cache = torch.zeros(1, 2, 1000, 64, dtype=torch.bfloat16)
q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
rows = torch.zeros(1, 4, 100, 64, dtype=torch.bfloat16)
with torch.no_grad():
    for length in range(1, 1001):
        for name in ("lssar", "lssa"):
            seen = cache[:, :, :length]
            what = f"{name}, a slice of a cache"
            attend(q, seen, seen, name, backend="triton")
            what = f"{name}, a cache that is copied"
            attend(q, seen.contiguous(), seen.contiguous(), name, backend="triton")
            if length >= 100:
                what = f"{name}, a chunk"
                attend(rows, seen, seen, name, backend="triton")
assert len(found) >= 10, found.keys()
print({key: len(kinds) for key, kinds in found.items() if len(kinds) != 1})
"""
    assert python("-c", code, interpret=False).strip() == "{}"


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
        "print(t.resources(t.jobs(first_only=True)[0])['registers'])\n"
    )
    assert int(python("-c", code, interpret=False)) > 0
    (private,) = (tmp_path / "tmp").glob("lssar-*")
    assert private.stat().st_mode & 0o777 == 0o700
    assert list(private.glob("triton/*/*.cubin"))


def test_compiling_under_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="unset it"):
        benchmark.main(["kernels"])


def test_why_the_kernel_is_unavailable_is_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(UserError, match=r"not on cpu$"):
        attend(q, q, q, "lssar", backend="triton")
    assert triton_op.unavailable() == "no GPU is visible"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_op.unavailable() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton_op.unavailable() == "Triton has no tensor cores on sm_75; sm_80 has"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
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
