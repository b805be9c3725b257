"""Writes shards so that a kill at any instant loses nothing and leaves nothing half-written.

Each split's current shard grows in `NAME.bin.tmp` and is renamed when complete. `progress.json`
says how much is safely on disk, and where in the source that ends; `manifest.json` replaces it at
the end.
"""

import os
import re
from dataclasses import asdict, dataclass, field
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
    tokens_by_split,
)
from data.tokeniser import Tokeniser
from lssar.errors import UserError
from support import files

# Files that a preparation may leave behind: shards, growing or complete, and half-written records.
STRAY = re.compile(
    rf"(\.?{SHARD_NAME.pattern}(\.[0-9a-f]{{16}})?(\.tmp)?)"
    rf"|\.({re.escape(PROGRESS)}|{re.escape(MANIFEST)})\.[0-9a-f]{{16}}\.tmp",
    re.ASCII,
)


def write_manifest(
    directory: Path, tokeniser, shards: list[Shard], documents, settings, encoders=(), skipped=()
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
        "encoders": sorted(encoders) or None,  # names and versions
        "merges_sha256": tokeniser.merges_sha256 if encoders else None,
        "settings": settings,
    }
    if skipped:
        manifest["skipped"] = skipped
    files.write_json(directory / MANIFEST, manifest)


def forget_progress(directory: Path) -> None:
    """Remove the record of progress: the manifest is written, perhaps just before a kill."""
    with files.writing(directory):
        for path in (*directory.glob("*.bin.tmp"), directory / PROGRESS):
            path.unlink(missing_ok=True)
        files.sync(directory)


@dataclass(eq=False)
class OpenShard:
    """Writes one shard, which is at `path` once it is complete."""

    path: Path
    split: str
    tokens: int = 0

    def __post_init__(self):
        """Create the file, or continue after as many tokens as were recorded."""
        self.temporary = self.path.with_suffix(".bin.tmp")
        with files.writing(self.path):
            # Killed between the rename and the record of it. A shuffle leaves the temporary file.
            if self.path.exists() and not self.temporary.exists():
                self.path.replace(self.temporary)
            if not self.tokens:
                self.temporary.unlink(missing_ok=True)
            size = HEADER_BYTES + 2 * self.tokens
            found = self.temporary.stat().st_size if self.temporary.exists() else 0
            if self.tokens and found < size:
                raise UserError(
                    f"{self.temporary} was lost or cut since the interruption; "
                    f"delete {self.path.parent} and start again"
                )
            flags = os.O_RDWR | os.O_NOFOLLOW
            if not self.tokens:
                flags |= os.O_CREAT | os.O_EXCL
            # Unbuffered: a failed write must fail here, not in a later close.
            self.file = os.fdopen(os.open(self.temporary, flags, 0o666), "r+b", buffering=0)
            self.file.truncate(size)
            self.file.seek(size)

    def append(self, tokens: np.ndarray) -> None:
        with files.writing(self.path):
            written = memoryview(np.ascontiguousarray(tokens, dtype="<u2")).cast("B")
            files.write_all(self.file, written)
        self.tokens += len(tokens)

    def complete(self) -> Shard:
        """Give the shard its header and its final name."""
        with files.writing(self.path):
            self.file.seek(0)
            files.write_all(self.file, header_bytes(self.tokens))
            os.fsync(self.file.fileno())
            self.file.close()
            checksum = files.sha256_of(self.temporary)
            self.temporary.replace(self.path)
            files.sync(self.path.parent)
        return Shard(self.path.name, self.split, self.tokens, checksum)

    def shuffled(self, eot: int, seed: int) -> Shard:
        """Complete the shard with its documents in random order.

        The first and the last stay in place, as another shard may continue them. The temporary file
        stays, for a resumed preparation.
        """
        self.file.close()
        with files.reading(self.temporary):
            tokens = np.fromfile(self.temporary, "<u2", offset=HEADER_BYTES)
        parts = np.split(tokens, np.flatnonzero(tokens[1:] == eot) + 1)
        inner = np.random.default_rng(seed).permutation(range(1, len(parts) - 1))
        with files.whole_file(self.path) as file:
            file.write(header_bytes(self.tokens))
            for i in dict.fromkeys((0, *inner, len(parts) - 1)):
                file.write(parts[i])
        return Shard(self.path.name, self.split, self.tokens, files.sha256_of(self.path))


@dataclass(eq=False)
class ShardWriter:
    """Appends tokens to the shards of one folder; `save` and `resume` bracket an interruption."""

    directory: Path
    prefix: str
    tokeniser: Tokeniser
    settings: dict
    shard_tokens: int
    seed: int | None = None  # shuffles the documents of validation
    shards: list[Shard] = field(default_factory=list)
    growing: dict[str, OpenShard] = field(default_factory=dict)  # by split
    documents: int = 0
    encoders: set[str] = field(default_factory=set)  # may change with an interruption

    @property
    def totals(self) -> dict[str, int]:
        return tokens_by_split([*self.shards, *self.growing.values()])

    @property
    def total(self) -> int:
        return sum(self.totals.values())

    def _open(self, split: str, number: int) -> OpenShard:
        path = self.directory / f"{self.prefix}_{split}_{number:06d}.bin"
        self.growing[split] = OpenShard(path, split)
        return self.growing[split]

    def append(self, tokens: np.ndarray, split: str) -> None:
        """Add tokens to a split, in shards of `shard_tokens`."""
        self.documents += int(np.count_nonzero(tokens == self.tokeniser.eot))
        while len(tokens):
            # llm.c numbers validation and training together.
            number = len(self.shards) + len(self.growing)
            shard = self.growing.get(split) or self._open(split, number)
            part, tokens = np.split(tokens, [self.shard_tokens - shard.tokens])
            shard.append(part)
            if shard.tokens == self.shard_tokens:
                self._complete(split)

    def _complete(self, split: str) -> None:
        shard = self.growing.pop(split)
        shuffle = split == "val" and self.seed is not None
        done = shard.shuffled(self.tokeniser.eot, self.seed) if shuffle else shard.complete()
        self.shards.append(done)

    def save(self, source_state: object) -> None:
        """Record that everything up to `source_state` is written."""
        for shard in self.growing.values():
            with files.writing(shard.path):
                os.fsync(shard.file.fileno())
        growing = {k: [s.path.name, s.tokens] for k, s in self.growing.items() if s.tokens}
        record = {
            "settings": self.settings,
            "documents": self.documents,
            "growing": growing,
            "shards": [asdict(shard) for shard in self.shards],
            "encoders": sorted(self.encoders),
            "source_state": source_state,
        }
        files.write_json(self.directory / PROGRESS, record)

    def resume(self) -> object:
        """Continue from `progress.json` if there is one. Return the source's state there."""
        progress = read_progress(self.directory)
        if progress is None:
            with files.reading(self.directory):
                names = sorted(path.name for path in self.directory.iterdir())
            shards = [name for name in names if SHARD_NAME.fullmatch(name)]
            if shards:
                raise UserError(
                    f"{self.directory} already holds {shards[0]}; choose an empty --out"
                )
            self.save(None)  # before the first byte: shards without a record are never ours
            progress = read_progress(self.directory)
        self.shards = [Shard(**entry) for entry in progress["shards"]]
        self.documents = progress["documents"]
        self.encoders = set(progress["encoders"])
        for shard in self.shards:
            if not (self.directory / shard.name).exists():
                raise UserError(
                    f"{self.directory / shard.name} is gone since the interruption; "
                    f"delete {self.directory} and start again"
                )
        for split, (name, tokens) in progress["growing"].items():
            self.growing[split] = OpenShard(self.directory / name, split, tokens)
        if not self.totals["val"]:
            self._open("val", 0)  # shard 0 is validation, whichever split has tokens first
        self._remove_strays()
        return progress["source_state"]

    def _remove_strays(self) -> None:
        """Delete files begun after the last record: they are about to be written again."""
        keep = {shard.name for shard in self.shards}
        keep |= {shard.temporary.name for shard in self.growing.values()}
        with files.writing(self.directory):
            for path in self.directory.iterdir():
                match = STRAY.fullmatch(path.name)
                if match and match["prefix"] in (self.prefix, None) and path.name not in keep:
                    path.unlink()

    def finish(self, skipped: list[dict]) -> None:
        """Complete the set; its manifest lists the skipped files and lines."""
        for split in list(self.growing):
            self._complete(split)
        self.shards.sort(key=lambda shard: int(SHARD_NAME.fullmatch(shard.name)["index"]))
        write_manifest(
            self.directory,
            self.tokeniser,
            self.shards,
            self.documents,
            self.settings,
            self.encoders,
            skipped,
        )
        forget_progress(self.directory)

    def close(self) -> None:
        for shard in self.growing.values():
            shard.file.close()


def read_progress(directory: Path) -> dict | None:
    """Return the record of an unfinished preparation; None if there is none."""
    path = directory / PROGRESS
    with files.reading(path):
        if not path.exists():
            return None
    with files.json_record(path, f"; delete {directory} and start again") as record:
        for key in ("settings", "growing"):
            files.refuse_wrong_types(record, {key: dict})
        files.refuse_wrong_types(record, {"documents": int, "shards": list, "encoders": list})
        for entry in record["shards"]:
            Shard(**entry)  # TypeError for anything else
    return record


def refuse_other_settings(directory: Path, recorded: dict | None, settings: dict) -> None:
    """Refuse to continue a set, or to take it for complete, with other settings than it has."""
    if recorded in (None, settings):
        return
    changed = [key for key, new in settings.items() if recorded.get(key) != new]
    shown = [f"{k} {recorded.get(k)} then, {settings[k]} now" for k in changed if k != "source"]
    if "source" in changed:
        shown.append("source")
    raise UserError(
        f"{directory} was made with other settings ({', '.join(shown)}); "
        "use those, delete it, or choose another --out"
    )


def recorded_settings(directory: Path) -> dict | None:
    """Return the settings that the folder is prepared with; None if nothing is written."""
    if (directory / MANIFEST).exists():
        return read_manifest(directory).get("settings", {})
    progress = read_progress(directory)
    if progress is None or not (progress["shards"] or progress["growing"]):
        return None
    return progress["settings"]
