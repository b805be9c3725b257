"""The look of every figure: sized for a paper's column, vector and pixels, colour-blind-safe.

figure, axes = plots.figure(width=plots.COLUMN)
axes.plot(x, y, **plots.line(0), label="LSSAR")
plots.save(figure, "results/x.png")  # and results/x.pdf
"""

import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from files import writing

COLUMN, PAGE = 3.4, 7.0  # inches: one column of a two-column paper, and its full width

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))
SEQUENTIAL = "cividis"  # for heatmaps: the same order in grey and for every kind of colour vision

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "legend.handlelength": 2.2,
        "legend.columnspacing": 1.2,
        "legend.handletextpad": 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "lines.linewidth": 1.3,
        "lines.markersize": 3.5,
        "errorbar.capsize": 0,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 220,
        "pdf.fonttype": 42,  # text stays text
    }
)


def figure(
    rows: int = 1, columns: int = 1, *, width: float = COLUMN, height: float = 2.4, **options
):
    """A figure and its axes, as `plt.subplots` gives them; sizes in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def line(colour: int, dash: int = 0, *, marker: bool = True) -> dict:
    """Plot arguments: one colour and marker a model, one dash a variant of it."""
    again = colour // len(COLOURS)  # when colours repeat, markers differ
    style = {"color": COLOURS[colour % len(COLOURS)], "linestyle": DASHES[dash % len(DASHES)]}
    return style | ({"marker": MARKERS[(colour + again) % len(MARKERS)]} if marker else {})


def short_number(n: float) -> str:
    """128, 1.5K, 16K: a length as papers print it."""
    return f"{n / 1024:g}K" if n >= 1024 and n % 128 == 0 else f"{n:g}"


def length_axis(axes, lengths: list[int], train_length: int | None = None) -> None:
    """A logarithmic axis with a tick a length, and a mark where training ended."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [short_number(n) for n in lengths])
    if train_length is not None:
        axes.axvline(train_length, color="#777777", linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(
            "training length",
            (train_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 2),
            textcoords="offset points",
            fontsize=6,
            color="#555555",
        )


def heatmap(axes, values, *, low: float, high: float, numbers: bool = False):
    """A matrix as colours, absent values in grey; `numbers` writes each into its cell."""
    colours = plt.get_cmap(SEQUENTIAL).with_extremes(bad="#dddddd")
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
    axes.grid(False)
    if numbers:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "black" if value > (low + high) / 2 else "white"
                axes.text(
                    column, row, f"{value:.0f}", color=ink, fontsize=5, ha="center", va="center"
                )
    return image


def legend_below(figure, axes, columns: int = 2) -> None:
    """The legend of `axes` under the whole figure, where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def save(figure, path: str | Path) -> list[Path]:
    """Write PATH.png and PATH.pdf, the same bytes for the same figure, and forget the figure."""
    path, written = Path(path), []
    with writing(path), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box, which says it all.
        warnings.filterwarnings("ignore", message="Glyph")
        for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
            target = path.with_suffix(suffix)
            figure.savefig(target, metadata=metadata)
            written.append(target)
    plt.close(figure)
    return written
