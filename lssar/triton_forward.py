"""Computes exact fused attention in Triton, every mechanism: the forward of `triton_op.py`.

Row i sees the keys first_i .. i, N_i of them. With f = phi(scale q.k + shift) on those keys,

    w = f / l,  l = sum_j |f|           (l = 1 without the norm)
    out = w V

Sharpened rows, whose weights do not change when f is scaled:

    mu = O_i mean_j f,  O_i = [N_i > 3]         M = max_j f - mu
    z = relu(f - mu) / M                        w = z^p / l,  l = sum_j z^p

A row with no key above its mean keeps its stage-one weights (mu = 0, O = 0, M = max f, and 1 for p
in the gradient): uniform, with finite gradients. Rows that are re-centred and normalised again are
w = (f - mu) / l, l = sum_j |f - mu|. `triton_naive.py` has all of it in PyTorch.

Rows with mu take two passes over their keys, all others one, in which exp (and in fp16 everything)
is relative to the row's largest so far. Each product is one product of the input's type with fp32
sums: z^p is rounded once, and l is the sum of the rounded weights. Tensor cores may truncate their
sums, and a truncated l makes D of the backward too large for every key of a row: they sum the
weights of one tile, and tiles are added outside of them. q and k stay as they are; what multiplies
them (log d log N / |q| |k|) multiplies the fp32 score. KEYS is 1/|k_j| on the cosine, else the
longest |k| so far, which bounds a row's scores. Only tiles at the border of what a row sees are
masked.

For the backward (`triton_backward.py`) a row's statistics are saved as planes of one fp32 tensor:
SCALE and SHIFT of its scores; FACTOR a and OFFSET b, with which w = relu(a f - b)^p (or a f - b) is
normalised already; COEF = p and SHARE = O/N for the gradient. A power of a rounded factor is off by
p roundings, so with fp32 input the weights are normalised by WEIGHT instead. REST is what is lost
when the output is rounded.

FORM (in `triton_op.py`) is what a kernel is compiled for. Its power is p where it is an integer and
the same for all rows, 0 where p_i comes from p and alpha, and None without sharpening.
"""

import triton
import triton.language as tl

from lssar import reference, tiles
from lssar.tiles import (
    COEF,
    FACTOR,
    LN_2,
    NORM_EPS,
    OFFSET,
    REST_SCALE,
    SCALE,
    SHARE,
    SHIFT,
    WEIGHT,
)

LOWEST = tl.constexpr(-1e30)  # below any score, and finite: its difference to itself is zero
# What the reference calls flat: (4 + largest score) times this, of the maximum.
FLAT = tl.constexpr(reference.FLAT * 2.0**-23)
SIXTEEN = tl.constexpr(16)  # the narrowest tile of tl.dot


@triton.jit
def scale_of_rows(length, count, scale, FORM: tl.constexpr):
    """Return the factor of the products of a row."""
    row_scale = tl.zeros_like(count) + scale
    if FORM.cosine:
        row_scale = scale * tl.log2(count) / length
    return row_scale


@triton.jit
def add_to_mean(s, seen, total, carry, top, FORM: tl.constexpr, dtype: tl.constexpr):
    """Add a tile of scores to the row's sum of f, and to top, its largest |f|.

    Of exp, top is the largest score, and f relative to it.
    """
    if FORM.phi == "exp":
        if seen is not None:
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        less = tl.exp2(top - new)
        total, carry = tiles.add(total * less, carry * less, tl.sum(tl.exp2(s - new[:, None]), 1))
        top = new
    else:
        f, _ = tiles.activate(s, FORM, dtype)
        if seen is not None:
            f = tl.where(seen, f, 0.0)
        total, carry = tiles.add(total, carry, tl.sum(f, 1))
        top = tl.maximum(top, tl.max(tl.abs(f) if FORM.signed else f, 1))
    return total, carry, top


@triton.jit
def mean_and_size(total, top, count, largest, seeing, FORM: tl.constexpr):
    """Return mu and M of the rows, zero where mu leaves nothing; `largest` bounds their scores."""
    mean = tl.where((count > 3) & seeing, total / count, 0.0)
    if FORM.recentre:  # of zeros alone, -1/N is left
        mean = tl.where((count > 3) & (top == 0), 1.0, mean)
        top = tl.where(top == 0, 1.0, top)
    if FORM.sharp:
        mean = tl.where(top - mean <= top * FLAT * (4.0 + LN_2 * largest), 0.0, mean)
        top = top - mean
    return mean, top


@triton.jit
def add_values(
    s, v, seen, factor, offset, exponent, unit, minus_ones, l, carry, top, acc,
    FORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add a tile: the rounded weights to l, and their products with the values to acc.

    Without a mean pass, top is the largest score of exp so far, or with `FORM.online` the largest
    |f|, and all sums are relative to it; else the largest weight."""
    if FORM.online and FORM.phi == "exp":
        if seen is not None:
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        less = tl.exp2(top - new)
        if dtype == tl.float32:
            w = tl.exp2(s - new[:, None]) * unit
        else:
            w = tl.exp2(s - (new - tl.log2(unit))[:, None])
    else:
        f, _ = tiles.activate(s, FORM, dtype)
        z, r = tiles.weights(f, factor, offset, exponent - 1.0, seen, FORM, dtype)
        new = top
        w = z
        if FORM.sharp:
            w = tiles.power(z, exponent, FORM.power) if FORM.power > 0 else z * r
            if dtype == tl.float32:
                w *= unit
        if FORM.online:
            new = tl.maximum(top, tl.max(tl.abs(w), 1))
            less = tl.where(new > 0, top / new, 0.0)
            w = w * tl.where(new > 0, unit / new, 0.0)[:, None]
    w = tiles.narrow(w, v.dtype)
    if FORM.online:
        l = l * less
        carry = carry * (less if minus_ones is None else less[:, None])
        acc = acc * less[:, None]
    if FORM.l1 and minus_ones is not None:
        # Subtracted, as Triton makes an addition part of the product.
        carry -= tiles.dot(w, minus_ones)
    elif FORM.l1:
        size = tl.abs(w.to(tl.float32))
        l, carry = tiles.add(l, carry, tl.sum(size, 1))
    if FORM.loose:
        new = tl.maximum(top, tl.max(tl.abs(w.to(tl.float32)), 1))
    return l, carry, new, tiles.dot(w, v, acc)


@triton.jit(do_not_specialize=("q_length", "k_length", "plane", "first_stride"))
def forward_kernel(
    Q, K, V, KEYS, FIRST, OUT, REST, STATS,
    q_stride, k_stride, v_stride, out_stride, first_stride,
    heads, repeats, q_length, k_length, plane, scale, bias, unit, p, alpha, train_length,
    FORM: tl.constexpr, SAVE: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of one head of q; `repeats` of these share a head of k and v."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest start first
    pair = tl.program_id(1)
    shared = pair // repeats
    dtype: tl.constexpr = Q.dtype.element_ty
    Q = tiles.head_of(Q, q_stride, pair, heads)
    K = tiles.head_of(K, k_stride, shared, heads // repeats)
    V = tiles.head_of(V, v_stride, shared, heads // repeats)
    KEYS += shared.to(tl.int64) * k_length

    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    position = k_length - q_length + rows
    first, first_column, seeing = None, None, inside
    if FORM.spans:
        FIRST += (pair // heads).to(tl.int64) * first_stride
        first = tiles.first_keys(FIRST, first_row, q_length, BLOCK_M)
        first_column = first[:, None]
        seeing = first <= position
    count = tiles.count_of(first, position)
    q = tiles.load_rows(Q, first_row, q_stride, seeing, d, BLOCK_M, BLOCK_D)
    length = tl.maximum(tiles.length(q), NORM_EPS)
    row_scale = scale_of_rows(length, count, scale, FORM)
    shift = None
    shift_column = None
    if FORM.biased:
        shift = bias * tl.log2(count) if FORM.log_n else tl.zeros_like(count) + bias
        shift_column = shift[:, None]
    exponent = tiles.adaptive(count, p, alpha, train_length)
    lo, full_lo, full_hi, hi = tiles.key_range(first, position, inside, k_length)
    start, full, whole, border, before = tiles.split(lo, full_lo, full_hi, hi, BLOCK_N)

    zeros = tl.zeros([BLOCK_M], tl.float32)
    mean, factor, offset = zeros, zeros + 1.0, zeros
    if FORM.centred:
        total, carry, top = zeros, zeros, zeros + (LOWEST if FORM.phi == "exp" else 0.0)
        for masked in tl.static_range(2):
            for i in tl.range(0, border if masked else whole):
                begin = tiles.place(i, start, full, whole, before, masked, BLOCK_N)
                keys = begin + tl.arange(0, BLOCK_N)
                some = tiles.is_seen(keys, lo, hi - 1) if masked else None
                seen = None
                if masked:
                    seen = tiles.is_seen(keys[None, :], first_column, position[:, None])
                k = tiles.load_rows(K, begin, k_stride, some, d, BLOCK_N, BLOCK_D)
                inv_k = None
                if FORM.cosine:
                    inv_k = tiles.load_vector(KEYS, begin, some, BLOCK_N)[None, :]
                s = tiles.scores(tiles.dot(q, tl.trans(k)), row_scale[:, None], inv_k, shift_column)
                total, carry, top = add_to_mean(s, seen, total, carry, top, FORM, dtype)
        if FORM.phi == "exp":
            shift = tl.where(top > LOWEST, -top, 0.0)
            shift_column = shift[:, None]
            top = zeros + 1.0
        largest = row_scale * length  # score, in units of ln 2
        if FORM.sharp and not FORM.cosine:
            largest *= tiles.load_vector(KEYS, k_length - q_length + first_row, inside, BLOCK_M)
        mean, size = mean_and_size(total, top, count, largest, seeing, FORM)
        factor = tl.where(size > 0, 1.0 / size, 0.0)
        if FORM.sharp and dtype != tl.float32:
            factor *= tiles.root(zeros + unit, exponent)
        elif not FORM.sharp:
            factor *= unit
        offset = mean if dtype == tl.float32 else mean * factor
    elif FORM.l1 and not FORM.online:
        factor *= unit

    stats = STATS + pair.to(tl.int64) * q_length + rows
    if SAVE:
        # The gradient of a weight that is one is zero, and rounding must not say otherwise: times a
        # long key, or over a small l, it would be large.
        coef = zeros + (LN_2 if FORM.phi == "exp" or FORM.phi == "sigmoid" else 1.0)
        if FORM.sharp:
            # The mean is zero in the first three rows and in flat ones; these have p = 1.
            coef *= tl.where((mean > 0) | (count <= 3), exponent, 1.0)
        if FORM.l1:
            coef = tl.where(count <= 1, 0.0, coef)
        if FORM.phi == "exp" and FORM.recentre:
            coef = tl.where(total <= 1.0, 0.0, coef)
        if FORM.centred:
            share = tl.where((count > 3) & ((mean > 0) | FORM.recentre), 1.0 / count, 0.0)
            tl.store(stats + plane * SHARE, share, mask=inside)
        tl.store(stats + plane * SCALE, row_scale, mask=inside)
        tl.store(stats + plane * COEF, coef, mask=inside)

    BY_PRODUCT: tl.constexpr = dtype != tl.float32 and not FORM.signed
    minus_ones = None
    if BY_PRODUCT:
        minus_ones = tl.full([BLOCK_N, SIXTEEN], -1.0, tl.float32).to(dtype)
    carry = tl.zeros([BLOCK_M, SIXTEEN], tl.float32) if BY_PRODUCT else zeros
    l, top = zeros, zeros + (LOWEST if FORM.online and FORM.phi == "exp" else 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for masked in tl.static_range(2):
        for i in tl.range(0, border if masked else whole):
            begin = tiles.place(i, start, full, whole, before, masked, BLOCK_N)
            keys = begin + tl.arange(0, BLOCK_N)
            some = tiles.is_seen(keys, lo, hi - 1) if masked else None
            seen = None
            if masked:
                seen = tiles.is_seen(keys[None, :], first_column, position[:, None])
            k = tiles.load_rows(K, begin, k_stride, some, d, BLOCK_N, BLOCK_D)
            inv_k = None
            if FORM.cosine:
                inv_k = tiles.load_vector(KEYS, begin, some, BLOCK_N)[None, :]
            s = tiles.scores(tiles.dot(q, tl.trans(k)), row_scale[:, None], inv_k, shift_column)
            v = tiles.load_rows(V, begin, v_stride, some, d_v, BLOCK_N, BLOCK_V)
            l, carry, top, acc = add_values(
                s, v, seen, factor[:, None], offset[:, None], exponent[:, None], unit, minus_ones,
                l, carry, top, acc, FORM, dtype,
            )  # fmt: skip

    # Computed afresh, not kept in registers during the loops.
    first_row = tiles.afresh(first_row)
    pair = tiles.afresh(pair)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    stats = STATS + pair.to(tl.int64) * q_length + rows
    out = acc
    inv_l = zeros + 1.0
    if FORM.l1:
        if BY_PRODUCT:
            l = tl.max(carry, 1)  # all sixteen are the same
        inv_l = tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)  # no weights: zeros
        out = acc * inv_l[:, None]
    OUT = tiles.head_of(OUT, out_stride, pair, heads)
    tiles.store_rows(OUT, out, first_row, out_stride, inside, d_v, BLOCK_M, BLOCK_V)
    if SAVE:
        if dtype != tl.float32:
            REST = tiles.head_of(REST, out_stride, pair, heads)
            rest = (out - tiles.narrow(out, dtype).to(tl.float32)) * REST_SCALE
            tiles.store_rows(REST, rest, first_row, out_stride, inside, d_v, BLOCK_M, BLOCK_V)
        if FORM.sharp and dtype == tl.float32:
            tl.store(stats + plane * WEIGHT, inv_l * unit, mask=inside)
        elif FORM.sharp:
            tl.store(stats + plane * COEF, 0.0, mask=inside & (l <= unit))
            inv_l = tiles.root(inv_l, exponent)
        if FORM.online and FORM.phi == "exp":
            if dtype == tl.float32:  # its backward corrects D, and needs exact weights
                factor = inv_l * unit
                shift = tl.where(l > 0, -top, LOWEST)
            else:
                tl.store(stats + plane * COEF, 0.0, mask=inside & (l <= unit))
                shift = tl.where(l > 0, tl.log2(tl.where(l > 0, unit / l, 1.0)) - top, LOWEST)
        elif FORM.online:
            tl.store(stats + plane * COEF, 0.0, mask=inside & (l <= unit))
            factor = tl.where(top > 0, unit * inv_l / tl.where(top > 0, top, 1.0), 0.0)
        elif not (FORM.sharp and dtype == tl.float32):
            if FORM.loose:
                tl.store(stats + plane * COEF, 0.0, mask=inside & (l <= top))
            factor *= inv_l
            if dtype != tl.float32:
                offset *= inv_l
        tl.store(stats + plane * FACTOR, factor, mask=inside)
        if FORM.shifted:
            tl.store(stats + plane * SHIFT, shift, mask=inside)
        if FORM.centred:
            tl.store(stats + plane * OFFSET, offset, mask=inside)
