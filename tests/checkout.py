"""The files and commands of the project, whatever else lies in the checkout: editors, runs."""

import contextlib
import importlib
import io
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git knows, in order; a pattern's * stands for any path."""
    # The folder may belong to another user.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.exists())


def write_committed(folder: Path, path: str) -> None:
    """Write what was last committed under `path`, whatever the checkout holds now."""
    git = ["git", "-c", f"safe.directory={ROOT}", "archive", "--format=zip", "HEAD", path]
    archive = subprocess.run(git, cwd=ROOT, capture_output=True, check=True).stdout
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)


def main_of(script: str):
    """Return the main(argv) of a command such as data/prepare.py."""
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).main


def help_of(script: str, *words: str) -> str:
    """Return what a command prints for --help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            code = main_of(script)([*words, "--help"])
        except SystemExit as end:  # argparse leaves this way
            code = end.code
    assert not code, f"{script}: exit code {code}"
    return shown.getvalue()
