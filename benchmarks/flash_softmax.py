"""Computes a plain causal flash softmax in Triton, to compare the fused kernels with.

Softmax over full rows only, and each product once, in the type of the tensors; q, k, v, out and
their gradients share their strides. Loops and loads are those of `lssar/triton_forward.py` and
`triton_backward.py`, so that what differs is what a mechanism costs.
"""

import torch
import triton
import triton.language as tl

from lssar.tiles import LOG2_E, head_of, load_rows, load_vector, store_rows

# (BLOCK_M rows, BLOCK_N keys, warps, stages): of several tried, the best by `benchmark.py kernels`
# over both architectures. Some spill a few registers.
CONFIGS = {
    ("forward", 64): (128, 64, 4, 3),
    ("forward", 128): (128, 64, 8, 3),
    ("dq", 64): (128, 32, 4, 3),
    ("dq", 128): (128, 64, 8, 2),
    ("dkv", 64): (32, 128, 4, 2),
    ("dkv", 128): (64, 128, 8, 2),
}


@triton.jit
def forward_kernel(
    Q, K, V, OUT, STATS, q_stride, heads, q_length, scale,
    d: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one block of rows; STATS is the logarithm to base 2 of each row's sum."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1)
    head = head_of(0, q_stride, pair, heads)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    q = load_rows(Q + head, first_row, q_stride, inside, d, BLOCK_M, d)
    total = tl.zeros([BLOCK_M], tl.float32)
    top, acc = total - float("inf"), tl.zeros([BLOCK_M, d], tl.float32)
    full = (first_row + 1) // BLOCK_N * BLOCK_N  # every row sees all keys before it
    for masked in tl.static_range(2):
        start, end = (full, tl.minimum(q_length, first_row + BLOCK_M)) if masked else (0, full)
        for begin in tl.range(start, end, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            exist = keys < q_length if masked else None
            k = load_rows(K + head, begin, q_stride, exist, d, BLOCK_N, d)
            s = tl.dot(q, tl.trans(k))
            if masked:
                s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * (scale * LOG2_E))
            less = tl.exp2(top - new)
            w = tl.exp2(s * (scale * LOG2_E) - new[:, None])
            total, top = total * less + tl.sum(w, 1), new
            v = load_rows(V + head, begin, q_stride, exist, d, BLOCK_N, d)
            acc = tl.dot(w.to(v.dtype), v, acc * less[:, None])
    store_rows(OUT + head, acc / total[:, None], first_row, q_stride, inside, d, BLOCK_M, d)
    tl.store(STATS + pair.to(tl.int64) * q_length + rows, top + tl.log2(total), mask=inside)


def forward(q, k, v):
    """Return the output for q, k and v of one shape and layout."""
    rows, keys, warps, stages = CONFIGS["forward", q.shape[3]]
    out = torch.empty_like(q)
    stats = q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, length, d = q.shape
    grid = (-(-length // rows), batch * heads)
    arguments = (q, k, v, out, stats, q.stride()[:3], heads, length, d**-0.5, d, rows, keys)
    forward_kernel[grid](*arguments, num_warps=warps, num_stages=stages)
    return out


@triton.jit
def dq_kernel(
    Q, K, V, OUT, STATS, DO, DQ, DELTA, q_stride, heads, q_length, scale,
    d: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of rows; leave their dOut . out in DELTA for `dkv_kernel`."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1)
    head = head_of(0, q_stride, pair, heads)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    do = load_rows(DO + head, first_row, q_stride, inside, d, BLOCK_M, d)
    out = load_rows(OUT + head, first_row, q_stride, inside, d, BLOCK_M, d)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + pair.to(tl.int64) * q_length + rows, delta, mask=inside)
    stats = load_vector(STATS + pair.to(tl.int64) * q_length, first_row, inside, BLOCK_M)
    q = load_rows(Q + head, first_row, q_stride, inside, d, BLOCK_M, d)
    acc = tl.zeros([BLOCK_M, d], tl.float32)
    full = (first_row + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        start, end = (full, tl.minimum(q_length, first_row + BLOCK_M)) if masked else (0, full)
        for begin in tl.range(start, end, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            exist = keys < q_length if masked else None
            v = load_rows(V + head, begin, q_stride, exist, d, BLOCK_N, d)
            dw = tl.dot(do, tl.trans(v))
            k = load_rows(K + head, begin, q_stride, exist, d, BLOCK_N, d)
            w = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2_E) - stats[:, None])
            if masked:
                w = tl.where(keys[None, :] <= rows[:, None], w, 0.0)
            acc = tl.dot((w * (dw - delta[:, None])).to(k.dtype), k, acc)
    store_rows(DQ + head, acc * scale, first_row, q_stride, inside, d, BLOCK_M, d)


@triton.jit
def dkv_kernel(
    Q, K, V, STATS, DO, DK, DV, DELTA, q_stride, heads, q_length, scale,
    d: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys.

    Tiles are [keys, rows]. Rows past the end read zeros, which add nothing.
    """
    first_key = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1)
    head = head_of(0, q_stride, pair, heads)
    STATS += pair.to(tl.int64) * q_length
    DELTA += pair.to(tl.int64) * q_length
    keys = first_key + tl.arange(0, BLOCK_N)
    inside = keys < q_length
    k = load_rows(K + head, first_key, q_stride, inside, d, BLOCK_N, d)
    v = load_rows(V + head, first_key, q_stride, inside, d, BLOCK_N, d)
    dk, dv = tl.zeros([BLOCK_N, d], tl.float32), tl.zeros([BLOCK_N, d], tl.float32)
    first = first_key // BLOCK_M * BLOCK_M
    full = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M  # sees all keys, and so do the next
    for masked in tl.static_range(2):
        start, end = (first, full) if masked else (full, q_length)
        for begin in tl.range(start, end, BLOCK_M):
            rows = begin + tl.arange(0, BLOCK_M)
            exist = rows < q_length
            q = load_rows(Q + head, begin, q_stride, exist, d, BLOCK_M, d)
            stats = load_vector(STATS, begin, exist, BLOCK_M)
            w = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2_E) - stats[None, :])
            if masked:
                w = tl.where(keys[:, None] <= rows[None, :], w, 0.0)
            do = load_rows(DO + head, begin, q_stride, exist, d, BLOCK_M, d)
            dv = tl.dot(w.to(do.dtype), do, dv)
            dw = tl.dot(v, tl.trans(do))
            delta = load_vector(DELTA, begin, exist, BLOCK_M)
            dk = tl.dot((w * (dw - delta[None, :])).to(q.dtype), q, dk)
    store_rows(DK + head, dk * scale, first_key, q_stride, inside, d, BLOCK_N, d)
    store_rows(DV + head, dv, first_key, q_stride, inside, d, BLOCK_N, d)
