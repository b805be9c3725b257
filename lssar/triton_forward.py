"""Exact fused LSSAR and LSSA in Triton: the forward kernel, launched by `lssar/triton_op.py`.

    s = log d log N_i cos(q_i, k_j)     f = softplus(s)         mu = O_i mean_j f,  O_i = [N_i > 3]
    M = max_j f - mu                    z = relu(f - mu) / M    w = z^p / l,  l = sum_j z^p
    out = w V                           r = z^(p-1)             H = sum_j r / (l M)
                                                                G = sum_j r v_j / sum_j r

LSSA is the same with O = 0, p = 1 and M = 1 (fp16: max f). A row with no key above its mean keeps
its stage-one weights (mu = 0, O = 0, M = max f, and 1 for p in the gradient): uniform, with finite
gradients.

q and k stay in their own type; their norms multiply the fp32 score; `inv_k` is 1/|k_j|. For the
backward (`triton_backward.py`) a row's statistics are saved as SCALE = log d log2 N_i / |q_i|,
MEAN = mu, INV_M = 1/M, INV_L = 1/l, COEF = p/(l M) and DENSE = p O/N H, six planes of one fp32
tensor; GUIDE = G - out is fp32 too, and so is EXACT, the output before it is rounded to 16 bits.
The backward subtracts nearly equal numbers: D and dOut . v in a peaked row, all gradients of keys
alike. With a rounded out and G, dq and dk in fp16 lost 3.5 times what eager loses on random input.

P is p where it is an integer and the same for all rows, else 0: p_i comes from p and alpha.

Blocks of zero weights are not skipped. About 65 % of the weights are zero, but no block of 64x64,
64x32 or 32x32 is, at random or with the q and k of a trained nano model up to 2,048 tokens
(`python benchmark.py zero-blocks`); and ds is dense anyway.
"""

import triton
import triton.language as tl

from lssar import reference
from lssar.triton_math import (
    COEF,
    DENSE,
    INV_L,
    INV_M,
    LN_2,
    MEAN,
    NORM_EPS,
    SCALE,
    adaptive,
    add,
    dot,
    head_of,
    length,
    load_rows,
    load_vector,
    power,
    scores,
    softplus,
    store_rows,
    weight_unit,
)

PROBE = tl.constexpr(16)  # keys that set the pivot of the row sum; the smallest tile of tl.dot
# What the reference calls flat: (4 + largest score) times this, of the maximum.
FLAT = tl.constexpr(reference.FLAT * 2.0**-23)


@triton.jit
def _mean_pass(
    q, row_scale, pivot, total, top, position, lo, hi, K, INV_K, k_stride, k_length,
    d: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of f - pivot and maxima of f over the keys lo..hi, a column of the tile at a time: the
    reduction along a row is left to the caller, and every partial sum is short."""
    for start in tl.range(lo, hi, BLOCK_N):
        k = load_rows(K, start, k_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        inv_k = load_vector(INV_K, start, k_length, BLOCK_N, MASKED)
        f, _ = softplus(scores(q, k, row_scale, inv_k))
        above = f - pivot[:, None]
        if MASKED:
            seen = start + tl.arange(0, BLOCK_N)[None, :] <= position[:, None]
            above = tl.where(seen, above, 0.0)
            f = tl.where(seen, f, 0.0)
        total += above
        top = tl.maximum(top, f)
    return total, top


@triton.jit
def _value_pass(
    q, row_scale, mean, inv_m, exponent, unit, l, carry, h, acc, guide, position, lo, hi,
    K, V, INV_K, k_stride, v_stride, k_length,
    P: tl.constexpr, GUIDED: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums over the keys lo..hi, in `unit`: l of z^p, h of r, acc of z^p v, guide of r v."""
    for start in tl.range(lo, hi, BLOCK_N):
        k = load_rows(K, start, k_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        inv_k = load_vector(INV_K, start, k_length, BLOCK_N, MASKED)
        f, _ = softplus(scores(q, k, row_scale, inv_k))
        z = tl.maximum(f - mean[:, None], 0.0) * inv_m[:, None]
        if MASKED:
            z = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= position[:, None], z, 0.0)
        r = power(z, exponent[:, None], P - 1)
        r *= unit
        z = r * z
        l, carry = add(l, carry, tl.sum(z, 1))
        v = load_rows(V, start, v_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        acc = dot(z, v, acc)
        if GUIDED:
            h += tl.sum(r, 1)
            guide = dot(r, v, guide)
    return l, carry, h, acc, guide


@triton.jit
def forward_kernel(
    Q, K, V, INV_K, OUT, EXACT, GUIDE, STATS, q_stride, k_stride, v_stride, out_stride,
    heads, q_length, k_length, plane, length_class, log_d, p, alpha, train_length,
    P: tl.constexpr, REWEIGHT: tl.constexpr, SAVE: tl.constexpr, d: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of rows: a pass over its keys for mean and maximum, a second one for the values."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest start first
    pair = tl.program_id(1)
    Q = head_of(Q, q_stride, pair, heads)
    K = head_of(K, k_stride, pair, heads)
    V = head_of(V, v_stride, pair, heads)
    INV_K += pair.to(tl.int64) * k_length

    rows = first_row + tl.arange(0, BLOCK_M)
    position = k_length - q_length + rows
    count = (position + 1).to(tl.float32)
    q = load_rows(Q, first_row, q_stride, q_length, d, BLOCK_M, BLOCK_D)
    row_scale = log_d * tl.log2(count) / tl.maximum(length(q), NORM_EPS)

    # Every row of the block sees all keys before `full`; none sees a key from `last` on.
    full = (k_length - q_length + first_row + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(k_length, k_length - q_length + first_row + BLOCK_M)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    mean, inv_m = zeros, zeros + 1.0
    # LSSA has no need of its maximum but in fp16, where a row of far negative scores would vanish.
    if REWEIGHT or Q.dtype.element_ty == tl.float16:
        # Summing f above the smallest of the first keys keeps every digit of a near-uniform row,
        # and gives identical keys a mean equal to their f.
        k = load_rows(K, 0, k_stride, k_length, d, PROBE, BLOCK_D)
        inv_k = load_vector(INV_K, 0, k_length, PROBE)
        f, _ = softplus(scores(q, k, row_scale, inv_k))
        f = tl.where(tl.arange(0, PROBE)[None, :] <= position[:, None], f, float("inf"))
        pivot = tl.min(f, 1)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total, top = _mean_pass(
            q, row_scale, pivot, total, total, position, 0, full,
            K, INV_K, k_stride, k_length, d, BLOCK_D, BLOCK_N, False,
        )  # fmt: skip
        total, top = _mean_pass(
            q, row_scale, pivot, total, top, position, full, last,
            K, INV_K, k_stride, k_length, d, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
        top = tl.max(top, 1)
        if REWEIGHT:
            mean = tl.where(count > 3, pivot + tl.sum(total, 1) / count, 0.0)
            largest = row_scale * tl.maximum(length(q), NORM_EPS)  # score, in units of ln 2
            mean = tl.where(top - mean <= top * FLAT * (4.0 + LN_2 * largest), 0.0, mean)
        inv_m = 1.0 / (top - mean)

    exponent = adaptive(count, p, alpha, train_length) - 1.0
    unit = weight_unit(K.dtype.element_ty)
    if K.dtype.element_ty != tl.float16:
        # Sums of weights below one: with values near the largest float32 they stay finite. One
        # unit for all rows, as one per row would spill registers.
        keys = tl.cast(k_length, tl.float32)
        unit = tl.exp2(-tl.ceil(tl.log2(keys * (1.0 + log_d * tl.log2(keys)))))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l, carry, h, acc, guide = _value_pass(
        q, row_scale, mean, inv_m, exponent, unit, zeros, zeros, zeros, acc, acc, position, 0, full,
        K, V, INV_K, k_stride, v_stride, k_length,
        P, SAVE and REWEIGHT, d, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    l, carry, h, acc, guide = _value_pass(
        q, row_scale, mean, inv_m, exponent, unit, l, carry, h, acc, guide, position, full, last,
        K, V, INV_K, k_stride, v_stride, k_length,
        P, SAVE and REWEIGHT, d, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip

    out = acc / l[:, None]
    OUT = head_of(OUT, out_stride, pair, heads)
    store_rows(OUT, out, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
    inv_l = unit / l
    if SAVE:
        stats = STATS + pair.to(tl.int64) * q_length + rows
        inside = rows < q_length
        coef = inv_l * inv_m
        if REWEIGHT:
            # The mean is zero in the first three rows and in flat ones; only the latter have p = 1.
            exponent = adaptive(count, p, alpha, train_length)
            tl.store(
                stats + plane * DENSE,
                tl.where(mean > 0, exponent / count, 0.0) * coef * h / unit,
                mask=inside,
            )
            coef *= tl.where((mean > 0) | (count <= 3), exponent, 1.0)
        tl.store(stats + plane * SCALE, row_scale, mask=inside)
        tl.store(stats + plane * MEAN, mean, mask=inside)
        tl.store(stats + plane * INV_M, inv_m, mask=inside)
        tl.store(stats + plane * INV_L, inv_l, mask=inside)
        tl.store(stats + plane * COEF, coef, mask=inside)
        if OUT.dtype.element_ty != tl.float32:
            EXACT = head_of(EXACT, out_stride, pair, heads)
            store_rows(EXACT, out, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
        if REWEIGHT:
            GUIDE = head_of(GUIDE, out_stride, pair, heads)
            guide = guide / h[:, None] - out
            store_rows(GUIDE, guide, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
