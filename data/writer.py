"""Writing shards so that a kill at any instant loses nothing and leaves nothing half-written.

The shard in hand grows in `NAME.bin.tmp` and is renamed when complete. `progress.json` says how
much of everything is safely on disk, and the position in the source that belongs to it;
`manifest.json` replaces it when all is done.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.shards import (
    HEADER_BYTES,
    MANIFEST,
    PROGRESS,
    SHARD_NAME,
    Shard,
    header_bytes,
    read_manifest,
    reading,
)
from data.tokeniser import Tokeniser
from lssar.errors import UserError
from support.files import (
    digest,
    read_text,
    seal,
    sha256_of,
    sync,
    temporary_of,
    write_json,
    writing,
)

# What wrote the part of a set that was begun before encoders were recorded.
UNRECORDED = "unrecorded"


def write_manifest(
    directory: Path,
    tokeniser: Tokeniser | type[Tokeniser],
    shards: list[Shard],
    documents: int,
    settings: dict,
    encoders: Collection[str] = (),
) -> None:
    """Declare the set complete. No dates in it: the same text gives the same bytes.

    Without `encoders`, names and versions of what wrote the tokens, that is recorded as unknown.
    """
    manifest = {
        "format": "llm.c version 1",
        "tokeniser": tokeniser.name,
        "vocab_size": tokeniser.vocab_size,
        "eot": tokeniser.eot,
        "documents": documents,
        "tokens": {
            split: sum(shard.tokens for shard in shards if shard.split == split)
            for split in ("train", "val")
        },
        "shards": [asdict(shard) for shard in shards],
        "encoders": sorted(encoders) or None,
        "merges_sha256": tokeniser.merges_sha256 if encoders else None,
        "settings": settings,
    }
    write_json(directory / MANIFEST, seal(manifest))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the folder and hold it: a second process is refused. The lock dies with its process."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory} is being written by another process") from None
        yield
    finally:
        os.close(handle)


class ShardWriter:
    """Appends tokens to the shards of one folder; `save` and `resume` bracket an interruption."""

    def __init__(
        self, directory: Path, prefix: str, tokeniser: Tokeniser, settings: dict, shard_tokens: int
    ):
        self.directory = directory
        self.prefix = prefix
        self.tokeniser = tokeniser
        self.settings = settings
        self.shard_tokens = shard_tokens
        self.split = "val"
        self.shards: list[Shard] = []
        self.partial = 0  # tokens of the shard in hand
        self.documents = 0
        self.encoders: set[str] = set()  # of what is written: an interruption may change it
        self._file = None

    @property
    def total(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self.partial

    def total_of(self, split: str) -> int:
        done = sum(shard.tokens for shard in self.shards if shard.split == split)
        return done + (self.partial if split == self.split else 0)

    @property
    def room(self) -> int:
        return self.shard_tokens - self.partial

    @property
    def _path(self) -> Path:
        """Where the shard in hand will be; llm.c numbers validation and training together."""
        return self.directory / f"{self.prefix}_{self.split}_{len(self.shards):06d}.bin"

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(self._path.name + ".tmp")

    def append(self, tokens: np.ndarray, encoder: str) -> None:
        """Add at most `room` tokens, and what encoded them, to the shard in hand."""
        with writing(self._path):
            if self._file is None:
                # Unbuffered: a failed write must fail here, not in a later close.
                self._file = self._temporary.open("wb", buffering=0)
                self._write(bytes(HEADER_BYTES))
            self._write(memoryview(np.ascontiguousarray(tokens, dtype="<u2")).cast("B"))
        self.partial += len(tokens)
        self.encoders.add(encoder)
        self.documents += int(np.count_nonzero(tokens == self.tokeniser.eot))

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]

    def close_shard(self) -> None:
        """Complete the shard in hand under its final name, if it has any tokens."""
        if self._file is None:
            return
        with writing(self._path):
            self._file.seek(0)
            self._write(header_bytes(self.partial))
            os.fsync(self._file.fileno())
            self._close()
            checksum = sha256_of(self._temporary)
            self._temporary.replace(self._path)
            sync(self.directory)
        self.shards.append(Shard(self._path.name, self.split, self.partial, checksum))
        self.partial = 0

    def end_validation(self) -> None:
        """What follows is training text."""
        self.close_shard()
        self.split = "train"

    def save(self, source_state: object, skip: int) -> None:
        """Record that everything up to `skip` tokens after `source_state` is written."""
        with writing(self._path):
            if self._file is not None:
                os.fsync(self._file.fileno())
        body = {
            "settings": self.settings,
            "split": self.split,
            "shards": [asdict(shard) for shard in self.shards],
            "partial": self.partial,
            "documents": self.documents,
            "encoders": sorted(self.encoders),
            "source_state": source_state,
            "skip": skip,
        }
        write_json(self.directory / PROGRESS, {"sha256": digest(body), "progress": body})

    def resume(self) -> tuple[object, int]:
        """Continue from `progress.json` if there is one: the source state, tokens to skip."""
        progress = read_progress(self.directory)
        if progress is None:
            # Recorded before the first byte, so that shards without a record are never ours.
            self._refuse_foreign_shards()
            self.save(None, 0)
            return None, 0
        self.split = progress["split"]
        self.shards = [Shard(**entry) for entry in progress["shards"]]
        self.documents = progress["documents"]
        self.encoders = set(progress.get("encoders", [UNRECORDED]))
        self._reopen(progress["partial"])
        self._remove_strays()
        return progress["source_state"], progress["skip"]

    def _refuse_foreign_shards(self) -> None:
        with reading(self.directory):
            names = sorted(entry.name for entry in os.scandir(self.directory))
        if shards := [name for name in names if SHARD_NAME.fullmatch(name)]:
            raise UserError(
                f"{self.directory} already holds {shards[0]}; choose an empty folder for --out"
            )

    def _reopen(self, partial: int) -> None:
        for shard in self.shards:
            if not (self.directory / shard.name).exists():
                raise UserError(
                    f"{self.directory / shard.name} is gone since the interruption; delete "
                    f"{self.directory} and start again"
                )
        if not partial:
            return
        size = HEADER_BYTES + 2 * partial
        with writing(self._path):
            if self._path.exists():  # killed between the rename and the record of it
                self._path.replace(self._temporary)
            if not self._temporary.exists() or self._temporary.stat().st_size < size:
                raise UserError(
                    f"{self._temporary} was lost or cut since the interruption; delete "
                    f"{self.directory} and start again"
                )
            self._file = self._temporary.open("r+b", buffering=0)
            self._file.truncate(size)
            self._file.seek(size)
        self.partial = partial

    def _remove_strays(self) -> None:
        """Delete what was begun after the last record: it is about to be written again."""
        keep = {shard.name for shard in self.shards} | (
            {self._temporary.name} if self._file else set()
        )
        records = {temporary_of(Path(name)).name for name in (PROGRESS, MANIFEST)}
        with writing(self.directory):
            for entry in os.scandir(self.directory):
                name = entry.name.removesuffix(".tmp")
                match = SHARD_NAME.fullmatch(name)
                ours = match and match["prefix"] == self.prefix
                if entry.name not in keep and (ours or entry.name in records):
                    Path(entry.path).unlink()

    def finish(self) -> None:
        """Write the manifest, after which the set is complete."""
        self.close_shard()
        # progress.json goes last: a kill between the two leaves a set that `resume` finishes.
        write_manifest(
            self.directory,
            self.tokeniser,
            self.shards,
            self.documents,
            self.settings,
            self.encoders,
        )
        with writing(self.directory):
            (self.directory / PROGRESS).unlink(missing_ok=True)
            sync(self.directory)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_) -> None:
        self._close()


def read_progress(directory: Path) -> dict | None:
    """The record of an unfinished preparation; None when there is none."""
    path = directory / PROGRESS
    with reading(path):
        if not path.exists():
            return None
        text = read_text(path, errors="replace")
    try:
        record = json.loads(text)
        if digest(record["progress"]) != record["sha256"]:
            raise ValueError("checksum")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete {directory} and start "
            "again"
        ) from None
    return record["progress"]


def recorded_settings(directory: Path) -> dict | None:
    """What the folder was, or is being, prepared with; None when nothing is written yet."""
    if (directory / MANIFEST).exists():
        return read_manifest(directory).get("settings", {})
    progress = read_progress(directory)
    if progress is None or not (progress["shards"] or progress["partial"]):
        return None
    return progress["settings"]


def is_complete(directory: Path) -> bool:
    """Whether the manifest is written; removes the record a kill just after it left behind."""
    if not (directory / MANIFEST).exists():
        return False
    with writing(directory):
        (directory / PROGRESS).unlink(missing_ok=True)
    return True
