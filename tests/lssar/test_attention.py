"""attention.py against the loop-written reference: values, shapes, contract, errors."""

import math
from functools import partial

import loops
import pytest
import torch
from cases import cases
from loops import adaptive_p, cosine, dot, l1, reweight, sigmoid, softplus, weights_of_batch
from loops import softmax as softmax_of
from torch.nn.functional import softmax

from lssar import backends
from lssar.backends import Call, attend, choose_backend, used_backend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, OVERRIDES, Mechanism, get_mechanism
from lssar.reference import attention_weights

NAMES = tuple(MECHANISMS)
SHARPENED = tuple(n for n, m in MECHANISMS.items() if m.sharpened)
LEARNABLE = ("ssmax", "relu-shen", "cos-ssmax")
SDPA = ("softmax", "ssmax", "cos-softmax", "cos-softmax-constant", "cos-softmax-fixed", "cos-ssmax")
BACKENDS = ("auto", "sdpa", "rowblock", "eager")
PROBABILITIES = (
    *("softmax", "ssmax", "sigmoid-logn-l1", "sigmoid-l1", "softplus-l1", "lssa"),
    *("cos-softmax", "cos-softmax-constant", "cos-softmax-fixed", "cos-ssmax", "stick-breaking"),
    *SHARPENED,
)
SIGNED = ("gelu-l1", "mish-l1", "identity-l1", "softmax-recentred-l1")
# (Lq, Lk, d): odd, tiny, and rectangular shapes.
SHAPES = (
    *((1, 1, 20), (2, 2, 64), (3, 3, 20), (4, 4, 64), (63, 63, 64), (111, 111, 20)),
    *((1, 63, 20), (3, 4, 20), (7, 111, 64)),
)


def random_qkv(lq, lk, d, batch=1, heads=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, length, d, generator=generator, dtype=torch.float64)
        for length in (lq, lk, lk)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def params_of(name, heads=2):
    if name not in LEARNABLE:
        return None
    return torch.linspace(0.3, 1.7, heads, dtype=torch.float64)


def backends_of(name):
    """Return the backends besides the kernels, which have tests of their own."""
    return BACKENDS if name in SDPA else [backend for backend in BACKENDS if backend != "sdpa"]


def test_the_registry_holds_the_24_mechanisms_of_the_paper_controls_and_a_baseline():
    paper = """
        softmax ssmax sigmoid sigmoid-logn sigmoid-logn-l1 relu-length relu-shen relu-l1 relu2-l1
        relu6-l1 gelu-l1 sigmoid-l1 softplus-l1 mish-l1 identity exp identity-l1 softmax-inverse
        softmax-recentred softmax-recentred-l1 lssa lssar softmax-reweighted
        sigmoid-logn-l1-reweighted
    """
    controls = "cos-softmax cos-softmax-constant cos-softmax-fixed cos-ssmax"
    assert len(paper.split()) == 24
    assert {*paper.split(), *controls.split(), "stick-breaking"} <= set(NAMES)
    assert all(name == m.name for name, m in MECHANISMS.items())
    assert len({m.label for m in MECHANISMS.values()}) == len(NAMES)


def test_the_names_of_the_paper_mean_its_formulas():
    """By hand, name by name: the loops read a mechanism's parts, which must be the right ones."""
    n, d, length = 11, 16, 1024
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 1, d, generator=generator, dtype=torch.float64)
    k = torch.randn(1, 1, n, d, generator=generator, dtype=torch.float64)
    keys = k[0, 0].tolist()
    query = q[0, 0, 0].tolist()
    x = [dot(query, key) / math.sqrt(d) for key in keys]
    s = [math.log(d) * math.log(n) * cosine(query, key) for key in keys]
    lssa = l1([softplus(value) for value in s])
    by_length = [sigmoid(value - math.log(n)) for value in x]
    recentred = [a - 1 / n for a in softmax_of(x)]
    expected = {
        "softmax": softmax_of(x),
        "ssmax": softmax_of([0.43 * math.log(n) * value for value in x]),
        "sigmoid": [sigmoid(value - math.log(length)) for value in x],
        "sigmoid-logn": by_length,
        "sigmoid-logn-l1": l1(by_length),
        "sigmoid-logn-l1-reweighted": reweight(l1(by_length), 15),
        "relu-length": [max(value, 0) / length for value in x],
        "relu-shen": [max(value, 0) / math.sqrt(n / 2) for value in x],
        "softmax-inverse": [-a for a in softmax_of(x)],
        "softmax-recentred": recentred,
        "softmax-recentred-l1": l1(recentred),
        "softmax-reweighted": reweight(softmax_of(x), 15),
        "exp": [math.exp(value) for value in x],
        "identity": x,
        "cos-softmax": softmax_of(s),
        "lssa": lssa,
        "lssar": reweight(lssa, 15),
    }
    for name in ("relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish", "identity"):
        expected[f"{name}-l1"] = l1([loops.PHI[name](value) for value in x])
    for name, row in expected.items():
        got = attention_weights(q, k, name)[0, 0, 0]
        torch.testing.assert_close(got, torch.tensor(row).double(), rtol=1e-6, atol=1e-9, msg=name)


def test_a_new_entry_of_known_parts_is_computed_by_every_backend():
    """As CONTRIBUTING says: one entry, and neither the loops nor a backend has to be told."""
    q, k, v = random_qkv(17, 23, 8, dtype=torch.float32)
    parts = {"scale": "log d log N", "phi": "sigmoid", "bias": "-log N", "softcap": None}
    for extra in ({}, {"p": 3.0}, {"scale": "1/sqrt(d)", "softcap": 2.0, "phi": "relu2"}):
        m = Mechanism("new", "New", **parts | extra)
        expected = weights_of_batch(m, q, k) @ v.double()
        for backend in ("auto", "eager", "rowblock"):
            got = attend(q, k, v, m, backend=backend)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_weights_equal_the_loop_reference():
    for name, shape in cases(NAMES, SHAPES):
        q, k, _ = random_qkv(*shape)
        params = params_of(name)
        expected = weights_of_batch(name, q, k, params)
        got = attention_weights(q, k, name, head_scale=params)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_attend_is_the_reference_weights_times_the_values():
    for name, lq in cases(NAMES, [1, 5, 37]):
        params = params_of(name)
        q, k, v = random_qkv(lq, 37, 20, batch=2)
        v = v[..., :11]  # values may be of another width than keys
        expected = weights_of_batch(name, q, k, params) @ v
        for backend in cases(backends_of(name)):
            got = attend(q, k, v, name, head_scale=params, backend=backend)
            assert got.shape == (2, 2, lq, 11)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def output_and_gradients(tensors, name, params, backend):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = attend(*leaves, name, head_scale=params, backend=backend)
    cotangent = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent)


def test_values_of_any_width_in_float32_with_gradients():
    for name, (lq, width) in cases(NAMES, [(37, 11), (37, 45), (1, 1), (5, 129)]):
        params = params_of(name)
        q, k, v = random_qkv(lq, 37, 20, dtype=torch.float32)
        v = torch.cat([v] * 7, -1)[..., :width]
        exact = output_and_gradients([t.double() for t in (q, k, v)], name, params, "eager")
        reference = weights_of_batch(name, q.double(), k.double(), params)
        torch.testing.assert_close(exact[0], reference @ v.double(), rtol=1e-9, atol=1e-12)
        for backend in cases(backends_of(name)):
            got = output_and_gradients((q, k, v), name, params, backend)
            assert got[0].dtype == torch.float32
            for g, e in zip(got, exact, strict=True):
                allowed = 1e-3 * e.norm() + 1e-5  # a gradient may be zero
                assert (g.double() - e).norm() <= allowed


def test_values_of_another_type_are_taken_too():
    for name, odd in cases(["softmax", "ssmax", "lssa", "lssar"], [0, 1, 2]):
        tensors = list(random_qkv(9, 13, 20, dtype=torch.float32))
        tensors[odd] = tensors[odd].double()
        got = attend(*tensors, name)
        expected = weights_of_batch(name, *(t.double() for t in tensors[:2])) @ tensors[2].double()
        assert got.dtype == tensors[2].dtype
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_gpu_kernel_refuses_other_types_in_one_line(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = random_qkv(4, 4, 8, dtype=torch.float32)
    with pytest.raises(UserError, match=r"of one type$"):
        attend(q, k, v.half(), "lssa", backend="triton")


def test_what_a_call_used_is_recorded_in_compiled_graphs_too():
    q, k, v = random_qkv(6, 6, 8, dtype=torch.float32)
    for name, width, expected in (("softmax", 8, "cpu"), ("lssar", 5, "cpu")):
        attend(q, k, v, name, backend="rowblock")
        assert used_backend(MECHANISMS[name]) == "rowblock"
        run = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            run(q, k, v[..., :width], name)
            assert used_backend(MECHANISMS[name]) == expected


def test_a_missing_triton_is_said_once_where_a_gpu_would_have_used_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    backends._with_notice.cache_clear()
    call = Call("cuda", torch.bfloat16, entries=2**30, head_dim=64)
    with pytest.warns(UserWarning, match="without its fused GPU kernel.*not installed") as said:
        assert choose_backend(MECHANISMS["lssar"], call) == "rowblock"
        assert choose_backend(MECHANISMS["lssa"], call) == "rowblock"
        assert choose_backend(MECHANISMS["softmax"], call) == "sdpa"
    assert len(said) == 1
    assert choose_backend(MECHANISMS["lssar"], call, everywhere=True) == "triton"


def test_absent_head_scales_are_the_papers_initial_value():
    for name in cases(LEARNABLE):
        q, k, v = random_qkv(9, 9, 20)
        initial = {"ssmax": 0.43, "relu-shen": 1.0, "cos-ssmax": 1.0}[name]
        expected = weights_of_batch(name, q, k, torch.full((2,), initial, dtype=torch.float64))
        torch.testing.assert_close(attention_weights(q, k, name), expected)
        torch.testing.assert_close(attend(q, k, v, name), expected @ v)


def test_any_exponent_equals_the_reference():
    for p, name in cases([1, 2.5, 3, 30], SHARPENED):
        q, k, _ = random_qkv(29, 31, 20)
        got = attention_weights(q, k, get_mechanism(name, p=p))
        torch.testing.assert_close(got, weights_of_batch(name, q, k, p=p), rtol=1e-9, atol=1e-12)


def test_adaptive_exponent_grows_past_the_training_length():
    q, k, _ = random_qkv(30, 41, 20)
    settings = {"p": 5, "alpha": 0.5, "train_length": 10}
    for name in cases(SHARPENED):
        got = attention_weights(q, k, get_mechanism(name, **settings))
        expected = weights_of_batch(name, q, k, **settings)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        unchanged = attention_weights(q, k, get_mechanism(name, p=5))
        longer = (got - unchanged)[..., 1:, :]  # rows 12.. are longer than training
        assert longer.abs().amax() > 1e-3


def test_adaptive_exponent_is_the_papers_formula():
    m = get_mechanism("lssar", p=15, alpha=0.1, train_length=1024)
    rows = torch.tensor([1.0, 3, 1023, 1024, 1025, 2048, 16384], dtype=torch.float64)
    expected = [adaptive_p(15, 0.1, n, 1024) for n in rows.tolist()]
    torch.testing.assert_close(m.exponents(rows), torch.tensor(expected, dtype=torch.float64))
    assert expected[-1] == pytest.approx(15 * (1 + 0.1 * 3))
    assert get_mechanism("lssar").exponents(rows) == 15


def test_sliding_window_equals_the_masked_reference():
    for name, window in cases(NAMES, [1, 3, 5, 22, 23, 400]):
        q, k, v = random_qkv(19, 23, 20)
        params = params_of(name)
        expected = weights_of_batch(name, q, k, params, window=window)
        m = get_mechanism(name, window=window)
        got = attention_weights(q, k, m, head_scale=params)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        got = attend(q, k, v, m, head_scale=params)
        torch.testing.assert_close(got, expected @ v, rtol=1e-9, atol=1e-12)


def test_decay_and_sinks_equal_the_loop_reference():
    for name, settings in cases(NAMES, [{}, {"window": 7}, {"window": 7, "sinks": 3}]):
        q, k, v = random_qkv(19, 23, 20)
        params, decay = params_of(name), -torch.rand(1, 2, 23, dtype=torch.float64)
        expected = weights_of_batch(name, q, k, params, decay, **settings)
        m, options = get_mechanism(name, **settings), {"head_scale": params, "decay": decay}
        torch.testing.assert_close(attention_weights(q, k, m, **options), expected)
        torch.testing.assert_close(attend(q, k, v, m, **options), expected @ v)


def test_a_decay_is_exact_where_keys_are_near_however_long_the_row():
    """Sums to 10,000: in float32 a score would be off by a thousandth, were they counted from 0."""
    q, k, v = random_qkv(3, 16384, 16, heads=1, dtype=torch.float32)
    decay = torch.full((1, 1, 16384), -0.63)
    got = attend(q, k, v, "softmax", decay=decay)
    exact = attend(*(t.double() for t in (q, k, v)), "softmax", decay=decay.double())
    assert (got - exact).norm() <= 1e-6 * exact.norm()


def test_a_decay_that_cannot_be_is_refused():
    q, k, v = random_qkv(9, 13, 20, dtype=torch.float32)
    wrong_shape = r"decay must be .* here \(1, 2, 13\); got .* \(1, 2, 9\)"
    with pytest.raises(UserError, match=wrong_shape):
        attend(q, k, v, "softmax", decay=torch.zeros(1, 2, 9))
    with pytest.raises(UserError, match=r"got torch\.int64"):
        attend(q, k, v, "softmax", decay=torch.zeros(1, 2, 13, dtype=torch.int64))
    with pytest.raises(UserError, match="its scores do not decay"):
        attend(q, k, v, "softmax", decay=torch.zeros(1, 2, 13), backend="cpu")


def test_sinks_need_a_window_and_rows_that_begin_at_the_first_key():
    with pytest.raises(UserError, match=r"sinks = 4; .* needs a window"):
        get_mechanism("softmax", sinks=4)
    q, k, v = random_qkv(9, 13, 20)
    m = get_mechanism("softmax", window=5, sinks=2)
    with pytest.raises(UserError, match="sinks = 2 are the first keys of all"):
        attend(q, k, v, m, first=torch.zeros(9, dtype=torch.int64))
    with pytest.raises(UserError, match="sees nothing outside of a window"):
        attend(q.float(), k.float(), v.float(), m, backend="cpu")
    with pytest.raises(UserError, match="norm = 'stick'; what breaks off a stick"):
        Mechanism("mine", "Mine", norm="stick")


def test_length_is_the_training_length_or_the_current_one():
    length_of_settings = [
        ({}, 1024),
        ({"train_length": 100}, 100),
        ({"length": "current"}, 13),
        ({"length": "current", "train_length": 100}, 13),
    ]
    for backend, name in cases(["eager", "rowblock"], ["sigmoid", "relu-length"]):
        q, k, v = random_qkv(8, 13, 20)
        for settings, length in cases(length_of_settings):
            expected = weights_of_batch(name, q, k, length=length)
            m = get_mechanism(name, **settings)
            torch.testing.assert_close(attention_weights(q, k, m), expected)
            torch.testing.assert_close(attend(q, k, v, m, backend=backend), expected @ v)


def test_a_later_token_never_changes_an_earlier_row():
    for name in cases(NAMES):
        q, k, v = random_qkv(23, 27, 20)
        before = attend(q, k, v, name)
        for changed in (5, 17, 26):  # an index into the keys; queries start at key 4
            k2, v2, q2 = k.clone(), v.clone(), q.clone()
            k2[:, :, changed:] = 1e3 * torch.randn_like(k2[:, :, changed:])
            v2[:, :, changed:] = torch.nan
            q2[:, :, changed - 4 :] = torch.nan
            weights = attention_weights(q2, k2, name)[:, :, : changed - 4]
            torch.testing.assert_close(weights, attention_weights(q, k, name)[:, :, : changed - 4])
            out = attend(q2, k2, v2.nan_to_num(1e6), name)
            torch.testing.assert_close(out[:, :, : changed - 4], before[:, :, : changed - 4])
        above = torch.ones(23, 27, dtype=torch.bool).triu(5)
        assert (attention_weights(q, k, name)[..., above] == 0).all()


def test_rows_are_probabilities():
    for name in cases(PROBABILITIES):
        q, k, _ = random_qkv(63, 65, 20)
        weights = attention_weights(q, k, name)
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 63, dtype=torch.float64))


def test_signed_rows_have_l1_norm_one_and_both_signs():
    for name in cases(SIGNED):
        q, k, _ = random_qkv(63, 65, 20)
        weights = attention_weights(q, k, name)
        torch.testing.assert_close(weights.abs().sum(-1), torch.ones(1, 2, 63, dtype=torch.float64))
        assert (weights < 0).any()


def test_a_row_without_a_positive_score_attends_to_nothing():
    for name in cases(["relu-l1", "relu2-l1", "relu6-l1"]):
        q, k, v = random_qkv(12, 12, 20)
        q, k = q.abs(), -k.abs()
        q, k = q.requires_grad_(), k.requires_grad_()
        out = attend(q, k, v, name)
        assert (out == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))
        q, k, _ = random_qkv(40, 40, 20)
        total = attention_weights(q, k, name).sum(-1)
        assert (((total - 1).abs() < 1e-12) | (total == 0)).all()


def test_recentred_rows_sum_to_zero_after_the_third():
    q, k, _ = random_qkv(21, 21, 20)
    total = attention_weights(q, k, "softmax-recentred").sum(-1)
    torch.testing.assert_close(total[..., :3], torch.ones(1, 2, 3, dtype=torch.float64))
    assert total[..., 3:].abs().amax() < 1e-12


def test_inverse_is_an_exact_symmetry_of_softmax():
    q, k, v = random_qkv(33, 33, 64)
    assert torch.equal(
        attention_weights(q, k, "softmax-inverse"), -attention_weights(q, k, "softmax")
    )
    torch.testing.assert_close(
        attend(q, k, v, "softmax-inverse"), attend(q, k, -v, "softmax"), rtol=1e-10, atol=1e-12
    )


def test_sharpening_is_the_softmax_of_p_log_x():
    """The log-space form of the paper's appendix: softmax(p log relu(N A - O))."""
    for p in cases([1, 3, 15, 30]):
        q, k, _ = random_qkv(50, 50, 64)
        n = torch.arange(1.0, 51, dtype=torch.float64).unsqueeze(-1)
        x = (n * attention_weights(q, k, "lssa") - (n > 3).double()).clamp(min=0)
        log_space = softmax(p * x.log(), dim=-1)
        got = attention_weights(q, k, get_mechanism("lssar", p=p))
        torch.testing.assert_close(got, log_space, rtol=1e-9, atol=1e-12)


def test_lssa_ignores_the_length_of_queries_and_keys():
    q, k, _ = random_qkv(20, 20, 64)
    scaled = attention_weights(q * 7.5, k * torch.rand_like(k[..., :1]) + 0 * k, "lssar")
    torch.testing.assert_close(scaled, attention_weights(q, k, "lssar"), rtol=1e-8, atol=1e-12)


def away_from_kinks(name, lq, lk, d):
    """Return inputs at which the mechanism is smooth: no score at 0 or 6, no weight at its mean."""
    n = torch.arange(lk - lq + 1, lk + 1, dtype=torch.float64).unsqueeze(-1)
    visible = torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)
    stage_one = {
        "lssar": "lssa",
        "softmax-reweighted": "softmax",
        "sigmoid-logn-l1-reweighted": "sigmoid-logn-l1",
    }.get(name, "softmax")
    for seed in range(200):
        q, k, v = random_qkv(lq, lk, d, heads=1, seed=seed)
        x = (q @ k.mT / math.sqrt(d))[..., visible].abs()
        excess = ((n * attention_weights(q, k, stage_one) - 1) * (n > 3))[..., visible].abs()
        if x.min() > 5e-3 and excess[excess > 0].min() > 5e-3:
            return q, k, v
    raise AssertionError("no smooth input found")


def attend_with_scale(m, backend, q, k, v, head_scale=None):
    return attend(q, k, v, m, head_scale=head_scale, backend=backend)


def test_gradients_equal_finite_differences():
    for name in cases(NAMES):
        leaves = [t.requires_grad_() for t in away_from_kinks(name, 4, 5, 4)]
        if name in LEARNABLE:
            leaves.append(params_of(name, heads=1).requires_grad_())
        m = get_mechanism(name, p=3.5) if name in SHARPENED else get_mechanism(name)
        for backend in cases(["eager", "rowblock"]):
            output = partial(attend_with_scale, m, backend)
            assert torch.autograd.gradcheck(output, leaves, fast_mode=False)


def test_sdpa_gradients_equal_the_eager_ones():
    for name in cases(["softmax", "ssmax"]):
        leaves = [t.requires_grad_() for t in random_qkv(9, 13, 20)]
        params = None
        if name == "ssmax":
            params = params_of(name).requires_grad_()
            leaves.append(params)
        gradients = []
        for backend in ("sdpa", "eager"):
            out = attend(*leaves[:3], name, head_scale=params, backend=backend)
            gradients.append(torch.autograd.grad(out.square().sum(), leaves))
        for sdpa, eager in zip(*gradients, strict=True):
            torch.testing.assert_close(sdpa, eager, rtol=1e-9, atol=1e-11)


# --- the contract's errors -----------------------------------------------------------------------


def test_a_wrong_mechanism_is_refused_with_the_value_and_the_nearest():
    examples = [
        ("lsar", {}, ["'lsar'", "did you mean 'lssar'"]),
        ("softplus", {}, ["'softplus'", "'softplus-l1'"]),
        ("zzzzzz", {}, ["'zzzzzz'", "choose from", "softmax-inverse"]),
        ("lssar", {"q": 3}, ["'q'", "3", "choose from", "p"]),
        ("lssar", {"alfa": 0.1}, ["'alfa'", "0.1", "did you mean 'alpha'"]),
        ("lssar", {"trainlength": 5}, ["'trainlength'", "did you mean 'train_length'"]),
        ("lssar", {"phi": "relu"}, ["'phi'", "'relu'"]),
        ("lssar", {"p": 0.5}, ["p = 0.5", ">= 1"]),
        ("lssar", {"p": -3}, ["p = -3", ">= 1"]),
        ("lssar", {"p": math.nan}, ["p = nan"]),
        ("lssar", {"p": math.inf}, ["p = inf"]),
        ("lssar", {"p": "15"}, ["p = '15'"]),
        ("lssar", {"p": True}, ["p = True"]),
        ("softmax", {"p": 15}, ["'softmax'", "p = 15", "lssar", "softmax-reweighted"]),
        ("lssa", {"alpha": 0.1}, ["'lssa'", "alpha = 0.1", "lssar"]),
        ("softmax", {"numerics": "naive"}, ["'softmax'", "numerics = 'naive'"]),
        ("lssar", {"length": "current"}, ["'lssar'", "length = 'current'", "relu-length"]),
        ("lssar", {"alpha": -0.1}, ["alpha = -0.1"]),
        ("lssar", {"alpha": math.nan}, ["alpha = nan"]),
        ("lssar", {"alpha": "0.1"}, ["alpha = '0.1'"]),
        ("lssar", {"train_length": 0}, ["train_length = 0"]),
        ("lssar", {"train_length": 1024.0}, ["train_length = 1024.0"]),
        ("lssar", {"train_length": True}, ["train_length = True"]),
        ("lssar", {"window": 0}, ["window = 0"]),
        ("lssar", {"window": 2.5}, ["window = 2.5"]),
        ("sigmoid", {"length": "now"}, ["length = 'now'", "'train'", "'current'"]),
        ("lssar", {"numerics": "fast"}, ["numerics = 'fast'", "'safe'", "'naive'"]),
    ]
    for name, overrides, parts in cases(examples):
        with pytest.raises(UserError) as error:
            get_mechanism(name, **overrides)
        message = str(error.value)
        assert "\n" not in message
        for part in parts:
            assert part in message


def test_overrides_change_only_what_they_name():
    assert get_mechanism("lssar").p == 15
    assert get_mechanism("lssar").alpha == 0
    assert get_mechanism("lssar").train_length == 1024
    assert get_mechanism("lssar", **dict.fromkeys(OVERRIDES)) == MECHANISMS["lssar"]
    m = get_mechanism("lssar", p=3, window=7)
    assert (m.p, m.window, m.alpha) == (3, 7, 0)
    assert MECHANISMS["lssar"].p == 15
    with pytest.raises(AttributeError):
        m.p = 4


def test_a_new_mechanism_is_a_value():
    q, k, v = random_qkv(6, 6, 20)
    mine = Mechanism("mine", "GeLU, negated", phi="gelu", post="negate")
    torch.testing.assert_close(attend(q, k, v, mine), -attend(q, k, v, "gelu-l1"))


def test_wrong_shapes_are_refused_with_the_shapes():
    examples = [
        ((1, 2, 5, 8), (1, 2, 4, 8), (1, 2, 4, 8)),  # more queries than keys
        ((1, 2, 0, 8), (1, 2, 4, 8), (1, 2, 4, 8)),  # no query
        ((1, 2, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)),  # other heads
        ((1, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)),  # other batch
        ((1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 6)),  # other width
        ((2, 4, 8), (2, 4, 8), (2, 4, 8)),  # no batch
        ((2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),  # no batch of the queries
        ((1, 2, 4, 8), (2, 4, 8), (2, 4, 8)),  # no batch of the keys
        ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 8)),  # a value missing
        ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)),  # values without a width
    ]
    for q, k, v in cases(examples):
        for backend in cases(BACKENDS):
            with pytest.raises(UserError, match="attention") as error:
                attend(torch.zeros(q), torch.zeros(k), torch.zeros(v), "softmax", backend=backend)
            assert str(q) in str(error.value)
            assert str(v) in str(error.value)


def test_backend_errors_say_why_and_what_exists():
    q, k, v = random_qkv(4, 4, 8)
    with pytest.raises(UserError, match=r"'sdp'.*did you mean 'sdpa'"):
        attend(q, k, v, "softmax", backend="sdp")
    with pytest.raises(UserError, match=r"'sdpa'.*'lssar': p = 15"):
        attend(q, k, v, "lssar", backend="sdpa")
    with pytest.raises(UserError, match=r"'sdpa'.*window"):
        attend(q, k, v, get_mechanism("softmax", window=2), backend="sdpa")
    for name in set(NAMES) - set(SDPA):
        with pytest.raises(UserError, match="'sdpa'"):
            attend(q, k, v, name, backend="sdpa")


def test_head_scales_are_checked():
    q, k, v = random_qkv(4, 4, 8)
    with pytest.raises(UserError, match=r"'lssar' has no learnable scalar"):
        attend(q, k, v, "lssar", head_scale=torch.ones(2))
    for shape in ((3,), (2, 1), ()):
        with pytest.raises(UserError, match=r"'ssmax' takes head_scale of shape \(2,\)"):
            attend(q, k, v, "ssmax", head_scale=torch.ones(shape))
