"""What the data tests share: a set of shards written by an independent writer, and a runner."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]


def write_shard(path, tokens, *, magic=20240520, version=1, count=None):
    """llm.c's format, spelled out: 256 int32, then uint16."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count) + bytes(4 * 253)
    path.write_bytes(header + np.asarray(tokens, dtype="<u2").tobytes())


def write_set(folder, *, train, val=(), prefix="x"):
    for index, tokens in enumerate([*val, *train]):
        split = "val" if index < len(val) else "train"
        write_shard(folder / f"{prefix}_{split}_{index:06d}.bin", tokens)


def read_stream(folder, split):
    """All tokens of a split, by an independent reader."""
    parts = []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        data = path.read_bytes()
        magic, version, count = struct.unpack("<3i", data[:12])
        assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * count)
        parts.append(np.frombuffer(data[1024:], dtype="<u2"))
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_prepare(*arguments, before="", **options):
    """`python data/prepare.py ...` as a user runs it; `before` is Python to run in it first."""
    command = [sys.executable, "data/prepare.py"]
    if before:
        code = "import runpy, sys; sys.argv[0] = 'data/prepare.py'\n"
        code += "runpy.run_path(sys.argv[0], {}, '__main__')"
        command = [sys.executable, "-c", f"{before}\n{code}"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip
