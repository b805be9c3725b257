"""benchmarks/precision.py: a kernel that loses more than eager is found."""

import torch

from benchmarks.precision import inputs, judge
from lssar.backends import BACKENDS, Backend


def slightly_wrong(q, k, v, m, params, span):
    return 1.0001 * BACKENDS["eager"].run(q, k, v, m, params, span)


def wrong_gradient(q, k, v, m, params, span):
    return BACKENDS["eager"].run(q, k.detach() + 0 * k, v, m, params, span)


def not_a_number(q, k, v, m, params, span):
    return BACKENDS["eager"].run(q, k, v, m, params, span) * torch.nan


def off_by_five_units(q, k, v, m, params, span):
    exact = BACKENDS["eager"].run(q.float(), k.float(), v.float(), m, params, span)
    return ((1 + 5 * torch.finfo(q.dtype).eps) * exact).to(q.dtype)


def test_a_wrong_kernel_fails(monkeypatch):
    tensors = inputs("random", 60, 60, 32, 4, "cpu")
    for dtype in ("fp32", "bf16", "fp16"):
        assert judge("lssar", tensors, dtype, "rowblock", None, None)[0], dtype
    faults = [(f, "fp32") for f in (slightly_wrong, wrong_gradient, not_a_number)]
    faults += [(off_by_five_units, dtype) for dtype in ("bf16", "fp16")]
    for fault, dtype in faults:
        monkeypatch.setitem(BACKENDS, "rowblock", Backend(fault))
        good, detail = judge("lssar", tensors, dtype, "rowblock", None, None)
        assert not good, (fault.__name__, dtype, detail)
        assert "allowed" in detail
