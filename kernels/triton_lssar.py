"""Exact fused LSSAR and LSSA in Triton: forward, dq, dk/dv; launched by `kernels/triton_op.py`.

    s = log d log N_i cos(q_i, k_j)     f = softplus(s)         mu = O_i mean_j f,  O_i = [N_i > 3]
    M = max_j f - mu                    z = relu(f - mu) / M    w = z^p / l,  l = sum_j z^p
    out = w V

    r = z^(p-1), H = sum_j r / (l M), G = sum_j r v_j / sum_j r, D = dOut . out
    E = p O_i / N_i H (dOut . G - D)
    ds_j = (p r_j / (l M) (dOut . v_j - D) - E) sigmoid(s_j)            for every j <= i

LSSA is the same with O = 0, p = 1 and M = 1. A row with no key above its mean keeps its stage-one
weights (mu = 0, O = 0, M = max f, and 1 for p in ds): uniform, with finite gradients.

q and k stay in their own type; their norms multiply the fp32 score. A row's statistics are saved as
SCALE = log d log2 N_i / |q_i|, MEAN = mu, INV_M = 1/M, INV_L = 1/l, COEF = p/(l M) and
DENSE = p O/N H: six planes of one fp32 tensor. G is saved in the input type: it is an average of
values, so unlike G H it cannot overflow. `inv_k` is 1/|k_j|.

P is p where it is an integer and the same for all rows, else 0: p_i comes from p and alpha.
"""

import triton
import triton.language as tl

from kernels.triton_math import (
    NORM_EPS,
    PRECISION,
    adaptive,
    add,
    head_of,
    load_rows,
    load_vector,
    narrow,
    power,
    sigmoid,
    softplus,
    through_norm,
    tile,
)

SCALE, MEAN, INV_M, INV_L, COEF, DENSE = (tl.constexpr(i) for i in range(6))
PROBE = tl.constexpr(16)  # keys that set the pivot of the row sum; the smallest tile of tl.dot
# A spread below this share of the maximum is rounding noise of f, not a preference for any key.
FLAT = tl.constexpr(2.0**-20)


@triton.jit
def _scores(q, k, row_scale, inv_k):
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return dots * row_scale[:, None] * inv_k[None, :]


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
        f, _ = softplus(_scores(q, k, row_scale, inv_k))
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
    q, row_scale, mean, inv_m, exponent, l, carry, h, acc, guide, position, lo, hi,
    K, V, INV_K, k_stride, v_stride, k_length,
    P: tl.constexpr, GUIDED: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums over the keys lo..hi: l of z^p, h of r, acc of z^p v, guide of r v."""
    for start in tl.range(lo, hi, BLOCK_N):
        k = load_rows(K, start, k_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        inv_k = load_vector(INV_K, start, k_length, BLOCK_N, MASKED)
        f, _ = softplus(_scores(q, k, row_scale, inv_k))
        z = tl.maximum(f - mean[:, None], 0.0) * inv_m[:, None]
        if MASKED:
            z = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= position[:, None], z, 0.0)
        r = power(z, exponent[:, None], P - 1)
        z = r * z
        l, carry = add(l, carry, tl.sum(z, 1))
        v = load_rows(V, start, v_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        acc = tl.dot(z.to(v.dtype), v, acc, input_precision=PRECISION)
        if GUIDED:
            h += tl.sum(r, 1)
            guide = tl.dot(r.to(v.dtype), v, guide, input_precision=PRECISION)
    return l, carry, h, acc, guide


@triton.jit
def forward_kernel(
    Q, K, V, INV_K, OUT, GUIDE, STATS, q_stride, k_stride, v_stride, out_stride,
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
    q32 = q.to(tl.float32)
    row_scale = log_d * tl.log2(count) / tl.maximum(tl.sqrt(tl.sum(q32 * q32, 1)), NORM_EPS)

    # Every row of the block sees all keys before `full`; none sees a key from `last` on.
    full = (k_length - q_length + first_row + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(k_length, k_length - q_length + first_row + BLOCK_M)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    mean, inv_m = zeros, zeros + 1.0
    if REWEIGHT:
        # Summing f above the smallest of the first keys keeps every digit of a near-uniform row,
        # and gives identical keys a mean equal to their f.
        k = load_rows(K, 0, k_stride, k_length, d, PROBE, BLOCK_D)
        inv_k = load_vector(INV_K, 0, k_length, PROBE)
        f, _ = softplus(_scores(q, k, row_scale, inv_k))
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
        mean = tl.where(count > 3, pivot + tl.sum(total, 1) / count, 0.0)
        top = tl.max(top, 1)
        mean = tl.where(top - mean <= top * FLAT, 0.0, mean)
        inv_m = 1.0 / (top - mean)

    exponent = adaptive(count, p, alpha, train_length) - 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l, carry, h, acc, guide = _value_pass(
        q, row_scale, mean, inv_m, exponent, zeros, zeros, zeros, acc, acc, position, 0, full,
        K, V, INV_K, k_stride, v_stride, k_length,
        P, SAVE and REWEIGHT, d, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    l, carry, h, acc, guide = _value_pass(
        q, row_scale, mean, inv_m, exponent, l, carry, h, acc, guide, position, full, last,
        K, V, INV_K, k_stride, v_stride, k_length,
        P, SAVE and REWEIGHT, d, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip

    OUT = head_of(OUT, out_stride, pair, heads)
    target, mask = tile(OUT, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
    inv_l = 1.0 / l
    tl.store(target, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=mask)
    if SAVE:
        stats = STATS + pair.to(tl.int64) * q_length + rows
        inside = rows < q_length
        coef = inv_l * inv_m
        if REWEIGHT:
            # The mean is zero in the first three rows and in flat ones; only the latter have p = 1.
            exponent = adaptive(count, p, alpha, train_length)
            tl.store(
                stats + plane * DENSE,
                tl.where(mean > 0, exponent / count, 0.0) * h * coef,
                mask=inside,
            )
            coef *= tl.where((mean > 0) | (count <= 3), exponent, 1.0)
        tl.store(stats + plane * SCALE, row_scale, mask=inside)
        tl.store(stats + plane * MEAN, mean, mask=inside)
        tl.store(stats + plane * INV_M, inv_m, mask=inside)
        tl.store(stats + plane * INV_L, inv_l, mask=inside)
        tl.store(stats + plane * COEF, coef, mask=inside)
    if SAVE and REWEIGHT:
        GUIDE = head_of(GUIDE, out_stride, pair, heads)
        target, mask = tile(GUIDE, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
        tl.store(target, (guide / h[:, None]).to(GUIDE.dtype.element_ty), mask=mask)


@triton.jit
def _row_dots(a, b):
    """a_i . b_i as tl.dot sums it: where a row has one key, D then cancels dOut . v exactly."""
    dots = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    rows = tl.arange(0, a.shape[0])
    return tl.sum(tl.where(rows[:, None] == rows[None, :], dots, 0.0), 1)


@triton.jit
def _dq_pass(
    q, do, row_scale, mean, inv_m, exponent, coef, delta, dense, acc, position, lo, hi,
    K, V, INV_K, k_stride, v_stride, k_length,
    P: tl.constexpr, REWEIGHT: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc += sum over the keys lo..hi of ds_j k_j / |k_j|."""
    for start in tl.range(lo, hi, BLOCK_N):
        v = load_rows(V, start, v_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        k = load_rows(K, start, k_stride, k_length, d, BLOCK_N, BLOCK_D, MASKED)
        inv_k = load_vector(INV_K, start, k_length, BLOCK_N, MASKED)
        s = _scores(q, k, row_scale, inv_k)
        f, e = softplus(s)
        slope = sigmoid(s, e) * inv_k[None, :]
        z = tl.maximum(f - mean[:, None], 0.0) * inv_m[:, None]
        r = power(z, exponent[:, None], P - 1)
        ds = coef[:, None] * r * (dw - delta[:, None])
        if REWEIGHT:
            ds -= dense[:, None]
        ds = ds * slope
        if MASKED:
            ds = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= position[:, None], ds, 0.0)
        acc = tl.dot(narrow(ds, k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dq_kernel(
    Q, K, V, INV_K, OUT, GUIDE, STATS, DO, DQ, DELTA,
    q_stride, k_stride, v_stride, out_stride, do_stride, dq_stride,
    heads, q_length, k_length, plane, length_class, p, alpha, train_length,
    P: tl.constexpr, REWEIGHT: tl.constexpr, d: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one block of rows; leaves D and E of those rows in DELTA for `dkv_kernel`."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1)
    Q = head_of(Q, q_stride, pair, heads)
    K = head_of(K, k_stride, pair, heads)
    V = head_of(V, v_stride, pair, heads)
    DO = head_of(DO, do_stride, pair, heads)
    OUT = head_of(OUT, out_stride, pair, heads)
    INV_K += pair.to(tl.int64) * k_length
    STATS += pair.to(tl.int64) * q_length
    row_scale = load_vector(STATS + plane * SCALE, first_row, q_length, BLOCK_M)
    mean = load_vector(STATS + plane * MEAN, first_row, q_length, BLOCK_M)
    inv_m = load_vector(STATS + plane * INV_M, first_row, q_length, BLOCK_M)
    coef = load_vector(STATS + plane * COEF, first_row, q_length, BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    position = k_length - q_length + rows
    exponent = adaptive((position + 1).to(tl.float32), p, alpha, train_length) - 1.0

    do = load_rows(DO, first_row, do_stride, q_length, d, BLOCK_M, BLOCK_D)
    out = load_rows(OUT, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
    delta = _row_dots(do, out)
    deltas = DELTA + pair.to(tl.int64) * q_length + rows
    tl.store(deltas, delta, mask=rows < q_length)
    dense = delta
    if REWEIGHT:
        GUIDE = head_of(GUIDE, out_stride, pair, heads)
        guide = load_rows(GUIDE, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
        dense = _row_dots(do, guide) - delta
        dense *= load_vector(STATS + plane * DENSE, first_row, q_length, BLOCK_M)
        tl.store(deltas + plane, dense, mask=rows < q_length)

    q = load_rows(Q, first_row, q_stride, q_length, d, BLOCK_M, BLOCK_D)
    full = (k_length - q_length + first_row + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(k_length, k_length - q_length + first_row + BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc = _dq_pass(
        q, do, row_scale, mean, inv_m, exponent, coef, delta, dense, acc, position, 0, full,
        K, V, INV_K, k_stride, v_stride, k_length, P, REWEIGHT, d, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    acc = _dq_pass(
        q, do, row_scale, mean, inv_m, exponent, coef, delta, dense, acc, position, full, last,
        K, V, INV_K, k_stride, v_stride, k_length, P, REWEIGHT, d, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    dq = through_norm(q, acc * row_scale[:, None])
    DQ = head_of(DQ, dq_stride, pair, heads)
    target, mask = tile(DQ, first_row, dq_stride, q_length, d, BLOCK_M, BLOCK_D)
    tl.store(target, narrow(dq, DQ.dtype.element_ty), mask=mask)


@triton.jit
def _dkv_pass(
    k, v, inv_k, first_key, dk, dv, lo, hi,
    Q, DO, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
    P: tl.constexpr, REWEIGHT: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dv += w' dOut and dk += (ds SCALE)' q over the rows lo..hi; tiles are [keys, rows]."""
    for start in tl.range(lo, hi, BLOCK_M):
        # Rows past the end read zeros, which make their weights and gradients zero.
        q = load_rows(Q, start, q_stride, q_length, d, BLOCK_M, BLOCK_D)
        row_scale = load_vector(STATS + plane * SCALE, start, q_length, BLOCK_M)
        mean = load_vector(STATS + plane * MEAN, start, q_length, BLOCK_M)
        inv_m = load_vector(STATS + plane * INV_M, start, q_length, BLOCK_M)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * row_scale[None, :] * inv_k[:, None]
        f, e = softplus(s)
        slope = sigmoid(s, e)
        z = tl.maximum(f - mean[None, :], 0.0) * inv_m[None, :]
        position = past + start + tl.arange(0, BLOCK_M)
        if MASKED:
            seen = first_key + tl.arange(0, BLOCK_N)[:, None] <= position[None, :]
            z = tl.where(seen, z, 0.0)
        exponent = adaptive((position + 1).to(tl.float32), p, alpha, train_length) - 1.0
        r = power(z, exponent[None, :], P - 1)
        do = load_rows(DO, start, do_stride, q_length, d, BLOCK_M, BLOCK_D)
        w = r * z * load_vector(STATS + plane * INV_L, start, q_length, BLOCK_M)[None, :]
        dv = tl.dot(w.to(do.dtype), do, dv, input_precision=PRECISION)
        dw = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        coef = load_vector(STATS + plane * COEF, start, q_length, BLOCK_M) * row_scale
        delta = load_vector(DELTA, start, q_length, BLOCK_M)
        ds = coef[None, :] * r * (dw - delta[None, :])
        if REWEIGHT:
            dense = load_vector(DELTA + plane, start, q_length, BLOCK_M) * row_scale
            ds -= dense[None, :]
        ds = ds * slope
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        dk = tl.dot(narrow(ds, q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, INV_K, STATS, DO, DK, DV, DELTA,
    q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride,
    heads, q_length, k_length, plane, length_class, p, alpha, train_length,
    P: tl.constexpr, REWEIGHT: tl.constexpr, d: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, over the rows that see it."""
    first_key = tl.program_id(0) * BLOCK_N
    pair = tl.program_id(1)
    Q = head_of(Q, q_stride, pair, heads)
    K = head_of(K, k_stride, pair, heads)
    V = head_of(V, v_stride, pair, heads)
    DO = head_of(DO, do_stride, pair, heads)
    STATS += pair.to(tl.int64) * q_length
    DELTA += pair.to(tl.int64) * q_length
    k = load_rows(K, first_key, k_stride, k_length, d, BLOCK_N, BLOCK_D)
    v = load_rows(V, first_key, v_stride, k_length, d, BLOCK_N, BLOCK_D)
    inv_k = load_vector(INV_K + pair.to(tl.int64) * k_length, first_key, k_length, BLOCK_N)

    # No row before `first` sees a key of the block; every row from `full` on sees all of them.
    past = k_length - q_length
    first = tl.maximum(first_key - past, 0) // BLOCK_M * BLOCK_M
    full = tl.cdiv(tl.maximum(first_key + BLOCK_N - 1 - past, 0), BLOCK_M) * BLOCK_M
    full = tl.minimum(full, tl.cdiv(q_length, BLOCK_M) * BLOCK_M)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk, dv = _dkv_pass(
        k, v, inv_k, first_key, dk, dv, first, full,
        Q, DO, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
        P, REWEIGHT, d, BLOCK_D, BLOCK_M, BLOCK_N, True,
    )  # fmt: skip
    dk, dv = _dkv_pass(
        k, v, inv_k, first_key, dk, dv, full, q_length,
        Q, DO, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
        P, REWEIGHT, d, BLOCK_D, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    dk = through_norm(k, dk * inv_k[:, None])
    DK = head_of(DK, dk_stride, pair, heads)
    target, mask = tile(DK, first_key, dk_stride, k_length, d, BLOCK_N, BLOCK_D)
    tl.store(target, narrow(dk, DK.dtype.element_ty), mask=mask)
    DV = head_of(DV, dv_stride, pair, heads)
    target, mask = tile(DV, first_key, dv_stride, k_length, d, BLOCK_N, BLOCK_D)
    tl.store(target, narrow(dv, DV.dtype.element_ty), mask=mask)
