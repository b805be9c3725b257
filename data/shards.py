"""Reads and checks token shards in llm.c's version-1 format, and the manifest beside them.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, token count) and the
tokens as uint16. A set is a folder of `PREFIX_val_000000.bin`, `PREFIX_train_000001.bin`, ..., with
a `manifest.json` if `prepare.py` wrote it. Tokens are addressed by their offset in the whole split.
"""

import functools
import itertools
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.checked import refuse_changed
from data.tokeniser import TOKENISERS, Tokeniser
from lssar.errors import UserError
from support.files import digest, json_record, open_regular, reading, sha256_of

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
# No separators and no leading dot: a name from a manifest or a hub listing cannot leave its folder.
SHARD_NAME = re.compile(r"(?P<prefix>\w[\w.-]*)_(?P<split>train|val)_(?P<index>\d+)\.bin", re.ASCII)
SAMPLE_TOKENS = 4096  # checked when a shard is opened: fast enough for 10,000 files
OPEN_SHARDS = 128  # each holds a file descriptor, of which a process has perhaps 1,024
PREPARE = "python data/prepare.py --help"
MAX_PADDING = 1024  # a model's vocabulary with more unused ids is of another tokeniser


@dataclass(frozen=True)
class Shard:
    name: str
    split: str
    tokens: int  # -1: not recorded
    sha256: str | None = None


def header_bytes(tokens: int) -> bytes:
    return struct.pack("<3i", MAGIC, VERSION, tokens).ljust(HEADER_BYTES, b"\0")


def check_shard(path: Path, *, vocab_size: int | None = None) -> int:
    """Check header, size and a sample of the tokens; return the shard's token count."""
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER_BYTES)
        sample = file.read(2 * SAMPLE_TOKENS)
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path} is truncated: {size} bytes, less than a shard's header")
    magic, version, tokens = struct.unpack_from("<3i", header)
    if (magic, version) != (MAGIC, VERSION):
        raise UserError(
            f"{path} is not an llm.c version-1 GPT-2 shard "
            f"(magic {magic}, version {version}; expected {MAGIC}, {VERSION})"
        )
    expected = HEADER_BYTES + 2 * tokens
    if tokens < 0 or size != expected:
        raise UserError(
            f"{path} is damaged: its header promises {tokens} tokens ({expected} bytes) "
            f"but it has {size} bytes; prepare or download it again"
        )
    check_ids(np.frombuffer(sample[: 2 * tokens], "<u2"), vocab_size, path)
    return tokens


def check_ids(ids: np.ndarray, vocab_size: int | None, where: object) -> None:
    """Refuse ids that are not in the vocabulary."""
    largest = int(ids.max(initial=0))
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            f"{where} holds token {largest}, outside the vocabulary of {vocab_size}; "
            "was it made with another tokeniser?"
        )


@dataclass(eq=False)
class TokenSet:
    """Holds the memory-mapped shards of one split."""

    directory: Path
    shards: list[Shard]
    tokeniser: str | None = None
    vocab_size: int | None = None

    def __post_init__(self):
        self.shards = [shard for shard in self.shards if shard.tokens]
        self.files = {shard.name: shard.sha256 for shard in self.shards}  # None: not recorded
        ends = itertools.accumulate((shard.tokens for shard in self.shards), initial=0)
        self._borders = np.fromiter(ends, dtype=np.int64)
        self.total_tokens = int(self._borders[-1])
        self._map = functools.lru_cache(maxsize=OPEN_SHARDS)(self._map_shard)

    def _map_shard(self, index: int) -> np.ndarray:
        shard = self.shards[index]
        path = self.directory / shard.name
        with reading(path):
            try:
                return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(shard.tokens,))
            except ValueError as error:  # the file shrank since it was checked
                raise UserError(f"{path} changed while in use: {error}") from None

    def _find(self, offset: int) -> tuple[int, int]:
        """Return the shard that holds the token at `offset`, and the token's place in it."""
        index = int(np.searchsorted(self._borders, offset, side="right")) - 1
        return index, offset - int(self._borders[index])

    def slice(self, start: int, count: int) -> np.ndarray:
        """Return uint16 tokens [start, start + count) of the split; a view if possible."""
        if start < 0 or count < 0 or start + count > self.total_tokens:
            raise IndexError(f"tokens {start}..{start + count} of {self.total_tokens}")
        parts = []
        index, first = self._find(start)
        while count:
            part = self._map(index)[first : first + count]
            parts.append(part)
            count -= len(part)
            index += 1
            first = 0
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    def documents(self) -> np.ndarray:
        """Return where each document begins, with its end-of-text token, and the split's end."""
        eot = TOKENISERS[self.tokeniser].eot if self.tokeniser else self.vocab_size - 1
        places = [np.array([0, self.total_tokens])]  # a split may begin within a document
        for start in range(0, self.total_tokens, 2**22):
            ids = self.slice(start, min(2**22, self.total_tokens - start))
            places.append(start + np.flatnonzero(ids == eot))
        return np.unique(np.concatenate(places))

    def fill(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        """Copy into each row the tokens from its offset on; refuse those outside the vocabulary."""
        for row, offset in zip(rows, offsets, strict=True):
            row[:] = self.slice(int(offset), row.size).reshape(row.shape)
        if self.vocab_size is not None and rows.max(initial=0) >= self.vocab_size:
            number, place = divmod(int(rows.argmax()), rows[0].size)
            index, place = self._find(int(offsets[number]) + place)
            where = f"{self.directory / self.shards[index].name}, token {place}"
            check_ids(rows, self.vocab_size, where)


def open_split(
    directory: str | Path, split: str, *, vocab_size: int | None = None, command: str = PREPARE
) -> TokenSet:
    """Open the `train` or `val` shards of a folder for a model with this vocabulary.

    Their headers are checked, and their contents where a manifest has checksums.
    """
    directory = Path(directory)
    if not directory.exists():
        raise UserError(f"{directory} does not exist; make it with: {command}")
    shards, manifest = list_shards(directory, command)
    tokeniser = None
    limit = vocab_size
    if manifest:
        tokeniser = manifest["tokeniser"]
        ids = manifest["vocab_size"]
        if limit is None:
            limit = ids
        if not _is_vocabulary_of(limit, ids):
            fits = [n for n, k in TOKENISERS.items() if _is_vocabulary_of(limit, k.vocab_size)]
            other = f"prepare the text with --tokeniser {fits[0]}" if fits else "choose other data"
            raise UserError(
                f"{directory} was tokenised with {tokeniser!r} ({ids} ids) but the model has a "
                f"vocabulary of {vocab_size}; train the model with --model.tokeniser={tokeniser}, "
                f"or {other}"
            )
    chosen = [_checked(directory, shard, limit) for shard in shards if shard.split == split]
    if not chosen:
        raise UserError(f"{directory} has no {split} shards (*_{split}_000000.bin)")
    if manifest:
        refuse_changed(directory, {shard.name: shard.sha256 for shard in chosen}, MANIFEST)
    return TokenSet(directory, chosen, tokeniser=tokeniser, vocab_size=limit)


def _is_vocabulary_of(rows: int, ids: int) -> bool:
    """Tell whether a model with so many rows is for a tokeniser with so many ids."""
    return 0 <= rows - ids < MAX_PADDING


def _checked(directory: Path, shard: Shard, vocab_size: int | None) -> Shard:
    """Return the shard with the token count of its header, which must be the manifest's."""
    path = directory / shard.name
    tokens = check_shard(path, vocab_size=vocab_size)
    if shard.tokens not in (-1, tokens):
        raise UserError(f"{path} has {tokens} tokens, {MANIFEST} says {shard.tokens}")
    return replace(shard, tokens=tokens)


def list_shards(directory: Path, command: str = PREPARE) -> tuple[list[Shard], dict | None]:
    """Return the folder's shards in order, by its manifest if there is one, else by the names."""
    with reading(directory):
        names = {entry.name for entry in os.scandir(directory)}
    if PROGRESS in names:
        raise UserError(
            f"{directory} is unfinished ({PROGRESS}); "
            f"rerun the command that makes it (perhaps {command})"
        )
    matches = filter(None, map(SHARD_NAME.fullmatch, names))
    found = sorted(matches, key=lambda match: (match["prefix"], int(match["index"])))
    if MANIFEST in names:
        manifest = read_manifest(directory)
        shards = [Shard(**entry) for entry in manifest["shards"]]
        listed = {shard.name for shard in shards}
        present = {match.string for match in found}
        missing = sorted(listed - present)
        if missing:
            raise UserError(f"{directory / missing[0]} is missing, though {MANIFEST} lists it")
        extra = sorted(present - listed)
        if extra:
            raise UserError(f"{directory / extra[0]} is not in {MANIFEST}; move it elsewhere")
        return shards, manifest
    if not found:
        raise UserError(f"{directory} has no token shards; make some with: {command}")
    # Without a manifest, only the numbers in the names can show that a shard is missing.
    first, last = found[0], found[-1]
    if first["prefix"] != last["prefix"]:
        raise UserError(
            f"{directory} mixes shards of two sets, {first.string} and {last.string}; separate them"
        )
    for before, after in itertools.pairwise(found):
        step = int(after["index"]) - int(before["index"])
        if step == 0:
            raise UserError(
                f"{directory} has two shards of one number: {before.string} and {after.string}"
            )
        if step > 1:
            raise UserError(
                f"{directory} lacks the shards between {before.string} and {after.string}"
            )
    return [Shard(match.string, match["split"], -1) for match in found], None


def _require(sound: bool, what: str) -> None:
    """Raise ValueError(what) unless it is sound."""
    if not sound:
        raise ValueError(what)


def read_manifest(directory: Path) -> dict:
    """Read the folder's manifest and check everything the code relies on."""
    with json_record(directory / MANIFEST) as manifest:
        shards = [Shard(**entry) for entry in manifest["shards"]]
        for shard in shards:
            match = SHARD_NAME.fullmatch(shard.name)
            count = shard.tokens
            _require(match and match["split"] == shard.split, f"shard name {shard.name!r}")
            _require(type(count) is int and 0 <= count <= MAX_SHARD_TOKENS, f"{count!r} tokens")
            _require(re.fullmatch("[0-9a-f]{64}", shard.sha256), f"sha256 {shard.sha256!r}")
        _require(len({shard.name for shard in shards}) == len(shards), "a shard listed twice")
        kind = TOKENISERS[manifest["tokeniser"]]
        _require(manifest["vocab_size"] == kind.vocab_size, f"vocab {manifest['vocab_size']!r}")
        _require(manifest["eot"] == kind.eot, f"eot {manifest['eot']!r}")
        _require(type(manifest["documents"]) is int, f"documents {manifest['documents']!r}")
        source = manifest.get("settings", {}).get("source", {})
        _require(isinstance(source, dict), f"source {source!r}")
    return manifest


def describe_set(directory: str | Path) -> dict:
    """Describe the set for a file of results: its folder, checksums and source."""
    path = Path(directory) / MANIFEST
    about = {"data": str(directory), "manifest_sha256": None, "tokens_sha256": None, "source": None}
    if path.exists():
        manifest = read_manifest(path.parent)
        about["manifest_sha256"] = sha256_of(path)
        # The same for the same shards, whatever else their manifest records.
        about["tokens_sha256"] = digest([shard["sha256"] for shard in manifest["shards"]])
        source = manifest.get("settings", {}).get("source", {})
        named = (source[k] for k in ("kind", "sample", "repository", "revision") if k in source)
        about["source"] = ", ".join(map(str, named)) or None
        if source.get("kind") in ("stdlib", "sources"):
            about["source"] = f"Python {source.get('python')} standard library"
        if source.get("kind") == "sources":
            about["source"] += f" and torch {source.get('torch')}"
    return about


def verify(directory: str | Path) -> dict[str, int]:
    """Re-read every byte of a set: sizes, sha256, ids, document count; return tokens by split."""
    directory = Path(directory)
    shards, manifest = list_shards(directory)
    kind = TOKENISERS[manifest["tokeniser"] if manifest else "gpt2"]
    documents = 0
    checked = []
    for listed in shards:
        shard = _checked(directory, listed, kind.vocab_size)
        path = directory / listed.name
        if shard.sha256 and sha256_of(path) != shard.sha256:
            raise UserError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")
        documents += count_documents(directory, shard, kind)
        checked.append(shard)
    recorded = manifest["documents"] if manifest else documents
    if documents != recorded:
        raise UserError(f"{directory} holds {documents} documents, {MANIFEST} says {recorded}")
    return tokens_by_split(checked)


def tokens_by_split(shards: list[Shard]) -> dict[str, int]:
    """Sum the tokens of the shards of each split."""
    return {split: sum(s.tokens for s in shards if s.split == split) for split in ("train", "val")}


def count_documents(directory: Path, shard: Shard, kind: type[Tokeniser]) -> int:
    """Count the EOTs in the shard; refuse an id that is not in the vocabulary."""
    tokens = TokenSet(directory, [shard]).slice(0, shard.tokens)
    check_ids(tokens, kind.vocab_size, directory / shard.name)
    # A comparison makes an array of its size.
    blocks = np.array_split(tokens, 1 + len(tokens) // 2**22)
    return sum(int(np.count_nonzero(block == kind.eot)) for block in blocks)
