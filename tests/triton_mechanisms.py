"""The Triton kernels in Triton's interpreter: every mechanism, visible spans, grouped heads.

Run as tests/triton_interpreted.py is, which has the bar and the details of LSSA and LSSAR.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from triton_interpreted import BF16, FP16, FP32, check, inputs, run

from lssar.backends import attend
from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism

FUSED = {name: m for name, m in MECHANISMS.items() if m.norm != "stick"}


def span(kind, m, rows, keys):
    """Return the mechanism and `first` of a kind of span; with documents, some rows see nothing."""
    places = torch.arange(keys - rows, keys)
    if kind == "window":
        return get_mechanism(m.name, window=19), None
    if kind == "documents":
        starts = torch.tensor([[0, keys // 3, keys // 2 + 5], [0, keys // 2, keys - 2]])
        first = (starts[:, None] * (starts[:, None] <= places[:, None])).amax(-1)
        return m, first.masked_fill(places % 23 == 22, keys)
    if kind == "random":
        return m, torch.randint(0, keys + 1, (1, rows))
    return m, None


SPANS = ("full", "window", "documents", "random")
TYPES = (FP32, FP16, BF16)


def check_mechanism(name, kind, dtype, rows, keys, d=20, d_v=24, inputs="random", **shape):
    m, first = span(kind, FUSED[name], rows, keys)
    check(inputs, rows, keys, d, m, dtype, first, batch=2, d_v=d_v, **shape)


@pytest.mark.parametrize("index", range(len(FUSED)))
def test_accuracy_of_every_mechanism(index):
    name, dtype, kind = list(FUSED)[index], TYPES[index % 3], SPANS[index // 3 % 4]
    check_mechanism(name, kind, dtype, 61, 67, groups=1)


@pytest.mark.parametrize(("name", "dtype"), [("lssar", FP16), ("lssa", BF16), ("softmax", FP16)])
@pytest.mark.parametrize("kind", SPANS[1:])
def test_accuracy_with_spans(kind, name, dtype):
    check_mechanism(name, kind, dtype, 80, 130, d=64, groups=1, heads=3)


SLOW = pytest.mark.slow
HOSTILE = [("softmax", FP32), ("softmax-reweighted", BF16)]
HOSTILE += [pytest.param("softmax", dtype, marks=SLOW) for dtype in (FP16, BF16)]
HOSTILE += [pytest.param("sigmoid-logn-l1-reweighted", FP16, marks=SLOW)]


@pytest.mark.parametrize(("name", "dtype"), HOSTILE)
@pytest.mark.parametrize("kind", ["near-uniform", "peaked", "huge", "mixed"])
def test_accuracy_of_mechanisms_on_hostile_input(kind, name, dtype):
    check(kind, 70, 70, 64, FUSED[name], dtype)


@pytest.mark.parametrize("name", ["relu-l1", "gelu-l1", "softplus-l1"])
def test_accuracy_where_one_key_has_all_of_the_weight(name):
    check("huge", 70, 70, 64, MECHANISMS[name], heads=4)


@pytest.mark.parametrize("kind", ["leaning", "peaked", "huge"])
@pytest.mark.parametrize("name", ["softmax-reweighted", "softmax-recentred-l1"])
def test_accuracy_of_mechanisms_on_hostile_input_in_rows_of_one_key_and_little_else(name, kind):
    check(kind, 64, 64, 64, FUSED[name], seed=1)


NEARLY_CANCEL = ("relu2", "gelu", "identity")


@pytest.mark.parametrize("kind", ["near-uniform", "mixed"])
@pytest.mark.parametrize(
    "name",
    ["relu-l1", "identity", *(pytest.param(f"{n}-l1", marks=SLOW) for n in NEARLY_CANCEL)],
)
def test_accuracy_of_mechanisms_on_hostile_input_with_rows_of_scores_near_zero(name, kind):
    """The products in tf32 halves lose up to half a unit of q, the same one for all keys of a row.
    Where all scores of a row nearly cancel, its 1/l changes as much as by rounding q once."""
    check(kind, 64, 64, 64, FUSED[name], seed=1, by_luck=True)


COSINE, SCALED = {"scale": "log d log N"}, {"scale": "s log N / sqrt(d)", "parameter_init": 0.5}
COMBINATIONS = (  # parts that no entry of FUSED puts together
    {**COSINE, "phi": "relu", "norm": "none"},
    {"phi": "sigmoid", "bias": "-log N", "post": "recentre"},
    {"phi": "relu", "post": "recentre, l1"},
    {**SCALED, "phi": "softplus", "bias": "-log L", "norm": "none"},
    {"phi": "exp", "bias": "-log N"},
    {"phi": "exp", "bias": "-log L", "norm": "none"},
    {"phi": "softplus", "p": 7.5},
    {**COSINE, "phi": "exp", "p": 3},
    {**COSINE, "phi": "softplus", "post": "recentre, l1"},
    {"phi": "sigmoid", "p": 2, "alpha": 0.5, "train_length": 20},
)


@pytest.mark.parametrize("index", range(len(COMBINATIONS)))
def test_accuracy_of_other_combinations_of_parts(index):
    m = Mechanism("combination", "", **COMBINATIONS[index])
    m, first = span("full" if index % 2 else "random", m, 61, 67)
    check("random", 61, 67, 20, m, TYPES[index % 3], first, groups=1, d_v=24)


@pytest.mark.parametrize(("name", "d", "d_v"), [("lssar", 256, 130), ("softmax", 130, 256)])
def test_accuracy_with_wide_heads(name, d, d_v):
    check_mechanism(name, "window", BF16, 33, 67, d=d, d_v=d_v)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", SPANS)
@pytest.mark.parametrize("name", FUSED)
def test_exhaustive_product_of_mechanisms_spans_and_types(name, kind, dtype):
    check_mechanism(name, kind, dtype, 40, 70, d=33, d_v=65, groups=1)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("name", ["lssar", "softmax", "softmax-recentred", "identity-l1"])
def test_what_no_row_sees_may_be_nan_and_rows_that_see_nothing_are_zero(name, dtype):
    (q, k, v), grad = inputs("random", 70, 90, 16, groups=1, batch=2)
    first = torch.full((2, 70), 75)
    first[0] = 30
    clean = [x.clone() for x in (q, k, v)]
    for x in (k, v):
        x[0, :, :30], x[1, :, :75] = torch.nan, torch.nan
    q[1, :, :55] = torch.nan

    def attention(*t):
        return attend(*t, name, first=first, backend="triton")

    results = run(attention, (q, k, v), grad, dtype)
    for a, b in zip(results, run(attention, clean, grad, dtype), strict=True):
        assert torch.equal(a, b)
    out, dq, dk, dv = results
    assert not out[1, :, :55].any() and not dq[1, :, :55].any()
    assert not dk[1, :, :75].any() and not dv[1, :, :75].any()


def test_key_tiles_outside_of_a_window_are_not_read(monkeypatch):
    """The cost of a window is linear: the products of a long row are those of a short one."""
    from triton.runtime import interpreter

    from lssar import triton_interpreter

    triton_interpreter.install()
    product, counts = interpreter.InterpreterBuilder.create_dot, []

    def counting(*arguments):
        counts[-1] += 1
        return product(*arguments)

    monkeypatch.setattr(triton_interpreter, "install", lambda: None)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counting)
    for keys in (256, 512):
        counts.append(0)
        tensors, grad = inputs("random", keys, keys, 16, heads=1)
        m = get_mechanism("lssar", window=10)
        run(lambda *t, m=m: attend(*t, m, backend="triton"), tensors, grad, FP32)
    short, long = counts
    assert long <= 2.2 * short


@pytest.mark.parametrize("name", FUSED)
def test_every_mechanism_is_traced_on_fake_cuda_tensors(name):
    """A torch without CUDA aborts on autograd of these, so the backward is called by its name; and
    it has no torch.arange of them, which the steps outside of the kernel take."""
    m = get_mechanism(name, window=5)
    device = "cpu" if name in ("ssmax", "relu-shen", "softmax-recentred", "cos-ssmax") else "cuda"
    with FakeTensorMode():
        q = torch.empty(2, 4, 9, 16, device=device, dtype=BF16)
        k = torch.empty(2, 2, 9, 16, device=device, dtype=BF16)
        v = torch.empty(2, 2, 9, 8, device=device, dtype=BF16)
        first = torch.zeros(2, 9, device=device, dtype=torch.int64)
        out = attend(q, k, v, m, first=first, backend="triton")
        settings = (5, 0, 2, m.p or 0.0, 0.0, 0.0, 1024)
        saved = torch.ops.lssar.triton_forward_v5(q, k, v, first, *settings, True)
        grads = torch.ops.lssar.triton_backward_v5(out, q, k, v, first, *saved, *settings)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 9, 8), BF16, device)
    for x, grad in zip((q, k, v), grads, strict=True):
        assert (x.shape, x.dtype, x.device) == (grad.shape, grad.dtype, grad.device)
