"""Passkey prompts (Mohtashami and Jaggi, 2023), and a corpus of them to learn retrieval from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from data.sources import NumberedSource
from data.tokeniser import Tokeniser, get_tokeniser
from lssar.errors import UserError

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST = 2**24  # tokens of a prompt: what can be built in a moment
ANSWER_TOKENS = 10


class Form(NamedTuple):
    task: str
    key_line: str
    question: str
    keys: Sequence[int | str]  # to draw from


PAPER = Form(
    f"{TASK}\n",
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "What is the pass key? The pass key is",
    range(1, 50001),
)
# The paper's prompt has 265 bytes without filler, and a number of several bytes takes a small model
# thousands of steps to copy in order. A key here is one letter, of those that are nowhere else.
SHORT = Form("", "The key is {key}. Remember {key}.", "Key? The key is", "ABCDEFGIJLMNOPQSUVWXYZ")
FORMS = {"paper": PAPER, "short": SHORT}


@dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray  # (length - ANSWER_TOKENS,)
    key: str
    depth: float  # share of the filler that stands before the key
    distance: int  # tokens from the last mention of the key to the answer


def draw_key(random: np.random.Generator, form: Form) -> str:
    return str(form.keys[random.integers(len(form.keys))])


def make_prompt(tokeniser: Tokeniser, length: int, trial: int, seed: int, form=PAPER) -> Prompt:
    if not 0 < length <= LONGEST:
        raise UserError(f"length {length} is not in 1..{LONGEST}, what a prompt can be")
    if seed < 0:
        raise UserError(f"--seed {seed} must be 0 or more")
    random = np.random.default_rng([seed, length, trial])
    key, place = draw_key(random, form), random.random()
    line = form.key_line.format(key=key)
    head = tokeniser.encode(form.task)
    middle = tokeniser.encode(f"\n{line}\n")
    tail = tokeniser.encode(f"\n{form.question}")
    room = length - ANSWER_TOKENS - len(head) - len(middle) - len(tail)
    if room < 2:  # a token of filler on each side, or two newlines would meet and merge in BPE
        few = f"length {length} is no larger than the passkey prompt"
        least = f"use at least {shortest_length(tokeniser, form)} tokens of {tokeniser.name!r}"
        raise UserError(f"{few} with key {key}, which takes {length - room}; {least}")
    before = 1 + int(place * (room - 1))
    filler = _filler(tokeniser.name, room)
    parts = (head, filler[:before], middle, filler[: room - before], tail)
    until_key = tokeniser.encode(f"\n{line[: line.rindex(key)].rstrip()}")
    distance = len(middle) - len(until_key) + room - before + len(tail)
    return Prompt(np.concatenate(parts), key, before / room, distance)


@cache
def _filler(tokeniser: str, tokens: int) -> np.ndarray:
    encode = get_tokeniser(tokeniser).encode
    return encode(" ".join([FILLER] * (tokens // len(encode(FILLER)) + 1)))[:tokens]


def shortest_length(tokeniser: Tokeniser, form: Form = PAPER) -> int:
    """The shortest length that holds a prompt with any key."""
    fixed = f"{form.task}\n{form.key_line.format(key=form.keys[-1])}\n\n{form.question}"
    return len(tokeniser.encode(fixed)) + 2 * _longest_key(tokeniser, form) + ANSWER_TOKENS + 2


@cache
def _longest_key(tokeniser: Tokeniser, form: Form) -> int:
    return max(len(tokeniser.encode(f" {key}")) for key in form.keys)


class PasskeySource(NumberedSource):
    """Documents that can only be predicted by retrieval.

    Half name their key ten times in a row; a quarter ask for it four times, a few words of filler
    apart; a quarter are whole prompts of the short form, of at most `longest` bytes. On whole
    prompts alone, where few bytes are digits, a small model never learns more than to guess them.
    """

    DOCUMENTS, VALIDATION = 120_000, 2_400

    def __init__(self, longest: int = 128):
        self.tokeniser, self.longest = get_tokeniser("bytes"), longest
        self.shortest = shortest_length(self.tokeniser, SHORT)
        if longest <= self.shortest:
            raise UserError(f"--longest {longest}: give more than {self.shortest} bytes")
        known = {"documents": self.DOCUMENTS, "seed": self.SEED, "longest": longest}
        about = {"kind": "passkey", "keys": SHORT.keys, **known}
        super().__init__(about, self.DOCUMENTS, self.VALIDATION)

    def document(self, number: int) -> str:
        random = np.random.default_rng([self.SEED, number])
        kind, key = number % 4, draw_key(random, SHORT)
        line = SHORT.key_line.format(key=key)
        if kind < 2:
            return f"{line}{f' {key}.' * 8}\n"
        if kind == 2:
            fillers = [FILLER[:n] for n in random.integers(self.longest // 6, size=4)]
            asked = [f"\n{filler}\n{SHORT.question} {key}." for filler in fillers]
            return f"{line}{''.join(asked)}\n"
        length = int(random.integers(self.shortest, self.longest))
        prompt = make_prompt(self.tokeniser, length, number, self.SEED, SHORT)
        return f"{self.tokeniser.decode(prompt.tokens.tolist())} {prompt.key}.\n"
