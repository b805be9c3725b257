"""Tables whose numbers are no validation losses: attention maps, costs, downstream tasks.

Each is one command over several checkpoints, and a way to read its results file into a table.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from downstream_report import LAYOUTS, LOWER_IS_BETTER, PER_CENT
from errors import UserError
from evaluation import open_checkpoints
from files import read_text
from reproduction.experiments import TITLES
from reproduction.jobs import Job, python
from reproduction.plan import Workspace
from reproduction.runs import SIZES, size_run
from reproduction.tables import frame, paper_numbers, summary

MAIN_PAIR = ("softmax", "lssar-p15")


def edu_runs(scale: str) -> tuple[str, ...]:
    return tuple(size_run(scale, s, n) for s in SIZES[scale] for n in ("softmax", "lssar"))


@dataclass(frozen=True)
class Special:
    name: str
    label: str
    runs: Callable[[str], tuple[str, ...]]  # keys of the runs that it needs, by scale
    arguments: Callable[[Workspace, list[str], Path], tuple[str, ...]]  # of the command
    rows: Callable[[dict, "Special"], tuple[list[dict], list[dict]]]  # results -> columns, rows
    all_seeds: bool = False
    baseline: str | None = None

    def output(self, space: Workspace) -> Path:
        return space.results / space.scale.name / self.name / f"{self.name}.json"

    def job(self, space: Workspace) -> Job:
        runs, out = self.trained(space), self.output(space)
        directories = [str(space.run_directory(key, seed)) for key, seed in runs]
        return Job(
            f"measure {self.name}",
            python(*self.arguments(space, directories, out)),
            lambda: out.exists() and self.is_complete(out, directories),
            tuple(f"train {key}-s{seed}" for key, seed in runs),
        )

    def trained(self, space: Workspace) -> list[tuple[str, int]]:
        """(key, seed) of every run that it measures."""
        return [
            (key, seed)
            for key in dict.fromkeys(self.runs(space.scale.name))
            for seed in space.seeds_of(key)[: None if self.all_seeds else 1]
        ]

    def is_complete(self, out: Path, directories: list[str]) -> bool:
        """Every run has been measured as it is now, in everything that any run was measured in."""
        found = read_json(out)
        wanted = {c.identity for c in open_checkpoints(directories)}
        variants = {row.get("variant") for row in found["rows"]}
        done = {(row.get("checkpoint"), row.get("variant")) for row in found["rows"]}
        return bool(done) and all((c, v) in done for c in wanted for v in variants)

    def build(self, space: Workspace, states: dict[str, str]) -> dict:
        out = self.output(space)
        columns, rows = self.rows(read_json(out), self) if out.exists() else ([], [])
        for row in rows:
            for cell in filter(None, row["measured"]):
                cell["sources"] = [out.as_posix()]
        failed = states.get(f"measure {self.name}", "done")
        notes = [f"failed: {failed}"] if failed != "done" else []
        built = frame(self.name, self.label, space, columns, rows, notes)
        built["baseline"] = self.baseline
        pictures = sorted(out.parent.glob("*.png"))
        return built | {"figures": [p.as_posix() for p in pictures]}


def read_json(path: Path) -> dict:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; delete it and run this again") from None


def table_row(key: str, title: str, cells: list, paper: list, control: bool = False) -> dict:
    return {
        "key": key,
        "title": title,
        "control": control,
        "status": "done",
        "paper": paper,
        "measured": cells,
    }


def plain_columns(*titles: str, paper: tuple[str, ...] | None = None) -> list[dict]:
    return [
        {"key": title, "title": title, "paper": paper and paper[i], "noise": None}
        for i, title in enumerate(titles)
    ]


def by_run(found: dict) -> dict[str, list[dict]]:
    """Rows by the run's key, its seeds together."""
    # The last one: a run that was trained again has been measured again, into the same file.
    latest = {about["run"]: identity for identity, about in found["checkpoints"].items()}
    grouped: dict[str, list[dict]] = {}
    for run, identity in latest.items():
        rows = [row for row in found["rows"] if row["checkpoint"] == identity]
        grouped.setdefault(run.rpartition("-s")[0], []).extend(rows)
    return {key: rows for key, rows in grouped.items() if rows}


def mean_of(values: list[float | None]) -> float | None:
    """None where one was not finite, which JSON holds as null."""
    return None if None in values else statistics.fmean(values)


# --- attention maps ------------------------------------------------------------------------------

MAP_NUMBERS = ("sink", "entropy", "zeros")


def map_runs(scale: str) -> tuple[str, ...]:
    return (*MAIN_PAIR, *edu_runs(scale))


def map_arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
    return ("attention_maps.py", *directories, "--out", str(out))


def map_rows(found: dict, special: Special) -> tuple[list[dict], list[dict]]:
    columns = plain_columns("mean weight on token 1", "entropy (nats)", "share of exact zeros")
    rows = []
    for run, measured in by_run(found).items():
        cells = [
            summary([mean_of([head[n] for head in row["heads"]]) for row in measured], [])
            for n in MAP_NUMBERS
        ]
        rows.append(table_row(run, TITLES.get(run, run), cells, [None] * len(cells)))
    return columns, rows


# --- cost ----------------------------------------------------------------------------------------

COST_COLUMNS = ("train_ms", "train_MB", "eval_ms", "eval_MB")


def cost_arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
    small = ("--preset", "nano", "--batch", "4", "--length", "1024")
    return (
        *("benchmark.py", "attention", "--table", "cost"),
        *(small if space.scale.name == "nano" else ()),
        *("--out", str(out)),
    )


def cost_rows(found: dict, special: Special) -> tuple[list[dict], list[dict]]:
    columns = plain_columns(
        "training ms", "training MB", "evaluation ms", "evaluation MB", paper=COST_COLUMNS
    )
    rows = []
    for row in found["rows"]:
        cells = [summary([row[c]], []) for c in COST_COLUMNS]
        paper = [row["paper"][c] if row["paper"] else None for c in COST_COLUMNS]
        rows.append(table_row(row["name"], row["name"], cells, paper, control=not row["paper"]))
    return columns, rows


# --- downstream tasks ----------------------------------------------------------------------------


def downstream_arguments(tasks: dict[str, str]):
    """The command's arguments, with the tasks of each scale."""

    def arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
        nano = space.scale.name == "nano"
        corpus = ("--corpus", next(iter(space.scale.corpora))) if nano else ()
        chosen = ("--tasks", tasks[space.scale.name])
        return ("downstream.py", *directories, *chosen, *corpus, "--out", str(out))

    return arguments


def task_noise(found: dict, task: str, metric: str) -> float | None:
    """Two standard errors of a difference of two models, from the task's own standard errors."""
    errors = [row["metrics"][metric]["stderr"] for row in found["rows"] if row["variant"] == task]
    if None in errors:
        return None
    return 2 * math.sqrt(2) * max(errors) * (100 if metric in PER_CENT else 1)


def downstream_rows(found: dict, special: Special) -> tuple[list[dict], list[dict]]:
    """The columns of the paper's layout that were measured; its numbers where it prints them."""
    paper = paper_numbers()[special.label]
    measured = {row["variant"] for row in found["rows"]}
    layout = [c for _, _, cells in LAYOUTS for c in cells if c[0] in measured]
    columns = [
        {
            "key": f"{task} {metric}",
            "title": title,
            "paper": next((n for n in (metric, task) if n in paper["columns"]), None),
            "noise": task_noise(found, task, metric),
            "better": "lower" if metric in LOWER_IS_BETTER else "higher",
        }
        for task, metric, title in layout
    ]
    rows = []
    for run, rows_of_run in by_run(found).items():
        cells = []
        for task, metric, _ in layout:
            factor = 100 if metric in PER_CENT else 1
            values = [r["metrics"][metric]["value"] for r in rows_of_run if r["variant"] == task]
            cells.append(summary([None if v is None else factor * v for v in values], []))
        printed = paper["rows"].get(run)
        published = [
            printed[paper["columns"].index(c["paper"])] if printed and c["paper"] else None
            for c in columns
        ]
        rows.append(table_row(run, TITLES.get(run, run), cells, published))
    return columns, rows


SPECIALS = {
    special.name: special
    for special in (
        Special("attention_maps", "fig:attmap", map_runs, map_arguments, map_rows),
        Special("cost", "tab:comp_analysis", lambda scale: (), cost_arguments, cost_rows),
        Special(
            *("downstream", "tab:downstream", lambda scale: MAIN_PAIR),
            *(downstream_arguments({"nano": "nano", "paper": "paper"}), downstream_rows),
            all_seeds=True,
            baseline="softmax",
        ),
        Special(
            *("downstream_edu", "tab:edu_downstream", edu_runs),
            *(downstream_arguments({"nano": "nano", "paper": "paper"}), downstream_rows),
        ),
        Special(
            *("lambada", "tab:lambada_results", lambda scale: (*MAIN_PAIR, *edu_runs(scale))),
            *(downstream_arguments({"nano": "nano_cloze", "paper": "lambada"}), downstream_rows),
            baseline="softmax",
        ),
    )
}
