"""Reads tasks.toml: the metrics of downstream tasks that the tables show, and their units."""

import tomllib
from pathlib import Path

Column = tuple[str, str, str]  # task, metric, heading

TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
PER_CENT = tuple(TASKS["per_cent"])
LOWER_IS_BETTER = tuple(TASKS["lower_is_better"])
# (title, columns)
LAYOUTS = [(t["title"], [*map(tuple, t["columns"])]) for t in TASKS["layouts"]]
COLUMNS: list[Column] = [column for _, columns in LAYOUTS for column in columns]
