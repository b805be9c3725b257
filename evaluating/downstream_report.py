"""Tables and figure of `downstream.py`, made from its results file alone."""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from evaluating.checkpoints import labels
from evaluating.results import Results
from evaluating.task_columns import LAYOUTS, LOWER_IS_BETTER, PER_CENT
from support import plots
from support.files import read_text
from support.text import table

Column = tuple[str, str, str]
HATCHES = ("", "//", "\\\\", "..")  # tell runs of one mechanism apart, which have one colour


def tables(results: Results) -> str:
    measured = {(r.task, r.quantity) for r in results.records}
    parts, shown = [], set()
    for title, paper_tables, columns in LAYOUTS:
        columns = [c for c in columns if c[:2] in measured]
        if columns:
            rows = _rows(results, columns) + _paper_rows(paper_tables, columns)
            parts.append(f"\n{title}\n" + table(["", *(c[2] for c in columns)], rows))
            shown |= {c[:2] for c in columns}
    rest = [(task, metric, f"{task} {metric}") for task, metric in sorted(measured - shown)]
    for start in range(0, len(rest), 5):
        columns = rest[start : start + 5]
        title = "\nthe other metrics of the same tasks\n" if not start else "\n"
        parts.append(title + table(["", *(c[2] for c in columns)], _rows(results, columns)))
    lengths = ", ".join(str(n) for n in sorted({r.length for r in results.records}))
    note = (
        f"± standard error; inputs longer than max_length = {lengths} tokens lose their beginning"
    )
    return "\n".join([*parts, "", note])


def _rows(results: Results, columns: list[Column]) -> list[list[str]]:
    return [
        [name, *(_cell(*_find(results, identity, c)) for c in columns)]
        for identity, name in labels(results.runs).items()
    ]


def _find(results: Results, identity: str, column: Column) -> tuple[float | None, float | None]:
    """Value and error in the unit of the tables, at the longest max_length where there are two."""
    task, metric, _ = column
    found = results.select(run=identity, task=task, quantity=metric)
    if not found:
        return None, None
    record, factor = max(found, key=lambda r: r.length), 100 if metric in PER_CENT else 1
    value, error = (n if n is None else factor * n for n in (record.value, record.error))
    return value, error


def _cell(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + ("" if error is None else f" ±{error:.2f}")


def _paper_rows(labels_of_tables: tuple[str, ...], columns: list[Column]) -> list[list[str]]:
    """The paper's own numbers, for the columns that are shown."""
    paper = json.loads(read_text(Path(__file__).parents[1] / "paper/paper.json"))
    rows = []
    for label in labels_of_tables:
        keys = paper[label]["columns"]
        places = [keys.index(c[1] if c[1] in keys else c[0]) for c in columns]
        rows += [
            [f"paper, {name}", *(f"{values[i]:g}" for i in places)]
            for name, values in paper[label]["rows"].items()
        ]
    return rows


# --- the figure ----------------------------------------------------------------------------------


def figures(results: Results) -> list[Path]:
    return plots.save(bars(results), results.sibling(".png"))


def bars(results: Results):
    """Scores to the left, where more is better; perplexities to the right, where less is."""
    columns = _figure_columns(results)
    scores = [c for c in columns if c[1] not in LOWER_IS_BETTER]
    losses = [c for c in columns if c[1] in LOWER_IS_BETTER]
    groups = [group for group in (scores, losses) if group]
    figure, grid = plots.figure(
        1,
        len(groups),
        width=plots.PAGE if len(columns) > 3 else plots.COLUMN,
        height=2.4,
        squeeze=False,
        width_ratios=[len(group) + 0.6 for group in groups],
    )
    for axes, group in zip(grid[0], groups, strict=True):
        _draw(axes, results, group)
        axes.set_ylabel("score (0 to 100)" if group is scores else "perplexity")
    plots.legend_below(figure, grid[0, 0], columns=4)
    return figure


def _figure_columns(results: Results) -> list[Column]:
    """One column of each task: the paper's metric, or the first; and its perplexity."""
    first = {r.task: r.quantity for r in reversed(results.records)}
    listed = [c for _, _, columns in LAYOUTS for c in columns if c[0] in first]
    known = {task for task, _, _ in listed}
    others = [(t, first[t], t) for t in reversed(first) if t not in known]
    return [*listed, *others]


def _draw(axes, results: Results, columns: list[Column]) -> None:
    names, order = labels(results.runs), Counter()
    width = 0.8 / len(names)
    for index, (identity, name) in enumerate(names.items()):
        mechanism = results.runs[identity]["model"]["attention"]["name"]
        found = [_find(results, identity, c) for c in columns]
        values, errors = np.array(found, dtype=float).T  # None becomes NaN
        axes.bar(
            np.arange(len(columns)) + (index - (len(names) - 1) / 2) * width,
            values,
            width * 0.92,
            yerr=np.nan_to_num(errors),
            color=plots.style(mechanism)["color"],
            hatch=HATCHES[order[mechanism] % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 0.8},
            label=name,
        )
        order[mechanism] += 1
    axes.set_xticks(range(len(columns)), [c[2].replace(" ", "\n") for c in columns])
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
