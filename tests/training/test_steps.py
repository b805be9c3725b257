"""One optimiser step: what it waits for, what it skips, and what Muon makes of a gradient."""

import math
import shutil

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import arguments, losses, train_here, weights

import train
from lssar import spans
from lssar.errors import UserError
from model import GPT, preset
from train import EXIT_DIVERGED
from training.checkpoint import find, read_trainer
from training.config import load_config
from training.distributed import World
from training.optimiser import Optimiser
from training.run_log import RunLog, plot_losses

READING = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}


class Waited(AssertionError):
    pass


class NoReads(TorchFunctionMode):
    """Refuses Python what makes it wait for a GPU. The loader's own arrays are in main memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in READING - {"numpy"}:
            raise Waited(function.__name__)
        return function(*args, **(kwargs or {}))


class NoDeviceReads(TorchDispatchMode):
    """Refuses operators whose result, or its shape, is read back from a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        masks = [i for i in args[1] or () if i is not None] if name.startswith("index") else []
        by_mask = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in masks)
        reading = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
        if name in reading or by_mask:
            raise Waited(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("nano-softmax", []),
        ("nano-lssar", []),
        ("nano-lssar", ["--data.document_mask=true", "--train.clip=0"]),
        ("nano-softmax", ["--train.optimiser=muon"]),
    ],
)
def test_a_step_waits_for_no_number_of_the_device(corpus, tmp_path, monkeypatch, config, more):
    monkeypatch.setattr(spans, "_looks_like_a_mask", lambda _: False)  # it looks on a CPU alone
    path, *given = arguments(corpus, tmp_path, "--train.micro_batch=4", *more, config=config)
    config, world = load_config(path, given), World(0, 1, torch.device("cpu"))
    with RunLog(config, world) as log:
        run = train.set_up(config, world, log)
        with NoReads(), NoDeviceReads():
            train.optimiser_step(run)
            train.optimiser_step(run)
            with pytest.raises(Waited):  # the modes do see it where a run does wait
                train.check_finished_steps(run)
        run.seconds = 1.0
        run.unchecked.add(torch.ones(2))
        train.report(run)
        assert run.progress.step == 2


def poison(monkeypatch, *steps: int) -> None:
    accumulate = train.accumulate

    def poisoned(run, step):
        loss = accumulate(run, step)
        if step in steps:
            run.model.norm.weight.grad[0] = math.nan
            run.model.blocks[0].mlp_in.weight.grad[0] = math.inf
        return loss

    monkeypatch.setattr(train, "accumulate", poisoned)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_skipped_step_leaves_weights_and_moments_as_they_were(
    corpus, tmp_path, monkeypatch, capfd, optimiser
):
    """Steps 3 and 4 are told of at the report of step 5, each with its batch."""
    short = (f"--train.optimiser={optimiser}", "--checkpoint.interval=3", "--log.interval=5")
    short += ("--train.steps=5", "--checkpoint.keep=9", "--train.max_skipped_steps=2")
    poison(monkeypatch, 3, 4)
    assert train_here(*arguments(corpus, tmp_path, *short)) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "was skipped" in line]
    assert [line.split(":")[1] for line in told] == [
        f" step {step} is not finite and was skipped" for step in (3, 4)
    ]
    assert told[0].split("batch")[1] != told[1].split("batch")[1]
    before, after = (tmp_path / f"nano-lssar/checkpoints/step-0000000{n}" for n in (3, 5))
    mine, theirs = weights(before), weights(after)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    old, new = (read_trainer(path)["optimiser"]["state"] for path in (before, after))
    assert all(torch.equal(old[i][name], new[i][name]) for i in old for name in old[i])


def test_divergence_is_told_at_the_next_report_with_the_step_that_was_one_too_many(
    corpus, tmp_path, monkeypatch, capfd
):
    poison(monkeypatch, 3, 4)
    late = ("--log.interval=8", "--train.steps=9", "--train.max_skipped_steps=1")
    assert train_here(*arguments(corpus, tmp_path, *late, "--eval.interval=9")) == EXIT_DIVERGED
    shown = capfd.readouterr().err
    assert "2 steps in a row were not finite, the last was 4 (their batches are above)" in shown
    assert "step-00000005" not in shown  # it was saved only after its steps were looked at


@pytest.mark.filterwarnings("error")
def test_a_run_whose_every_step_overflows_is_drawn_without_a_curve(tmp_path):
    """As softmax with x**15 written out, a row of the sweep over exponents."""
    plot_losses([{"step": 1, "loss": None, "val_loss": None}], tmp_path / "loss.png", "overflow")
    assert (tmp_path / "loss.png").exists()


# --- Muon ---


def made(rows: int, columns: int, cell) -> list[list[float]]:
    return [[cell(i, j) for j in range(columns)] for i in range(rows)]


def product(a: list, b: list) -> list:
    inner = range(len(b))
    return made(len(a), len(b[0]), lambda i, j: sum(a[i][k] * b[k][j] for k in inner))


def newton_schulz(x: list) -> list:
    rows, columns = len(x), len(x[0])
    gram = product(x, made(columns, rows, lambda i, j: x[j][i]))
    once, twice = product(gram, x), product(product(gram, gram), x)
    terms = ((3.4445, x), (-4.775, once), (2.0315, twice))
    return made(rows, columns, lambda i, j: sum(c * term[i][j] for c, term in terms))


def loop_muon(weight, gradient, average, lr, decay, momentum):
    """Return the weight and the averaged gradient after one step, in plain Python."""
    rows, columns = len(weight), len(weight[0])

    def mixed(a, b):
        return made(rows, columns, lambda i, j: momentum * a[i][j] + (1 - momentum) * b[i][j])

    average = mixed(average, gradient)
    x = mixed(average, gradient)
    size = math.sqrt(sum(value**2 for row in x for value in row))
    x = made(rows, columns, lambda i, j: x[i][j] / size)
    for _ in range(5):
        x = newton_schulz(x)
    rate = lr * 0.2 * math.sqrt(max(rows, columns))
    moved = made(rows, columns, lambda i, j: weight[i][j] * (1 - lr * decay) - rate * x[i][j])
    return moved, average


def small_model() -> GPT:
    torch.manual_seed(3)
    return GPT(preset("nano", layers=1, heads=1, width=6, vocab_size=11, vocab_rows=13))


def test_muon_steps_as_a_loop_written_reference_does():
    model = small_model()
    t = load_config("nano-softmax", ["--train.optimiser=muon", "--train.weight_decay=0.3"]).train
    optimiser = Optimiser(model, t)
    go = torch.tensor(False)
    matrices = {
        n: p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2
    }
    assert {p.shape for p in matrices.values()} == {(18, 6), (6, 6), (24, 6), (6, 24)}
    expected = {n: (p.tolist(), torch.zeros_like(p).tolist()) for n, p in matrices.items()}
    for step, warmed in enumerate((0.0, 0.5)):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for n, p in matrices.items():
            given = {"lr": 0.01 * (step + 1), "decay": 0.3, "momentum": 0.85 + 0.1 * warmed}
            expected[n] = loop_muon(expected[n][0], p.grad.tolist(), expected[n][1], **given)
        optimiser.set_rates(0.01 * (step + 1), warmed)
        optimiser.step(go)
    for n, p in matrices.items():
        for mine, wanted in zip(
            (p.detach(), optimiser.state[p]["exp_avg"]), expected[n], strict=True
        ):
            np.testing.assert_allclose(mine.numpy(), np.array(wanted), rtol=2e-4, atol=2e-5)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    model, adam = small_model(), small_model()
    t = load_config("nano-softmax", ["--train.optimiser=muon"]).train
    both, plain = Optimiser(model, t), Optimiser(adam, load_config("nano-softmax").train)
    for a, b in zip(model.parameters(), adam.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    for optimiser in (both, plain):
        optimiser.set_rates(1e-2, 1.0)
        optimiser.step(torch.tensor(False))
    theirs = dict(adam.named_parameters())
    for name, p in model.named_parameters():
        by_muon = name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
        assert torch.equal(p, theirs[name]) != by_muon, name
    groups = both.param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1]
    assert sum(len(g["params"]) for g in groups) == len(theirs)


def test_muon_resumes_bit_for_bit_and_learns(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.optimiser=muon", "--train.steps=12")
    assert train_here(*given) == 0
    whole = tmp_path / "nano-lssar"
    measured = losses(whole)
    assert measured[-1][2] < measured[0][1] - 1
    kept = weights(whole)
    shutil.rmtree(find(whole))
    assert find(whole).name == "step-00000010"
    assert train_here(*given, "--resume") == 0
    assert losses(whole) == measured
    again = weights(whole)
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    with pytest.raises(UserError, match=r"train\.optimiser: 'muon' -> 'adamw'"):
        train_here(*given, "--resume", "--train.optimiser=adamw")
    taking = (f"--train.init_from={whole}", "--train.init_optimiser=true", "--log.name=next")
    assert train_here(*given, *taking) == 0
    with pytest.raises(UserError, match="is not that of this model's parameters"):
        train_here(*given, *taking, "--train.optimiser=adamw", "--log.name=other")


def test_an_unknown_optimiser_is_refused(corpus, tmp_path):
    with pytest.raises(UserError, match=r"train\.optimiser = 'moun': unknown; did you mean 'muon'"):
        train_here(*arguments(corpus, tmp_path, "--train.optimiser=moun"))
