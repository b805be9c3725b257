"""python -m benchmarks.theory --out results/theory.json

Computes what the paper derives about its attention, on random rows: `--draws 5` of them, float64.

    rate           d log g / dx of the gradient g = dA/dx of the winner's stage-one weight in its
                   own score, at x = 40: -1 if it decays as exp(-x)
    power          d log g / d log x at x = 10^6: -2 if it decays as 1 / x^2
    power_here     the same at the largest score that LSSAR has, log d log N
    gradient       dw/dx of the final weight where it is w = 0.99, in units of softmax's w (1 - w)
    identity       largest |l1(x^p) - softmax(p log x)|
    ties           largest distance from 1/t of t tied maxima's weights, as p goes to infinity
    feedback       share of the keys with weight zero that still receive a gradient
    dead           share of the rows of N keys of which a single one survives: no score of these
                   rows receives a gradient
    overflow       largest stage-one weight of a row of N keys for which x^15 is finite, by type
    cosine_needed  by a key for half of the weight among N random keys of d dimensions;
                   null where even a perfect match gets less
"""

import math
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluating.protocol import open_results
from evaluating.results import Record
from lssar.mechanisms import get_mechanism
from lssar.reference import attention_weights
from support import plots
from support.command import Parser, run, whole

KEYS = 1024
DIM = 64
P = 15
STAGE_ONE = {"softmax": torch.exp, "lssa": F.softplus}
FINAL = {"softmax": torch.exp, "softmax-p15": torch.exp, "lssar-p15": F.softplus}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COUNTS = (1024, 4096, 16384)
SIZES = (*product((16, 32, 64, 128), (256, 4096)), (64, 16384))  # head dimension, keys
COSINES = ("cos-softmax-constant", "cos-ssmax", "cos-softmax", "lssa", "lssar-p3", "lssar-p15")


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--draws", type=whole(2, 100), default=5)
    return parser


def scores(draw: int, keys: int = KEYS, rows: int = 1) -> Tensor:
    """Return LSSAR's scores (rows, keys) of queries and keys of random directions."""
    random = torch.Generator().manual_seed(draw)
    q = torch.randn(rows, DIM, generator=random, dtype=torch.float64)
    k = torch.randn(keys, DIM, generator=random, dtype=torch.float64)
    scale = math.log(DIM) * math.log(keys)
    return scale * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T


def stage_one_weights(phi, x: Tensor) -> Tensor:
    """Return l1(phi(x)) of a row of scores."""
    return torch.softmax(x, 0) if phi is torch.exp else F.normalize(phi(x), p=1, dim=0)


def final_weights(phi, sharpened: bool, x: Tensor) -> Tensor:
    """Return the weights of a row of scores up to a factor: relu(N A - 1)^p over its maximum."""
    a = stage_one_weights(phi, x)
    if not sharpened:
        return a
    y = F.relu(a - 1 / len(a))
    return (y / y.detach().max()) ** P


def bisect(falls_short, high: float, steps: int) -> tuple[float, float]:
    """Return two neighbouring numbers in [0, high]: the first falls short, the second does not."""
    low = 0.0
    for _ in range(steps):
        middle = (low + high) / 2
        if falls_short(middle):
            low = middle
        else:
            high = middle
    return low, high


def log_gradient(phi, others: Tensor, x: float) -> float:
    """Return log dA/dx of the winner's stage-one weight A = phi(x) / (phi(x) + C)."""
    x = torch.tensor(x, dtype=others.dtype)
    if phi is torch.exp:  # log A (1 - A), which cannot underflow
        odds = x - others.logsumexp(-1)
        return (F.logsigmoid(odds) + F.logsigmoid(-odds)).item()
    total = phi(others).sum()
    # The slope of softplus is the sigmoid.
    return (F.logsigmoid(x) + total.log() - 2 * (phi(x) + total).log()).item()


def slope(phi, others: Tensor, x: float, step: float = 1e-3) -> float:
    """Return d log g / d log x by a difference quotient."""
    high = log_gradient(phi, others, x * (1 + step))
    low = log_gradient(phi, others, x * (1 - step))
    return (high - low) / (math.log1p(step) - math.log1p(-step))


def gradient_at(phi, sharpened: bool, others: Tensor, weight: float = 0.99) -> float:
    """Return dw/dx over w (1 - w) at the score x that gives the winner the final weight w."""

    def log_odds(x: Tensor) -> Tensor:
        w = final_weights(phi, sharpened, torch.cat((x, others)))
        return w[0].log() - w[1:].sum().log()

    wanted = math.log(weight / (1 - weight))

    def falls_short(x: float) -> Tensor:
        return log_odds(others.new_tensor([x])) < wanted

    found, _ = bisect(falls_short, high=1e6, steps=200)
    x = others.new_tensor([found]).requires_grad_()
    return torch.autograd.grad(log_odds(x), x)[0].item()


def identity_error(draw: int) -> float:
    """Return the largest |l1(x^p) - softmax(p log x)| of a row."""
    x = F.relu(KEYS * F.normalize(F.softplus(scores(draw)), p=1, dim=-1) - 1)
    direct = F.normalize(x**P, p=1, dim=-1)
    in_logs = torch.softmax(P * x.log(), -1)
    return (direct - in_logs).abs().max().item()


def ties_error(draw: int, p: float = 1e5) -> float:
    """Return how far the weights of t tied maxima are from 1/t at a large p."""
    errors = []
    for ties in (1, 2, 5):
        x = F.softplus(scores(draw)[0])
        x[:ties] = x.max() + 0.1
        w = torch.softmax(p * x.log(), -1)
        errors.append((w[:ties] - 1 / ties).abs().max().item())
    return max(errors)


def feedback(draw: int, phi, sharpened: bool) -> float:
    """Return the share of the keys of weight zero whose scores the largest weight depends on."""
    x = scores(draw)[0].requires_grad_()
    w = F.normalize(final_weights(phi, sharpened, x), p=1, dim=0)
    (slopes,) = torch.autograd.grad(w[w.argmax()], x)
    return (slopes[w == 0] != 0).double().mean().item()


def dead_rows(draw: int, keys: int, rows: int = 4096) -> float:
    """Return the share of rows in which one key alone is above the mean."""
    f = F.softplus(scores(draw, keys, rows))
    survivors = (f > f.mean(-1, keepdim=True)).sum(-1)
    return (survivors == 1).double().mean().item()


def overflow(kind: torch.dtype, keys: int) -> float:
    """Return the largest weight, at most 1, whose (N A - 1)^p is finite."""

    def is_finite(weight: float) -> Tensor:
        return (torch.tensor(keys * weight - 1).to(kind) ** P).isfinite()

    _, largest = bisect(is_finite, high=1.0, steps=60)
    return round(largest, 6)


def cosine_needed(row: str, dim: int, keys: int, draw: int) -> float | None:
    """Return the cosine a key needs for half of the weight among keys of random directions.

    Found by bisection on the attention itself; None where a perfect match gets less.
    """
    random = torch.Generator().manual_seed(draw)
    q, side = torch.linalg.qr(torch.randn(dim, 2, generator=random, dtype=torch.float64))[0].T
    k = torch.randn(keys, dim, generator=random, dtype=torch.float64)
    name, _, p = row.partition("-p")
    mechanism = get_mechanism(name, p=float(p) if p else None)

    def too_little(cosine: float) -> Tensor:
        k[0] = cosine * q + math.sqrt(1 - cosine**2) * side
        unit = F.normalize(k, dim=-1)[None, None]
        return attention_weights(q[None, None, None], unit, mechanism)[..., 0] < 0.5

    if too_little(1.0):
        return None
    _, enough = bisect(too_little, high=1.0, steps=14)
    return enough


def measure(draw: int) -> dict[tuple[str, str, str], float | None]:
    """Return the numbers by row, quantity, and the task: the sizes they depend on."""
    others = scores(draw)[0, 1:]
    found = {}
    for row, phi in STAGE_ONE.items():
        found[row, "rate", ""] = slope(phi, others, 40.0) / 40
        if phi is not torch.exp:
            found[row, "power", ""] = slope(phi, others, 1e6)
        found[row, "power_here", ""] = slope(phi, others, math.log(DIM) * math.log(KEYS))
    for row, phi in FINAL.items():
        found[row, "gradient", ""] = gradient_at(phi, row != "softmax", others)
    found["lssar-p15", "identity", ""] = identity_error(draw)
    found["lssar-p15", "ties", ""] = ties_error(draw)
    found["lssar-p15", "feedback", ""] = feedback(draw, F.softplus, True)
    found["relu-l1", "feedback", ""] = feedback(draw, F.relu, False)
    for keys in (4, 8, 16, 64):
        found["lssar-p15", "dead", str(keys)] = dead_rows(draw, keys)
    for (name, kind), keys in product(TYPES.items(), COUNTS):
        found[name, "overflow", str(keys)] = overflow(kind, keys)
    for row, (dim, keys) in product(COSINES, SIZES):
        found[row, "cosine_needed", f"{dim}/{keys}"] = cosine_needed(row, dim, keys, draw)
    return found


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    settings = {"draws": arguments.draws, "keys": KEYS, "dim": DIM, "p": P}
    results = open_results(arguments.out, "theory", settings, about={})
    records = []
    for draw in range(arguments.draws):
        for (row, quantity, task), value in measure(draw).items():
            name = f"{row}-s{draw}"
            attention = {"name": row.partition("-p")[0]}
            results.runs[name] = {"run": name, "seed": draw, "model": {"attention": attention}}
            records.append(Record(quantity, name, value, task=task))
    results.add(*records)  # all or none: a file with some of the draws would count as finished
    for path in plots.save(figure(), results.sibling(".png")):
        print(f"figure: {path}")


def figure():
    """Draw gradients of stage one by score, cosines needed and largest weights by row length."""
    drawn, (left, middle, right) = plots.figure(1, 3, width=plots.PAGE, height=2.7)
    counts = [2**n for n in range(7, 15)]
    draw_gradients(left)
    draw_cosines(middle, counts)
    draw_overflow(right, counts)
    for axes in (left, middle, right):
        axes.legend(fontsize=5)
    return drawn


def draw_gradients(axes) -> None:
    others = scores(0)[0, 1:]
    x = torch.logspace(0, 5, 100).tolist()
    for row, phi in STAGE_ONE.items():
        gradients = [math.exp(log_gradient(phi, others, one)) for one in x]
        axes.plot(x, gradients, **plots.style(row) | {"marker": ""}, label=row)
    axes.axvline(math.log(DIM) * math.log(KEYS), color=plots.INK, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", ylim=(1e-12, 1), xlabel="score x of the winner")
    axes.set_title("gradient of stage one;\ndotted: LSSAR's largest score")


def draw_cosines(axes, counts: list[int]) -> None:
    for order, row in enumerate(COSINES):
        needed = [cosine_needed(row, DIM, n, 0) for n in counts]
        shown = [math.nan if cosine is None else cosine for cosine in needed]
        axes.plot(counts, shown, **plots.style(row, order=order % 2), label=row)
    axes.set(xscale="log", ylim=(0, 1), xlabel="keys N", title="cosine for half of the weight")


def draw_overflow(axes, counts: list[int]) -> None:
    for number, (name, kind) in enumerate(TYPES.items()):
        limits = [overflow(kind, n) for n in counts]
        axes.plot(counts, limits, **plots.line(number), label=name)
    axes.set(xscale="log", yscale="log", xlabel="keys N")
    axes.set_title(f"largest weight without\noverflow of x^{P}")


if __name__ == "__main__":
    run(main)
