"""Token shards in llm.c's version-1 format: reading, checking, and the manifest beside them.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, token count) followed
by the tokens as uint16. A set of shards is a folder of `PREFIX_val_000000.bin`,
`PREFIX_train_000001.bin`, ...; one that `prepare.py` wrote has a `manifest.json` too, a ready-made
one need not. Tokens are addressed by their offset in the whole split, so shard borders are
invisible to the reader.
"""

import functools
import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.tokeniser import TOKENISERS, Tokeniser
from lssar.errors import UserError
from support.files import digest, open_regular, read_text, reading, sha256_of, unseal

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the count is an int32
MANIFEST, PROGRESS = "manifest.json", "progress.json"
# No separators and no leading dot: a name from a manifest or a hub listing cannot leave its folder.
SHARD_NAME = re.compile(r"(?P<prefix>\w[\w.-]*)_(?P<split>train|val)_(?P<index>\d+)\.bin", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
# Checked in every shard at opening: enough to tell a wrong tokeniser, few enough for 10,000 files.
SAMPLE_TOKENS = 4096
# Each mapping holds a file descriptor, of which a process has perhaps 1,024.
OPEN_SHARDS = 128
# A model pads its vocabulary by less than this; more unused ids mean another tokeniser's set.
MAX_PADDING = 1024


@dataclass(frozen=True)
class Shard:
    """One shard of a set as its file name, header and (perhaps) manifest describe it."""

    name: str
    split: str
    tokens: int
    sha256: str | None = None


def header_bytes(tokens: int) -> bytes:
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def check_shard(path: Path, *, vocab_size: int | None = None) -> int:
    """Token count of the shard, after checking header, size and a sample of its tokens."""
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = np.frombuffer(file.read(HEADER_BYTES), dtype="<u1")
        sample = np.frombuffer(file.read(2 * SAMPLE_TOKENS), dtype="<u1")
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path} is truncated: {size} bytes, less than a shard's header")
    magic, version, tokens = (int(x) for x in header.view("<i4")[:3])
    if (magic, version) != (MAGIC, VERSION):
        raise UserError(
            f"{path} is not an llm.c version-1 GPT-2 shard (magic {magic}, version {version}; "
            f"expected {MAGIC}, {VERSION})"
        )
    if tokens < 0 or size != HEADER_BYTES + 2 * tokens:
        raise UserError(
            f"{path} is damaged: its header promises {tokens} tokens "
            f"({HEADER_BYTES + 2 * tokens} bytes) but it has {size} bytes; prepare or download it "
            "again"
        )
    check_ids(sample[: 2 * tokens].view("<u2"), vocab_size, path)
    return tokens


def check_ids(ids: np.ndarray, vocab_size: int | None, where: object) -> None:
    """Refuse ids the vocabulary does not have."""
    if vocab_size is not None and ids.size and int(ids.max()) >= vocab_size:
        raise UserError(
            f"{where} holds token {int(ids.max())}, outside the vocabulary of {vocab_size}; "
            "was it made with another tokeniser?"
        )


class TokenSet:
    """An opened, validated, memory-mapped set of shards of one split."""

    def __init__(
        self,
        directory: Path,
        shards: list[Shard],
        *,
        tokeniser: str | None = None,
        vocab_size: int | None = None,
    ):
        self.directory = directory
        self.shards = [shard for shard in shards if shard.tokens]
        self.tokeniser = tokeniser
        self.vocab_size = vocab_size
        self._ends = np.cumsum([shard.tokens for shard in self.shards], dtype=np.int64)
        self.total_tokens = int(self._ends[-1]) if self.shards else 0
        self.files = {shard.name: shard.sha256 for shard in self.shards}  # None: not recorded
        self._map = functools.lru_cache(maxsize=OPEN_SHARDS)(self._map_shard)

    def _map_shard(self, index: int) -> np.ndarray:
        shard = self.shards[index]
        path = self.directory / shard.name
        with reading(path):
            try:
                return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(shard.tokens,))
            except ValueError as error:  # the file shrank since it was checked
                raise UserError(f"{path} changed while in use: {error}") from None

    def slice(self, start: int, count: int) -> np.ndarray:
        """uint16 tokens [start, start + count) of the split; a view when one shard holds them."""
        if start < 0 or count < 0 or start + count > self.total_tokens:
            raise IndexError(
                f"tokens {start}..{start + count} of a split of {self.total_tokens} tokens"
            )
        parts = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while count:
            shard_start = int(self._ends[index]) - self.shards[index].tokens
            part = self._map(index)[start - shard_start : start - shard_start + count]
            parts.append(part)
            start, count, index = start + len(part), count - len(part), index + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def locate(self, offset: int) -> str:
        """`FILE, token N`, for messages about the token at `offset`."""
        index = int(np.searchsorted(self._ends, offset, side="right"))
        shard = self.shards[index]
        within = offset - int(self._ends[index]) + shard.tokens
        return f"{self.directory / shard.name}, token {within}"


def open_split(directory: str | Path, split: str, *, vocab_size: int | None = None) -> TokenSet:
    """Open the `train` or `val` shards of a folder, checking every header and size.

    `vocab_size` is the model's: tokens outside it are refused, and so is a set made with a
    tokeniser that cannot be the model's.
    """
    directory = Path(directory)
    shards, manifest = list_shards(directory)
    data_vocab = manifest["vocab_size"] if manifest else None
    tokeniser = manifest["tokeniser"] if manifest else None
    if None not in (vocab_size, data_vocab) and not 0 <= vocab_size - data_vocab < MAX_PADDING:
        raise UserError(
            f"{directory} was tokenised with {tokeniser!r} ({data_vocab} ids) but the model has a "
            f"vocabulary of {vocab_size}; prepare it with the model's tokeniser"
        )
    chosen = [shard for shard in shards if shard.split == split]
    if not chosen:
        raise UserError(f"{directory} has no {split} shards (*_{split}_000000.bin)")
    limit = vocab_size if vocab_size is not None else data_vocab
    checked = []
    for shard in chosen:
        tokens = check_shard(directory / shard.name, vocab_size=limit)
        if manifest and tokens != shard.tokens:
            raise UserError(
                f"{directory / shard.name} has {tokens} tokens, {MANIFEST} says {shard.tokens}"
            )
        checked.append(Shard(shard.name, split, tokens, shard.sha256))
    return TokenSet(directory, checked, tokeniser=tokeniser, vocab_size=limit)


def list_shards(directory: Path) -> tuple[list[Shard], dict | None]:
    """Every shard of the folder in order, by its manifest when there is one, else by the names."""
    with reading(directory):
        names = {entry.name for entry in os.scandir(directory)}
    if PROGRESS in names:
        raise UserError(
            f"{directory} is unfinished ({PROGRESS}); run the command that prepares it again, it "
            "continues where it stopped"
        )
    found = sorted((m for m in map(SHARD_NAME.fullmatch, names) if m), key=_shard_order)
    if MANIFEST in names:
        manifest = read_manifest(directory)
        shards = [Shard(**entry) for entry in manifest["shards"]]
        _refuse_difference(directory, {s.name for s in shards}, {m.string for m in found})
        return shards, manifest
    if not found:
        raise UserError(
            f"{directory} has no token shards; make some with: python data/prepare.py --help"
        )
    _refuse_gaps(directory, found)
    return [Shard(m.string, m["split"], -1) for m in found], None


def _shard_order(match: re.Match) -> tuple[str, int]:
    return match["prefix"], int(match["index"])


def _refuse_difference(directory: Path, listed: set[str], present: set[str]) -> None:
    if missing := sorted(listed - present):
        raise UserError(f"{directory / missing[0]} is missing, though {MANIFEST} lists it")
    if extra := sorted(present - listed):
        raise UserError(f"{directory / extra[0]} is not in {MANIFEST}; move it elsewhere")


def _refuse_gaps(directory: Path, found: list[re.Match]) -> None:
    """Without a manifest the numbers in the names are all there is to notice a lost shard by."""
    first, last = found[0], found[-1]
    if first["prefix"] != last["prefix"]:
        raise UserError(
            f"{directory} mixes shards of two sets, {first.string} and {last.string}; give each "
            "its own folder"
        )
    for before, after in itertools.pairwise(found):
        if int(after["index"]) == int(before["index"]):
            raise UserError(
                f"{directory} has two shards of one number: {before.string}, {after.string}"
            )
        if int(after["index"]) != int(before["index"]) + 1:
            raise UserError(
                f"{directory} lacks the shards between {before.string} and {after.string}"
            )


def read_manifest(directory: Path) -> dict:
    """The folder's manifest, with everything the code relies on checked."""
    path = directory / MANIFEST
    with reading(path):
        text = read_text(path, errors="replace")
    try:
        manifest = unseal(json.loads(text))
        shards = [Shard(**entry) for entry in manifest["shards"]]
        for shard in shards:
            match = SHARD_NAME.fullmatch(shard.name)
            if not match or match["split"] != shard.split:
                raise ValueError(f"shard name {shard.name!r}")
            if type(shard.tokens) is not int or not 0 <= shard.tokens <= MAX_SHARD_TOKENS:
                raise ValueError(f"token count {shard.tokens!r}")
            if not SHA256.fullmatch(shard.sha256):
                raise ValueError(f"sha256 {shard.sha256!r}")
        if len({shard.name for shard in shards}) != len(shards):
            raise ValueError("a shard listed twice")
        tokeniser = TOKENISERS[manifest["tokeniser"]]
        if (manifest["vocab_size"], manifest["eot"]) != (tokeniser.vocab_size, tokeniser.eot):
            raise ValueError(f"vocabulary {manifest['vocab_size']!r}")
        if type(manifest["documents"]) is not int:
            raise ValueError(f"documents {manifest['documents']!r}")
        if not isinstance(_source(manifest), dict):
            raise ValueError(f"source {_source(manifest)!r}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    return manifest


def _source(manifest: dict) -> dict:
    return manifest.get("settings", {}).get("source", {})


def describe_set(directory: str | Path) -> dict:
    """For a file of results: where the set is, which one, and what it was made from.

    `tokens_sha256` is the same for the same shards, whatever else their manifest records.
    """
    path = Path(directory) / MANIFEST
    known = {"manifest_sha256": None, "tokens_sha256": None, "source": None}
    if path.exists():
        manifest = read_manifest(path.parent)
        shards = [shard["sha256"] for shard in manifest["shards"]]
        known = {
            "manifest_sha256": sha256_of(path),
            "tokens_sha256": digest(shards),
            "source": source_note(manifest),
        }
    return {"data": str(directory), **known}


def source_note(manifest: dict) -> str | None:
    """`Python 3.11.7 standard library`, or the name, sample and revision of what is on a hub."""
    source = _source(manifest)
    if source.get("kind") == "stdlib":
        return f"Python {source.get('python')} standard library"
    named = [
        str(source[key]) for key in ("kind", "sample", "repository", "revision") if key in source
    ]
    return ", ".join(named) or None


def verify(directory: str | Path) -> dict[str, int]:
    """Re-read every byte of a set: sizes, sha256, ids and document count. Tokens per split."""
    directory = Path(directory)
    shards, manifest = list_shards(directory)
    kind = TOKENISERS[manifest["tokeniser"] if manifest else "gpt2"]
    totals, documents = {"val": 0, "train": 0}, 0
    for shard in shards:
        path = directory / shard.name
        tokens = check_shard(path, vocab_size=kind.vocab_size)
        if manifest and tokens != shard.tokens:
            raise UserError(f"{path} has {tokens} tokens, {MANIFEST} says {shard.tokens}")
        if shard.sha256 and sha256_of(path) != shard.sha256:
            raise UserError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")
        documents += count_documents(directory, Shard(shard.name, shard.split, tokens), kind)
        totals[shard.split] += tokens
    if manifest and documents != manifest["documents"]:
        raise UserError(
            f"{directory} holds {documents} documents, {MANIFEST} says {manifest['documents']}"
        )
    return totals


def count_documents(directory: Path, shard: Shard, kind: type[Tokeniser]) -> int:
    """EOTs in the shard, after checking that every id is in the vocabulary."""
    tokens, documents = TokenSet(directory, [shard]), 0
    for start in range(0, shard.tokens, 2**22):
        ids = tokens.slice(start, min(2**22, shard.tokens - start))
        check_ids(ids, kind.vocab_size, directory / shard.name)
        documents += int(np.count_nonzero(ids == kind.eot))
    return documents
