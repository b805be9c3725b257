"""benchmark.py zero-blocks: the shares are those that can be counted by hand."""

import pytest
import torch

import benchmark
from benchmarks import zero_blocks


def test_blocks_that_nobody_looks_at_are_counted():
    # Two kinds of keys, half and half; every query looks at keys of its own kind only.
    kinds = torch.eye(2).repeat_interleave(64, 0).view(1, 1, 128, 2)
    x = torch.nn.functional.pad(kinds, (0, 62))
    found = dict(zip(zero_blocks.SIZES, zero_blocks.shares(x, x), strict=True))
    # The square of late queries and early keys, of 64 x 64 entries.
    assert found[1, 1] == pytest.approx(64 * 64 / (128 * 129 / 2))
    assert found[64, 64] == 1
    assert found[32, 32] == 4 / 6
    assert found[16, 16] == 16 / 28


def test_no_block_of_random_input_is_zero(capsys):
    benchmark.main(["zero-blocks", "--lengths", "256"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["layer", "length", "zeros", "64x64"]
    layer, length, zeros, *blocks = row.split()
    assert (layer, length) == ("1", "256") and 50 < float(zeros.rstrip("%")) < 70
    assert blocks == ["0.00%"] * len(zero_blocks.BLOCKS)
