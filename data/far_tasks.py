"""Tasks whose answers stand at a known distance: MQAR, flip-flop, copy, and passkey prompts.

    mqar      key-value pairs among dots; a key always has the same value:  ..Kv....Qa...Kv..Qa.
    flipflop  write a bit, ignore others, read it (Liu et al., 2023):       w1i0i0i1r1w0i1r0
    copy      strings, each of them followed by itself:                     xkcd|xkcd

Distances are log-uniform up to the length of the sequence, so that a sequence of any length is of
the same kind: trained at L, a model can be asked at 16 L. The budgets are reduced ones: few pairs,
one bit, small alphabets. Passkey prompts are those of `passkey.py`.
"""

from collections.abc import Callable
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import NamedTuple

import numpy as np

from data.passkey_text import make_prompt
from data.sources import NumberedSource
from data.tokeniser import Tokeniser
from lssar.errors import UserError

KEYS = 8
SHORTEST = 64  # room for each key and some of its questions
Answers = list[tuple[int, int]]  # (place, distance to the token that says it)


def log_uniform(random: np.random.Generator, most: int) -> int:
    """1 ... most, each octave as likely as another."""
    return int(np.exp(random.random() * np.log(most + 1)))


def mqar(random: np.random.Generator, length: int) -> tuple[str, Answers]:
    text, answers = ["."] * length, []
    for key in random.permutation(list(ascii_uppercase))[:KEYS]:
        pair, last = (key, ascii_lowercase[random.integers(26)]), None
        place = int(random.integers(length // 2))
        while place < length - 1:
            if text[place : place + 2] == [".", "."]:
                text[place : place + 2] = pair
                if last is not None:
                    answers.append((place + 1, place - last))
                last = place
            place += 1 + log_uniform(random, length)
    return "".join(text), answers


def flipflop(random: np.random.Generator, length: int) -> tuple[str, Answers]:
    text, answers = "", []
    while (room := (length - len(text)) // 2 - 1) > 0:
        bit, ignored = random.integers(2), random.integers(2, size=log_uniform(random, room) - 1)
        text += f"w{bit}" + "".join(f"i{other}" for other in ignored) + f"r{bit}"
        answers.append((len(text) - 1, 2 * len(ignored) + 2))
    return text.ljust(length, "."), answers


def copy(random: np.random.Generator, length: int) -> tuple[str, Answers]:
    text, answers = "", []
    while (room := (length - len(text)) // 2 - 1) > 0:
        letters = random.integers(len(ascii_letters), size=log_uniform(random, room))
        string = "".join(ascii_letters[letter] for letter in letters)
        text += f"{string}|{string}\n"
        end, size = len(text) - 1, len(string)
        answers += [(place, size + 1) for place in range(end - size, end)]
    return text.ljust(length, "."), answers


TASKS: dict[str, Callable[[np.random.Generator, int], tuple[str, Answers]]]
TASKS = {"mqar": mqar, "flipflop": flipflop, "copy": copy}
PASSKEY = "passkey"


class Asked(NamedTuple):
    tokens: np.ndarray  # (length + 1,): the inputs, and the last one's successor
    answers: Answers


def ask(task: str, tokeniser: Tokeniser, length: int, number: int, seed: int) -> Asked:
    """A sequence of the task for an evaluation, the same for every model of one tokeniser."""
    if task == PASSKEY:
        return _passkey(tokeniser, length, number, seed)
    if tokeniser.name != "bytes":
        raise UserError(f"the task {task!r} is one of bytes, the model reads {tokeniser.name!r}")
    _refuse_short(task, length)
    text, answers = TASKS[task](np.random.default_rng([seed, length, number]), length)
    tokens = np.concatenate(([tokeniser.eot], tokeniser.encode(text)))
    return Asked(tokens, [(place + 1, distance) for place, distance in answers])


def _refuse_short(task: str, length: int) -> None:
    if length < SHORTEST:
        raise UserError(f"length {length} is too short for {task!r}; use at least {SHORTEST}")


def _passkey(tokeniser: Tokeniser, length: int, number: int, seed: int) -> Asked:
    prompt = make_prompt(tokeniser, length, number, seed)
    answer = tokeniser.encode(f" {prompt.key}")
    seen = np.lib.stride_tricks.sliding_window_view(prompt.tokens, len(answer)) == answer
    begin, said = len(prompt.tokens), int(np.flatnonzero(seen.all(1))[-1])
    rest = np.resize(tokeniser.encode("\n"), length + 1 - begin - len(answer))
    # In bytes the blank before the digits is no part of the key.
    places = range(begin + (tokeniser.name == "bytes"), begin + len(answer))
    tokens = np.concatenate((prompt.tokens, answer, rest))
    return Asked(tokens, [(place, begin - said) for place in places])


class TaskSource(NumberedSource):
    """A corpus of a task: with its end-of-text token, each document fills `length` tokens."""

    DOCUMENTS, VALIDATION = 40_000, 1_000

    def __init__(self, task: str, length: int):
        _refuse_short(task, length)
        self._make, self._length = TASKS[task], length
        known = {"documents": self.DOCUMENTS, "seed": self.SEED, "length": length}
        super().__init__({"kind": task, **known}, self.DOCUMENTS, self.VALIDATION)

    def document(self, number: int) -> str:
        return self._make(np.random.default_rng([self.SEED, number]), self._length - 1)[0]
