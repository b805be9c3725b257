"""Computes any mechanism in linear memory: the reference applied to a few rows at a time.

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

from lssar.mechanisms import Mechanism
from lssar.spans import Span, window
from lssar.tracing import can_look_at

# About what stays in a CPU's outer cache, and enough work for a launch on a GPU.
BLOCK_ENTRIES = {"cpu": 2**19, "default": 2**24}


def attend_by_row_blocks(
    attend_eager, q, k, v, mechanism: Mechanism, head_scale, span: Span, decay=None
) -> Tensor:
    """Compute `attend_eager(q, k, v, mechanism, head_scale, span, decay)` block by block."""
    batch, heads = q.shape[:2]
    decay = None if decay is None else decay.expand(batch, -1, -1)
    first = span.firsts(q, k)
    if first is not None and len(first) > 1:  # sequences that differ in what they see
        decays = [None] * batch if decay is None else decay.split(1)
        parts = zip(q.split(1), k.split(1), v.split(1), first.split(1), decays, strict=True)
        out = [_RowBlocks.apply(attend_eager, mechanism, *part, head_scale) for part in parts]
        return torch.cat(out)
    q, k, v, decay = _each(lambda x: x.reshape(1, -1, *x.shape[2:]), (q, k, v, decay))
    head_scale = None if head_scale is None else head_scale.repeat(batch)  # one of every head
    out = _RowBlocks.apply(attend_eager, mechanism, q, k, v, first, decay, head_scale)
    return out.view(batch, heads, *out.shape[2:])


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attend_eager, mechanism, q, k, v, first, decay, head_scale):
        ctx.attend_eager = attend_eager
        ctx.mechanism = mechanism
        ctx.first = first
        ctx.save_for_backward(q, k, v, head_scale, decay)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
        for block in _blocks(q, k, first, mechanism):
            *qkv, block_scale, block_decay = block.of(q, k, v, head_scale, decay)
            rows = attend_eager(*qkv, mechanism, block_scale, block.span, block_decay)
            out[:, block.heads, block.rows] = rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        inputs = ctx.saved_tensors
        totals = _each(_zero_sum, inputs)
        for block in _blocks(*inputs[:2], ctx.first, ctx.mechanism):
            parts = _each(lambda t: t.detach().requires_grad_(), block.of(*inputs))
            with torch.enable_grad():
                out = ctx.attend_eager(*parts[:3], ctx.mechanism, parts[3], block.span, parts[4])
            leaves = [t for t in parts if t is not None]
            grads = torch.autograd.grad(out, leaves, grad_out[:, block.heads, block.rows])
            targets = [t for t in block.of(*totals) if t is not None]
            for target, grad in zip(targets, grads, strict=True):
                target += grad
        grads = []
        for total, x in zip(totals, inputs, strict=True):
            grads.append(None if total is None else total.to(x.dtype))
        grad_q, grad_k, grad_v, grad_head_scale, grad_decay = grads
        return None, None, grad_q, grad_k, grad_v, None, grad_decay, grad_head_scale


def _each(function, tensors) -> list:
    """Apply the function to every tensor; head_scale and decay may be None, and stay so."""
    return [None if t is None else function(t) for t in tensors]


def _zero_sum(x: Tensor) -> Tensor:
    """Return zeros to add the gradients of x to: in float32, as many blocks add to one key."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class _Block:
    heads: slice
    shared: slice  # the heads of k and v that they use
    rows: slice
    keys: slice  # that some of these rows see
    span: Span

    def of(self, q, k, v, head_scale: Tensor | None, decay: Tensor | None) -> list[Tensor | None]:
        """Return views of the block's part of each tensor."""
        return [
            q[:, self.heads, self.rows],
            *(x[:, self.shared, self.keys] for x in (k, v)),
            head_scale if head_scale is None else head_scale[self.heads],
            decay if decay is None else decay[:, self.heads, self.keys],
        ]


def _blocks(q: Tensor, k: Tensor, first: Tensor | None, m: Mechanism) -> Iterator[_Block]:
    """Yield blocks of one head of k if that fills a block, else of several heads.

    Keys are normalised anew for each block. There are at least four blocks of rows, so that little
    is computed that no row sees.
    """
    length = q.shape[2]
    heads, keys = k.shape[1:3]
    group = q.shape[1] // heads
    past = keys - length
    entries = BLOCK_ENTRIES.get(q.device.type, BLOCK_ENTRIES["default"])
    longest = keys
    known = _known_first(first, m, length, keys)
    if known is not None:
        counts = torch.arange(past + 1, keys + 1) - known
        longest = min(keys, 2 * max(1, int(counts.max())))
    rows = max(16, min(entries // (group * longest), -(-length // 4)))
    together = max(1, entries // (group * rows * longest))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        low = 0
        span = Span()
        if known is not None:
            low = min(int(known[..., start:stop].min()), past + stop - 1)
        if first is not None:
            span = Span(first[:, start:stop] - low, sinks=m.sinks)
        for head in range(0, heads, together):
            end = min(head + together, heads)
            yield _Block(
                slice(head * group, end * group),
                slice(head, end),
                slice(start, stop),
                slice(low, past + stop),
                span,
            )


def _known_first(first: Tensor | None, m: Mechanism, queries: int, keys: int) -> Tensor | None:
    """Return the first keys of the rows as far as the host knows them; a GPU is not waited for."""
    if first is None or m.sinks:
        return None
    if can_look_at(first):
        return first
    return None if m.window is None else window(m.window, queries, keys)
