"""Where a built kernel is kept when the usual cache folder cannot be used."""

import os
import stat
import tempfile
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
