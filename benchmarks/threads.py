"""python benchmark.py threads --threads 2 --lengths 1024,4096 --out results/cpu/threads.json

How much faster several threads are than one: the fused CPU kernel, and PyTorch's flash softmax for
what this machine can give. One and several threads take turns in one process; a speed-up is the
median over the rounds of the two times of a round. Writes JSON and a figure.
"""

import statistics
from pathlib import Path

import torch

import plots
from benchmarks import measure
from benchmarks.attention import BASELINE, PHASES, steps_of
from benchmarks.sparsity import KERNEL, RANDOM, inputs_of
from errors import Parser, UserError, positive, process_count
from evaluation import lengths, table
from files import write_json

P = 15


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--lengths", type=lengths, default=[1024, 4096])
    parser.add_argument("--threads", type=process_count, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--out", type=Path, default=Path("results/threads.json"))
    options = parser.parse_args(argv)
    measure.check_writable(options.out)
    if reason := KERNEL.cannot("cpu", torch.float32, 64, P):
        raise UserError(f"the CPU kernel cannot be measured here: {reason}")
    rows = [row for n in options.lengths for row in measured(n, options.threads, options.rounds)]
    header = ["length", "", "phase", "1 thread, ms", f"{options.threads} threads, ms", "speed-up"]
    print(table(header, [_line(row) for row in rows]))
    settings = vars(options) | {"out": str(options.out)}
    machine = measure.machine("cpu")
    write_json(
        options.out, {"kind": "threads", "settings": settings, "machine": machine, "rows": rows}
    )
    for path in (options.out, *draw(rows, options.threads, options.out)):
        print(f"written: {path}")


def measured(length: int, threads: int, rounds: int) -> list[dict]:
    inputs, rows = inputs_of(RANDOM, length), []
    with measure.threads(None):
        for contestant in (BASELINE, KERNEL):
            for phase, step in zip(PHASES, steps_of(contestant, inputs, P), strict=True):
                times = [[_seconds(step, n) for n in (1, threads)] for _ in range(rounds + 1)][1:]
                one, several = (statistics.median(t) for t in zip(*times, strict=True))
                speed_up = statistics.median(a / b for a, b in times)
                rows.append(
                    {"length": length, "contestant": str(contestant), "phase": phase}
                    | {"one": one, "several": several, "speed_up": speed_up}
                )
    return rows


def _seconds(step: measure.Step, threads: int) -> float:
    torch.set_num_threads(threads)
    return measure.seconds_of(step, "cpu")


def _line(row: dict) -> list[str]:
    times = [f"{1000 * row[key]:.1f}" for key in ("one", "several")]
    return [f"{row['length']:,}", row["contestant"], row["phase"], *times, f"{row['speed_up']:.2f}"]


def draw(rows: list[dict], threads: int, out: Path) -> list[Path]:
    figure, axes = plots.figure(width=plots.COLUMN)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    series = dict.fromkeys((row["contestant"], row["phase"]) for row in rows)
    for contestant, phase in series:
        found = [r for r in rows if (r["contestant"], r["phase"]) == (contestant, phase)]
        style = plots.line(int(contestant == str(KERNEL)), PHASES.index(phase))
        speed_ups = [r["speed_up"] for r in found]
        axes.plot([r["length"] for r in found], speed_ups, **style, label=f"{contestant}, {phase}")
    axes.axhline(threads, color="#555555", linewidth=0.8)
    plots.length_axis(axes, lengths)
    axes.set(xlabel="length", ylabel=f"{threads} threads / 1 thread", ylim=(0, 1.05 * threads))
    axes.legend(loc="lower right")
    return plots.save(figure, out.with_suffix(".png"))
