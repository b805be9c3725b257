"""Compares the errors of a backend with those of eager, both against float64.

In 16 bits eager multiplies as under autocast; the output may lose twice as much, gradients three
times, as FlashAttention's tests have it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import DTYPES
from lssar import backends, reference
from lssar.backends import attend
from lssar.mechanisms import get_mechanism

FLOOR = 2**-22  # a few roundings of fp32, for sums in another order


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Let eager multiply as it does under autocast: operands and products in 16 bits."""
    exact = reference.grouped_product

    def product(a: Tensor, b: Tensor) -> Tensor:
        return exact(a.to(dtype).float(), b.to(dtype).float()).to(dtype).float()

    with (
        mock.patch.object(reference, "grouped_product", product),
        mock.patch.object(backends, "grouped_product", product),
    ):
        yield


def inputs(kind: str, rows: int, keys: int, d: int, groups: int, device: str) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output, of four heads."""
    generator = torch.Generator().manual_seed(rows + d)
    shapes = ((2, 4, rows, d), (2, groups, keys, d), (2, groups, keys, d), (2, 4, rows, d))
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    if kind == "parallel keys":
        k = k[:, :, :1] + k * 1e-2
    elif kind == "one-hot rows":
        q = 3 * k.repeat_interleave(4 // groups, 1)[:, :, -rows:] + 0.1 * q
    elif kind == "far below zero":
        q = q * 0.02 - 1
        k = k * 0.02 + 1
    elif kind == "tiny and huge":
        q = q * 1e-3
        k = k * 500
    return [x.to(device) for x in (q, k, v, grad)]


def results(function: Callable, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the output, dq, dk and dv in float64."""
    *qkv, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def judge(
    name: str, tensors: list[Tensor], dtype: str, backend: str, first, window
) -> tuple[bool, str]:
    """Compare what a backend and eager lose: twice as much of the output, thrice of gradients."""
    m = get_mechanism(name, window=window)
    eager = partial(attend, mechanism=m, first=first, backend="eager")
    tensors = [x.to(DTYPES[dtype]) for x in tensors]
    exact = results(eager, tensors, torch.float64)
    with rounded_products(DTYPES[dtype]):
        plain = results(eager, tensors, DTYPES[dtype])
    ours = partial(attend, mechanism=m, first=first, backend=backend)
    worst, where = 0.0, "exact"
    floor = FLOOR if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps / 4
    got = results(ours, tensors, DTYPES[dtype])
    for part, e, p, g in zip(("out", "dq", "dk", "dv"), exact, plain, got, strict=True):
        size = e.norm().clamp(min=1e-6 * max(x.norm() for x in exact))
        limit = (2 if part == "out" else 3) * ((p - e).norm() / size).nan_to_num(1.0).item() + floor
        error = ((g - e).norm() / size).item()
        share = error / limit if math.isfinite(error) else math.inf
        if share >= worst:
            worst, where = share, f"{part}: {error:.1e} of {limit:.1e} allowed"
    return worst <= 1, where
