"""Loads the scales, the runs to train and the tables: runs.toml, tables.toml, paper.json.

A number of a table is a quantity of a run, or of a variant of it, at a multiple of the training
length or on a task. Tables share runs by key.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from evaluating.results import AS_TRAINED
from evaluating.task_columns import COLUMNS, LOWER_IS_BETTER, PER_CENT
from evaluating.variants import CURRENT_LENGTH, NTK, YARN, alpha_name, window_name
from lssar.errors import UserError, did_you_mean

# How a run is evaluated.
EXTRAPOLATION = "extrapolation"
PASSKEY = "passkey"
NATS = "nats per token"  # or per byte: the unit of the scale
USUAL_SCALES = ("nano", "single", "paper")  # of a table
# Lengths to evaluate at, in training lengths.
FACTORS = {EXTRAPOLATION: (1, 2, 4, 8, 16), PASSKEY: (1, 1.5, 2, 4, 8)}
SINKS = 4  # as StreamingLLM keeps
# Windows of rows, by name: they are of the training length, and keep so many sinks beside it.
WINDOWS = {"window": 0, f"window, sinks={SINKS}": SINKS}


@cache
def load_toml(name: str) -> dict:
    """Read a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@cache
def paper_numbers() -> dict:
    """Return the numbers that the paper prints, by the label of its table."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Scale:
    """Says how large the runs of a scale are, on what text, and with how many seeds."""

    name: str
    config: str  # of the runs that all scales have
    train_length: int
    eval_tokens: int  # targets of the loss at every length
    spread: bool  # targets from all over the validation set, or only its beginning
    unit: str
    seeds: dict[str, int]  # number of seeds by run; "others" is for those not named
    corpora: dict[str, dict]  # by directory: arguments of data/prepare.py, number of tokens
    rates: dict[str, float] = field(default_factory=dict)  # learning rates by run or mechanism
    gpus: int = 0  # GPUs that train a run together; 0: a CPU does
    gpu: str = "a100"  # the GPU whose hours a plan states
    like: str = ""  # another scale; tables take its fields where they have none for this one
    tokens_per_second: float | None = None  # training speed of one CPU core, for the plan

    def length(self, factor: float | None) -> int | None:
        """Return a length in tokens, given in training lengths."""
        return None if factor is None else int(factor * self.train_length)

    def seeds_of(self, run: str) -> Sequence[int]:
        """Return the seeds of a run."""
        return range(self.seeds.get(run, self.seeds["others"]))

    def rate_of(self, run: str, options: str) -> float | None:
        """Return the learning rate of a run; None: the config's."""
        if run in self.rates:
            return self.rates[run]
        mechanism = re.search(r"--attention\.name=(\S+)", options)
        return self.rates.get(mechanism[1]) if mechanism else None


@dataclass(frozen=True)
class Run:
    """Says how a model is trained and evaluated; each seed of it is one training."""

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


SCALES = {name: Scale(name, **given) for name, given in load_toml("runs.toml")["scales"].items()}


def all_runs(scale: str) -> dict[str, Run]:
    """Return the runs of a scale by their keys."""
    data = load_toml("runs.toml")
    runs = {}
    for key, given in (data["main"] | data["sweep"] | data[scale]).items():
        fields = {"config": SCALES[scale].config}
        if "config" not in given:
            fields["options"] = f"--attention.name={key}"
        fields |= given
        options = fields.get("options", "")
        rate = SCALES[scale].rate_of(key, options)
        # A run that goes on from another has the rate of its own config.
        if rate is not None and "--train.lr=" not in options and "init_from" not in fields:
            fields["options"] = f"{options} --train.lr={rate:g}".strip()
        runs[key] = Run(key, **fields)
    return runs


@dataclass(frozen=True)
class Column:
    """Says which quantity a column shows, and at which length or on which task."""

    factor: float | None = None  # length, in training lengths
    quantity: str = "loss"
    task: str = ""
    title: str = ""  # where it is not the length
    paper: str | None = None  # the paper's column
    lower_is_better: bool = True
    percent: bool = False  # a share, shown in per cent

    def run(self, key: str) -> str:
        """Return the run that a row's key means in this column."""
        return key if self.factor is None else key.format(factor=f"{self.factor:g}")


@dataclass(frozen=True)
class Row:
    """Says which run a row shows, and under which variant."""

    key: str
    title: str
    run: str  # may contain {factor}, the column's
    variant: str = AS_TRAINED  # as records name it, or one of WINDOWS
    control: bool = False  # not in the paper

    def variant_at(self, train_length: int) -> str:
        """Return the variant as records of this training length name it."""
        if self.variant in WINDOWS:
            return window_name(train_length, WINDOWS[self.variant])
        return self.variant


@dataclass(frozen=True)
class Table:
    """Says what a table of the paper, or of ours, shows, and how it is measured."""

    name: str
    label: str  # the paper's name of it; tables of ours have other labels
    title: str
    unit: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    figure: str = "lengths"  # how it is drawn: see figures.py; or "none"
    drawn: tuple[str, ...] = ()  # keys of the rows that the figure shows; empty: all
    measured_by: str = EXTRAPOLATION  # or "passkey", one job per run; else see `measure`
    notes: tuple[str, ...] = ()
    panels: tuple[str, ...] = ("",)  # starts of row keys; each has a panel of the figure
    script: str = ""
    measure: str = ""  # one command for the whole table; {runs} are the rows' runs
    records: str = ""  # the table whose records it shows; empty: its own

    @property
    def has_runs(self) -> bool:
        """Tell whether its numbers are of trained runs."""
        return not self.records and (not self.measure or "{runs}" in self.measure)

    @property
    def base(self) -> Row | None:
        """Return the row that others are compared with."""
        return self.row(self.baseline)

    def row(self, key: str | None) -> Row | None:
        """Return the row with this key; None if there is none."""
        return next((row for row in self.rows if row.key == key), None)


def all_tables(scale: str) -> dict[str, Table]:
    """Return the tables of a scale by their names."""
    data = load_toml("tables.toml")
    tables = {}
    for name, given in data["tables"].items():
        fields = {key: of_scale(value, SCALES[scale]) for key, value in given.items()}
        if scale in fields.pop("scales", USUAL_SCALES) and fields["rows"]:
            tables[name] = _load_table(name, SCALES[scale], fields, data)
    return tables


def of_scale(value, scale: Scale):
    """Return a field's value, which may be given per scale."""
    if not isinstance(value, dict):
        return value
    return value.get(scale.name, value.get(scale.like))


def _load_table(name: str, scale: Scale, fields: dict, data: dict) -> Table:
    """Build a table of its fields at a scale; `data` has the rows and notes that tables share."""
    given = {key: value for key, value in fields.items() if value is not None}
    printed = paper_numbers().get(given["label"], {})  # empty for tables of ours
    rows = tuple(_load_row(row, data["rows"]) for row in given.pop("rows"))
    columns = tuple(_load_columns(given))
    if "measure" not in given:  # else its own command names the variants
        check_variants(name, rows, scale.name)
    notes = [of_scale(data["notes"][note], scale) for note in given.get("notes", ())]
    script = given.get("script", f"table_{name}")
    given.setdefault("title", printed.get("title"))
    unit = given.get("unit", printed.get("unit", NATS))
    given["unit"] = scale.unit if unit == NATS else unit
    given["notes"] = tuple(note for note in notes if note)
    given["panels"] = tuple(given.get("panels", ("",)))
    given["script"] = f"scripts/{script}.sh"
    return Table(name, rows=rows, columns=columns, **given)


def check_variants(table: str, rows: Sequence[Row], scale: str) -> None:
    """Refuse a row with a variant that no evaluation of a run makes."""
    alphas = {alpha_name(alpha) for run in all_runs(scale).values() for alpha in run.alphas}
    made = [AS_TRAINED, *WINDOWS, *sorted(alphas), CURRENT_LENGTH, NTK, YARN]
    for row in rows:
        if row.variant not in made:
            raise UserError(
                f"tables.toml: row {row.key!r} of {table!r} has an unknown variant: "
                f"{did_you_mean(row.variant, made)}"
            )


def _load_row(given: str | dict, known: dict) -> Row:
    """Build a row of its key or fields; [rows] has what all tables share."""
    if isinstance(given, str):
        given = {"key": given}
    shared = known.get(given["key"], {})
    if isinstance(shared, str):
        shared = {"title": shared}
    return Row(**{"run": given["key"]} | shared | given)


def _load_columns(given: dict) -> list[Column]:
    """Take the fields that describe columns out of a table's fields, and build them."""
    quantity = given.pop("quantity", "loss")
    share = {"lower_is_better": False, "percent": True} if quantity == "accuracy" else {}
    columns = [Column(**column) for column in given.pop("columns", ())]
    lengths = given.pop("lengths", ())
    for factor in lengths:
        columns.append(Column(factor, quantity, paper=f"{factor:g}K", **share))
    if given.pop("benefit", False):
        columns.append(Column(16, "far_context_benefit", lower_is_better=False))
        columns.append(Column(1, "bits_per_byte", title="bits per byte (1x)"))
    if given.pop("far", False):
        for factor in lengths:
            if factor > 1:
                columns.append(Column(factor, "far_accuracy", **share))
    tasks = given.pop("tasks", ())
    for task, metric, title in COLUMNS:
        if task in tasks:
            paper = metric if task.startswith("lambada") else task
            kind = {"lower_is_better": metric in LOWER_IS_BETTER, "percent": metric in PER_CENT}
            columns.append(Column(None, metric, task, title, paper, **kind))
    return columns
