"""Files that are there whole or not at all, whatever happens while they are written."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from errors import UserError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; nothing finished is lost: put that "
            "right and run the same command again"
        ) from None


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's names, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(path: Path) -> Path:
    """Where `path` is while it is being written; a kill may leave it behind."""
    return path.with_name(f".{path.name}.tmp")


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically and durably."""
    temporary = temporary_of(path)
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def finite(value):
    """The value with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
