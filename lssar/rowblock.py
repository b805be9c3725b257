"""Any mechanism in linear memory: the reference applied to a few rows at a time.

A row of the attention matrix needs its own query and the keys up to it, nothing else. So the rows
are computed in blocks against the keys they see, and the backward pass computes each block again
instead of keeping it: nothing of size L x L exists in either direction, on any device, for any
float type, exponent, window or learnable parameter, with the reference's own numerics.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# About what stays in a CPU's outer cache, and enough work for a launch on a GPU.
BLOCK_ENTRIES = {"cpu": 2**19, "default": 2**24}


def attend_by_row_blocks(attend_eager, q, k, v, mechanism, params: Tensor | None) -> Tensor:
    """`attend_eager(q, k, v, mechanism, params)` row block by row block, recomputed in backward."""
    batch, heads = q.shape[:2]
    q, k, v = (x.reshape(1, batch * heads, *x.shape[2:]) for x in (q, k, v))
    params = None if params is None else params.repeat(batch)  # one of every head
    out = _RowBlocks.apply(attend_eager, mechanism, q, k, v, params)
    return out.view(batch, heads, *out.shape[2:])


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attend_eager, mechanism, q, k, v, params):
        ctx.attend_eager, ctx.mechanism = attend_eager, mechanism
        ctx.save_for_backward(q, k, v, params)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
        for block in _blocks(q, k, mechanism.window):
            parts = block.of(q, k, v, params)
            out[:, block.heads, block.rows] = attend_eager(*parts[:3], mechanism, parts[3])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        inputs = ctx.saved_tensors
        # float32 sums: many blocks add into the same key.
        totals = _each(
            lambda t: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)), inputs
        )
        for block in _blocks(*inputs[:2], ctx.mechanism.window):
            parts = _each(lambda t: t.detach().requires_grad_(), block.of(*inputs))
            with torch.enable_grad():
                out = ctx.attend_eager(*parts[:3], ctx.mechanism, parts[3])
            leaves = [t for t in parts if t is not None]
            grads = torch.autograd.grad(out, leaves, grad_out[:, block.heads, block.rows])
            targets = [t for t in block.of(*totals) if t is not None]
            for target, grad in zip(targets, grads, strict=True):
                target += grad
        types = _each(lambda t: t.dtype, inputs)
        return None, None, *(t and total.to(t) for t, total in zip(types, totals, strict=True))


def _each(function, tensors) -> list:
    """Of every tensor; a mechanism without parameters has None in their place."""
    return [t if t is None else function(t) for t in tensors]


@dataclass(frozen=True)
class _Block:
    heads: slice
    rows: slice
    keys: slice  # that these rows see

    def of(self, q: Tensor, k: Tensor, v: Tensor, params: Tensor | None) -> list[Tensor | None]:
        """Views of its part of each."""
        seen = [x[:, self.heads, self.keys] for x in (k, v)]
        return [
            q[:, self.heads, self.rows],
            *seen,
            params if params is None else params[self.heads],
        ]


def _blocks(q: Tensor, k: Tensor, window: int | None) -> Iterator[_Block]:
    """Of one head if it fills a block, as its keys are normalised anew for each; else of several.

    At least four blocks of rows, so that little is computed of what no row sees.
    """
    heads, length, keys = q.shape[1], q.shape[2], k.shape[2]
    entries = BLOCK_ENTRIES.get(q.device.type, BLOCK_ENTRIES["default"])
    seen = keys if window is None else min(keys, 2 * window)
    rows = max(16, min(entries // seen, -(-length // 4)))
    together = max(1, entries // (rows * seen))
    for head in range(0, heads, together):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            last = keys - length + stop
            first = 0 if window is None else max(0, keys - length + start + 1 - window)
            yield _Block(slice(head, head + together), slice(start, stop), slice(first, last))
