"""lssar/cpu.py as an operator: layouts, threads, torch.compile, and how it is built."""

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from cpu_kernel import distance, draw, fused, results
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lssar import cpu, cpu_build
from lssar.backends import attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS
from lssar.spans import window

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


def layouts(x):
    """Yield the same numbers, laid out in other ways."""
    l, d = x.shape[2:]
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.cat([x, x, x], -1)[..., d : 2 * d]
    yield x.mT.contiguous().mT
    yield F.pad(x, (0, 0, 0, 5))[:, :, :l]


def test_every_layout_gives_the_same_bits():
    q, k, v = draw(2, 3, 70, 24)
    expected = results(fused, (q, k, v), q, torch.float32, p=15)
    for tensors in zip(layouts(q), layouts(k), layouts(v), strict=True):
        got = results(fused, tensors, tensors[0], torch.float32, p=15)
        assert all(map(torch.equal, got, expected))
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 40, 16))
    fused(q, k, v, p=15).sum().backward()  # an expanded gradient: every stride is zero
    assert q.grad.isfinite().all()


def test_output_and_gradients_are_laid_out_as_the_inputs():
    leaves = [x.transpose(1, 2).requires_grad_() for x in draw(2, 50, 3, 16)]
    out = fused(*leaves, p=15)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *grads))


def test_threads_change_no_bit_of_the_output_and_dq():
    tensors = draw(1, 3, 700, 32)
    one = results(fused, tensors, tensors[0], torch.float32, p=15)
    torch.set_num_threads(2)
    try:
        two = results(fused, tensors, tensors[0], torch.float32, p=15)
        again = results(fused, tensors, tensors[0], torch.float32, p=15)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, two, again))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert max(map(distance, two, one)) < 1e-6


def test_any_division_among_threads_gives_the_same_result():
    for threads, shape in cases([(3, (1, 1, 1000, 8)), (7, (5, 1, 500, 16))]):
        tensors = draw(*shape)
        one = results(fused, tensors, tensors[0], torch.float32, p=15)
        torch.set_num_threads(threads)
        try:
            many = results(fused, tensors, tensors[0], torch.float32, p=15)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])
        assert max(map(distance, many, one)) < 1e-6


def test_half_precision_is_computed_in_float32():
    for dtype in cases([torch.bfloat16, torch.float16]):
        q, k, v = (x.to(dtype) for x in draw(1, 2, 60, 32))
        out = fused(q, k, v, p=15)
        assert out.dtype == dtype
        assert torch.equal(out, fused(q.float(), k.float(), v.float(), p=15).to(dtype))


def test_autocast_trains_through_the_kernel():
    project = torch.nn.Linear(32, 96)
    x = torch.randn(1, 50, 32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = project(x).view(1, 50, 2, 48).transpose(1, 2).split(16, dim=-1)
        out = fused(q, k, v, p=15)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert project.weight.grad.isfinite().all() and project.weight.grad.any()


def test_operators_pass_opcheck():
    for p, first in cases([0.0, 7.5], [None, torch.tensor([[0, 0, 0, 3, 3, 3, 3, 6, 7]])]):
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in draw(1, 9, 2, 8))
        flags = cpu.fused.L1 | (cpu.fused.COSINE if p else cpu.fused.RECENTRE)
        settings = (5, cpu.fused.PHI.index("softplus" if p else "exp"), flags, p, 0.1, 0.0, 4)
        forward, backward = torch.ops.lssar.cpu_forward_v4, torch.ops.lssar.cpu_backward_v4
        torch.library.opcheck(forward, (q, k, v, first, *settings, True))
        q, k, v = (x.detach() for x in (q, k, v))
        torch.library.opcheck(forward, (q, k, v, first, *settings, False))
        saved = (q, q, k, v, first, *forward(q, k, v, first, *settings, True))
        torch.library.opcheck(backward, (*saved, *settings))


def test_compiled_graphs_see_one_node_each_way():
    seen = []

    def backend(graph, _):
        seen.append([n.target for n in graph.graph.nodes if "lssar" in str(n.target)])
        return make_boxed_func(graph)

    tensors = draw(1, 2, 30, 8)
    compiled = torch.compile(
        lambda *x: 2 * fused(*x, p=15),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=backend),
    )
    got = results(compiled, tensors, tensors[0], torch.float32)
    expected = results(lambda *x: 2 * fused(*x, p=15), tensors, tensors[0], torch.float32)
    assert all(map(torch.equal, got, expected))
    ops = torch.ops.lssar
    assert seen == [[ops.cpu_forward_v4.default], [ops.cpu_backward_v4.default]]


def test_checkpointing_recomputes_the_same_bits():
    tensors = draw(1, 2, 60, 16)
    plain = results(fused, tensors, tensors[0], torch.float32, p=15)
    saved = results(
        lambda *x: checkpoint(lambda *y: fused(*y, p=15), *x, use_reentrant=False),
        tensors,
        tensors[0],
        torch.float32,
    )
    assert all(map(torch.equal, plain, saved))


@pytest.mark.parametrize("flag", ["-DLSSAR_PORTABLE", "-DLSSAR_W8"])  # no intrinsics; AVX2
def test_other_vectors_give_the_same(flag, monkeypatch):
    tensors = draw(1, 2, 250, 40)
    options = [{"p": None}, {"p": 1}, {"p": 15}, {"p": 4.5}]
    others = [n for n, m in MECHANISMS.items() if m.parameter_init is None and m.norm != "stick"]

    def everything():
        yield from (results(fused, tensors, tensors[0], torch.float32, **o) for o in options)
        for name in others:
            run = partial(attend, mechanism=name, first=window(90, 250), backend="cpu")
            yield results(run, tensors, tensors[0], torch.float32)

    expected = list(everything())
    other = cpu.load(flag, "-O1")  # a third of the time to compile
    monkeypatch.setattr(cpu, "_kernel", lambda: other)
    for got, want in zip(everything(), expected, strict=True):
        assert max(map(distance, got, want)) < 2e-5


def test_builds_and_agrees_without_openmp(monkeypatch, tmp_path):
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build, "VARIANTS", ((),))
    monkeypatch.setattr(cpu_build, "FLAGS", ("-std=c++17", "-shared", "-fPIC"))  # built in a second
    tensors = draw(1, 2, 100, 16)
    expected = results(fused, tensors, tensors[0], torch.float32, p=15)
    serial = cpu.load()
    monkeypatch.setattr(cpu, "_kernel", lambda: serial)
    got = results(fused, tensors, tensors[0], torch.float32, p=15)
    assert max(map(distance, got, expected)) < 1e-5


def ask(code, **environment):
    """Return what a fresh interpreter prints."""
    command = [sys.executable, "-c", f"from lssar import cpu; {code}"]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


def test_without_a_compiler_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    examples = [
        ("", r"^no C\+\+ compiler found \(looked for \$CXX, c\+\+, g\+\+, clang\+\+\)$"),
        ("no-such-compiler", r"cannot run the C\+\+ compiler no-such-compiler"),
        ("g++ '-DX", "^CXX = .*No closing quotation"),
    ]
    for compiler, message in cases(examples):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(cpu.Unavailable, match=message) as refused:
            cpu.load()
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_build_says_what_the_compiler_said(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(cpu_build, "SOURCE", broken)
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path / "cache"))
    with pytest.raises(cpu.Unavailable, match=r"cannot build the kernel: .*error") as raised:
        cpu.load()
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_the_build_is_cached_and_half_files_are_never_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    library = cpu_build.build("-O0")
    assert [library] == list(tmp_path.iterdir())
    ctypes.CDLL(str(library))
    built = library.stat().st_mtime_ns
    assert cpu_build.build("-O0") == library and library.stat().st_mtime_ns == built


def test_an_activation_without_its_case_is_an_error(monkeypatch):
    """It would otherwise be computed as another one."""
    monkeypatch.setattr(cpu.fused, "PHI", (*cpu.fused.PHI, "new"))
    q, k, v = draw(1, 1, 9, 8)
    settings = cpu.fused.Settings(0, cpu.fused.PHI.index("new"), cpu.fused.L1, 0.0, 0.0, 0.0, 1024)
    with pytest.raises(NotImplementedError, match="no case for phi = 'new'"):
        cpu._forward(q, k, v, None, *settings, False)


def test_a_library_of_another_layout_is_not_used(monkeypatch):
    fields = cpu.KernelCall._fields_
    swapped = (fields[1], fields[0], *fields[2:])  # of one size
    for changed in ((*fields, ("more", ctypes.c_int64)), swapped):
        other = type("Other", (ctypes.Structure,), {"_fields_": changed})
        monkeypatch.setattr(cpu, "KernelCall", other)
        with pytest.raises(cpu.Unavailable, match=r"in cpu_call\.h differ"):
            cpu.load()


def test_importing_builds_nothing(tmp_path):
    ask("pass", LSSAR_CACHE=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_refusals_name_the_value():
    q, k, v = draw(1, 2, 5, 8)
    with pytest.raises(UserError, match=r"p = 0\.5"):
        fused(q, k, v, p=0.5)
    with pytest.raises(UserError, match=r"1 <= Lq <= Lk; got q \(1, 2, 5, 8\), k \(1, 2, 3, 8\)"):
        fused(q, k[:, :, :3], v[:, :, :3], p=15)
    with pytest.raises(UserError, match=r"torch\.float64"):
        fused(q.double(), k, v, p=15)
    with pytest.raises(UserError, match="head dimensions up to 256, not 300"):
        fused(*draw(1, 1, 2, 300), p=15)
    with pytest.raises(UserError, match=r"attention takes q"):
        fused(q, k[..., :4], v, p=15)


def test_empty_batches_and_second_derivatives():
    empty = fused(*(torch.empty(0, 2, 5, 8) for _ in range(3)), p=15)
    assert empty.shape == (0, 2, 5, 8)
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 6, 8))
    (dq,) = torch.autograd.grad(fused(q, k, v, p=15).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_a_dispatch_mode_sees_the_operator():
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = draw(1, 1, 6, 8)
    plain = results(fused, tensors, tensors[0], torch.float32, p=15)
    with Listen():
        heard = results(fused, tensors, tensors[0], torch.float32, p=15)
    assert torch.ops.lssar.cpu_forward_v4.default in seen
    assert torch.ops.lssar.cpu_backward_v4.default in seen
    assert all(map(torch.equal, plain, heard))


def test_what_is_saved_for_the_backward_changes_no_bit_of_the_output():
    tensors = draw(1, 2, 300, 24)
    leaves = [x.clone().requires_grad_() for x in tensors]
    for p in (None, 1, 15):
        assert torch.equal(fused(*tensors, p=p), fused(*leaves, p=p))
