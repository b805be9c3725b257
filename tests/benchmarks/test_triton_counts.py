"""benchmark.py kernels: what is counted, what it is put beside, and what was recorded."""

import json
import os
import subprocess
import sys

import pytest
from cases import cases
from checkout import ROOT, write_committed

import benchmark
from benchmarks.triton_compile import FLASH
from benchmarks.triton_counts import ASSUMED, RATES, calibrated, loops, together, work
from benchmarks.triton_estimates import PASSES, estimates, markdown_table
from lssar.errors import UserError

RECORDED = "results/triton_kernels.json"

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


def test_an_unknown_instruction_is_not_counted_as_something_else():
    for name in cases(["NEWOP.X", "UTMALDG.2D"]):
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
from lssar.triton_interpreter import copy_places
from triton.runtime.interpreter import InterpreterBuilder
InterpreterBuilder.create_inline_asm = copy_places
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
def recorded(tmp_path_factory):
    """Read the counts as committed, whatever results/ holds now."""
    folder = tmp_path_factory.mktemp("committed")
    write_committed(folder, RECORDED)
    return json.loads((folder / RECORDED).read_text())


def test_recorded_products_are_those_of_the_formulas(recorded):
    """Matrix products per tile, of (rows x D) by (D x keys) or their like, and the row sum."""
    products = {
        FLASH: {"forward": 2, "dq": 3, "dkv": 4},
        "lssa": {"forward": 2, "dq": 3, "dkv": 4},
        "lssar": {"forward": 3, "dq": 4, "dkv": 4},
    }
    checked = 0
    for row in recorded["kernels"]:
        if row["form"] in products and "work" in row and row["dtype"] == "bf16":
            d = row["head_dim"]
            expected = 2 * d * products[row["form"]][row["kernel"]]
            if row["form"] != FLASH and row["kernel"] == "forward":
                expected += 2 * 16
            if d <= 128:
                assert row["work"]["tensor"] == expected, row
                checked += 1
    assert checked == 3 * 3 * 2 * 2


def test_recorded_estimates_follow_from_the_counts_and_meet_published_speeds(recorded):
    rows = recorded["kernels"]
    for found, expected in zip(recorded["estimates"], estimates(rows), strict=True):
        assert found == pytest.approx(expected)
    for sm, published in ASSUMED["published"].items():
        d = published["head_dim"]
        place = {"form": FLASH, "sm": int(sm), "head_dim": d}
        flash = {r["kernel"]: r["clocks"] for r in rows if place.items() <= r.items()}
        passes = [flash[kernel] for kernel in PASSES[published["passes"]]]
        n = calibrated(passes, d, int(sm))
        clocks = sum(together(x, n) for x in passes)
        least = 2 * d * published["products"] / RATES[int(sm)]["tensor"]
        assert least / clocks * published["peak"] == pytest.approx(published["teraflops"], rel=1e-3)
    for row in recorded["estimates"]:
        assert row["slowest"] > 0 and row["serial"] > 0


def test_the_documentation_has_the_recorded_table(recorded):
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    for line in markdown_table(recorded["estimates"]).splitlines():
        assert line in text


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="TRITON_INTERPRET=1 is set"):
        benchmark.main(["kernels"])
