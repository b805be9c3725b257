"""Writing shards so that a kill at any instant loses nothing and leaves nothing half-written.

The current shard grows in `NAME.bin.tmp` and is renamed when complete. `progress.json` says how
much is safely on disk, and where in the source that ends; `manifest.json` replaces it at the end.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.shards import (
    HEADER_BYTES,
    MANIFEST,
    PROGRESS,
    SHARD_NAME,
    Shard,
    header_bytes,
    read_manifest,
    tokens_by_split,
)
from data.tokeniser import Tokeniser
from lssar.errors import UserError
from support import files


def write_manifest(
    directory: Path, tokeniser, shards: list[Shard], documents: int, settings: dict, encoders=()
) -> None:
    """Declare the set complete. No dates in it: the same text gives the same bytes."""
    manifest = {
        "format": "llm.c version 1",
        "tokeniser": tokeniser.name,
        "vocab_size": tokeniser.vocab_size,
        "eot": tokeniser.eot,
        "documents": documents,
        "tokens": tokens_by_split(shards),
        "shards": [asdict(shard) for shard in shards],
        "encoders": sorted(encoders) or None,  # names and versions of what wrote the tokens
        "merges_sha256": tokeniser.merges_sha256 if encoders else None,
        "settings": settings,
    }
    files.write_json(directory / MANIFEST, files.seal(manifest))


def forget_progress(directory: Path) -> None:
    """Called once the manifest is written, and by a rerun after a kill between the two."""
    with files.writing(directory):
        (directory / PROGRESS).unlink(missing_ok=True)
        files.sync(directory)


@dataclass(eq=False)
class ShardWriter:
    """Appends tokens to the shards of one folder; `save` and `resume` bracket an interruption."""

    directory: Path
    prefix: str
    tokeniser: Tokeniser
    settings: dict
    shard_tokens: int
    split: str = "val"
    shards: list[Shard] = field(default_factory=list)
    partial: int = 0  # tokens of the current shard
    documents: int = 0
    encoders: set[str] = field(default_factory=set)  # may change with an interruption
    _file: BinaryIO | None = None

    @property
    def totals(self) -> dict[str, int]:
        return tokens_by_split([*self.shards, Shard("", self.split, self.partial)])

    @property
    def total(self) -> int:
        return sum(self.totals.values())

    @property
    def _path(self) -> Path:
        """Of the current shard once complete; llm.c numbers validation and training together."""
        return self.directory / f"{self.prefix}_{self.split}_{len(self.shards):06d}.bin"

    @property
    def _temporary(self) -> Path:
        return self._path.with_suffix(".bin.tmp")

    def append(self, tokens: np.ndarray, encoder: str) -> None:
        """Add tokens, and the name of what encoded them, to the current shard."""
        with files.writing(self._path):
            if self._file is None:
                # Unbuffered: a failed write must fail here, not in a later close.
                self._file = self._temporary.open("wb", buffering=0)
                files.write_all(self._file, bytes(HEADER_BYTES))
            written = memoryview(np.ascontiguousarray(tokens, dtype="<u2")).cast("B")
            files.write_all(self._file, written)
        self.partial += len(tokens)
        self.encoders.add(encoder)
        self.documents += int(np.count_nonzero(tokens == self.tokeniser.eot))

    def close_shard(self) -> None:
        """Complete the current shard under its final name, if it has any tokens."""
        if self._file is None:
            return
        with files.writing(self._path):
            self._file.seek(0)
            files.write_all(self._file, header_bytes(self.partial))
            os.fsync(self._file.fileno())
            self.close()
            checksum = files.sha256_of(self._temporary)
            self._temporary.replace(self._path)
            files.sync(self.directory)
        self.shards.append(Shard(self._path.name, self.split, self.partial, checksum))
        self.partial = 0

    def save(self, source_state: object, skip: int) -> None:
        """Record that everything up to `skip` tokens after `source_state` is written."""
        if self._file is not None:
            with files.writing(self._path):
                os.fsync(self._file.fileno())
        body = {key: getattr(self, key) for key in ("settings", "split", "partial", "documents")}
        body |= {"shards": [asdict(shard) for shard in self.shards]}
        body |= {"encoders": sorted(self.encoders), "source_state": source_state, "skip": skip}
        record = {"sha256": files.digest(body), "progress": body}
        files.write_json(self.directory / PROGRESS, record)

    def resume(self) -> tuple[object, int]:
        """Continue from `progress.json` if there is one: the source state, tokens to skip."""
        progress = read_progress(self.directory)
        if progress is None:
            with files.reading(self.directory):
                names = sorted(path.name for path in self.directory.iterdir())
            for name in filter(SHARD_NAME.fullmatch, names):
                raise UserError(f"{self.directory} already holds {name}; choose an empty --out")
            self.save(None, 0)  # before the first byte: shards without a record are never ours
            return None, 0
        self.split = progress["split"]
        self.shards = [Shard(**entry) for entry in progress["shards"]]
        self.documents = progress["documents"]
        self.encoders = set(progress.get("encoders", ["unrecorded"]))  # older sets have none
        restart = f"since the interruption; delete {self.directory} and start again"
        for shard in self.shards:
            if not (self.directory / shard.name).exists():
                raise UserError(f"{self.directory / shard.name} is gone {restart}")
        if progress["partial"]:
            self.partial = progress["partial"]
            size = HEADER_BYTES + 2 * self.partial
            with files.writing(self._path):
                if self._path.exists():  # killed between the rename and the record of it
                    self._path.replace(self._temporary)
                if not self._temporary.exists() or self._temporary.stat().st_size < size:
                    raise UserError(f"{self._temporary} was lost or cut {restart}")
                self._file = self._temporary.open("r+b", buffering=0)
                self._file.truncate(size)
                self._file.seek(size)
        self._remove_strays()
        return progress["source_state"], progress["skip"]

    def _remove_strays(self) -> None:
        """Delete what was begun after the last record: it is about to be written again."""
        keep = {shard.name for shard in self.shards} | {self._temporary.name if self._file else ""}
        records = {files.temporary_of(Path(name)).name for name in (PROGRESS, MANIFEST)}
        with files.writing(self.directory):
            for path in self.directory.iterdir():
                match = SHARD_NAME.fullmatch(path.name.removesuffix(".tmp"))
                ours = match and match["prefix"] == self.prefix
                if path.name not in keep and (ours or path.name in records):
                    path.unlink()

    def finish(self) -> None:
        self.close_shard()
        written = (self.shards, self.documents, self.settings, self.encoders)
        write_manifest(self.directory, self.tokeniser, *written)
        forget_progress(self.directory)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_progress(directory: Path) -> dict | None:
    """The record of an unfinished preparation; None when there is none."""
    path = directory / PROGRESS
    with files.reading(path):
        if not path.exists():
            return None
    with files.json_record(path, f"; delete {directory} and start again") as record:
        if files.digest(record["progress"]) != record["sha256"]:
            raise ValueError("checksum")
    return record["progress"]


def refuse_other_settings(directory: Path, recorded: dict | None, settings: dict) -> None:
    if recorded in (None, settings):
        return
    changed = [key for key, new in settings.items() if recorded.get(key) != new]
    shown = [f"{k} {recorded.get(k)} then, {settings[k]} now" for k in changed if k != "source"]
    shown += ["source"] if "source" in changed else []
    made = f"{directory} was made with other settings ({', '.join(shown)})"
    raise UserError(f"{made}; use those, delete it, or choose another --out")


def recorded_settings(directory: Path) -> dict | None:
    """What the folder was, or is being, prepared with; None when nothing is written yet."""
    if (directory / MANIFEST).exists():
        return read_manifest(directory).get("settings", {})
    progress = read_progress(directory)
    begun = progress and (progress["shards"] or progress["partial"])
    return progress["settings"] if begun else None
