"""python benchmark.py sparsity --threads 1 --lengths 1024,4096 --out results/cpu/sparsity.json

The fused CPU kernel beside PyTorch's flash softmax at every sparsity. The kernel leaves out entries
too small to count; their share grows with the exponent p, and where all keys but one are nearly
alike most entries count. All cases take turns in one process; a ratio is of medians, to
F.scaled_dot_product_attention at the same length. Writes JSON and a figure.
"""

from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

import plots
from attention import attention_weights, get_mechanism
from benchmarks import measure
from benchmarks.attention import BASELINE, PHASES, Contestant, make_inputs, steps_of
from errors import Parser, UserError, positive, process_count
from evaluation import lengths, table
from files import write_json

KERNEL = Contestant("lssar", "cpu")
# How far the keys are from each other, all but one that lies opposite; None: keys at random.
RANDOM, ALIKE = None, 1e-4
SPREADS = (RANDOM, ALIKE, 1e-2, 3e-2, 1e-1)
CASES = (
    *((RANDOM, p) for p in (1, 1.5, 2, 3, 5, 8, 15, 40)),
    *((spread, p) for spread in SPREADS[1:] for p in (2, 15)),
)


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--lengths", type=lengths, default=[1024, 4096])
    parser.add_argument("--threads", type=process_count, help="default all")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/sparsity.json"))
    options = parser.parse_args(argv)
    measure.check_writable(options.out)
    if reason := KERNEL.cannot("cpu", torch.float32, 64, 15):
        raise UserError(f"the CPU kernel cannot be measured here: {reason}")
    with measure.threads(options.threads):
        rows = [row for length in options.lengths for row in measured(length, options.rounds)]
        machine = measure.machine("cpu")
    print(f"ratios to F.scaled_dot_product_attention, {machine['threads']} threads")
    header = ["length", "keys", "p", "entries that count", *PHASES]
    print(table(header, [_line(row) for row in rows]))
    settings = vars(options) | {"out": str(options.out)}
    write_json(
        options.out,
        {
            "kind": "sparsity",
            "settings": settings,
            "machine": machine,
            "rows": rows,
        },
    )
    for path in (options.out, *draw(rows, options.out)):
        print(f"written: {path}")


def measured(length: int, rounds: int) -> list[dict]:
    inputs = {spread: inputs_of(spread, length) for spread in SPREADS}
    steps = dict(zip(PHASES, steps_of(BASELINE, inputs[RANDOM], 1), strict=True))
    for spread, p in CASES:
        made = steps_of(KERNEL, inputs[spread], p)
        steps |= {(spread, p, phase): s for phase, s in zip(PHASES, made, strict=True)}
    seconds = measure.median_seconds(steps, device="cpu", rounds=rounds)
    return [
        {"length": length, "spread": spread, "p": p, "share": counting(*inputs[spread][:2], p)}
        | {phase: seconds[spread, p, phase] / seconds[phase] for phase in PHASES}
        for spread, p in CASES
    ]


def inputs_of(spread: float | None, length: int) -> tuple[Tensor, ...]:
    shape = {"batch": 1, "heads": 12, "head_dim": 64, "device": "cpu", "dtype": "fp32"}
    q, k, v, grad = make_inputs(Namespace(**shape, inputs="random"), length)
    if spread is not RANDOM:
        base = torch.randn(1, 12, 1, 64, generator=torch.Generator().manual_seed(1))
        q, k = base + 0.1 * q, base + spread * k
        k[:, :, 0] = -base[:, :, 0]
    return q, k, v, grad


@torch.no_grad()
def counting(q: Tensor, k: Tensor, p: float) -> float:
    """The share of a head's visible entries whose z^(p-1) is at least 2^-24 / N_i."""
    weights = attention_weights(q[:, :1].double(), k[:, :1].double(), get_mechanism("lssar", p=p))
    sharp = (weights / weights.amax(-1, keepdim=True)) ** ((p - 1) / p)
    seen = torch.arange(1, weights.shape[-1] + 1)[:, None]
    counts = (weights > 0) & (sharp >= 2**-24 / seen)
    return (counts.sum() / seen.sum()).item()


def _line(row: dict) -> list[str]:
    keys = "random" if row["spread"] is RANDOM else f"within {row['spread']:g}"
    cells = [f"{row['length']:,}", keys, f"{row['p']:g}", f"{row['share']:.1%}"]
    return [*cells, *(f"{row[phase]:.2f}" for phase in PHASES)]


def draw(rows: list[dict], out: Path) -> list[Path]:
    figure, axes = plots.figure(width=plots.COLUMN)
    series = [(n, phase) for n in dict.fromkeys(r["length"] for r in rows) for phase in PHASES]
    for number, (length, phase) in enumerate(series):
        points = [(r["share"], r[phase]) for r in rows if r["length"] == length]
        style = plots.line(number) | {"linestyle": "none"}
        axes.plot(*zip(*points, strict=True), **style, label=f"{length:,} {phase}")
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set(xlabel="share of entries that count", ylabel="time / flash softmax", ylim=(0, None))
    axes.legend(loc="lower right")
    return plots.save(figure, out.with_suffix(".png"))
