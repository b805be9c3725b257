"""benchmark.py sparsity, threads and zero-blocks: what they count, and the files they write."""

import pytest
import torch

import benchmark
from benchmarks.attention_study import (
    ALIKE,
    BLOCKS,
    RANDOM,
    SPARSITIES,
    counted_share,
    make_inputs,
    zero_shares,
)
from evaluating.results import read_results
from lssar import cpu
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism


def share(q, k, p):
    return counted_share(q, k, get_mechanism("lssar", p=p))


def test_the_share_of_one_row_counted_by_hand():
    """Scores far apart: at p = 15 the largest alone counts, at p = 1 all above the mean."""
    k = torch.eye(4)[None, None]
    q = torch.tensor([[1.0, 0.9, 0.1, -1.0]]).expand(4, 4)[None, None]
    # f falls with the key: rows 1..3 have no mean to fall below, row 4 keeps the two above it.
    assert share(q, k, 1) == pytest.approx((1 + 2 + 3 + 2) / 10)
    assert share(q, k, 1000) == pytest.approx(4 / 10)


def test_the_cases_reach_from_sparse_to_dense():
    options = benchmark.make_parser("sparsity").parse_args([])
    options.heads, options.head_dim = 12, 64
    random, alike = (make_inputs(options, 96, spread) for spread in (RANDOM, ALIKE))
    assert share(*random[:2], 40) < 0.15
    assert share(*alike[:2], 15) > 0.95


def values(results, quantity):
    return [r.value for r in results.records if r.quantity == quantity]


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_every_case_is_measured_and_drawn(tmp_path, capsys):
    out = tmp_path / "deep/sparsity.json"
    benchmark.main(
        ["sparsity", "--lengths", "33,64", "--rounds", "1", "--threads", "1", "--out", str(out)]
    )
    results = read_results(out)
    assert [
        (r.length, r.run, r.variant) for r in results.records if r.quantity == "counted_share"
    ] == [
        (n, f"LSSAR p={p:g}", f"cpu, {inputs}, 1 thread")
        for n in (33, 64)
        for spread, p in SPARSITIES
        for inputs in ["random" if spread is RANDOM else f"keys within {spread:g}"]
    ]
    for phase in ("forward", "forward_backward"):
        ratios = values(results, f"{phase}_ratio")
        assert len(ratios) == 2 * (len(SPARSITIES) + 1) and min(ratios) > 0
    assert out.with_suffix(".png").exists() and "counted share" in capsys.readouterr().out


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_one_and_two_threads_take_turns(tmp_path, capsys):
    before, out = torch.get_num_threads(), tmp_path / "threads.json"
    benchmark.main(
        ["threads", "--threads", "2", "--lengths", "64", "--rounds", "1", "--out", str(out)]
    )
    results = read_results(out)
    assert results.about["threads"] == results.settings["threads"] == 2
    times = {
        (r.run, r.variant[-9:].strip(" ,")): r.value
        for r in results.records
        if r.quantity == "forward_ms"
    }
    assert list(times) == [
        (run, n) for run in ("Softmax", "LSSAR p=15") for n in ("1 thread", "2 threads")
    ]
    for run, speed_up in zip(
        ("Softmax", "LSSAR p=15"), values(results, "forward_speed_up"), strict=True
    ):
        assert speed_up == pytest.approx(times[run, "1 thread"] / times[run, "2 threads"])
    assert torch.get_num_threads() == before
    assert "2 threads" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--threads 1: .* at least 2"):
        benchmark.main(["threads", "--threads", "1", "--lengths", "64"])


def test_blocks_that_nobody_looks_at_are_counted():
    # Two kinds of keys, half and half; every query looks at keys of its own kind only.
    kinds = torch.eye(2).repeat_interleave(64, 0).view(1, 1, 128, 2)
    x = torch.nn.functional.pad(kinds, (0, 62))
    found = zero_shares(x, x)
    # The square of late queries and early keys, of 64 x 64 entries.
    assert found[1, 1] == pytest.approx(64 * 64 / (128 * 129 / 2))
    assert found[64, 64] == 1
    assert found[32, 32] == 4 / 6
    assert found[16, 16] == 16 / 28


def test_no_block_of_random_input_is_zero(tmp_path):
    out = tmp_path / "zeros.json"
    benchmark.main(["zero-blocks", "--lengths", "256", "--out", str(out)])
    zeros, *blocks = read_results(out).records
    assert (zeros.quantity, zeros.length) == ("zero_share_1x1", 256)
    assert 0.5 < zeros.value < 0.7
    assert [b.quantity for b in blocks] == [f"zero_share_{m}x{n}" for m, n in BLOCKS[1:]]
    assert {b.value for b in blocks} == {0}


def test_a_length_without_a_whole_tile_is_one_line():
    with pytest.raises(UserError, match=r"--lengths 127: no tile of 64 x 64 .* at least 128"):
        benchmark.main(["zero-blocks", "--lengths", "127,256"])
