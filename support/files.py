"""Reading and writing files: atomic and durable writes, locks, checksums, one-line errors."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import operator
import os
import re
import shutil
import stat
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lssar.errors import UserError


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough for one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


REPEAT = "nothing finished is lost: fix that and run the same command again"


@contextlib.contextmanager
def writing(path: Path, remedy: str = REPEAT) -> Iterator[None]:
    """Turn an OSError while writing `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {remedy}") from None


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which is given the name `out` at the end: that one is whole or absent."""
    temporary = out.with_name(f".{out.name}.tmp")
    with writing(out):
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; give a new folder")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)


LARGEST_TEXT = 2**28  # our own files are smaller, and a larger one would fill the memory


def open_regular(path: Path) -> BinaryIO:
    """Open for reading; OSError for a device, and for a FIFO, which could block forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path, *, limit: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """The text of a regular file; OSError if it has more than `limit` characters."""
    with io.TextIOWrapper(open_regular(path), "utf-8", errors) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"larger than the {limit:,} characters expected", str(path))
    return text


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into one line for the user."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def sha256_of(path: Path) -> str:
    with reading(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def temporary_of(path: Path) -> Path:
    """The name of `path` while it is being written; a kill may leave it behind."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name whole or not at all, and durably."""
    temporary = temporary_of(path)
    with writing(path):
        try:
            with temporary.open("wb") as file:
                yield file
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """To an unbuffered file, which may take only a part at a time."""
    while len(data):
        data = data[file.write(data) :]


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


class Claim:
    """Only this process may write `path`, until the claim is dropped or the process ends.

    The lock is a file beside it, `.NAME.lock`, which a kill may leave behind and the next claim
    takes over. Claims of one process do not exclude each other.
    """

    def __init__(self, path: Path):
        lock = path.with_name(f".{path.name}.lock")
        with writing(path):
            while True:
                handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    os.close(handle)
                    busy = f"{path} is being written by another process"
                    raise UserError(f"{busy}; wait for it or give another --out") from None
                if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                    break
                os.close(handle)  # its owner removed it between the two calls
        weakref.finalize(self, os.close, handle)
        weakref.finalize(self, lock.unlink, missing_ok=True)  # runs first, as the last made


@contextlib.contextmanager
def locked(directory: Path, remedy: str = "") -> Iterator[None]:
    """Make the folder and hold it: a second process is refused. The lock dies with its process."""
    with writing(directory, remedy or REPEAT):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{directory} is being written by another process"
            raise UserError(f"{busy}; {remedy or 'wait for it'}") from None
        yield
    finally:
        os.close(handle)


def digest(value) -> str:
    """sha256 of a JSON value as it reads back, whatever the order of its keys."""
    as_read = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def seal(value: dict) -> dict:
    """The value with a checksum of all of it, for `unseal` to compare."""
    return value | {"sha256": digest(value)}


def unseal(value: dict) -> dict:
    """The value without its checksum, if it has one; ValueError if that is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object belongs")
    body = {key: part for key, part in value.items() if key != "sha256"}
    if "sha256" in value and value["sha256"] != digest(body):
        raise ValueError("the contents do not have the recorded checksum")
    return body


DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@contextlib.contextmanager
def json_record(path: Path, remedy: str = "", what: str = "is damaged") -> Iterator[object]:
    """The JSON value of a file. If it, or a check in the block, fails, the file is damaged."""
    try:
        with reading(path):
            text = read_text(path)
        yield json.loads(text)
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"{path} {what} ({type(error).__name__}: {error}){remedy}") from None


def lookup(path: Path, *keys: str):
    """What a JSON file has at these keys, one inside the other; None if anything is amiss."""
    try:
        return functools.reduce(operator.getitem, keys, json.loads(read_text(path)))
    except (OSError, *DAMAGE):
        return None


def refuse_wrong_types(values: dict, kinds: dict, where: str = "") -> None:
    """TypeError for a value that is not of its kind; true and false are not numbers."""
    for key, kind in kinds.items():
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise TypeError(f"{key} = {values[key]!r} is of a wrong type{where}")


CHECKED_LINE = re.compile(r'(.*), "crc32": "([0-9a-f]{8})"\}', re.DOTALL)


def checked_line(value: dict) -> str:
    """One line of JSON with a checksum of itself, for files that grow line by line."""
    text = json.dumps(finite(value), ensure_ascii=False)[:-1]
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def are_checked(lines: list[str]) -> bool:
    """Whether a file was written with checksums: then each of its lines must have one."""
    return any(map(CHECKED_LINE.fullmatch, lines))


def read_line(line: str, checked: bool = False) -> dict:
    """The value of a checked line or of plain JSON; ValueError if it is damaged."""
    match = CHECKED_LINE.fullmatch(line)
    if checked and not match:
        raise ValueError("the line has no checksum")
    if match and zlib.crc32(match[1].encode()) != int(match[2], 16):
        raise ValueError("the line does not have the recorded checksum")
    value = json.loads(f"{match[1]}}}" if match else line)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object belongs")
    return value


def finite(value):
    """The value as JSON holds it, with None for floats that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
