"""Tables and figures of `eval_extrapolation.py`, some of them also for other evaluations."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from evaluating.checkpoints import labels, series_label
from evaluating.results import AS_TRAINED, Record, Results
from support import plots
from support.text import short_number, table

LOSS, LENGTH = "validation loss (nats per token)", "evaluation length (tokens)"
LEGEND_LINE = 0.16  # inches, below the axes; it has two columns
Key = tuple[str, str, int]  # run, variant, length


def by_key(results: Results, quantity: str) -> dict[Key, Record]:
    return {(r.run, r.variant, r.length): r for r in results.select(quantity=quantity)}


def table_by_length(results: Results, title: str, quantity: str, show: Callable) -> str:
    """`show(record)` makes a cell. One row per series that has any; no table without rows."""
    names, rows = labels(results.runs), []
    lengths = sorted({r.length for r in results.records})
    for identity, variant, found in results.series(quantity):
        cells = {r.length: show(r) for r in found}
        if any(cells.values()):
            label = series_label(names[identity], variant)
            rows.append([label, *(cells.get(n, "") for n in lengths)])
    return f"\n{title}\n" + table(["", *map(str, lengths)], rows) if rows else ""


def number(value: float | None, form: str, error: float | None = None) -> str:
    shown = "overflow" if value is None or math.isnan(value) else format(value, form)
    return shown if error is None else f"{shown} ±{error:.4f}"


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Mean over segments and its standard error, None for a single segment."""
    count = len(values)
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return float(values.mean()), error


def paired_differences(results: Results, reference: str) -> dict[Key, tuple]:
    """Every loss minus that of the reference run as trained at that length, by segment."""
    losses = {k: r.details["by_segment"] for k, r in by_key(results, "loss").items()}
    differences = {}
    for key, values in losses.items():
        base = losses.get((reference, AS_TRAINED, key[2]))
        if base is not None and base is not values and None not in (*values, *base):
            differences[key] = mean_and_error(np.subtract(values, base))
    return differences


def tables(results: Results, reference: str) -> str:
    """Return loss, bits per byte, perplexity, far-context benefit and paired differences."""
    paired = paired_differences(results, reference).items()
    differences = {key: number(value, "+.4f", error) for key, (value, error) in paired}
    title = f"validation loss over {results.settings['tokens']:,} tokens, ± standard error"
    helps = "far-context benefit: near minus full context on the same tokens (> 0: it helps)"
    against = f"loss minus that of {labels(results.runs)[reference]}, paired by segment"
    parts = (
        (title, "loss", lambda r: number(r.value, ".4f", r.error)),
        ("bits per byte", "bits_per_byte", lambda r: number(r.value, ".4f", r.error)),
        ("perplexity", "loss", lambda r: number(perplexity(r.value), ".2f")),
        (helps, "far_context_benefit", lambda r: number(r.value, "+.4f", r.error)),
        (against, "loss", lambda r: differences.get((r.run, r.variant, r.length), "")),
    )
    return "\n".join(filter(None, (table_by_length(results, *part) for part in parts)))


def perplexity(loss: float | None) -> float | None:
    return None if loss is None or loss >= 700 else math.exp(loss)  # that of 710 overflows


def short_table(results: Results) -> str:
    """Return loss by length, its rise, and the far-context benefit at the longest length."""
    names, lengths, rows = labels(results.runs), sorted({r.length for r in results.records}), []
    benefits = by_key(results, "far_context_benefit")
    bits = by_key(results, "bits_per_byte")
    for identity, variant, found in results.series("loss"):
        losses = {r.length: number(r.value, ".3f") for r in found}
        first, last = found[0].value, found[-1].value
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
    """(label, style, records): one colour per mechanism, one dash per run or variant of it; of
    many lines, the first four have colours."""
    names, runs, order = labels(results.runs), list(results.runs), Counter()
    series = sorted(results.series(quantity), key=lambda s: (runs.index(s[0]), s[1] != AS_TRAINED))
    styles, shown = [], []
    for identity, variant, _ in series:
        mechanism = results.runs[identity]["model"]["attention"]["name"]
        kind = "window" if variant.startswith("window") else mechanism  # windows are all black
        styles.append(plots.style(mechanism, variant, order[kind] + (kind == "window")))
        shown.append(series_label(names[identity], variant).replace("alpha", "α"))
        order[kind] += 1
    found = [records for *_, records in series]
    return list(zip(shown, plots.coloured(styles) if lines else styles, found, strict=True))


def with_error(record: Record) -> tuple[float, float, float]:
    return record.value, record.error or 0, record.error or 0


def figure_by_length(results: Results, quantity: str, ylabel: str, xlabel=LENGTH, point=with_error):
    """Lines, or bars if there is one length; `point` gives a record's value and its two errors."""
    lengths = sorted({r.length for r in results.select(quantity=quantity)})
    series = styled_series(results, quantity, lines=len(lengths) > 1)
    figure, axes = figure_of(series)
    for place, (label, style, found) in enumerate(series):
        points = [(r.length, *point(r)) for r in found if r.value is not None]
        if not points:
            continue
        x, y, *spread = zip(*points, strict=True)
        if len(lengths) == 1:
            bar = {"color": style["color"], "error_kw": {"elinewidth": 0.8}}
            axes.bar([place], y, 0.8, yerr=spread, **bar)
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
    if plots.is_busy(style for _, style, _ in series):
        return plots.figure(width=plots.PAGE, height=max(2.5, 0.8 + 0.14 * len(series)))
    return plots.figure(height=2.1 + LEGEND_LINE * math.ceil(len(series) / 2))


def finish_axes(axes, results: Results, ticks: list[int], xlabel: str, ylabel: str) -> None:
    """Lengths across, with a mark at the training length if all runs share it; names of lines."""
    trained = {run["train_length"] for run in results.runs.values()}
    plots.length_axis(axes, ticks, trained.pop() if len(trained) == 1 else None)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    plots.name_lines(axes)


def loss_by_position(results: Results):
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
    xlabel = f"position in a window of {short_number(longest)} tokens"
    finish_axes(axes, results, ticks, xlabel, LOSS)
    return figure


def figures(results: Results) -> None:
    """Draw loss and far-context benefit by length, and loss by position at the longest length."""
    plots.publish(figure_by_length(results, "loss", LOSS)[0], results.sibling(".png"))
    if results.find(quantity="far_context_benefit"):
        label = "far-context benefit (nats): near − full"
        figure, axes = figure_by_length(results, "far_context_benefit", label)
        axes.axhline(0, color="#777777", linewidth=0.9, zorder=1)
        plots.publish(figure, results.sibling("-benefit.png"))
    plots.publish(loss_by_position(results), results.sibling("-position.png"))
