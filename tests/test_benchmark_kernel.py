"""benchmarks/sparsity.py and threads.py: what they count, and the files they write."""

import json

import pytest
import torch

import benchmark
from benchmarks.sparsity import ALIKE, CASES, RANDOM, counting, inputs_of
from kernels import cpu


def test_the_share_of_one_row_counted_by_hand():
    """Scores far apart: at p = 15 the largest alone counts, at p = 1 all above the mean."""
    k = torch.eye(4)[None, None]
    q = torch.tensor([[1.0, 0.9, 0.1, -1.0]]).expand(4, 4)[None, None]
    # f falls with the key: rows 1..3 have no mean to fall below, row 4 keeps the two above it.
    assert counting(q, k, 1) == pytest.approx((1 + 2 + 3 + 2) / 10)
    assert counting(q, k, 1000) == pytest.approx(4 / 10)


def test_the_cases_reach_from_sparse_to_dense():
    random, alike = inputs_of(RANDOM, 96), inputs_of(ALIKE, 96)
    assert counting(*random[:2], 40) < 0.15
    assert counting(*alike[:2], 15) > 0.95


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_every_case_is_measured_and_drawn(tmp_path, capsys):
    out = tmp_path / "deep/sparsity.json"
    benchmark.main(
        ["sparsity", "--lengths", "33,64", "--rounds", "1", "--threads", "1", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(r["length"], r["spread"], r["p"]) for r in rows] == [
        (n, *case) for n in (33, 64) for case in CASES
    ]
    assert all(r["forward"] > 0 and r["forward+backward"] > 0 for r in rows)
    assert out.with_suffix(".png").exists() and "entries that count" in capsys.readouterr().out


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_one_and_two_threads_take_turns(tmp_path, capsys):
    before, out = torch.get_num_threads(), tmp_path / "threads.json"
    benchmark.main(
        ["threads", "--threads", "2", "--lengths", "64", "--rounds", "1", "--out", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [r["contestant"] for r in rows] == ["softmax sdpa"] * 2 + ["lssar cpu"] * 2
    assert all(r["speed_up"] == pytest.approx(r["one"] / r["several"]) for r in rows)
    assert torch.get_num_threads() == before
    assert "2 threads, ms" in capsys.readouterr().out
