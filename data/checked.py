"""Compares shards with the sha256 of their manifest, each only once.

`.checked.jsonl` beside the shards has a line per comparison: name, sha256, size, times and inode. A
shard is hashed again if its size, mtime, ctime or inode changed; a copy always is, as ctime cannot
be set. In a read-only folder every open hashes again.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from lssar.errors import UserError
from support.files import DAMAGE, read_text, reading, sha256_of

CHECKED = ".checked.jsonl"
TICK = 2 * 10**9  # nanoseconds in which a file could change without another time
WORTH_A_WORD = 2**30  # bytes


def refuse_changed(directory: Path, shards: dict[str, str], manifest: str) -> None:
    """Refuse a shard that does not have its sha256; `shards` gives it by name."""
    known = _remembered(directory)
    unknown = []
    for name, sha256 in shards.items():
        entry = {"name": name, "sha256": sha256} | _look(directory / name)
        if entry not in known.get(name, ()):
            unknown.append(entry)
    size = sum(entry["bytes"] for entry in unknown)
    if size > WORTH_A_WORD:
        what = f"{len(unknown)} shards of {directory}, {size / 1e9:.1f} GB"
        print(f"comparing {what}, with {manifest}, once", file=sys.stderr)
    compared = []
    for entry in unknown:
        path = directory / entry["name"]
        found = sha256_of(path)
        if found != entry["sha256"]:
            raise UserError(
                f"{path} is damaged: its sha256 is {found[:12]}..., "
                f"{manifest} says {entry['sha256'][:12]}...; prepare or download it again"
            )
        if entry["ctime_ns"] < time.time_ns() - TICK:
            compared.append(entry)
    _remember(directory, compared)


def _look(path: Path) -> dict[str, int]:
    """Return size, times and inode of a file."""
    with reading(path):
        status = path.stat()
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {"bytes": status.st_size, "inode": status.st_ino} | times


def _remembered(directory: Path) -> dict[str, list[dict]]:
    """Return the earlier comparisons by the name of the shard."""
    try:
        lines = read_text(directory / CHECKED, errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        with contextlib.suppress(*DAMAGE):  # a kill may cut a line short
            entry = json.loads(line)
            found.setdefault(entry["name"], []).append(entry)
    return found


def _remember(directory: Path, entries: list[dict]) -> None:
    """Append comparisons in one call: several processes may do so at once."""
    if not entries:
        return
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(directory / CHECKED, flags, 0o666)
        try:
            os.write(handle, f"\n{lines}".encode())  # after a torn line
        finally:
            os.close(handle)
