"""Commands: their arguments, how they end, and what they were, for the record."""

import argparse
import functools
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lssar.errors import UserError

LARGEST = 2**31 - 1  # no count, length or size needs more
MOST_PROCESSES = 1024


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as its help; a mistake in the arguments is a UserError."""

    def __init__(self, description: str | None = None, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def answer_early(parse: Callable[[list[str]], object]) -> None:
    """Above a script's slow imports: answer --help and mistakes, then `quiet_imports`."""
    if code := _exit_code(lambda argv: parse(argv) and None):
        sys.exit(code)
    quiet_imports()


def quiet_imports() -> None:
    """From here until `run`, Ctrl-C ends a script without a traceback out of torch's imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame) -> None:
    # An exception could be swallowed, or turned into another, by the module being imported.
    os.write(2, b"interrupted\n")
    os._exit(130)


# What torch and numpy say, in exceptions of several kinds, of a tensor that does not fit.
NO_MEMORY = ("not enough memory", "allocate memory", "out of memory", "size calculation overflowed")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's `main(argv)` as a program: exit 0, 2 for a user's mistake, 130 on Ctrl-C."""
    sys.exit(_exit_code(main))


def _exit_code(main: Callable[[list[str]], int | None]) -> int:
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(sys.argv[1:]) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        print(f"error: this does not fit into memory; ask for less ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# --- types of arguments --------------------------------------------------------------------------


def whole(least: int = 0, most: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that is a whole number in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise _refusal(text, "is not a whole number") from None
        if value < least:
            raise _refusal(text, f"must be at least {least}")
        if value > most:
            raise _refusal(text, f"must be at most {most}")
        return value

    return parse


def number(above: float = 0.0, most: float = sys.float_info.max) -> Callable[[str], float]:
    """The type of an option that is a finite number in a range, whose lower end is not in it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise _refusal(text, "is not a number")
        if not value > above:
            raise _refusal(text, f"must be above {above:g}")
        if value > most:
            raise _refusal(text, f"must be at most {most:g}")
        return value

    return parse


def _refusal(text: str, reason: str) -> argparse.ArgumentTypeError:
    shown = text if len(text) < 40 else f"{text[:30]}..."
    return argparse.ArgumentTypeError(f"{shown!r} {reason}")


positive = whole(1)
seed_number = whole(0, 2**63 - 1)
process_count = whole(1, MOST_PROCESSES)  # or threads


def lengths(text: str) -> list[int]:
    """`1024,2048` -> [1024, 2048], in order, each once."""
    return sorted(set(map(positive, text.split(","))))


def numbers(text: str) -> list[float]:
    """`0.1,0.2` -> [0.1, 0.2], in order, each once."""
    return sorted(set(map(number(), text.split(","))))


# --- what made a number --------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def revision() -> str:
    """The commit of the code, with + where it was changed since; "unknown" outside a checkout.

    Results do not count as code: a command that rewrites a committed one is still at the commit.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        code = ("--", ".", ":!results", ":!site", ":!docs")
        changed = "+" if git("status", "--porcelain", "--untracked-files=no", *code) else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line() -> str:
    """The command of this process, its script as seen from the repository."""
    script = Path(sys.argv[0])
    inside = script.resolve().is_relative_to(ROOT)
    name = str(script.resolve().relative_to(ROOT)) if inside else script.name
    return shlex.join(["python", name, *sys.argv[1:]])
