"""A padded batch gives what each sequence gives alone, for every mechanism and any padding."""

import pytest
import torch

from lssar.backends import attend
from lssar.mechanisms import MECHANISMS
from lssar.padding import attend_padded, token_positions
from lssar.reference import attention_weights

HEADS, DIM, WIDTH = 2, 6, 11
LEFT = [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * WIDTH, [0] * 10 + [1]]
RIGHT = [[1] * 7 + [0] * 4, [1] * WIDTH, [1] + [0] * 10]
HOLES = [[1] * 3 + [0] * 4 + [1] * 4, [1] * 5 + [0] * 2 + [1] * 4, [1] * 3 + [0] * 4 + [1] * 4]


def inputs(batch: int, queries: int, keys: int = WIDTH):
    q = torch.randn(batch, HEADS, queries, DIM, dtype=torch.float64)
    k, v = torch.randn(2, batch, HEADS, keys, DIM, dtype=torch.float64)
    return q, k, v


def alone(q, k, v, mechanism, mask):
    """Each sequence cut out, through the reference matrix, put back among zeros."""
    out = torch.zeros_like(q)
    for row, valid in enumerate(mask):
        asking = valid[len(valid) - q.shape[2] :]
        if asking.any():
            weights = attention_weights(
                q[row : row + 1, :, asking], k[row : row + 1, :, valid], mechanism
            )
            out[row, :, asking] = (weights @ v[row : row + 1, :, valid])[0]
    return out


@pytest.mark.parametrize("padding", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_padding_changes_nothing_for_any_mechanism(mechanism, padding):
    mask = torch.tensor(padding, dtype=bool)
    for queries in (WIDTH, 4, 1):
        q, k, v = inputs(len(padding), queries)
        got = attend_padded(q, k, v, mechanism, mask)
        torch.testing.assert_close(got, alone(q, k, v, mechanism, mask), rtol=1e-10, atol=1e-12)


def test_what_stands_at_a_padded_place_is_never_looked_at():
    mask = torch.tensor(LEFT, dtype=bool)
    q, k, v = inputs(3, WIDTH)
    clean = attend_padded(q, k, v, "lssar", mask)
    for tensor in (q, k, v):
        tensor.transpose(1, 2)[~mask] = torch.nan
    assert torch.equal(attend_padded(q, k, v, "lssar", mask), clean)
    assert clean.transpose(1, 2)[~mask].count_nonzero() == 0


def test_room_in_a_cache_beyond_the_mask_does_not_exist():
    q, k, v = inputs(2, 3, keys=20)
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    full = torch.ones(2, 9, dtype=bool)
    expected = attend(q, k[:, :, :9], v[:, :, :9], "lssar")
    assert torch.equal(attend_padded(q, k, v, "lssar", full), expected)


def test_gradients_are_those_of_the_sequences_alone():
    mask = torch.tensor(HOLES, dtype=bool)
    leaves = [t.requires_grad_() for t in inputs(3, 4)]
    probe = torch.randn(3, HEADS, 4, DIM, dtype=torch.float64)
    got = torch.autograd.grad((attend_padded(*leaves, "lssar", mask) * probe).sum(), leaves)
    expected = torch.autograd.grad((alone(*leaves, "lssar", mask) * probe).sum(), leaves)
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-10)
    assert got[1].transpose(1, 2)[~mask].count_nonzero() == 0


def test_positions_count_tokens_only():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=bool)
    assert token_positions(mask, 5)[mask].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]
    assert token_positions(mask, 1).tolist() == [[2], [2], [4]]
