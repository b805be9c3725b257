"""Results of an evaluation: one JSON file that grows row by row and can be continued.

    {"kind": ..., "settings": {...}, "about": {...}, "checkpoints": {ID: {...}}, "rows": [...]}

A row is one finished measurement of (checkpoint, variant, length). It is written, by replacing the
file atomically, as soon as it is known, and never computed again. Rows of one file are comparable:
`settings` must be equal to add to it. `about` is for the reader: where the data were, and so on.
Numbers that are not finite become null, as JSON has no others.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from errors import UserError
from files import Claim, finite, read_text, seal, unseal, write_json, writing

ROW_KEY = ("checkpoint", "variant", "length")


class Results:
    def __init__(self, path: str | Path, kind: str, settings: dict, about: dict):
        """Open `path` to continue it, or begin it."""
        self.path = Path(path)
        if self.path.suffix != ".json":
            raise UserError(f"--out {self.path}: give a name that ends in .json")
        self.kind, self.settings, self.about = kind, finite(settings), finite(about)
        self.checkpoints: dict[str, dict] = {}
        self.rows: list[dict] = []
        self.extra: dict = {}
        self._claim: Claim | None = None
        self._opened_as = self._version()
        if self.path.exists():
            self._continue(read_results(self.path))
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def _continue(self, found: dict) -> None:
        if found["kind"] != self.kind:
            raise UserError(
                f"{self.path} holds results of {found['kind']!r}, not of {self.kind!r}; "
                "give another --out"
            )
        for key in {**self.settings, **found["settings"]}:
            old, new = found["settings"].get(key), self.settings.get(key)
            if old != new:
                raise UserError(
                    f"{self.path} was made with {key} = {old}, this is {new}: the numbers would "
                    "not be comparable; give another --out or delete it"
                )
        self.checkpoints, self.rows = found["checkpoints"], found["rows"]

    def _version(self) -> tuple | None:
        if not self.path.exists():
            return None
        found = self.path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def find(self, **key) -> dict | None:
        """The finished row of this checkpoint, variant and length, if there is one."""
        return next((r for r in self.rows if all(r[k] == key[k] for k in ROW_KEY)), None)

    def add(self, row: dict) -> None:
        self.rows.append(finite({**row, "torch": torch.__version__}))
        self.save()

    def save(self) -> None:
        if self._claim is None:  # not before: of many processes that read only one writes
            self._claim = Claim(self.path)
            if self._version() != self._opened_as:
                raise UserError(
                    f"another process has added to {self.path} since it was read; nothing is lost: "
                    "run the same command again"
                )
        keys = ("kind", "settings", "about", "checkpoints", "rows")
        write_json(self.path, seal({key: getattr(self, key) for key in keys} | self.extra))

    def series(self) -> Iterator[tuple[str, str, list[dict]]]:
        """(checkpoint, variant, rows by length), in the order in which they were first measured."""
        names = dict.fromkeys((r["checkpoint"], r["variant"]) for r in self.rows)
        for checkpoint, variant in names:
            rows = [
                r for r in self.rows if (r["checkpoint"], r["variant"]) == (checkpoint, variant)
            ]
            yield checkpoint, variant, sorted(rows, key=lambda r: r["length"])

    def sibling(self, suffix: str) -> Path:
        """A file beside the results: `x.json` and "-depth.png" make `x-depth.png`."""
        return self.path.with_name(self.path.stem + suffix)


def read_results(path: str | Path) -> dict:
    """A results file, its structure checked."""
    path = Path(path)
    try:
        found = unseal(json.loads(read_text(path)))
        well_formed = all(
            isinstance(found[key], kind)
            for key, kind in (("settings", dict), ("checkpoints", dict), ("rows", list))
        ) and all(
            row["checkpoint"] in found["checkpoints"] and all(key in row for key in ROW_KEY)
            for row in found["rows"]
        )
        found["kind"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        well_formed = False
    if not well_formed:
        raise UserError(
            f"{path} is damaged or is not a results file of these scripts; give another --out"
        )
    return found
