"""What a user's mistake looks like: one clear line and exit code 2, never a traceback."""

import argparse
import difflib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable

LARGEST = 2**31 - 1  # no count, length or size needs more
MOST_PROCESSES = 1024


class UserError(ValueError):
    """A mistake in the user's input. The message says what, which value, and what to do."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest option, or all of them."""
    options = sorted(options)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(options)}"


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as its help; a mistake is one line, like every other mistake."""

    def __init__(self, description: str | None = None, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def quiet_imports() -> None:
    """From here until `run`, Ctrl-C ends a script without a traceback out of torch's imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame) -> None:
    # An exception could be swallowed, or turned into another, by the module being imported.
    os.write(2, b"interrupted\n")
    os._exit(130)


# --- argument types ------------------------------------------------------------------------------


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


# --- programs ------------------------------------------------------------------------------------

# What torch and numpy say, in exceptions of several kinds, of a tensor that does not fit.
NO_MEMORY = ("not enough memory", "allocate memory", "out of memory", "size calculation overflowed")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's `main(argv)` as a program: exit 0, 2 for a user's mistake, 130 on Ctrl-C."""
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        print(f"error: this does not fit into memory; ask for less ({reason})", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)
