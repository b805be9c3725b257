"""Tables whose numbers are no validation losses: attention maps, costs, downstream tasks.

Each is one command over several checkpoints, and a way to read its results file into a table.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import UserError
from reproduction.experiments import SIZES, TITLES, size_run
from reproduction.jobs import Job, python
from reproduction.plan import Workspace
from reproduction.tables import frame, summary


@dataclass(frozen=True)
class Special:
    name: str
    label: str
    runs: Callable[[str], tuple[str, ...]]  # keys of the runs that it needs, by scale
    arguments: Callable[[Workspace, list[str], Path], tuple[str, ...]]  # of the command
    rows: Callable[[dict, "Special"], tuple[list[dict], list[dict]]]  # results -> columns, rows

    def output(self, space: Workspace) -> Path:
        return space.results / space.scale.name / self.name / f"{self.name}.json"

    def job(self, space: Workspace) -> Job:
        seed, out = space.scale.seeds[0], self.output(space)
        keys = self.runs(space.scale.name)
        directories = [str(space.run_directory(key, seed)) for key in keys]
        return Job(
            f"measure {self.name}",
            python(*self.arguments(space, directories, out)),
            lambda: out.exists() and self.is_complete(out),
            tuple(f"train {key}-s{seed}" for key in keys),
        )

    def is_complete(self, out: Path) -> bool:
        _, rows = self.rows(read_json(out), self)
        return all(row["status"] == "done" for row in rows)

    def build(self, space: Workspace, states: dict[str, str]) -> dict:
        out = self.output(space)
        columns, rows = self.rows(read_json(out), self) if out.exists() else ([], [])
        for row in rows:
            for cell in filter(None, row["measured"]):
                cell["sources"] = [out.as_posix()]
        failed = states.get(f"measure {self.name}", "done")
        notes = [f"failed: {failed}"] if failed != "done" else []
        built = frame(self.name, self.label, space, columns, rows, notes)
        pictures = sorted(out.parent.glob("*.png"))
        return built | {"figures": [p.as_posix() for p in pictures]}


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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


# --- attention maps ------------------------------------------------------------------------------

MAP_NUMBERS = ("sink", "entropy", "zeros")


def map_runs(scale: str) -> tuple[str, ...]:
    sizes = [size_run(scale, s, n) for s in SIZES[scale] for n in ("softmax", "lssar")]
    return tuple(dict.fromkeys(["softmax", "lssar-p15", *sizes]))


def map_arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
    return ("attention_maps.py", *directories, "--out", str(out))


def map_rows(found: dict, special: Special) -> tuple[list[dict], list[dict]]:
    columns = plain_columns("mean weight on token 1", "entropy (nats)", "share of exact zeros")
    rows = []
    for row in found["rows"]:
        run = found["checkpoints"][row["checkpoint"]]["run"].rpartition("-s")[0]
        cells = [
            summary([statistics.fmean(head[name] for head in row["heads"])], [])
            for name in MAP_NUMBERS
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


SPECIALS = {
    special.name: special
    for special in (
        Special("attention_maps", "fig:attmap", map_runs, map_arguments, map_rows),
        Special("cost", "tab:comp_analysis", lambda scale: (), cost_arguments, cost_rows),
    )
}
