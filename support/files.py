"""Reads and writes files: atomic and durable writes, locks, one-line errors."""

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
import secrets
import stat
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from lssar.errors import UserError


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


REPEAT = "nothing finished is lost: fix that and run the same command again"


@contextlib.contextmanager
def writing(path: Path, remedy: str = REPEAT) -> Iterator[None]:
    """Turn an OSError while writing `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {remedy}") from None


LARGEST_TEXT = 2**28  # our own files are smaller, and a larger one would fill the memory


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; OSError for a device, or a FIFO, which could block forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path, *, limit: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """Return the text of a regular file; OSError if it has more than `limit` characters."""
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
    """Return the sha256 of a regular file."""
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
    """Make a folder and its parents, or raise in one line."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that appears under its name whole or not at all, and durably."""
    with writing(path):
        temporary, handle = _new_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(handle)
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def _new_temporary(path: Path) -> tuple[Path, int]:
    """Create a file beside `path` that nobody else can have prepared, and lock it.

    The lock tells one that is being written from one that a kill left behind; the latter is
    removed here, the next time that `path` is written.
    """
    if path.name in ("", ".."):
        raise UserError(f"{str(path)!r} is not a name to write to; give another")
    _remove_abandoned(path)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # it was taken for abandoned between the two calls
            os.close(handle)
            continue
        except OSError:  # no locks here: then nothing is ever taken for abandoned
            return temporary, handle
        if temporary.exists():
            return temporary, handle
        os.close(handle)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` that killed processes left."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in os.scandir(path.parent):
        if not pattern.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):  # it is being written, or gone by now
            handle = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(entry.path).unlink()
            finally:
                os.close(handle)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of the data to an unbuffered file, which may take only a part at a time."""
    while len(data):
        data = data[file.write(data) :]


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def _try_lock(lock: Callable[[int, int], None], handle: int, path: Path) -> bool:
    """Lock an open file without waiting. Return False if another process holds the lock."""
    try:
        lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"note: {path} cannot be locked ({error.strerror}): let no other process write it",
            file=sys.stderr,
        )
    return True


class Claim:
    """Lets only this process write `path`, until the claim is dropped or the process ends.

    The lock is a file beside it, `.NAME.lock`, which a kill may leave behind and the next claim
    takes over. Claims of one process do not exclude each other.
    """

    def __init__(self, path: Path):
        lock = path.with_name(f".{path.name}.lock")
        with writing(path):
            while True:
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                if not _try_lock(fcntl.lockf, handle, path):
                    os.close(handle)
                    raise UserError(
                        f"{path} is being written by another process; "
                        "wait for it or give another --out"
                    )
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
            free = _try_lock(fcntl.flock, handle, directory)
        except OSError:
            os.close(handle)
            raise
    try:
        if not free:
            raise UserError(
                f"{directory} is being written by another process; {remedy or 'wait for it'}"
            )
        yield
    finally:
        os.close(handle)


def digest(value) -> str:
    """Return the sha256 of a JSON value, whatever the order of its keys."""
    as_read = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@contextlib.contextmanager
def json_record(path: Path, remedy: str = "", what: str = "is damaged") -> Iterator[object]:
    """Read the JSON value of a file. If a check in the block fails, the file is damaged."""
    try:
        with reading(path):
            text = read_text(path)
        yield json.loads(text)
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"{path} {what} ({type(error).__name__}: {error}){remedy}") from None


def lookup(path: Path, *keys: str):
    """Return the value at these nested keys of a JSON file; None if anything is missing."""
    try:
        return functools.reduce(operator.getitem, keys, json.loads(read_text(path)))
    except (OSError, *DAMAGE):
        return None


def refuse_wrong_types(values: dict, kinds: dict, where: str = "") -> None:
    """Raise TypeError for a value that is not of its kind; booleans are not numbers."""
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} where an object belongs{where}")
    for key, kind in kinds.items():
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise TypeError(f"{key} = {values[key]!r} is of a wrong type{where}")


def finite(value):
    """Return the value as JSON holds it, with None for floats that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
