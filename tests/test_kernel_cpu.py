"""kernels/cpu.py: exact fused LSSA and LSSAR, against the reference in attention.py."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attention import attend, get_mechanism
from kernels import cpu

ROOT = Path(__file__).parent.parent
NAMES = ("out", "dq", "dk", "dv")

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


def mechanism(p, alpha=0.0, train_length=1024):
    if p is None:
        return get_mechanism("lssa")
    return get_mechanism("lssar", p=p, alpha=alpha, train_length=train_length)


def eager(q, k, v, **options):
    return attend(q, k, v, mechanism(**options), backend="eager")


def results(attention, tensors, dout, dtype, **options):
    """out, dq, dk, dv in float64, computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = attention(*leaves, **options)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype)))]


def distance(got, expected):
    return ((got - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_as_accurate_as_eager(tensors, *neighbours, slack=2e-7, names=NAMES, **options):
    """Errors against float64 are at most twice those of eager float32, and all is finite.

    `neighbours`: the same input rounded differently. A handful of rows, or entries on the edge of
    the relu at p = 1, are a single draw of rounding noise; eager's worst over a few such draws is
    what it can be expected to lose.
    """
    dout = torch.randn_like(tensors[0])
    exact = results(eager, tensors, dout, torch.float64, **options)
    plain = [results(eager, x, dout, torch.float32, **options) for x in (tensors, *neighbours)]
    fused = results(cpu.lssar, tensors, dout, torch.float32, **options)
    for name, e, f, *p in zip(NAMES, exact, fused, *plain, strict=True):
        assert f.isfinite().all(), name
        if name in names:
            assert distance(f, e) <= 2 * max(distance(x, e) for x in p) + slack, name


def rounded(*tensors):
    return [[x * (1 + 2**-24 * torch.randn_like(x)) for x in tensors] for _ in range(4)]


def draw(*shape, lk=None):
    b, h, lq, d = shape
    return torch.randn(b, h, lq, d), *(torch.randn(b, h, lk or lq, d) for _ in range(2))


@pytest.mark.parametrize("d", [1, 2, 5, 8, 24, 33, 64, 100, 256])
def test_head_dimensions_odd_and_large(d):
    assert_as_accurate_as_eager(draw(1, 2, 203, d), p=15)


@pytest.mark.parametrize("p", [None, 1, 1.5, 2, 3, 7.3, 15, 30, 41])
def test_powers_whole_and_real(p):
    assert_as_accurate_as_eager(draw(1, 2, 301, 64), p=p)


@pytest.mark.parametrize("p", [None, 1, 15])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 47, 49, 193])
def test_short_and_uneven_lengths(length, p):
    assert_as_accurate_as_eager(draw(2, 3, length, 31), p=p, slack=1e-6)


@pytest.mark.parametrize("lq, lk", [(1, 1000), (2, 333), (4, 400), (5, 401), (50, 1001)])
@pytest.mark.parametrize("p", [None, 15])
def test_decode_shapes(lq, lk, p):
    assert_as_accurate_as_eager(draw(2, 2, lq, 40, lk=lk), p=p, slack=1e-6)


def test_decode_equals_prefill():
    q, k, v = draw(1, 3, 500, 64)
    full = cpu.lssar(q, k, v, p=15)
    for lq in (1, 3, 60):
        tail = cpu.lssar(q[:, :, -lq:], k, v, p=15)
        torch.testing.assert_close(tail, full[:, :, -lq:], rtol=2e-5, atol=2e-6)


def test_adaptive_power():
    options = {"p": 15, "alpha": 0.3, "train_length": 100}
    tensors = draw(1, 2, 400, 64)
    assert_as_accurate_as_eager(tensors, **options)
    assert distance(cpu.lssar(*tensors, **options), cpu.lssar(*tensors, p=15)) > 1e-2


def hostile(kind):
    q, k, v = draw(1, 2, 400, 64)
    base = torch.randn(1, 2, 1, 64)
    if kind == "peaked":
        q = 3 * k + 0.3 * q
    elif kind == "near-uniform":
        k = base + 1e-2 * k
    elif kind == "all scores far below zero":
        q, k = 0.2 * q - base, base + 0.2 * k
    elif kind == "all scores high":
        q, k = 0.2 * q + base, base + 0.2 * k
    elif kind == "one low key, so nearly every entry counts":
        k = base + 0.1 * k
        k[:, :, 0] = -base[:, :, 0]
    elif kind == "huge norms":
        q, k, v = 1e15 * q, 1e12 * k, 1e6 * v
    elif kind == "tiny norms":
        q, k, v = 1e-9 * q, 1e-8 * k, 1e-6 * v
    return q, k, v


@pytest.mark.parametrize("p", [None, 1, 15])
@pytest.mark.parametrize(
    "kind",
    [
        "peaked",
        "near-uniform",
        "all scores far below zero",
        "all scores high",
        "one low key, so nearly every entry counts",
        "huge norms",
        "tiny norms",
    ],
)
def test_hostile_inputs_lose_no_more_than_eager(kind, p):
    tensors = hostile(kind)
    assert_as_accurate_as_eager(tensors, *rounded(*tensors), p=p, slack=1e-6)


def test_rows_of_16k_keys():
    q, k, v = draw(1, 1, 60, 64, lk=16384)
    assert_as_accurate_as_eager((q, k, v), p=15)
    assert_as_accurate_as_eager((q, k, v), p=None)


@pytest.mark.parametrize("p", [1, 15, 7.3])
def test_rows_of_identical_keys_are_uniform_with_the_stage_one_gradient(p):
    q, _, v = draw(1, 2, 150, 64)
    k = torch.randn(1, 2, 1, 64).expand(1, 2, 150, 64)
    dout = torch.randn_like(q)
    out, dq, dk, dv = results(cpu.lssar, (q, k, v), dout, torch.float32, p=p)
    exact = results(eager, (q, k, v), dout, torch.float64, p=p)
    count = torch.arange(1, 151).view(-1, 1)
    assert distance(out, v.double().cumsum(2) / count) < 1e-6
    assert distance(dv, exact[3]) < 1e-6
    assert distance(dk, exact[2]) < 1e-5
    assert dq.abs().max() < 1e-5 * dk.abs().max()


@pytest.mark.parametrize("p", [None, 1, 15])
def test_vectors_of_norm_zero_are_finite(p):
    q, k, v = draw(1, 2, 120, 64)
    q[:, :, 40:50] = 0
    k[:, :, 60:80] = 0
    assert_as_accurate_as_eager((q, k, v), p=p, names=("out", "dv"))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 2),
    h=st.integers(1, 3),
    lq=st.integers(8, 120),
    before=st.integers(0, 250),
    d=st.integers(1, 80),
    p=st.one_of(st.none(), st.integers(1, 32), st.floats(1, 32)),
    spread=st.sampled_from([1.0, 0.3, 0.1]),
    alpha=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(b, h, lq, before, d, p, spread, alpha, seed):
    torch.manual_seed(seed)
    q, k, v = draw(b, h, lq, d, lk=lq + before)
    k = torch.randn(b, h, 1, d) + spread * k
    options = {"p": p, "alpha": alpha, "train_length": 77} if p else {"p": None}
    assert_as_accurate_as_eager((q, k, v), *rounded(q, k, v), slack=1e-6, **options)


def layouts(x):
    """The same numbers, laid out in other ways."""
    l, d = x.shape[2:]
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.cat([x, x, x], -1)[..., d : 2 * d]
    yield x.mT.contiguous().mT
    yield F.pad(x, (0, 0, 0, 5))[:, :, :l]


def test_every_layout_gives_the_same_bits():
    q, k, v = draw(2, 3, 70, 24)
    expected = results(cpu.lssar, (q, k, v), q, torch.float32, p=15)
    for tensors in zip(layouts(q), layouts(k), layouts(v), strict=True):
        got = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
        assert all(map(torch.equal, got, expected))
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 40, 16))
    cpu.lssar(q, k, v, p=15).sum().backward()  # an expanded gradient: every stride is zero
    assert q.grad.isfinite().all()


def test_output_and_gradients_are_laid_out_as_the_inputs():
    leaves = [x.transpose(1, 2).requires_grad_() for x in draw(2, 50, 3, 16)]
    out = cpu.lssar(*leaves, p=15)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *grads))


def test_threads_change_no_bit_of_the_output_and_dq():
    tensors = draw(1, 3, 700, 32)
    one = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    torch.set_num_threads(2)
    try:
        two = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
        again = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, two, again))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert max(map(distance, two, one)) < 1e-6


@pytest.mark.parametrize("threads, shape", [(3, (1, 1, 1000, 8)), (7, (5, 1, 500, 16))])
def test_any_division_among_threads_gives_the_same_result(threads, shape):
    tensors = draw(*shape)
    one = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    torch.set_num_threads(threads)
    try:
        many = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])
    assert max(map(distance, many, one)) < 1e-6


def test_training_follows_the_eager_loss_curve():
    tokens = torch.randint(20, (4, 65))

    def curve(attention):
        torch.manual_seed(1)
        modules = [torch.nn.Embedding(20, 32), torch.nn.Embedding(64, 32)]
        modules += [torch.nn.Linear(32, 96), torch.nn.Linear(32, 20)]
        embed, position, project, head = modules
        optimiser = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
        losses = []
        for _ in range(50):
            x = project(embed(tokens[:, :-1]) + position.weight)
            q, k, v = x.view(4, 64, 2, 48).transpose(1, 2).chunk(3, -1)
            out = attention(q, k, v, p=15).transpose(1, 2).flatten(2)
            loss = F.cross_entropy(head(out).flatten(0, 1), tokens[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    fused = curve(cpu.lssar)
    assert fused[-1] < 0.8 * fused[0]
    torch.testing.assert_close(fused, curve(eager), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in draw(1, 2, 60, 32))
    out = cpu.lssar(q, k, v, p=15)
    assert out.dtype == dtype
    assert torch.equal(out, cpu.lssar(q.float(), k.float(), v.float(), p=15).to(dtype))


def test_autocast_trains_through_the_kernel():
    project = torch.nn.Linear(32, 96)
    x = torch.randn(1, 50, 32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = project(x).view(1, 50, 2, 48).transpose(1, 2).split(16, dim=-1)
        out = cpu.lssar(q, k, v, p=15)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert project.weight.grad.isfinite().all() and project.weight.grad.any()


@pytest.mark.parametrize("p", [0.0, 7.5])
def test_operators_pass_opcheck(p):
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in draw(1, 9, 2, 8))
    torch.library.opcheck(torch.ops.lssar.cpu_forward, (q, k, v, p, 0.1, 4))
    q, k, v = (x.detach() for x in (q, k, v))
    saved = (q, q, k, v, *torch.ops.lssar.cpu_forward(q, k, v, p, 0.1, 4))
    torch.library.opcheck(torch.ops.lssar.cpu_backward, (*saved, p, 0.1, 4))


def test_compiled_graphs_see_one_node_each_way():
    seen = []

    def backend(graph, _):
        seen.append([n.target for n in graph.graph.nodes if "lssar" in str(n.target)])
        return make_boxed_func(graph)

    tensors = draw(1, 2, 30, 8)
    compiled = torch.compile(
        lambda *x: 2 * cpu.lssar(*x, p=15),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=backend),
    )
    got = results(compiled, tensors, tensors[0], torch.float32)
    expected = results(lambda *x: 2 * cpu.lssar(*x, p=15), tensors, tensors[0], torch.float32)
    assert all(map(torch.equal, got, expected))
    ops = torch.ops.lssar
    assert seen == [[ops.cpu_forward.default], [ops.cpu_backward.default]]


def test_checkpointing_recomputes_the_same_bits():
    tensors = draw(1, 2, 60, 16)
    plain = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    saved = results(
        lambda *x: checkpoint(lambda *y: cpu.lssar(*y, p=15), *x, use_reentrant=False),
        tensors,
        tensors[0],
        torch.float32,
    )
    assert all(map(torch.equal, plain, saved))


def test_portable_path_equals_the_vector_path(monkeypatch):
    tensors = draw(1, 2, 250, 40)
    options = [{"p": None}, {"p": 1}, {"p": 15}, {"p": 4.5}]
    vector = [results(cpu.lssar, tensors, tensors[0], torch.float32, **o) for o in options]
    portable = cpu.load("-DLSSAR_PORTABLE")
    monkeypatch.setattr(cpu, "_kernel", lambda: portable)
    for expected, o in zip(vector, options, strict=True):
        got = results(cpu.lssar, tensors, tensors[0], torch.float32, **o)
        assert max(map(distance, got, expected)) < 1e-5


def test_builds_and_agrees_without_openmp(monkeypatch, tmp_path):
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "VARIANTS", ((),))
    tensors = draw(1, 2, 100, 16)
    expected = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    serial = cpu.load()
    monkeypatch.setattr(cpu, "_kernel", lambda: serial)
    got = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    assert max(map(distance, got, expected)) < 1e-5


def ask(code, **environment):
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", f"from kernels import cpu; {code}"]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


def test_without_a_compiler_one_line_says_so(tmp_path):
    shown = ask("print(cpu.unavailable())", PATH=str(tmp_path), CXX="", LSSAR_CACHE=str(tmp_path))
    assert shown.stdout.strip() == ("no C++ compiler found (looked for $CXX, c++, g++, clang++)")
    shown = ask("print(cpu.unavailable())", CXX="no-such-compiler", LSSAR_CACHE=str(tmp_path))
    assert "cannot run the C++ compiler no-such-compiler" in shown.stdout
    assert not list(tmp_path.iterdir())


def test_a_failed_build_says_what_the_compiler_said(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(cpu, "SOURCE", broken)
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path / "cache"))
    with pytest.raises(cpu.Unavailable, match=r"cannot build the kernel: .*error") as raised:
        cpu.load()
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_the_build_is_cached_and_half_files_are_never_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    library = cpu.build("-O0")
    assert [library] == list(tmp_path.iterdir())
    ctypes.CDLL(str(library))
    built = library.stat().st_mtime_ns
    assert cpu.build("-O0") == library and library.stat().st_mtime_ns == built


def test_importing_builds_nothing(tmp_path):
    ask("pass", LSSAR_CACHE=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_refusals_name_the_value():
    q, k, v = draw(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"p = 0\.5"):
        cpu.lssar(q, k, v, p=0.5)
    with pytest.raises(ValueError, match="5 queries need at least as many keys, not 3"):
        cpu.lssar(q, k[:, :, :3], v[:, :, :3], p=15)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        cpu.lssar(q.double(), k, v, p=15)
    with pytest.raises(ValueError, match="head dimension 300"):
        cpu.lssar(*draw(1, 1, 2, 300), p=15)
    with pytest.raises(ValueError, match=r"q must be"):
        cpu.lssar(q, k[..., :4], v, p=15)


def test_empty_batches_and_second_derivatives():
    empty = cpu.lssar(*(torch.empty(0, 2, 5, 8) for _ in range(3)), p=15)
    assert empty.shape == (0, 2, 5, 8)
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 6, 8))
    (dq,) = torch.autograd.grad(cpu.lssar(q, k, v, p=15).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_a_dispatch_mode_sees_the_operator():
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = draw(1, 1, 6, 8)
    plain = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    with Listen():
        heard = results(cpu.lssar, tensors, tensors[0], torch.float32, p=15)
    assert torch.ops.lssar.cpu_forward.default in seen
    assert torch.ops.lssar.cpu_backward.default in seen
    assert all(map(torch.equal, plain, heard))
