"""Where text comes from: the hub, parquet files, a user's own files, the standard library.

A source has a `prefix` for its shards' names, a `description` for the manifest, `pieces(state)`
that starts or continues at a state and yields lists of pieces, `state()` after the last list (plain
JSON), and `expected_tokens(written)` of the whole when so many are written, None if not known.
"""

import codecs
import contextlib
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from data.pipeline import CHUNK_CHARS, SAFE_CUT, Piece, cut_safely
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
LONGEST_SOLID = 16 * CHUNK_CHARS  # bytes without blanks; beyond it a word is cut in two
LONGEST_LINE = 2**28  # bytes
TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")


class ParquetStream:
    """Rows of a `datasets` stream, exactly resumable, released when closed."""

    def __init__(self, path: str, field: str, **arguments):
        self._path, self._field, self._arguments = path, field, arguments

    def texts(self, state: dict | None) -> Iterator[tuple[str, bool]]:
        ensure_hub_cache()
        try:
            import datasets

            datasets.utils.logging.set_verbosity_error()
            options = self._arguments | {"columns": [self._field], "batch_size": 1024}
            options |= {"split": "train", "streaming": True}
            self._dataset = datasets.load_dataset(self._path, **options)
            if state is not None:
                self._dataset.load_state_dict(state)
            with contextlib.closing(iter(self._dataset)) as rows:
                for row in rows:
                    text = row[self._field]
                    if not isinstance(text, str | None):
                        raise Unusable(f"has no text in {self._field!r} but {text!r:.40}")
                    if text:
                        yield text, True
        except Unusable:
            raise
        except Exception as error:  # readers and network clients below share no base class
            what = f"{self._arguments.get('data_files') or self._path}: {first_line(error)}"
            again = "rerun the same command to continue, or pass local copies with --from-files"
            raise UserError(f"cannot read {what}; {again}") from None
        finally:
            self._dataset = rows = None
            gc.collect()  # a half-read parquet stream can crash the interpreter at exit

    def state(self) -> dict:
        return self._dataset.state_dict()


class HubSource(ParquetStream):
    """FineWeb or FineWeb-Edu, streamed from the hub."""

    def __init__(self, name: str, sample: str, revision: str):
        repository, self.prefix, samples = HUB[name]
        super().__init__(repository, "text", name=sample, revision=revision)
        self._tokens = samples[sample]
        self.description = {"kind": name, "sample": sample, "revision": revision}

    def pieces(self, state: dict | None) -> Iterator[list[Piece]]:
        return ([Piece(text)] for text, _ in self.texts(state))

    def expected_tokens(self, written: int) -> int | None:
        return self._tokens


@dataclass(frozen=True)
class Sample:
    """Validation from all over a text: of every `one_in` documents one, drawn by the seed.

    A document of more than `longest` characters is cut, and its parts are drawn like documents.
    """

    one_in: int
    longest: int
    seed: int = 0

    def holds(self, number: int) -> bool:
        group, place = divmod(number, self.one_in)
        return _name_hash(f"{self.seed} {group}") % self.one_in == place

    def pieces(self, text: str, starts: bool, number: int) -> list[Piece]:
        """The parts of a text, which are documents `number`, `number + 1`, ... of the sample."""
        found, before, most = [], self.holds(number - 1), max(4 * self.longest, 4096)
        for part in cut_safely(text, limit=self.longest):
            for at in range(0, len(part), most):  # twice only where there are no blanks to cut at
                validation = self.holds(number + len(found))
                # Text that does not continue what its split has last is a document of its own.
                begins = validation != before or at > 0 or (starts and not found)
                found.append(Piece(part[at : at + most], begins, validation))
                before = validation
        return found


class Unusable(UserError):
    """What is wrong with a file, or with a line of it."""


class TextSource:
    """Local .txt, .jsonl and .parquet files, in the order of their names."""

    def __init__(self, files, field, kind: dict, prefix="text", *, sample=None, skip_bad=False):
        """`kind`: the description but for the files. No `sample`: no piece is validation."""
        self.prefix, self.files, self._field = prefix, files, field
        self._sample, self._skip_bad = sample, skip_bad
        self._sizes = [path.stat().st_size for path in files]
        # A resumed preparation must find the same names and sizes.
        listing = [[path.name, size] for path, size in zip(files, self._sizes, strict=True)]
        found = {"files": len(files), "bytes": sum(self._sizes), "listing": digest(listing)}
        self.description = kind | found
        if sample:
            self.seed = sample.seed
            self.description |= {"validation": asdict(sample), "skip_bad": skip_bad}
        self.skipped = {}  # by the file's index: [lines (0: all of it), what is wrong]
        for self._index, path in enumerate(files):
            if path.suffix == ".parquet" and not skip_bad:
                with self._usable():
                    check_parquet(path, field)
        # Where in the files we are: bytes, or a stream that knows.
        self._index, self._at, self._drawn = 0, None, 0

    def pieces(self, state: dict | None) -> Iterator[list[Piece]]:
        if state:
            self._index, self._at, self._drawn = state["file"], state["at"], state["drawn"]
            self.skipped.update(state["skipped"])
        while self._index < len(self.files):
            path = self.files[self._index]
            with reading(path), self._usable():
                if self._skip_bad and self._at is None:
                    self._read_through(path)
                for text, starts in self._read(path):
                    pieces = [Piece(text, starts)]
                    if self._sample:
                        pieces = self._sample.pieces(text, starts, self._drawn)
                    self._drawn += len(pieces)
                    yield pieces
            self._index, self._at = self._index + 1, None

    @contextlib.contextmanager
    def _usable(self, line: str = "") -> Iterator[None]:
        """With --skip-bad, leave out what cannot be used in this block; else refuse it."""
        try:
            yield
        except Unusable as problem:
            if not self._skip_bad:
                remedy = "; or leave such files and lines out with --skip-bad"
                where = f"{self.files[self._index]}{f', line {line}:' if line else ''}"
                raise UserError(f"{where} {problem}{remedy if self._sample else ''}") from None
            what = f"{line}: {problem}" if line else str(problem)
            lines, first = self.skipped.get(str(self._index), (0, what))
            self.skipped[str(self._index)] = [lines + bool(line), first]

    def _read_through(self, path: Path) -> None:
        """Find out, before anything of it is used, that a file is whole and all of it is text."""
        if path.suffix == ".parquet":
            check_parquet(path, self._field)
        elif path.suffix != ".jsonl":
            with opened(path) as file:
                blocks = iter(partial(file.read, CHUNK_CHARS), b"")
                for _ in self._document(file) if is_document(path) else blocks:
                    pass
            self._at = None

    def _read(self, path: Path) -> Iterator[tuple[str, bool]]:
        """(text, whether it starts a document) from the current position on."""
        at = self._at
        if path.suffix == ".parquet":
            self._at = ParquetStream("parquet", self._field, data_files=[str(path)])
            yield from self._at.texts(at)
        else:
            with opened(path) as file:
                file.seek(at or 0)
                yield from self._document(file) if is_document(path) else self._lines(file)

    def _document(self, file: BinaryIO) -> Iterator[tuple[str, bool]]:
        """The whole file, in parts that fit in memory and depend on nothing but where they are."""
        self._at, held, block, starts = self._at or 0, b"", b"...", not self._at
        while block:
            block = file.read(CHUNK_CHARS - len(held) % CHUNK_CHARS)
            held += block
            try:
                text, _ = codecs.utf_8_decode(held, "strict", not block)
            except UnicodeDecodeError as error:
                where = f"byte {self._at + error.start}"
                raise Unusable(f"is not UTF-8 ({where}); {CONVERT}") from None
            cut = SAFE_CUT.search(text, max(0, len(text) - 4096)) if block else None
            if cut or not block or len(held) >= LONGEST_SOLID:
                part = text[: cut.end()] if cut else text
                size = len(part.encode())
                held, self._at = held[size:], self._at + size
                if part := part.removeprefix(BYTE_ORDER_MARK if starts else ""):
                    yield part, starts
                    starts = False

    def _lines(self, file: BinaryIO) -> Iterator[tuple[str, bool]]:
        while rest := (line := file.readline(LONGEST_LINE)):
            while len(rest) == LONGEST_LINE and rest[-1:] != b"\n":  # read on to the line's end
                rest = file.readline(LONGEST_LINE)
            start, self._at, text = self._at or 0, file.tell(), None
            with self._usable(f"at byte {start}"):
                text = None if line.isspace() else self._text_of(line)
            if text:
                yield text, True

    def _text_of(self, line: bytes) -> str | None:
        if len(line) == LONGEST_LINE:
            raise Unusable(f"is longer than {LONGEST_LINE:,} bytes")
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            raise Unusable(f"not UTF-8; {CONVERT}") from None
        except (ValueError, RecursionError) as error:
            raise Unusable(f"not JSON ({error})") from None
        text = row.get(self._field, ...) if isinstance(row, dict) else ...
        if not isinstance(text, str | None):
            there = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
            lacks = f"no text in {self._field!r} (there is: {there})"
            raise Unusable(f"{lacks}; name it with --field")
        return text

    def state(self) -> dict:
        at = self._at.state() if isinstance(self._at, ParquetStream) else self._at
        skipped = dict(self.skipped)
        return {"file": self._index, "drawn": self._drawn, "skipped": skipped, "at": at}

    def expected_tokens(self, written: int) -> int | None:
        done, sizes = sum(self._sizes[: self._index]), self._sizes[self._index :]
        done += min(self._at, sizes[0]) if isinstance(self._at, int) else 0
        return written * sum(self._sizes) // done if done else None


def is_document(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".txt")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unusable(f"is damaged: {error}") from None


class NumberedSource:
    """`document(number)`: first those of validation, none at the border, then training's."""

    SEED = 2**31  # of made texts: not one that an evaluation would take

    def __init__(self, description: dict, documents: int, validation: int):
        self.prefix, self.description = description["kind"], description
        self.count, self.border, self._next = documents + 1, validation, 0

    def pieces(self, state: list | None) -> Iterator[list[Piece]]:
        for number in range(state[0] if state else 0, self.count):
            self._next = number + 1
            if number != self.border and (text := self.document(number)):
                yield [Piece(text, validation=number < self.border)]

    def state(self) -> list:
        return [self._next]

    def expected_tokens(self, written: int) -> int:
        return written * self.count // self._next


class StdlibSource(NumberedSource):
    """The Python standard library's own sources, which differ from Python to Python.

    Files are ordered by a hash of their names and a tenth of them is validation, so both splits
    are a fair sample of the whole from their first bytes on.
    """

    def __init__(self):
        root = Path(sysconfig.get_paths()["stdlib"])
        found = (path.relative_to(root) for path in root.rglob("*.py"))
        names = sorted((path.as_posix() for path in found if _wanted(path)), key=_name_hash)
        if not names:
            raise UserError(f"this Python has no library sources in {root}; use the text source")
        splits = {name: "val" if _name_hash(name) % 10 == 0 else "train" for name in names}
        names.sort(key=splits.get, reverse=True)  # validation first
        self.texts = {name: _python_source(root / name) for name in names}
        # Patch releases of Python differ in a few files: the hashes tell which.
        hashes = {n: hashlib.sha256(text.encode()).hexdigest() for n, text in self.texts.items()}
        files = {name: {"split": splits[name], "sha256": hashes[name]} for name in names}
        validation, version = list(splits.values()).count("val"), platform.python_version()
        about = {"kind": "stdlib", "python": version, "files": files}
        super().__init__(about, len(names), validation)
        names.insert(validation, "")  # the border
        self.document = lambda number: self.texts[names[number]]


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
            raise Unusable(f"is not a parquet file: {error}") from None
    if field not in names:
        raise Unusable(f"has no column {field!r}; {did_you_mean(field, names)}")
