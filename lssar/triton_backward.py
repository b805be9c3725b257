"""Computes the backward of fused attention in Triton: dq, then dk and dv.

Names are those of `triton_forward`.

With w_j = z_j^p, z_j = relu(a f_j - b), r_j = z_j^(p-1), c = p a, and dw_j = dOut . v_j of a row,

    D = dOut . out                              t_j = r_j (dw_j - D)
    E = O/N c sum_j t_j                         ds_j = (c t_j - E) phi'(s_j)
    dq = scale (c sum_j t_j phi'(s_j) k_j - E sum_j phi'(s_j) k_j)
    dk_j = sum_i scale_i ds_ij q_i              dv_j = sum_i w_ij dOut_i

E is the gradient through the mean, for every key the row sees. dq needs it only after its last key,
so both of its sums and E are made in one pass; dk and dv read it. Without sharpening r_j is one, or
sgn(w_j) before D where weights are signed; without the norm D is zero; without a mean E is.

dw_j - D is a difference of two sums made in different orders. The rest of the output keeps D as
exact as the sum itself, and rows with one key have c = 0. fp32 input does better: sum_j w_j (dw_j -
D) is zero but for the rounding of D, so it is subtracted from D and from what came of D, which
takes a third sum, over k_j r_j phi'(s_j).

In fp16 ds would underflow or overflow: dq_kernel divides a row of it by a bound of its size, and
dkv_kernel all rows of a head by the largest such bound (RANGE: of the head's v and k for the one,
of its rows for the other). bf16 has the exponents of fp32.
"""

import triton
import triton.language as tl

from lssar import tiles
from lssar.tiles import COEF, FACTOR, NORM_EPS, OFFSET, REST_SCALE, SCALE, SHARE, SHIFT, WEIGHT

TINY = tl.constexpr(1e-20)
# Where fp16 holds a bound of ds: small ones are not subnormal, and rows or keys hundreds of times
# shorter than the longest of their head do not overflow.
ROOM = tl.constexpr(64.0)


@triton.jit
def weight_gradient(dw, delta, z, r, FORM: tl.constexpr):
    """Return t of a tile: the gradient of the weights through their normalisation, over c."""
    if FORM.sharp:
        t = r * (dw - delta)
    elif FORM.signed and FORM.l1:
        t = dw - tiles.sign(z) * delta
    elif FORM.l1:
        t = dw - delta
    else:
        t = dw
    return t


@triton.jit(do_not_specialize=("q_length", "k_length", "plane", "first_stride"))
def dq_kernel(
    Q, K, V, KEYS, FIRST, OUT, REST, STATS, DO, DQ, DELTA, RANGE,
    q_stride, k_stride, v_stride, out_stride, rest_stride, do_stride, dq_stride, first_stride,
    heads, repeats, q_length, k_length, plane, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of rows; leave D, scale c and scale E in DELTA for `dkv_kernel`."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1)
    shared = pair // repeats
    dtype: tl.constexpr = Q.dtype.element_ty
    K = tiles.head_of(K, k_stride, shared, heads // repeats)
    V = tiles.head_of(V, v_stride, shared, heads // repeats)
    DO = tiles.head_of(DO, do_stride, pair, heads)
    KEYS += shared.to(tl.int64) * k_length
    stats = STATS + pair.to(tl.int64) * q_length

    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    position = k_length - q_length + rows
    first, first_column, seeing = None, None, inside
    if FORM.spans:
        FIRST += (pair // heads).to(tl.int64) * first_stride
        first = tiles.first_keys(FIRST, first_row, q_length, BLOCK_M)
        first_column = first[:, None]
        seeing = first <= position
    lo, full_lo, full_hi, hi = tiles.key_range(first, position, inside, k_length)
    start, full, whole, border, before = tiles.split(lo, full_lo, full_hi, hi, BLOCK_N)
    row_scale = tiles.load_vector(stats + plane * SCALE, first_row, inside, BLOCK_M)
    factor = tiles.load_vector(stats + plane * FACTOR, first_row, inside, BLOCK_M)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    shift = None
    offset, delta = zeros, zeros
    if FORM.shifted:
        shift = tiles.load_vector(stats + plane * SHIFT, first_row, inside, BLOCK_M)[:, None]
    if FORM.centred:
        offset = tiles.load_vector(stats + plane * OFFSET, first_row, inside, BLOCK_M)
    exponent = tiles.adaptive(tiles.count_of(first, position), p, alpha, train_length) - 1.0
    do = tiles.load_rows(DO, first_row, do_stride, seeing, d_v, BLOCK_M, BLOCK_V)
    if FORM.l1:
        OUT = tiles.head_of(OUT, out_stride, pair, heads)
        out = tiles.load_rows(OUT, first_row, out_stride, seeing, d_v, BLOCK_M, BLOCK_V)
        out = out.to(tl.float32)
        if dtype != tl.float32:
            REST = tiles.head_of(REST, rest_stride, pair, heads)
            rest = tiles.load_rows(REST, first_row, rest_stride, seeing, d_v, BLOCK_M, BLOCK_V)
            out += rest.to(tl.float32) * (1.0 / REST_SCALE)
        delta = tl.sum(do.to(tl.float32) * out, 1)
    q = tiles.head_of(Q, q_stride, pair, heads)
    q = tiles.load_rows(q, first_row, q_stride, seeing, d, BLOCK_M, BLOCK_D)

    inv_unit = zeros + 1.0
    if dtype == tl.float16:
        bound = tl.maximum(tiles.length(do) * tl.load(RANGE + 2 * shared), TINY)
        inv_unit = ROOM / bound
        steepest = tiles.slope_bound((1.0 + offset) / tl.maximum(factor, TINY), FORM)
        key_unit = 1.0 / tl.maximum(tl.load(RANGE + 2 * shared + 1), TINY)
        inv_slope = key_unit / steepest
        size = tl.maximum(tiles.length(q), NORM_EPS)
        tl.store(DELTA + 4 * plane + pair.to(tl.int64) * q_length + rows, size, mask=inside)
    CORRECTED: tl.constexpr = FORM.l1 and dtype == tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    flat_acc, side_acc = acc, acc
    pull, missed, side_sum = zeros, zeros, zeros
    for masked in tl.static_range(2):
        for i in tl.range(0, border if masked else whole):
            begin = tiles.place(i, start, full, whole, before, masked, BLOCK_N)
            keys = begin + tl.arange(0, BLOCK_N)
            some = None
            seen = None
            if masked:
                some = tiles.is_seen(keys, lo, hi - 1)
                seen = tiles.is_seen(keys[None, :], first_column, position[:, None])
            k = tiles.load_rows(K, begin, k_stride, some, d, BLOCK_N, BLOCK_D)
            inv_k = None
            if FORM.cosine:
                inv_k = tiles.load_vector(KEYS, begin, some, BLOCK_N)[None, :]
            s = tiles.scores(tiles.dot(q, tl.trans(k)), row_scale[:, None], inv_k, shift)
            f, slope = tiles.activate(s, FORM, dtype)
            z, r = tiles.weights(
                f, factor[:, None], offset[:, None], exponent[:, None], seen, FORM, dtype
            )
            v = tiles.load_rows(V, begin, v_stride, some, d_v, BLOCK_N, BLOCK_V)
            t = weight_gradient(tiles.dot(do, tl.trans(v)), delta[:, None], z, r, FORM)
            if FORM.cosine:
                slope *= inv_k
            if dtype == tl.float16:
                slope *= inv_slope[:, None]
            if masked:
                slope = tl.where(seen, slope, 0.0)
                t = tl.where(seen, t, 0.0)
            if FORM.centred:
                pull += tl.sum(t, 1)
                flat_acc = tiles.dot(slope, k, flat_acc)
            if CORRECTED:
                side = tl.zeros_like(z) + 1.0
                if FORM.sharp:
                    side = r
                elif FORM.signed:
                    side = tiles.sign(z)
                missed += tl.sum(z * t, 1)
                side_sum += tl.sum(side, 1)
                side_acc = tiles.dot(side * slope, k, side_acc)
            if dtype == tl.float16:
                t *= inv_unit[:, None]
            acc = tiles.dot(t * slope, k, acc)

    # Computed afresh, not kept in registers during the loop.
    first_row = tiles.afresh(first_row)
    pair = tiles.afresh(pair)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    stats = STATS + pair.to(tl.int64) * q_length
    coef = factor * tiles.load_vector(stats + plane * COEF, first_row, inside, BLOCK_M)
    if FORM.sharp and dtype == tl.float32:
        weight = tiles.load_vector(stats + plane * WEIGHT, first_row, inside, BLOCK_M)
        coef *= weight
        missed *= weight
    share = zeros
    if FORM.centred:
        share = coef * tiles.load_vector(stats + plane * SHARE, first_row, inside, BLOCK_M)
    dense = share * pull
    kept = dense
    if CORRECTED:
        acc -= missed[:, None] * side_acc
        dense = share * (pull - missed * side_sum)
        rounded = (delta + missed) - delta
        delta += missed
        kept = share * (pull - rounded * side_sum)  # E of the D that is rounded
    row_scale = tiles.load_vector(stats + plane * SCALE, first_row, inside, BLOCK_M)
    deltas = DELTA + pair.to(tl.int64) * q_length + rows
    tl.store(deltas, delta, mask=inside)
    tl.store(deltas + plane, coef * row_scale, mask=inside)
    tl.store(deltas + 2 * plane, kept * row_scale, mask=inside)
    unit = row_scale
    if dtype == tl.float16:
        unit = row_scale / inv_slope
        bound = (coef * (ROOM / inv_unit) + tl.abs(dense)) * unit * key_unit
        tl.store(deltas + 3 * plane, bound, mask=inside)
        coef /= inv_unit
    dq = acc * coef[:, None] - flat_acc * dense[:, None]
    dq *= unit[:, None]
    seeing = inside
    if FORM.spans:
        first = tiles.first_keys(FIRST, first_row, q_length, BLOCK_M)
        seeing = first <= k_length - q_length + rows
    if FORM.cosine:
        q = tiles.head_of(Q, q_stride, pair, heads)
        q = tiles.load_again(q, first_row, q_stride, seeing, d, BLOCK_M, BLOCK_D)
        dq = tiles.through_norm(q, dq)
    DQ = tiles.head_of(DQ, dq_stride, pair, heads)
    tiles.store_rows(DQ, dq, first_row, dq_stride, inside, d, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=("q_length", "k_length", "plane", "first_stride", "ends_stride"))
def dkv_kernel(
    Q, K, V, KEYS, FIRST, ENDS, STATS, DO, DK, DV, DELTA, RANGE,
    q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride, first_stride, ends_stride,
    heads, repeats, q_length, k_length, plane, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, over the rows that see it in every head that shares it.

    Tiles are [keys, rows]. ENDS holds two numbers of each key: the last row that may see it, and
    the row from which on not all rows see it.
    """
    first_key = tl.program_id(0) * BLOCK_N
    shared = tl.program_id(1)
    groups = heads // repeats
    past = k_length - q_length
    dtype: tl.constexpr = Q.dtype.element_ty
    keys = first_key + tl.arange(0, BLOCK_N)
    inside = keys < k_length
    wanted = inside
    lo, hi = tl.maximum(first_key - past, 0), q_length
    full_lo, full_hi = tl.maximum(first_key + BLOCK_N - 1 - past, 0), q_length
    if FORM.spans:
        batch = (shared // groups).to(tl.int64)
        FIRST += batch * first_stride
        ENDS += batch * 2 * ends_stride
        last = tl.load(ENDS + keys, mask=inside, other=-1)
        wanted = last >= tl.maximum(keys - past, 0)  # what no row sees may be anything
        hi = tl.max(last, 0) + 1
        full_hi = tl.load(ENDS + ends_stride + first_key)
    start, full, whole, border, before = tiles.split(lo, full_lo, full_hi, hi, BLOCK_M)
    k = tiles.head_of(K, k_stride, shared, groups)
    k = tiles.load_rows(k, first_key, k_stride, wanted, d, BLOCK_N, BLOCK_D)
    v = tiles.head_of(V, v_stride, shared, groups)
    v = tiles.load_rows(v, first_key, v_stride, wanted, d_v, BLOCK_N, BLOCK_V)
    inv_k = None
    if FORM.cosine:
        KEYS += shared.to(tl.int64) * k_length
        inv_k = tiles.load_vector(KEYS, first_key, wanted, BLOCK_N)[:, None]

    unit, inv_unit, weight_unit = 1.0, 1.0, 1.0
    if dtype == tl.float16:
        unit = tl.load(RANGE + 2 * shared) / tl.load(RANGE + 2 * shared + 1) / ROOM
        unit = tl.maximum(unit, TINY)
        inv_unit = 1.0 / unit
        weight_unit = 16384.0  # weights of long rows would be subnormal
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for member in tl.range(0, repeats):
        pair = shared * repeats + member
        q_head = tiles.head_of(Q, q_stride, pair, heads)
        do_head = tiles.head_of(DO, do_stride, pair, heads)
        stats = STATS + pair.to(tl.int64) * q_length
        deltas = DELTA + pair.to(tl.int64) * q_length
        for masked in tl.static_range(2):
            for i in tl.range(0, border if masked else whole):
                begin = tiles.place(i, start, full, whole, before, masked, BLOCK_M)
                rows = begin + tl.arange(0, BLOCK_M)
                position = past + rows
                some = rows < q_length if masked else None
                first = None
                seeing = some
                if FORM.spans:
                    first = tiles.first_keys(FIRST, begin, q_length, BLOCK_M)
                    seeing = first <= position
                    first = first[None, :]
                seen = tiles.is_seen(keys[:, None], first, position[None, :]) if masked else None
                q = tiles.load_rows(q_head, begin, q_stride, seeing, d, BLOCK_M, BLOCK_D)
                row_scale = tiles.load_vector(stats + plane * SCALE, begin, some, BLOCK_M)
                shift = None
                offset = None
                exponent = None
                if FORM.shifted:
                    shift = tiles.load_vector(stats + plane * SHIFT, begin, some, BLOCK_M)[None, :]
                s = tiles.scores(tiles.dot(k, tl.trans(q)), row_scale[None, :], inv_k, shift)
                f, slope = tiles.activate(s, FORM, dtype)
                factor = tiles.load_vector(stats + plane * FACTOR, begin, some, BLOCK_M)[None, :]
                if FORM.centred:
                    offset = tiles.load_vector(stats + plane * OFFSET, begin, some, BLOCK_M)
                    offset = offset[None, :]
                if FORM.sharp:
                    count = tiles.count_of(first, position[None, :])
                    exponent = tiles.adaptive(count, p, alpha, train_length) - 1.0
                z, r = tiles.weights(f, factor, offset, exponent, seen, FORM, dtype)
                do = tiles.load_rows(do_head, begin, do_stride, seeing, d_v, BLOCK_M, BLOCK_V)
                w = r * z if FORM.sharp else z
                if FORM.sharp and dtype == tl.float32:
                    weight = tiles.load_vector(stats + plane * WEIGHT, begin, some, BLOCK_M)
                    w *= weight[None, :]
                if dtype == tl.float16:
                    w *= weight_unit
                dv = tiles.dot(w, do, dv)
                delta = tiles.load_vector(deltas, begin, some, BLOCK_M)[None, :]
                t = weight_gradient(tiles.dot(v, tl.trans(do)), delta, z, r, FORM)
                coef = tiles.load_vector(deltas + plane, begin, some, BLOCK_M)
                ds = t * coef[None, :]
                if FORM.centred:
                    dense = tiles.load_vector(deltas + 2 * plane, begin, some, BLOCK_M)
                    ds -= dense[None, :]
                if dtype == tl.float16:
                    ds *= inv_unit
                ds *= slope
                if masked:
                    ds = tl.where(seen, ds, 0.0)
                dk = tiles.dot(ds, q, dk)
    # Computed afresh, not kept in registers during the loops.
    first_key = tiles.afresh(first_key)
    shared = tiles.afresh(shared)
    keys = first_key + tl.arange(0, BLOCK_N)
    inside = keys < k_length
    DV = tiles.head_of(DV, dv_stride, shared, groups)
    dv /= weight_unit
    tiles.store_rows(DV, dv, first_key, dv_stride, inside, d_v, BLOCK_N, BLOCK_V)
    dk *= unit
    if FORM.cosine:
        wanted = inside
        if FORM.spans:
            last = tl.load(ENDS + keys, mask=inside, other=-1)
            wanted = last >= tl.maximum(keys - past, 0)
        k = tiles.head_of(K, k_stride, shared, groups)
        k = tiles.load_again(k, first_key, k_stride, wanted, d, BLOCK_N, BLOCK_D)
        dk = tiles.through_norm(k, dk * inv_k)
    DK = tiles.head_of(DK, dk_stride, shared, groups)
    tiles.store_rows(DK, dk, first_key, dk_stride, inside, d, BLOCK_N, BLOCK_D)
