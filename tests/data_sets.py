"""What the data tests share: a set of shards written by an independent writer, and a runner."""

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

REPOSITORY = Path(__file__).resolve().parents[1]


def write_shard(path, tokens, *, magic=20240520, version=1, count=None):
    """Write llm.c's format, spelled out: 256 int32, then uint16."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count) + bytes(4 * 253)
    path.write_bytes(header + np.asarray(tokens, dtype="<u2").tobytes())


def write_set(folder, *, train, val=(), prefix="x"):
    for index, tokens in enumerate([*val, *train]):
        split = "val" if index < len(val) else "train"
        write_shard(folder / f"{prefix}_{split}_{index:06d}.bin", tokens)


def read_stream(folder, split):
    """Read all tokens of a split; written independently of the library."""
    parts = []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        data = path.read_bytes()
        magic, version, count = struct.unpack("<3i", data[:12])
        assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * count)
        parts.append(np.frombuffer(data[1024:], dtype="<u2"))
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def contents(folder):
    """Return the files of a set, but for the note of which were checked."""
    names = [path for path in folder.iterdir() if path.name != ".checked.jsonl"]
    return {path.name: path.read_bytes() for path in names}


def run_prepare(*arguments, **options):
    """Run `python data/prepare.py ...` as a user does."""
    return subprocess.run(
        [sys.executable, "data/prepare.py", *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


def text_corpus(folder, documents=400):
    """Write Parquet, JSON lines and plain text, each long enough for several chunks and shards."""
    folder.mkdir()
    texts = [f"{i} Zürich 中文 don't  stop\n" * (1 + i % 37) for i in range(documents)]
    texts[5] = "a document longer than a shard " * 1500
    for part in range(2):
        table = pyarrow.table({"text": texts[part::2]})
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=31)
    with gzip.open(folder / "2.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "3.txt").write_text("".join(texts))
    return folder
