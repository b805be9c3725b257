"""Defines the error of a caller's mistake: one clear line."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Tells a mistake in the user's input.

        try:
            attend(q, k[:, :, :1], v)
        except UserError as error:
            print(error)

    The message says what, which value, and what to do.
    """


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return the tail of an "unknown name" message: the nearest option, or all of them."""
    options = sorted(options)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(options)}"
