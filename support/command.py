"""Parses the arguments of commands, runs them with an exit code, and names them for records."""

import argparse
import contextlib
import errno
import functools
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lssar.errors import UserError
from support.files import first_line

LARGEST = 2**31 - 1  # no count, length or size needs more
MOST_PROCESSES = 1024
SECONDS_FOR_RANK_0 = 5  # to report an error that every rank has
# Words of torch and numpy, in various exceptions, when a tensor does not fit.
NO_MEMORY = ("not enough memory", "allocate memory", "out of memory", "size calculation overflowed")


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as its help, and raises a UserError for a wrong argument."""

    def __init__(self, description: str | None = None, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)
        self.register("type", Path, _parse_path)

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _parse_path(text: str) -> Path:
    """Refuse names that no file can have; an empty one would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path; for the current folder give .")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} has a zero byte, which no path can have")
    return Path(text)


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's `main(argv)` as a program.

    Exit code 0, 2 for a user's mistake or output that could not be written, 130 on Ctrl-C, 141
    where nobody reads its output any more. Any other traceback is a bug of ours.
    """
    code = _exit_code(main)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # One of several processes: threads that gloo leaves behind may abort an interpreter that
        # shuts down, after everything is done.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _exit_code(main: Callable[[list[str]], int | None]) -> int:
    streams = _protect_streams()
    try:
        with as_user_errors():
            code = main(sys.argv[1:]) or 0
            sys.stdout.flush()
    except UserError as error:
        code = _report(str(error))
    except OSError as error:
        if any(stream.error is error for stream in streams):  # nobody reads the output
            return 128 + signal.SIGPIPE
        where = "" if error.filename is None else f"{error.filename}: "
        code = _report(f"{where}{error.strerror or error}")
    except UnicodeError as error:
        code = _report(f"a text or a name is not valid Unicode ({error})")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    for stream in streams:
        if stream.error and stream.fileno() == 1 and code == 0:
            code = _report(f"the output could not be written: {stream.error.strerror}")
    return code


def _report(message: str) -> int:
    """Print an error in one line, whatever is in it. Return the exit code."""
    line = message.replace("\r", "\\r").replace("\n", "\\n")
    shown = f"error: {line}"
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 has most likely failed for the same reason: torchrun then ends this one meanwhile.
        time.sleep(SECONDS_FOR_RANK_0)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if file and restarts == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        # For every exit code but 0 torchrun raises ChildFailedError, and prints its traceback. The
        # last lines of that show this file.
        details = {"py_callstack": shown, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": shown, "extraInfo": details}}))
    else:
        print(shown, file=sys.stderr)
    return 2


class Stream:
    """Wraps stdout or stderr so that a full disk does not end the work, but loses the output.

    The first error is kept in `error`. If nobody reads stdout any more, as after `| head`, the
    first write raises BrokenPipeError, as usual.
    """

    def __init__(self, stream):
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._guard(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._guard(self.stream.flush)

    def _guard(self, call: Callable, *arguments) -> None:
        try:
            call(*arguments)
        except OSError as error:
            # Write to nowhere from now on, or Python would try this write again at the end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.error = error
            if isinstance(error, BrokenPipeError) and self.stream.fileno() == 1:
                raise


def _protect_streams() -> list[Stream]:
    """Make stdout and stderr safe to print to, also where they are closed, full or ASCII."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and the next file to be opened would get its number
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Stream(stream))
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Stream)]


@contextlib.contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise a UserError for requests that are too large for this machine."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(
            f"{str(error.filename)[:40]}... is too long for the name of a file"
        ) from None
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"this does not fit into memory; ask for less ({first_line(error)})"
        ) from None


def out_of_memory(error: Exception) -> bool:
    """Return whether an exception says that something did not fit into memory."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def whole(least: int = 0, most: int = LARGEST) -> Callable[[str], int]:
    """Return the type of an option that is a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        value = _parse_number(int, "a whole number", text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be at most {most}")
        return value

    return parse


def number(above: float = 0.0, most: float = sys.float_info.max) -> Callable[[str], float]:
    """Return the type of an option that is a number above `above` and at most `most`."""

    def parse(text: str) -> float:
        value = _parse_number(float, "a number", text)
        if value <= above:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be above {above:g}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} must be at most {most:g}")
        return value

    return parse


def _parse_number(kind: type, name: str, text: str):
    """Return a finite number, or raise that the text is not `name`."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not abs(value) < math.inf:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not {name}")
    return value


def _shown(text: str) -> str:
    """Quote a text for a message, shortened if it is long."""
    return repr(text if len(text) < 40 else f"{text[:30]}...")


positive = whole(1)
seed_number = whole(0, 2**63 - 1)
process_count = whole(1, MOST_PROCESSES)  # or threads


def lengths(text: str) -> list[int]:
    """Parse `1024,512,512` to [512, 1024]: in order, each once."""
    return sorted({positive(part) for part in text.split(",")})


def numbers(text: str) -> list[float]:
    """Parse `1.5,1` to [1.0, 1.5]: in order, each once."""
    parse = number()
    return sorted({parse(part) for part in text.split(",")})


ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def revision() -> str:
    """Return the commit, with + if code has changed since; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        output = subprocess.check_output(
            ["git", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, text=True
        )
        return output.strip()

    try:
        code = ("--", ".", ":!results", ":!site", ":!docs")
        changed = git("status", "--porcelain", "--untracked-files=no", *code)
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line() -> str:
    """Return the command of this process, with its script relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])
