"""The GPU paths without a GPU: on the device of `stand_in.py`, Triton in its interpreter.

Run by tests/test_gpu_rehearsal.py in a process of its own, since nothing can take the device away
again. By hand: TRITON_INTERPRET=1 python tests/stand_in.py tests/gpu_rehearsal.py [-k ...]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
import torch
import torch.nn.functional as F
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from train_helpers import (
    arguments,
    assert_close_run,
    environment,
    losses,
    make_corpus,
    weights,
)
from triton_launch import check_grid, check_launches

import attention_maps
import eval_extrapolation
import generate
import passkey
import train
from data.tokeniser import get_tokeniser
from evaluating.results import read_results
from lssar import key_parts, spans, triton_op
from lssar.backends import BACKENDS, attend, attend_padded, used_backend
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from model import GPT, preset
from modelling.cache import KVCache
from physics.model import OrbitModel, OrbitModelConfig

LAUNCHES = check_launches()
CUDA, BF16, FP16, FP32, FP64 = "cuda", torch.bfloat16, torch.float16, torch.float32, torch.float64
ROOT = Path(__file__).parents[1]
SIZES = ("--train.length=16", "--train.batch_tokens=64", "--train.micro_batch=2")
STEPS = (
    "--train.steps=4",
    "--train.warmup=2",
    "--eval.interval=2",
    "--eval.tokens=64",
    "--checkpoint.interval=2",
)
SHORT = (*SIZES, *STEPS, "--eval.sample_interval=4", "--eval.sample_tokens=3", "--model.layers=1")


# --- the device itself ---------------------------------------------------------------------------


def test_the_stand_in_refuses_what_a_gpu_refuses():
    x, index = torch.ones(3, 3, device=CUDA), torch.tensor([1, 0])
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: x @ torch.ones(3, 3),
        lambda: F.embedding(index, x),
        lambda: torch.cat((x, torch.ones(1, 3))),
        lambda: x + torch.ones(3, device="cuda:1"),
        lambda: x.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
        lambda: torch.multinomial(x, 1, generator=torch.Generator()),
        lambda: x.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"device|generator"):
            wrong()
    assert (x + torch.tensor(1.0)).device == x[index].device == x.device  # a GPU takes these
    torch.ops.stand_in.forbid_reads(True)
    try:
        for waits in (x.sum().item, x.cpu, x.nonzero, lambda: bool(x.any()), x.tolist):
            with pytest.raises(RuntimeError, match="wait for the GPU"):
                waits()
    finally:
        torch.ops.stand_in.forbid_reads(False)
    assert torch.empty(1000, device=CUDA).isnan().all()  # memory is not zero by chance


# --- attention -----------------------------------------------------------------------------------


def qkv(dtype, rows=21, keys=21, heads=2, groups=2, d=16, batch=2):
    shapes = ((heads, rows), (groups, keys), (groups, keys))
    return [torch.randn(batch, *s, d, device=CUDA).to(dtype).requires_grad_() for s in shapes]


def on_the_host(tensors):
    return [t.detach().to("cpu", FP64).requires_grad_() for t in tensors]


def agrees(tensors, m, expected, tolerance, **options):
    """Compare output and gradients on the device with eager's in float64 on the host."""
    first = options.get("first")
    host = on_the_host(tensors)
    params = None
    if m.parameter_init is not None:
        params = torch.full((tensors[0].shape[1],), m.parameter_init, device=CUDA)
        tensors, host = [*tensors, params.requires_grad_()], [*host, *on_the_host([params])]
    out = attend(*tensors[:3], m, head_scale=params, **options)
    assert used_backend(m) == expected
    on_host = {"first": None if first is None else first.cpu(), "backend": "eager"}
    exact = attend(*host[:3], m, head_scale=None if params is None else host[3], **on_host)
    assert (out.device.type, out.dtype) == (CUDA, tensors[2].dtype)
    grad = torch.randn_like(exact)
    found = [out, *torch.autograd.grad(out, tensors, grad.to(CUDA, out.dtype))]
    for x, y in zip(found, [exact, *torch.autograd.grad(exact, host, grad)], strict=True):
        assert x.device.type == CUDA
        error = (x.detach().cpu().double() - y.detach()).norm()
        assert error <= tolerance * y.norm().clamp(min=1e-3)


def best(m, spans=False):
    if m.norm == "stick":  # fused by nobody; small maps are computed whole
        return "eager"
    flash = m.phi == "exp" and m.norm == "l1" and m.post == "none" and m.p is None
    return "sdpa" if flash and not spans else "triton"


def slow_but(few, names):
    """Mark as slow all but a few: the interpreter takes seconds for each."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_but(("ssmax", "lssar", "softmax-recentred"), MECHANISMS))
def test_every_mechanism_takes_its_kernel(name):
    m = get_mechanism(name)
    agrees(qkv(FP32), m, best(m), 2e-3)
    first = spans.documents(torch.randint(4, (2, 21), device=CUDA), end_of_text=0)
    agrees(qkv(FP32, groups=1), m, best(m, spans=True), 2e-3, first=first)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "name", slow_but(("softmax", "ssmax"), ["softmax", "ssmax", "lssa", "relu-shen"])
)
def test_16_bits_on_the_device(name, dtype):
    agrees(qkv(dtype), get_mechanism(name), best(MECHANISMS[name]), 0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=["full", "window"])
def test_every_backend_on_the_device(backend, options):
    if backend == "cpu" or (backend == "sdpa" and options):
        pytest.skip("it does not compute this")
    m = get_mechanism("softmax" if backend == "sdpa" else "lssar", **options)
    agrees(qkv(FP32, rows=9), m, backend, 2e-3, backend=backend)
    if backend in ("rowblock", "eager"):
        agrees(qkv(FP64, rows=9), m, backend, 1e-9, backend=backend)


def test_row_blocks_never_wait_for_the_gpu():
    first = spans.documents(torch.randint(4, (2, 70), device=CUDA), end_of_text=0)
    for m, given in (
        (get_mechanism("lssar", window=5), {}),
        (MECHANISMS["lssa"], {"first": first}),
    ):
        q, k, v = qkv(FP32, rows=70, keys=70)
        torch.ops.stand_in.forbid_reads(True)
        try:
            attend(q, k, v, m, backend="rowblock", **given).sum().backward()
        finally:
            torch.ops.stand_in.forbid_reads(False)
        agrees(qkv(FP32, rows=70, keys=70), m, "rowblock", 2e-3, backend="rowblock", **given)


def test_any_layout_on_the_device():
    across = [x.detach().mT.contiguous().mT.requires_grad_() for x in qkv(FP32)]
    agrees(across, get_mechanism("lssar"), "triton", 2e-3)


def test_weights_and_padding_on_the_device():
    q, k, v = qkv(FP32)
    expected = attention_weights(q.detach().cpu(), k.detach().cpu(), "lssar")
    torch.testing.assert_close(attention_weights(q, k, "lssar").cpu(), expected)
    for padding in ((0, 4), (3, 0)):  # to the right, which is sorted, and to the left
        mask = torch.ones(2, 21, dtype=torch.bool, device=CUDA)
        mask[0, : padding[1]] = mask[1, 21 - padding[0] :] = False
        out = attend_padded(q, k, v, "lssar", mask)
        host = [x.detach().cpu() for x in (q, k, v)]
        expected = attend_padded(*host, "lssar", mask.cpu())
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_launches_of_training_are_the_kernels_whose_resources_are_recorded():
    """bf16, a head of 64, heads side by side in one projection, as the model's are."""
    LAUNCHES.clear()
    packed = torch.randn(1, 32, 3, 2, 64, device=CUDA, dtype=BF16)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in packed.unbind(2))
    attend(q, k, v, "lssar").sum().backward()
    assert {launch.kernel for launch in LAUNCHES} == {"forward", "dq", "dkv"}
    assert all(launch.as_compiled for launch in LAUNCHES)


def test_no_launch_has_more_heads_than_a_gpu_counts(monkeypatch):
    grids = []

    class Seen:  # the interpreter would take an hour
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **constants: None

    tiles = {"BLOCK_M": 16, "BLOCK_N": 32}
    monkeypatch.setattr(triton_op, "_kernel", lambda *_: (Seen(), tiles))
    q = torch.zeros(8192, 9, 1, 16, device=CUDA, requires_grad=True)
    attend(q, q, q, "lssar").sum().backward()
    assert len(grids) == 2 * 3  # forward, dq, dkv
    for grid in grids:
        check_grid("any", grid)
    with pytest.raises(AssertionError, match="65536 programs along axis 1"):
        check_grid("any", (1, 65536))


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", slow_but(("ssmax", "lssar"), ["softmax", "ssmax", "lssar", "lssa"])
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_of_the_model_never_waits_for_the_gpu(name, compiled):
    """In bf16 under autocast, documents apart, gradients and all."""
    sizes = {"layers": 1, "heads": 2, "width": 32, "documents": True}
    model = GPT(preset("nano", name, **sizes)).to(CUDA)
    tokens = torch.randint(250, 257, (2, 17), device=CUDA)
    if compiled:
        torch.compiler.reset()
        model.compile()
    torch.ops.stand_in.forbid_reads(True)
    try:
        with torch.autocast(CUDA, BF16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    finally:
        torch.ops.stand_in.forbid_reads(False)
    assert all(p.grad.device == p.device and p.grad.isfinite().all() for p in model.parameters())
    host = GPT(preset("nano", name, **sizes))
    host.load_state_dict(model.state_dict())
    tokens = tokens.cpu()
    assert loss.item() == pytest.approx(host(tokens[:, :-1], tokens[:, 1:]).item(), abs=0.02)


@pytest.mark.parametrize("name", ["lssa", "lssar"])
def test_a_prompt_and_its_continuation_never_wait_for_the_gpu(name):
    """From a cache of the model, with spans, and with keys in parts."""
    model = tiny_model(name).to(CUDA)
    tokens = torch.randint(257, (2, 12), device=CUDA)
    q, k, v = (x.detach() for x in qkv(BF16, rows=1, heads=4))
    first = torch.full((2, 1), 3, device=CUDA)
    torch.ops.stand_in.forbid_reads(True)
    try:
        with torch.no_grad(), torch.autocast(CUDA, BF16):
            cache = KVCache(12)
            for part in tokens.split([9, 1, 2], dim=1):
                model.hidden(part, cache)
            attend(q, k, v, name, first=first)
            attend(q, k, v, get_mechanism(name, window=5))
            sums = key_parts.row_sums(q, k, get_mechanism(name), 0, 21)
            parts = key_parts.row_values(q, k, v, get_mechanism(name), sums, 0, 21)
            key_parts.combine(*parts, q, get_mechanism(name))
    finally:
        torch.ops.stand_in.forbid_reads(False)


def test_channels_positions_and_regression_on_the_device():
    text = preset("nano", "lssa", layers=1, heads=2, width=32, positions="none")
    for outputs in (0, 3):
        config = OrbitModelConfig(**vars(text), learned_positions=16, outputs=outputs)
        model = OrbitModel(config).to(CUDA)
        tokens = torch.randint(257, (2, 9, 2), device=CUDA)
        targets = torch.randn(2, 9, 3, device=CUDA) if outputs else tokens
        model(tokens, targets).backward()
        assert all(p.grad.device.type == CUDA for p in model.parameters())


def test_decoding_from_the_cache_equals_one_pass():
    model = tiny_model("lssar").to(CUDA)
    tokens = torch.randint(257, (2, 12), device=CUDA)
    with torch.no_grad(), torch.autocast(CUDA, BF16, enabled=False):
        cache = KVCache(12)
        parts = [model.hidden(part, cache) for part in tokens.split([9, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model.hidden(tokens), rtol=1e-3, atol=1e-3)
        cache = KVCache(14)
        cache.mask = torch.ones(2, 12, dtype=torch.bool, device=CUDA)
        cache.mask[0, :3] = False
        padded = model.hidden(tokens, cache)
    assert padded[1].isfinite().all()


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def trained(corpus, place, *more):
    """Train softmax, whose kernel need not be interpreted: that one is tested above."""
    command = arguments(corpus, place, *SHORT, *more, config="nano-softmax")
    assert train.main(command) == 0
    return place / "nano-softmax"


def test_training_stops_and_continues_on_the_device_to_the_same_bits(corpus, tmp_path):
    """bf16 by itself, validation, a sample, checkpoints; and near the same run on the CPU."""
    constant = ("--train.schedule=constant",)
    whole = trained(corpus, tmp_path / "whole", *constant)
    trained(corpus, tmp_path / "parts", *constant, "--train.steps=2")
    parts = trained(corpus, tmp_path / "parts", *constant, "--resume")
    assert losses(parts) == losses(whole)
    assert all(weights(whole)[name].equal(w) for name, w in weights(parts).items())
    about = json.loads((whole / "run.json").read_text())
    assert about["device"] == stand_in.A100.name
    host = trained(corpus, tmp_path / "host", *constant, "--device=cpu", "--train.precision=bf16")
    assert_close_run(whole, host, 0.02)


def test_compiled_training_is_one_graph_on_the_device(corpus, tmp_path):
    compiled = trained(corpus, tmp_path / "compiled", "--train.compile=true")
    plain = trained(corpus, tmp_path / "plain")
    assert_close_run(compiled, plain, 0.02)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_out_of_memory_on_the_device_halves_the_micro_batch(
    corpus, tmp_path, monkeypatch, capfd, compiled
):
    """With `auto`, as every config of a GPU has it; the run is that of the smaller one."""
    two = trained(corpus, tmp_path / "two", f"--train.compile={compiled}")
    backward = train.backward

    def limited(run, inputs, *others, **options):
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return backward(run, inputs, *others, **options)

    monkeypatch.setattr(train, "backward", limited)
    more = (f"--train.compile={compiled}", "--train.micro_batch=auto")
    auto = trained(corpus, tmp_path / "auto", *more)
    said = capfd.readouterr().err
    assert "train.micro_batch = 4 (auto) fits the 78.0 GiB free per process" in said
    assert "out of memory with train.micro_batch = 4; the step starts again with 2" in said
    assert losses(auto) == losses(two)
    assert all(weights(two)[name].equal(w) for name, w in weights(auto).items())


def test_two_ranks_train_on_their_own_devices(corpus, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [*launcher, "tests/stand_in.py", "train.py"]
    command = [
        sys.executable,
        *script,
        *arguments(corpus, tmp_path / "two", *SHORT, config="nano-softmax"),
    ]
    several = environment() | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    done = subprocess.run(command, env=several, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_close_run(tmp_path / "two/nano-softmax", trained(corpus, tmp_path / "one"), 0.02)


def test_evaluations_on_the_device_give_the_numbers_of_the_cpu(tmp_path, capsys):
    model = str(write_checkpoint(tmp_path / "model", tiny_model("ssmax"), tokeniser="bytes"))
    data = ["--data", str(write_tokens(tmp_path / "tokens", 300)), "--lengths=16,32"]
    commands = {
        "loss": (eval_extrapolation, [*data, "--tokens=64", "--position-interpolation"]),
        "passkey": (passkey, ["--lengths=301", "--trials=1"]),
        "maps": (attention_maps, ["--text", "The sun is a star."]),
    }
    for name, (command, more) in commands.items():
        numbers = []
        for device in ("cuda", "cpu"):
            out = tmp_path / f"{name}-{device}.json"
            command.main([model, *more, "--out", str(out), "--device", device])
            numbers.append([r.value for r in read_results(out).records])
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.02)
    capsys.readouterr()
    generate.main([model, "--prompt=The sun", "--tokens=3", "--top-k=5", "--top-p=0.9"])
    text = capsys.readouterr().out
    assert text.startswith("The sun") and len(get_tokeniser("bytes").encode(text)) > 8


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv]))
