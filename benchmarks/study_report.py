"""Records of a benchmark for the eye: one table, growth with the length, one figure."""

import math
import statistics
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

from evaluating.results import Record
from support import plots
from support.text import table

# Per study: the quantity of each panel, what it is drawn over, and whether on logarithmic scales.
FIGURES = {
    "attention": (("forward_ms", "forward_backward_ms", "forward_backward_MB"), "length", True),
    "sparsity": (("forward_ratio", "forward_backward_ratio"), "counted_share", False),
    "threads": (("forward_speed_up", "forward_backward_speed_up"), "length", False),
}


def title(quantity: str) -> str:
    return quantity.replace("forward_backward", "forward+backward").replace("_", " ")


def series(records: list[Record], quantity: str) -> dict[str, dict[int, float]]:
    """{name: {length: value}}; a name is the run and what sets its variant apart from others."""
    parts = [set(r.variant.split(", ")) for r in records]
    common = set.intersection(*parts)
    found: dict[str, dict[int, float]] = {}
    for record in (r for r in records if r.quantity == quantity):
        own = [part for part in record.variant.split(", ") if part not in common]
        found.setdefault(", ".join([record.run, *own]), {})[record.length] = record.value
    return found


def text(records: list[Record], left_out: list[str]) -> str:
    quantities = list(dict.fromkeys(r.quantity for r in records))
    columns = {q: series(records, q) for q in quantities}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lengths = list(dict.fromkeys(r.length for r in records))
    lines = [
        [name, f"{n:,}", *cells]
        for n in lengths
        for name in names
        if any(cells := [_cell(q, columns[q].get(name, {}).get(n)) for q in quantities])
    ]
    parts = [table(["", "length", *map(title, quantities)], lines)]
    if grown := slopes(records):
        panels = FIGURES["attention"][0]
        lines = [[name, *(f"{found[q]:.2f}" for q in panels)] for name, found in grown.items()]
        parts.append(table(["grows as length to the power", *map(title, panels)], lines))
    if left_out:
        parts.append("\n  ".join(["left out:", *left_out]))
    return "\n\n".join(parts)


def _cell(quantity: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if "share" in quantity else f"{value:,.2f}"


def slopes(records: list[Record]) -> dict[str, dict[str, float]]:
    """The exponent of growth where both times and memory are known at two lengths or more."""
    found: dict[str, dict[str, float]] = {}
    for quantity in FIGURES["attention"][0]:
        for name, points in series(records, quantity).items():
            if len(points) > 1:
                x = [math.log(n) for n in points]
                y = [math.log(max(v, 1e-9)) for v in points.values()]
                slope = statistics.linear_regression(x, y).slope
                found.setdefault(name, {})[quantity] = slope
    return {n: s for n, s in found.items() if len(s) == len(FIGURES["attention"][0])}


def curves(records: list[Record], quantity: str, over: str) -> dict[str, list[tuple]]:
    """{label: [(x, y)]}: one curve per series over the length, else one per length."""
    values = series(records, quantity)
    if over == "length":
        return {name: sorted(points.items()) for name, points in values.items()}
    x, lengths = series(records, over), dict.fromkeys(r.length for r in records)
    return {f"length {n:,}": sorted((x[k][n], values[k][n]) for k in x) for n in lengths}


def draw(study: str, records: list[Record], out: Path) -> list[Path]:
    """One panel per quantity; bars where there is only one length to draw over."""
    if study not in FIGURES:
        return []
    quantities, over, logarithmic = FIGURES[study]
    figure, panels = plots.figure(1, len(quantities), width=plots.PAGE, height=2.9)
    lengths = sorted({r.length for r in records})
    bars = over == "length" and len(lengths) == 1
    for axes, quantity in zip(panels, quantities, strict=True):
        axes.set_title(title(quantity))
        found = curves(records, quantity, over)
        if bars:
            names = list(found) if axes is panels[0] else [""] * len(found)
            values = [points[0][1] for points in found.values()]
            axes.barh(range(len(found)), values, color=plots.COLOURS[0])
            axes.set_yticks(range(len(found)), names)
            axes.invert_yaxis()
            continue
        for number, (name, points) in enumerate(found.items()):
            style = plots.line(number) | ({} if over == "length" else {"linestyle": "none"})
            axes.plot(*zip(*points, strict=True), **style, label=name)
        axes.set_xlabel(title(over))
        if over == "length":
            plots.length_axis(axes, lengths)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.axhline(1, color="#555555", linewidth=0.8)
            axes.set_ylim(0, None)
    plots.legend_below(figure, panels[0], columns=4)
    return plots.save(figure, out.with_suffix(".png"))
