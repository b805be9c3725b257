"""The files of the project, whatever else lies in the checkout: editors, runs, environments."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git knows, in order; a pattern's * stands for any path."""
    # The folder may belong to another user.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.exists())
