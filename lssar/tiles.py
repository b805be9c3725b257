"""What the Triton kernels share: tiles, scores, activations, powers, norms.

exp, sigmoid and softplus are in units of ln 2: a score arrives multiplied by log2(e) and softplus
leaves divided by ln 2. Rows that are normalised do not change when they are scaled.
"""

import triton
import triton.language as tl

# Planes of the row statistics that the forward saves; `triton_forward.py` says what they are.
SCALE, SHIFT, MEAN, INV_M, WEIGHT, COEF, DENSE = (tl.constexpr(i) for i in range(7))
NORM_EPS = tl.constexpr(1e-12)  # F.normalize's
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_EXPONENT = tl.constexpr(-126.0)  # of a normal float32
NEVER = tl.constexpr(2**30)  # the first key of a row that sees nothing
# fp32 tiles as three products of their tf32 halves: full precision, still on tensor cores. Plain
# fp32 unrolls into scalar code that takes minutes to compile and spills.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def scores(q, k, scale, inv_k, shift):
    """[rows, keys]; inv_k and shift may be None."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale[:, None]
    if inv_k is not None:
        s = s * inv_k[None, :]
    if shift is not None:
        s = s + shift[:, None]
    return s


# --- activations ---------------------------------------------------------------------------------


@triton.jit
def exp2_of_negative(x, FORM: tl.constexpr):
    """Return 2^x of x <= 0, zero below float32's normal numbers, as every backend has it.

    Scores of cosines are never that small.
    """
    y = tl.exp2(x)
    if not FORM.cosine:
        y = tl.where(x < SMALLEST_EXPONENT, 0.0, y)
    return y


@triton.jit
def activate(t, FORM: tl.constexpr):
    """Return phi(t) and its slope; whichever is not used costs nothing once compiled."""
    PHI: tl.constexpr = FORM.phi
    if PHI == "exp":
        f = tl.exp2(t)
        slope = f * LN_2
    elif PHI == "sigmoid":
        e = exp2_of_negative(-tl.abs(t), FORM)
        y = 1.0 / (1.0 + e)
        f = tl.where(t < 0, e * y, y)
        slope = e * y * y * LN_2
    elif PHI == "softplus":
        # The polynomial is log2(1 + e)/e on [0, 1] to 3e-8, relative: tl.log2 is a long software
        # sequence, and log2 of a rounded 1 + e loses every small e.
        e = exp2_of_negative(-tl.abs(t), FORM)
        c = 0.007549174163298813
        c = c * e - 0.04256702740847336
        c = c * e + 0.11285613206977503
        c = c * e - 0.19711891285474994
        c = c * e + 0.27564138246992853
        c = c * e - 0.3584084639145884
        c = c * e + 0.48069295610661705
        c = c * e - 0.7213402079462791
        c = c * e + 1.4426949974346832
        f = tl.maximum(t, 0.0) + c * e
        slope = tl.where(t >= 0, 1.0, e) / (1.0 + e)
    elif PHI == "relu":
        f = tl.maximum(t, 0.0)
        slope = tl.where(t > 0, 1.0, 0.0)
    elif PHI == "relu2":
        y = tl.maximum(t, 0.0)
        f = y * y
        slope = y + y
    elif PHI == "relu6":
        f = tl.minimum(tl.maximum(t, 0.0), 6.0)
        slope = tl.where((t > 0) & (t < 6.0), 1.0, 0.0)
    elif PHI == "gelu":
        y = 0.5 + 0.5 * tl.erf(t * 0.7071067811865476)
        f = t * y
        slope = y + t * tl.exp2(t * t * (-0.5 * LOG2_E)) * 0.3989422804014327
    elif PHI == "mish":  # with w = e^t, tanh(softplus(t)) = (w^2 + 2 w) / (w^2 + 2 w + 2)
        e = exp2_of_negative(-tl.abs(t) * LOG2_E, FORM)
        up = tl.where(t < 0, e * e + e + e, 1.0 + e + e)
        rest = tl.where(t < 0, 2.0, e * e + e * e)
        tanh = up / (up + rest)
        f = t * tanh
        sigmoid = tl.where(t < 0, e, 1.0) / (1.0 + e)
        slope = tanh + t * (rest / (up + rest)) * (1.0 + tanh) * sigmoid
    else:
        tl.static_assert(PHI == "identity", "activate() has no case for this phi")
        f = t
        slope = tl.full(t.shape, 1.0, tl.float32)
    return f, slope


@triton.jit
def slope_bound(top, PHI: tl.constexpr):
    """No slope of a row is much larger, `top` being the largest |phi|."""
    if PHI == "relu2":
        bound = 2.0 * tl.sqrt(top)
    elif PHI == "exp" or PHI == "sigmoid" or PHI == "softplus":
        bound = tl.minimum(top, 1.0)
    else:
        bound = tl.full(top.shape, 1.0, tl.float32)
    return bound


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


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
                r = r * square if INTEGER & ((1 << bit) - 1) else square
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


# --- spans ---------------------------------------------------------------------------------------


@triton.jit
def first_keys(FIRST, start, q_length, BLOCK: tl.constexpr):
    """The first key that each row from `start` on sees."""
    rows = start + tl.arange(0, BLOCK)
    return tl.load(FIRST + rows, mask=rows < q_length, other=NEVER)


@triton.jit
def count_of(first, position):
    """N_i of the rows, 1 where a row sees nothing; `first` None: all keys up to its own."""
    count = position + 1 if first is None else tl.maximum(position + 1 - first, 1)
    return count.to(tl.float32)


@triton.jit
def is_seen(key, first, position):
    """Which keys which rows see; `first` None: all up to their own."""
    seen = key <= position
    if first is not None:
        seen = seen & (key >= first)
    return seen


@triton.jit
def key_range(first, position, k_length, first_row, q_length, BLOCK_M: tl.constexpr):
    """lo, hi: no row of the block sees a key before the one or from the other on."""
    past = k_length - q_length
    lo = past * 0
    hi = tl.minimum(k_length, past + first_row + BLOCK_M)
    if first is not None:
        lo = tl.min(tl.where(first <= position, first, NEVER), 0)
        hi = tl.minimum(hi, tl.max(tl.where(first <= position, position, -1), 0) + 1)
    return lo, hi


# --- tiles ---------------------------------------------------------------------------------------


@triton.jit
def head_of(X, stride, pair, heads):
    """Where one head of X begins; in 64 bits, as a tensor may have more than 2^31 elements."""
    batch, head = pair // heads, pair % heads
    return X + batch.to(tl.int64) * stride[0] + head.to(tl.int64) * stride[1]


@triton.jit
def tile(X, start, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK, BLOCK_D] to the rows of one head from `start`."""
    base = X + tl.cast(start, tl.int64) * stride[2]
    return base + (tl.arange(0, BLOCK)[:, None] * stride[2] + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def load_rows(
    X, start, stride, inside, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """That tile, zeros in the rows that are not `inside`; None: they all are."""
    pointers = tile(X, start, stride, BLOCK, BLOCK_D)
    if inside is not None:
        mask = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
        x = tl.load(pointers, mask=mask, other=0.0)
    elif d < BLOCK_D:
        x = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < d)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_vector(X, start, inside, BLOCK: tl.constexpr):
    """X[start : start + BLOCK], zeros where not `inside`; None: everywhere."""
    places = X + start + tl.arange(0, BLOCK)
    return tl.load(places) if inside is None else tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_rows(
    X, x, start, stride, inside, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write the rows of a tile that are `inside`, in the type of X."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
    pointers = tile(X, start, stride, BLOCK, BLOCK_D)
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
