"""Loop over the cases of one claim: `for name, length in cases(NAMES, LENGTHS):`.

Every case starts from the same seeds, and the message of a failure ends with its case.
"""

import inspect
import itertools
import random

import numpy as np
import torch

# One mechanism of each kind: plain, learned scales, by length, re-weighted, from the query back.
REPRESENTATIVE = ("softmax", "ssmax", "sigmoid-logn", "lssar", "stick-breaking")

running = []  # the case of each loop that is under way; conftest.py adds them to a failure


def seed_everything():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - whatever a library under test draws from it
    torch.manual_seed(0)


def cases(*choices):
    """Yield every combination of the choices, or the values of a single one."""
    depth = len(running)
    for combination in itertools.product(*choices):
        running[depth:] = [combination if len(choices) > 1 else combination[0]]
        if depth == 0:
            seed_everything()
        yield running[depth]
    del running[depth:]


def example_of(documented) -> str:
    """Return the example in a docstring: its indented lines, or all below the first paragraph."""
    text = inspect.getdoc(documented) or ""
    indented = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(indented) or text.partition("\n\n")[2]
