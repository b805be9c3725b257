"""What a user's mistake looks like: one clear line and exit code 2, never a traceback."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable


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


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a script's `main(argv)` as a program: exit 0, 2 for a user's mistake, 130 on Ctrl-C."""
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)
