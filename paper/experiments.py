"""The paper's tables and figures as values: where each of their numbers is to be found.

A number is a quantity of a run, or of a variant of it, at a multiple of the training length or on a
task. Tables share runs by key. What they hold is in tables.toml.
"""

from dataclasses import dataclass

from evaluating.results import AS_TRAINED
from evaluating.task_columns import LAYOUTS, LOWER_IS_BETTER, PER_CENT
from paper.runs import load_toml

EXTRAPOLATION, PASSKEY = "extrapolation", "passkey"


@dataclass(frozen=True)
class Column:
    factor: float | None = None  # length over the training length
    quantity: str = "loss"
    task: str = ""
    title: str = ""  # where it is not the length
    paper: str | None = None  # the paper's column
    lower_is_better: bool = True
    percent: bool = False  # a share, shown in per cent

    def run(self, key: str) -> str:
        """The run that a row's key means in this column."""
        return key if self.factor is None else key.format(factor=f"{self.factor:g}")


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    run: str  # may contain {factor}, the column's
    variant: str = AS_TRAINED  # "window" is one of the training length
    control: bool = False  # not in the paper


@dataclass(frozen=True)
class Table:
    name: str
    label: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    figure: str = "lengths"  # how it is drawn: "lengths", "gaps", "bars", "exponents", "columns"
    folder: str = EXTRAPOLATION  # where its results are
    notes: tuple[str, ...] = ()
    title: str = ""  # where it is not the paper's
    panels: tuple[str, ...] = ("",)  # of the figure: one for the rows whose keys start with each
    pictures: str = ""  # drawn by the evaluations: a glob pattern below results/SCALE
    script: str = ""
    measure: str = ""  # the command that fills folder/NAME.json; {runs} are the rows' runs
    all_seeds: bool = False  # of the runs to measure, not only the first

    def row(self, key: str | None) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    @property
    def base(self) -> Row | None:
        return self.row(self.baseline)


def all_tables(scale: str) -> dict[str, Table]:
    data = load_toml("tables.toml")
    found = {}
    for name, fields in data["tables"].items():
        fields = {k: v.get(scale) if isinstance(v, dict) else v for k, v in fields.items()}
        if fields["rows"]:
            found[name] = Table(
                name=name,
                label=fields.pop("label"),
                columns=tuple(load_columns(fields)),
                rows=tuple(load_row(row, data["rows"]) for row in fields.pop("rows")),
                notes=tuple(data["notes"][note] for note in fields.pop("notes", ())),
                panels=tuple(fields.pop("panels", ("",))),
                script=f"scripts/{fields.pop('script', f'table_{name}')}.sh",
                **fields,
            )
    return found


def load_row(given: str | dict, known: dict) -> Row:
    given = {"key": given} if isinstance(given, str) else given
    shared = known.get(given["key"], {})
    shared = {"title": shared} if isinstance(shared, str) else shared
    return Row(**{"run": given["key"]} | shared | given)


def load_columns(fields: dict) -> list[Column]:
    """Take what is said of a table's columns out of its fields."""
    if "tasks" in fields:
        return task_columns(fields.pop("tasks"))
    found = [Column(**column) for column in fields.pop("columns", ())]
    quantity = fields.pop("quantity", "loss")
    share = {"lower_is_better": False, "percent": True} if quantity == "accuracy" else {}
    for factor in fields.pop("lengths", ()):
        found.append(Column(factor, quantity, paper=f"{factor:g}K", **share))
    if fields.pop("gain", False):
        found.append(Column(16, "context_gain"))
    return found


def task_columns(tasks: list[str]) -> list[Column]:
    return [
        Column(
            quantity=metric,
            task=task,
            title=title,
            paper=metric if task.startswith("lambada") else task,
            lower_is_better=metric in LOWER_IS_BETTER,
            percent=metric in PER_CENT,
        )
        for _, _, layout in LAYOUTS
        for task, metric, title in layout
        if task in tasks
    ]
