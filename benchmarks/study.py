"""Keeps the records of one benchmark, and shows them as a table, a figure and a results file."""

import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm import tqdm

from benchmarks import measure
from evaluating.results import Record, Results, continue_results
from lssar.mechanisms import Mechanism
from support import plots
from support.text import table

GROWING = ("forward_ms", "forward_backward_ms", "forward_backward_MB")  # with the length
# Quantities that the figure of a benchmark shows over the length, one panel each.
PANELS = {"attention": GROWING, "spans": ("forward_share", "forward_backward_share")}


class Study:
    """Collects records, runs and the reasons why cases were left out."""

    def __init__(self, options: Namespace, settings: dict | None = None, about: dict | None = None):
        """Begin a study; by default the file's settings are the options, `about` the machine."""
        self.options = options
        self.results: Results | None = None
        self.runs: dict[str, dict] = {}
        self.records: list[Record] = []
        self.left_out: list[str] = []
        if options.out:
            kept = {k: v for k, v in vars(options).items() if k not in ("benchmark", "out")}
            kept = {k: str(v) if isinstance(v, Path) else v for k, v in kept.items()}
            about = about or measure.machine(options.device)
            settings = settings or kept
            self.results = continue_results(options.out, options.benchmark, settings, about)

    def add(self, run: dict, quantity: str, value: float, **more) -> None:
        self.runs[run["run"]] = run
        self.records.append(Record(quantity, run["run"], value, **more))

    def measure_memory(self, make_steps: Callable, contestants: list, warm_up=None) -> dict:
        """Return the peak MB of each step of `make_steps(contestant, options)`, by contestant.

        A contestant that does not fit is left out.
        """
        peaks = {}
        for contestant in tqdm(contestants, desc="memory", leave=False, disable=None):
            try:
                peaks[contestant] = measure.in_new_process(
                    measure.peak_megabytes,
                    self.options.device,
                    make_steps,
                    contestant,
                    self.options,
                    warm_up=warm_up,
                )
            except (measure.Crashed, torch.OutOfMemoryError) as error:
                self.left_out.append(f"{contestant}: {str(error).splitlines()[0]}")
        return peaks

    def report(self, title: str, numbers: str = "", draw_figure: Callable | None = None) -> None:
        """Print the numbers; with --out, write them in place of those of an earlier run."""
        print(title)
        print(text(self.records, self.left_out, numbers))
        if self.results is None:
            return
        self.results.about["left_out"] = self.left_out
        self.results.runs = self.runs
        self.results.records = []
        self.results.add(*self.records)
        draw_figure = draw_figure or partial(draw, self.options.benchmark, self.results)
        for path in (self.options.out, *draw_figure(self.options.out)):
            print(f"written: {path}")


def run_of(mechanism: Mechanism) -> dict:
    """Describe a mechanism for the `runs` of a results file."""
    attention = {"name": mechanism.name}
    if mechanism.sharpened:
        attention["p"] = mechanism.p
    return {"run": mechanism.title, "attention": attention}


def title(quantity: str) -> str:
    """Name a quantity for people."""
    return quantity.replace("forward_backward", "forward+backward").replace("_", " ")


def rows(records: list[Record]) -> list[dict]:
    """Return one row per name and length; a name is the run and the parts of its variant.

    Parts that all variants have in common are left out of the names.
    """
    common = set.intersection(*(set(r.variant.split(", ")) for r in records))
    found: dict[tuple, dict] = {}
    for r in records:
        own = ", ".join(part for part in r.variant.split(", ") if part not in common)
        name = f"{r.run}, {own}" if own else r.run
        row = {"name": name, "run": r.run, "own": own, "length": r.length}
        found.setdefault((name, r.length), row)[r.quantity] = r.value
    return list(found.values())


def styles(results: Results, lines: bool) -> dict[str, dict]:
    """Return each name's style: its mechanism's colour, with other dashes where it has several."""
    found = {}
    order = Counter()  # of the names of each mechanism
    known = list(plots.MECHANISMS)
    for row in rows(results.records):
        mechanism = results.runs[row["run"]]["attention"]["name"]
        place = known.index(mechanism) if mechanism in known else len(known)
        if row["name"] not in found:
            seen = row["own"].rpartition(", ")[2]
            found[row["name"]] = place, plots.style(mechanism, seen, order[mechanism])
            order[mechanism] += 1
    names = sorted(found, key=lambda name: found[name][0])  # in a busy chart these keep a colour
    own = [found[name][1] for name in names]
    return dict(zip(names, plots.coloured(own) if lines else own, strict=True))


def text(records: list[Record], left_out: list[str], numbers: str = "") -> str:
    """Return a table of every number, the growth with the length, and the cases left out."""
    if not numbers:
        formats = {r.quantity: ".2%" if "share" in r.quantity else ",.2f" for r in records}
        lines = []
        for row in rows(records):
            values = ((row.get(quantity), form) for quantity, form in formats.items())
            cells = ("" if value is None else format(value, form) for value, form in values)
            lines.append([row["name"], f"{row['length']:,}", *cells])
        numbers = table(["", "length", *map(title, formats)], lines)
    parts = [numbers]
    if grown := slopes(records):
        lines = [[name, *(f"{found[q]:.2f}" for q in GROWING)] for name, found in grown.items()]
        parts.append(table(["grows as length to the power", *map(title, GROWING)], lines))
    if left_out:
        parts.append("\n  ".join(["left out:", *left_out]))
    return "\n\n".join(parts)


def curves(records: list[Record], quantity: str) -> dict[str, list[tuple]]:
    """Return {name: [(length, value)]}, one curve per name."""
    found: dict[str, list[tuple]] = {}
    for row in rows(records):
        if quantity in row:
            found.setdefault(row["name"], []).append((row["length"], row[quantity]))
    return {name: sorted(points) for name, points in found.items()}


def slopes(records: list[Record]) -> dict[str, dict[str, float]]:
    """Return the exponents of growth where times and memory are known at two lengths or more."""
    found = {}
    for quantity in GROWING:
        for name, points in curves(records, quantity).items():
            if len(points) > 1:
                slope = statistics.linear_regression(*np.log(np.maximum(points, 1e-9)).T).slope
                found.setdefault(name, {})[quantity] = slope
    return {name: exponents for name, exponents in found.items() if len(exponents) == len(GROWING)}


def draw(benchmark: str, results: Results, out: Path) -> list[Path]:
    """Draw one panel per quantity; bars where there is only one length to draw over."""
    quantities = PANELS.get(benchmark)
    if quantities is None:
        return []
    lengths = sorted({r.length for r in results.records})
    bars = len(lengths) == 1
    look = styles(results, lines=not bars)
    height = max(2.9, 0.6 + 0.14 * len(look))
    wider = 1.5 if plots.is_busy(look.values()) else 1  # names stand beside the lines
    figure, panels = plots.figure(1, len(quantities), width=wider * plots.PAGE, height=height)
    for axes, quantity in zip(panels, quantities, strict=True):
        axes.set_title(title(quantity))
        found = curves(results.records, quantity)
        if bars:
            values = [points[0][1] for points in found.values()]
            axes.barh(range(len(found)), values, color=[look[name]["color"] for name in found])
            axes.set_yticks(range(len(found)), found if axes is panels[0] else [""] * len(found))
            axes.set_axisbelow(True)
            axes.grid(False, axis="y")
            axes.margins(y=0.01)
            axes.invert_yaxis()
            continue
        for name, points in found.items():
            points = [(x, y) for x, y in points if y > 0]  # memory too small to be seen is 0
            if points:
                axes.plot(*zip(*points, strict=True), **look[name], label=name)
        axes.set_xlabel("length")
        plots.length_axis(axes, lengths)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    longest = max(map(len, look))
    plots.name_lines(panels[-1], columns=2 if longest > 30 else 4)
    return plots.save(figure, out.with_suffix(".png"))
