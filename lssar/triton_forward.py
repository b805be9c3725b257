"""Exact fused attention in Triton, every mechanism: the forward kernel of `lssar/triton_op.py`.

Row i sees the keys first_i .. i, N_i of them. With f = phi(scale q.k + shift) on those keys,

    w = f / l,  l = sum_j |f|           (l = 1 without the norm)
    out = w V

Sharpened rows, whose weights do not change when f is scaled:

    mu = O_i mean_j f,  O_i = [N_i > 3]         M = max_j f - mu
    z = relu(f - mu) / M                        w = z^p / l,  l = sum_j z^p
    r = z^(p-1)                                 G = sum_j r v_j,  H = sum_j r

A row with no key above its mean keeps its stage-one weights (mu = 0, O = 0, M = max f, and 1 for p
in the gradient): uniform, with finite gradients. Rows that are re-centred and normalised again are

    w = (f - mu) / l,  l = sum_j |f - mu|       G = sum_j v_j,  H = sum_j sgn(f - mu)

exp is relative to the row's largest score: exact under the norm, and without overflow. Rows with mu
take two passes over their keys, all others one; fp16 takes a first one for M = max |f| too, as f
may be beyond its range.

q and k stay in their own type; what multiplies them (log d log N / |q| |k|) multiplies the fp32
score; KEYS is 1/|k_j| on the cosine, else the longest |k| so far, which bounds a row's scores. For
the backward (`triton_backward.py`) a row's statistics are saved as SCALE and SHIFT of its scores,
MEAN = mu, INV_M = 1/M, WEIGHT, what makes z^p or f a weight, COEF = p/(l M) and DENSE = O/N COEF,
planes of one fp32 tensor. With 16-bit input GUIDE = G - H out is saved too, in fp32, and EXACT, the
output before it is rounded. The backward subtracts nearly equal numbers: D and dOut . v in a peaked
row, all gradients of keys alike. With a rounded out and G, dq and dk in fp16 lost 3.5 times what
eager loses on random input. With fp32 input the backward sums what it needs of G and H anew.

FORM (in `triton_op.py`) is what a kernel is compiled for. Its power is p where it is an integer and
the same for all rows, 0 where p_i comes from p and alpha, and None without sharpening.

Blocks of zero weights are not skipped. About 65 % of the weights are zero, but no block of 64x64,
64x32 or 32x32 is, at random or with the q and k of a trained nano model up to 2,048 tokens
(`python benchmark.py zero-blocks`); and ds is dense anyway.
"""

import triton
import triton.language as tl

from lssar import reference, tiles
from lssar.tiles import COEF, DENSE, INV_M, LN_2, MEAN, NORM_EPS, SCALE, SHIFT, WEIGHT

PROBE = tl.constexpr(16)  # keys that set the pivot of the row sum; the smallest tile of tl.dot
LOWEST = tl.constexpr(-1e30)  # below any score, and finite: its difference to itself is zero
# What the reference calls flat: (4 + largest score) times this, of the maximum.
FLAT = tl.constexpr(reference.FLAT * 2.0**-23)


@triton.jit
def _mean_pass(
    q, row_scale, shift, pivot, total, top, first, position, start, lo, hi, K, KEYS, k_stride,
    FORM: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of f - pivot and maxima of |f| over the keys from `start` to hi, a column of the tile at
    a time: the reduction along a row is left to the caller, and every partial sum is short.

    Of exp, top is the largest score of each column, and f relative to it."""
    for begin in tl.range(start, hi, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        inside = tiles.is_seen(keys, lo, hi - 1) if MASKED else None
        k = tiles.load_rows(K, begin, k_stride, inside, d, BLOCK_N, BLOCK_D)
        inv_k = tiles.load_vector(KEYS, begin, inside, BLOCK_N) if FORM.cosine else None
        s = tiles.scores(q, k, row_scale, inv_k, shift)
        seen = tiles.is_seen(keys[None, :], first, position) if MASKED else None
        if FORM.phi == "exp":
            if MASKED:
                s = tl.where(seen, s, float("-inf"))
            e = tl.exp2(-tl.abs(s - top))
            total = tl.where(s > top, total * e + 1.0, total + e)
            top = tl.maximum(top, s)
        else:
            f, _ = tiles.activate(s, FORM)
            if FORM.spans:  # the first tile in which a row sees something sets its pivot
                least = tl.min(tl.where(seen, f, float("inf")), 1)
                pivot = tl.where(pivot == float("inf"), least, pivot)
            above = f - pivot[:, None]
            if MASKED:
                above = tl.where(seen, above, 0.0)
                f = tl.where(seen, f, 0.0)
            total += above
            top = tl.maximum(top, tl.abs(f) if FORM.signed else f)
    return pivot, total, top


@triton.jit
def _value_pass(
    q, row_scale, shift, mean, inv_m, exponent, unit, l, carry, h, top, acc, guide,
    first, position, start, lo, hi, K, V, KEYS, k_stride, v_stride,
    FORM: tl.constexpr, GUIDED: tl.constexpr, SCALED: tl.constexpr, d: tl.constexpr,
    d_v: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sums over the keys from `start` to hi, in `unit`: l of |w|, acc of w v, h and guide of H, G.

    Without a mean pass, top is the largest score so far of exp, and the sums relative to it; of any
    other activation the largest |w|."""
    for begin in tl.range(start, hi, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        inside = tiles.is_seen(keys, lo, hi - 1) if MASKED else None
        k = tiles.load_rows(K, begin, k_stride, inside, d, BLOCK_N, BLOCK_D)
        inv_k = tiles.load_vector(KEYS, begin, inside, BLOCK_N) if FORM.cosine else None
        s = tiles.scores(q, k, row_scale, inv_k, shift)
        seen = tiles.is_seen(keys[None, :], first, position) if MASKED else None
        if FORM.online:
            if MASKED:
                s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            less = tl.exp2(top - new)
            top = new
            l *= less
            carry *= less
            acc *= less[:, None]
            s -= new[:, None]
        z, _ = tiles.activate(s, FORM)
        if FORM.centred:
            z -= mean[:, None]
        if FORM.sharp:
            z = tl.maximum(z, 0.0)
        if SCALED:
            z *= inv_m[:, None]
        if MASKED:
            z = tl.where(seen, z, 0.0)
        if FORM.sharp:
            r = tiles.power(z, exponent[:, None], FORM.power - 1)
            r *= unit
            z = r * z
        else:
            z *= unit
        if FORM.l1:
            size = tl.abs(z) if FORM.signed else z
            l, carry = tiles.add(l, carry, tl.sum(size, 1))
            if not (FORM.online or FORM.centred):
                top = tl.maximum(top, tl.max(size, 1))
        v = tiles.load_rows(V, begin, v_stride, inside, d_v, BLOCK_N, BLOCK_V)
        acc = tiles.dot(z, v, acc)
        if GUIDED:
            if FORM.sharp:
                h += tl.sum(r, 1)
            else:
                h += tl.sum(tiles.sign(z), 1) * unit
                r = tl.zeros_like(z) + unit
                if MASKED:
                    r = tl.where(seen, r, 0.0)
            guide = tiles.dot(r, v, guide)
    return l, carry, h, top, acc, guide


@triton.jit
def forward_kernel(
    Q, K, V, KEYS, FIRST, OUT, EXACT, GUIDE, STATS,
    q_stride, k_stride, v_stride, out_stride, first_stride,
    heads, repeats, q_length, k_length, plane, length_class,
    scale, bias, unit, p, alpha, train_length,
    FORM: tl.constexpr, SAVE: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head of q; `repeats` of these share a head of k and v."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest start first
    pair = tl.program_id(1)
    shared = pair // repeats
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
    zeros = tl.zeros([BLOCK_M], tl.float32)
    row_scale = zeros + scale
    if FORM.cosine:
        row_scale = scale * tl.log2(count) / tl.maximum(tiles.length(q), NORM_EPS)
    shift = None
    if FORM.biased:
        shift = bias * tl.log2(count) if FORM.log_n else zeros + bias

    # Every row of the block sees all keys before `full`, unless there are spans.
    lo, hi = tiles.key_range(first, position, k_length, first_row, q_length, BLOCK_M)
    full = (k_length - q_length + first_row + 1) // BLOCK_N * BLOCK_N
    begin = lo // BLOCK_N * BLOCK_N if FORM.spans else full  # tiles from here on need a mask
    mean, inv_m = zeros, zeros + 1.0
    SCALED: tl.constexpr = FORM.centred or (Q.dtype.element_ty == tl.float16 and not FORM.online)
    if SCALED:
        # Summing f above the smallest of the first keys keeps every digit of a near-uniform row,
        # and gives identical keys a mean equal to their f.
        pivot = zeros + float("inf")
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        top = total + LOWEST if FORM.phi == "exp" else total
        if not FORM.spans and FORM.phi != "exp":
            probed = tl.arange(0, PROBE) < k_length
            k = tiles.load_rows(K, 0, k_stride, probed, d, PROBE, BLOCK_D)
            inv_k = tiles.load_vector(KEYS, 0, probed, PROBE) if FORM.cosine else None
            f, _ = tiles.activate(tiles.scores(q, k, row_scale, inv_k, shift), FORM)
            f = tl.where(tl.arange(0, PROBE)[None, :] <= position[:, None], f, float("inf"))
            pivot = tl.min(f, 1)
        for masked in tl.static_range(1 if FORM.spans else 0, 2):
            pivot, total, top = _mean_pass(
                q, row_scale, shift, pivot, total, top, first_column, position[:, None],
                begin if masked else 0, lo, hi if masked else full, K, KEYS, k_stride,
                FORM, d, BLOCK_D, BLOCK_N, masked,
            )  # fmt: skip
        if FORM.phi == "exp":
            highest = tl.max(top, 1)
            total = tl.sum(total * tl.exp2(top - highest[:, None]), 1)
            shift = tl.where(highest > LOWEST, -highest, 0.0)
            pivot, top = zeros, zeros + 1.0
        else:
            total, top = tl.sum(total, 1), tl.max(top, 1)
        if FORM.centred:
            mean = tl.where((count > 3) & seeing, pivot + total / count, 0.0)
            saturated = total <= 1.0
        if FORM.recentre:  # of zeros alone, -1/N is left
            mean = tl.where((count > 3) & (top == 0), 1.0, mean)
            top = tl.where(top == 0, 1.0, top)
        if FORM.sharp:
            largest = row_scale * tl.maximum(tiles.length(q), NORM_EPS)  # score, in units of ln 2
            if not FORM.cosine:
                largest *= tiles.load_vector(KEYS, k_length - q_length + first_row, inside, BLOCK_M)
            mean = tl.where(top - mean <= top * FLAT * (4.0 + LN_2 * largest), 0.0, mean)
            top -= mean
        inv_m = tl.where(top > 0, 1.0 / top, 0.0)

    exponent = tiles.adaptive(count, p, alpha, train_length) - 1.0
    SUMMED: tl.constexpr = FORM.centred and Q.dtype.element_ty == tl.float32
    GUIDED: tl.constexpr = SAVE and FORM.centred and not SUMMED
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    l, carry, h, top, guide = zeros, zeros, zeros, zeros + LOWEST, acc
    for masked in tl.static_range(1 if FORM.spans else 0, 2):
        l, carry, h, top, acc, guide = _value_pass(
            q, row_scale, shift, mean, inv_m, exponent, unit, l, carry, h, top, acc, guide,
            first_column, position[:, None], begin if masked else 0, lo, hi if masked else full,
            K, V, KEYS, k_stride, v_stride,
            FORM, GUIDED, SCALED, d, d_v, BLOCK_D, BLOCK_V, BLOCK_N, masked,
        )  # fmt: skip

    out = acc
    inv_l = zeros + 1.0
    if FORM.l1:
        divisor = tl.where(l > 0, l, 1.0)  # a row without weights gives zeros
        out = acc / divisor[:, None]
        inv_l = tl.where(l > 0, unit / divisor, 0.0)
    OUT = tiles.head_of(OUT, out_stride, pair, heads)
    tiles.store_rows(OUT, out, first_row, out_stride, inside, d_v, BLOCK_M, BLOCK_V)
    if SAVE:
        stats = STATS + pair.to(tl.int64) * q_length + rows
        coef = inv_l * inv_m
        tl.store(stats + plane * WEIGHT, inv_l if FORM.sharp else coef, mask=inside)
        if FORM.online:
            shift = tl.where(top > LOWEST, -top, 0.0)
        # The gradient of a weight that is one is zero, and rounding must not say otherwise: times a
        # long key, or over a small l, it would be large.
        if FORM.l1:
            alone = count <= 1
            if FORM.phi == "exp" and FORM.recentre:
                alone = alone | saturated
            elif FORM.phi == "exp" and not SUMMED:
                alone = alone | (l <= unit)
            elif not FORM.centred:
                alone = alone | (l <= top)
            coef = tl.where(alone, 0.0, coef)
        if FORM.centred:
            share = tl.where(count > 3, 1.0 / count, 0.0)
            if FORM.sharp:
                # The mean is zero in the first three rows and in flat ones; these have p = 1.
                exponent = tiles.adaptive(count, p, alpha, train_length)
                coef *= tl.where((mean > 0) | (count <= 3), exponent, 1.0)
                share = tl.where(mean > 0, share, 0.0)
            if GUIDED:
                tl.store(stats + plane * DENSE, share * coef / unit, mask=inside)
            tl.store(stats + plane * MEAN, mean, mask=inside)
        tl.store(stats + plane * SCALE, row_scale, mask=inside)
        if FORM.shifted:
            tl.store(stats + plane * SHIFT, shift, mask=inside)
        tl.store(stats + plane * INV_M, inv_m, mask=inside)
        tl.store(stats + plane * COEF, coef, mask=inside)
        if OUT.dtype.element_ty != tl.float32:
            EXACT = tiles.head_of(EXACT, out_stride, pair, heads)
            tiles.store_rows(EXACT, out, first_row, out_stride, inside, d_v, BLOCK_M, BLOCK_V)
        if GUIDED:
            GUIDE = tiles.head_of(GUIDE, out_stride, pair, heads)
            guide = guide - h[:, None] * out
            tiles.store_rows(GUIDE, guide, first_row, out_stride, inside, d_v, BLOCK_M, BLOCK_V)
