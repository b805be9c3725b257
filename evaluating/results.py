"""Holds measured numbers: evaluations write this schema; tables, figures and page read it.

    {"kind": ..., "settings": {...}, "about": {...}, "runs": {ID: {...}}, "records": [...]}

A record is one measured number, with its parts in `details`. `runs` describes each ID: name, seed,
training length, settings of the model. A file is replaced atomically with every new
measurement, and no measurement is repeated. Records of one file are comparable: to add to it,
`settings` must be equal; `about` is for the reader. Numbers that are not finite become null.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from lssar.errors import UserError
from support import files
from support.command import command_line, revision

AS_TRAINED = "as trained"
HEAD = {"kind": str, "settings": dict, "about": dict, "runs": dict}  # all of a file but its records


@dataclass(frozen=True)
class Record:
    """Holds one measured number, and the run, variant, task and length it belongs to."""

    quantity: str  # "loss", "far_context_benefit", "accuracy", ...
    run: str  # a key of the file's runs
    value: float | int | None  # None: it overflowed
    variant: str = AS_TRAINED
    task: str = ""  # downstream.py and far/audit.py only
    length: int | None = None
    tokens: int | None = None  # number of tokens that the value is a mean over
    error: float | int | None = None  # standard error of the value
    command: str = ""
    revision: str = ""  # of the code; ends in + where the checkout had uncommitted changes
    details: dict = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """Return the fields that no two records of a file share."""
        return self.quantity, self.run, self.variant, self.task, self.length

    def to_json(self) -> dict:
        """Return the fields that differ from their default, and the value."""
        defaults = {f.name: f.default for f in fields(self)} | {"details": {}}
        return {k: v for k, v in asdict(self).items() if k == "value" or v != defaults[k]}

    def check(self, runs: dict) -> None:
        """Raise if the record can only come from a damaged file."""
        if self.run not in runs:
            raise ValueError(f"a record of the unknown run {self.run!r}")
        if not isinstance(runs[self.run], dict) or not isinstance(runs[self.run].get("run"), str):
            raise TypeError(f"run {self.run!r} has no name")
        kinds = {f.name: f.type for f in fields(self)}
        files.refuse_wrong_types(vars(self), kinds, f" in a record of {self.quantity!r}")


class Results:
    """Holds the records of one file, and writes it."""

    def __init__(self, path: Path, kind: str, settings: dict, about: dict):
        """Begin without records; the first `save` replaces the file at this path."""
        self.path = Path(path)
        self.kind = kind
        self.settings = files.finite(settings)
        self.about = files.finite(about)
        self.runs: dict[str, dict] = {}
        self.records: list[Record] = []
        self.stamp: dict[str, str] = {}  # command and revision of records that are added
        self.made_with: Callable[[dict], dict] | None = None  # further details, by their run
        self._claim: files.Claim | None = None
        self._opened_as = self._version()

    def _version(self) -> tuple | None:
        """Return the file's inode, time and size, which change when another process writes it."""
        if not self.path.exists():
            return None
        found = self.path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def select(self, **fields) -> list[Record]:
        """Return the records whose fields have these values."""
        return [r for r in self.records if all(getattr(r, k) == v for k, v in fields.items())]

    def find(self, **fields) -> Record | None:
        """Return the first record whose fields have these values."""
        return next(iter(self.select(**fields)), None)

    def add(self, *records: Record, save: bool = True) -> None:
        """Add the numbers of one measurement, all or none; older ones with the same key go."""
        replaced = {r.key for r in records}
        self.records = [r for r in self.records if r.key not in replaced]
        for record in records:
            if not record.command:  # else it was measured before
                details = record.details
                if self.made_with is not None:
                    details = details | self.made_with(self.runs.get(record.run, {}))
                record = replace(record, **self.stamp, details=details)
            self.records.append(Record(**files.finite(asdict(record))))
        if save:
            self.save()

    def save(self) -> None:
        """Replace the file; from the first call on, no other process may write it."""
        if self._claim is None:  # many processes may read, only one writes
            files.make_folder(self.path.parent)
            self._claim = files.Claim(self.path)
            if self._version() != self._opened_as:
                raise UserError(
                    f"another process has added to {self.path} since it was read; "
                    "nothing is lost: run the same command again"
                )
        head = {key: getattr(self, key) for key in HEAD}
        records = ",\n".join(json.dumps(record.to_json()) for record in self.records)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        files.write_text(self.path, f'{text},\n "records": [\n{records}\n]}}\n')

    def series(self, quantity: str) -> Iterator[tuple[str, str, list[Record]]]:
        """Yield (run, variant, records by length), in the order of their first measurement."""
        records = self.select(quantity=quantity)
        for run, variant in dict.fromkeys((r.run, r.variant) for r in records):
            found = self.select(quantity=quantity, run=run, variant=variant)
            yield run, variant, sorted(found, key=lambda r: r.length or 0)

    def sibling(self, suffix: str) -> Path:
        """Return a path beside the results: `x.json` and "-depth.png" make `x-depth.png`."""
        return self.path.with_name(self.path.stem + suffix)


def continue_results(path: Path, kind: str, settings: dict, about: dict) -> Results:
    """Begin a file, or continue one of the same kind and settings."""
    results = Results(path, kind, settings, about)
    path = results.path
    if path.suffix != ".json":
        raise UserError(f"--out {path}: give a name that ends in .json")
    files.make_folder(path.parent)
    results.stamp = {"command": command_line(), "revision": revision()}  # as they are now
    if not path.exists():
        return results
    found = read_results(path)
    if found.kind != kind:
        raise UserError(
            f"{path} holds results of {found.kind!r}, not of {kind!r}; give another --out"
        )
    for key in results.settings | found.settings:
        old = found.settings.get(key)
        new = results.settings.get(key)
        if old != new:
            raise UserError(
                f"{path} was made with {key} = {old}, this is {new}: not comparable; "
                "give another --out or delete it"
            )
    results.runs = found.runs
    results.records = found.records
    return results


def read_results(path: str | Path) -> Results:
    """Read a results file and check its structure."""
    path = Path(path)
    what = "is damaged or is not a results file of these scripts"
    with files.json_record(path, "; give another --out", what) as record:
        found = dict(record)
        files.refuse_wrong_types(found, HEAD)
        results = Results(path, found["kind"], found["settings"], found["about"])
        results.runs = found["runs"]
        results.records = [Record(**values) for values in found["records"]]
        for record in results.records:
            record.check(results.runs)
    return results
