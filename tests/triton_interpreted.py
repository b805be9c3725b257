"""The Triton kernels on CPU tensors, in Triton's interpreter, against float64.

Run by tests/lssar/test_kernel_triton.py in a process of its own, as TRITON_INTERPRET=1 must be set
before triton is first imported. By hand: TRITON_INTERPRET=1 pytest tests/triton_interpreted.py

Products are those of lssar/triton_interpreter.py, which rounds as tensor cores do, or truncates.
"""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import cpu_kernel
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from benchmarks.precision import rounded_products
from lssar import fused, key_parts, triton_naive, triton_op
from lssar.backends import attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism

NAMES = ("out", "dq", "dk", "dv")
POWERS = (None, 1, 3, 15, 2.5, 30)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Below a unit of fp32 both are as good as exact; a row with one key has no error at all in eager.
FLOOR = 2**-23


def lssar(q, k, v, backend="triton", **options):
    return attend(q, k, v, cpu_kernel.mechanism(**options), backend=backend)


def run(attention, tensors, grad, dtype):
    """Return output and gradients of q, k, v."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in tensors]
    out = attention(*leaves)
    out.backward(grad.to(dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def errors(results, exact):
    """Return relative norms; a gradient that is all rounding is measured against the others."""
    least = 1e-6 * max(x.norm() for x in exact)
    return [
        ((a.double() - b).norm() / b.norm().clamp(min=least)).item()
        for a, b in zip(results, exact, strict=True)
    ]


def inputs(kind, rows, keys, d, heads=2, seed=0, batch=1, groups=None, d_v=None):
    generator = torch.Generator().manual_seed(seed)
    groups, d_v = groups or heads, d_v or d
    shapes = ((heads, rows, d), (groups, keys, d), (groups, keys, d_v), (heads, rows, d_v))
    q, k, v, grad = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    if kind == "near-uniform":  # keys that differ by a thousandth
        k = k[:, :, :1] + k * 1e-3
    elif kind == "peaked":  # every query is its own key, almost
        q = 3 * k[:, :, -rows:] + 0.1 * q
    elif kind == "leaning":  # every query looks for its own key
        q = k[:, :, -rows:] + q
    elif kind == "huge":
        q, k = q * 2**10, k * 2**9
    elif kind == "opposite":  # all scores far below zero
        q, k = q * 0.02 - 1, k * 0.02 + 1
    elif kind == "mixed":  # norms and gradients of all sizes
        octaves = torch.randint(-4, 5, (batch, heads, keys, 1), generator=generator)
        q, k, v = q * 2.0 ** octaves[:, :, -rows:], k * 2.0**octaves, v * 2.0**-octaves
        grad = grad * 2.0 ** -octaves[:, :, -rows:]
    return (q, k, v), grad


KINDS = ("random", "near-uniform", "peaked", "leaning", "huge", "opposite", "mixed")


def check(kind, rows, keys, d, m, dtype=FP32, first=None, by_luck=False, **shape):
    """Compare what the kernel and eager lose on the same input, against float64.

    In fp32 at most twice as much; in 16 bits, where eager multiplies as under autocast, at most
    twice of the output and three times of gradients, as FlashAttention's tests have it.

    Few rows need many heads: in one ill-conditioned row either may be lucky. `m` may be a p.
    `by_luck`: one row makes up most of the error, and eager's worst over five roundings of the
    input counts.
    """
    if not isinstance(m, type(MECHANISMS["lssa"])):
        m = cpu_kernel.mechanism(m)
    tensors, grad = inputs(kind, rows, keys, d, **shape)
    tensors, grad = [x.to(dtype) for x in tensors], grad.to(dtype)
    if m.parameter_init is not None:
        tensors.append(torch.linspace(0.4, 1, tensors[0].shape[1]))

    def attention(backend, q, k, v, params=None):
        return attend(q, k, v, m, head_scale=params, first=first, backend=backend)

    exact = run(partial(attention, "eager"), tensors, grad, torch.float64)
    alike = [tensors, *cpu_kernel.rounded(*tensors)] if by_luck else [tensors]
    with nullcontext() if dtype == FP32 else rounded_products(dtype):
        eager = [errors(run(partial(attention, "eager"), x, grad, dtype), exact) for x in alike]
    lost = [max(x) for x in zip(*eager, strict=True)]
    kernel = run(partial(attention, "triton"), tensors, grad, dtype)
    assert all(x.isfinite().all() for x in kernel)
    floors = dict.fromkeys(NAMES, FLOOR if dtype == FP32 else torch.finfo(dtype).eps / 4)
    if m.parameter_init is not None:
        floors["dparams"] = 2**-19  # a sum over all rows that nearly cancels: either may be lucky
    for (name, floor), ours, theirs in zip(
        floors.items(), errors(kernel, exact), lost, strict=True
    ):
        bar = (2 if name == "out" or dtype == FP32 else 3) * theirs + floor
        if math.isnan(theirs):  # eager overflows; the kernel must point the right way
            bar = 0.5
        assert ours <= bar, f"{name}: {ours:.1e}, eager loses {theirs:.1e}"


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize(("rows", "keys", "d"), [(100, 100, 64), (5, 70, 128)])
def test_accuracy_on_random_input_is_eagers(rows, keys, d, p):
    check("random", rows, keys, d, p, heads=2 if rows > 8 else 24)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("p", [None, 15, 2.5])
def test_accuracy_on_random_16_bit_input_is_eagers(p, dtype):
    check("random", 100, 100, 64, p, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_accuracy_on_hostile_input_is_eagers(kind, dtype):
    check(kind, 100, 100, 64, 15, dtype)


@pytest.mark.parametrize("p", [None, 1, 2.5])
@pytest.mark.parametrize("kind", ["peaked", "near-uniform", "opposite"])
def test_accuracy_on_hostile_input_is_eagers_for_every_kind_of_p(kind, p):
    check(kind, 70, 70, 64, p, FP16)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    past=st.integers(0, 70),
    d=st.integers(2, 128),
    p=st.sampled_from([None, 1, 1.7, 3, 15]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([FP32, FP16, BF16]),
    seed=st.integers(0, 99),
)
def test_accuracy_in_any_shape(rows, past, d, p, kind, dtype, seed):
    check(kind, rows, rows + past, d, p, dtype, heads=2 + 8 // rows, seed=seed)


@pytest.mark.parametrize("p", [None, 15, 2.5])
def test_accuracy_in_the_first_rows(p):
    check("random", 4, 4, 64, p, heads=16)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_shortest_sequences_equal_the_rows_of_a_longer_one(length):
    (q, k, v), grad = inputs("random", 4, 4, 64)
    grad[:, :, length:] = 0
    longer = run(partial(lssar, p=15), (q, k, v), grad, FP32)
    short = [x[:, :, :length] for x in (q, k, v, grad)]
    shorter = run(partial(lssar, p=15), short[:3], short[3], FP32)
    for a, b in zip(longer, shorter, strict=True):
        assert torch.allclose(a[:, :, :length], b, atol=1e-5)


def test_accuracy_in_rows_of_16k_keys():
    check("random", 2, 16384, 64, 15, heads=1)


def test_accuracy_with_adaptive_p():
    check("random", 90, 90, 64, get_mechanism("lssar", alpha=0.5, train_length=40))


@pytest.mark.parametrize("p", [1, 15, 2.5])
def test_identical_keys_are_averaged_with_finite_gradients(p):
    (q, _, v), grad = inputs("random", 70, 70, 64)
    k = torch.randn(1, 2, 1, 64).expand(1, 2, 70, 64)
    out, *grads = run(partial(lssar, p=p), (q, k, v), grad, FP32)
    mean = v.cumsum(2) / torch.arange(1, 71)[:, None]
    assert torch.allclose(out, mean, atol=1e-5)
    stage_one = run(partial(lssar, p=None, backend="eager"), (q, k, v), grad, torch.float64)
    # The first three rows are raised to the power; all others have stage one's gradient.
    assert torch.allclose(grads[0][:, :, 3:].double(), stage_one[1][:, :, 3:], atol=1e-6)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_zero_vectors_leave_everything_finite(dtype):
    (q, k, v), grad = inputs("random", 20, 20, 64)
    q[:, :, [0, 7]] = 0
    k[:, :, [0, 5, 19]] = 0
    results = run(partial(lssar, p=15), (q, k, v), grad, dtype)
    assert all(x.isfinite().all() for x in results)


def test_saturated_rows_have_vanishing_gradients():
    (_, k, v), grad = inputs("random", 40, 40, 64)
    _, dq, dk, _ = run(partial(lssar, p=30), (k, k, v), grad, FP32)
    assert dq[:, :, 8:].abs().max() < 1e-3 and dk.isfinite().all()


def test_decode_equals_prefill():
    (q, k, v), _ = inputs("random", 70, 70, 64)
    whole = lssar(q, k, v, p=15)
    step = lssar(q[:, :, -1:], k, v, p=15)
    assert torch.allclose(whole[:, :, -1:], step, atol=1e-6)


@pytest.mark.parametrize("p", [1, 3, 15])
def test_the_naive_form_of_the_kernels_is_the_reference_with_its_gradients(p):
    tensors, grad = inputs("random", 50, 50, 24)
    exact = run(partial(lssar, backend="eager", p=p), tensors, grad, torch.float64)
    found = triton_naive.attention(*(x.double() for x in (*tensors, grad)), p)
    for name, a, b in zip(NAMES, found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


def test_accuracy_of_a_few_rows_over_keys_in_parts():
    """The parts that a GPU splits a cache into, and with them those of three ranks."""
    cases = itertools.product(("lssar", "lssa", "softmax-reweighted"), (FP32, BF16, FP16), (1, 5))
    for name, dtype, rows in cases:
        m = MECHANISMS[name]
        (q, k, v), _ = inputs("random", rows, 301, 24, heads=8, groups=2)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        exact = attend(q.double(), k.double(), v.double(), m, backend="eager")
        with torch.no_grad():
            whole = attend(q, k, v, m, backend="triton")
        places = [0, 70, 200]
        keys = k.split([70, 130, 101], dim=2)
        values = v.split([70, 130, 101], dim=2)
        ranks = list(zip(places, keys, values, strict=True))
        sums = torch.cat([key_parts.row_sums(q, x, m, at, 301) for at, x, _ in ranks], dim=1)
        found = [key_parts.row_values(q, x, y, m, sums, at, 301) for at, x, y in ranks]
        parts = torch.cat([x for x, _ in found])
        sizes = torch.cat([x for _, x in found], dim=1)
        split = key_parts.combine(parts, sizes, q, m)
        for out in (whole, split):
            error = ((out.double() - exact).norm() / exact.norm()).item()
            assert error < (torch.finfo(dtype).eps if dtype != FP32 else 2e-6), (name, dtype, rows)
        if name != "softmax-reweighted":  # whose exp is relative to its largest
            scores = (
                math.log(24)
                * math.log(301)
                * torch.cosine_similarity(
                    q[:, :, -1:, None].double(),
                    k.repeat_interleave(4, 1)[:, :, None].double(),
                    dim=-1,
                )
            )
            mean = torch.nn.functional.softplus(scores).mean(-1)[:, :, 0] / math.log(2)
            torch.testing.assert_close(
                sums[0, :, :, :, -1].sum(0).double() / 301, mean, rtol=1e-3, atol=1e-4
            )


def test_keys_in_parts_refuse_what_they_cannot_split():
    q = torch.randn(1, 2, 1, 16)
    k = torch.randn(1, 2, 9, 16)
    for call in (
        lambda: key_parts.row_sums(q, k, get_mechanism("lssar", window=3), 0, 9),
        lambda: key_parts.row_sums(q, k, MECHANISMS["lssar"], 1, 9),
        lambda: key_parts.row_sums(q.expand(1, 2, 65, 16), k, MECHANISMS["lssar"], 0, 9),
    ):
        with pytest.raises(UserError, match="keys in parts"):
            call()


def test_strided_heads_equal_contiguous_ones():
    packed = torch.randn(2, 33, 3, 2, 20)  # (B, L, qkv, H, d), as one projection makes them
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    grad = torch.randn(2, 33, 2, 20).transpose(1, 2)

    attention = partial(lssar, p=3)
    strided = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*strided)
    out.backward(grad)
    contiguous = run(attention, [x.contiguous() for x in (q, k, v)], grad, FP32)
    for a, b in zip([out.detach(), *(x.grad for x in strided)], contiguous, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_offsets_beyond_32_bits_are_right(dim, tmp_path):
    """Strides that fit in 32 bits, and places that do not. A sparse file takes no memory."""
    shape, stride = [3, 3, 20, 16], [3 * 20 * 16, 20 * 16, 16, 1]
    stride[dim] = 2**31 // (shape[dim] - 1) + 16
    size = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    tensors, grad = inputs("random", 20, 20, 16, batch=3, heads=3)
    far = []
    for name, near in zip("qkvg", (*tensors, grad), strict=True):
        storage = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=FP16)
        far.append(storage.as_strided(shape, stride).copy_(near))
    leaves = [x.detach().requires_grad_() for x in far[:3]]
    out = lssar(*leaves, p=15)
    found = [out.detach(), *torch.autograd.grad(out, leaves, far[3])]
    expected = run(partial(lssar, p=15), tensors, grad, FP16)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("most", ["MOST_HEADS", "MOST_STATISTICS"])
def test_launches_that_are_too_large_are_several(most, monkeypatch):
    tensors, grad = inputs("random", 3, 5, 16, batch=3, heads=2, groups=1)
    attention = partial(attend, mechanism="lssar", first=torch.randint(0, 5, (3, 3)))
    whole = run(partial(attention, backend="triton"), tensors, grad, FP32)
    monkeypatch.setattr(triton_op, most, 4 if most == "MOST_HEADS" else 4 * 3)
    parts = run(partial(attention, backend="triton"), tensors, grad, FP32)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    monkeypatch.setattr(triton_op, most, 1)
    with pytest.raises(UserError, match=r"2 heads and 3 rows is too large.*rowblock"):
        attend(*tensors, "lssar", backend="triton")


def test_a_result_is_never_laid_out_with_rows_too_far_apart():
    """Sequence first, as some models have it: each row is as far from the next as the batch."""
    for batch in (1023, 1024):
        q = torch.empty(3, batch, 64, 128, device="meta").permute(1, 2, 0, 3)
        assert fused.room_like(q).stride(2) == (batch * 64 * 128 if batch < 1024 else 128)


def test_nothing_of_size_l_squared_is_saved():
    def saved(length):
        sizes = []

        def pack(x):
            sizes.append(x.numel())
            return x

        (q, k, v), _ = inputs("random", length, length, 16, heads=1)
        q.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            lssar(q, k, v, p=15)
        return sum(sizes)

    assert saved(128) == 2 * saved(64)


@pytest.mark.parametrize("first", [None, torch.tensor([[0, 7, 5, 9, 8]])])
@pytest.mark.parametrize(("p", "dtype"), [(0.0, FP32), (3.0, BF16)])
def test_operators_pass_opcheck(p, dtype, first):
    (q, k, v), grad = inputs("random", 5, 9, 16, groups=1, d_v=8)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    forward, backward = torch.ops.lssar.triton_forward_v5, torch.ops.lssar.triton_backward_v5
    phi, flags = ("softplus", fused.COSINE | fused.L1) if p else ("exp", fused.L1)
    asked = (0, fused.PHI.index(phi), flags, p, 0.0, 0.0, 1024)
    out, *rest = forward(q, k, v, first, *asked, True)
    saved = (out, *rest)
    # The backward has no derivative of its own to check.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(backward, (grad, q, k, v, first, *saved, *asked), test_utils=checks)
    torch.library.opcheck(forward, (q, k, v, first, *asked, False), test_utils=checks)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*leaves, first, *asked, True))


def attend_15(q, k, v):
    return lssar(q, k, v, p=15)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_compiled_and_checkpointed_calls_equal_the_plain_one(dtype):
    tensors, grad = inputs("random", 9, 9, 16)
    plain = run(attend_15, tensors, grad, dtype)
    graphs = []
    compiled = torch.compile(attend_15, backend=recording(graphs), fullgraph=True)
    for other in (
        compiled,
        lambda *t: checkpoint(attend_15, *t, use_reentrant=False),
        lambda *t: checkpoint(attend_15, *t, use_reentrant=True),
    ):
        for a, b in zip(plain, run(other, tensors, grad, dtype), strict=True):
            assert torch.equal(a, b)
    assert [node_counts(g) for g in graphs] == [(1, 0), (0, 1)]


def recording(graphs):
    """Compile by running the forward and backward graphs as they are, and keep them."""

    def keep(graph, _):
        graphs.append(graph)
        return graph

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def node_counts(graph):
    targets = [str(node.target) for node in graph.graph.nodes]
    return tuple(sum(f"triton_{way}" in t for t in targets) for way in ("forward", "backward"))


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_autocast_rounds_the_input_and_returns_gradients_in_its_own_type(dtype):
    tensors, grad = inputs("random", 9, 9, 16)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype):
        out = attend_15(*leaves)
    out.backward(grad.to(dtype))
    expected = run(attend_15, tensors, grad, dtype)
    assert out.dtype == dtype and all(x.grad.dtype == FP32 for x in leaves)
    for a, b in zip([out.detach(), *(x.grad for x in leaves)], expected, strict=True):
        assert torch.equal(a, b.to(a.dtype))


def test_mistakes_are_refused_in_one_line():
    q = torch.randn(1, 1, 4, 16)
    for call in (
        lambda: lssar(q, q, q.half(), p=15),
        lambda: lssar(q, q, torch.randn(1, 1, 4, 300), p=15),
        lambda: attend(q, q, q, get_mechanism("lssar", numerics="naive"), backend="triton"),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("p", [None, 15])
def test_the_mean_of_finite_values_is_finite(p, dtype):
    (q, k, v), _ = inputs("random", 70, 70, 64)
    v = (3e38 * v.clamp(-1, 1)).to(dtype)
    out = lssar(q.to(dtype), k.to(dtype), v, p=p)
    exact = lssar(q.to(dtype).double(), k.to(dtype).double(), v.double(), "eager", p=p)
    assert (out.double() - exact).norm() / exact.norm() < 32 * torch.finfo(dtype).eps


def test_flat_rows_are_those_of_the_reference():
    q, k, v = cpu_kernel.flat_row()
    mean = v.mean(2, keepdim=True)
    torch.testing.assert_close(lssar(q, k, v, p=15), mean, rtol=0, atol=1e-5)
