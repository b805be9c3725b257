"""benchmark.py counts: what is counted, what it is put beside, and what was recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.triton_counts import (
    BOTH,
    COUNTED,
    DEVICES,
    FLASH,
    HEAD_DIMS,
    KERNELS,
    LABELS,
    RATES,
    count,
    draw,
    jobs,
    loops,
    ratios,
    work,
)
from evaluating.results import read_results
from lssar.errors import UserError

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results" / "triton_counts.json"
# Matrix products per tile, of (rows x D) by (D x keys) or their like, by the formulas: scores, and
# of an fp32 tile two each, as it is multiplied in two parts.
PRODUCTS = {
    FLASH: {"forward": 2, "dq": 3, "dkv": 4},
    "lssar": {"forward": 1 + 1 + 2 + 2, "dq": 4, "dkv": 5},  # a first pass; out and the guide
    "plain": {"forward": 1 + 2, "dq": 2 + 2, "dkv": 3 + 2},
}

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/              @!P0 LDG.E.64 R4, [R2.64] ;
        /*0030*/                   LDSM.16.M88.4 R8, [R3] ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   MUFU.EX2 R9, R8 ;
        /*0060*/                   FFMA R9, R8, R8, R9 ;
        /*0070*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/               @P1 BRA `(.L_x_2) ;
        /*0090*/                   FMNMX R9, R8, R9, PT ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   FADD R9, R8, R9 ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
"""


def test_the_innermost_loop_with_a_product_is_found_and_counted_by_hand():
    (inner,) = loops(SASS)
    assert inner == ["HMMA.16816.F32.BF16", "MUFU.EX2", "FFMA", "UIADD3", "BRA"]
    flop = 2 * 16 * 8 * 16 / 32  # of one thread of the warp
    assert work(inner) == {"issue": 5, "tensor": flop, "special": 1, "fp32": 1}


def test_bytes_and_warp_group_products_are_those_of_one_thread():
    moved = work(["LDGSTS.E.BYPASS.128", "LDG.E.64", "LDG.E", "LDSM.16.MT88.2", "LDSM.16.M88"])
    assert (moved["l1"], moved["l2"]) == (16 + 8 + 4 + 8 + 4, 16)
    assert work(["HGMMA.64x32x16.F32.BF16"])["tensor"] == 2 * 64 * 32 * 16 / 128
    assert work(["F2FP.BF16.PACK_AB", "F2F.BF16.F32", "USEL"]) == {
        "issue": 3,
        "alu": 1,
        "special": 1,
    }


@pytest.mark.parametrize("name", ["NEWOP.X", "UTMALDG.2D"])
def test_an_unknown_instruction_is_not_counted_as_something_else(name):
    with pytest.raises(RuntimeError, match=f"{name} is not known"):
        work([name])


def python(code, **environment):
    command = [sys.executable, "-c", code]
    options = {"cwd": ROOT, "env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_plain_flash_softmax_is_right_with_its_gradients():
    code = """
import torch
from benchmarks import flash_softmax as f
B, H, L, d = 2, 2, 77, 16
torch.manual_seed(0)
q, k, v, grad = (torch.randn(B, L, H, d).transpose(1, 2) for _ in range(4))
out, dq, dk, dv = (torch.full_like(q, torch.nan) for _ in range(4))
stats, delta = (torch.full((B, H, L), torch.nan) for _ in range(2))
leaves = [x.double().requires_grad_() for x in (q, k, v)]
exact = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
exact = [exact, *torch.autograd.grad(exact, leaves, grad.double())]
for M, N in ((32, 16), (16, 32)):
    rest = (q.stride()[:3], H, L, d**-0.5, d, M, N)
    blocks = [(-(-L // size), B * H) for size in (M, N)]
    f.forward_kernel[blocks[0]](q, k, v, out, stats, *rest)
    f.dq_kernel[blocks[0]](q, k, v, out, stats, grad, dq, delta, *rest)
    f.dkv_kernel[blocks[1]](q, k, v, stats, grad, dk, dv, delta, *rest)
    for found, expected in zip((out, dq, dk, dv), exact):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
"""
    python(code, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def recorded():
    return read_results(RECORDED)


def clocks(recorded):
    return [r for r in recorded.records if r.quantity == "clocks_per_element"]


def test_the_record_covers_every_kernel_and_says_what_it_is(recorded):
    assert (
        "estimate" in recorded.about["status"] and "not run on hardware" in recorded.about["status"]
    )
    assert len(recorded.about["assumptions"]) > 3
    expected = {
        (run, f"{kernel}, D={d}, {device}")
        for run in (FLASH, *LABELS.values())
        for kernel in (*KERNELS, BOTH)
        for d in HEAD_DIMS
        for device in DEVICES.values()
    }
    assert {(r.run, r.variant) for r in clocks(recorded)} == expected
    assert str(ROOT) not in RECORDED.read_text()


def test_recorded_products_are_those_of_the_formulas(recorded):
    checked = 0
    for r in clocks(recorded):
        kernel, d, _ = r.variant.split(", ")
        if kernel == BOTH:
            continue
        kind = FLASH if r.run == FLASH else "lssar" if r.run == LABELS["lssar"] else "plain"
        assert r.details["work"]["tensor"] == 2 * int(d[2:]) * PRODUCTS[kind][kernel], (
            r.run,
            r.variant,
        )
        checked += 1
    assert checked == (1 + len(COUNTED)) * 3 * 2 * 2


def test_recorded_clocks_and_ratios_follow_from_the_counts(recorded):
    devices = {device: RATES[sm] for sm, device in DEVICES.items()}
    sums, found = {}, {(r.run, r.variant): r.value for r in clocks(recorded)}
    for r in clocks(recorded):
        kernel, *place = r.variant.split(", ")
        if kernel != BOTH:
            times = {kind: n / devices[place[1]][kind] for kind, n in r.details["work"].items()}
            assert r.value == pytest.approx(max(times.values()))
            assert times[r.details["slowest"]] == max(times.values())
            sums[r.run, *place] = sums.get((r.run, *place), 0) + r.value
    for (run, *place), total in sums.items():
        assert found[run, ", ".join([BOTH, *place])] == pytest.approx(total)
    for r in recorded.records:
        if r.quantity == "ratio":
            assert r.value == pytest.approx(found[r.run, r.variant] / found[FLASH, r.variant])


def test_the_figure_has_every_mechanism_on_both_devices(recorded, tmp_path):
    for device in DEVICES.values():
        for label in LABELS.values():
            values = ratios(recorded.records, label, device)
            assert set(values) == {f"{k}, D={d}" for k in (*KERNELS, BOTH) for d in HEAD_DIMS}
    assert all(path.exists() for path in draw(recorded.records, tmp_path / "x.json"))
    assert RECORDED.with_suffix(".png").exists() and RECORDED.with_suffix(".pdf").exists()


def test_the_readme_has_what_was_recorded(recorded):
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for label in LABELS.values():
        cells = []
        for d in HEAD_DIMS:
            for device in DEVICES.values():
                values = ratios(recorded.records, label, device)
                cells.append(" / ".join(f"{values[f'{k}, D={d}']:.1f}" for k in ("forward", BOTH)))
        assert f"  | {label} | {' | '.join(cells)} |" in lines


def test_a_kernel_is_counted_again_as_recorded(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = {"mechanism": "lssar", "head_dim": 64, "sm": 90, "kernel": "dq"}
    (job,) = (job for job in jobs() if wanted.items() <= job.items())
    found = count(job)
    place = (LABELS["lssar"], "dq, D=64, H100")
    (r,) = (r for r in clocks(recorded) if (r.run, r.variant) == place)
    assert r.details["work"] == pytest.approx(found["work"])
    assert r.details["config"] == list(found["config"])


@pytest.mark.slow
def test_every_kernel_is_counted_again_as_recorded(recorded, tmp_path):
    out = tmp_path / "x.json"
    command = [sys.executable, "benchmark.py", "counts", "--workers", "2", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    again = read_results(out)
    assert [(r.key, r.value) for r in again.records] == [(r.key, r.value) for r in recorded.records]


def test_the_interpreter_is_refused(monkeypatch):
    import benchmark

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="TRITON_INTERPRET=1 is set"):
        benchmark.main(["counts"])
