"""Where text comes from: the hub, parquet files, a user's own files, the standard library.

A source has a `prefix` for its shards' names, a `description` for the manifest, `pieces(state)`
that starts or continues at a state, `state()` after the last piece (plain JSON), and
`expected_tokens(written)` of the whole when so many are written, None if not known.
"""

import codecs
import gc
import glob
import gzip
import hashlib
import json
import os
import platform
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data.pipeline import CHUNK_CHARS, END_OF_VALIDATION, SAFE_CUT, Piece
from lssar.cache import ensure_hub_cache
from lssar.errors import UserError, did_you_mean
from support.files import digest, first_line, reading

# Samples with their size in GPT-2 tokens where known.
WEB, EDU = {"sample-10BT": 10_355_324_043}, {"sample-10BT": None, "sample-100BT": None}
HUB = {  # name: (repository, prefix of the shards, samples)
    "fineweb": ("HuggingFaceFW/fineweb", "fineweb", WEB),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "edu_fineweb", EDU),
}
BYTE_ORDER_MARK = "\ufeff"
CONVERT = "convert it first, for example with iconv"
TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")


class ParquetStream:
    """Rows of a `datasets` stream, exactly resumable, released when closed."""

    def __init__(self, path: str, field: str, **arguments):
        self._path, self._field, self._arguments = path, field, arguments
        self._dataset = None

    def pieces(self, state: dict | None) -> Iterator[Piece]:
        ensure_hub_cache()
        try:
            import datasets

            datasets.utils.logging.set_verbosity_error()
            options = {"streaming": True, "columns": [self._field], "batch_size": 1024}
            options |= self._arguments
            self._dataset = datasets.load_dataset(self._path, split="train", **options)
            if state is not None:
                self._dataset.load_state_dict(state)
            rows = iter(self._dataset)
            try:
                for row in rows:
                    if text := row[self._field]:
                        yield text, True
            finally:
                # A half-read parquet stream can crash the interpreter at exit.
                rows.close()
                del rows
                self._dataset = None
                gc.collect()
        except Exception as error:  # readers and network clients below share no base class
            what = f"{self._arguments.get('data_files') or self._path}: {first_line(error)}"
            again = "rerun the same command to continue, or pass local copies with --from-files"
            raise UserError(f"cannot read {what}; {again}") from None

    def state(self) -> dict:
        return self._dataset.state_dict()


class HubSource:
    """FineWeb or FineWeb-Edu, streamed from the hub."""

    def __init__(self, name: str, sample: str, revision: str):
        repository, self.prefix, samples = HUB[name]
        self._tokens = samples[sample]
        self.description = {"kind": name, "sample": sample, "revision": revision}
        self._stream = ParquetStream(repository, "text", name=sample, revision=revision)

    def pieces(self, state: dict | None) -> Iterator[Piece]:
        return self._stream.pieces(state and state["stream"])

    def state(self) -> dict:
        return {"stream": self._stream.state()}

    def expected_tokens(self, written: int) -> int | None:
        return self._tokens


class TextSource:
    """Local .txt, .jsonl and .parquet files, in the order of their names."""

    def __init__(self, files: list[Path], field: str, kind: dict, prefix: str = "text"):
        """`kind`: the description but for the files."""
        self.prefix, self._files, self._field = prefix, files, field
        self._sizes = [path.stat().st_size for path in files]
        self.total_bytes = sum(self._sizes)
        # A resumed preparation must find the same names and sizes.
        listing = [[path.name, size] for path, size in zip(files, self._sizes, strict=True)]
        found = {"files": len(files), "bytes": self.total_bytes, "listing": digest(listing)}
        self.description = kind | found
        for path in files:
            if path.suffix == ".parquet":
                check_parquet(path, field)
        self._index, self._at, self._parquet = 0, None, None

    def pieces(self, state: dict | None) -> Iterator[Piece]:
        first, at = (state["file"], state["at"]) if state else (0, None)
        for index, path in enumerate(self._files[first:], start=first):
            self._index, self._at = index, at if index == first else None
            with reading(path):
                yield from self._read(path)

    def _read(self, path: Path) -> Iterator[Piece]:
        if path.suffix == ".parquet":
            self._parquet = ParquetStream("parquet", self._field, data_files=[str(path)])
            yield from self._parquet.pieces(self._at)
            self._parquet = None
            return
        read = self._document if path.name.removesuffix(".gz").endswith(".txt") else self._lines
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                file.seek(self._at or 0)
                yield from read(path, file)
        except (EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged: {error}") from None

    def _document(self, path: Path, file: BinaryIO) -> Iterator[Piece]:
        """The whole file, in parts that fit in memory however long it is."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        self._at = self._at or 0
        block, held, starts = b"...", "", self._at == 0
        while block:
            block = file.read(CHUNK_CHARS)
            try:
                held += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = file.tell() - len(error.object) + error.start
                raise UserError(f"{path} is not UTF-8 (byte {place}); {CONVERT}") from None
            cut = SAFE_CUT.search(held, max(0, len(held) - 4096)) if block else None
            if cut or not block:
                end = cut.end() if cut else len(held)
                part, held = held[:end], held[end:]
                self._at += len(part.encode())
                if part := part.removeprefix(BYTE_ORDER_MARK if starts else ""):
                    yield part, starts
                    starts = False

    def _lines(self, path: Path, file: BinaryIO) -> Iterator[Piece]:
        for line in file:
            start, self._at = self._at or 0, file.tell()
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                raise UserError(f"{path} is not UTF-8 (line at byte {start}); {CONVERT}") from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line at byte {start}: not JSON ({error})") from None
            text = row.get(self._field, ...) if isinstance(row, dict) else ...
            if not isinstance(text, str | None):
                there = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                lacks = f"no text in {self._field!r} (there is: {there})"
                raise UserError(f"{path}, line at byte {start}: {lacks}; name it with --field")
            if text:
                yield text, True

    def state(self) -> dict:
        return {"file": self._index, "at": self._parquet.state() if self._parquet else self._at}

    def expected_tokens(self, written: int) -> int | None:
        within = self._at if isinstance(self._at, int) else 0
        done = sum(self._sizes[: self._index]) + min(within, self._sizes[self._index])
        return written * self.total_bytes // done if done else None


class NumberedSource:
    """Items 0 ... count - 1: `document(number)` is a text or END_OF_VALIDATION."""

    _next = 0

    def pieces(self, state: int | None) -> Iterator[Piece]:
        for number in range(state or 0, self.count):
            self._next = number + 1
            text = self.document(number)
            if text is END_OF_VALIDATION:
                yield END_OF_VALIDATION
            elif text:
                yield text, True

    def state(self) -> int:
        return self._next

    def expected_tokens(self, written: int) -> int:
        return written * self.count // self._next


class StdlibSource(NumberedSource):
    """The Python standard library's own sources, which differ from Python to Python.

    Files are ordered by a hash of their names and a tenth of them is validation, so both splits
    are a fair sample of the whole from their first bytes on.
    """

    prefix = "stdlib"

    def __init__(self):
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (path.relative_to(root) for path in root.rglob("*.py"))
        names = sorted((path.as_posix() for path in found if _wanted(path)), key=_name_hash)
        if not names:
            raise UserError(f"this Python has no library sources in {root}; use the text source")
        splits = {name: "val" if _name_hash(name) % 10 == 0 else "train" for name in names}
        names.sort(key=splits.get, reverse=True)  # validation first
        self._texts = {name: _python_source(root / name) for name in names}
        items = list(self._texts.values())
        items.insert(list(splits.values()).count("val"), END_OF_VALIDATION)
        self.count, self.document = len(items), items.__getitem__
        # Patch releases of Python differ in a few files: the hashes tell which.
        hashes = {n: hashlib.sha256(text.encode()).hexdigest() for n, text in self._texts.items()}
        files = {name: {"split": splits[name], "sha256": hashes[name]} for name in names}
        version = platform.python_version()
        self.description = {"kind": "stdlib", "python": version, "files": files}


def _wanted(path: Path) -> bool:
    """Neither tests, nor installed packages, nor what the build generated for this machine."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled"}
    return not skipped.intersection(path.parts) and not path.name.startswith("_sysconfigdata")


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _python_source(path: Path) -> str:
    with reading(path), tokenize.open(path) as file:
        return file.read()


def find_files(inputs: list[str], suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """Files, folders (searched) and glob patterns -> files, sorted within each input."""
    found = []
    for given in inputs:
        path = Path(given)
        with reading(path):
            if path.is_dir():
                inside = (Path(top) / name for top, _, names in os.walk(path) for name in names)
                matches = sorted(file for file in inside if file.name.endswith(suffixes))
            else:  # Path.glob refuses absolute patterns
                matches = [path] if path.exists() else sorted(map(Path, glob.glob(given)))  # noqa: PTH207
        if not matches:
            what = f"holds no {', '.join(suffixes)} files" if path.is_dir() else "does not exist"
            raise UserError(f"{given} {what}")
        for match in matches:
            if not match.name.endswith(suffixes):
                raise UserError(f"{match} is not one of {', '.join(suffixes)}")
            with reading(match), match.open("rb"):
                pass
        found += matches
    return list(dict.fromkeys(found))


def check_parquet(path: Path, field: str) -> None:
    """Refuse what is no parquet file or lacks the text column."""
    import pyarrow.parquet

    with reading(path):
        try:
            names = pyarrow.parquet.read_schema(path).names
        except ValueError as error:  # pyarrow's ArrowInvalid
            raise UserError(f"{path} is not a parquet file: {error}") from None
    if field not in names:
        raise UserError(f"{path} has no column {field!r}; {did_you_mean(field, names)}")
