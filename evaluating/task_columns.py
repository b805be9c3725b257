"""Which metrics of which downstream tasks the tables show, and in what units: tasks.toml."""

import tomllib
from pathlib import Path

Column = tuple[str, str, str]  # task, metric, heading

TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
PER_CENT, LOWER_IS_BETTER = tuple(TASKS["per_cent"]), tuple(TASKS["lower_is_better"])
# (title, columns)
LAYOUTS = [(t["title"], [*map(tuple, t["columns"])]) for t in TASKS["layouts"]]
COLUMNS: list[Column] = [column for _, columns in LAYOUTS for column in columns]
