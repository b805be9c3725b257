"""What was measured at one scale, and what its training runs were."""

import json
import math
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from evaluating.results import Measured, collect
from paper.experiments import SCALES, Table, all_tables
from paper.tables import Sheet
from support.files import finite, json_record, refuse_wrong_types

RUNS = "runs.json"  # beside the results of a scale: what every training run was


def paper_numbers() -> dict:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


class Evidence:
    def __init__(self, scale: str, folder: str | Path):
        """Read everything that was measured below results/SCALE."""
        self.scale, self.folder = SCALES[scale], Path(folder)
        self.tables, self.paper = all_tables(scale), paper_numbers()
        measured, self.problems = collect(self.folder)
        self.problems.pop(self.folder / RUNS, None)
        self._found: dict[tuple, dict[int | None, Measured]] = defaultdict(dict)
        for one in sorted(measured, key=lambda m: math.inf if m.seed is None else m.seed):
            self._add(one)
        self.sheet = cache(self._sheet)

    def _add(self, one: Measured) -> None:
        record, folder = one.record, one.source.relative_to(self.folder).parts[0]
        run = re.sub(r"-s\d+$", "", one.name)  # `run_name` without the seed
        place = (folder.removesuffix(".json"), record.quantity, run, record.variant, record.task)
        self._found[*place, record.length][one.seed] = one
        # Asked for without a length, a quantity is the one at the longest.
        longest = self._found[*place, None]
        if (longest.get(one.seed, one).record.length or 0) <= (record.length or 0):
            longest[one.seed] = one

    def _sheet(self, table: Table) -> Sheet:
        return Sheet(table, self.scale, self.paper[table.label], self._found)


_FIELDS = {"config": dict} | dict.fromkeys(("commit", "torch", "device", "status"), str)
_FIELDS |= dict.fromkeys(("seed", "tokens", "seconds", "loss"), int | float | None)


def read_runs(path: Path) -> dict[str, dict]:
    """The runs of runs.json by name, their fields checked; none without the file."""
    if not path.exists():
        return {}
    with json_record(path, what="is damaged or is not a list of runs") as record:
        found = finite(record["runs"])
        for name, run in found.items():
            refuse_wrong_types(run, _FIELDS, f" in the run {name!r}")
            if not all(isinstance(section, dict) for section in run["config"].values()):
                raise TypeError(f"a setting without a section in the run {name!r}")
    return found
