"""The figure of every table: by length, bars for one length, both ends, by exponent, by column.

Every mechanism has its own colour. A busy chart shows four lines in colour; all are named at their
ends.
"""

import itertools
import math
import re
import textwrap
from collections import Counter, defaultdict

from paper.evidence import Line, Sheet
from paper.experiments import PASSKEY
from support import plots
from support.text import short_number

FIRST = ("lssar", "softmax", "lssa", "ssmax")  # keep their colours where others become grey


def draw(sheet: Sheet):
    """The figure of a table; None where nothing was measured."""
    measured = any(e.cell.finite for line in sheet.lines for e in line.entries)
    if not measured or sheet.table.figure == "none":
        return None
    kinds = {"bars": bars, "ends": by_ends, "exponents": by_exponent, "columns": by_column}
    return kinds.get(sheet.table.figure, by_length)(sheet)


def quantity(sheet: Sheet) -> str:
    passkey = sheet.table.folder == PASSKEY
    return "passkey accuracy (%)" if passkey else f"validation loss ({sheet.unit})"


def by_length(sheet: Sheet):
    """One line per row; error bars are 95 % intervals of the mean over seeds.

    "gaps" draws the comparisons with the baseline instead, for rows that have different seeds.
    """
    table, gaps = sheet.table, sheet.table.figure == "gaps"
    shown = [c for c, _ in sheet.columns if c.quantity in ("loss", "accuracy")]  # the first ones
    lengths = [sheet.scale.length(column.factor) for column in shown]
    reach = [sheet.reach(column) for column in shown]
    panels, several = len(table.panels), len(table.panels) > 1
    longest = max(len(line.row.title) for line in sheet.lines)  # they stand beside the lines
    wide = several or len(sheet.lines) > 9 or longest > 40
    width = plots.PAGE if wide else 1.15 * plots.COLUMN
    height = max(2.5, 0.8 + 0.14 * len(sheet.lines) / panels)
    figure, grid = plots.figure(1, panels, width, height, squeeze=False, sharey=True)
    for axes, prefix in zip(grid[0], table.panels, strict=True):
        lines = [n for n in sheet.lines if n.row.key.startswith(prefix)]
        if gaps:
            lines = [n for n in lines if n.entries[0].comparison and not n.row.control]
        ends = draw_lines(axes, sorted(lines, key=priority), lengths, gaps)
        if table.folder == PASSKEY and not gaps:  # intervals may reach beyond what a share can be
            axes.set_ylim(-3, 103)
        if None not in reach:
            axes.plot(lengths, reach, color=plots.GREY, linestyle=":", label="keys in reach")
            ends.append(("keys in reach", reach[-1], plots.GREY))
        plots.length_axis(axes, lengths, sheet.scale.train_length)
        axes.set_xlabel("evaluation length (tokens)")
        if several:
            axes.set_title(lines[0].row.title.partition(",")[0], pad=12)
        else:
            plots.label_ends(axes, ends)
    if several:
        plots.legend_below(figure, grid[0, 0], columns=3)
    gap = gaps and f"difference from {table.base.title}\n({sheet.unit}; 95 % interval)"
    grid[0, 0].set_ylabel(gap or quantity(sheet))
    return figure


def priority(line: Line) -> tuple:
    place = FIRST.index(line.mechanism) if line.mechanism in FIRST else len(FIRST)
    # p = 15 is the paper's LSSAR; only one line per mechanism keeps the colour.
    return line.row.control, line.row.key.endswith("-p3"), place


def draw_lines(axes, lines: list[Line], lengths: list[int], gaps: bool) -> list:
    """Draw rows over lengths; return (label, height, colour) of every line's end.

    One colour per mechanism; its second and third line have other dashes.
    """
    seen, styles, ends = Counter(), [], []
    for line in lines:
        kind = line.mechanism, line.row.variant == "window"
        styles.append(plots.style(line.mechanism, line.row.variant, seen[kind]))
        seen[kind] += 1
    for line, style in zip(lines, plots.coloured(styles), strict=True):
        title, points = line.row.title, []
        for length, e in zip(lengths, line.entries, strict=False):
            y = e.comparison.mean if gaps else e.cell.mean
            spread = e.comparison.half_width if gaps else e.cell.half_width
            points += [(length, y, spread or 0)] if y is not None else []
        if points:
            x, y, spread = zip(*points, strict=True)
            label = title.partition(", ")[2] or title
            axes.errorbar(x, y, yerr=spread, elinewidth=0.7, label=label, **style)
            ends.append((title, y[-1], style["color"]))
    return ends


def by_ends(sheet: Sheet):
    """For a table of many rows: the loss at its first and last length, the lowest at the top."""
    first, *_, last = (i for i, (c, _) in enumerate(sheet.columns) if c.quantity == "loss")
    found = [(n, [n.entries[i].cell for i in (first, last)]) for n in sheet.lines]
    found = [(line, cells) for line, cells in found if all(cell.finite for cell in cells)]
    found.sort(key=lambda one: one[1][1].mean)
    figure, axes = plots.figure(width=plots.PAGE, height=0.7 + 0.18 * len(found))
    for place, (line, cells) in enumerate(found):
        look = {k: plots.style(line.mechanism, line.row.variant)[k] for k in ("color", "marker")}
        axes.plot([cell.mean for cell in cells], [place] * 2, color=look["color"], linewidth=1)
        for cell, fill in zip(cells, ("white", look["color"]), strict=True):
            spread = {"xerr": cell.half_width or 0, "elinewidth": 0.7, "markerfacecolor": fill}
            axes.errorbar(cell.mean, place, **look, **spread, markersize=4)
    low = min((cell.mean for _, cells in found for cell in cells), default=0)
    *_, high, last_high = (0, 0, *sorted(max(c.mean for c in cells) for _, cells in found))
    if len(found) > 2 and last_high - low > 3 * (high - low):  # one row would flatten all others
        axes.set_xlim(right=high + (high - low) / 3)
        beside = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.annotate(f"{last_high:.2f} \N{RIGHTWARDS ARROW}", (1, len(found) - 1), **beside)
    axes.set_yticks(range(len(found)), [line.row.title for line, _ in found])
    ends = f"hollow at {sheet.columns[first][1]}, filled at {sheet.columns[last][1]}"
    axes.set_xlabel(f"{quantity(sheet)}: {ends}", loc="right")  # titles may leave little room
    axes.invert_yaxis()
    return figure


def by_exponent(sheet: Sheet):
    """One panel per start of the rows' keys, of those that were measured; one line per length."""
    stems: dict[str, dict[int, Line]] = defaultdict(dict)
    for stem, line in itertools.product(sheet.table.panels, sheet.lines):
        found = re.fullmatch(rf"{stem}(\d+)", line.row.key)
        if found and any(entry.cell.finite for entry in line.entries):
            stems[stem][int(found[1])] = line
    if not stems:
        return None
    size = {"width": plots.PAGE, "height": 2.6, "sharey": True, "squeeze": False}
    figure, ((*panels,),) = plots.figure(1, len(stems), **size)
    for axes, lines in zip(panels, stems.values(), strict=True):
        ends = []
        mechanism = next((line.mechanism for line in lines.values() if line.mechanism), "")
        for i, (column, _) in enumerate(sheet.columns):
            cells = [(p, line.entries[i].cell) for p, line in lines.items()]
            if points := [(p, cell.mean) for p, cell in cells if cell.finite]:
                style = plots.style(mechanism, order=i)
                axes.plot(*zip(*points, strict=True), **style)
                length = short_number(sheet.scale.length(column.factor))
                ends.append((f"length {length}", points[-1][1], style["color"]))
        title = lines[min(lines)].row.title.partition(" p=")[0]
        axes.set(xlabel="exponent p", title=title, xticks=list(lines))
        plots.label_ends(axes, ends)
    panels[0].set_ylabel(quantity(sheet))
    return figure


def bars(sheet: Sheet):
    """One length: how far each row is from the baseline, with the interval that judges it."""
    base, found, label = sheet.table.base, [], quantity(sheet)
    for line in sheet.lines:
        cell, compared = line.entries[0].cell, line.entries[0].comparison
        mean = cell.mean if compared is None else compared.mean
        if mean is not None and line.row is not base:
            found.append((line, mean, compared and compared.half_width, line.mechanism))
    if not found:
        return None
    figure, axes = plots.figure(width=1.2 * plots.COLUMN, height=0.8 + 0.22 * len(found))
    draw_bars(axes, found, alone=0.45)
    axes.invert_yaxis()
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    if base is not None:
        label = f"difference from {base.title} ({sheet.unit})\npale: one seed; lines: 95 % interval"
    axes.set_xlabel(label)
    return figure


def by_column(sheet: Sheet):
    """One panel of bars per column, for tables whose columns have different units."""
    lines = [n for n in sheet.lines if any(e.cell.finite for e in n.entries)]
    count = len(sheet.columns)
    down = math.ceil(count / 4)
    across = math.ceil(count / down)
    height = 0.5 + down * (0.4 + 0.17 * len(lines))
    figure, grid = plots.figure(down, across, plots.PAGE, height, squeeze=False, sharey=True)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for i, (axes, (column, title)) in enumerate(zip(grid.flat, sheet.columns, strict=False)):
        cells = [(line, line.entries[i].cell) for line in lines]
        draw_bars(axes, [(n, c.mean, c.half_width, c.mechanism or n.row.key) for n, c in cells])
        axes.set_title(textwrap.fill(title, 16))
        if column.percent:  # an interval may reach beyond what a share can be
            low, high = axes.get_xlim()
            axes.set_xlim(max(0, low), min(102, high))
        axes.locator_params(axis="x", nbins=4)
    grid[0, 0].invert_yaxis()
    return figure


def draw_bars(axes, found: list[tuple[Line, float | None, float | None, str]], alone=1.0) -> None:
    """(row, mean, spread, mechanism) from the top; `alone` is the opacity without a spread."""
    for place, (_, mean, spread, mechanism) in enumerate(found):
        if mean is not None:
            opacity, colour = alone if spread is None else 1, plots.style(mechanism)["color"]
            axes.barh(place, mean, 0.7, color=colour, alpha=opacity)
        if spread is not None:
            axes.errorbar(mean, place, xerr=spread, color=plots.INK, elinewidth=0.9)
    axes.set_yticks(range(len(found)), [line.row.title for line, *_ in found])
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
