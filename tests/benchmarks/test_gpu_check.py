"""benchmark.py gpu-check on the CPU: all of it in small, and that a fault in a backend is found."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import benchmark
from benchmarks import attention_study, gpu_check
from benchmarks.gpu_check import (
    COMPILED_MECHANISMS,
    FAIL,
    MECHANISMS,
    PASS,
    SKIPPED,
    Case,
    cases,
    judge,
)
from benchmarks.measure import DTYPES
from lssar.backends import BACKENDS, Backend
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism

ROOT = Path(__file__).parents[2]
FLEX_SPANS = ("FULL", "WINDOW", "DOCUMENTS", "GROUPED")
FLEX_SPANS = tuple(getattr(attention_study, name) for name in FLEX_SPANS)


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


@pytest.fixture
def report(rehearsed):
    return rehearsed[0].returncode, rehearsed[1]


def test_without_a_gpu_it_says_so_at_once_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"no GPU was found.*--device cpu") as caught:
        benchmark.main(["gpu-check", "--out", str(tmp_path / "check.json")])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_every_check_is_on_screen_while_the_others_are_still_to_come(rehearsed):
    done, result = rehearsed
    groups = re.split(r"^== ", done.stdout.partition("\nwritten:")[0], flags=re.MULTILINE)[1:]
    for group in groups[:-2]:  # the last is followed by the table; training has two long checks
        title, _, said = group.partition("\n")
        found = [c for c in result["checks"] if c["name"].startswith(f"{title}: ")]
        for check in found:
            if check["status"] != SKIPPED:
                assert f"{check['status']:7}  {check['name'].removeprefix(f'{title}: ')}\n" in said
    assert len(groups) > 5


def test_everything_passes_on_the_cpu(report):
    code, result = report
    failed = [c for c in result["checks"] if c["status"] == FAIL]
    assert not failed
    assert code == 0
    assert result["counts"][PASS] == sum(c["status"] == PASS for c in result["checks"])


def test_every_part_was_checked_or_skipped_with_a_reason(report):
    checks = {c["name"]: c for c in report[1]["checks"]}
    for backend in BACKENDS:
        assert any(name.startswith(f"{backend}: ") for name in checks)
    assert all(c["detail"] for c in checks.values())
    assert "GPU" in checks["triton: lssar"]["detail"]
    for dtype in ("fp32", "bf16", "fp16"):
        assert checks[f"rowblock: lssar {dtype}"]["status"] == PASS
    for part in ("bf16 autocast", "decoding"):
        assert checks[f"model: lssar, {part}"]["status"] == PASS
    compiled = SKIPPED if " " in torch.__file__ else PASS
    assert checks["model: lssar, compiled"]["status"] == compiled


def test_ddp_over_gloo_gives_the_losses_of_one_process(report):
    checks = {c["name"]: c for c in report[1]["checks"]}
    alone = checks["torchrun: train.py on one device"]["losses"]
    both = checks["torchrun: DDP on two over gloo"]["losses"]
    assert len(alone) == len(both) == 6
    assert both == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0]


def test_the_benchmarks_numbers_are_in_the_report(report):
    (entry,) = (c for c in report[1]["checks"] if c["name"] == "benchmark: attention")
    assert {r["length"] for r in entry["result"]["records"]} == {64, 128}


def test_spans_are_measured_too(report):
    (entry,) = (c for c in report[1]["checks"] if c["name"] == "benchmark: spans")
    variants = {r["variant"] for r in entry["result"]["records"]}
    for seen in {s for pair in attention_study.SPANS.values() for s in pair} - {
        attention_study.FULL
    }:
        assert any(v.endswith(seen) for v in variants)


def test_the_last_thing_said_is_a_block_to_paste(rehearsed):
    done, result = rehearsed
    _, _, pasted = done.stdout.partition("== to paste into a report\n")
    assert result["revision"] in pasted and f"torch {torch.__version__}" in pasted
    assert f"{result['counts'][PASS]} pass, 0 FAIL" in pasted
    assert "flex: window of 128 at 300: SDPA, full rows forward ms" in pasted
    for part in ("benchmark: attention", "benchmark: spans", "forward ratio", "one row at the end"):
        assert part in pasted


def test_the_block_has_failures_flex_and_the_bars_but_not_every_time():
    head = {"revision": "abc+", "counts": {PASS: 3, FAIL: 1, SKIPPED: 0}}
    head["machine"] = {"name": "A100", "torch": "2.13", "cuda": "12.8"}
    place = {"run": "LSSAR p=15", "variant": "triton, random", "length": 16384}
    numbers = {"forward_ms": 7.123, "forward_ratio": 0.61, "forward_backward_MB": 812.5}
    records = [{"quantity": q, "value": value, **place} for q, value in numbers.items()]
    rows = [
        gpu_check.row("triton: lssar bf16", FAIL, "dq at odd: 1.0 of 0.1 allowed"),
        gpu_check.row("triton: lssa bf16", PASS, "out at odd"),
        gpu_check.row("flex: full rows at 2048", PASS, "ours forward ms 3", numbers={}),
        gpu_check.row("benchmark: attention", PASS, "3 numbers", result={"records": records}),
    ]
    pasted = gpu_check.block(head, rows)
    for part in (
        "A100, torch 2.13, CUDA 12.8, revision abc+: 3 pass, 1 FAIL, 0 skipped",
        "triton: lssar bf16: dq at odd: 1.0 of 0.1 allowed",
        "flex: full rows at 2048: ours forward ms 3",
        "0.61",
        "812.50",
        "16,384",
    ):
        assert part in pasted
    assert "lssa bf16" not in pasted and "7.12" not in pasted


@pytest.mark.parametrize("seen", FLEX_SPANS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_asked_for_the_same_span(seen):
    """Its forward on a CPU; there is no backward."""
    options = Namespace(batch=2, heads=8, head_dim=16, device="cpu", dtype="fp32", inputs="random")
    inputs = attention_study.make_inputs(options, 301)
    case = attention_study.Case(get_mechanism("softmax"), "eager", 301, seen=seen)
    flex = gpu_check.flex_call(seen, inputs[0])
    expected = attention_study.steps_of(case, inputs)[0]()
    found = attention_study.steps_of(case, inputs, flex)[0]()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


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


def test_full_check_covers_types_shapes_and_compilation_of_every_backend():
    for backend in BACKENDS:
        found = list(cases(backend, "cuda", quick=False))
        assert {(c.dtype, c.compiled) for c in found} == {
            (dtype, compiled) for dtype in ("fp32", "bf16", "fp16") for compiled in (False, True)
        }
        plain = next(c for c in found if not c.compiled)
        assert {"odd", "one token", "few tokens", "wide heads"} <= set(plain.shapes(quick=False))


# --- faults are found ----------------------------------------------------------------------------


CASE = Case("rowblock", "lssar", "fp32", compiled=False, device="cpu")


def slightly_wrong(q, k, v, m, params, span):
    return 1.0001 * BACKENDS["eager"].run(q, k, v, m, params, span)


def wrong_gradient(q, k, v, m, params, span):
    return BACKENDS["eager"].run(q, k.detach() + 0 * k, v, m, params, span)


def not_a_number(q, k, v, m, params, span):
    return BACKENDS["eager"].run(q, k, v, m, params, span) * torch.nan


def raises(q, k, v, m, params, span):
    raise RuntimeError("an illegal memory access\nand more")


@pytest.mark.parametrize(
    "fault, said",
    [
        (slightly_wrong, "allowed"),
        (wrong_gradient, "dk at odd"),
        (not_a_number, "nan"),
        (raises, "RuntimeError: an illegal memory access"),
    ],
)
def test_a_wrong_backend_fails(monkeypatch, fault, said):
    assert judge(CASE, ("odd",))["status"] == PASS
    monkeypatch.setitem(BACKENDS, "rowblock", Backend(fault))
    found = judge(CASE, ("odd",))
    assert found["status"] == FAIL
    assert said in found["detail"]
    assert "\n" not in found["detail"]


@pytest.mark.parametrize("dtype, unit", [("bf16", 2**-7), ("fp16", 2**-10)])
def test_a_fault_of_one_unit_of_a_16_bit_type_fails(monkeypatch, dtype, unit):
    def off(q, k, v, m, params, span):
        exact = BACKENDS["eager"].run(q.float(), k.float(), v.float(), m, params, span)
        return ((1 + unit) * exact).to(q.dtype)

    monkeypatch.setitem(BACKENDS, "rowblock", Backend(off))
    assert judge(Case("rowblock", "lssar", dtype, False, "cpu"), ("odd",))["status"] == FAIL


def crash(*_):
    os._exit(9)


def fine(*_):
    return [gpu_check.row("x", PASS, "fine"), gpu_check.row("y", SKIPPED, "no need")]


def test_a_group_that_dies_is_a_failure_and_the_next_one_still_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "BACKENDS", {})
    monkeypatch.setattr(gpu_check, "check_model", crash)
    for name in ("check_torchrun", "check_flex", "check_benchmark"):
        monkeypatch.setattr(gpu_check, name, fine)
    out = tmp_path / "new" / "x.json"
    assert benchmark.main(["gpu-check", "--device", "cpu", "--out", str(out)]) == 1
    saved = json.loads(out.read_text())
    assert [c["status"] for c in saved["checks"]] == [FAIL, *3 * (PASS, SKIPPED)]
    assert saved["counts"] == {PASS: 3, FAIL: 1, SKIPPED: 3}
    assert "killed" in saved["checks"][0]["detail"]
    assert "3 pass, 1 FAIL, 3 skipped" in capsys.readouterr().out


def interpreted(code):
    """Run it where TRITON_INTERPRET was set before triton was imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from benchmarks.gpu_check import *\n" + code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_triton_kernel_passes_in_the_interpreter():
    interpreted(
        "for dtype in ('fp32', 'bf16', 'fp16'):\n"
        "    case = Case('triton', 'lssar', dtype, False, 'cpu')\n"
        "    found = judge(case, ('a chunk',))\n"
        "    assert case.refuses() is None and found['status'] == PASS, found\n"
    )


# All shapes in all types, compiled by Inductor too, take minutes each in the interpreter. The other
# mechanisms have the shapes of a quick check, each in one of the types.
IN_FULL = [(name, dtype, False) for name in COMPILED_MECHANISMS for dtype in DTYPES]
OTHERS = [name for name in MECHANISMS if name not in COMPILED_MECHANISMS]
IN_SHORT = [(name, list(DTYPES)[i % len(DTYPES)], True) for i, name in enumerate(OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "dtype", "quick"), IN_FULL + IN_SHORT)
def test_checks_of_the_triton_kernel_pass_in_the_interpreter(mechanism, dtype, quick):
    interpreted(
        "taken = [c for c in cases('triton', 'cpu', quick=False) if c.refuses() is None]\n"
        f"assert {{c.mechanism for c in taken}} == set({list(MECHANISMS)})\n"
        f"mine = [c for c in taken if (c.mechanism, c.dtype) == ({mechanism!r}, {dtype!r})]\n"
        f"assert [c.compiled for c in mine] == {[False] if quick else [False, True]}\n"
        f"found = [judge(c, c.shapes(quick={quick})) for c in mine]\n"
        "assert all(r['status'] == PASS for r in found), found\n"
    )
