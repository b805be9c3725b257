"""Any mechanism in linear memory: the reference applied to a few rows at a time.

A row of the attention matrix needs its own query and the keys up to it, nothing else. So the rows
are computed in blocks against the keys they see, and the backward pass computes each block again
instead of keeping it: nothing of size L x L exists in either direction, on any device, for any
float type, exponent, window or learnable parameter, with the reference's own numerics.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# About what stays in a CPU's outer cache, and enough work for a launch on a GPU.
BLOCK_ENTRIES = {"cpu": 2**19, "default": 2**24}


def attend_by_row_blocks(attend_eager, q, k, v, mechanism, params: Tensor | None) -> Tensor:
    """`attend_eager(q, k, v, mechanism, params)` row block by row block, recomputed in backward."""
    return _RowBlocks.apply(attend_eager, mechanism, q, k, v, params)


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attend_eager, mechanism, q, k, v, params):
        ctx.attend_eager, ctx.mechanism = attend_eager, mechanism
        ctx.save_for_backward(q, k, v, params)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
        for rows, keys in _blocks(q, k, mechanism.window):
            out[:, :, rows] = attend_eager(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], mechanism, params
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, params = ctx.saved_tensors
        # float32 sums: many blocks add into the same key.
        total = {
            name: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for name, t in (("q", q), ("k", k), ("v", v), ("params", params))
            if t is not None
        }
        for rows, keys in _blocks(q, k, ctx.mechanism.window):
            parts = {"q": q[:, :, rows], "k": k[:, :, keys], "v": v[:, :, keys]}
            if params is not None:
                parts["params"] = params
            leaves = {name: t.detach().requires_grad_() for name, t in parts.items()}
            with torch.enable_grad():
                out = ctx.attend_eager(
                    leaves["q"], leaves["k"], leaves["v"], ctx.mechanism, leaves.get("params")
                )
            grads = torch.autograd.grad(out, list(leaves.values()), grad_out[:, :, rows])
            where = {"q": rows, "k": keys, "v": keys}
            for name, grad in zip(leaves, grads, strict=True):
                target = total[name][:, :, where[name]] if name in where else total[name]
                target += grad
        grads = [total[n].to(t.dtype) for n, t in (("q", q), ("k", k), ("v", v))]
        return None, None, *grads, None if params is None else total["params"].to(params.dtype)


def _blocks(q: Tensor, k: Tensor, window: int | None):
    """Pairs of slices: rows of q, and the keys that those rows see."""
    length, keys = q.shape[2], k.shape[2]
    entries = BLOCK_ENTRIES.get(q.device.type, BLOCK_ENTRIES["default"])
    seen = keys if window is None else min(keys, 2 * window)
    size = max(16, entries // (q.shape[0] * q.shape[1] * seen))
    for start in range(0, length, size):
        stop = min(start + size, length)
        last = keys - length + stop
        first = 0 if window is None else max(0, keys - length + start + 1 - window)
        yield slice(start, stop), slice(first, last)
