"""Prints and draws losses, accuracies and benefits by length."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from evaluating.checkpoints import labels, series_label
from evaluating.results import AS_TRAINED, Record, Results
from support import plots
from support.text import short_number, table

LOSS = "validation loss (nats per token)"
LENGTH = "evaluation length (tokens)"
LEGEND_LINE = 0.16  # inches, below the axes; it has two columns
Key = tuple[str, str, int]  # run, variant, length


def by_key(results: Results, quantity: str) -> dict[Key, Record]:
    """Return the records of a quantity by run, variant and length."""
    return {(r.run, r.variant, r.length): r for r in results.select(quantity=quantity)}


def table_by_length(results: Results, title: str, quantity: str, show: Callable) -> str:
    """Return a table with a row for each series and `show(record)` in its cells; "" if empty."""
    names = labels(results.runs)
    lengths = sorted({r.length for r in results.records})
    rows = []
    for identity, variant, found in results.series(quantity):
        cells = {r.length: show(r) for r in found}
        if any(cells.values()):
            label = series_label(names[identity], variant)
            rows.append([label, *(cells.get(n, "") for n in lengths)])
    return f"\n{title}\n" + table(["", *map(str, lengths)], rows) if rows else ""


def number(value: float | None, form: str, error: float | None = None) -> str:
    """Write a number with its error, or the word "overflow" where it is not finite."""
    shown = "overflow" if value is None or math.isnan(value) else format(value, form)
    return shown if error is None else f"{shown} ±{error:.4f}"


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Return the mean over segments and its standard error, None for a single segment."""
    count = len(values)
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return float(values.mean()), error


def paired_differences(results: Results, reference: str) -> dict[Key, tuple]:
    """Return every loss minus the reference run's at the same length, paired by segment."""
    losses = {k: r.details["by_segment"] for k, r in by_key(results, "loss").items()}
    differences = {}
    for key, values in losses.items():
        base = losses.get((reference, AS_TRAINED, key[2]))
        if base is not None and base is not values and None not in (*values, *base):
            differences[key] = mean_and_error(np.subtract(values, base))
    return differences


def tables(results: Results, reference: str) -> str:
    """Return loss, bits per byte, perplexity, far-context benefit and paired differences."""
    differences = paired_differences(results, reference)

    def loss(record: Record) -> str:
        return number(record.value, ".4f", record.error)

    def signed(record: Record) -> str:
        return number(record.value, "+.4f", record.error)

    def perplexity(record: Record) -> str:
        too_large = record.value is None or record.value >= 700  # exp(710) overflows
        return number(None if too_large else math.exp(record.value), ".2f")

    def difference(record: Record) -> str:
        found = differences.get((record.run, record.variant, record.length))
        return number(found[0], "+.4f", found[1]) if found else ""

    tokens = f"{results.settings['tokens']:,}"
    name = labels(results.runs)[reference]
    parts = [
        (f"validation loss over {tokens} tokens, ± standard error", "loss", loss),
        ("bits per byte", "bits_per_byte", loss),
        ("perplexity", "loss", perplexity),
        (
            "far-context benefit: near minus full context on the same tokens (> 0: it helps)",
            "far_context_benefit",
            signed,
        ),
        (f"loss minus that of {name}, paired by segment", "loss", difference),
    ]
    shown = [table_by_length(results, *part) for part in parts]
    return "\n".join(part for part in shown if part)


def short_table(results: Results) -> str:
    """Return loss by length, its rise, and the far-context benefit at the longest length."""
    names = labels(results.runs)
    lengths = sorted({r.length for r in results.records})
    rows = []
    benefits = by_key(results, "far_context_benefit")
    bits = by_key(results, "bits_per_byte")
    for identity, variant, found in results.series("loss"):
        losses = {r.length: number(r.value, ".3f") for r in found}
        first = found[0].value
        last = found[-1].value
        rise = None if None in (first, last) else last - first
        benefit = benefits.get((identity, variant, found[-1].length))
        ends = [number(rise, "+.3f"), number(benefit.value, "+.3f") if benefit else ""]
        if bits:
            known = bits.get((identity, variant, found[0].length))
            ends.append(number(known.value, ".3f") if known else "")
        label = series_label(names[identity], variant)
        rows.append([label, *(losses.get(n, "") for n in lengths), *ends])
    header = ["validation loss at", *map(str, lengths), "rise", "far-context benefit"]
    return table([*header, *([f"bits per byte at {lengths[0]}"] if bits else [])], rows)


def styled_series(results: Results, quantity: str, lines: bool = True) -> list[tuple]:
    """Return (label, style, records) of each series, runs in order, each first as trained.

    A mechanism has one colour, and each of its runs and variants a dash. In a chart of many lines,
    only the first four have colours.
    """
    names = labels(results.runs)
    runs = list(results.runs)
    order = Counter()  # of the series of each mechanism

    def by_run(found: tuple) -> tuple:
        run, variant, _ = found
        return runs.index(run), variant != AS_TRAINED

    series = sorted(results.series(quantity), key=by_run)
    styles = []
    shown = []
    for identity, variant, _ in series:
        mechanism = results.runs[identity]["model"]["attention"]["name"]
        kind = "window" if variant.startswith("window") else mechanism  # windows are all black
        styles.append(plots.style(mechanism, variant, order[kind] + (kind == "window")))
        shown.append(series_label(names[identity], variant).replace("alpha", "α"))
        order[kind] += 1
    if lines:
        styles = plots.coloured(styles)
    return list(zip(shown, styles, [records for _, _, records in series], strict=True))


def with_error(record: Record) -> tuple[float, float, float]:
    """Return the value with its error below and above it."""
    return record.value, record.error or 0, record.error or 0


def figure_by_length(results: Results, quantity: str, ylabel: str, xlabel=LENGTH, point=with_error):
    """Draw lines, or bars if there is one length; `point` gives a value and its two errors."""
    lengths = sorted({r.length for r in results.select(quantity=quantity)})
    series = styled_series(results, quantity, lines=len(lengths) > 1)
    figure, axes = figure_of(series)
    for place, (label, style, found) in enumerate(series):
        points = [(r.length, *point(r)) for r in found if r.value is not None]
        if not points:
            continue
        x, y, *spread = zip(*points, strict=True)
        if len(lengths) == 1:
            axes.bar(
                [place], y, 0.8, yerr=spread, color=style["color"], error_kw={"elinewidth": 0.8}
            )
        else:
            axes.errorbar(x, y, spread, elinewidth=0.7, label=label, clip_on=False, **style)
    if len(lengths) > 1:
        finish_axes(axes, results, lengths, xlabel, ylabel)
        return figure, axes
    figure.set_figheight(3.2)  # the names below the bars need room
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
    axes.set_xticks(range(len(series)), [s[0] for s in series], rotation=30, ha="right")
    axes.set(xlabel=f"{xlabel}: {short_number(lengths[0])}", ylabel=ylabel)
    return figure, axes


def figure_of(series: list[tuple]):
    """Make a figure that has room for the names of the series."""
    if plots.is_busy(style for _, style, _ in series):
        return plots.figure(width=plots.PAGE, height=max(2.5, 0.8 + 0.14 * len(series)))
    return plots.figure(height=2.4 + LEGEND_LINE * math.ceil(len(series) / 2))


def finish_axes(axes, results: Results, ticks: list[int], xlabel: str, ylabel: str) -> None:
    """Write the lengths, a mark at the training length if all runs share it, and the names."""
    trained = {run["train_length"] for run in results.runs.values()}
    plots.length_axis(axes, ticks, trained.pop() if len(trained) == 1 else None)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    plots.name_lines(axes)


def loss_by_position(results: Results):
    """Draw the loss by position in a sequence of the longest length."""
    longest = max(r.length for r in results.records)
    series = styled_series(results, "loss")
    figure, axes = figure_of(series)
    for label, style, found in series:
        buckets = found[-1].details["by_position"]
        if found[-1].length == longest and all(b["loss"] is not None for b in buckets):
            middles = [math.sqrt(b["from"] * b["to"]) for b in buckets]
            style = style | {"marker": ""}
            axes.plot(middles, [b["loss"] for b in buckets], label=label, **style)
    ticks = [2**e for e in range(4, longest.bit_length() + 1, 2) if 2**e <= longest]
    xlabel = f"position in a sequence of {short_number(longest)} tokens"
    finish_axes(axes, results, ticks, xlabel, LOSS)
    return figure


def figures(results: Results) -> None:
    """Draw loss and far-context benefit by length, and loss by position at the longest length."""
    plots.publish(figure_by_length(results, "loss", LOSS)[0], results.sibling(".png"))
    if results.find(quantity="far_context_benefit"):
        label = "far-context benefit (nats)"
        figure, axes = figure_by_length(results, "far_context_benefit", label)
        axes.axhline(0, color="#777777", linewidth=0.9, zorder=1)
        plots.publish(figure, results.sibling("-benefit.png"))
    plots.publish(loss_by_position(results), results.sibling("-position.png"))
