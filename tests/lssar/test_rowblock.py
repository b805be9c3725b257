"""lssar/rowblock.py: the eager form in linear memory, forward and backward."""

import pytest
import torch
from cases import cases
from largest_tensor import LargestTensor

from lssar import rowblock
from lssar.backends import attend
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.spans import window

NAMES = tuple(MECHANISMS)
SHARPENED = tuple(n for n, m in MECHANISMS.items() if m.sharpened)


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks of sixteen rows, the least there is, so that short inputs have many."""
    monkeypatch.setattr(rowblock, "BLOCK_ENTRIES", {"cpu": 1, "default": 1})


def run(backend, mechanism, shape, dtype=torch.float64, seed=0):
    """Return output and all gradients of a random call; shape is (B, H, Lq, Lk, d)."""
    batch, heads, lq, lk, d = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (draw(batch, heads, length, d).requires_grad_() for length in (lq, lk, lk))
    leaves, params = [q, k, v], None
    if mechanism.parameter_init is not None:
        params = (0.5 + torch.rand(heads, generator=generator)).to(torch.float64).requires_grad_()
        leaves.append(params)
    out = attend(q, k, v, mechanism, head_scale=params, backend=backend)
    return out, *torch.autograd.grad(out, leaves, draw(*out.shape))


def assert_equal_to_eager(mechanism, shape, dtype=torch.float64, **tolerance):
    for got, expected in zip(
        run("rowblock", mechanism, shape, dtype), run("eager", mechanism, shape, dtype), strict=True
    ):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **tolerance)


def test_every_mechanism_equals_eager_with_gradients(small_blocks):
    for name, shape in cases(NAMES, [(2, 2, 63, 63, 20), (1, 3, 33, 70, 20)]):
        assert_equal_to_eager(MECHANISMS[name], shape, rtol=1e-9, atol=1e-10)


def test_odd_lengths(small_blocks):
    for lengths, name in cases(
        [(1, 1), (2, 2), (3, 3), (4, 4), (15, 16), (17, 17), (111, 111)],
        ["lssar", "ssmax", "relu-shen", "softmax-recentred-l1"],
    ):
        assert_equal_to_eager(MECHANISMS[name], (1, 2, *lengths, 64), rtol=1e-9, atol=1e-10)


def test_windows(small_blocks):
    names = ["lssar", "softmax", "ssmax", "relu-shen", "sigmoid-logn"]
    for width, name in cases([1, 2, 15, 16, 17, 40, 63, 100], names):
        mechanism = get_mechanism(name, window=width)
        assert_equal_to_eager(mechanism, (1, 2, 63, 63, 20), rtol=1e-9, atol=1e-10)
        assert_equal_to_eager(mechanism, (1, 2, 37, 70, 20), rtol=1e-9, atol=1e-10)


def test_adaptive_exponent_and_both_numerics(small_blocks):
    for name, numerics in cases(SHARPENED, ["safe", "naive"]):
        mechanism = get_mechanism(name, p=4, alpha=0.5, train_length=20, numerics=numerics)
        assert_equal_to_eager(mechanism, (1, 2, 63, 70, 20), rtol=1e-9, atol=1e-10)


def test_the_current_length_is_that_of_the_call_not_of_the_block(small_blocks):
    for name in cases(["sigmoid", "relu-length"]):
        mechanism = get_mechanism(name, length="current")
        assert_equal_to_eager(mechanism, (1, 2, 50, 63, 20), rtol=1e-9, atol=1e-10)


def test_lower_precision(small_blocks):
    for (dtype, tolerance), name in cases(
        [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)],
        ["lssar", "lssa", "softmax-reweighted", "ssmax", "gelu-l1"],
    ):
        for got, exact in zip(
            run("rowblock", MECHANISMS[name], (1, 2, 63, 63, 20), dtype),
            run("eager", MECHANISMS[name], (1, 2, 63, 63, 20), dtype),
            strict=True,
        ):
            assert got.dtype == exact.dtype
            error = (got.double() - exact.double()).norm() / exact.double().norm()
            assert error < tolerance


def test_one_query_over_a_long_cache():
    for name in cases(NAMES):
        assert_equal_to_eager(MECHANISMS[name], (1, 2, 1, 2500, 20), rtol=1e-9, atol=1e-10)


def test_inputs_that_are_not_contiguous_and_a_gradient_of_some_only(small_blocks):
    q, k, v = torch.randn(3, 1, 40, 2, 20, dtype=torch.float64).transpose(2, 3).unbind(0)
    k = k.clone().requires_grad_()
    out = attend(q, k, v, "lssar", backend="rowblock")
    expected = attend(q, k, v, "lssar", backend="eager")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), k)[0] for o in (out, expected)))


def test_decay_sinks_and_spans_equal_eager_with_gradients(small_blocks):
    examples = [
        ("softmax", {}, False),
        ("lssar", {"p": 3}, True),
        ("stick-breaking", {"window": 21}, True),
        ("cos-ssmax", {"window": 9, "sinks": 3}, False),
        ("softmax-reweighted", {"window": 30, "sinks": 40, "p": 3}, False),
    ]
    for (name, settings, spans), shared in cases(examples, [False, True]):
        sizes = ((4, 50), (2, 70), (2, 70))
        q, k, v = (torch.randn(2, *size, 12, dtype=torch.float64) for size in sizes)
        decay = -torch.rand(1 if shared else 2, 4, 70, dtype=torch.float64)
        first = torch.randint(0, 60, (2, 50)) if spans else None
        found = []
        for backend in ("rowblock", "eager"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, decay)]
            options = {"first": first, "decay": leaves[3], "backend": backend}
            out = attend(*leaves[:3], get_mechanism(name, **settings), **options)
            found.append((out, *torch.autograd.grad(out, leaves, torch.cos(out.detach()))))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_blocks_whose_rows_are_all_padding_equal_eager(small_blocks):
    """Such a block has fewer keys than rows."""
    for name, decays in cases(NAMES, [False, True]):
        q, k, v = torch.randn(3, 2, 2, 60, 12, dtype=torch.float64).unbind()
        decay = -torch.rand(2, 2, 60, dtype=torch.float64) if decays else None
        first = torch.tensor([[41], [7]]).expand(2, 60)
        got, expected = (
            attend(q, k, v, name, first=first, decay=decay, backend=backend)
            for backend in ("rowblock", "eager")
        )
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        assert not got[0, :, :41].any()


def test_nothing_of_size_length_squared_exists(monkeypatch):
    length, d = 1024, 16
    decay = {"decay": -torch.rand(1, 1, length)}
    monkeypatch.setattr(rowblock, "BLOCK_ENTRIES", {"cpu": 2**17, "default": 2**17})
    examples = [("lssar", {}), ("softmax-recentred-l1", {}), ("stick-breaking", {})]
    for name, options in cases([*examples, ("softmax", decay)]):
        q, k, v = (torch.randn(1, 1, length, d).requires_grad_() for _ in range(3))
        with LargestTensor() as largest:
            attend(q, k, v, name, **options, backend="rowblock").sum().backward()
        assert largest.elements == 2**17
        with LargestTensor() as largest:
            attend(q, k, v, name, **options, backend="eager").sum().backward()
        assert largest.elements == length * length  # the measure does see what it should


def test_a_window_makes_the_cost_linear_too(monkeypatch):
    monkeypatch.setattr(rowblock, "BLOCK_ENTRIES", {"cpu": 2**14, "default": 2**14})
    q, k = torch.randn(2, 1, 1, 4096, 8)
    blocks = list(rowblock._blocks(q, k, window(64, 4096)[None], get_mechanism("lssar")))
    assert sum(size(b.rows) * size(b.keys) for b in blocks) < 4096 * 64 * 4
    assert [b.rows.start for b in blocks] == [0, *(b.rows.stop for b in blocks[:-1])]
    assert blocks[-1].rows.stop == 4096


def size(part: slice) -> int:
    return part.stop - part.start


def test_blocks_cover_every_row_of_every_head_once_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(rowblock, "BLOCK_ENTRIES", {"default": 2**17})
    for heads, length in cases([(7, 100), (3, 1000), (50, 17), (2, 5000)]):
        q, k = torch.zeros(2, 1, heads, length, 2)
        seen = torch.zeros(heads, length)
        for block in rowblock._blocks(q, k, None, get_mechanism("lssar")):
            seen[block.heads, block.rows] += 1
            assert block.keys == slice(0, block.rows.stop)
            assert size(block.heads) * size(block.rows) * length <= 2**17
        assert (seen == 1).all()


def test_long_calls_take_row_blocks_by_themselves():
    q, k, v = (torch.randn(1, 3, 2048, 8) for _ in range(3))
    with LargestTensor() as largest:
        attend(q, k, v, "mish-l1")
    assert largest.elements < 2048 * 2048


def test_a_second_derivative_is_refused_rather_than_wrong():
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    out = attend(q, k, v, "lssa", backend="rowblock")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
