"""Tasks whose answers stand at a known distance: MQAR, flip-flop, copy, and passkey prompts.

    mqar      keys with their values, asked for again and again:         0a2n1h0a....1h3t..2n0a3t1h
    flipflop  write a bit, ignore others, read it (Liu et al., 2023):    Ioio?Ii?IOii?Oo?O
    copy      a string, again and again:                                 xkcd|xkcd|xkcd|xkcd|xk

What lies between is log-uniform up to the length of the sequence, so that a sequence of any length
is of the same kind: trained at L, a model can be asked at 16 L. The budgets are reduced ones: few
keys, one bit, small alphabets; the letter of a value tells its key, and a bit that was written
differs from one to be ignored, so that one lookup finds the answer. Two thirds of a corpus keep to
shorter distances, where answers are frequent: retrieval is learned there first. Passkey prompts
are those of `passkey.py`, for bytes in their short form.
"""

from collections.abc import Callable
from string import ascii_letters
from typing import NamedTuple

import numpy as np

from data.passkey_text import PAPER, SHORT, make_prompt
from data.sources import NumberedSource
from data.tokeniser import Tokeniser
from lssar.errors import UserError

# Of MQAR: keys, letters that can be the value of one key and of no other, and questions in a row.
KEYS, VALUES, BLOCK = 8, 6, 4
SHORTEST = 64  # room for each key and some of its questions
Answers = list[tuple[int, int]]  # (place, distance to the token that says it)


def log_uniform(random: np.random.Generator, most: int) -> int:
    """1 ... most, each octave as likely as another."""
    return int(np.exp(random.random() * np.log(most + 1)))


def mqar(random: np.random.Generator, length: int, longest: int) -> tuple[str, Answers]:
    own = [ascii_letters[VALUES * key : VALUES * (key + 1)] for key in range(KEYS)]
    values = [random.choice(list(letters)) for letters in own]
    text, answers, last = "", [], {}
    while (room := length - len(text) - 2 * BLOCK + 1) > 0:
        for key in random.integers(KEYS, size=BLOCK):
            if key in last:
                answers.append((len(text) + 1, len(text) - last[key]))
            last[key] = len(text)
            text += f"{key}{values[key]}"
        text += "." * (log_uniform(random, min(longest, room)) - 1)
    return text.ljust(length, "."), answers


def flipflop(random: np.random.Generator, length: int, longest: int) -> tuple[str, Answers]:
    bit = random.choice(list("IO"))
    text, answers = bit, []
    while (room := min(longest, length - len(text)) - 1) > 0:
        ignored = random.choice(list("io"), log_uniform(random, room) - 1)
        text += "".join(ignored)
        if random.integers(2):
            answers.append((len(text) + 1, len(ignored) + 2))
            text += f"?{bit}"
        else:
            bit = random.choice(list("IO"))
            text += bit
    return text.ljust(length, "."), answers


def copy(random: np.random.Generator, length: int, longest: int) -> tuple[str, Answers]:
    letters = random.choice(list(ascii_letters), log_uniform(random, longest // 2 - 1))
    string, distance = "".join(letters) + "|", len(letters) + 1
    answers = [(place, distance) for place in range(distance, length) if (place + 1) % distance]
    return (string * length)[:length], answers


TASKS: dict[str, Callable[[np.random.Generator, int, int], tuple[str, Answers]]]
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
    text, answers = TASKS[task](np.random.default_rng([seed, length, number]), length, length)
    tokens = np.concatenate(([tokeniser.eot], tokeniser.encode(text)))
    return Asked(tokens, [(place + 1, distance) for place, distance in answers])


def _refuse_short(task: str, length: int) -> None:
    if length < SHORTEST:
        raise UserError(f"length {length} is too short for {task!r}; use at least {SHORTEST}")


def _passkey(tokeniser: Tokeniser, length: int, number: int, seed: int) -> Asked:
    form = SHORT if tokeniser.name == "bytes" else PAPER  # what such models are trained on
    prompt = make_prompt(tokeniser, length, number, seed, form)
    answer = tokeniser.encode(f" {prompt.key}")
    seen = np.lib.stride_tricks.sliding_window_view(prompt.tokens, len(answer)) == answer
    begin, said = len(prompt.tokens), int(np.flatnonzero(seen.all(1))[-1])
    rest = np.resize(tokeniser.encode("\n"), length + 1 - begin - len(answer))
    # In bytes the blank before the letter is no part of the key.
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
        random, length = np.random.default_rng([self.SEED, number]), self._length - 1
        longest = 4 * log_uniform(random, length // 4) if number % 3 else length
        return self._make(random, length, longest)[0]
