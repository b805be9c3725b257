"""NaN and inf in q and k: the CPU kernel gives NaN to the rows that see them, and to no other."""

import math

import pytest
import torch
from cases import cases

from lssar import cpu
from lssar.backends import attend
from lssar.mechanisms import MECHANISMS, get_mechanism

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
FUSED = [name for name, m in MECHANISMS.items() if m.norm != "stick"]


def seen_keys(rows, keys, queries, window):
    """Return the keys that marked rows (B, H, Lq) see, as marks (B, G, Lk) of two heads."""
    marks = torch.zeros(rows.shape[0], 2, keys, dtype=torch.bool)
    for b, h, i in rows.nonzero().tolist():
        place = keys - queries + i
        marks[b, h // (rows.shape[1] // 2), max(0, place - window + 1) : place + 1] = True
    return marks


def check(found, marked, clean):
    """Check for NaN in all columns of what is marked, and the clean values everywhere else."""
    assert torch.equal(found.isnan(), marked[..., None].expand_as(found))
    torch.testing.assert_close(found[~marked], clean[~marked], rtol=1e-4, atol=1e-4)


def test_exactly_the_rows_that_see_it_are_nan_forward_and_backward():
    lengths = [(150, 150), (3, 200), (1, 130), (100, 333)]
    bad_values = [math.nan, math.inf, -math.inf]
    for name, bad, (queries, keys), window in cases(FUSED, bad_values, lengths, [None, 40]):
        m = get_mechanism(name, window=window)
        q = torch.randn(2, 4, queries, 16)
        k, v = torch.randn(2, 2, 2, keys, 16).unbind()
        grad = torch.randn(2, 4, queries, 16)
        row = queries // 2
        key = keys - queries + queries // 3
        places = torch.arange(keys - queries, keys)
        rows = torch.zeros(2, 4, queries, dtype=torch.bool)
        rows[0, 1, row] = True  # of a bad query
        rows[1, 2:] = (places >= key) & (places - (window or keys) < key)  # of a bad key

        clean_q, clean_k = q.clone(), k.clone()
        clean_q[0, 1, row] = 0
        clean_k[1, 1, key] = 0
        leaves = [x.requires_grad_() for x in (clean_q, clean_k, v.clone())]
        clean = attend(*leaves, m, backend="cpu")
        others = grad.masked_fill(rows[..., None], 0)  # marked rows have no share in the gradients
        clean_grads = torch.autograd.grad(clean, leaves, others)

        q[0, 1, row, 3] = bad
        k[1, 1, key, 5] = bad
        check(attend(q, k, v, m, backend="cpu"), rows, clean.detach())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, m, backend="cpu")
        grad_q, grad_k, grad_v = torch.autograd.grad(out, leaves, grad)
        marked = seen_keys(rows, keys, queries, window or keys)
        check(out.detach(), rows, clean.detach())
        check(grad_q, rows, clean_grads[0])
        check(grad_k, marked, clean_grads[1])
        check(grad_v, marked, clean_grads[2])


def test_padding_that_nobody_sees_may_hold_anything():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 16).unbind()
    first = torch.full((1, 50), 9)
    expected = attend(q, k, v, "lssar", first=first, backend="cpu")
    spoilt = [x.clone() for x in (q, k, v)]
    for x in spoilt:
        x[:, :, :9] = math.nan
    leaves = [x.requires_grad_() for x in spoilt]
    out = attend(*leaves, "lssar", first=first, backend="cpu")
    assert torch.equal(out, expected)
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert (grad[:, :, :9] == 0).all() and grad.isfinite().all()
