"""What the Triton kernels share: tiles, scores, softplus, powers, norms.

Everything is in units of ln 2: a score arrives multiplied by log2(e) and softplus leaves divided by
ln 2. The weights do not change when a row of softplus values is scaled.
"""

import triton
import triton.language as tl

# Planes of the row statistics that the forward saves; `triton_forward.py` says what they are.
SCALE, MEAN, INV_M, INV_L, COEF, DENSE = (tl.constexpr(i) for i in range(6))
NORM_EPS = tl.constexpr(1e-12)  # F.normalize's
LN_2 = tl.constexpr(0.6931471805599453)
# fp32 tiles as three products of their tf32 halves: full precision, still on tensor cores. Plain
# fp32 unrolls into scalar code that takes minutes to compile and spills.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def scores(q, k, row_scale, inv_k):
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return dots * row_scale[:, None] * inv_k[None, :]


@triton.jit
def softplus(s):
    """log2(1 + 2^s) and 2^-|s|. The polynomial is log2(1 + e)/e on [0, 1] to 3e-8, relative:
    tl.log2 is a long software sequence, and log2 of a rounded 1 + e loses every small e."""
    e = tl.exp2(-tl.abs(s))
    c = 0.007549174163298813
    c = c * e - 0.04256702740847336
    c = c * e + 0.11285613206977503
    c = c * e - 0.19711891285474994
    c = c * e + 0.27564138246992853
    c = c * e - 0.3584084639145884
    c = c * e + 0.48069295610661705
    c = c * e - 0.7213402079462791
    c = c * e + 1.4426949974346832
    return tl.maximum(s, 0.0) + c * e, e


@triton.jit
def sigmoid(s, e):
    """The slope of softplus, from the e it returned."""
    return tl.where(s >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def power(z, exponent, INTEGER: tl.constexpr):
    """z^INTEGER, or z^exponent where INTEGER is negative; always 0 at z = 0, even to the 0."""
    if INTEGER < 0:
        r = tl.where(z > 0, tl.exp2(exponent * tl.log2(tl.maximum(z, 1e-30))), 0.0)
    elif INTEGER == 0:
        r = tl.where(z > 0, 1.0, 0.0)
    else:
        r = z
        square = z
        for bit in tl.static_range(0, 6):
            if (INTEGER >> bit) & 1:
                if INTEGER & ((1 << bit) - 1):  # noqa: SIM108 - decided while compiling
                    r = r * square
                else:
                    r = square
            if INTEGER >> (bit + 1):
                square = square * square
    return r


@triton.jit
def weight_unit(dtype: tl.constexpr):
    """Weights of long rows are subnormal in fp16; this many times as large, none overflows."""
    return 2.0**14 if dtype == tl.float16 else 1.0


@triton.jit
def adaptive(count, p, alpha, train_length):
    """The exponent p_i of a row that sees `count` keys."""
    longer = p * (1.0 + alpha * (tl.sqrt(count / train_length) - 1.0))
    return tl.where(count > train_length, longer, p)


@triton.jit
def add(total, carry, x):
    """One step of Kahan's sum: rows are long, and near-uniform ones live off the last bits."""
    x = x - carry
    new = total + x
    return new, (new - total) - x


@triton.jit
def head_of(X, stride, pair, heads):
    """Where one head of X begins; in 64 bits, as a tensor may have more than 2^31 elements."""
    batch, head = pair // heads, pair % heads
    return X + batch.to(tl.int64) * stride[0] + head.to(tl.int64) * stride[1]


@triton.jit
def tile(X, start, stride, length, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK, BLOCK_D] to the rows of one head from `start`, and which of them exist."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    base = X + tl.cast(start, tl.int64) * stride[2]
    pointers = base + (rows[:, None] * stride[2] + columns[None, :])
    return pointers, (start + rows < length)[:, None] & (columns < d)[None, :]


@triton.jit
def load_rows(
    X, start, stride, length, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr = True,
):  # fmt: skip
    """That tile, zeros where nothing exists; without MASKED every row does."""
    pointers, mask = tile(X, start, stride, length, d, BLOCK, BLOCK_D)
    if MASKED:
        x = tl.load(pointers, mask=mask, other=0.0)
    elif d < BLOCK_D:
        x = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < d)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_vector(X, start, length, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    """X[start : start + BLOCK], zeros past `length`."""
    places = start + tl.arange(0, BLOCK)
    if MASKED:  # noqa: SIM108 - decided while compiling
        x = tl.load(X + places, mask=places < length, other=0.0)
    else:
        x = tl.load(X + places)
    return x


@triton.jit
def store_rows(
    X, x, start, stride, length, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the rows of a tile that exist, in the type of X."""
    pointers, mask = tile(X, start, stride, length, d, BLOCK, BLOCK_D)
    tl.store(pointers, narrow(x, X.dtype.element_ty), mask=mask)


@triton.jit
def dot(x, y, total):
    """total + x y of an fp32 tile x. A 16-bit y takes x in two parts of its type: rounded once,
    sums that nearly cancel (D and dOut . v, the gradients of keys alike) would keep no digit."""
    if y.dtype == tl.float32:
        total = tl.dot(x, y, total, input_precision=PRECISION)
    else:
        top = narrow(x, y.dtype)
        total = tl.dot(top, y, total)
        total = tl.dot(narrow(x - top.to(tl.float32), y.dtype), y, total)
    return total


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast to the type of a tensor; fp16 saturates: infinity (times zero) cannot appear."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def length(x):
    """|x_i| of every row."""
    x = x.to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def through_norm(x, grad):
    """The gradient to x of x / max(|x|, eps) . y, from `grad`: the one with the norm held fixed."""
    norm = length(x)
    x = x.to(tl.float32)
    unit = x / tl.maximum(norm, NORM_EPS)[:, None]
    radial = tl.where(norm > NORM_EPS, tl.sum(unit * grad, 1), 0.0)
    return grad - unit * radial[:, None]
