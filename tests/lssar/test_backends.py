"""The choice of a backend: what it declares is what it computes, for any combination of parts."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from lssar import fused
from lssar.backends import BACKENDS, Backend, Call, attend, choose_backend, used_backend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, PARTS, SIGNED, Mechanism, _registry, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import Span


@st.composite
def mechanisms(draw):
    """Draw any combination of parts, whether the paper has it or not."""
    parts = {part: draw(st.sampled_from(values)) for part, values in PARTS.items()}
    parts["numerics"] = "safe"
    if parts["norm"] == "stick":
        parts |= {"phi": "sigmoid", "post": "none"}
    window = draw(st.sampled_from([None, 1, 4, 100]))
    learnable = parts["scale"].startswith("s ") or parts["norm"].startswith("gamma")
    probabilities = (parts["norm"], parts["post"]) == ("l1", "none") and parts["phi"] not in SIGNED
    return Mechanism(
        "drawn",
        "Drawn",
        **parts,
        p=draw(st.sampled_from([None, 1, 2.5, 15])) if probabilities else None,
        alpha=draw(st.sampled_from([0.0, 0.3])),
        train_length=draw(st.sampled_from([5, 1024])),
        window=window,
        sinks=draw(st.sampled_from([0, 2])) if window else 0,
        parameter_init=0.43 if learnable else None,
    )


@settings(max_examples=400, deadline=None)
@given(
    mechanisms(),
    st.sampled_from([(1, 9), (7, 7), (5, 19)]),
    st.sampled_from([(4, 4), (8, 8), (8, 5)]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_whatever_auto_picks_equals_the_reference(m, lengths, widths, decays, seed):
    generator = torch.Generator().manual_seed(seed)
    (lq, lk), (d, dv) = lengths, widths
    q, k, v = (
        torch.randn(2, 3, *shape, generator=generator) for shape in ((lq, d), (lk, d), (lk, dv))
    )
    decay = -torch.rand(2, 3, lk, generator=generator) if decays else None
    wide = decay if decay is None else decay.double()
    expected = attention_weights(q.double(), k.double(), m, decay=wide) @ v.double()
    eager = attention_weights(q, k, m, decay=decay).double() @ v.double()
    # Sharpened rows close to uniform are ill-conditioned for any implementation.
    loss = (eager - expected).abs().max()
    tolerance = 1e-5 * (1 + expected.abs().max()) + 4 * loss
    got = attend(q, k, v, m, decay=decay)
    assert (got.double() - expected).abs().max() <= tolerance, (used_backend(m), m)


def test_every_field_of_a_mechanism_reaches_the_choice():
    """A field that no backend is asked about would be ignored by the fused ones in silence."""
    of_the_call = {"p", "window", "sinks", "softcap", *PARTS}
    passed_on = {"alpha", "train_length", "parameter_init"}  # numbers that every kernel is given
    found = {field.name for field in fields(Mechanism)}
    assert found == of_the_call | passed_on | {"name", "label"}


def test_an_entry_no_backend_knows_is_computed_by_the_reference():
    q, k, v = torch.randn(3, 1, 2, 33, 16, dtype=torch.float64).unbind()
    sharpened = replace(MECHANISMS["relu-l1"], name="sharpened", p=3)
    recentred = replace(MECHANISMS["gelu-l1"], name="recentred", post="recentre, l1")
    capped = replace(MECHANISMS["softmax"], name="capped", softcap=0.5)
    for m in (sharpened, recentred, capped):
        for precise in (False, True):
            inputs = (q, k, v) if precise else (q.float(), k.float(), v.float())
            out = attend(*inputs, m)
            assert used_backend(m) in ("eager", "rowblock")
            expected = attention_weights(q, k, m) @ v
            assert (out - expected).abs().max() < (1e-12 if precise else 1e-4)


def test_a_part_that_only_the_reference_has_reaches_no_kernel(monkeypatch):
    for part in cases(PARTS):
        monkeypatch.setitem(PARTS, part, (*PARTS[part], "cubes"))
        mine = Mechanism("mine", "Mine", **{part: "cubes"})
        for device, backend in cases([("cpu", "cpu"), ("cuda", "triton"), ("cpu", "sdpa")]):
            refused = BACKENDS[backend].refuses(mine, Call(device, torch.float32, 100, 8))
            assert refused == f"it does not compute 'mine': {part} = 'cubes'"


def test_a_part_without_its_branch_in_the_reference_is_an_error(monkeypatch):
    """It would otherwise be computed as another value of the part."""
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    for part in cases(sorted(PARTS.keys() - {"phi"})):
        monkeypatch.setitem(PARTS, part, (*PARTS[part], "cubes"))
        sharpened = {"p": 3} if part == "numerics" else {}
        mine = Mechanism("mine", "Mine", **{part: "cubes"}, **sharpened)
        with pytest.raises(NotImplementedError, match=f"no branch for {part} = 'cubes'"):
            attend(q, k, v, mine)


def test_a_part_that_does_not_exist_is_refused():
    for part in cases(PARTS):
        with pytest.raises(UserError, match=rf"'mine': {part} = 'logs'; choose from"):
            Mechanism("mine", "Mine", **{part: "logs"})


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(UserError, match="two mechanisms are named 'mine'"):
        _registry(Mechanism("mine", "Mine"), Mechanism("b", "B"), Mechanism("mine", "Mine, again"))


def test_a_parameter_without_a_use_and_a_use_without_a_parameter_are_refused():
    with pytest.raises(UserError, match=r"parameter_init = 0\.5"):
        Mechanism("mine", "Mine", parameter_init=0.5)
    for wrong in ("abc", float("nan")):
        with pytest.raises(UserError, match=f"parameter_init = {wrong!r}; must be a number"):
            Mechanism("mine", "Mine", scale="s log N / sqrt(d)", parameter_init=wrong)
    with pytest.raises(UserError, match="parameter_init = None"):
        Mechanism("mine", "Mine", scale="s log N / sqrt(d)")


def test_only_probabilities_can_be_re_weighted():
    for parts in cases([{"norm": "L"}, {"post": "negate"}, {"phi": "gelu"}]):
        with pytest.raises(UserError, match=r"p = 3; re-weighting takes probabilities"):
            Mechanism("mine", "Mine", **parts, p=3)


def test_a_backend_computes_only_the_default_of_what_it_does_not_name():
    call = Call("cpu", torch.float32, 100, 8)
    silent = Backend(attend, parts={})
    assert silent.refuses(MECHANISMS["softmax"], call) is None
    refused = {name for name, m in MECHANISMS.items() if silent.refuses(m, call)}
    assert refused == set(MECHANISMS) - {"softmax"}


def test_every_mechanism_has_a_backend_on_every_device():
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    for m, device, dtype in cases(MECHANISMS.values(), ["cpu", "cuda", "mps"], types):
        for value_dim in cases([64, 48]):
            call = Call(device, dtype, 2**30, 64, value_dim=value_dim)
            chosen = choose_backend(m, call, everywhere=True)
            assert BACKENDS[chosen].refuses(m, call) is None


def test_a_scale_of_zero_is_a_scale():
    """log d log L of a training length of one token: every key has the same weight."""
    m = get_mechanism("cos-softmax-fixed", train_length=1)
    q, k, v = torch.randn(3, 1, 2, 19, 8).unbind()
    means = v.cumsum(2) / torch.arange(1, 20)[:, None]
    for backend in cases(["sdpa", "cpu", "rowblock"]):
        torch.testing.assert_close(attend(q, k, v, m, backend=backend), means)


def test_forward_mode_derivatives_are_those_of_eager():
    """A fused kernel has none, and would give zero."""
    torch.manual_seed(0)
    q, k, v, tangent = torch.randn(4, 1, 2, 9, 8).unbind()
    for name in ("lssar", "softmax", "sigmoid-l1"):
        with forward_ad.dual_level():
            out = attend(forward_ad.make_dual(q, tangent), k, v, name)
            got = forward_ad.unpack_dual(out).tangent
        step = 1e-6
        exact = partial(attend, k=k.double(), v=v.double(), mechanism=name)
        above, below = exact(q.double() + step * tangent), exact(q.double() - step * tangent)
        expected = (above - below) / (2 * step)
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)
        jacobian = torch.autograd.functional.jacobian
        options = {"strategy": "forward-mode", "vectorize": True}
        found = jacobian(partial(attend, k=k, v=v, mechanism=name), q, **options)
        torch.testing.assert_close(found.flatten(4) @ tangent.flatten(), got, rtol=1e-3, atol=1e-4)
        compiled = torch.compile(partial(attend, mechanism=name), backend="aot_eager")
        compiled(q, k, v)
        _, outside = torch.func.jvp(lambda q, f=compiled: f(q, k, v), (q,), (tangent,))
        torch.testing.assert_close(outside, got, msg=f"{name}, jvp of a compiled function")

        @torch.compile(backend="aot_eager")
        def derivative(q, name=name):
            return torch.func.jvp(lambda q: attend(q, k, v, name), (q,), (tangent,))[1]

        torch.testing.assert_close(derivative(q), got, msg=f"{name}, jvp while compiling")
    with forward_ad.dual_level(), pytest.raises(UserError, match="forward-mode AD"):
        attend(forward_ad.make_dual(q, tangent), k, v, "lssar", backend="cpu")


def test_a_kernel_that_makes_no_cosines_gets_them_as_products():
    """That of Triton: of q and k as it gets them, softmax of q k / sqrt(d) is the mechanism."""
    q, k = torch.randn(2, 1, 2, 9, 8).unbind()
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for name in cases(["cos-softmax-constant", "cos-softmax-fixed", "cos-ssmax"]):
        m = MECHANISMS[name]
        scale = None if m.parameter_init is None else torch.tensor([0.7, 1.3])
        given_q, given_k, asked = fused.kernel_inputs(q, k, m, scale, Span())
        assert not asked.flags & (fused.COSINE | fused.UNIT_KEYS)
        scores = given_q @ given_k.mT / 8**0.5
        got = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(got, attention_weights(q, k, m, head_scale=scale))
