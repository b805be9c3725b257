"""A line chart as inline SVG: its colours are the page's, so that it is at home in light and dark.

Two panels beside each other, the paper's numbers and the measured ones of the same rows, each with
its own axis: at another scale only the shapes of the curves can be compared.
"""

import math
from dataclasses import dataclass

from reporting.markup import Html, join, tag
from reporting.records import Row, Table

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 24, 14, 46
COLOURS = 7  # classes s0..s6 of page.css

MOST_LINES = 7
LARGEST = 1e12  # what is beyond is no result, and would flatten all others

MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-4.6L4.6 3.6H-4.6z",
    "M0 4.6L4.6-3.6H-4.6z",
    "M-1.4-4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z",
)


@dataclass(frozen=True)
class Point:
    x: int  # column
    y: float
    spread: float = 0.0


@dataclass(frozen=True)
class Series:
    title: str
    style: int
    dashed: bool
    points: list[Point]


def headline_rows(table: Table) -> list[Row]:
    """Rows with the most seeds: what the table is about; more lines would hide each other."""
    drawn = [row for row in table.rows if len(measured_points(table, row)) > 1]
    seeds = {row.key: max(cell.n for cell in row.measured if cell) for row in drawn}
    return [row for row in drawn if seeds[row.key] == max(seeds.values())][:MOST_LINES]


def columns_of(table: Table) -> range:
    """The first columns of one metric: keys are METRIC@LENGTH, or lengths alone."""
    metrics = [column.key.rpartition("@")[0] for column in table.columns]
    same = next((i for i, metric in enumerate(metrics) if metric != metrics[0]), len(metrics))
    return range(same)


def measured_points(table: Table, row: Row) -> list[Point]:
    return [
        Point(i, cell.mean, min(cell.sd or 0.0, LARGEST))
        for i in columns_of(table)
        if (cell := row.measured[i]) and cell.mean is not None and abs(cell.mean) < LARGEST
    ]


def paper_points(table: Table, row: Row) -> list[Point]:
    return [
        Point(i, value)
        for i in columns_of(table)
        if (value := row.paper[i]) is not None and abs(value) < LARGEST
    ]


def can_be_drawn(table: Table) -> bool:
    """A comparison needs two lines."""
    return len(headline_rows(table)) > 1


def chart(table: Table, paper_unit: str, *, common_axis: bool) -> Html:
    """Both panels and their common legend."""
    rows = headline_rows(table)
    ticks = [column.title for column in table.columns]
    paper_ticks = [column.paper or "" for column in table.columns]
    measured = [series(row, i, measured_points(table, row)) for i, row in enumerate(rows)]
    paper = [series(row, i, paper_points(table, row)) for i, row in enumerate(rows)]
    paper = [s for s in paper if len(s.points) > 1]
    axis = axis_ticks(measured + paper if common_axis else measured)
    panels = [panel("Measured here", table.unit, measured, ticks, axis)]
    if paper:
        axis = axis if common_axis else axis_ticks(paper)
        panels.insert(0, panel("The paper", paper_unit, paper, paper_ticks, axis))
    return join(
        tag("div", *panels, class_="panels"),
        tag("ul", *(legend_entry(s) for s in measured), class_="legend"),
    )


def series(row: Row, style: int, points: list[Point]) -> Series:
    return Series(row.title, style, row.control, points)


def legend_entry(s: Series) -> Html:
    drawing = join(line_of("M0 6H30", s), marker_at(15, 6, s))
    return tag("li", tag("svg", drawing, viewBox="0 0 30 12", aria_hidden="true"), s.title)


def panel(
    title: str, unit: str, lines: list[Series], labels: list[str], values: list[float]
) -> Html:
    last = max(p.x for s in lines for p in s.points)
    low, high = values[0], values[-1]

    def at(point_x: float, y: float) -> tuple[float, float]:
        x = LEFT + 12 + point_x / max(last, 1) * (WIDTH - LEFT - RIGHT - 12)
        return x, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    grid = [horizontal(at(0, value)[1], tick_text(value, values)) for value in values]
    names = [tick_label(at(i, low)[0], label) for i, label in enumerate(labels[: last + 1])]
    drawn = [draw(s, at) for s in lines]
    label = f"{title}: {unit} for " + "; ".join(spoken(s, labels) for s in lines)
    picture = tag(
        "svg",
        *grid,
        *names,
        *drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=label,
    )
    heading = tag("p", tag("b", title), f" · {unit}" if unit else "", class_="panel-title")
    return tag("div", heading, picture, class_="panel")


def spoken(s: Series, labels: list[str]) -> str:
    """A line in words, for those who cannot see it."""
    return f"{s.title} " + ", ".join(f"{p.y:.4g} at {labels[p.x]}" for p in s.points)


def axis_ticks(lines: list[Series]) -> list[float]:
    """Four to seven round values that cover every point and its spread."""
    low = min(p.y - p.spread for s in lines for p in s.points)
    high = max(p.y + p.spread for s in lines for p in s.points)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_text(value: float, values: list[float]) -> str:
    """With as few decimals as tell all ticks exactly."""
    close = (values[-1] - values[0]) * 1e-6
    decimals = next((d for d in range(9) if all(abs(round(v, d) - v) < close for v in values)), 9)
    return f"{value:,.{decimals}f}".replace("-", "−")


def horizontal(y: float, label: str) -> Html:
    return join(
        tag("line", x1=LEFT, x2=WIDTH - RIGHT + 12, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"),
        tag("text", label, x=LEFT - 8, y=f"{y + 4:.1f}", class_="tick end"),
    )


def tick_label(x: float, label: str) -> Html:
    """ "128 (1x)" stands on two lines."""
    first, _, second = label.partition(" ")
    lines = [
        tag("text", part, x=f"{x:.1f}", y=HEIGHT - BOTTOM + 20 + 15 * i, class_="tick middle")
        for i, part in enumerate((first, second))
        if part
    ]
    return join(*lines)


def draw(s: Series, at) -> Html:
    points = [(*at(p.x, p.y), p) for p in s.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
    bars = [
        f"M{x:.1f} {at(0, p.y - p.spread)[1]:.1f}V{at(0, p.y + p.spread)[1]:.1f}"
        for x, _, p in points
        if p.spread > 0
    ]
    return join(
        line_of(path, s),
        tag("path", d="".join(bars), class_=f"spread s{s.style % COLOURS}") if bars else None,
        *(marker_at(x, y, s) for x, y, _ in points),
    )


def line_of(path: str, s: Series) -> Html:
    return tag("path", d=path, class_=f"line s{s.style % COLOURS}{' dashed' * s.dashed}")


def marker_at(x: float, y: float, s: Series) -> Html:
    return tag(
        "path",
        d=MARKERS[s.style % len(MARKERS)],
        transform=f"translate({x:.1f} {y:.1f})",
        class_=f"marker s{s.style % COLOURS}",
    )
