"""What benchmarks/attention.py measured, for the eye: tables, growth with the length, a figure."""

import math
import statistics
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

import plots
from attention import MECHANISMS
from evaluation import table

# What is drawn and how growth is named: (title, phase, key).
PANELS = (
    ("forward, ms", "forward", "ms"),
    ("forward + backward, ms", "forward+backward", "ms"),
    ("forward + backward, peak MB", "forward+backward", "MB"),
)
DASH_OF_MECHANISM = ("lssar", "lssa", "softmax")  # the first is drawn solid


def series(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """The rows of each contestant, by length."""
    names = dict.fromkeys((r["mechanism"], r["backend"]) for r in rows)
    return {
        name: sorted(
            (r for r in rows if (r["mechanism"], r["backend"]) == name), key=lambda r: r["length"]
        )
        for name in names
    }


def slopes(rows: list[dict]) -> list[dict]:
    """The exponent of growth: least squares through log(value) against log(length)."""
    found = []
    for (mechanism, backend), points in series(rows).items():
        entry = {"mechanism": mechanism, "backend": backend}
        for title, phase, key in PANELS:
            x = [math.log(r["length"]) for r in points]
            y = [math.log(max(r[phase][key], 1e-9)) for r in points]
            entry[title] = statistics.linear_regression(x, y).slope if len(x) > 1 else None
        found.append(entry)
    return found


def text(result: dict) -> str:
    settings, machine = result["settings"], result["machine"]
    parts = [
        f"{machine['name']}, {machine['threads']} threads, {settings['dtype']}, "
        f"{settings['inputs']} inputs, batch {settings['batch']}, {settings['heads']} heads of "
        f"{settings['head_dim']}, p = {settings['p']:g}; ratios to F.scaled_dot_product_attention"
    ]
    header = ["", "forward ms", "ratio", "MB", "forward+backward ms", "ratio", "MB"]
    for length in dict.fromkeys(r["length"] for r in result["rows"]):
        lines = [
            [f"{r['mechanism']} {r['backend']}", *_numbers(r)]
            for r in result["rows"]
            if r["length"] == length
        ]
        parts.append(table([f"length {length}", *header[1:]], lines))
    titles = [title for title, *_ in PANELS]
    lines = [
        [f"{s['mechanism']} {s['backend']}"]
        + ["" if s[title] is None else f"{s[title]:.2f}" for title in titles]
        for s in result["slopes"]
    ]
    parts.append(table(["grows as length to the power", *titles], lines))
    left_out = [
        f"  {s['mechanism']} {s['backend']}"
        + (f" at {s['length']}" if s["length"] else "")
        + f": {s['reason']}"
        for s in result["skipped"]
    ]
    return "\n\n".join([*parts, *(["\n".join(["left out:", *left_out])] if left_out else [])])


def _numbers(row: dict) -> list[str]:
    return [
        text
        for phase in ("forward", "forward+backward")
        for text in (
            f"{row[phase]['ms']:.2f}",
            f"{row[phase]['ratio']:.2f}",
            f"{row[phase]['MB']:.0f}",
        )
    ]


def draw(result: dict, path: Path) -> list[Path]:
    """Time and memory against length, logarithmic both ways."""
    figure, panels = plots.figure(1, len(PANELS), width=plots.PAGE, height=2.9)
    found = series(result["rows"])
    backends = list(dict.fromkeys(backend for _, backend in found))
    lengths = sorted({r["length"] for r in result["rows"]})
    for axes, (title, phase, key) in zip(panels, PANELS, strict=True):
        for (mechanism, backend), rows in found.items():
            axes.plot(
                [r["length"] for r in rows],
                [r[phase][key] for r in rows],
                **plots.line(backends.index(backend), _dash(mechanism)),
                label=f"{MECHANISMS[mechanism].label}, {backend}",
            )
        plots.length_axis(axes, lengths)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title)
        axes.set_xlabel("length")
    plots.legend_below(figure, panels[0], columns=4)
    return plots.save(figure, path.with_suffix(".png"))


def _dash(mechanism: str) -> int:
    known = mechanism in DASH_OF_MECHANISM
    return DASH_OF_MECHANISM.index(mechanism) if known else len(DASH_OF_MECHANISM)
