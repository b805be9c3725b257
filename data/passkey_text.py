"""Passkey prompts (Mohtashami and Jaggi, 2023), and a corpus of them to learn retrieval from."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from data.pipeline import END_OF_VALIDATION
from data.sources import NumberedSource
from data.tokeniser import Tokeniser, get_tokeniser
from lssar.errors import UserError

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY_LINE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50000
LONGEST = 2**24  # tokens of a prompt: what can be built in a moment
ANSWER_TOKENS = 10


@dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray  # (length - ANSWER_TOKENS,)
    key: int
    depth: float  # share of the filler that stands before the key


def make_prompt(tokeniser: Tokeniser, length: int, trial: int, seed: int) -> Prompt:
    if not 0 < length <= LONGEST:
        raise UserError(f"length {length} is not in 1..{LONGEST}, what a prompt can be")
    if seed < 0:
        raise UserError(f"--seed {seed} must be 0 or more")
    random = np.random.default_rng([seed, length, trial])
    key, place = int(random.integers(1, LARGEST_KEY + 1)), random.random()
    head = tokeniser.encode(f"{TASK}\n")
    middle = tokeniser.encode(f"\n{KEY_LINE.format(key=key)}\n")
    tail = tokeniser.encode(f"\n{QUESTION}")
    room = length - ANSWER_TOKENS - len(head) - len(middle) - len(tail)
    if room < 2:  # a token of filler on each side, or two newlines would meet and merge in BPE
        raise UserError(
            f"length {length} is no larger than the passkey prompt: with key {key}, its answer and "
            f"no filler it takes {length - room} tokens of {tokeniser.name!r}; use at least "
            f"{shortest_length(tokeniser)}"
        )
    before = 1 + int(place * (room - 1))
    filler = _filler(tokeniser.name, room)
    parts = (head, filler[:before], middle, filler[: room - before], tail)
    return Prompt(np.concatenate(parts), key, before / room)


@cache
def _filler(tokeniser: str, tokens: int) -> np.ndarray:
    encode = get_tokeniser(tokeniser).encode
    return encode(" ".join([FILLER] * (tokens // len(encode(FILLER)) + 1)))[:tokens]


def shortest_length(tokeniser: Tokeniser) -> int:
    """The shortest length that holds a prompt with any key."""
    fixed = f"{TASK}\n\n{KEY_LINE.format(key=LARGEST_KEY)}\n\n{QUESTION}"
    longest_key = max(len(tokeniser.encode(f" {key}")) for key in (LARGEST_KEY, 48917, 39999))
    return len(tokeniser.encode(fixed)) + 2 * longest_key + ANSWER_TOKENS + 2


class PasskeySource(NumberedSource):
    """Documents that can only be predicted by retrieval.

    Half are the key line alone, which names its key twice; a quarter ask for the key after at most
    a sentence of filler; a quarter are whole prompts of up to `LONGEST` bytes. On whole prompts
    alone, where few bytes are digits, a small model never learns more than to guess them.
    """

    prefix = "passkey"
    DOCUMENTS, VALIDATION, SHORTEST, LONGEST = 60_000, 1_200, 290, 384
    SEED = 2**31  # not one that an evaluation would take
    count = DOCUMENTS + 1
    description: ClassVar = {"kind": "passkey", "documents": DOCUMENTS, "seed": SEED}

    def document(self, number: int) -> str | None:
        if number == self.VALIDATION:
            return END_OF_VALIDATION
        random = np.random.default_rng([self.SEED, number])
        kind, key = number % 4, int(random.integers(1, LARGEST_KEY + 1))
        if kind < 2:
            return KEY_LINE.format(key=key) + "\n"
        if kind == 2:
            filler = FILLER[: int(random.integers(len(FILLER)))]
            return f"{KEY_LINE.format(key=key)}\n{filler}\n{QUESTION} {key}.\n"
        tokeniser = get_tokeniser("bytes")
        length = int(random.integers(self.SHORTEST, self.LONGEST))
        prompt = make_prompt(tokeniser, length, number, self.SEED)
        return f"{tokeniser.decode(prompt.tokens.tolist())} {prompt.key}.\n"
