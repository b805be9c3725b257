"""Where floating point breaks the paper's literal x**p, and the safe form does not."""

import math

import pytest
import torch
from cases import cases
from loops import weights_of_batch

from lssar import cpu
from lssar.backends import attend
from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism
from lssar.reference import attention_weights, sharpen

SHARPENED = tuple(n for n, m in MECHANISMS.items() if m.sharpened)
NORMALISED = (*SHARPENED, "softmax", "ssmax", "lssa", "sigmoid-logn-l1", "softplus-l1")
LONG = 16384


def out_and_grads(q, k, v, mechanism, backend="auto"):
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v, mechanism, backend=backend)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator).to(out.dtype)
    return out, torch.autograd.grad(out, (q, k, v), cotangent)


def assert_finite(out, grads):
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


def peaked(length, rows, d=64):
    """Return the sharpest row in float32: one key along each query, all others against it."""
    q = torch.randn(1, 2, 1, d).expand(1, 2, rows, d).contiguous()
    k = -q[:, :, :1].expand(1, 2, length, d) + 1e-3 * torch.randn(1, 2, length, d)
    k[:, :, length // 3] = q[:, :, 0]
    return 4 * q, 4 * k, torch.randn(1, 2, length, d)


def test_peaked_rows_at_16k_are_exact_and_finite():
    for p, name in cases([1, 3, 15, 30], SHARPENED):
        q, k, v = peaked(LONG, rows=2)
        m = get_mechanism(name, p=p)
        weights = attention_weights(q, k, m)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 2))
        assert (weights[..., LONG // 3] > 0.999).all() or p == 1
        exact = attention_weights(q.double(), k.double(), m)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-3, atol=1e-5)
        assert_finite(*out_and_grads(q, k, v, m))


def test_normalised_rows_at_16k_stay_normalised():
    for name in cases([n for n in NORMALISED if n not in SHARPENED]):
        q, k, v = peaked(LONG, rows=2)
        torch.testing.assert_close(attention_weights(q, k, name).sum(-1), torch.ones(1, 2, 2))
        assert_finite(*out_and_grads(q, k, v, name))


def test_no_scale_of_input_makes_a_row_infinite():
    for name, dtype, scale in cases(
        NORMALISED, [torch.float32, torch.bfloat16, torch.float16], [1e-6, 1.0, 1e3]
    ):
        q, k, v = (torch.randn(1, 2, 33, 20) for _ in range(3))
        q, k = (q * scale).to(dtype), (k * min(scale, 10.0)).to(dtype)
        m = get_mechanism(name, p=30) if name in SHARPENED else name
        out, grads = out_and_grads(q, k, v.to(dtype), m, backend="eager")
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert all(g.dtype == dtype for g in grads)
        # A gradient by q of a cosine grows as 1 / |q|: infinity is honest beyond float16's 65504.
        if not (dtype == torch.float16 and scale < 1):
            assert all(g.isfinite().all() for g in grads)


def test_the_mean_of_finite_values_is_finite():
    for backend, name in cases(["eager", "rowblock"], NORMALISED):
        q, k = torch.randn(2, 1, 2, 300, 20).unbind()
        v = 3e38 * (2 * torch.rand(1, 2, 300, 20) - 1)
        assert attend(q, k, v, name, backend=backend).isfinite().all()


def test_half_precision_inputs_are_computed_in_float32():
    for name, dtype in cases(tuple(MECHANISMS), [torch.bfloat16, torch.float16]):
        q, k, v = (torch.randn(1, 2, 40, 20).to(dtype) for _ in range(3))
        weights = attention_weights(q, k, name)
        assert weights.dtype == torch.float32
        exact = attention_weights(q.double(), k.double(), name)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-3, atol=2e-5)
        out = attend(q, k, v, name, backend="eager")
        torch.testing.assert_close(out, (weights @ v.float()).to(dtype))


def test_near_uniform_rows_equal_the_reference_in_float64():
    """The naive power underflows here in float32, and loses digits in no other way in float64."""
    for noise, name in cases([1e-2, 1e-4, 1e-6], SHARPENED):
        q = torch.randn(1, 1, 5, 20, dtype=torch.float64)
        key = torch.randn(1, 1, 1, 20, dtype=torch.float64)
        k = key + noise * torch.randn(1, 1, 64, 20, dtype=torch.float64)
        got = attention_weights(q, k, name)
        expected = weights_of_batch(name, q, k)
        tolerance = 15 * 1e-14 / noise  # what rounding the stage-one weights alone can do
        torch.testing.assert_close(got, expected, rtol=100 * tolerance, atol=tolerance)


def test_near_uniform_rows_are_finite_probabilities_in_float32():
    for noise, name in cases([1e-2, 1e-4, 1e-6, 1e-7, 1e-8], SHARPENED):
        q, v = torch.randn(1, 2, 9, 64), torch.randn(1, 2, 300, 64)
        k = torch.randn(1, 2, 1, 64) + noise * torch.randn(1, 2, 300, 64)
        torch.testing.assert_close(attention_weights(q, k, name).sum(-1), torch.ones(1, 2, 9))
        assert_finite(*out_and_grads(q, k, v, name))


def test_identical_keys_fall_back_to_the_stage_one_row():
    """Nothing is above the mean, so every x is 0 and the paper's l1 divides 0 by 0."""
    for name, length, sign in cases(SHARPENED, [4, 5, 37, 1000, LONG], [1.0, -1.0, 0.0]):
        rows = min(length, 3)
        key = torch.randn(1, 2, 1, 64)
        k = key.expand(1, 2, length, 64).contiguous()
        q = sign * key.expand(1, 2, rows, 64) + 0.1 * torch.randn(1, 2, rows, 64)
        v = torch.randn(1, 2, length, 64)
        counts = torch.arange(length - rows + 1, length + 1)
        visible = torch.ones(rows, length).tril(length - rows)
        expected = (visible / counts.unsqueeze(-1)).expand(1, 2, -1, -1)
        weights = attention_weights(q, k, name)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=0)
        out, grads = out_and_grads(q, k, v, name)
        torch.testing.assert_close(out, expected @ v, rtol=1e-4, atol=1e-6)
        assert_finite(out, grads)


def test_identical_keys_are_recognised_through_the_rounding_of_their_scores():
    """A matrix product may round the same dot product differently in two columns, and softplus or
    exp far below zero turns that into tens of eps of the row: still nothing to sharpen."""
    for name, d, length, sign in cases(
        SHARPENED, [20, 64, 80, 128], [29, 63, 471, 2175], [-1.0, 0.0, 1.0]
    ):
        counts = torch.arange(length - 2, length + 1).unsqueeze(-1)
        expected = torch.ones(3, length).tril(length - 3) / counts
        key = torch.randn(5, 2, 1, d)
        q = torch.randn(5, 2, 3, d) if sign == 0 else sign * key.expand(5, 2, 3, d)
        weights = attention_weights(q, key.expand(5, 2, length, d).contiguous(), name)
        torch.testing.assert_close(weights, expected.expand_as(weights), rtol=1e-4, atol=0)


def test_zero_queries_and_keys_are_finite():
    for name in cases(tuple(MECHANISMS)):
        zero, v = torch.zeros(1, 2, 9, 20), torch.randn(1, 2, 9, 20)
        assert_finite(*out_and_grads(zero, zero, v, name, backend="eager"))


# --- the paper's literal form --------------------------------------------------------------------


def test_naive_agrees_with_safe_where_nothing_overflows():
    for p, name in cases([1, 3, 15], SHARPENED):
        q, k = torch.randn(2, 1, 2, 50, 20, dtype=torch.float64).unbind()
        safe = attention_weights(q, k, get_mechanism(name, p=p, numerics="safe"))
        naive = attention_weights(q, k, get_mechanism(name, p=p, numerics="naive"))
        torch.testing.assert_close(naive, safe, rtol=1e-9, atol=1e-13)


def stage_one_row(n, top):
    """Return a float32 row with the weight `top` on one key and the rest spread evenly."""
    row = torch.full((1, n), (1 - top) / (n - 1))
    row[0, 7] = top
    return row


def test_naive_overflows_above_the_published_limit_and_safe_does_not():
    """x**15 is infinite in float32 for x > 370.5: a weight of 0.362 at 1K, of 0.0226 at 16K."""
    naive, safe = (get_mechanism("lssar", numerics=x) for x in ("naive", "safe"))
    for n, limit in cases([(1024, 0.362), (16384, 0.0226)]):
        count = torch.tensor([[float(n)]])
        for top, finite in ((limit * 0.99, True), (limit * 1.03, False), (0.99, False)):
            row = stage_one_row(n, top)
            assert sharpen(row, naive, count).isfinite().all() == finite
            assert sharpen(row, safe, count)[0, 7] == 1


def test_naive_underflows_to_nan_on_nearly_flat_rows_and_safe_does_not():
    """The smallest float32 is 1.4e-45: x**15 is zero for x < 0.001 and the row is 0/0."""
    n = 1024
    count = torch.tensor([[float(n)]])
    naive, safe = (get_mechanism("lssar", numerics=x) for x in ("naive", "safe"))
    for excess, fails in ((0.01, False), (5e-4, True)):
        row = stage_one_row(n, (1 + excess) / n)
        assert sharpen(row, naive, count).isnan().any() == fails
        assert sharpen(row, safe, count)[0, 7] == 1


def test_naive_fails_through_attend_at_16k_and_on_identical_keys():
    naive = get_mechanism("lssar", numerics="naive")
    q, k, v = peaked(LONG, rows=1)
    assert attend(q, k, v, naive).isnan().any()
    same = torch.ones(1, 1, 8, 16)
    assert attend(same, same, same, naive)[..., 3:, :].isnan().any()


def test_exp_overflow_is_reported_and_never_hidden():
    """Decomposition II has no normalisation: beyond x = 88.7 the honest answer is infinity."""
    q = torch.full((1, 1, 1, 4), math.sqrt(89.0 / 2))
    assert attention_weights(q, q, "exp").isinf().all()
    q = torch.full((1, 1, 1, 4), math.sqrt(88.0 / 2))
    assert attention_weights(q, q, "exp").isfinite().all()


def test_rows_of_scores_too_small_for_float32_are_the_same_on_every_backend():
    """Above about -87, or -13 of gelu, a row is that of float64; below it attends to nothing."""
    torch.manual_seed(0)
    v = torch.randn(1, 1, 20, 8)
    backends = ("eager", "rowblock", *(["cpu"] if cpu.unavailable() is None else []))
    above = (-75, -83, -86.5)
    below = (-95, -110, -200, -1000)
    scores = {
        "sigmoid-l1": (above, below),
        "softplus-l1": (above, below),
        "mish-l1": (above, below),
        "gelu-l1": ((-3, -6, -10, -12.8), (-13.2, -20, -1000)),
        "sigmoid-logn-l1-reweighted": ((-75,), below),
    }
    for name, (normal, vanishing) in cases(scores.items()):
        for score, backend in cases(normal + vanishing, backends):
            q = torch.full((1, 1, 20, 16), -1.0)
            k = -score / 4 * (1 + 0.008 * torch.rand(1, 1, 20, 16))  # q.k / sqrt(d): the score
            expected = attend(*(x.double() for x in (q, k, v)), name, backend="eager")
            if score in vanishing:
                expected = torch.zeros_like(v).double()
            got = attend(q, k, v, name, backend=backend).double()
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_sharpened_rows_at_the_lower_end_of_float32():
    """The CPU kernel left out scores below -85, and flushed differences of small values to zero."""
    for score, p, bias, phi in cases(
        [-75, -84, -85, -86, -86.6], [1, 3, 15], ["none", "-log N"], ["sigmoid", "softplus"]
    ):
        m = Mechanism("sharp", "Sharp", phi=phi, bias=bias, p=p)
        torch.manual_seed(0)
        lowest = score + (math.log(300) if bias == "-log N" else 0)
        q = torch.full((1, 1, 300, 16), -1.0)
        k = -lowest / 4 * (1 - 0.008 * torch.rand(1, 1, 300, 1)).expand(q.shape)
        v = torch.randn(1, 1, 300, 8)
        exact = attend(*(x.double() for x in (q, k, v)), m, backend="eager")
        for backend in ("eager", "rowblock", *(["cpu"] if cpu.unavailable() is None else [])):
            found = attend(q, k, v, m, backend=backend).double()
            torch.testing.assert_close(found, exact, atol=1e-2, rtol=0)


@pytest.mark.skipif(cpu.unavailable() is not None, reason="the CPU kernel cannot be built")
def test_gradients_of_sharpened_rows_at_the_lower_end_of_float32():
    for score, phi in cases([-75, -85, -86], ["sigmoid", "softplus"]):
        m = Mechanism("sharp", "Sharp", phi=phi, p=3)
        torch.manual_seed(0)
        q = torch.full((1, 1, 300, 16), -1.0)
        k = -score / 4 * (1 + 0.008 * torch.rand(1, 1, 300, 1)).expand(q.shape)
        v = torch.randn(1, 1, 300, 8)
        _, exact = out_and_grads(*(x.double() for x in (q, k, v)), m, backend="eager")
        _, found = out_and_grads(q, k, v, m, backend="cpu")
        for ours, expected in zip(found, exact, strict=True):
            assert (ours - expected).norm() <= 0.02 * expected.norm()
