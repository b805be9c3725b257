"""The CPU kernel and its reference on the same tensors: for the tests of both files about it."""

import math

import torch

from lssar.backends import attend
from lssar.mechanisms import get_mechanism
from lssar.reference import FLAT, attention_weights


def mechanism(p, alpha=0.0, train_length=1024):
    if p is None:
        return get_mechanism("lssa")
    return get_mechanism("lssar", p=p, alpha=alpha, train_length=train_length)


def eager(q, k, v, **options):
    return attend(q, k, v, mechanism(**options), backend="eager")


def fused(q, k, v, **options):
    return attend(q, k, v, mechanism(**options), backend="cpu")


def results(attention, tensors, dout, dtype, **options):
    """Return out, dq, dk, dv in float64, computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = attention(*leaves, **options)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype)))]


def distance(got, expected):
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def draw(*shape, lk=None):
    b, h, lq, d = shape
    return torch.randn(b, h, lq, d), *(torch.randn(b, h, lk or lq, d) for _ in range(2))


def flat_row(keys=70, d=64):
    """Return a query and keys whose row is flat by the reference's rule, but by no narrower one.

    Its largest excess over the mean is half of what the rule allows, about 2^-18.6 of its maximum.
    """
    q, k, v = draw(1, 1, 1, d, lk=keys)
    allowed = FLAT * (4 + math.log(d) * math.log(keys)) * torch.finfo(torch.float32).eps
    share = 1e-2
    for _ in range(4):
        alike = k[:, :, :1] + share * (k - k[:, :, :1])
        row = attention_weights(q.double(), alike.double(), "lssa")
        share *= allowed / 2 / (1 - row.mean() / row.max()).item()
    return q, alike, v


def rounded(*tensors):
    """Return four copies of the tensors, each rounded differently; None stays None."""
    return [
        [x if x is None else x * (1 + 2**-24 * torch.randn_like(x)) for x in tensors]
        for _ in range(4)
    ]
