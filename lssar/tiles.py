"""Holds what the Triton kernels share: tiles, scores, activations, powers, norms.

exp, sigmoid and softplus are in units of ln 2: a score arrives multiplied by log2(e) and softplus
leaves divided by ln 2. Rows that are normalised do not change when they are scaled.
"""

import triton
import triton.language as tl

# Planes of the row statistics that the forward saves; `triton_forward.py` says what they are.
SCALE = tl.constexpr(0)
SHIFT = tl.constexpr(1)
FACTOR = tl.constexpr(2)
OFFSET = tl.constexpr(3)
COEF = tl.constexpr(4)
SHARE = tl.constexpr(5)
WEIGHT = tl.constexpr(6)

NORM_EPS = tl.constexpr(1e-12)  # F.normalize's
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST_EXPONENT = tl.constexpr(-126.0)  # of a normal float32
NEVER = tl.constexpr(2**30)  # the first key of a row that sees nothing
# fp32 tiles as three products of their tf32 halves: full precision, still on tensor cores. Plain
# fp32 unrolls into scalar code that takes minutes to compile and spills.
PRECISION = tl.constexpr("tf32x3")
# What is left of the output when it is rounded is kept as many times as large, in the same type.
REST_SCALE = tl.constexpr(2048.0)


@triton.jit
def dot(x, y, total=None):
    """Return total + x y from tensor cores: x is rounded to the type of y, sums are fp32."""
    return tl.dot(narrow(x, y.dtype), y, total, input_precision=PRECISION)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast to the type of a tensor; fp16 saturates: infinity (times zero) cannot appear."""
    if dtype == tl.float16 and x.dtype == tl.float32:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def scores(products, row_scale, inv_k, shift):
    """Turn q.k into scores; inv_k and shift may be None. All broadcast against the tile."""
    s = products * row_scale
    if inv_k is not None:
        s = s * inv_k
    if shift is not None:
        s = s + shift
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
def log2_of_1_plus(e, dtype: tl.constexpr):
    """Return log2(1 + e) for e in [0, 1]: e times a polynomial keeps every digit of small e.

    The relative error is 4e-4 for bf16 input, 8e-6 for fp16 and 3e-8 for fp32: a tenth of what the
    type itself loses, or less. tl.log2 would be a long software sequence.
    """
    if dtype == tl.bfloat16:
        c = -0.10725444555282593 * e + 0.36648067831993103
        c = c * e - 0.7017472982406616
        c = c * e + 1.44212806224823
    elif dtype == tl.float16:
        c = -0.03443591296672821 * e + 0.14603291451931
        c = c * e - 0.30303624272346497
        c = c * e + 0.4691740870475769
        c = c * e - 0.7204261422157288
        c = c * e + 1.4426828622817993
    else:
        c = 0.007549174163298813 * e - 0.04256702740847336
        c = c * e + 0.11285613206977503
        c = c * e - 0.19711891285474994
        c = c * e + 0.27564138246992853
        c = c * e - 0.3584084639145884
        c = c * e + 0.48069295610661705
        c = c * e - 0.7213402079462791
        c = c * e + 1.4426949974346832
    return c * e


@triton.jit
def activate(t, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return phi(t) and its slope; whichever is not used costs nothing once compiled.

    The slope of exp and sigmoid is over ln 2, which COEF makes up for. `dtype` is the type of the
    input, which says how exact a softplus must be.
    """
    PHI: tl.constexpr = FORM.phi
    if PHI == "exp":
        f = tl.exp2(t)
        slope = f
    elif PHI == "sigmoid":
        e = exp2_of_negative(-tl.abs(t), FORM)
        y = 1.0 / (1.0 + e)
        f = tl.where(t < 0, e * y, y)
        slope = e * y * y
    elif PHI == "softplus":
        # The slope 2^t / (1 + 2^t) is 2^(t - f), without cancellation on either side.
        e = exp2_of_negative(-tl.abs(t), FORM)
        f = tl.maximum(t, 0.0) + log2_of_1_plus(e, dtype)
        slope = tl.where(t >= 0, 1.0, e) / (1.0 + e) if dtype == tl.float32 else tl.exp2(t - f)
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
def slope_bound(top, FORM: tl.constexpr):
    """Return a bound that no slope of a row exceeds by much; `top` bounds its |phi|."""
    bound = tl.zeros_like(top) + 1.0
    if FORM.phi == "relu2":
        bound = 2.0 * tl.sqrt(top)
    elif FORM.phi == "softplus" or FORM.phi == "sigmoid":
        bound = tl.minimum(top, 1.0)
    return tl.maximum(bound, 1e-30)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def power(z, exponent, INTEGER: tl.constexpr):
    """Return z^INTEGER, or z^exponent where INTEGER is negative; 0 at z = 0, even to the 0."""
    if INTEGER < 0:
        r = tl.where(z > 0, tl.exp2(exponent * tl.log2(tl.maximum(z, 1e-30))), 0.0)
    elif INTEGER == 0:
        r = tl.where(z > 0, 1.0, 0.0)
    else:
        THIRDS: tl.constexpr = INTEGER % 3 == 0  # z^15 is (z^3)^5: one product less
        REST: tl.constexpr = INTEGER // 3 if THIRDS else INTEGER
        square = z * z * z if THIRDS else z
        r = square
        for bit in tl.static_range(0, 6):
            if (REST >> bit) & 1:
                r = r * square if REST & ((1 << bit) - 1) else square
            if REST >> (bit + 1):
                square = square * square
    return r


@triton.jit
def root(x, exponent):
    """Return x^(1/exponent) of one number per row, for x > 0; else zero."""
    return tl.where(x > 0, tl.exp2(tl.log2(tl.maximum(x, 1e-37)) / exponent), 0.0)


@triton.jit
def adaptive(count, p, alpha, train_length):
    """Return the exponent p_i of a row that sees `count` keys."""
    longer = p * (1.0 + alpha * (tl.sqrt(count / train_length) - 1.0))
    return tl.where(count > train_length, longer, p)


@triton.jit
def add(total, carry, x):
    """Take a step of Kahan's sum: rows are long, and near-uniform ones live off the last bits."""
    x = x - carry
    new = total + x
    return new, (new - total) - x


@triton.jit
def weights(f, factor, offset, exponent, seen, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return z = factor f - offset of the activations, and r = z^(p-1) if sharpened, else z.

    With fp32 input z is factor (f - offset). What is not `seen` is zero; None: everything is.
    """
    if FORM.online and FORM.phi == "exp" and dtype != tl.float32:
        z = f  # the shift of the scores has made it a weight already
    elif not FORM.centred:
        z = f * factor
    elif dtype == tl.float32:
        z = (f - offset) * factor
    else:
        z = f * factor - offset
    if FORM.sharp:
        z = tl.maximum(z, 0.0)
    if seen is not None:
        z = tl.where(seen, z, 0.0)
    r = power(z, exponent, FORM.power - 1) if FORM.sharp else z
    return z, r


# --- which keys a row sees -----------------------------------------------------------------------


@triton.jit
def first_keys(FIRST, start, q_length, BLOCK: tl.constexpr):
    """Return the first key that each row from `start` on sees."""
    rows = start + tl.arange(0, BLOCK)
    return tl.load(FIRST + rows, mask=rows < q_length, other=NEVER)


@triton.jit
def count_of(first, position):
    """Return N_i of the rows, 1 where one sees nothing; `first` None: all keys up to its own."""
    count = position + 1 if first is None else tl.maximum(position + 1 - first, 1)
    return count.to(tl.float32)


@triton.jit
def is_seen(key, first, position):
    """Return which keys each row sees; `first` None: all up to their own."""
    seen = key <= position
    if first is not None:
        seen = seen & (key >= first)
    return seen


@triton.jit
def key_range(first, position, inside, k_length):
    """Return lo, full_lo, full_hi, hi: rows see keys of lo .. hi, and all of full_lo .. full_hi."""
    last = tl.max(tl.where(inside, position, 0), 0)
    hi = tl.minimum(k_length, last + 1)
    full_hi = tl.min(position, 0) + 1
    lo = full_hi * 0
    full_lo = lo
    if first is not None:
        sees = first <= position
        lo = tl.min(tl.where(sees, first, NEVER), 0)
        hi = tl.minimum(hi, tl.max(tl.where(sees, position, -1), 0) + 1)
        full_lo = tl.max(tl.where(inside, first, 0), 0)  # too far if a row sees nothing
    return lo, full_lo, full_hi, hi


@triton.jit
def split(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Split lo .. hi into `whole` tiles from `full` on, which need no mask, and `border` tiles.

    `before` of the border's tiles come before the whole ones.
    """
    lo = lo // BLOCK * BLOCK
    full = tl.cdiv(full_lo, BLOCK) * BLOCK
    whole = tl.maximum(full_hi // BLOCK - full // BLOCK, 0)
    border = tl.maximum(tl.cdiv(hi - lo, BLOCK) - whole, 0)
    before = tl.where(whole > 0, (full - lo) // BLOCK, 0)
    return lo, full, whole, border, before


@triton.jit
def place(i, lo, full, whole, before, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the i-th tile of the border, or of the whole ones, begins."""
    jump = tl.where(i >= before, whole, 0)
    return lo + (i + jump) * BLOCK if MASKED else full + i * BLOCK


# --- tiles ---------------------------------------------------------------------------------------


@triton.jit
def afresh(x):
    """Return places in a way that the compiler does not see through.

    What is computed from them after a loop is not kept in registers during the loop.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def head_of(X, stride, pair, heads):
    """Return where one head of X begins; in 64 bits, as X may have more than 2^31 elements."""
    batch, head = pair // heads, pair % heads
    return X + batch.to(tl.int64) * stride[0] + head.to(tl.int64) * stride[1]


@triton.jit
def tile(X, start, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers [BLOCK, BLOCK_D] to the rows of one head from `start`."""
    base = X + tl.cast(start, tl.int64) * stride[2]
    return base + (tl.arange(0, BLOCK)[:, None] * stride[2] + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def tile_afresh(X, start, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the pointers of `tile`, computed afresh after a loop."""
    base = X + tl.cast(start, tl.int64) * stride[2]
    rows = afresh(tl.arange(0, BLOCK))
    return base + (rows[:, None] * stride[2] + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def load_rows(
    X, start, stride, inside, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tile, with zeros in the rows that are not `inside`; None: all are."""
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
def load_again(
    X, start, stride, inside, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tile a second time, after a loop: kept in registers it would crowd out the loop."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
    return tl.load(tile_afresh(X, start, stride, BLOCK, BLOCK_D), mask=mask, other=0.0)


@triton.jit
def load_vector(X, start, inside, BLOCK: tl.constexpr):
    """Load X[start : start + BLOCK], with zeros where not `inside`; None: everywhere."""
    places = X + start + tl.arange(0, BLOCK)
    return tl.load(places) if inside is None else tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_rows(
    X, x, start, stride, inside, d: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write the rows of a tile that are `inside`, in the type of X."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
    pointers = tile_afresh(X, start, stride, BLOCK, BLOCK_D)
    tl.store(pointers, narrow(x, X.dtype.element_ty), mask=mask)


@triton.jit
def length(x):
    """Return |x_i| of every row."""
    x = x.to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def through_norm(x, grad):
    """Return the gradient to x of x / max(|x|, eps) . y; `grad` is that with the norm fixed."""
    norm = length(x)
    x = x.to(tl.float32)
    inv_norm = 1.0 / tl.maximum(norm, NORM_EPS)
    radial = tl.where(norm > NORM_EPS, tl.sum(x * grad, 1) * inv_norm * inv_norm, 0.0)
    return grad - x * radial[:, None]
