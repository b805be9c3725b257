"""Finds folders for built kernels and downloads, and tells which can be trusted with code."""

import os
import stat
import tempfile
import warnings
from pathlib import Path


def private_folder() -> Path:
    """Return a temporary folder that only this user can use; OSError where there is none."""
    folder = Path(tempfile.gettempdir()) / f"lssar-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not owned or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users")
    return folder


def check_trusted(path: Path) -> None:
    """Raise PermissionError where another user could have written `path`, or could now.

    Libraries are loaded as code from these folders. The superuser is trusted in any case.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written by other users; chmod go-w would close it")
    for parent in (*path.absolute().parents, *path.resolve().parents):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # they could put another in its place
            raise PermissionError(
                f"{parent} can be written by other users; chmod o-w would close it"
            )


def ensure_writable(variable: str, default: str, name: str, what: str) -> None:
    """Point a library at a private temporary folder where it cannot write its own.

    `variable` is the environment's name for the folder, read when the library is first imported.
    """
    try:
        folder = Path(os.environ.get(variable) or default).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        private = private_folder() / name
        os.environ[variable] = str(private)
        warnings.warn(
            f"{what} are kept in {private}, as the usual folder cannot be used ({error}); "
            f"set {variable} to one that can be written",
            stacklevel=2,
        )


def ensure_hub_cache() -> None:
    """Call this before `datasets`, `transformers` or `lm_eval` is imported."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    ensure_writable("HF_HOME", f"{home}/huggingface", "huggingface", "Hugging Face's files")
