"""Table and figures of `passkey.py`, made from its results file alone."""

import math
from pathlib import Path

import numpy as np

import plots
from evaluation import labels, series_label, table
from extrapolation_report import common_train_length, styled_series
from results_io import Results


def tables(results: Results) -> str:
    names = labels(results.checkpoints)
    lengths = sorted({row["length"] for row in results.rows})
    body = []
    for identity, variant, rows in results.series():
        cells = {row["length"]: _cell(row) for row in rows}
        label = series_label(names[identity], variant)
        body.append([label, *(cells.get(n, "") for n in lengths)])
    title = f"passkey accuracy over {results.settings['trials']} trials, 95 % Wilson interval"
    return f"\n{title}\n" + table(["", *map(str, lengths)], body)


def _cell(row: dict) -> str:
    low, high = (round(100 * row[k]) for k in ("wilson_low", "wilson_high"))
    return f"{100 * row['accuracy']:.0f} % [{low}, {high}]"


def figures(results: Results) -> list[Path]:
    written = plots.save(accuracy_by_length(results), results.sibling(".png"))
    return written + plots.save(accuracy_by_depth(results), results.sibling("-depth.png"))


def accuracy_by_length(results: Results):
    figure, axes = plots.figure(height=2.1 + 0.08 * len(list(results.series())))
    for label, style, rows in styled_series(results):
        accuracy = np.array([row["accuracy"] for row in rows])
        low, high = (np.array([row[k] for row in rows]) for k in ("wilson_low", "wilson_high"))
        errors = 100 * np.maximum(0, [accuracy - low, high - accuracy])
        axes.errorbar(
            [row["length"] for row in rows],
            100 * accuracy,
            yerr=errors,
            elinewidth=0.7,
            label=label,
            clip_on=False,
            **style,
        )
    lengths = sorted({row["length"] for row in results.rows})
    plots.length_axis(axes, lengths, common_train_length(results))
    axes.set(xlabel="prompt length (tokens)", ylabel="passkey accuracy (%)", ylim=(0, 100))
    plots.legend_below(figure, axes)
    return figure


def accuracy_by_depth(results: Results):
    """A panel a series: length across, depth of the key down, accuracy as colour and number."""
    series = list(styled_series(results))
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
        shares = np.array([[_share(part) for part in row["by_depth"]] for row in found]).T
        image = plots.heatmap(axes, 100 * shares, low=0, high=100, numbers=True)
        axes.set_xticks(range(len(found)), [plots.short_number(r["length"]) for r in found])
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
