"""Visible spans and grouped heads, by every backend, against each row's span cut out."""

import itertools

import loops
import pytest
import torch
from cases import cases

from lssar.backends import attend, attend_padded
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import (
    document_starts,
    documents,
    padding,
    shifted_keys,
    token_positions,
    window,
)

BACKENDS = ("eager", "rowblock")  # the fused kernel, in float32, is judged in test_kernel_cpu.py
HEADS, DIM, WIDTH = 2, 6, 11
LEFT = [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * WIDTH, [0] * 10 + [1]]
RIGHT = [[1] * 7 + [0] * 4, [1] * WIDTH, [1] + [0] * 10]
HOLES = [[1] * 3 + [0] * 4 + [1] * 4, [1] * 5 + [0] * 2 + [1] * 4, [1] * 3 + [0] * 4 + [1] * 4]


def inputs(batch: int, queries: int, keys: int = WIDTH):
    q = torch.randn(batch, HEADS, queries, DIM, dtype=torch.float64)
    k, v = torch.randn(2, batch, HEADS, keys, DIM, dtype=torch.float64)
    return q, k, v


def alone(q, k, v, mechanism, mask):
    """Attend to each sequence cut out, by the reference matrix, and put it back among zeros."""
    out = torch.zeros_like(q)
    for row, valid in enumerate(mask):
        asking = valid[len(valid) - q.shape[2] :]
        if asking.any():
            weights = attention_weights(
                q[row : row + 1, :, asking], k[row : row + 1, :, valid], mechanism
            )
            out[row, :, asking] = (weights @ v[row : row + 1, :, valid])[0]
    return out


def test_padding_changes_nothing_for_any_mechanism():
    for mechanism, tokens, queries in cases(MECHANISMS, [LEFT, RIGHT, HOLES], [WIDTH, 4, 1]):
        mask = torch.tensor(tokens, dtype=bool)
        q, k, v = inputs(len(tokens), queries)
        got = attend_padded(q, k, v, mechanism, mask)
        expected = alone(q, k, v, mechanism, mask)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


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
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    assert got[1].transpose(1, 2)[~mask].count_nonzero() == 0


def test_positions_count_tokens_only():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=bool)
    assert token_positions(mask, 5)[mask].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]
    assert token_positions(mask, 1).tolist() == [[2], [2], [4]]


# --- spans ---------------------------------------------------------------------------------------


def rows_cut_out(name, q, k, v, first, params):
    """Attend by each row alone to the keys it sees, by the loops of tests/loops.py."""
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        start, end = int(first[b, i]), k.shape[2] - queries + i + 1
        if start < end:
            keys = k[b, h // group, start:end].tolist()
            scalar = None if params is None else params[h].item()
            row = loops.row(name, q[b, h, i].tolist(), keys, param=scalar)
            out[b, h, i] = torch.tensor(row, dtype=torch.float64) @ v[b, h // group, start:end]
    return out


def test_any_span_and_grouped_heads_equal_the_rows_cut_out():
    for name in cases(MECHANISMS):
        queries, keys = 9, 13
        q = torch.randn(2, 4, queries, 8, dtype=torch.float64)
        k = torch.randn(2, 2, keys, 8, dtype=torch.float64)
        v = torch.randn(2, 2, keys, 5, dtype=torch.float64)
        params = None
        if MECHANISMS[name].parameter_init is not None:
            params = 0.3 + torch.rand(4, dtype=torch.float64)
        first = torch.randint(0, keys, (2, queries))  # in any order, some beyond the row itself
        expected = rows_cut_out(name, q, k, v, first, params)
        for backend in cases(BACKENDS):
            got = attend(q, k, v, name, first=first, head_scale=params, backend=backend)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_gradients_of_spans_and_groups_are_those_of_copies_and_cuts():
    """Against heads copied out, and documents attended to one by one."""
    for backend, name in cases(BACKENDS, ["softmax", "lssar", "relu-shen", "softmax-recentred-l1"]):
        starts, keys = (0, 5, 6, 20), 33
        first = document_starts(torch.tensor([[i in starts for i in range(keys)]]))
        q = torch.randn(1, 6, keys, 8, dtype=torch.float64, requires_grad=True)
        k = torch.randn(1, 2, keys, 8, dtype=torch.float64, requires_grad=True)
        v = torch.randn(1, 2, keys, 8, dtype=torch.float64, requires_grad=True)
        probe = torch.randn(1, 6, keys, 8, dtype=torch.float64)

        out = attend(q, k, v, name, first=first, backend=backend)
        copied = [x.repeat_interleave(3, dim=1) for x in (k, v)]
        alone = torch.cat(
            [
                attend(*(x[:, :, i:j] for x in (q, *copied)), name, backend="eager")
                for i, j in zip(starts, (*starts[1:], keys), strict=True)
            ],
            dim=2,
        )
        torch.testing.assert_close(out, alone)
        got = torch.autograd.grad(out, (q, k, v), probe)
        for mine, theirs in zip(got, torch.autograd.grad(alone, (q, k, v), probe), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_window_is_a_span():
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.float64).unbind()
    for backend in BACKENDS:
        windowed = attend(q, k, v, get_mechanism("lssar", window=7), backend=backend)
        spanned = attend(q, k, v, "lssar", first=window(7, 40), backend=backend)
        assert torch.equal(windowed, spanned)
    both = attend(q, k, v, get_mechanism("lssar", window=7), first=window(5, 40))
    assert torch.equal(both, attend(q, k, v, "lssar", first=window(5, 40)))


def test_documents_begin_at_their_end_of_text_token():
    tokens = torch.tensor([[5, 0, 7, 8, 0, 0, 9], [0, 1, 2, 3, 4, 5, 6]])
    expected = [[0, 1, 1, 1, 4, 5, 5], [0] * 7]
    assert documents(tokens, end_of_text=0).tolist() == expected
    assert document_starts(tokens == 0).tolist() == expected


def test_left_padding_is_a_span_and_other_padding_is_not():
    mask = torch.tensor(LEFT, dtype=bool)
    assert padding(mask, 2).tolist() == [[3, 3], [0, 0], [10, 10]]
    with pytest.raises(UserError, match="use attend_padded"):
        padding(torch.tensor(RIGHT, dtype=bool), 2)


def test_a_span_of_another_shape_or_type_is_refused_in_one_line():
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    for first in (torch.zeros(6), torch.zeros(5, dtype=torch.long), torch.zeros(2, 6).bool()):
        with pytest.raises(UserError, match=r"integer tensor \(B, Lq\) or \(Lq,\), here \(2, 6\)"):
            attend(q, k, v, "lssar", first=first)


def test_heads_that_do_not_divide_are_refused():
    q, k = torch.randn(1, 4, 6, 4), torch.randn(1, 3, 6, 4)
    with pytest.raises(UserError, match="heads of q that the heads of k and v divide"):
        attend(q, k, k, "lssar")


def test_a_mask_and_a_span_together_are_refused():
    q, k, v = inputs(3, WIDTH)
    with pytest.raises(UserError, match="makes first from its mask; give one of the two"):
        attend_padded(q, k, v, "lssar", torch.tensor(LEFT, dtype=bool), first=window(4, WIDTH))


def test_shifted_keys_are_those_of_the_token_before_in_the_same_sequence():
    for dtype in cases([torch.int32, torch.int64]):
        k = torch.randn(2, 3, 9, 4)
        assert torch.equal(shifted_keys(k)[:, :, 0], k[:, :, 0])
        assert torch.equal(shifted_keys(k)[:, :, 1:], k[:, :, :-1])
        packed = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5, 8], [0] * 9], dtype=dtype)
        # The last two queries of a cache; one that begins at the end sees nothing.
        cached = torch.tensor([[5, 9]] * 2, dtype=dtype)
        for first in (packed, packed[0], cached):
            rows = first if first.dim() == 2 else first.expand(2, -1)
            got = shifted_keys(k, first)
            for b in range(2):
                for j in range(9):
                    own = j == 0 or j in rows[b]
                    assert torch.equal(got[b, :, j], k[b, :, j if own else j - 1])


def test_a_padding_mask_is_not_taken_for_first():
    q, k, v = torch.randn(3, 2, 1, 5, 8).unbind()
    right = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(UserError, match=r"zeros and ones of a padding mask; lssar\.spans\.padding"):
        attend(q, k, v, first=right)
    with pytest.raises(UserError, match=r"got torch\.bool .*; lssar\.spans\.padding"):
        attend(q, k, v, first=right.bool())
    meant = {
        "a document from the second token on": [0, 1, 1, 1, 1],
        "a window of four": [0, 0, 0, 0, 1],
        "one token of padding": [1, 1, 1, 1, 1],
    }
    for what, first in meant.items():
        out = attend(q, k, v, first=torch.tensor(first))
        assert out.isfinite().all(), what
