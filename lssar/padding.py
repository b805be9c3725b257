"""Attention over a batch of sequences of different lengths, padded to one rectangle.

    out = attend_padded(q, k, v, "lssar", mask)   # mask (B, keys): True where a key is a token

Padding is taken out before the attention and put back as zeros after it. So the row count N never
counts padding, a row gives what the sequence gives alone, and every mechanism and every backend
works, whether the padding is to the left, to the right or, in a cache, between the two.
"""

from typing import Any

from torch import Tensor

from lssar.backends import attend
from lssar.mechanisms import Mechanism


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mechanism: str | Mechanism, mask: Tensor | None, **options: Any
) -> Tensor:
    """`attend` over the keys that `mask` (B, n) allows; the queries are the last Lq of these n.

    Keys from n on do not exist yet: a cache with room for more may be given whole. The result is
    zero where a query is padding. Rows with the same padding share one call.
    """
    if mask is None:
        return attend(q, k, v, mechanism, **options)
    length, keys = q.shape[2], mask.shape[1]
    k, v = k[:, :, :keys], v[:, :, :keys]
    if mask.all():
        return attend(q, k, v, mechanism, **options)
    out = v.new_zeros(q.shape[0], length, q.shape[1], v.shape[3])  # (B, Lq, H, d)
    patterns, group = mask.unique(dim=0, return_inverse=True)
    for index, pattern in enumerate(patterns):
        (rows,), (seen,) = (group == index).nonzero(as_tuple=True), pattern.nonzero(as_tuple=True)
        (asking,) = pattern[keys - length :].nonzero(as_tuple=True)
        if len(asking):
            part = attend(
                q[rows][:, :, asking], k[rows][:, :, seen], v[rows][:, :, seen],
                mechanism, **options,
            )  # fmt: skip
            out[rows[:, None], asking] = part.transpose(1, 2)
    return out.transpose(1, 2)


def token_positions(mask: Tensor, length: int) -> Tensor:
    """The place of each of the last `length` tokens in its own sequence, (B, length), from 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - length :]
