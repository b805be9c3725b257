"""Draws a filled table: by length, bars for one length, both ends, by exponent, by column.

Every mechanism has its own colour. A busy chart shows four lines in colour; all are named at their
ends.
"""

import math
import re
import textwrap
from collections import Counter

from paper.experiments import PASSKEY, Column, Row
from paper.tables import FilledTable
from support import plots
from support.text import short_number

FIRST = ("lssar", "softmax", "lssa", "ssmax")  # keep their colours where others become grey


def draw(filled: FilledTable):
    """Return the figure of a table; None where nothing was measured."""
    kinds = {"bars": bars, "ends": by_ends, "exponents": by_exponent, "columns": by_column}
    cells = (filled.cell(row, column) for row in filled.rows for column in filled.columns)
    if filled.table.figure == "none" or not any(cell.finite for cell in cells):
        return None
    return kinds.get(filled.table.figure, by_length)(filled)


def quantity(filled: FilledTable) -> str:
    """Name what the axis shows."""
    if filled.table.measured_by == PASSKEY:
        return "passkey accuracy (%)"
    return f"validation loss ({filled.table.unit})"


def mechanism(filled: FilledTable, row: Row) -> str:
    """Return the name of a row's mechanism."""
    cells = (filled.cell(row, column) for column in filled.columns)
    return next((cell.mechanism for cell in cells if cell.n), "")


def length_columns(filled: FilledTable) -> list[Column]:
    """Return the columns of losses or accuracies by length."""
    return [c for c in filled.columns if c.quantity in ("loss", "accuracy") and c.factor]


def drawn_rows(filled: FilledTable) -> list[Row]:
    """Return the rows that the figure shows."""
    chosen = filled.table.drawn
    return [row for row in filled.rows if not chosen or row.key in chosen]


def by_length(filled: FilledTable):
    """Draw one line per row; error bars are 95 % intervals of the mean over seeds.

    "gaps" draws the differences from the baseline instead, for rows that have different seeds.
    """
    table = filled.table
    gaps = table.figure == "gaps"
    columns = length_columns(filled)
    lengths = [filled.scale.length(column.factor) for column in columns]
    reach = [filled.reach(column) for column in columns]
    several = len(table.panels) > 1
    longest = max(len(row.title) for row in drawn_rows(filled))  # the titles stand beside the lines
    wide = several or len(drawn_rows(filled)) > 9 or longest > 40
    width = plots.PAGE if wide else 1.15 * plots.COLUMN
    height = max(2.5, 0.8 + 0.14 * len(drawn_rows(filled)) / len(table.panels))
    figure, grid = plots.figure(
        1, len(table.panels), width=width, height=height, squeeze=False, sharey=True
    )
    for axes, prefix in zip(grid[0], table.panels, strict=True):
        rows = [row for row in drawn_rows(filled) if row.key.startswith(prefix)]
        if gaps:
            rows = [row for row in rows if row.key != table.baseline and not row.control]
        rows.sort(key=lambda row: priority(filled, row))
        ends = draw_lines(axes, filled, rows, columns, gaps)
        if table.measured_by == PASSKEY and not gaps:
            axes.set_ylim(-3, 103)  # intervals may reach beyond what a share can be
        if None not in reach:
            axes.plot(lengths, reach, color=plots.GREY, linestyle=":", label="keys in reach")
            ends.append(("keys in reach", reach[-1], plots.GREY))
        plots.length_axis(axes, lengths, filled.scale.train_length)
        axes.set_xlabel("evaluation length (tokens)")
        if not several:
            plots.label_ends(axes, ends)
        elif rows:
            axes.set_title(rows[0].title.partition(",")[0], pad=12)
    if several:
        plots.legend_below(figure, grid[0, 0], columns=3)
    label = quantity(filled)
    if gaps:
        label = f"difference from {table.base.title}\n({table.unit}; 95 % interval)"
    grid[0, 0].set_ylabel(label)
    return figure


def summary(scales: dict[str, FilledTable]):
    """Draw README's figure: the headline, one panel per scale."""
    size = {"width": plots.PAGE if len(scales) > 1 else 1.15 * plots.COLUMN, "height": 3.0}
    figure, grid = plots.figure(1, len(scales), **size, squeeze=False, sharey=True)
    for axes, (name, filled) in zip(grid[0], scales.items(), strict=True):
        columns = length_columns(filled)
        draw_lines(axes, filled, drawn_rows(filled), columns, gaps=False)
        lengths = [filled.scale.length(column.factor) for column in columns]
        plots.length_axis(axes, lengths, filled.scale.train_length)
        axes.set_xlabel("evaluation length (bytes)")
        axes.set_title(name, pad=12)
    plots.legend_below(figure, grid[0, 0], columns=3)
    grid[0, 0].set_ylabel(quantity(next(iter(scales.values()))))
    return figure


def priority(filled: FilledTable, row: Row) -> tuple:
    """Return a sort key: the rows that keep their colours come first."""
    name = mechanism(filled, row)
    place = FIRST.index(name) if name in FIRST else len(FIRST)
    # p = 15 is the paper's LSSAR; only one line per mechanism keeps the colour.
    return row.control, row.key.endswith("-p3"), place


def draw_lines(axes, filled: FilledTable, rows: list[Row], columns: list[Column], gaps: bool):
    """Draw rows over lengths; return (label, height, colour) of every line's end.

    One colour per mechanism; its second and third line have other dashes.
    """
    seen = Counter()
    styles = []
    ends = []
    for row in rows:
        name = mechanism(filled, row)
        kind = (name, row.variant == "window")
        styles.append(plots.style(name, row.variant, seen[kind]))
        seen[kind] += 1
    for row, style in zip(rows, plots.coloured(styles), strict=True):
        points = []
        for column in columns:
            found = filled.difference(row, column) if gaps else filled.cell(row, column)
            if found is not None and found.mean is not None:
                length = filled.scale.length(column.factor)
                points.append((length, found.mean, found.half_width or 0))
        if points:
            x, y, spread = zip(*points, strict=True)
            label = row.title
            if len(filled.table.panels) > 1:  # the panel's title has the first part
                label = row.title.partition(", ")[2] or row.title
            axes.errorbar(x, y, yerr=spread, elinewidth=0.7, label=label, **style)
            ends.append((row.title, y[-1], style["color"]))
    return ends


def by_ends(filled: FilledTable):
    """Draw the loss at the first and last length, the lowest at the top, for many rows."""
    columns = length_columns(filled)
    first = columns[0]
    last = columns[-1]
    found = []
    for row in filled.rows:
        near = filled.cell(row, first)
        far = filled.cell(row, last)
        if near.finite and far.finite:
            found.append((row, near, far))
    found.sort(key=lambda ends: ends[2].mean)
    figure, axes = plots.figure(width=plots.PAGE, height=0.7 + 0.18 * len(found))
    for place, (row, near, far) in enumerate(found):
        style = plots.style(mechanism(filled, row), row.variant)
        look = {"color": style["color"], "marker": style["marker"], "markersize": 4}
        axes.plot([near.mean, far.mean], [place, place], color=style["color"], linewidth=1)
        for cell, fill in ((near, "white"), (far, style["color"])):
            spread = {"xerr": cell.half_width or 0, "elinewidth": 0.7, "markerfacecolor": fill}
            axes.errorbar(cell.mean, place, **look, **spread)
    axes.set_yticks(range(len(found)), [row.title for row, _, _ in found])
    ends = f"hollow at {filled.heading(first)}, filled at {filled.heading(last)}"
    axes.set_xlabel(f"{quantity(filled)}: {ends}", loc="right")  # titles may leave little room
    axes.invert_yaxis()
    return figure


def by_exponent(filled: FilledTable):
    """Draw the loss by exponent: a panel for each mechanism, a line for each length."""
    panels: dict[str, dict[int, Row]] = {}
    for stem in filled.table.panels:
        for row in filled.rows:
            found = re.fullmatch(rf"{stem}(\d+)", row.key)
            if found and filled.seeds(row):
                panels.setdefault(stem, {})[int(found[1])] = row
    if not panels:
        return None
    figure, grid = plots.figure(
        1, len(panels), width=plots.PAGE, height=2.6, squeeze=False, sharey=True
    )
    for axes, rows in zip(grid[0], panels.values(), strict=True):
        ends = []
        name = mechanism(filled, next(iter(rows.values())))
        for order, column in enumerate(filled.columns):
            cells = [(p, filled.cell(row, column)) for p, row in rows.items()]
            points = [(p, cell.mean) for p, cell in cells if cell.finite]
            if points:
                style = plots.style(name, order=order)
                axes.plot(*zip(*points, strict=True), **style)
                length = short_number(filled.scale.length(column.factor))
                ends.append((f"length {length}", points[-1][1], style["color"]))
        title = rows[min(rows)].title.partition(" p=")[0]
        axes.set(xlabel="exponent p", title=title, xticks=list(rows))
        plots.label_ends(axes, ends)
    grid[0, 0].set_ylabel(quantity(filled))
    return figure


def bars(filled: FilledTable):
    """Draw how far each row is from the baseline at one length, with its interval."""
    table = filled.table
    column = filled.columns[0]
    found = []
    for row in filled.rows:
        difference = filled.difference(row, column)
        if difference is not None:
            name = mechanism(filled, row)
            found.append((row.title, difference.mean, difference.half_width, name))
    if not found:
        return None
    figure, axes = plots.figure(width=1.2 * plots.COLUMN, height=0.8 + 0.22 * len(found))
    draw_bars(axes, found, alone=0.45)
    axes.invert_yaxis()
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    note = "pale: one seed; lines: 95 % interval"
    axes.set_xlabel(f"difference from {table.base.title} ({table.unit})\n{note}")
    return figure


def by_column(filled: FilledTable):
    """Draw one panel of bars per column, for tables whose columns have different units."""
    rows = [row for row in filled.rows if filled.seeds(row)]
    count = len(filled.columns)
    down = math.ceil(count / 4)
    across = math.ceil(count / down)
    height = 0.5 + down * (0.4 + 0.17 * len(rows))
    figure, grid = plots.figure(down, across, plots.PAGE, height, squeeze=False, sharey=True)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes, column in zip(grid.flat, filled.columns, strict=False):
        found = []
        for row in rows:
            cell = filled.cell(row, column)
            found.append((row.title, cell.mean, cell.half_width, cell.mechanism or row.key))
        draw_bars(axes, found)
        axes.set_title(textwrap.fill(filled.heading(column), 16))
        if column.percent:  # an interval may reach beyond what a share can be
            low, high = axes.get_xlim()
            axes.set_xlim(max(0, low), min(102, high))
        axes.locator_params(axis="x", nbins=4)
    grid[0, 0].invert_yaxis()
    return figure


def draw_bars(axes, found: list[tuple], alone: float = 1.0) -> None:
    """Draw (title, mean, half width, mechanism) from the top; `alone`: opacity without interval."""
    for place, (_, mean, spread, name) in enumerate(found):
        if mean is not None:
            opacity = alone if spread is None else 1
            axes.barh(place, mean, 0.7, color=plots.style(name)["color"], alpha=opacity)
        if spread is not None:
            axes.errorbar(mean, place, xerr=spread, color=plots.INK, elinewidth=0.9)
    axes.set_yticks(range(len(found)), [title for title, *_ in found])
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
