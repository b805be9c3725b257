"""Figures of a quantity by length: one line per run and variant, bars where there is one length."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from evaluating.checkpoints import labels
from evaluating.results import AS_TRAINED, Record, Results
from evaluating.variants import series_label
from support import plots
from support.text import short_number


def styled_series(results: Results, quantity: str) -> Iterator[tuple[str, dict, list[Record]]]:
    """(label, style, records): one colour per mechanism, one dash per run or variant of it."""
    names, runs, order = labels(results.runs), list(results.runs), Counter()
    found = sorted(results.series(quantity), key=lambda s: (runs.index(s[0]), s[1] != AS_TRAINED))
    for run, variant, records in found:
        mechanism = results.runs[run]["model"]["attention"]["name"]
        style = plots.style(mechanism, variant, order[mechanism])
        order[mechanism] += 1
        yield series_label(names[run], variant).replace("alpha", "α"), style, records


def new_figure(series: list):
    """One column wide, with room for the legend below."""
    return plots.figure(height=2.1 + 0.16 * math.ceil(len(series) / 2))


def standard_error(record: Record) -> tuple[float, float]:
    return record.error or 0, record.error or 0


def figure_by_length(
    results: Results,
    quantity: str,
    *,
    xlabel: str = "evaluation length (tokens)",
    ylabel: str,
    scale: float = 1,
    errors: Callable[[Record], tuple[float, float]] = standard_error,
):
    """Values times `scale`, with their errors below and above; what overflowed is left out."""
    series = [
        (label, style, [r for r in records if r.value is not None])
        for label, style, records in styled_series(results, quantity)
    ]
    lengths = sorted({r.length for r in results.select(quantity=quantity)})
    figure, axes = new_figure(series)
    for place, (label, style, records) in enumerate(series):
        values = [scale * r.value for r in records]
        spread = [[scale * e for e in side] for side in zip(*map(errors, records), strict=True)]
        if records and len(lengths) == 1:
            bar = {"color": style["color"], "error_kw": {"elinewidth": 0.8}}
            axes.bar([place], values, 0.8, yerr=spread, **bar)
        elif records:
            x = [r.length for r in records]
            axes.errorbar(x, values, spread, elinewidth=0.7, label=label, clip_on=False, **style)
    if len(lengths) == 1:
        figure.set_figheight(3.2)  # the names below the bars need room
        axes.grid(False, axis="x")
        axes.set_axisbelow(True)
        axes.set_xticks(range(len(series)), [s[0] for s in series], rotation=30, ha="right")
        axes.set_xlabel(f"{xlabel}: {short_number(lengths[0])}")
    else:
        plots.length_axis(axes, lengths, common_train_length(results))
        axes.set_xlabel(xlabel)
        plots.legend_below(figure, axes)
    axes.set_ylabel(ylabel)
    return figure, axes


def common_train_length(results: Results) -> int | None:
    found = {run["train_length"] for run in results.runs.values()}
    return found.pop() if len(found) == 1 else None
