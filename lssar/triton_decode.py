"""Computes attention of a few rows over many keys in Triton, without gradients.

The keys are split, so that one sequence fills a GPU. Names and passes are those of
`triton_forward.py`.

The sum of f, its largest, and all sums over values are sums of what parts of the keys give:

    sums_kernel     of each part: sum of f, largest f (of exp: score, and the sum relative to it),
                    and the longest key; only for rows with a mean
    values_kernel   the mean and size of the row, from all parts of the above; of each part: sum of
                    the weights, what it is relative to, and the weighted values
    combine_kernel  the output, from all parts

Rows of all heads of q that share a head of k and v are one tile: row r is query r % q_length of
head r // q_length of the group. `place` is where the first of these keys stands among `total_keys`,
which may be spread over ranks.
"""

import triton
import triton.language as tl

from lssar import tiles
from lssar.tiles import NORM_EPS
from lssar.triton_forward import LOWEST, add_to_mean, add_values, mean_and_size, scale_of_rows

GROWS = ("k_length", "place", "total_keys", "chunk", "rows", "parts", "first_stride")


@triton.jit
def group_rows(X, stride, shared, heads, repeats, q_length, BLOCK_M: tl.constexpr):
    """Return where each row of a group begins, [BLOCK_M]."""
    r = tl.arange(0, BLOCK_M)
    groups = heads // repeats
    head = (shared % groups) * repeats + r // q_length
    base = X + (shared // groups).to(tl.int64) * stride[0]
    return base + head.to(tl.int64) * stride[1] + (r % q_length).to(tl.int64) * stride[2]


@triton.jit
def load_key_tile(
    K, begin, end, k_stride, first, position, place,
    FORM: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return k, 1/|k| on the cosine (else |k|), which keys exist and which rows see them."""
    keys = begin + tl.arange(0, BLOCK_N)
    visible = tl.max(position, 0) - place
    some = (keys < end) & (keys <= visible)
    if first is not None:
        some = some & (keys >= tl.min(first, 0) - place)
    k = tiles.load_rows(K, begin, k_stride, some, d, BLOCK_N, BLOCK_D)
    size = tiles.length(k)
    if FORM.cosine:
        size = 1.0 / tl.maximum(size, NORM_EPS)
    first_column = None if first is None else first[:, None]
    seen = tiles.is_seen((place + keys)[None, :], first_column, position[:, None])
    return k, size, some, seen & (keys < end)[None, :]


@triton.jit(do_not_specialize=GROWS)
def sums_kernel(
    Q, K, FIRST, SUMS, q_stride, k_stride, first_stride,
    heads, repeats, q_length, k_length, place, total_keys, chunk, rows, scale, bias,
    FORM: tl.constexpr, d: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part, shared = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, BLOCK_M)
    inside = r < repeats * q_length
    position = total_keys - q_length + r % q_length
    first = None
    if FORM.spans:
        FIRST += (shared // (heads // repeats)).to(tl.int64) * first_stride
        first = tl.load(FIRST + r % q_length)
    q_rows = group_rows(Q, q_stride, shared, heads, repeats, q_length, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    seeing = inside if first is None else inside & (first <= position)
    q = tl.load(q_rows[:, None] + column, mask=seeing[:, None] & (column < d), other=0.0)
    count = tiles.count_of(first, position)
    row_scale = scale_of_rows(tl.maximum(tiles.length(q), NORM_EPS), count, scale, FORM)
    shift_column = None
    if FORM.biased:
        shift_column = (bias * tl.log2(count) if FORM.log_n else row_scale * 0.0 + bias)[:, None]
    K = tiles.head_of(K, k_stride, shared, heads // repeats)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    total, carry, top = zeros, zeros, zeros + (LOWEST if FORM.phi == "exp" else 0.0)
    longest = zeros
    start = part * chunk
    end = tl.minimum(start + chunk, k_length)
    for begin in tl.range(start, end, BLOCK_N):
        k, size, _, seen = load_key_tile(
            K, begin, end, k_stride, first, position, place, FORM, d, BLOCK_D, BLOCK_N
        )
        inv_k = size[None, :] if FORM.cosine else None
        s = tiles.scores(tiles.dot(q, tl.trans(k)), row_scale[:, None], inv_k, shift_column)
        total, carry, top = add_to_mean(s, seen, total, carry, top, FORM, Q.dtype.element_ty)
        if not FORM.cosine:
            longest = tl.maximum(longest, tl.max(tl.where(seen, size[None, :], 0.0), 1))
    sums = SUMS + part.to(tl.int64) * rows + shared * repeats * q_length + r
    plane = tl.num_programs(0).to(tl.int64) * rows
    tl.store(sums, total, mask=inside)
    tl.store(sums + plane, top, mask=inside)
    tl.store(sums + 2 * plane, longest, mask=inside)


@triton.jit(do_not_specialize=GROWS)
def values_kernel(
    Q, K, V, FIRST, SUMS, VALUES, SIZES, q_stride, k_stride, v_stride, first_stride,
    heads, repeats, q_length, k_length, place, total_keys, chunk, rows, parts,
    scale, bias, unit, p, alpha, train_length,
    FORM: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the weights and the weighted values of one part of the keys.

    `parts` is the number of parts in SUMS, which may come from other ranks too.
    """
    part, shared = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = Q.dtype.element_ty
    r = tl.arange(0, BLOCK_M)
    inside = r < repeats * q_length
    position = total_keys - q_length + r % q_length
    first = None
    if FORM.spans:
        FIRST += (shared // (heads // repeats)).to(tl.int64) * first_stride
        first = tl.load(FIRST + r % q_length)
    q_rows = group_rows(Q, q_stride, shared, heads, repeats, q_length, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    seeing = inside if first is None else inside & (first <= position)
    q = tl.load(q_rows[:, None] + column, mask=seeing[:, None] & (column < d), other=0.0)
    count = tiles.count_of(first, position)
    length = tl.maximum(tiles.length(q), NORM_EPS)
    row_scale = scale_of_rows(length, count, scale, FORM)
    shift_column = None
    if FORM.biased:
        shift_column = (bias * tl.log2(count) if FORM.log_n else row_scale * 0.0 + bias)[:, None]
    exponent = tiles.adaptive(count, p, alpha, train_length)

    zeros = tl.zeros([BLOCK_M], tl.float32)
    row = shared * repeats * q_length + r
    factor, offset = zeros + 1.0, zeros
    if FORM.centred:
        total, top, longest = zeros, zeros + (LOWEST if FORM.phi == "exp" else 0.0), zeros
        for other in tl.range(0, parts):
            sums = SUMS + tl.cast(other, tl.int64) * rows + row
            plane = parts.to(tl.int64) * rows
            part_top = tl.load(sums + plane, mask=inside, other=0.0)
            part_total = tl.load(sums, mask=inside, other=0.0)
            new = tl.maximum(top, part_top)
            if FORM.phi == "exp":
                total = total * tl.exp2(top - new) + part_total * tl.exp2(part_top - new)
            else:
                total += part_total
            top = new
            longest = tl.maximum(longest, tl.load(sums + 2 * plane, mask=inside, other=0.0))
        if FORM.phi == "exp":
            shift_column = tl.where(top > LOWEST, -top, 0.0)[:, None]
            top = zeros + 1.0
        largest = row_scale * length
        if not FORM.cosine:
            largest *= longest
        mean, size = mean_and_size(total, top, count, largest, seeing, FORM)
        factor = tl.where(size > 0, 1.0 / size, 0.0)
        if FORM.sharp and dtype != tl.float32:
            factor *= tiles.root(zeros + unit, exponent)
        elif not FORM.sharp:
            factor *= unit
        offset = mean if dtype == tl.float32 else mean * factor
    elif FORM.l1 and not FORM.online:
        factor *= unit

    K = tiles.head_of(K, k_stride, shared, heads // repeats)
    V = tiles.head_of(V, v_stride, shared, heads // repeats)
    l, carry = zeros, zeros
    top = zeros + (LOWEST if FORM.online and FORM.phi == "exp" else 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    start = part * chunk
    end = tl.minimum(start + chunk, k_length)
    for begin in tl.range(start, end, BLOCK_N):
        k, norm, some, seen = load_key_tile(
            K, begin, end, k_stride, first, position, place, FORM, d, BLOCK_D, BLOCK_N
        )
        inv_k = norm[None, :] if FORM.cosine else None
        s = tiles.scores(tiles.dot(q, tl.trans(k)), row_scale[:, None], inv_k, shift_column)
        v = tiles.load_rows(V, begin, v_stride, some, d_v, BLOCK_N, BLOCK_V)
        l, carry, top, acc = add_values(
            s, v, seen, factor[:, None], offset[:, None], exponent[:, None], unit, None,
            l, carry, top, acc, FORM, dtype,
        )  # fmt: skip
    sizes = SIZES + part.to(tl.int64) * rows + row
    tl.store(sizes, l, mask=inside)
    tl.store(sizes + tl.num_programs(0).to(tl.int64) * rows, top, mask=inside)
    values = VALUES + (part.to(tl.int64) * rows + row)[:, None] * d_v
    column = tl.arange(0, BLOCK_V)
    tl.store(values + column, acc, mask=inside[:, None] & (column < d_v))


@triton.jit(do_not_specialize=("rows", "parts"))
def combine_kernel(
    VALUES, SIZES, OUT, out_stride, heads, q_length, rows, parts,
    FORM: tl.constexpr, d_v: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the output of one row, from all parts of its keys."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    l = 0.0
    top = LOWEST if FORM.phi == "exp" else 0.0
    plane = parts.to(tl.int64) * rows
    for part in tl.range(0, parts):
        place = tl.cast(part, tl.int64) * rows + row
        values = tl.load(VALUES + place * d_v + column, mask=column < d_v, other=0.0)
        size = tl.load(SIZES + place)
        if FORM.online:
            part_top = tl.load(SIZES + plane + place)
            new = tl.maximum(top, part_top)
            if FORM.phi == "exp":
                less, share = tl.exp2(top - new), tl.exp2(part_top - new)
            else:
                less = tl.where(new > 0, top / new, 0.0)
                share = tl.where(new > 0, part_top / new, 0.0)
            top = new
            acc = acc * less + values * share
            l = l * less + size * share
        else:
            acc += values
            l += size
    if FORM.l1:
        acc *= tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)
    pair, query = row // q_length, row % q_length
    out = tiles.head_of(OUT, out_stride, pair, heads) + query.to(tl.int64) * out_stride[2]
    tl.store(out + column, tiles.narrow(acc, OUT.dtype.element_ty), mask=column < d_v)
