"""Commands: their arguments, their exit codes, and what to record of them."""

import argparse
import contextlib
import errno
import functools
import math
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lssar.errors import UserError
from support.files import first_line

LARGEST = 2**31 - 1  # no count, length or size needs more
MOST_PROCESSES = 1024
# What torch and numpy say, in various exceptions, when a tensor does not fit.
NO_MEMORY = ("not enough memory", "allocate memory", "out of memory", "size calculation overflowed")


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as its help; a mistake in the arguments is a UserError."""

    def __init__(self, description: str | None = None, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def answer_early(parse: Callable[[list[str]], object]) -> None:
    """Answer --help and mistakes before a script's slow imports, then `quiet_imports`."""
    if code := _exit_code(lambda argv: parse(argv) and None):
        sys.exit(code)
    quiet_imports()


def quiet_imports() -> None:
    """From here until `run`, Ctrl-C ends a script without a traceback from torch's imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame) -> None:
    # The module that is being imported could swallow an exception.
    os.write(2, b"interrupted\n")
    os._exit(130)


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's `main(argv)` as a program: exit 0, 2 for a user's mistake, 130 on Ctrl-C, 141
    where nobody reads its output any more."""
    sys.exit(_exit_code(main))


def _exit_code(main: Callable[[list[str]], int | None]) -> int:
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with as_user_errors():
            code = main(sys.argv[1:]) or 0
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 128 + signal.SIGPIPE
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _reader_left() -> bool:
    """Whether nobody reads the output any more, as after `| head`. What is left of it is lost."""
    asked, output = select.poll(), sys.stdout.fileno()
    asked.register(output, select.POLLOUT)
    left = any(event & select.POLLERR for _, event in asked.poll(0))
    if left:  # or Python tries to write it once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return left


@contextlib.contextmanager
def as_user_errors() -> Iterator[None]:
    """What any command may be asked and no machine can do, as a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = f"{str(error.filename)[:40]}..."
        raise UserError(f"{name} is too long for the name of a file") from None
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        reason = first_line(error)
        raise UserError(f"this does not fit into memory; ask for less ({reason})") from None


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def whole(least: int = 0, most: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that is a whole number from `least` to `most`."""
    rules = {f"at least {least}": lambda n: n >= least, f"at most {most}": lambda n: n <= most}
    return functools.partial(_parse_number, int, "a whole number", rules)


def number(above: float = 0.0, most: float = sys.float_info.max) -> Callable[[str], float]:
    """The type of an option that is a finite number above `above` and at most `most`."""
    rules = {f"above {above:g}": lambda x: x > above, f"at most {most:g}": lambda x: x <= most}
    return functools.partial(_parse_number, float, "a number", rules)


def _parse_number(kind: type, name: str, rules: dict[str, Callable], text: str):
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    wrong = [f"must be {rule}" for rule, holds in rules.items() if not holds(value)]
    if not abs(value) < math.inf:
        wrong = [f"is not {name}"]
    if wrong:
        shown = text if len(text) < 40 else f"{text[:30]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} {wrong[0]}")
    return value


positive = whole(1)
seed_number = whole(0, 2**63 - 1)
process_count = whole(1, MOST_PROCESSES)  # or threads


def _list_of(kind: Callable[[str], float]) -> Callable[[str], list]:
    """`1024,512,512` -> [512, 1024]: in order, each once."""
    return lambda text: sorted(set(map(kind, text.split(","))))


lengths, numbers = _list_of(positive), _list_of(number())

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def revision() -> str:
    """The commit, with + if code (not results) has changed since; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        quiet = {"cwd": ROOT, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.check_output(["git", *arguments], **quiet).strip()

    try:
        code = ("--", ".", ":!results", ":!site", ":!docs")
        changed = "+" if git("status", "--porcelain", "--untracked-files=no", *code) else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line() -> str:
    """The command of this process, with its script relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])
