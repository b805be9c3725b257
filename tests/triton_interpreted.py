"""The Triton kernels on CPU tensors, in Triton's interpreter, against float64.

Run by tests/test_kernel_triton.py in a process of its own, as TRITON_INTERPRET=1 must be set before
triton is first imported. By hand: TRITON_INTERPRET=1 pytest tests/triton_interpreted.py

The interpreter multiplies tiles with BLAS, which rounds q k' and (k q')' differently where a GPU
does not. Inputs on a coarse grid make every score exact in fp32, whatever the order of its sum.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import UserError
from kernels import triton_op

NAMES = ("out", "dq", "dk", "dv")
POWERS = (None, 1, 3, 15, 2.5, 30)


def eager(q, k, v, p, alpha=0.0, train_length=1024):
    """The paper's formulas with the whole matrix, in the type of q."""
    rows, keys, d = q.shape[-2], k.shape[-2], q.shape[-1]
    n = torch.arange(keys - rows + 1, keys + 1, dtype=q.dtype)[:, None]
    visible = torch.arange(1, keys + 1) <= n
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    a = F.softplus(math.log(d) * n.log() * cosine, threshold=60) * visible
    a = a / a.sum(-1, keepdim=True)
    if p is not None:
        exponent = torch.where(
            n > train_length, p * (1 + alpha * ((n / train_length) ** 0.5 - 1)), p
        )
        y = torch.relu(n * a - (n > 3).to(q.dtype)) * visible
        z = (y / y.detach().amax(-1, keepdim=True)) ** exponent
        a = z / z.sum(-1, keepdim=True)
    return a @ v


def run(attend, tensors, grad, dtype):
    """Output and gradients of q, k, v."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    out.backward(grad.to(dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def errors(results, exact):
    return [
        ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for a, b in zip(results, exact, strict=True)
    ]


def grid(x, step):
    return (x / step).round() * step


def inputs(kind, rows, keys, d, batch=1, heads=2):
    q, k, v, grad = (torch.randn(batch, heads, n, d) for n in (rows, keys, keys, rows))
    if kind == "near-uniform":  # deviations of 2^-11 around one key
        q, k = grid(q, 2**-3), grid(k[:, :, :1], 2**-5) + grid(k, 2**-2) * 2**-9
    elif kind == "peaked":  # every query looks for its own key
        q, k = grid(k[:, :, -rows:] + 2 * q, 2**-5), grid(k, 2**-5)
    elif kind == "huge":
        q, k = grid(q, 2**-5) * 2**13, grid(k, 2**-5) * 2**20
    else:
        q, k = grid(q, 2**-5), grid(k, 2**-5)
    return (q, k, v), grad


def check(kind, rows, keys, d, p, **settings):
    tensors, grad = inputs(kind, rows, keys, d, heads=2 if rows > 8 else 16 if keys < 8 else 4)
    exact = run(lambda *t: eager(*t, p, **settings), tensors, grad, torch.float64)
    lost = errors(run(lambda *t: eager(*t, p, **settings), tensors, grad, torch.float32), exact)
    kernel = run(lambda *t: triton_op.lssar(*t, p=p, **settings), tensors, grad, torch.float32)
    # The floor is three roundings of fp32: below it both are as good as exact.
    for name, ours, theirs in zip(NAMES, errors(kernel, exact), lost, strict=True):
        assert ours <= 2 * theirs + 2e-7, f"{name}: {ours:.1e}, eager fp32 loses {theirs:.1e}"


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize(("rows", "keys", "d"), [(111, 111, 64), (63, 63, 20), (5, 70, 128)])
def test_accuracy_on_random_input_is_eagers(rows, keys, d, p):
    check("random", rows, keys, d, p)


@pytest.mark.parametrize("p", [1, 15, 2.5])
@pytest.mark.parametrize("kind", ["peaked", "near-uniform", "huge"])
def test_accuracy_on_hostile_input_is_eagers(kind, p):
    check(kind, 111, 111, 64, p)


@pytest.mark.parametrize("p", [None, 15, 2.5])
def test_accuracy_in_the_first_rows(p):
    check("random", 4, 4, 64, p)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_shortest_sequences_equal_the_rows_of_a_longer_one(length):
    (q, k, v), grad = inputs("random", 4, 4, 64)
    grad[:, :, length:] = 0
    longer = run(lambda *t: triton_op.lssar(*t, p=15), (q, k, v), grad, torch.float32)
    short = [x[:, :, :length] for x in (q, k, v, grad)]
    shorter = run(lambda *t: triton_op.lssar(*t, p=15), short[:3], short[3], torch.float32)
    for a, b in zip(longer, shorter, strict=True):
        assert torch.allclose(a[:, :, :length], b, atol=1e-5)


@pytest.mark.parametrize("p", [None, 15])
def test_accuracy_in_rows_of_16k_keys(p):
    (q, k, v), _ = inputs("random", 3, 16384, 64, heads=1)
    exact = eager(q.double(), k.double(), v.double(), p)
    ours, theirs = errors([triton_op.lssar(q, k, v, p=p), eager(q, k, v, p)], [exact, exact])
    assert ours <= 2 * theirs + 2e-7, f"{ours:.1e}, eager fp32 loses {theirs:.1e}"


def test_accuracy_with_adaptive_p():
    check("random", 90, 90, 64, 15, alpha=0.5, train_length=40)


@pytest.mark.parametrize("p", [None, 1, 15])
def test_half_precision_inputs_lose_only_their_own_rounding(p):
    (q, k, v), grad = inputs("random", 63, 63, 64)
    tensors = [x.half() for x in (q, k, v)]
    exact = run(lambda *t: eager(*t, p), tensors, grad.half(), torch.float64)
    kernel = run(lambda *t: triton_op.lssar(*t, p=p), tensors, grad.half(), torch.float16)
    assert max(errors(kernel, exact)) < 2**-10


@pytest.mark.parametrize("p", [1, 15, 2.5])
def test_identical_keys_are_averaged_with_finite_gradients(p):
    (q, _, v), grad = inputs("random", 70, 70, 64)
    k = torch.randn(1, 2, 1, 64).expand(1, 2, 70, 64)
    out, *grads = run(lambda *t: triton_op.lssar(*t, p=p), (q, k, v), grad, torch.float32)
    mean = v.cumsum(2) / torch.arange(1, 71)[:, None]
    assert torch.allclose(out, mean, atol=1e-5)
    stage_one = run(lambda *t: eager(*t, None), (q, k, v), grad, torch.float64)
    # The first three rows are raised to the power; all others have stage one's gradient.
    assert torch.allclose(grads[0][:, :, 3:].double(), stage_one[1][:, :, 3:], atol=1e-6)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_vectors_leave_everything_finite(dtype):
    (q, k, v), grad = inputs("random", 20, 20, 64)
    q[:, :, [0, 7]] = 0
    k[:, :, [0, 5, 19]] = 0
    results = run(lambda *t: triton_op.lssar(*t, p=15), (q, k, v), grad, dtype)
    assert all(x.isfinite().all() for x in results)


def test_saturated_rows_have_vanishing_gradients():
    (_, k, v), grad = inputs("random", 40, 40, 64)
    _, dq, dk, _ = run(lambda *t: triton_op.lssar(*t, p=30), (k, k, v), grad, torch.float32)
    assert dq[:, :, 8:].abs().max() < 1e-3 and dk.isfinite().all()


def test_decode_equals_prefill():
    (q, k, v), _ = inputs("random", 70, 70, 64)
    whole = triton_op.lssar(q, k, v, p=15)
    step = triton_op.lssar(q[:, :, -1:], k, v, p=15)
    assert torch.allclose(whole[:, :, -1:], step, atol=1e-6)


def test_strided_heads_equal_contiguous_ones():
    packed = torch.randn(2, 33, 3, 2, 20)  # (B, L, qkv, H, d), as one projection makes them
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    grad = torch.randn(2, 33, 2, 20).transpose(1, 2)

    def attend(*t):
        return triton_op.lssar(*t, p=3)

    strided = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*strided)
    out.backward(grad)
    contiguous = run(attend, [x.contiguous() for x in (q, k, v)], grad, torch.float32)
    for a, b in zip([out.detach(), *(x.grad for x in strided)], contiguous, strict=True):
        assert torch.equal(a, b)


def test_nothing_of_size_l_squared_is_saved():
    def saved(length):
        sizes = []

        def pack(x):
            sizes.append(x.numel())
            return x

        (q, k, v), _ = inputs("random", length, length, 16, heads=1)
        q.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            triton_op.lssar(q, k, v, p=15)
        return sum(sizes)

    assert saved(128) == 2 * saved(64)


def test_operators_pass_opcheck():
    (q, k, v), _ = inputs("random", 5, 9, 16, heads=1)
    torch.library.opcheck(torch.ops.lssa.triton_forward, (q, k, v, None, 0.0, 1024, False))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.lssa.triton_forward, (*leaves, 3.0, 0.0, 1024, True))


def test_compiled_checkpointed_and_autocast_calls_equal_the_plain_one():
    (q, k, v), grad = inputs("random", 9, 9, 16)

    def attend(q, k, v):
        return triton_op.lssar(q, k, v, p=15)

    plain = run(attend, (q, k, v), grad, torch.float32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for other in (compiled, lambda *t: checkpoint(attend, *t, use_reentrant=False)):
        for a, b in zip(plain, run(other, (q, k, v), grad, torch.float32), strict=True):
            assert torch.equal(a, b)
    with torch.autocast("cpu", torch.float16):
        half = attend(q, k, v)
    assert half.dtype == torch.float16 and torch.allclose(half.float(), plain[0], atol=2e-2)


def test_mistakes_are_refused_in_one_line():
    q = torch.randn(1, 1, 4, 16)
    for call in (
        lambda: triton_op.lssar(q, q, q, p=0.5),
        lambda: triton_op.lssar(q, q[:, :, :2], q[:, :, :2], p=15),
        lambda: triton_op.lssar(q, q, q.half(), p=15),
        lambda: triton_op.lssar(q, q, q[..., :8], p=15),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
