"""Reads a user's own files: finds those that are text, and draws the validation documents.

`.parquet` files have a row per document, `.jsonl` files a line. Any other UTF-8 file is one
document. Each of them but parquet may be compressed (`.gz`).
"""

import codecs
import contextlib
import glob
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from data.pipeline import CHUNK_CHARS, SAFE_CUT, Piece, cut_safely
from data.sources import ParquetStream, Unusable, name_hash
from lssar.errors import UserError, did_you_mean
from support.files import digest, open_regular, reading

BYTE_ORDER_MARK = "\ufeff"
CONVERT = "convert it first, for example with iconv"
CUT_CHARS = 4096  # a long file is cut at the first blank of this many characters before a limit
LONGEST_SOLID = 16 * CHUNK_CHARS  # bytes without blanks; beyond it a word is cut in two
LONGEST_LINE = 2**28  # bytes
# Files with these names are meant as text: what is wrong with them is an error, not left out.
TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, decompressed."""
    try:
        with open_regular(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as decompressed:
                    yield decompressed
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unusable(f"is damaged: {error}") from None


def find_text(inputs: list[str]) -> tuple[list[Path], dict[Path, str]]:
    """Return the text files among files, folders and patterns, and why others were left out.

    Of a folder or a pattern, what is not text is left out; a file that was named must be text.
    """
    found = []
    left_out = {}
    for given in inputs:
        named = Path(given).exists() and not Path(given).is_dir()
        usable = []
        for path in _expand(given, left_out):
            problem = _problem(path)
            if problem is None:
                usable.append(path)
            elif named:
                raise UserError(f"{path} {problem}; give text, JSON lines or parquet")
            else:
                left_out[path] = problem
        if not usable:
            raise UserError(f"{given} holds no text files")
        found += usable
    return list(dict.fromkeys(found)), left_out


def find_parquet(inputs: list[str]) -> list[Path]:
    """Return the parquet files among files, folders and patterns."""
    found = []
    for given in inputs:
        paths = _expand(given, {})
        if Path(given).is_dir():
            paths = [path for path in paths if is_parquet(path)]
        if not paths:
            raise UserError(f"{given} holds no .parquet files")
        for path in paths:
            if not is_parquet(path):
                raise UserError(f"{path} is not a .parquet file")
            with reading(path), open_regular(path):
                pass
        found += paths
    return list(dict.fromkeys(found))


def _expand(given: str, left_out: dict[Path, str]) -> list[Path]:
    """Return the files that an input names, sorted; hidden ones of a folder are left out."""
    path = Path(given)
    with reading(path):
        if path.is_dir():
            return sorted(_walk(path, left_out))
        if path.exists():
            return [path]
        matches = sorted(map(Path, glob.glob(given)))  # noqa: PTH207 - Path.glob: no absolute ones
    if not matches:
        raise UserError(f"{given} does not exist")
    return matches


def _walk(folder: Path, left_out: dict[Path, str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for top, folders, names in os.walk(folder, onerror=refuse):
        for name in [*folders, *names]:
            if name.startswith("."):
                left_out[Path(top) / name] = "is hidden"
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(top) / name for name in names if not name.startswith("."))


def _problem(path: Path) -> str | None:
    """Return why a file cannot be read as text; None if it can, or has a name that says so."""
    with reading(path):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "is a folder"
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        try:
            with opened(path) as file:
                if path.name.endswith(TEXT_SUFFIXES):
                    return None
                decoder = codecs.getincrementaldecoder("utf-8")()
                while block := file.read(CHUNK_CHARS):
                    if b"\0" in block:
                        return "is not text (it has zero bytes)"
                    decoder.decode(block)
                decoder.decode(b"", final=True)
        except Unusable as problem:
            return str(problem)
        except UnicodeDecodeError:
            return "is not UTF-8 text"
    return None


def check_parquet(path: Path, field: str) -> None:
    """Refuse a file that is not parquet or lacks the text column."""
    import pyarrow.parquet

    with reading(path):
        try:
            names = pyarrow.parquet.read_schema(path).names
        except ValueError as error:  # pyarrow's ArrowInvalid
            raise Unusable(f"is not a parquet file: {error}") from None
    if field not in names:
        raise Unusable(f"has no column {field!r}; {did_you_mean(field, names)}")


@dataclass(frozen=True)
class Sample:
    """Draws validation from all over a text: of every `one_in` documents one, by the seed.

    A document of more than `longest` characters is cut, and its parts are drawn like documents.
    """

    one_in: int
    longest: int
    seed: int = 0

    def holds(self, number: int) -> bool:
        """Return whether document `number` is validation."""
        group, place = divmod(number, self.one_in)
        return name_hash(f"{self.seed} {group}") % self.one_in == place

    def pieces(self, text: str, starts: bool, number: int) -> list[Piece]:
        """Return the parts of a text, which are documents `number`, `number + 1`, ..."""
        found = []
        before = self.holds(number - 1)
        most = max(4 * self.longest, 4096)
        for part in cut_safely(text, limit=self.longest):
            for at in range(0, len(part), most):  # twice only where there are no blanks to cut at
                validation = self.holds(number + len(found))
                # Text that does not continue what its split has last is a document of its own.
                begins = validation != before or at > 0 or (starts and not found)
                found.append(Piece(part[at : at + most], begins, validation))
                before = validation
        return found


class TextSource:
    """Reads local text, JSON lines and parquet files, in the order given."""

    def __init__(self, files, field, kind: dict, prefix="text", *, sample=None, skip_bad=False):
        """Check the files. `kind` begins the description; without a `sample`, no validation."""
        self.prefix = prefix
        self.files = files
        self._field = field
        self._sample = sample
        self._skip_bad = skip_bad
        self._sizes = [path.stat().st_size for path in files]
        # A resumed preparation must find the same names and sizes.
        listing = [[path.name, size] for path, size in zip(files, self._sizes, strict=True)]
        found = {"files": len(files), "bytes": sum(self._sizes), "listing": digest(listing)}
        self.description = kind | found
        if sample:
            self.seed = sample.seed
            self.description |= {"validation": asdict(sample), "skip_bad": skip_bad}
        self.skipped = {}  # by the file's index: [lines (0: all of it), what is wrong]
        if not skip_bad:
            for index, path in enumerate(files):
                if is_parquet(path):
                    with self._skipping(index):
                        check_parquet(path, field)
        self._index = 0  # of the file that is being read
        self._at = None  # bytes of it that are read, or a stream that knows; None: nothing yet
        self._drawn = 0  # documents so far

    def pieces(self, state: dict | None) -> Iterator[list[Piece]]:
        """Yield the pieces from a state on, a list per document or part of a file."""
        if state:
            self._index = state["file"]
            self._at = state["at"]
            self._drawn = state["drawn"]
            self.skipped.update(state["skipped"])
        while self._index < len(self.files):
            path = self.files[self._index]
            with reading(path), self._skipping(self._index):
                if self._skip_bad and self._at is None:
                    self._read_through(path)
                for text, starts in self._read(path):
                    pieces = [Piece(text, starts)]
                    if self._sample:
                        pieces = self._sample.pieces(text, starts, self._drawn)
                    self._drawn += len(pieces)
                    yield pieces
            self._index += 1
            self._at = None

    def state(self) -> dict:
        """Return where the last list of pieces ended, as plain values."""
        at = self._at.state() if isinstance(self._at, ParquetStream) else self._at
        return {
            "file": self._index,
            "at": at,
            "drawn": self._drawn,
            "skipped": dict(self.skipped),
        }

    def expected_tokens(self, written: int) -> int | None:
        """Estimate the tokens of all files from those of the files read so far."""
        done = sum(self._sizes[: self._index])
        if isinstance(self._at, int) and self._index < len(self.files):
            done += min(self._at, self._sizes[self._index])
        return written * sum(self._sizes) // done if done else None

    @contextlib.contextmanager
    def _skipping(self, index: int, line: str = "") -> Iterator[None]:
        """Leave out a file or line that is unusable in this block, or refuse without --skip-bad."""
        try:
            yield
        except Unusable as problem:
            if not self._skip_bad:
                where = f"{self.files[index]}, line {line}:" if line else f"{self.files[index]}"
                remedy = "; or leave such files and lines out with --skip-bad"
                raise UserError(f"{where} {problem}{remedy if self._sample else ''}") from None
            what = f"{line}: {problem}" if line else str(problem)
            lines, first = self.skipped.get(str(index), (0, what))
            self.skipped[str(index)] = [lines + bool(line), first]

    def _read_through(self, path: Path) -> None:
        """Read a file once, before any of it is used: it must be whole, and all of it text."""
        if is_parquet(path):
            check_parquet(path, self._field)
            return
        with opened(path) as file:
            if not is_jsonl(path):
                for _ in self._document(file):
                    pass
            elif path.suffix == ".gz":
                while file.read(CHUNK_CHARS):
                    pass
        self._at = None

    def _read(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether it starts a document) from the current position on."""
        if is_parquet(path):
            state = self._at
            self._at = ParquetStream("parquet", self._field, data_files=[str(path)])
            yield from self._at.texts(state)
            return
        with opened(path) as file:
            file.seek(self._at or 0)
            yield from self._lines(file) if is_jsonl(path) else self._document(file)

    def _document(self, file: BinaryIO) -> Iterator[tuple[str, bool]]:
        """Yield the whole file in parts that fit in memory.

        Where a part ends depends on where it begins and on the file, on nothing else: a resumed
        preparation begins at the end of some part, and must cut as an undisturbed one does.
        """
        self._at = self._at or 0
        held = b""  # read from the file, and not yet part of a text
        limit = CHUNK_CHARS  # bytes to look at
        at_end = False
        while not at_end:
            held += file.read(max(0, limit - len(held)))
            at_end = len(held) < limit
            text = self._decode(held[:limit], at_end)
            cut = None if at_end else SAFE_CUT.search(text, max(0, len(text) - CUT_CHARS))
            if not at_end and not cut and limit < LONGEST_SOLID:
                limit += CHUNK_CHARS
                continue
            part = text[: cut.end()] if cut else text
            size = len(part.encode())
            starts = self._at == 0
            held = held[size:]
            limit = CHUNK_CHARS
            self._at += size
            if starts:
                part = part.removeprefix(BYTE_ORDER_MARK)
            if part:
                yield part, starts

    def _decode(self, data: bytes, final: bool) -> str:
        """Decode UTF-8; unless `final`, without the beginning of a character at the end."""
        try:
            return codecs.utf_8_decode(data, "strict", final)[0]
        except UnicodeDecodeError as error:
            place = self._at + error.start
            raise Unusable(f"is not UTF-8 (byte {place}); {CONVERT}") from None

    def _lines(self, file: BinaryIO) -> Iterator[tuple[str, bool]]:
        """Yield the text of every line of JSON."""
        while line := file.readline(LONGEST_LINE):
            rest = line
            while len(rest) == LONGEST_LINE and rest[-1:] != b"\n":  # read on to the line's end
                rest = file.readline(LONGEST_LINE)
            start = self._at or 0
            self._at = file.tell()
            text = None
            with self._skipping(self._index, f"at byte {start}"):
                if not line.isspace():
                    text = self._text_of(line)
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
        if not isinstance(row, dict):
            there = type(row).__name__
        elif isinstance(row.get(self._field, ...), str | None):
            return row[self._field]
        else:
            there = ", ".join(map(repr, row))
        raise Unusable(
            f"no text in {self._field!r} (there is: {there}); name the text's field with --field"
        )
