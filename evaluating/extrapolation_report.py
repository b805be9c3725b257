"""python -m evaluating.extrapolation_report results/x.json: loss by length in one short table.

Tables and figures of `eval_extrapolation.py`, made from its results file alone.
"""

import math
from pathlib import Path

from lssar.errors import UserError
from support.command import Parser, answer_early, run

KIND, LOSS = "extrapolation", "validation loss (nats per token)"


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("results", type=Path)
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import numpy as np

from evaluating import by_length
from evaluating.checkpoints import labels, series_label
from evaluating.results import AS_TRAINED, Results, read_results
from support import plots
from support.text import short_number, table


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Mean over segments and its standard error, which one segment alone cannot have."""
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def paired_differences(results: Results, reference: str) -> dict[by_length.Key, tuple]:
    """Every loss minus that of the reference run as trained at that length, by segment."""
    losses = {k: r.details["segment_losses"] for k, r in by_length.records(results, "loss").items()}
    differences = {}
    for key, values in losses.items():
        base = losses.get((reference, AS_TRAINED, key[2]))
        if base is not None and base is not values and None not in (*values, *base):
            differences[key] = mean_and_error(np.subtract(values, base))
    return differences


def short_table(results: Results) -> str:
    """Loss by length, its rise, and the context gain at the longest: one line per series."""
    if results.kind != KIND:
        raise UserError(f"{results.path} holds results of {results.kind!r}, not of {KIND!r}")
    names, gains = labels(results.runs), by_length.records(results, "context_gain")
    lengths = sorted({r.length for r in results.records})
    body = []
    for identity, variant, records in results.series("loss"):
        losses = {r.length: number(r.value, ".3f") for r in records}
        first, last = records[0].value, records[-1].value
        rise = None if None in (first, last) else last - first
        gain = gains.get((identity, variant, records[-1].length))
        label, shown = series_label(names[identity], variant), [losses.get(n, "") for n in lengths]
        ends = [number(rise, "+.3f"), number(gain.value, "+.3f") if gain else ""]
        body.append([label, *shown, *ends])
    return table(["validation loss at", *map(str, lengths), "rise", "context gain"], body)


def tables(results: Results, reference: str) -> str:
    """Loss, perplexity, context gain and difference from the reference run, by length."""
    losses, gains = (
        {k: (r.value, r.error) for k, r in by_length.records(results, quantity).items()}
        for quantity in ("loss", "context_gain")
    )
    perplexities = {k: (perplexity(loss), None) for k, (loss, _) in losses.items()}
    paired, base = paired_differences(results, reference), labels(results.runs)[reference]
    tokens = results.settings["tokens"]
    parts = (
        (f"validation loss over {tokens:,} tokens, ± standard error", losses, ".4f"),
        ("perplexity", perplexities, ".2f"),
        ("context gain: full minus near context on the same tokens (< 0: it helps)", gains, "+.4f"),
        (f"loss minus that of {base}, paired by segment", paired, "+.4f"),
    )
    shown = [
        by_length.table(
            results, title, found, lambda pair, form=form: number(pair[0], form, pair[1])
        )
        for title, found, form in parts
    ]
    return "\n".join(filter(None, shown))


def perplexity(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < 700 else None


def number(value: float | None, form: str, error: float | None = None) -> str:
    shown = "overflow" if value is None or math.isnan(value) else format(value, form)
    return shown if error is None else f"{shown} ±{error:.4f}"


def figures(results: Results) -> list[Path]:
    """Loss by length, context gain by length, and loss by position at the longest length."""
    figure, _ = by_length.draw(results, "loss", ylabel=LOSS)
    written = plots.save(figure, results.sibling(".png"))
    if results.find(quantity="context_gain"):
        ylabel = "context gain (nats): full − near"
        figure, axes = by_length.draw(results, "context_gain", ylabel=ylabel)
        axes.axhline(0, color="#777777", linewidth=0.9, zorder=1)
        written += plots.save(figure, results.sibling("-gain.png"))
    return written + plots.save(loss_by_position(results), results.sibling("-position.png"))


def loss_by_position(results: Results):
    longest = max(r.length for r in results.records)
    series = list(by_length.styled_series(results, "loss"))
    figure, axes = by_length.new_figure(series)
    for label, style, records in series:
        found = records[-1].details["by_position"]
        if records[-1].length != longest or any(b["loss"] is None for b in found):
            continue
        middles = [math.sqrt(b["from"] * b["to"]) for b in found]
        axes.plot(middles, [b["loss"] for b in found], label=label, **(style | {"marker": ""}))
    ticks = [2**e for e in range(4, longest.bit_length() + 1, 2) if 2**e <= longest]
    by_length.mark_lengths(axes, results, ticks)
    axes.set_xlabel(f"position in a window of {short_number(longest)} tokens")
    axes.set_ylabel(LOSS)
    plots.legend_below(figure, axes)
    return figure


def main(argv: list[str]) -> None:
    print(short_table(read_results(make_parser().parse_args(argv).results)))


if __name__ == "__main__":
    run(main)
