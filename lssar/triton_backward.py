"""The backward of fused LSSAR and LSSA in Triton: dq, then dk and dv. Names as in `triton_forward`.

    D = dOut . out                      E = p O_i / N_i H dOut . (G - out)
    ds_j = (p r_j / (l M) (dOut . v_j - D) - E) sigmoid(s_j)            for every j <= i

In fp16 ds would underflow or overflow: dq_kernel divides a row of it by a bound of its size, and
dkv_kernel all rows of a head by the largest such bound (RANGE: of the head's v and k for the one,
of its rows for the other). bf16 has the exponents of fp32.
"""

import triton
import triton.language as tl

from lssar.triton_math import (
    COEF,
    DENSE,
    INV_L,
    INV_M,
    MEAN,
    NORM_EPS,
    PRECISION,
    SCALE,
    adaptive,
    dot,
    head_of,
    length,
    load_rows,
    load_vector,
    power,
    scores,
    sigmoid,
    softplus,
    store_rows,
    through_norm,
    weight_unit,
)

TINY = tl.constexpr(1e-20)
# Where fp16 holds a bound of ds: the second of its two parts is not subnormal, and rows or keys
# hundreds of times shorter than the longest of their head do not overflow.
ROOM = tl.constexpr(64.0)


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
        s = scores(q, k, row_scale, inv_k)
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
        acc = dot(ds, k, acc)
    return acc


@triton.jit
def dq_kernel(
    Q, K, V, INV_K, EXACT, GUIDE, STATS, DO, DQ, DELTA, RANGE,
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
    EXACT = head_of(EXACT, out_stride, pair, heads)
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
    out = load_rows(EXACT, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
    delta = _row_dots(do, out.to(do.dtype))
    if do.dtype != tl.float32:
        delta += tl.sum(do.to(tl.float32) * (out - out.to(do.dtype).to(tl.float32)), 1)
    deltas = DELTA + pair.to(tl.int64) * q_length + rows
    inside = rows < q_length
    tl.store(deltas, delta, mask=inside)
    dense = tl.zeros([BLOCK_M], tl.float32)
    if REWEIGHT:
        GUIDE = head_of(GUIDE, out_stride, pair, heads)
        guide = load_rows(GUIDE, first_row, out_stride, q_length, d, BLOCK_M, BLOCK_D)
        dense = tl.sum(do.to(tl.float32) * guide, 1)
        dense *= load_vector(STATS + plane * DENSE, first_row, q_length, BLOCK_M)
        tl.store(deltas + plane, dense, mask=inside)

    q = load_rows(Q, first_row, q_stride, q_length, d, BLOCK_M, BLOCK_D)
    unit = tl.full([BLOCK_M], 1.0, tl.float32)
    if q.dtype == tl.float16:
        bound = coef * tl.maximum(length(do) * tl.load(RANGE + pair), TINY) + tl.abs(dense)
        bound *= tl.minimum(mean + 1.0 / inv_m, 1.0)  # sigmoid(s) is below softplus(s)
        unit = tl.maximum(bound * tl.load(RANGE + tl.num_programs(1) + pair), TINY) / ROOM
        norm = tl.maximum(length(q), NORM_EPS)
        tl.store(deltas + 2 * plane, bound * row_scale * norm, mask=inside)
        tl.store(deltas + 3 * plane, norm, mask=inside)
        coef /= unit
        dense /= unit
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
    dq = through_norm(q, acc * (row_scale * unit)[:, None])
    DQ = head_of(DQ, dq_stride, pair, heads)
    store_rows(DQ, dq, first_row, dq_stride, q_length, d, BLOCK_M, BLOCK_D)


@triton.jit
def _dkv_pass(
    k, v, inv_k, first_key, inv_unit, dk, dv, lo, hi,
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
        inv_l = load_vector(STATS + plane * INV_L, start, q_length, BLOCK_M)
        inv_l *= weight_unit(q.dtype)
        w = r * z * inv_l[None, :]
        dv = tl.dot(w.to(do.dtype), do, dv, input_precision=PRECISION)
        dw = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        row_scale *= inv_unit
        coef = load_vector(STATS + plane * COEF, start, q_length, BLOCK_M) * row_scale
        delta = load_vector(DELTA, start, q_length, BLOCK_M)
        ds = coef[None, :] * r * (dw - delta[None, :])
        if REWEIGHT:
            dense = load_vector(DELTA + plane, start, q_length, BLOCK_M) * row_scale
            ds -= dense[None, :]
        ds = ds * slope
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
        dk = dot(ds, q, dk)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, INV_K, STATS, DO, DK, DV, DELTA, RANGE,
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
    unit = 1.0
    if k.dtype == tl.float16:
        unit = tl.load(RANGE + pair) / tl.load(RANGE + tl.num_programs(1) + pair) / ROOM
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk, dv = _dkv_pass(
        k, v, inv_k, first_key, 1.0 / unit, dk, dv, first, full,
        Q, DO, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
        P, REWEIGHT, d, BLOCK_D, BLOCK_M, BLOCK_N, True,
    )  # fmt: skip
    dk, dv = _dkv_pass(
        k, v, inv_k, first_key, 1.0 / unit, dk, dv, full, q_length,
        Q, DO, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
        P, REWEIGHT, d, BLOCK_D, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    dk = through_norm(k, dk * (unit * inv_k)[:, None])
    DK = head_of(DK, dk_stride, pair, heads)
    store_rows(DK, dk, first_key, dk_stride, k_length, d, BLOCK_N, BLOCK_D)
    DV = head_of(DV, dv_stride, pair, heads)
    store_rows(DV, dv / weight_unit(k.dtype), first_key, dv_stride, k_length, d, BLOCK_N, BLOCK_D)
