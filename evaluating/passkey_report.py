"""Table and figures of `passkey.py`, made from its results file alone."""

import math
from pathlib import Path

import numpy as np

from evaluating.by_length import figure_by_length, styled_series
from evaluating.checkpoints import labels
from evaluating.results import Record, Results
from evaluating.variants import series_label
from support import plots
from support.text import short_number, table


def tables(results: Results) -> str:
    names = labels(results.runs)
    lengths = sorted({r.length for r in results.records})
    body = []
    for identity, variant, records in results.series("accuracy"):
        cells = {r.length: _cell(r) for r in records}
        label = series_label(names[identity], variant)
        body.append([label, *(cells.get(n, "") for n in lengths)])
    title = f"passkey accuracy over {results.settings['trials']} trials, 95 % Wilson interval"
    return f"\n{title}\n" + table(["", *map(str, lengths)], body)


def _cell(record: Record) -> str:
    low, high = (round(100 * record.details[k]) for k in ("wilson_low", "wilson_high"))
    return f"{100 * record.value:.0f} % [{low}, {high}]"


def figures(results: Results) -> list[Path]:
    words = {"xlabel": "prompt length (tokens)", "ylabel": "passkey accuracy (%)"}
    figure, axes = figure_by_length(results, "accuracy", scale=100, errors=_interval, **words)
    axes.set_ylim(0, 100)
    written = plots.save(figure, results.sibling(".png"))
    return written + plots.save(accuracy_by_depth(results), results.sibling("-depth.png"))


def _interval(record: Record) -> tuple[float, float]:
    low, high = record.details["wilson_low"], record.details["wilson_high"]
    return max(0, record.value - low), max(0, high - record.value)


def accuracy_by_depth(results: Results):
    """One panel per series: length across, depth of the key down, accuracy as colour and number."""
    series = list(styled_series(results, "accuracy"))
    columns = 2 if len(series) == 4 else min(3, len(series))
    rows = math.ceil(len(series) / columns)
    figure, grid = plots.figure(
        rows,
        columns,
        width=plots.COLUMN if columns == 1 else plots.PAGE,
        height=0.5 + 1.9 * rows,
        squeeze=False,
    )
    for axes, (label, _, found) in zip(grid.flat, series, strict=False):
        shares = np.array([[_share(part) for part in r.details["by_depth"]] for r in found]).T
        image = plots.heatmap(axes, 100 * shares, low=0, high=100, numbers=True)
        axes.set_xticks(range(len(found)), [short_number(r.length) for r in found])
        depths = len(shares)
        axes.set_yticks([-0.5, depths / 2 - 0.5, depths - 0.5], ["0", "50", "100"])
        axes.set_title(label)
    for axes in grid.flat[len(series) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("depth of the key (%)")
    for index in range(max(0, len(series) - columns), len(series)):  # the last of each column
        grid.flat[index].set_xlabel("prompt length (tokens)")
    figure.colorbar(image, ax=grid, label="accuracy (%)", fraction=0.03, pad=0.02)
    return figure


def _share(part: dict) -> float:
    return part["correct"] / part["trials"] if part["trials"] else math.nan
