"""python downstream.py CKPT [CKPT ...] --tasks paper --out results/downstream.json

Measures zero-shot tasks through lm-evaluation-harness: arc_easy, arc_challenge, hellaswag, piqa,
mmlu, sciq, scrolls_summscreenfd and lambada_openai. Each finished task is kept; the same command
continues.

    --tasks paper                 or lambada, nano, names of their tasks, a YAML file of the harness
    --data-dir DIR                local copies of the data sets: DIR/ai2_arc/ARC-Easy/test*.parquet
    --corpus corpora/stdlib       for the nano tasks, which are made from held-out text
    --max-length 2048             longer inputs lose their beginning; default: 2 x training length
    --limit 100                   only the first documents of each task, to try it out

A model that `export_hf.py` wrote can also be evaluated with the harness' own command,
`lm_eval --model hf`, or with `lssar-lm-eval`.
"""

import importlib.metadata
import importlib.util
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

from data.shards import describe_set
from evaluating.arguments import EvaluationParser
from evaluating.checkpoints import Checkpoint, labels, open_checkpoints
from evaluating.protocol import measuring
from evaluating.results import Results
from evaluating.task_columns import COLUMNS, LAYOUTS, LOWER_IS_BETTER, PER_CENT, Column
from lssar.errors import UserError
from lssar.folders import ensure_hub_cache
from support import plots
from support.command import positive, run, whole
from support.files import lookup
from support.text import table
from training import distributed

PACKAGES = ("lm_eval", "transformers", "datasets", "rouge_score")
HATCHES = ("", "//", "\\\\", "..")  # for runs of one mechanism, which share a colour


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__)
    parser.add_argument("--tasks", default="paper", help="paper, lambada, nano, or names and paths")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--max-length", type=whole(2))
    parser.add_argument("--batch", type=positive, default=16, help="sequences; changes no result")
    parser.add_argument("--limit", type=positive)
    return parser


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    if arguments.data_dir is not None and not arguments.data_dir.is_dir():
        raise UserError(f"--data-dir {arguments.data_dir}: no such folder")
    if absent := [p for p in PACKAGES if importlib.util.find_spec(p) is None]:
        raise UserError(f"{absent[0]} is not installed; pip install -r requirements-downstream.txt")
    if distributed.world_size() > 1:
        raise UserError("downstream.py runs in one process; start it without torchrun")
    ensure_hub_cache()
    # Here, because the harness takes seconds to import and may not be installed.
    from evaluating.tasks import BOOTSTRAP, chosen_tasks

    tasks = chosen_tasks(arguments.tasks)
    checkpoints = open_checkpoints(arguments.checkpoints)
    versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    settings = {
        "fewshot": 0,
        "limit": arguments.limit,
        "bootstrap": BOOTSTRAP,
        "lm_eval": versions["lm_eval"],
    }
    about = {"versions": versions, "data": str(arguments.data_dir or "hub")}
    if arguments.corpus:
        about["corpus"] = describe_set(arguments.corpus)
        refuse_other_corpus(arguments.out, about["corpus"])
    world = distributed.start(arguments.device)
    with measuring(arguments, "downstream", settings, about, world) as results:
        fill(results, list(product(checkpoints, tasks)), arguments, world.device)
    print(tables(results))
    plots.publish(bars(results), results.sibling(".png"))


def refuse_other_corpus(out: Path, corpus: dict) -> None:
    """Raise if the results in `out` are about other documents: they could not be compared."""
    before = lookup(out, "about", "corpus", "tokens_sha256")
    if before and before != corpus["tokens_sha256"]:
        raise UserError(
            f"{out} was made from another corpus than {corpus['data']}: not comparable; "
            "give another --out or delete it"
        )


def fill(results: Results, pairs: list[tuple[Checkpoint, str]], arguments, device) -> None:
    """Measure the pairs of checkpoint and task that the results lack."""
    from evaluating.lm_eval_model import CheckpointLM
    from evaluating.tasks import load_task, measure

    missing = []  # (checkpoint, task, the fields that its records share)
    for checkpoint, task in pairs:
        key = {"run": checkpoint.identity, "task": Path(task).name.removesuffix(".yaml")}
        # As in the paper: 2,048 if trained at 1,024.
        key["length"] = arguments.max_length or 2 * checkpoint.info.train_length
        if not results.find(**key):
            missing.append((checkpoint, task, key))
    with tempfile.TemporaryDirectory() as scratch:
        places = (Path(scratch), arguments.data_dir, arguments.corpus)
        lm = None
        for task in dict.fromkeys(task for _, task, _ in missing):
            load_task(task, *places)  # read every document before computing anything
        for checkpoint, task, key in missing:
            if lm is None or lm.checkpoint is not checkpoint:
                results.runs.setdefault(checkpoint.identity, checkpoint.describe())
                lm = CheckpointLM(checkpoint, device, key["length"], arguments.batch)
            found = measure(lm, key, load_task(task, *places), arguments.limit)
            results.add(*found)
            shown = ", ".join(f"{r.quantity} {r.value:.4g}" for r in found)
            print(f"{checkpoint.info.run}, {key['task']}: {shown}", file=sys.stderr)


def tables(results: Results) -> str:
    """Return the tables that tasks.toml lays out, then those of the remaining metrics."""
    measured = {(r.task, r.quantity) for r in results.records}
    rest = sorted(measured - {column[:2] for column in COLUMNS})
    layouts = list(LAYOUTS)
    for start in range(0, len(rest), 5):
        title = "" if start else "the other metrics of the same tasks"
        layouts.append((title, [(*c, " ".join(c)) for c in rest[start : start + 5]]))
    names = labels(results.runs)
    parts = []
    for title, listed in layouts:
        columns = [c for c in listed if c[:2] in measured]
        if not columns:
            continue
        rows = []
        for identity, name in names.items():
            rows.append([name, *(cell(*score(results, identity, c)) for c in columns)])
        heading = f"\n{title}\n" if title else "\n"
        parts.append(heading + table(["", *(c[2] for c in columns)], rows))
    lengths = ", ".join(str(n) for n in sorted({r.length for r in results.records}))
    note = (
        f"± standard error; inputs longer than max_length = {lengths} tokens lose their beginning"
    )
    return "\n".join([*parts, "", note])


def score(results: Results, identity: str, column: Column) -> tuple[float | None, float | None]:
    """Return value and error in the unit of the tables, at the longest max_length measured."""
    task, metric, _ = column
    found = results.select(run=identity, task=task, quantity=metric)
    if not found:
        return None, None
    longest = max(found, key=lambda record: record.length)
    unit = 100 if metric in PER_CENT else 1
    value = None if longest.value is None else longest.value * unit
    error = None if longest.error is None else longest.error * unit
    return value, error


def cell(value: float | None, error: float | None) -> str:
    """Write a cell of a table; an empty one without a value."""
    if value is None:
        return ""
    return f"{value:.2f}" + ("" if error is None else f" ±{error:.2f}")


def bars(results: Results):
    """Draw scores to the left, where more is better, and perplexities to the right."""
    # A task has the columns that the tables have, or else its first metric.
    first = {r.task: r.quantity for r in reversed(results.records)}
    columns = [c for c in COLUMNS if c[0] in first]
    listed = {task for task, _, _ in columns}
    columns += [(t, first[t], t) for t in reversed(first) if t not in listed]
    scores = [c for c in columns if c[1] not in LOWER_IS_BETTER]
    losses = [c for c in columns if c[1] in LOWER_IS_BETTER]
    groups = [group for group in (scores, losses) if group]
    width = plots.PAGE if len(columns) > 3 else plots.COLUMN
    ratios = [len(group) + 0.6 for group in groups]
    figure, grid = plots.figure(1, len(groups), width=width, squeeze=False, width_ratios=ratios)
    for axes, group in zip(grid[0], groups, strict=True):
        draw(axes, results, group)
        axes.set_ylabel("score (0 to 100)" if group is scores else "perplexity")
    plots.legend_below(figure, grid[0, 0], columns=4)
    return figure


def draw(axes, results: Results, columns: list[Column]) -> None:
    """Draw a group of bars per column, one bar per run."""
    names = labels(results.runs)
    order = Counter()  # of the runs of each mechanism
    width = 0.8 / len(names)
    for index, (identity, name) in enumerate(names.items()):
        mechanism = results.runs[identity]["model"]["attention"]["name"]
        found = [score(results, identity, c) for c in columns]
        values, errors = np.array(found, dtype=float).T  # None becomes NaN
        x = np.arange(len(columns)) + (index - (len(names) - 1) / 2) * width
        hatch = HATCHES[order[mechanism] % len(HATCHES)]
        order[mechanism] += 1
        axes.bar(
            x,
            values,
            width * 0.92,
            label=name,
            color=plots.style(mechanism)["color"],
            edgecolor="white",
            hatch=hatch,
            yerr=np.nan_to_num(errors),
            error_kw={"elinewidth": 0.8},
        )
    axes.set_xticks(range(len(columns)), [c[2].replace(" ", "\n") for c in columns])
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    run(main)
