"""Draws every figure in one style: sized for a paper's column, safe for the colour-blind.

figure, axes = plots.figure(width=plots.COLUMN)
axes.plot(x, y, **plots.style("lssar"), label="LSSAR")
plots.save(figure, "results/x.png")  # and results/x.pdf

A mechanism has the same colour and marker in every figure; its variants, exponents, sizes and
seeds differ in their dashes.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lssar.errors import UserError
from support.files import first_line, whole_file, writing
from support.text import short_number

try:
    import matplotlib.pyplot as plt
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, NullFormatter
except ValueError as error:
    reason = f"matplotlib does not start ({first_line(error):.60}...)"
    raise UserError(f"{reason}; correct MPLBACKEND, or unset it") from None

COLUMN = 3.4  # inches: one column of a two-column paper
PAGE = 7.0  # inches: its full width

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))
GREY = "#9a9a9a"
INK = "#222222"
# A mechanism has the colour and marker of the longest of these prefixes of its name.
MECHANISMS = {
    "lssar": ("#0072B2", "o"),
    "softmax": ("#D55E00", "s"),
    "lssa": ("#009E73", "D"),
    "ssmax": ("#CC79A7", "^"),
    "sigmoid": ("#56B4E9", "v"),
    "relu": ("#E69F00", "P"),
    "cos-": ("#808000", "p"),  # softmax of cosines
    "softmax-": ("#8B5A2B", "X"),  # inverse, re-centred, re-weighted
    "": ("#6A51A3", "h"),
}
MOST_COLOURS = 4  # lines in colour in a busy chart; the others are grey
SEQUENTIAL = "cividis"  # for heatmaps: also ordered in grey and for the colour-blind

plt.switch_backend("agg")
plt.style.use(Path(__file__).with_name("figures.mplstyle"))
plt.rcParams["text.parse_math"] = False  # a run may have `$` in its name


def figure(rows: int = 1, columns: int = 1, width: float = COLUMN, height: float = 2.4, **options):
    """Return a figure and its axes, as `plt.subplots` does; sizes in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def style(mechanism: str, variant: str = "", order: int = 0) -> dict:
    """Return plot arguments of a mechanism; its `order`-th line in a figure sets the dashes.

    A sliding window is the control: black, with the marker of the mechanism it is applied to.
    """
    colour, marker = MECHANISMS[max(filter(mechanism.startswith, MECHANISMS), key=len)]
    if variant.startswith("window"):
        colour = INK
        order = max(order, 1)
    return {"color": colour, "marker": marker, "linestyle": DASHES[order % len(DASHES)]}


def coloured(styles: list[dict]) -> list[dict]:
    """Return the styles; in a busy chart only the first four and the control keep their colour."""
    others = [i for i, found in enumerate(styles) if found["color"] != INK][MOST_COLOURS:]
    faded = {"color": GREY, "linewidth": 0.9, "markersize": 2.5, "zorder": 1.5}
    return [found | (faded if i in others else {}) for i, found in enumerate(styles)]


def label_ends(axes, lines: list[tuple[str, float, str]], size: float = 6.5) -> None:
    """Write each (label, y, colour) to the right of the axes, near y and without overlaps."""
    axes.figure.draw_without_rendering()  # the axes have their height only now
    points = 72 / axes.figure.dpi
    bottom, top = points * axes.bbox.y0, points * axes.bbox.y1
    found = sorted((points * axes.transData.transform((1, y))[1], t, y, c) for t, y, c in lines)
    gap = min(1.25 * size, (top - bottom) / max(1, len(found)))
    heights = [place for place, *_ in found]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    limit = top
    for i in reversed(range(len(heights))):  # push labels above the top down again
        heights[i] = min(heights[i], limit)
        limit = heights[i] - gap
    for height, (place, label, y, colour) in zip(heights, found, strict=True):
        axes.annotate(
            label,
            (1, y),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(5, height - place),
            va="center",
            annotation_clip=False,
            fontsize=size,
            color="#666666" if colour == GREY else colour,
        )


def line(number: int, *, marker: bool = True) -> dict:
    """Return plot arguments of something other than a mechanism: a colour and a marker."""
    again, colour = divmod(number, len(COLOURS))  # when colours repeat, markers differ
    look = {"color": COLOURS[colour]}
    if marker:
        look["marker"] = MARKERS[(number + again) % len(MARKERS)]
    return look


def length_axis(axes, lengths: list[int], train_length: int | None = None) -> None:
    """Make the axis logarithmic with one tick per length, and mark the training length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_number(n) for n in lengths])
    axes.set_xticks([], minor=True)
    if train_length is not None:
        axes.axvline(train_length, color="#777777", linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(
            "training length",
            (train_length, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(-3, 2),
            fontsize=6,
            color="#555555",
        )


def heatmap(axes, values, *, low: float, high: float, numbers: bool = False):
    """Draw a matrix as colours, NaN in grey; `numbers` writes each value into its cell."""
    colours = plt.get_cmap(SEQUENTIAL).with_extremes(bad="#dddddd")
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
    axes.grid(False)
    if numbers:
        for (row, column), value in np.ndenumerate(values):
            text = f"{value:.0f}" if np.isfinite(value) else ""
            ink = "black" if value > (low + high) / 2 else "white"
            axes.text(column, row, text, color=ink, fontsize=5, ha="center", va="center")
    return image


def is_busy(styles: Iterable[dict]) -> bool:
    """Say whether some lines are grey, and so need names at their ends instead of a legend."""
    return any(style["color"] == GREY for style in styles)


def name_lines(axes, columns: int = 2) -> None:
    """Draw a legend below the figure; in a busy chart, names at the ends of the lines."""
    handles, names = axes.get_legend_handles_labels()
    # A handle is a line, or error bars around one.
    lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
    if is_busy({"color": line.get_color()} for line in lines):
        ends = [(line.get_ydata()[-1], line.get_color()) for line in lines]
        label_ends(axes, [(name, *end) for name, end in zip(names, ends, strict=True)])
    else:
        legend_below(axes.figure, axes, columns)


def legend_below(figure, axes, columns: int = 2) -> None:
    """Draw the legend of `axes` under the whole figure, where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


# Without dates and versions, the same figure gives the same bytes.
METADATA = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None, "Creator": None},
}


def plain_ticks(figure) -> None:
    """Write the numbers of logarithmic axes as they are: 10^3 would need mathematics in labels."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(NullFormatter())


def save(figure, path: str | Path, suffixes: tuple[str, ...] = (".png", ".pdf")) -> list[Path]:
    """Write PATH.png and PATH.pdf, each whole or not at all, and close the figure."""
    targets = [Path(path).with_suffix(suffix) for suffix in suffixes]
    with writing(Path(path)), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box, which is warning enough.
        warnings.filterwarnings("ignore", message="Glyph")
        plain_ticks(figure)
        for label in figure.findobj(Text):  # a name from a stranger's file may not be Unicode
            label.set_text(label.get_text().encode(errors="backslashreplace").decode())
        for target in targets:
            with whole_file(target) as file:
                kind = target.suffix.removeprefix(".")
                figure.savefig(file, format=kind, metadata=METADATA[target.suffix])
    plt.close(figure)
    return targets


def publish(figure, path: str | Path) -> None:
    """Save a figure, and print where."""
    for target in save(figure, path):
        print(f"figure: {target}")
