"""Tables and figures of a quantity by length: one row or line per run and variant."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from evaluating.checkpoints import labels, series_label
from evaluating.results import AS_TRAINED, Record, Results
from support import plots, text

Key = tuple[str, str, int]  # run, variant, length


def records(results: Results, quantity: str) -> dict[Key, Record]:
    return {(r.run, r.variant, r.length): r for r in results.select(quantity=quantity)}


def table(results: Results, title: str, found: dict, cell: Callable) -> str:
    """A row for each series that has anything; nothing at all where none has."""
    names = labels(results.runs)
    lengths = sorted({r.length for r in results.records})
    rows = []
    for run, variant in dict.fromkeys((r.run, r.variant) for r in results.records):
        cells = [found.get((run, variant, n)) for n in lengths]
        if any(cells):
            label = series_label(names[run], variant)
            rows.append([label, *(cell(c) if c else "" for c in cells)])
    return f"\n{title}\n" + text.table(["", *map(str, lengths)], rows) if rows else ""


def styled_series(results: Results, quantity: str) -> Iterator[tuple[str, dict, list[Record]]]:
    """(label, style, records): one colour per mechanism, one dash per run or variant of it."""
    names, runs, order = labels(results.runs), list(results.runs), Counter()
    series = sorted(results.series(quantity), key=lambda s: (runs.index(s[0]), s[1] != AS_TRAINED))
    for run, variant, found in series:
        mechanism = results.runs[run]["model"]["attention"]["name"]
        style = plots.style(mechanism, variant, order[mechanism])
        order[mechanism] += 1
        yield series_label(names[run], variant).replace("alpha", "α"), style, found


def new_figure(series: list):
    """One column wide, with room for the legend below."""
    return plots.figure(height=2.1 + 0.16 * math.ceil(len(series) / 2))


def mark_lengths(axes, results: Results, lengths: list[int]) -> None:
    """Marks the training length where all runs have the same."""
    trained = {run["train_length"] for run in results.runs.values()}
    plots.length_axis(axes, lengths, trained.pop() if len(trained) == 1 else None)


def draw(
    results: Results,
    quantity: str,
    *,
    xlabel: str = "evaluation length (tokens)",
    ylabel: str,
    scale: float = 1,
    errors: Callable[[Record], tuple[float, float]] = lambda r: (r.error or 0, r.error or 0),
):
    """Lines with errors below and above, bars where there is one length; None is left out."""
    series = list(styled_series(results, quantity))
    lengths = sorted({r.length for r in results.select(quantity=quantity)})
    figure, axes = new_figure(series)
    for place, (label, style, found) in enumerate(series):
        if not (found := [r for r in found if r.value is not None]):
            continue
        values = [scale * r.value for r in found]
        spread = [[scale * e for e in side] for side in zip(*map(errors, found), strict=True)]
        if len(lengths) == 1:
            bar = {"color": style["color"], "error_kw": {"elinewidth": 0.8}}
            axes.bar([place], values, 0.8, yerr=spread, **bar)
        else:
            x = [r.length for r in found]
            axes.errorbar(x, values, spread, elinewidth=0.7, label=label, clip_on=False, **style)
    if len(lengths) == 1:
        figure.set_figheight(3.2)  # the names below the bars need room
        axes.grid(False, axis="x")
        axes.set_axisbelow(True)
        axes.set_xticks(range(len(series)), [s[0] for s in series], rotation=30, ha="right")
        axes.set_xlabel(f"{xlabel}: {text.short_number(lengths[0])}")
    else:
        mark_lengths(axes, results, lengths)
        axes.set_xlabel(xlabel)
        plots.legend_below(figure, axes)
    axes.set_ylabel(ylabel)
    return figure, axes
