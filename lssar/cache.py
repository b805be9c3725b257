"""Where built kernels and downloads are kept when the usual cache folder cannot be used."""

import os
import stat
import tempfile
import warnings
from pathlib import Path


def private_folder() -> Path:
    """A temporary folder that only this user can write to; OSError where there is none.

    What lies in it is loaded as code, so one that another user made or can write to is refused.
    """
    folder = Path(tempfile.gettempdir()) / f"lssar-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not owned or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users")
    return folder


def ensure_writable(variable: str, default: str, name: str, what: str) -> None:
    """Point a library at a private temporary folder where it cannot write its own.

    `variable` is the environment's name for the folder, read when the library is first imported.
    """
    try:
        folder = Path(os.environ.get(variable) or default).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # the latter: no home
        private = private_folder() / name
        os.environ[variable] = str(private)
        warnings.warn(
            f"{what} are kept in {private}, as the usual folder cannot be used ({error}); "
            f"set {variable} to one that can be written",
            stacklevel=2,
        )


def ensure_hub_cache() -> None:
    """For whatever imports `datasets`, `transformers` or `lm_eval`, before it does."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    ensure_writable("HF_HOME", f"{home}/huggingface", "huggingface", "Hugging Face's files")
