"""`train.micro_batch = "auto"`: what it takes, and what a lack of memory does to it."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import cases
from train_helpers import ROOT, arguments, environment, losses, train_here, weights

from lssar.backends import BACKENDS
from lssar.errors import UserError
from model import GPT
from training import estimate
from training.checkpoint import find, read_trainer
from training.config import load_config, parse_config
from training.distributed import product_type
from training.estimate import (
    CARDS,
    GIB,
    batch_plan,
    fit,
    on_cards,
    planned_backends,
    refuse_backend,
)

GPT2 = "gpt2-124m-softmax"
# 8 sequences per step; a checkpoint at every step.
SHORT = ("--train.steps=3", "--train.warmup=1", "--checkpoint.interval=1", "--eval.interval=3")


def needed(config) -> int:
    return sum(estimate.estimate(config, planned_backends(config, "cuda")).memory.values())


def test_auto_is_the_largest_power_of_two_that_fits():
    for name, card in cases([GPT2, "gpt2-355m-edu", "gpt2-124m-lssar-pi"], CARDS):
        fitted = fit(load_config(name), 8, card * GIB, "cuda")
        n = fitted.micro_batch
        assert needed(fitted) <= 0.9 * card * GIB
        sequences = 524_288 // fitted.train.length
        assert n & (n - 1) == 0 and batch_plan(fitted, 8).sequences == sequences
        largest = n == sequences // 8
        assert largest or needed(fitted.with_micro_batch(2 * n)) > 0.9 * card * GIB


def test_auto_divides_a_share_that_is_no_power_of_two():
    config = load_config("nano-softmax", ["--train.batch_tokens=6144", "--train.micro_batch=auto"])
    assert fit(config, 1, 80 * GIB, "cpu").micro_batch == 8  # of 24 sequences
    assert fit(config, 3, 80 * GIB, "cpu").micro_batch == 8
    assert fit(config, 1, 80 * GIB, "cpu", most=12).micro_batch == 12
    assert fit(config, 1, 1000, "cpu") is None


def test_less_state_with_muon_more_activations_in_fp32():
    plain, muon, fp32 = (
        load_config(GPT2, more)
        for more in ([], ["--train.optimiser=muon"], ["--train.precision=fp32"])
    )
    blocks = 12 * 12 * 768**2  # the weights of qkv, proj and the MLP
    assert needed(plain) - needed(muon) == 4 * blocks
    assert needed(fp32) > needed(plain)


def test_a_dry_run_says_what_fits_which_card_and_the_remedy(capsys):
    def cards(*more) -> str:
        assert train_here(GPT2, "--dry-run", "--world-size=8", *more) == 0
        return re.search(r"^GPUs +(.*)$", capsys.readouterr().out, re.MULTILINE)[1]

    chosen = [fit(load_config(GPT2), 8, (card - 1) * GIB, "cuda").micro_batch for card in CARDS]
    expected = [f"{card} GB: micro-batch {n}" for card, n in zip(CARDS, chosen, strict=True)]
    assert cards() == ", ".join(expected)
    assert f"24 GB: too small; --train.micro_batch={chosen[0]} or auto" in cards(
        "--train.micro_batch=64"
    )
    large = cards("--model.width=6144")
    assert large.startswith("24 GB: too small, ")
    assert large.endswith("; lower model.width or model.layers")
    maps = cards("--attention.backend=eager", "--train.length=16384", "--attention.name=lssar")
    assert maps.endswith("80 GB: too small; leave attention.backend at auto, or lower train.length")


def test_a_dry_run_refuses_a_backend_that_the_device_does_not_have():
    given = ("nano-softmax", "--attention.backend=triton", "--dry-run", "--device=cpu")
    with pytest.raises(UserError, match="'triton' cannot compute this: it computes on a GPU"):
        train_here(*given)


def test_a_backend_is_asked_about_the_longest_sequences_of_the_training():
    options = ["--attention.window=256", "--attention.backend=sdpa", "--train.micro_batch=4"]
    refuse_backend(load_config("nano-softmax", options), "cpu")
    config = load_config("nano-softmax", [*options, "--train.long_length=512"])
    with pytest.raises(UserError, match="'sdpa' cannot compute this: it has no windows"):
        refuse_backend(config, "cpu")


def test_no_micro_batch_is_offered_that_long_sequences_do_not_fit():
    options = ["--train.micro_batch=8", "--train.long_length=8192"]
    config = load_config("gpt2-124m-lssar", options)
    cards = on_cards(config, 1)
    assert "auto" not in cards
    offered = [int(n) for n in re.findall(r"micro[-_]batch(?: up to |=| )(\d+)", cards)]
    assert offered and all(n % 8 == 0 for n in offered)
    tight = fit(config, 1, 4 * GIB, "cuda")
    assert tight is None or tight.micro_batch % 8 == 0


def test_a_dry_run_for_this_cpu_names_the_backend_that_is_here(capsys, monkeypatch):
    given = ("nano-lssar", "--dry-run", "--device=cpu")
    assert train_here(*given) == 0
    assert "planned for cpu: backend cpu\n" in capsys.readouterr().out
    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], missing=lambda: "no compiler"))
    assert train_here(*given) == 0
    assert "planned for cpu: backend eager\n" in capsys.readouterr().out


def test_a_dry_run_without_data_names_the_command_that_makes_them(capsys):
    assert train_here("nano-lssar", "--dry-run", "--data.directory=corpora/absent") == 0
    command = "python data/prepare.py text FILES --tokeniser bytes --out corpora/absent"
    assert f"corpora/absent is not there yet; {command} makes it" in capsys.readouterr().out


def test_a_gpu_to_plan_with_is_refused_where_none_is_planned():
    for more in cases([(), ("--dry-run", "--device=cpu")]):
        with pytest.raises(UserError, match="--gpu 4090 only works with --dry-run on CUDA"):
            train_here("nano-lssar", "--gpu=4090", *more)


def test_products_are_in_bfloat16_where_the_gpu_has_it(monkeypatch):
    here = torch.device("cuda")
    for capability, dtype in (((7, 5), torch.float32), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert product_type(here, "auto") == dtype
        assert product_type(here, "bf16") == product_type("cuda", "auto") == torch.bfloat16


@pytest.fixture(scope="module")
def of_two(corpus, tmp_path_factory):
    """Start a run with micro-batches of 2."""
    runs = tmp_path_factory.mktemp("two")
    assert train_here(*arguments(corpus, runs, *SHORT, "--train.micro_batch=2")) == 0
    return runs / "nano-lssar"


def assert_same(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    mine, theirs = weights(run), weights(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    a, b = (read_trainer(find(path))["optimiser"]["state"] for path in (run, other))
    assert all(torch.equal(a[i][name], b[i][name]) for i in b for name in b[i])


def limit(monkeypatch, most: int) -> None:
    forward = GPT.forward

    def limited(self, tokens, targets=None):
        if len(tokens) > most and targets is not None and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return forward(self, tokens, targets)

    monkeypatch.setattr(GPT, "forward", limited)


def test_out_of_memory_halves_until_it_fits_as_if_started_so(
    corpus, of_two, tmp_path, monkeypatch, capfd
):
    limit(monkeypatch, 2)
    given = arguments(corpus, tmp_path, *SHORT, "--train.micro_batch=auto")
    assert train_here(*given) == 0
    said = capfd.readouterr().err
    assert "train.micro_batch = 8 (auto) fits the" in said
    for n in (8, 4):
        assert (
            f"out of memory with train.micro_batch = {n}; the step starts again with {n // 2}"
            in said
        )
    assert "4 accumulation x 2 sequences" in said
    run = tmp_path / "nano-lssar"
    assert_same(run, of_two)
    assert load_config(run / "config.toml").train.micro_batch == "auto"
    assert parse_config(read_trainer(find(run))["config"], "").micro_batch == 2


def test_a_resumed_run_keeps_the_micro_batch_that_it_found(
    corpus, of_two, tmp_path, monkeypatch, capfd
):
    given = arguments(corpus, tmp_path, *SHORT, "--train.micro_batch=auto")
    with monkeypatch.context() as patch:
        limit(patch, 2)
        assert train_here(*given) == 0
    find(tmp_path / "nano-lssar").rename(tmp_path / "gone")
    assert train_here(*given, "--resume") == 0
    assert "train.micro_batch = 2 (auto)" in capfd.readouterr().err
    assert_same(tmp_path / "nano-lssar", of_two)
    find(tmp_path / "nano-lssar").rename(tmp_path / "gone too")
    assert train_here(*given, "--resume", "--train.micro_batch=8") == 0


def test_no_room_for_one_sequence_or_a_given_micro_batch_is_one_line(corpus, tmp_path, monkeypatch):
    limit(monkeypatch, 0)
    for asked in ("auto", "4"):
        with pytest.raises(UserError, match=r"out of memory.*lower train"):
            train_here(*arguments(corpus, tmp_path, *SHORT, f"--train.micro_batch={asked}"))


# Two ranks, forked after the imports; rank 1 alone has no room for more than one sequence.
RANKS = """
import os, socket, sys
sys.path.insert(0, sys.argv.pop(1))
import torch, train
from model import GPT

forward = GPT.forward

def limited(self, tokens, targets=None):
    if len(tokens) > 1 and torch.is_grad_enabled():
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(self, tokens, targets)

def ranks(*argv):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(found.getsockname()[1])}
    children = []
    for rank in "01":
        children.append(os.fork())
        if children[-1] == 0:
            os.environ |= place | {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            GPT.forward = limited if rank == "1" else forward
            os._exit(train.main([*sys.argv[1:], *argv]))
    assert not any(os.waitpid(child, 0)[1] for child in children)

ranks("--train.micro_batch=auto", "--log.name=auto")
ranks("--train.micro_batch=1", "--log.name=one")
"""


def test_all_ranks_halve_when_one_runs_out(corpus, tmp_path):
    given = [str(ROOT), *arguments(corpus, tmp_path, *SHORT)]
    done = subprocess.run(
        [sys.executable, "-c", RANKS, *given], capture_output=True, text=True, timeout=300,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the step starts again with") == 2
    assert_same(tmp_path / "auto", tmp_path / "one")


def test_a_real_lack_of_main_memory_halves_too(corpus, tmp_path):
    """The allocator of a CPU raises no OutOfMemoryError."""
    big = ("--train.batch_tokens=8192", "--model.width=128", "--train.steps=1")
    given = arguments(corpus, tmp_path, *SHORT, *big, "--train.micro_batch=auto")
    program = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, train\n"
        "rehearse = train.rehearse\n"
        "def limited(run):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        return rehearse(run)\n"
        "    finally:\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
        "train.rehearse = limited\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, timeout=300,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the step starts again with" in done.stderr
