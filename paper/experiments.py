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
    factor: float | None = None  # length, in training lengths
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


COLUMN_FIELDS = ("columns", "lengths", "quantity", "gain", "tasks")


def all_tables(scale: str) -> dict[str, Table]:
    data = load_toml("tables.toml")
    found = {}
    for name, given in data["tables"].items():
        fields = {k: v.get(scale) if isinstance(v, dict) else v for k, v in given.items()}
        if fields["rows"]:
            about_columns = {k: fields.pop(k) for k in COLUMN_FIELDS if k in fields}
            fields["columns"] = tuple(load_columns(**about_columns))
            fields["rows"] = tuple(load_row(row, data["rows"]) for row in fields["rows"])
            fields["notes"] = tuple(data["notes"][note] for note in fields.get("notes", ()))
            fields["panels"] = tuple(fields.get("panels", ("",)))
            fields["script"] = f"scripts/{fields.get('script', f'table_{name}')}.sh"
            found[name] = Table(name, **fields)
    return found


def load_row(given: str | dict, known: dict) -> Row:
    given = {"key": given} if isinstance(given, str) else given
    shared = known.get(given["key"], {})
    shared = {"title": shared} if isinstance(shared, str) else shared
    return Row(**{"run": given["key"]} | shared | given)


def load_columns(columns=(), lengths=(), quantity="loss", gain=False, tasks=()) -> list[Column]:
    found = [Column(**column) for column in columns]
    share = {"lower_is_better": False, "percent": True} if quantity == "accuracy" else {}
    found += [Column(factor, quantity, paper=f"{factor:g}K", **share) for factor in lengths]
    found += [Column(16, "context_gain")] if gain else []
    for task, metric, title in (c for _, _, layout in LAYOUTS for c in layout if c[0] in tasks):
        paper = metric if task.startswith("lambada") else task
        kind = {"lower_is_better": metric in LOWER_IS_BETTER, "percent": metric in PER_CENT}
        found.append(Column(None, metric, task, title, paper, **kind))
    return found
