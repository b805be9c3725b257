"""Identifies the data of a run in its checkpoints, so that `--resume` notices other data.

A shard in the manifest is known by its sha256 there, which was compared when the set was opened
(data/checked.py). Other files are known by a sample of their bytes.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data.shards import MANIFEST, TokenSet
from lssar.errors import UserError
from support.files import open_regular, reading, sha256_of

# A file of up to a megabyte is hashed whole; of a larger one, these blocks, spread over all of it.
BLOCKS = 16
BLOCK_BYTES = 2**16
SAMPLED = "sample "


def identity(*splits: TokenSet) -> dict:
    """Describe the data for a checkpoint: the manifest's hash; of each file size, time, content."""
    directory = splits[0].directory
    files = {}
    for split in splits:
        for name, sha256 in split.files.items():
            with reading(directory / name):
                found = (directory / name).stat()
            files[name] = {
                "bytes": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "content": sha256 or _hash(directory / name, found.st_size),
            }
    manifest = directory / MANIFEST
    return {"manifest": sha256_of(manifest) if manifest.exists() else None, "files": files}


def _hash(path: Path, size: int) -> str:
    """Return the sha256 of a small file, or of a sample of a large one, marked as such."""
    if size <= BLOCKS * BLOCK_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256()
    with reading(path), open_regular(path) as file:
        for block in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return SAMPLED + digest.hexdigest()


def check_data_unchanged(saved: dict, now: dict, directory: Path, accept: bool) -> str | None:
    """Refuse data other than the saved unless accepted; return a warning, if there is one."""
    other = list(_differences(saved, now))
    if other:
        listed = "; ".join(other if len(other) < 4 else [*other[:3], f"and {len(other) - 3} more"])
        if accept:
            return f"training continues on other data (--accept-data): {listed}"
        raise UserError(
            f"--resume contradicts the data of the checkpoint (saved -> now): {listed}; set "
            "data.directory to the original data, or add --accept-data to train on these"
        )
    touched = [name for name, file in now["files"].items() if file != saved["files"][name]]
    sampled = [name for name in touched if now["files"][name]["content"].startswith(SAMPLED)]
    if not sampled:
        return None
    return (
        f"{directory / sampled[0]} was written since the checkpoint ({len(sampled)} such files); "
        f"a sample of it is unchanged, the rest cannot be compared: no {MANIFEST}"
    )


def _differences(saved: dict, now: dict) -> Iterator[str]:
    if saved["manifest"] != now["manifest"]:
        before, after = (str(state["manifest"])[:12] for state in (saved, now))
        yield f"sha256 of {MANIFEST}: {before} -> {after}"
    for name in sorted(saved["files"].keys() | now["files"].keys()):
        old, new = saved["files"].get(name), now["files"].get(name)
        if old is None or new is None:
            yield f"{name}: {'added' if old is None else 'gone'}"
        elif old["bytes"] != new["bytes"]:
            yield f"{name}: {old['bytes']} -> {new['bytes']} bytes"
        elif old["content"] != new["content"]:
            same_kind = old["content"].startswith(SAMPLED) == new["content"].startswith(SAMPLED)
            yield f"{name}: {'other contents' if same_kind else 'contents cannot be compared'}"
