"""What `reproduce.py` writes, read into records and checked: tables, claims, runs.

A file may be broken, foreign or hostile: `Malformed` says in one line what is wrong with it.
"""

import math
from dataclasses import dataclass

REQUIRED = object()
DEFAULT_NOISE = 0.02  # where a table states none
KIND_NAMES = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}


class Malformed(ValueError):
    """Why a file cannot be shown."""


@dataclass(frozen=True)
class Cell:
    """One measured number over seeds."""

    mean: float | None  # None: it was not finite
    sd: float | None
    n: int
    values: tuple[float | None, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    paper: str | None
    noise: float | None  # of the gap between two single runs


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    control: bool
    status: str
    paper: tuple[float | None, ...]
    measured: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    path: str
    name: str
    label: str
    scale: str
    title: str
    unit: str
    better: str | None
    tolerance: float | None
    seed_noise: float | None
    baseline: str | None
    command: str | None
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    figures: tuple[str, ...]

    def noise_of(self, column: int) -> float:
        """Of a gap between two numbers of one seed each, as the table states it."""
        stated = self.columns[column].noise, self.seed_noise
        return next((noise for noise in stated if noise is not None), DEFAULT_NOISE)

    def baseline_row(self) -> Row | None:
        return next((row for row in self.rows if row.key == self.baseline), None)


@dataclass(frozen=True)
class Claim:
    claim: str
    paper: str
    measured: str
    verdict: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    name: str
    status: str
    seed: int | None
    tokens: int | None
    seconds: float | None
    loss: float | None
    parameters: int | None
    commit: str | None
    torch: str | None
    device: str | None
    config: tuple[str, ...]  # as lines: section.key = value


def take(found: dict, key: str, kind: type, default=REQUIRED):
    """found[key], which must be of this kind; absent or null is the default, if there is one."""
    value = found.get(key)
    if value is None:
        if default is REQUIRED:
            raise Malformed(f"it has no {key!r}")
        return default
    if not isinstance(value, kind):
        raise Malformed(f"{key!r} is not {KIND_NAMES[kind]}")
    return value


def number(value, what: str) -> float | None:
    """A finite number; None for null, NaN and infinities."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{what} is not a number")
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the floats
        return None


def texts(found: dict, key: str) -> tuple[str, ...]:
    values = take(found, key, list, [])
    if not all(isinstance(value, str) for value in values):
        raise Malformed(f"{key!r} holds something that is not a text")
    return tuple(values)


def objects(found: dict, key: str) -> list[dict]:
    values = take(found, key, list)
    if not all(isinstance(value, dict) for value in values):
        raise Malformed(f"{key!r} holds something that is not an object")
    return values


def read_cell(found, what: str) -> Cell | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise Malformed(f"{what} is not an object")
    values = tuple(number(v, f"{what}.values") for v in take(found, "values", list, []))
    sd, n = number(found.get("sd"), f"{what}.sd"), number(found.get("n", 1), f"{what}.n")
    if n is None or n < 1 or n != int(n):
        raise Malformed(f"{what}.n is not a count of seeds")
    if sd is not None and sd < 0:
        raise Malformed(f"{what}.sd is negative")
    mean = number(found.get("mean"), f"{what}.mean")
    return Cell(mean, sd, int(n), values, texts(found, "sources"))


def read_row(found: dict, columns: int) -> Row:
    key = take(found, "key", str)
    paper = take(found, "paper", list, [None] * columns)
    measured = take(found, "measured", list, [None] * columns)
    for name, cells in (("paper", paper), ("measured", measured)):
        if len(cells) != columns:
            raise Malformed(f"row {key!r} has {len(cells)} {name} cells for {columns} columns")
    return Row(
        key=key,
        title=take(found, "title", str, key),
        control=take(found, "control", bool, False),
        status=take(found, "status", str, "done"),
        paper=tuple(number(v, f"row {key!r}: a paper value") for v in paper),
        measured=tuple(read_cell(c, f"row {key!r}: a measured cell") for c in measured),
    )


def read_table(found: dict, path: str, scale: str) -> Table:
    columns = tuple(
        Column(
            key=take(c, "key", str),
            title=take(c, "title", str, c["key"]),
            paper=take(c, "paper", str, None),
            noise=number(c.get("noise"), "a column's noise"),
        )
        for c in objects(found, "columns")
    )
    rows = tuple(read_row(row, len(columns)) for row in objects(found, "rows"))
    keys = [row.key for row in rows]
    if twins := [key for key in keys if keys.count(key) > 1]:
        raise Malformed(f"two rows are called {twins[0]!r}")
    baseline = take(found, "baseline", str, None)
    if baseline is not None and baseline not in keys:
        raise Malformed(f"the baseline {baseline!r} is none of the rows")
    name = take(found, "name", str)
    return Table(
        path=path,
        name=name,
        label=take(found, "label", str, name),
        scale=take(found, "scale", str, scale),
        title=take(found, "title", str, name),
        unit=take(found, "unit", str, ""),
        better=take(found, "better", str, None),
        tolerance=number(found.get("tolerance"), "'tolerance'"),
        seed_noise=number(found.get("seed_noise"), "'seed_noise'"),
        baseline=baseline,
        command=take(found, "command", str, None),
        columns=columns,
        rows=rows,
        notes=texts(found, "notes"),
        figures=texts(found, "figures"),
    )


def read_claims(found: dict) -> list[Claim]:
    return [
        Claim(
            claim=take(c, "claim", str),
            paper=take(c, "paper", str, ""),
            measured=take(c, "measured", str, ""),
            verdict=take(c, "verdict", str),
            sources=texts(c, "sources"),
        )
        for c in objects(found, "claims")
    ]


def read_runs(found: dict) -> list[Run]:
    runs = take(found, "runs", dict)
    return [read_run(name, run) for name, run in sorted(runs.items())]


def read_run(name: str, found) -> Run:
    if not isinstance(found, dict):
        raise Malformed(f"run {name!r} is not an object")
    numbers = {
        key: number(found.get(key), f"run {name!r}: {key}")
        for key in ("seed", "tokens", "seconds", "loss", "parameters")
    }
    return Run(
        name=name,
        status=take(found, "status", str, "done"),
        commit=take(found, "commit", str, None),
        torch=take(found, "torch", str, None),
        device=take(found, "device", str, None),
        config=tuple(flat(take(found, "config", dict, {}))),
        **numbers,
    )


def flat(config: dict, prefix: str = "") -> list[str]:
    """A nested config as the lines that would set it."""
    lines = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key} = {value}")
    return lines
