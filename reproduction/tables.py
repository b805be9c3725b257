"""A table of the paper from what was measured: mean and spread over seeds beside the paper's value.

Made from the result files of the evaluations alone, so that it can be made again at any time:
every cell names the files that its numbers came from.
"""

import json
import math
import statistics
from pathlib import Path

from evaluation import table as text_table
from plots import short_number
from reproduction.experiments import Column, Row, Table
from reproduction.plan import Workspace
from reproduction.runs import HEADLINE
from results_io import read_results

# metric: folder of its evaluations, and what their jobs are called
EVALUATIONS = {
    "loss": ("extrapolation", "evaluate"),
    "gain": ("extrapolation", "evaluate"),
    "accuracy": ("passkey", "passkey"),
}
# Per cent: two standard errors of a difference of two proportions of 100 trials, at most.
ACCURACY_NOISE = 200 * math.sqrt(2 * 0.25 / 100)
PAPER = Path(__file__).parent.parent / "paper.json"


def paper_numbers() -> dict:
    return json.loads(PAPER.read_text(encoding="utf-8"))


# --- one number ----------------------------------------------------------------------------------


def measured(row: Row, column: Column, space: Workspace) -> dict | None:
    """Mean, spread and sources of a cell, over the seeds that have been evaluated."""
    key = row.run.format(factor=f"{column.factor:g}")
    values, sources = [], []  # an overflow is a None among the values
    for seed in space.seeds_of(key):
        file = space.evaluation(EVALUATIONS[column.metric][0], key, seed)
        if file.exists():
            found = find_value(read_results(file)["rows"], row.variant, column, space)
            values += found
            sources += [file.as_posix()] * len(found)
    return summary(values, sources)


def summary(values: list[float | None], sources: list[str]) -> dict | None:
    if not values:
        return None
    finite = None not in values
    mean = statistics.fmean(values) if finite else None
    spread = statistics.stdev(values) if finite and len(values) > 1 else None
    return {"mean": mean, "sd": spread, "n": len(values), "values": values, "sources": sources}


def find_value(rows: list[dict], variant: str, column: Column, space: Workspace) -> list:
    """The number, None where it overflowed, in a list; an empty one where there is no such row."""
    length = column_length(column, space)
    window = space.scale.passkey_length(1) if column.metric == "accuracy" else space.scale.length(1)
    variant = f"window={window}" if variant == "window" else variant
    # The last one: a run that was trained again has been evaluated again, into the same file.
    wanted = [r for r in rows if (r["variant"], r["length"]) == (variant, length)]
    row = wanted[-1] if wanted else None
    if row is None:
        return []
    if column.metric == "gain":
        return [row["context_gain"]["gain"]] if row["context_gain"] else []
    return [100 * row["accuracy"] if column.metric == "accuracy" else row["loss"]]


def column_length(column: Column, space: Workspace) -> int:
    accuracy = column.metric == "accuracy"
    return (space.scale.passkey_length if accuracy else space.scale.length)(column.factor)


def seed_noise(column: Column, space: Workspace) -> float | None:
    """Two standard errors of a difference of two single runs, from the runs with several seeds."""
    rows = [Row(key, key, key) for key in HEADLINE]
    cells = [measured(row, column, space) for row in rows]
    variances = [cell["sd"] ** 2 for cell in cells if cell and cell["sd"] is not None]
    return 2 * math.sqrt(2 * statistics.fmean(variances)) if variances else None


# --- one table -----------------------------------------------------------------------------------


def build(table: Table, space: Workspace, states: dict[str, str]) -> dict:
    """The table as it is written to results/<scale>/<name>.json."""
    paper = paper_numbers()[table.label]
    columns = [
        {
            "key": f"{column.metric}@{column_length(column, space)}",
            "title": column_title(column, space),
            "paper": column.paper if column.paper in paper["columns"] else None,
            "noise": ACCURACY_NOISE if column.metric == "accuracy" else seed_noise(column, space),
        }
        for column in table.columns
    ]
    rows = []
    for row in table.rows:
        cells = [measured(row, column, space) for column in table.columns]
        rows.append(
            {
                "key": row.key,
                "title": row.title,
                "control": row.control,
                "status": status(row, table, space, states),
                "paper": [paper_value(paper, row, column) for column in table.columns],
                "measured": cells,
            }
        )
    built = frame(table.name, table.label, space, columns, rows, table.notes)
    return built | {"baseline": table.baseline}


def frame(name: str, label: str, space: Workspace, columns: list, rows: list, notes) -> dict:
    """What every table file says of itself, around its columns and rows."""
    paper, scale = paper_numbers()[label], space.scale
    return {
        "kind": "table",
        "name": name,
        "label": label,
        "scale": scale.name,
        "title": paper["title"],
        "script": script_of(name),
        "command": f"SCALE={scale.name} bash {script_of(name)}",
        "unit": scale.unit if paper["unit"] == "nats per token" else paper["unit"],
        "better": paper["better"],
        "tolerance": paper["tolerance"],
        "baseline": None,
        "columns": columns,
        "rows": rows,
        "notes": list(notes),
        "figures": [],
    }


def paper_value(paper: dict, row: Row, column: Column) -> float | None:
    found = paper["rows"].get(row.key)
    known = found is not None and column.paper in paper["columns"] and row.variant != "window"
    return found[paper["columns"].index(column.paper)] if known else None


def status(row: Row, table: Table, space: Workspace, states: dict[str, str]) -> str:
    """ "done" when every evaluation is there, be its number finite or an overflow."""
    missing = False
    for column in table.columns:
        key = row.run.format(factor=f"{column.factor:g}")
        kind, job = EVALUATIONS[column.metric]
        for seed in space.seeds_of(key):
            for name in (f"train {key}-s{seed}", f"{job} {key}-s{seed}"):
                if states.get(name, "done") != "done":
                    return f"failed: {states[name]}"
            missing |= not space.evaluation(kind, key, seed).exists()
    return "missing" if missing else "done"


def column_title(column: Column, space: Workspace) -> str:
    length = f"{short_number(column_length(column, space))} ({column.factor:g}x)"
    return f"context gain at {length}" if column.metric == "gain" else length


SCRIPTS = {
    "headline": "scripts/reproduce_all.sh",
    "p_sweep": "scripts/figure_p_sweep.sh",
    "passkey": "scripts/figure_passkey.sh",
    "pi": "scripts/table_pi.sh",
    "pi_passkey": "scripts/table_pi.sh",
    "adaptive_p": "scripts/figure_adaptive_p.sh",
    "attention_maps": "scripts/figure_attention_maps.sh",
    "scaling_edu": "scripts/scaling_edu.sh",
    "scaling_edu_passkey": "scripts/scaling_edu.sh",
    "downstream_edu": "scripts/table_downstream.sh",
}


def script_of(name: str) -> str:
    return SCRIPTS.get(name, f"scripts/table_{name}.sh")


# --- for the terminal ----------------------------------------------------------------------------


def show(built: dict) -> str:
    """The table as text; the paper's values in a line of their own under each row that has any."""
    header = ["", *(column["title"] for column in built["columns"]), "seeds"]
    body = []
    for row in built["rows"]:
        cells = [cell_text(cell) for cell in row["measured"]]
        seeds = max((cell["n"] for cell in row["measured"] if cell), default=0)
        body.append([row["title"] + (" *" if row["control"] else ""), *cells, str(seeds or "")])
        if any(value is not None for value in row["paper"]):
            paper = ["" if v is None else f"{v:g}" for v in row["paper"]]
            body.append(["  the paper, at its own scale", *paper, ""])
    title = f"{built['label']}: {built['title']} ({built['unit']}; mean ± sd; * not in the paper)"
    return f"\n{title}\n{text_table(header, body)}"


def cell_text(cell: dict | None) -> str:
    if cell is None or cell["mean"] is None:
        return "overflow" if cell else ""
    spread = "" if cell["sd"] is None else f" ±{cell['sd']:.3f}"
    return f"{cell['mean']:.3f}{spread}"
