"""The backward of fused attention in Triton: dq, then dk and dv. Names as in `triton_forward`.

    D = dOut . out                      E = DENSE dOut . GUIDE
    ds_j = (p r_j / (l M) (dOut . v_j - D) - E) phi'(s_j)       sharpened, for every key it sees
    ds_j = ((dOut . v_j - sgn(w_j) D) / (l M) - E) phi'(s_j)        else; D = 0 without the norm

Where one key has nearly all of the weight, dOut . v_j - D and E cancel, and the rounding of out and
G is all that is left (up to 48 times eager's error in fp32). For fp32 input and rows with a mean,
dq_kernel is therefore launched twice, as one kernel would spill. The first launch corrects D by the
sum of w_j (dOut . v_j - D), which is zero, and gets E from sum_j f_j ds_j / phi'(s_j) = 0: weights
do not change when f is scaled.

In fp16 ds would underflow or overflow: dq_kernel divides a row of it by a bound of its size, and
dkv_kernel all rows of a head by the largest such bound (RANGE: of the head's v and k for the one,
of its rows for the other). bf16 has the exponents of fp32.
"""

import triton
import triton.language as tl

from lssar import tiles
from lssar.tiles import COEF, DENSE, INV_M, MEAN, NORM_EPS, PRECISION, SCALE, SHIFT, WEIGHT

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
def _weights(f, mean, inv_m, exponent, seen, FORM: tl.constexpr):
    """z, and r of sharpened rows, from the activations; what is not `seen` is zero."""
    z = f
    if FORM.centred:
        z = f - mean
    if FORM.sharp:
        z = tl.maximum(z, 0.0) * inv_m
    if seen is not None:
        z = tl.where(seen, z, 0.0)
    r = tiles.power(z, exponent, FORM.power - 1) if FORM.sharp else z
    return z, r


@triton.jit
def _score_gradient(dw, z, r, slope, coef, delta, dense, seen, FORM: tl.constexpr):
    """ds, where rows and keys broadcast: the tiles are [rows, keys] for dq, else [keys, rows]."""
    if FORM.sharp:
        ds = coef * r * (dw - delta)
    elif FORM.signed and FORM.l1:
        ds = coef * (dw - tiles.sign(z) * delta)
    elif FORM.l1:
        ds = coef * (dw - delta)
    else:
        ds = coef * dw
    if FORM.centred:
        ds -= dense
    ds = ds * slope
    if seen is not None:
        ds = tl.where(seen, ds, 0.0)
    return ds


@triton.jit
def _key_tile(
    q, do, row_scale, shift, mean, inv_m, exponent, first, position, begin, lo, hi,
    K, V, KEYS, k_stride, v_stride,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """k from `begin` on; which rows see it, dOut . v, f, its slope, z and r, all [rows, keys]."""
    inside, seen = None, None
    keys = begin + tl.arange(0, BLOCK_N)
    if MASKED:
        inside = tiles.is_seen(keys, lo, hi - 1)
        seen = tiles.is_seen(keys[None, :], first, position)
    v = tiles.load_rows(V, begin, v_stride, inside, d_v, BLOCK_N, BLOCK_V)
    dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    k = tiles.load_rows(K, begin, k_stride, inside, d, BLOCK_N, BLOCK_D)
    inv_k = tiles.load_vector(KEYS, begin, inside, BLOCK_N) if FORM.cosine else None
    f, slope = tiles.activate(tiles.scores(q, k, row_scale, inv_k, shift), FORM)
    if FORM.cosine:
        slope *= inv_k[None, :]  # type: ignore[index]
    z, r = _weights(f, mean[:, None], inv_m[:, None], exponent[:, None], seen, FORM)
    return k, seen, dw, f, slope, z, r


@triton.jit
def _sum_pass(
    q, do, row_scale, shift, mean, inv_m, exponent, delta, missed, pull, share, total,
    first, position, start, lo, hi, K, V, KEYS, k_stride, v_stride,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums over the keys from `start` to hi: of w l (dOut . v - D), and times f: of the sparse part
    of ds over the slope, of what D is multiplied by in it, and of one."""
    for begin in tl.range(start, hi, BLOCK_N):
        _, seen, dw, f, _, z, r = _key_tile(
            q, do, row_scale, shift, mean, inv_m, exponent, first, position, begin, lo, hi,
            K, V, KEYS, k_stride, v_stride, FORM, d, d_v, BLOCK_D, BLOCK_V, BLOCK_N, MASKED,
        )  # fmt: skip
        if seen is not None:
            f = tl.where(seen, f, 0.0)
        total += tl.sum(f, 1)
        if FORM.sharp:
            above, side = r * (dw - delta[:, None]), r
        else:
            side = tiles.sign(z)
            above = dw - side * delta[:, None]
        missed += tl.sum(z * above, 1)
        pull += tl.sum(f * above, 1)
        share += tl.sum(f * side, 1)
    return missed, pull, share, total


@triton.jit
def _dq_pass(
    q, do, row_scale, shift, mean, inv_m, exponent, coef, delta, dense, acc,
    first, position, start, lo, hi, K, V, KEYS, k_stride, v_stride,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc += sum over the keys from `start` to hi of ds_j k_j (on the cosine, of k_j / |k_j|)."""
    for begin in tl.range(start, hi, BLOCK_N):
        k, seen, dw, _, slope, z, r = _key_tile(
            q, do, row_scale, shift, mean, inv_m, exponent, first, position, begin, lo, hi,
            K, V, KEYS, k_stride, v_stride, FORM, d, d_v, BLOCK_D, BLOCK_V, BLOCK_N, MASKED,
        )  # fmt: skip
        ds = _score_gradient(
            dw, z, r, slope, coef[:, None], delta[:, None], dense[:, None], seen, FORM
        )
        acc = tiles.dot(ds, k, acc)
    return acc


@triton.jit
def dq_kernel(
    Q, K, V, KEYS, FIRST, EXACT, GUIDE, STATS, DO, DQ, DELTA, RANGE,
    q_stride, k_stride, v_stride, out_stride, do_stride, dq_stride, first_stride,
    heads, repeats, q_length, k_length, plane, length_class, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one block of rows; leaves D and E of those rows in DELTA for `dkv_kernel`."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1)
    shared = pair // repeats
    Q = tiles.head_of(Q, q_stride, pair, heads)
    K = tiles.head_of(K, k_stride, shared, heads // repeats)
    V = tiles.head_of(V, v_stride, shared, heads // repeats)
    DO = tiles.head_of(DO, do_stride, pair, heads)
    KEYS += shared.to(tl.int64) * k_length
    STATS += pair.to(tl.int64) * q_length
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    position = k_length - q_length + rows
    first, first_column, seeing = None, None, inside
    if FORM.spans:
        FIRST += (pair // heads).to(tl.int64) * first_stride
        first = tiles.first_keys(FIRST, first_row, q_length, BLOCK_M)
        first_column = first[:, None]
        seeing = first <= position
    row_scale = tiles.load_vector(STATS + plane * SCALE, first_row, inside, BLOCK_M)
    inv_m = tiles.load_vector(STATS + plane * INV_M, first_row, inside, BLOCK_M)
    coef = tiles.load_vector(STATS + plane * COEF, first_row, inside, BLOCK_M)
    shift = None
    if FORM.shifted:
        shift = tiles.load_vector(STATS + plane * SHIFT, first_row, inside, BLOCK_M)
    mean, dense, delta = tl.zeros_like(coef), tl.zeros_like(coef), tl.zeros_like(coef)
    exponent = tiles.adaptive(tiles.count_of(first, position), p, alpha, train_length) - 1.0

    do = tiles.load_rows(DO, first_row, do_stride, seeing, d_v, BLOCK_M, BLOCK_V)
    deltas = DELTA + pair.to(tl.int64) * q_length + rows
    SUMMED: tl.constexpr = FORM.centred and Q.dtype.element_ty == tl.float32
    if SUMMED and not FORM.sums:
        delta = tl.load(deltas, mask=inside, other=0.0)
    elif FORM.l1:
        EXACT = tiles.head_of(EXACT, out_stride, pair, heads)
        out = tiles.load_rows(EXACT, first_row, out_stride, seeing, d_v, BLOCK_M, BLOCK_V)
        delta = _row_dots(do, out.to(do.dtype))
        if do.dtype != tl.float32:
            delta += tl.sum(do.to(tl.float32) * (out - out.to(do.dtype).to(tl.float32)), 1)
        if not SUMMED:
            tl.store(deltas, delta, mask=inside)
    if FORM.centred:
        mean = tiles.load_vector(STATS + plane * MEAN, first_row, inside, BLOCK_M)
        if SUMMED:
            if not FORM.sums:
                dense = tl.load(deltas + plane, mask=inside, other=0.0)
        else:
            GUIDE = tiles.head_of(GUIDE, out_stride, pair, heads)
            guide = tiles.load_rows(GUIDE, first_row, out_stride, seeing, d_v, BLOCK_M, BLOCK_V)
            dense = tl.sum(do.to(tl.float32) * guide, 1)
            dense *= tiles.load_vector(STATS + plane * DENSE, first_row, inside, BLOCK_M)
            tl.store(deltas + plane, dense, mask=inside)

    q = tiles.load_rows(Q, first_row, q_stride, seeing, d, BLOCK_M, BLOCK_D)
    lo, hi = tiles.key_range(first, position, k_length, first_row, q_length, BLOCK_M)
    full = (k_length - q_length + first_row + 1) // BLOCK_N * BLOCK_N
    begin = lo // BLOCK_N * BLOCK_N if FORM.spans else full
    if FORM.sums:
        zeros = tl.zeros_like(coef)
        missed, pull, share, total = zeros, zeros, zeros, zeros
        for masked in tl.static_range(1 if FORM.spans else 0, 2):
            missed, pull, share, total = _sum_pass(
                q, do, row_scale, shift, mean, inv_m, exponent, delta, missed, pull, share, total,
                first_column, position[:, None], begin if masked else 0, lo, hi if masked else full,
                K, V, KEYS, k_stride, v_stride, FORM, d, d_v, BLOCK_D, BLOCK_V, BLOCK_N, masked,
            )  # fmt: skip
        missed *= tiles.load_vector(STATS + plane * WEIGHT, first_row, inside, BLOCK_M)
        missed = (delta + missed) - delta  # as rounded: E is that of the D which is subtracted
        dense = tl.where(total > 0, coef * (pull - missed * share) / total, 0.0)
        tl.store(deltas, delta + missed, mask=inside)
        tl.store(deltas + plane, dense, mask=inside)
    else:
        unit = tl.full([BLOCK_M], 1.0, tl.float32)
        if q.dtype == tl.float16:
            bound = coef * tl.maximum(tiles.length(do) * tl.load(RANGE + 2 * shared), TINY)
            bound += tl.abs(dense)
            bound *= tiles.slope_bound(mean + 1.0 / tl.maximum(inv_m, TINY), FORM.phi)
            unit = tl.maximum(bound * tl.load(RANGE + 2 * shared + 1), TINY) / ROOM
            norm = tl.maximum(tiles.length(q), NORM_EPS)
            tl.store(deltas + 2 * plane, bound * row_scale * norm, mask=inside)
            tl.store(deltas + 3 * plane, norm, mask=inside)
            coef /= unit
            dense /= unit
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for masked in tl.static_range(1 if FORM.spans else 0, 2):
            acc = _dq_pass(
                q, do, row_scale, shift, mean, inv_m, exponent, coef, delta, dense, acc,
                first_column, position[:, None], begin if masked else 0, lo, hi if masked else full,
                K, V, KEYS, k_stride, v_stride, FORM, d, d_v, BLOCK_D, BLOCK_V, BLOCK_N, masked,
            )  # fmt: skip
        dq = acc * (row_scale * unit)[:, None]
        if FORM.cosine:
            dq = tiles.through_norm(q, dq)
        DQ = tiles.head_of(DQ, dq_stride, pair, heads)
        tiles.store_rows(DQ, dq, first_row, dq_stride, inside, d, BLOCK_M, BLOCK_D)


@triton.jit
def _dkv_pass(
    k, v, inv_k, keys, inv_unit, dk, dv, lo, hi,
    Q, DO, FIRST, STATS, DELTA, q_stride, do_stride, q_length, past, plane, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dv += w' dOut and dk += (ds SCALE)' q over the rows lo..hi; tiles are [keys, rows]."""
    for start in tl.range(lo, hi, BLOCK_M):
        # Rows past the end read zeros, which make their weights and gradients zero.
        rows = start + tl.arange(0, BLOCK_M)
        position = past + rows
        inside = rows < q_length
        first, seeing = None, inside
        if FORM.spans:
            first = tiles.first_keys(FIRST, start, q_length, BLOCK_M)
            seeing = first <= position
            first = first[None, :]
        seen = tiles.is_seen(keys[:, None], first, position[None, :]) if MASKED else None
        q = tiles.load_rows(Q, start, q_stride, seeing, d, BLOCK_M, BLOCK_D)
        row_scale = tiles.load_vector(STATS + plane * SCALE, start, inside, BLOCK_M)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * row_scale[None, :]
        if FORM.cosine:
            s *= inv_k[:, None]
        if FORM.shifted:
            s += tiles.load_vector(STATS + plane * SHIFT, start, inside, BLOCK_M)[None, :]
        f, slope = tiles.activate(s, FORM)
        mean, inv_m, exponent, delta, dense = None, None, None, None, None
        if FORM.centred:
            mean = tiles.load_vector(STATS + plane * MEAN, start, inside, BLOCK_M)[None, :]
        if FORM.sharp:
            inv_m = tiles.load_vector(STATS + plane * INV_M, start, inside, BLOCK_M)[None, :]
            count = tiles.count_of(first, position[None, :])
            exponent = tiles.adaptive(count, p, alpha, train_length) - 1.0
        z, r = _weights(f, mean, inv_m, exponent, seen, FORM)
        do = tiles.load_rows(DO, start, do_stride, seeing, d_v, BLOCK_M, BLOCK_V)
        weight = tiles.load_vector(STATS + plane * WEIGHT, start, inside, BLOCK_M)
        weight *= tiles.weight_unit(q.dtype)
        w = (r * z if FORM.sharp else z) * weight[None, :]
        dv = tl.dot(w.to(do.dtype), do, dv, input_precision=PRECISION)
        dw = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        row_scale *= inv_unit
        coef = tiles.load_vector(STATS + plane * COEF, start, inside, BLOCK_M) * row_scale
        if FORM.l1:
            delta = tiles.load_vector(DELTA, start, inside, BLOCK_M)[None, :]
        if FORM.centred:
            dense = tiles.load_vector(DELTA + plane, start, inside, BLOCK_M) * row_scale
            dense = dense[None, :]
        ds = _score_gradient(dw, z, r, slope, coef[None, :], delta, dense, seen, FORM)
        dk = tiles.dot(ds, q, dk)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, KEYS, FIRST, LAST, STATS, DO, DK, DV, DELTA, RANGE,
    q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride, first_stride, last_stride,
    heads, repeats, q_length, k_length, plane, length_class, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, over the rows that see it, of every head of q that shares it.

    LAST is the last row that may see each key."""
    first_key = tl.program_id(0) * BLOCK_N
    shared = tl.program_id(1)
    groups = heads // repeats
    past = k_length - q_length
    keys = first_key + tl.arange(0, BLOCK_N)
    inside = keys < k_length
    wanted = inside
    # No row before `first` sees a key of the block; every row from `full` on sees all of them.
    first = tl.maximum(first_key - past, 0) // BLOCK_M * BLOCK_M
    full = tl.cdiv(tl.maximum(first_key + BLOCK_N - 1 - past, 0), BLOCK_M) * BLOCK_M
    full = tl.minimum(full, tl.cdiv(q_length, BLOCK_M) * BLOCK_M)
    if FORM.spans:
        batch = (shared // groups).to(tl.int64)
        FIRST += batch * first_stride
        last = tl.load(LAST + batch * last_stride + keys, mask=inside, other=-1)
        wanted = last >= tl.maximum(keys - past, 0)  # what no row sees may be anything
        full = tl.max(last, 0) + 1
    K = tiles.head_of(K, k_stride, shared, groups)
    V = tiles.head_of(V, v_stride, shared, groups)
    k = tiles.load_rows(K, first_key, k_stride, wanted, d, BLOCK_N, BLOCK_D)
    v = tiles.load_rows(V, first_key, v_stride, wanted, d_v, BLOCK_N, BLOCK_V)
    inv_k = None
    if FORM.cosine:
        inv_k = tiles.load_vector(KEYS + shared.to(tl.int64) * k_length, first_key, wanted, BLOCK_N)

    unit = 1.0
    if k.dtype == tl.float16:
        unit = tl.load(RANGE + 2 * shared) / tl.load(RANGE + 2 * shared + 1) / ROOM
        unit = tl.maximum(unit, TINY)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for member in tl.range(0, repeats):
        pair = shared * repeats + member
        rows = pair.to(tl.int64) * q_length
        for clean in tl.static_range(0, 1 if FORM.spans else 2):
            dk, dv = _dkv_pass(
                k, v, inv_k, keys, 1.0 / unit, dk, dv,
                full if clean else first, q_length if clean else full,
                tiles.head_of(Q, q_stride, pair, heads), tiles.head_of(DO, do_stride, pair, heads),
                FIRST, STATS + rows, DELTA + rows, q_stride, do_stride, q_length, past, plane,
                p, alpha, train_length, FORM, d, d_v, BLOCK_D, BLOCK_V, BLOCK_M, not clean,
            )  # fmt: skip
    dk *= unit
    if FORM.cosine:
        dk = tiles.through_norm(k, dk * inv_k[:, None])  # type: ignore[index]
    DK = tiles.head_of(DK, dk_stride, shared, groups)
    tiles.store_rows(DK, dk, first_key, dk_stride, inside, d, BLOCK_N, BLOCK_D)
    DV = tiles.head_of(DV, dv_stride, shared, groups)
    dv /= tiles.weight_unit(k.dtype)
    tiles.store_rows(DV, dv, first_key, dv_stride, inside, d_v, BLOCK_N, BLOCK_V)
