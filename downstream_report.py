"""Tables and figure of `downstream.py`, made from its results file alone."""

import json
from pathlib import Path

import numpy as np

import plots
from evaluation import labels, table
from results_io import Results

PER_CENT = ("acc", "acc_norm", "exact_match")
LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")

# title, the paper's tables of it, and its columns: task, metric, heading
LAYOUTS = (
    (
        "zero-shot tasks, the paper's layout: normalised accuracy (MMLU: accuracy), ROUGE-1",
        ("tab:downstream", "tab:edu_downstream"),
        (
            ("arc_easy", "acc_norm", "ARC-E"),
            ("arc_challenge", "acc_norm", "ARC-C"),
            ("hellaswag", "acc_norm", "HellaSwag"),
            ("piqa", "acc_norm", "PIQA"),
            ("mmlu", "acc", "MMLU"),
            ("sciq", "acc_norm", "SciQ"),
            ("scrolls_summscreenfd", "rouge1", "SummScreen"),
        ),
    ),
    (
        "LAMBADA",
        ("tab:lambada_results",),
        (
            ("lambada_openai", "acc", "Accuracy"),
            ("lambada_openai", "perplexity", "Perplexity"),
        ),
    ),
    (
        "nano tasks, of the corpus' held-out text",
        (),
        (
            ("nano_cloze", "acc", "cloze"),
            ("nano_cloze", "perplexity", "cloze ppl"),
            ("nano_continuation", "acc_norm", "continuation"),
            ("nano_line", "chrf", "line chrF"),
        ),
    ),
)
Column = tuple[str, str, str]


def tables(results: Results) -> str:
    measured = {(r["variant"], metric) for r in results.rows for metric in r["metrics"]}
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
    lengths = ", ".join(str(n) for n in sorted({row["length"] for row in results.rows}))
    note = (
        f"± standard error; inputs longer than max_length = {lengths} tokens lose their beginning"
    )
    return "\n".join([*parts, "", note])


def _rows(results: Results, columns: list[Column]) -> list[list[str]]:
    names = labels(results.checkpoints)
    return [
        [names[identity], *(_cell(_find(results, identity, c), c[1]) for c in columns)]
        for identity in results.checkpoints
    ]


def _find(results: Results, identity: str, column: Column) -> dict | None:
    """{"value", "stderr"} in the unit of the tables; the longest max_length where there are two."""
    rows = [r for r in results.rows if (r["checkpoint"], r["variant"]) == (identity, column[0])]
    if not rows or column[1] not in max(rows, key=lambda r: r["length"])["metrics"]:
        return None
    found = max(rows, key=lambda r: r["length"])["metrics"][column[1]]
    factor = 100 if column[1] in PER_CENT else 1
    return {k: v if v is None else factor * v for k, v in found.items()}


def _cell(found: dict | None, metric: str) -> str:
    if found is None or found["value"] is None:
        return ""
    error = "" if found["stderr"] is None else f" ±{found['stderr']:.2f}"
    return f"{found['value']:.2f}{error}"


def _paper_rows(labels_of_tables: tuple[str, ...], columns: list[Column]) -> list[list[str]]:
    """The paper's own numbers, for the columns that are shown."""
    paper = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
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
    by_task = {row["variant"]: row["metrics"] for row in results.rows}
    listed = [c for _, _, columns in LAYOUTS for c in columns if c[0] in by_task]
    known = {task for task, _, _ in listed}
    others = [(t, next(iter(m)), t) for t, m in by_task.items() if t not in known and m]
    return [*listed, *others]


def _draw(axes, results: Results, columns: list[Column]) -> None:
    names = labels(results.checkpoints)
    width = 0.8 / len(names)
    for index, (identity, name) in enumerate(names.items()):
        found = [_find(results, identity, c) or {"value": None, "stderr": None} for c in columns]
        values, errors = (
            np.array([np.nan if f[key] is None else f[key] for f in found], dtype=float)
            for key in ("value", "stderr")
        )
        place = np.arange(len(columns)) + (index - (len(names) - 1) / 2) * width
        axes.bar(
            place,
            values,
            width * 0.92,
            yerr=np.nan_to_num(errors),
            color=plots.COLOURS[index % len(plots.COLOURS)],
            error_kw={"elinewidth": 0.8},
            label=name,
        )
    axes.set_xticks(range(len(columns)), [c[2].replace(" ", "\n") for c in columns])
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
