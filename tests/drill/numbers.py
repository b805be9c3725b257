"""Numbers that are none, numbers at their limits, and lengths that memory cannot square."""

import json
import math
import resource
import time
from pathlib import Path

import torch

import train
from lssar.backends import BACKENDS, attend
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from train import EXIT_DIVERGED
from training.checkpoint import Store, load_model

from .attack import Told, attack
from .children import Child, finish
from .subjects import a_training, fresh

BAD = (math.nan, math.inf, -math.inf)
LENGTHS = (1, 2, 3, 4, 5, 7, 16, 31, 64, 127, 512, 1000, 2048, 4097, 8192, 16384, 32768, 65536)
LIMIT = 1 << 30  # bytes that one call of attention may add


def poison_activations(step: int, value: float):
    """Make a batch whose embedding is not finite at one place of one step."""
    accumulate = train.accumulate

    def poisoned(run, now: int):
        def spoil(module, inputs, output):
            output = output.clone()
            output.view(-1)[3] = value
            return output

        hook = run.model.embedding.register_forward_hook(spoil) if now == step else None
        try:
            return accumulate(run, now)
        finally:
            if hook is not None:
                hook.remove()

    train.accumulate = poisoned


def poison_gradient(step: int, value: float):
    accumulate = train.accumulate

    def poisoned(run, now: int):
        loss = accumulate(run, now)
        if now == step:
            list(run.model.parameters())[-1].grad.view(-1)[0] = value
        return loss

    train.accumulate = poisoned


def poison_weight(step: int, value: float):
    accumulate = train.accumulate

    def poisoned(run, now: int):
        if now == step:
            with torch.no_grad():
                run.model.embedding.weight.view(-1)[7] = value
        return accumulate(run, now)

    train.accumulate = poisoned


def one_bad_step(times: int, folder: Path, poison) -> Told:
    """Check that each value at other steps is skipped and said, and the weights stay finite."""
    subject = a_training()
    for number in range(times):
        place, step, value = fresh(folder / "runs"), 3 + 5 * number % 18, BAD[number % 3]
        shown = finish(
            train.main,
            subject.arguments(place),
            folder / "log",
            lambda step=step, value=value: poison(step, value),
        )
        assert f"warning: step {step} is not finite and was skipped" in shown, shown
        assert "batch of token offsets" in shown, shown
        assert finite(place / "nano-lssar")
    return Told(
        "the step was skipped and reported, with its numbers and the tokens of its batch; every "
        "weight stayed finite and the run went on to its end",
        times=times,
    )


def finite(run: Path) -> bool:
    return all(
        t.isfinite().all()
        for path in Store(run).candidates()
        for t in load_model(path)[0].parameters()
    )


@attack("numbers", "NaN and infinity in the activations of a batch", full=3, short=1)
def batch(times: int, folder: Path) -> Told:
    return one_bad_step(times, folder, poison_activations)


@attack("numbers", "NaN and infinity in a gradient", full=3)
def gradient(times: int, folder: Path) -> Told:
    return one_bad_step(times, folder, poison_gradient)


@attack("numbers", "NaN and infinity in a weight", full=3)
def weight(times: int, folder: Path) -> Told:
    subject = a_training()
    for number in range(times):
        place, step, value = fresh(folder / "runs"), 6 + number % 12, BAD[number % 3]
        command = subject.arguments(place, "--checkpoint.interval=1")
        child = Child(
            train.main, command, folder / "log", lambda s=step, v=value: poison_weight(s, v)
        )
        assert child.wait() == EXIT_DIVERGED, child.shown()
        shown = child.shown()
        assert "Traceback" not in shown and "the last good checkpoint is" in shown, shown
        assert finite(place / "nano-lssar")
        finish(train.main, [*command, "--resume"], folder / "log")
        subject.assert_same(place)
    return Told(
        "the run stopped with exit code 3 and named the last good checkpoint, which was finite; "
        "`--resume` from it ended bit for bit as undisturbed",
        times=times,
    )


@attack("numbers", "a gradient of noise, a million times too large (a loss spike)", full=2)
def spike(times: int, folder: Path) -> Told:
    subject, last = a_training(), []
    for number in range(times):
        place, step = fresh(folder / "runs"), 4 + 4 * number

        def before(step=step):
            accumulate = train.accumulate

            def spiked(run, now: int):
                loss = accumulate(run, now)
                if now == step:
                    for p in run.model.parameters():
                        p.grad.normal_(std=1e6)
                return loss

            train.accumulate = spiked

        finish(train.main, subject.arguments(place), folder / "log", before)
        last.append((end_of(place / "nano-lssar"), end_of(subject.whole)))
        assert last[-1][0] < last[-1][1] + 0.5, f"the loss did not recover: {last[-1]}"
    worst = max(a - b for a, b in last)
    return Told(
        f"clipping held it: the runs ended within {worst:.3f} nats of the undisturbed one",
        times=times,
        figures={"worst difference of the last validation loss": worst},
    )


def end_of(run: Path) -> float:
    return load_model(run)[1].val_loss


@attack(
    "numbers",
    "p from 1 to 1e308, keys alike, opposed, tiny and huge; all backends",
    full=135,
    short=27,
)
def exponents(times: int, folder: Path) -> Told:
    exponents = (1, 1 + 1e-7, 1.5, 2, 15, 100, 1e4, 1e30, 1e308)
    names = [n for n, m in MECHANISMS.items() if m.sharpened]
    done = 0
    while done < times:
        p = exponents[done % len(exponents)]
        name = names[done // len(exponents) % len(names)]
        scale = (1.0, 1e-6, 1e4)[done // 27 % 3]
        generator = torch.Generator().manual_seed(done)
        q, k, v = (torch.randn(1, 2, 33, 16, generator=generator) for _ in range(3))
        k = k[:, :, :1].expand_as(k).contiguous() if done % 5 == 0 else k * scale
        m = get_mechanism(name, p=p)
        rows = attention_weights(q, k, m).sum(-1)
        # Where every sigmoid of a row underflows, the row attends to nothing: attention._l1.
        empty = (rows == 0) & (m.phi == "sigmoid")
        expected = torch.ones_like(rows).masked_fill(empty, 0)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        for backend in ("eager", "rowblock", "cpu"):
            if backend == "cpu" and (name != "lssar" or BACKENDS["cpu"].missing()):
                continue
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = attend(*leaves, m, backend=backend)
            gradients = torch.autograd.grad(out.sum(), leaves)
            where = f"{name} p={p} scale={scale} {backend}"
            assert out.isfinite().all(), f"output of {where}"
            assert p > 1e4 or all(g.isfinite().all() for g in gradients), f"gradient of {where}"
        done += 1
    for bad in (0.999, 0, -1, math.nan, math.inf, True, "3"):
        refuse_exponent(bad)
    return Told(
        "rows sum to one (a sigmoid's, all of it underflown, to zero) and outputs are finite at "
        "every p; gradients are finite up to p = 1e4; p < 1, NaN, infinity and text are refused",
        times=done + 7,
    )


def refuse_exponent(p) -> None:
    from lssar.errors import UserError

    try:
        get_mechanism("lssar", p=p)
    except UserError:
        return
    raise AssertionError(f"p = {p!r} was taken")


@attack("numbers", "lengths 1 to 65,536 in 1 GiB, backend `auto`", full=2 * len(LENGTHS), short=24)
def lengths(times: int, folder: Path) -> Told:
    """Run each in a process that cannot have more: softmax, LSSAR, a mechanism without a kernel."""
    report = folder / "report.json"
    names = ("softmax", "lssar")
    for name in names:
        finish(lambda argv: measure(argv[0], times // 2, report), [name], folder / "log")
    peak = json.loads(report.read_text())
    # The matrix alone would be 16 GiB: a call that insists on it fails as an error, not as a crash.
    child = Child(lambda argv: too_much(), [], folder / "log")
    assert child.wait() == 0, child.shown()
    return Told(
        f"softmax and LSSAR took every length within the limit, {LENGTHS[times // 2 - 1]:,} the "
        "longest; the eager backend, made to hold a matrix beyond the limit, raised an error",
        times=2 * (times // 2) + 1,
        figures={"seconds at the longest": peak},
    )


def measure(name: str, count: int, report: Path) -> None:
    limit_memory()
    for length in LENGTHS[:count]:
        q, k, v = (torch.randn(1, 1, length, 16) for _ in range(3))
        began = time.perf_counter()
        with torch.no_grad():
            out = attend(q, k, v, name)
        assert out.shape == q.shape and out.isfinite().all(), f"{name} at {length}"
    known = json.loads(report.read_text()) if report.exists() else {}
    report.write_text(json.dumps(known | {name: round(time.perf_counter() - began, 2)}))


def too_much() -> None:
    limit_memory()
    q = torch.randn(1, 1, 32768, 16)
    try:
        with torch.no_grad():
            attend(q, q, q, "lssar", backend="eager")
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error).lower() or isinstance(error, MemoryError), error
    else:
        raise AssertionError("4 GiB fitted into 1")


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
