"""The paper's experiments as values: the scales, the runs to train, the tables and figures.

A number of a table is a quantity of a run, or of a variant of it, at a multiple of the training
length or on a task. Tables share runs by key. The values are in runs.toml and tables.toml.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluating.results import AS_TRAINED
from evaluating.task_columns import COLUMNS, LOWER_IS_BETTER, PER_CENT

EXTRAPOLATION, PASSKEY = "extrapolation", "passkey"
# Lengths to evaluate at, in training lengths.
FACTORS = {EXTRAPOLATION: (1, 2, 4, 8, 16), PASSKEY: (1, 1.5, 2, 4, 8)}


def load_toml(name: str) -> dict:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Scale:
    name: str
    config: str  # of the runs that all scales have
    train_length: int
    eval_tokens: int  # targets of the loss at every length
    spread: bool  # targets from all over the validation set, or only its beginning
    unit: str
    seeds: dict[str, int]  # number of seeds by run, and of those not named: "others"
    corpora: dict[str, dict]  # by directory: arguments of data/prepare.py, number of tokens
    gpus: int = 0  # that train a run together; 0: a CPU does
    gpu: str = "a100"  # of training/devices.toml, to plan with where none is here
    like: str = ""  # the scale whose fields its tables take where they have none of their own
    tokens_per_second: float | None = None  # training speed of one CPU core, for the plan

    def length(self, factor: float | None) -> int | None:
        return None if factor is None else int(factor * self.train_length)

    def seeds_of(self, run: str) -> Sequence[int]:
        return range(self.seeds.get(run, self.seeds["others"]))


@dataclass(frozen=True)
class Run:
    key: str
    config: str  # a file in configs/
    options: str = ""  # of train.py
    init_from: str | None = None  # key of the run whose weights it starts from
    factors: Sequence[int] = FACTORS[EXTRAPOLATION]
    windows: bool = False  # also evaluate with a sliding window
    stretched: bool = False  # also evaluate with sinks beside the window, NTK and YaRN
    alphas: Sequence[float] = ()  # also evaluate with adaptive p_i
    current: bool = False  # also evaluate with L = the evaluation's length, not training's
    form: str = "paper"  # of passkey prompts


DATA = load_toml("runs.toml")
SCALES = {name: Scale(name, **fields) for name, fields in DATA["scales"].items()}


def all_runs(scale: str) -> dict[str, Run]:
    runs = {}
    for key, fields in (DATA["main"] | DATA["sweep"] | DATA[scale]).items():
        named = {} if "config" in fields else {"options": f"--attention.name={key}"}
        runs[key] = Run(key, **{"config": SCALES[scale].config} | named | fields)
    return runs


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
    variant: str = AS_TRAINED  # "window": one of the training length, also with ", sinks=4"
    control: bool = False  # not in the paper


@dataclass(frozen=True)
class Table:
    name: str
    label: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    figure: str = "lengths"  # how it is drawn: see table_figures.py; or "none"
    folder: str = EXTRAPOLATION  # where its results are
    notes: tuple[str, ...] = ()
    title: str = ""  # where it is not the paper's
    panels: tuple[str, ...] = ("",)  # of the figure: one for the rows whose keys start with each
    pictures: str = ""  # drawn by the evaluations: a glob pattern below results/SCALE
    script: str = ""
    measure: str = ""  # the command that fills folder/NAME.json; {runs} are the rows' runs
    tokens: float = 0  # that `measure` reads per run, for the plan

    def row(self, key: str | None) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    @property
    def runs(self) -> bool:
        """Whether its numbers are of trained runs."""
        return self.folder in FACTORS or "{runs}" in self.measure

    @property
    def base(self) -> Row | None:
        return self.row(self.baseline)


def all_tables(scale: str) -> dict[str, Table]:
    data, tables = load_toml("tables.toml"), {}
    for name, given in data["tables"].items():
        fields = {key: of_scale(value, SCALES[scale]) for key, value in given.items()}
        if fields["rows"]:
            rows = [load_row(row, data["rows"]) for row in fields.pop("rows")]
            named = (data["notes"][note] for note in fields.pop("notes", ()))
            notes = [note for one in named if (note := of_scale(one, SCALES[scale]))]
            tables[name] = load_table(name, rows=rows, notes=notes, **fields)
    return tables


def of_scale(value, scale: Scale):
    """A field's value, which may be given per scale."""
    return value.get(scale.name, value.get(scale.like)) if isinstance(value, dict) else value


def load_row(given: str | dict, known: dict) -> Row:
    given = {"key": given} if isinstance(given, str) else given
    shared = known.get(given["key"], {})
    shared = {"title": shared} if isinstance(shared, str) else shared
    return Row(**{"run": given["key"]} | shared | given)


def load_table(
    name, columns=(), lengths=(), quantity="loss", gain=False, far=False, tasks=(), **fields
) -> Table:
    found = [Column(**column) for column in columns]
    share = {"lower_is_better": False, "percent": True} if quantity == "accuracy" else {}
    found += [Column(factor, quantity, paper=f"{factor:g}K", **share) for factor in lengths]
    if gain:
        found.append(Column(16, "context_gain"))
        found.append(Column(1, "bits_per_byte", title="bits per byte (1x)"))
    found += [Column(factor, "far_accuracy", **share) for factor in lengths if far and factor > 1]
    for task, metric, title in (column for column in COLUMNS if column[0] in tasks):
        paper = metric if task.startswith("lambada") else task
        kind = {"lower_is_better": metric in LOWER_IS_BETTER, "percent": metric in PER_CENT}
        found.append(Column(None, metric, task, title, paper, **kind))
    fields |= {key: tuple(v) for key, v in fields.items() if isinstance(v, list)}
    fields["script"] = f"scripts/{fields.get('script', f'table_{name}')}.sh"
    return Table(name, columns=tuple(found), **fields)
