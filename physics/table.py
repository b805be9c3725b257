"""The results of physics/discover.py, one row per mechanism: `tab:symbolic_regression`."""

import json
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from errors import UserError
from files import finite, write_json
from physics.regression import NAMES, evaluate, form

LABEL = "tab:symbolic_regression"
ROOT = Path(__file__).resolve().parents[1]
ROWS = ("oracle", "softmax", "lssar", "truth")
COLUMNS = (
    ("constant", "k of k m1 / r^2"),
    ("R2", "R^2 of |F|"),
    ("rank", "rank correlation of |F|"),
    ("r", "exponent of r"),
    ("m1", "exponent of m1"),
    ("m2", "exponent of m2"),
    ("cosine", "mean cosine, 8 planets"),
)
NEAR = 0.1  # of an exponent, for an equation to have Newton's form


def newtonian(equation: dict) -> bool:
    """Whether an equation goes as m1 / r^2, whatever it makes of m2 and whatever is added."""
    e = equation["exponents"]
    return all(
        e[key] is not None and abs(e[key] - value) < NEAR
        for key, value in {"r": -2, "m1": 1}.items()
    )


def constant(equations: list[dict]) -> float | None:
    """k = F r^2 / m1 at the masses of Earth and Sun, the median over Newtonian equations."""
    at = np.array([[1.0, 3e-6, 1.0]])
    found = [
        float(evaluate(form(e["equation"]), at)[0]) / at[0, 1] for e in equations if newtonian(e)
    ]
    return median(found) if found else None


def mean_cosine(entry: dict) -> float | None:
    planets = entry.get("planets")
    return planets and float(np.mean([p["cosine"] for p in planets.values()]))


def values(entry: dict) -> list[float | None]:
    m = entry["magnitude"]
    powers = [m["exponents"][name] for name in NAMES]
    return [constant(entry["equations"]), m["R2"], m["rank"], *powers, mean_cosine(entry)]


def write_table(path: Path, results: dict, source: Path, pictures: list[Path]) -> None:
    printed = paper()
    scale = path.parent.name
    entries = list(results["models"].values())
    keys = dict.fromkeys([*ROWS[:-1], *(e["row"] for e in entries if e["row"] not in ROWS)])
    rows = [
        _row(key, [e for e in entries if e["row"] == key], printed["rows"].get(key, [None]), source)
        for key in [*keys, ROWS[-1]]
    ]
    table = {
        "kind": "table",
        "name": path.stem,
        "label": LABEL,
        "scale": scale,
        "title": printed["title"],
        "script": "scripts/table_physics.sh",
        "unit": printed["unit"],
        "better": printed["better"],
        "tolerance": printed["tolerance"],
        "baseline": None,
        "columns": [
            {"key": key, "title": title, "paper": key if key in printed["columns"] else None}
            for key, title in COLUMNS
        ],
        "rows": rows,
        "notes": notes(results),
        "figures": [str(p) for p in pictures],
        "command": f"SCALE={scale} bash scripts/table_physics.sh",
    }
    write_json(path, finite(table))


def paper() -> dict:
    try:
        return json.loads((ROOT / "paper.json").read_text(encoding="utf-8"))[LABEL]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"paper.json has not the numbers of {LABEL} ({error})") from None


def _row(key: str, entries: list[dict], printed: list, source: Path) -> dict:
    """Of the runs of one mechanism: mean and spread of each number over those that have it."""
    measured = zip(*map(values, entries), strict=True) if entries else [()] * len(COLUMNS)
    return {
        "key": key,
        "title": entries[0]["title"] if entries else key,
        "control": key in ("oracle", "truth"),
        "status": "done" if entries else "missing",
        "paper": [printed[0], *[None] * (len(COLUMNS) - 1)],
        "measured": [_cell([v for v in column if v is not None], source) for column in measured],
    }


def _cell(found: list[float], source: Path) -> dict | None:
    if not found:
        return None
    spread = stdev(found) if len(found) > 1 else None
    sources = [str(source)] * len(found)
    return {
        "mean": fmean(found),
        "sd": spread,
        "n": len(found),
        "values": found,
        "sources": sources,
    }


def notes(results: dict) -> list[str]:
    """What was found, in sentences: the verdict and the five equations of every model."""
    lines = []
    for entry in results["models"].values():
        equations = entry["equations"]
        count = sum(map(newtonian, equations))
        lines.append(
            f"{entry['label']}: {count} of {len(equations)} equations go as m1 / r^2; in order: "
            + "; ".join(e["equation"] for e in equations)
            + "."
        )
    effort = results["settings"]["effort"]
    engine = results["settings"]["engine"]
    extent = (
        f"{effort['iterations']} iterations"
        if engine == "pysr"
        else f"population {effort['population']}, {effort['evaluations']:,} evaluations"
    )
    lines.append(
        "The exponent of m1 tells whether a model knows the planet's mass, which a path hardly "
        "shows: all it does is to move the star by m1 / m2 of the planet's own way."
    )
    lines.append(f"Symbolic regression by {engine} ({extent}), three restarts, chosen by score.")
    return lines
