"""Makes tasks whose answers stand at a known distance: MQAR, flip-flop, copy, passkey prompts.

    mqar      keys with their values, asked for again and again:         0a2n1h0a....1h3t..2n0a3t1h
    flipflop  write a bit, ignore others, read it (Liu et al., 2023):    Ioio?Ii?IOii?Oo?O
    copy      a string, again and again:                                 xkcd|xkcd|xkcd|xkcd|xk
    passkey   a key in a long text (Mohtashami and Jaggi, 2023), for bytes in a short form

The distance is log-uniform up to the length of the sequence, so that sequences of any length are of
the same kind: trained at L, a model can be asked at 16 L. The tasks are small ones: few keys, one
bit, small alphabets. The letter of a value tells its key, and a bit that was written differs from
one to be ignored, so that one lookup finds the answer. Two thirds of a corpus keep to shorter
distances, where answers are frequent: retrieval is learned there first.
"""

from collections.abc import Callable, Sequence
from functools import cache
from string import ascii_letters
from typing import NamedTuple

import numpy as np

from data.sources import NumberedSource
from data.tokeniser import Tokeniser, get_tokeniser
from lssar.errors import UserError

# MQAR has eight keys. Six letters can be the value of one key, and belong to no other key.
KEYS = 8
VALUES = 6
BLOCK = 4  # questions in a row
SHORTEST = 64  # characters: room for each key and some of its questions
Answers = list[tuple[int, int]]  # (place, distance to the earlier token that gives the answer)


def log_uniform(random: np.random.Generator, most: int) -> int:
    """Draw a number from 1 to `most`, each octave as likely as another."""
    return int(np.exp(random.random() * np.log(most + 1)))


def mqar(random: np.random.Generator, length: int, longest: int) -> tuple[str, Answers]:
    """Make keys with their values, asked for again and again."""
    alphabets = [ascii_letters[VALUES * key : VALUES * (key + 1)] for key in range(KEYS)]
    values = [random.choice(list(letters)) for letters in alphabets]
    text = ""
    answers = []
    last = {}  # key -> place of its last mention
    while (room := length - len(text) - 2 * BLOCK + 1) > 0:
        for key in random.integers(KEYS, size=BLOCK):
            if key in last:
                answers.append((len(text) + 1, len(text) - last[key]))
            last[key] = len(text)
            text += f"{key}{values[key]}"
        text += "." * (log_uniform(random, min(longest, room)) - 1)
    return text.ljust(length, "."), answers


def flipflop(random: np.random.Generator, length: int, longest: int) -> tuple[str, Answers]:
    """Write a bit, bits to ignore, and a question for the bit, again and again."""
    bit = random.choice(list("IO"))
    text = bit
    answers = []
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
    """Repeat a random string to the end."""
    letters = random.choice(list(ascii_letters), log_uniform(random, longest // 2 - 1))
    string = "".join(letters) + "|"
    distance = len(string)
    answers = [(place, distance) for place in range(distance, length) if (place + 1) % distance]
    return (string * length)[:length], answers


class Task(NamedTuple):
    """Holds a task whose answers stand at a known distance."""

    make: Callable[[np.random.Generator, int, int], tuple[str, Answers]]
    choices: int  # possible answers to a question


TASKS = {
    "mqar": Task(mqar, VALUES),
    "flipflop": Task(flipflop, 2),
    "copy": Task(copy, len(ascii_letters)),
}
PASSKEY = "passkey"


class Form(NamedTuple):
    """Holds the words of a passkey prompt."""

    task: str
    key_line: str
    question: str
    keys: Sequence[int | str]  # to draw from


PAPER = Form(
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n",
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "What is the pass key? The pass key is",
    range(1, 50001),
)
# The paper's prompt has 265 bytes without filler, and a small model takes thousands of steps to
# copy a number of several bytes in order. A key here is a letter that occurs nowhere else in it.
SHORT = Form("", "The key is {key}. Remember {key}.", "Key? The key is", "ABCDEFGIJLMNOPQSUVWXYZ")
FORMS = {"paper": PAPER, "short": SHORT}
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST_PROMPT = 2**24  # tokens; building a longer one takes more than a moment
ANSWER_TOKENS = 10


class Prompt(NamedTuple):
    tokens: np.ndarray  # (length - ANSWER_TOKENS,)
    key: str
    depth: float  # share of the filler that stands before the key
    distance: int  # tokens from the last mention of the key to the answer


def draw_key(random: np.random.Generator, form: Form) -> str:
    """Draw one of the keys of a form."""
    return str(form.keys[random.integers(len(form.keys))])


def make_prompt(tokeniser: Tokeniser, length: int, trial: int, seed: int, form=PAPER) -> Prompt:
    """Make the prompt of one trial, which fills `length` tokens with its answer."""
    if not 0 < length <= LONGEST_PROMPT:
        raise UserError(f"length {length} is not in 1..{LONGEST_PROMPT}, the lengths of a prompt")
    if seed < 0:
        raise UserError(f"--seed {seed} must be 0 or more")
    random = np.random.default_rng([seed, length, trial])
    key = draw_key(random, form)
    depth = random.random()
    line = form.key_line.format(key=key)
    head = tokeniser.encode(form.task)
    middle = tokeniser.encode(f"\n{line}\n")
    tail = tokeniser.encode(f"\n{form.question}")
    room = length - ANSWER_TOKENS - len(head) - len(middle) - len(tail)
    if room < 2:  # a token of filler on each side, or two newlines would meet and merge in BPE
        raise UserError(
            f"length {length} is no larger than the passkey prompt with key {key}, which takes "
            f"{length - room}; use at least {shortest_length(tokeniser, form)} tokens of "
            f"{tokeniser.name!r}"
        )
    before = 1 + int(depth * (room - 1))
    filler = _filler(tokeniser.name, room)
    parts = (head, filler[:before], middle, filler[: room - before], tail)
    until_key = tokeniser.encode(f"\n{line[: line.rindex(key)].rstrip()}")
    distance = len(middle) - len(until_key) + room - before + len(tail)
    return Prompt(np.concatenate(parts), key, before / room, distance)


@cache
def _filler(tokeniser: str, tokens: int) -> np.ndarray:
    """Return this many tokens of the filler, repeated."""
    encode = get_tokeniser(tokeniser).encode
    return encode(" ".join([FILLER] * (tokens // len(encode(FILLER)) + 1)))[:tokens]


@cache
def shortest_length(tokeniser: Tokeniser, form: Form = PAPER) -> int:
    """Return the shortest length that holds a prompt with any key."""
    fixed = f"{form.task}\n{form.key_line.format(key=form.keys[-1])}\n\n{form.question}"
    longest_key = max(len(tokeniser.encode(f" {key}")) for key in form.keys)
    return len(tokeniser.encode(fixed)) + 2 * longest_key + ANSWER_TOKENS + 2


class Asked(NamedTuple):
    tokens: np.ndarray  # (length + 1,): the inputs, and the token after the last of them
    answers: Answers


def ask(task: str, tokeniser: Tokeniser, length: int, number: int, seed: int) -> Asked:
    """Make a sequence of the task to evaluate on, the same for every model of one tokeniser."""
    if task == PASSKEY:
        return _ask_passkey(tokeniser, length, number, seed)
    if tokeniser.name != "bytes":
        raise UserError(f"the task {task!r} is byte-level, but the model reads {tokeniser.name!r}")
    _refuse_short(task, length)
    random = np.random.default_rng([seed, length, number])
    text, answers = TASKS[task].make(random, length, length)
    tokens = np.concatenate(([tokeniser.eot], tokeniser.encode(text)))
    return Asked(tokens, [(place + 1, distance) for place, distance in answers])


def chance_accuracy(task: str, tokeniser: Tokeniser) -> float:
    """Return the share of answers that a guess among the possible answers gets right."""
    if task == PASSKEY:
        return 1 / len(passkey_form(tokeniser).keys)
    return 1 / TASKS[task].choices


def passkey_form(tokeniser: Tokeniser) -> Form:
    """Return the form of prompts that models of a tokeniser are trained on."""
    return SHORT if tokeniser.name == "bytes" else PAPER


def _refuse_short(task: str, length: int) -> None:
    if length < SHORTEST:
        raise UserError(f"length {length} is too short for {task!r}; use at least {SHORTEST}")


def _ask_passkey(tokeniser: Tokeniser, length: int, number: int, seed: int) -> Asked:
    in_bytes = tokeniser.name == "bytes"
    prompt = make_prompt(tokeniser, length, number, seed, passkey_form(tokeniser))
    begin = len(prompt.tokens)
    answer = tokeniser.encode(f" {prompt.key}")
    rest = np.resize(tokeniser.encode("\n"), length + 1 - begin - len(answer))
    # Among bytes, the blank before the letter is a token of its own and not scored.
    places = range(begin + in_bytes, begin + len(answer))
    tokens = np.concatenate((prompt.tokens, answer, rest))
    return Asked(tokens, [(place, prompt.distance) for place in places])


class TaskSource(NumberedSource):
    """Makes a corpus of a task; with its end-of-text token, each document has `length` tokens."""

    DOCUMENTS = 40_000
    VALIDATION = 1_000

    def __init__(self, task: str, length: int):
        _refuse_short(task, length)
        self._make = TASKS[task].make
        self._length = length
        about = {"kind": task, "documents": self.DOCUMENTS, "seed": self.SEED, "length": length}
        super().__init__(about, self.DOCUMENTS, self.VALIDATION)

    def document(self, number: int) -> str:
        """Make one document; of three, two keep to short distances."""
        random = np.random.default_rng([self.SEED, number])
        length = self._length - 1
        longest = 4 * log_uniform(random, length // 4) if number % 3 else length
        return self._make(random, length, longest)[0]


class PasskeySource(NumberedSource):
    """Makes documents that can only be predicted by retrieval.

    Half name their key ten times in a row. A quarter ask for it four times, a few words of filler
    apart. A quarter are whole prompts of the short form, of at most `longest` bytes. On whole
    prompts alone, where few bytes are keys, a small model never learns more than to guess them.
    """

    DOCUMENTS = 120_000
    VALIDATION = 2_400

    def __init__(self, longest: int = 128):
        self.tokeniser = get_tokeniser("bytes")
        self.longest = longest
        self.shortest = shortest_length(self.tokeniser, SHORT)
        if longest <= self.shortest:
            raise UserError(f"--longest {longest}: give more than {self.shortest} bytes")
        about = {
            "kind": PASSKEY,
            "keys": SHORT.keys,
            "documents": self.DOCUMENTS,
            "seed": self.SEED,
            "longest": longest,
        }
        super().__init__(about, self.DOCUMENTS, self.VALIDATION)

    def document(self, number: int) -> str:
        """Make one document; the kinds take turns by number."""
        random = np.random.default_rng([self.SEED, number])
        kind = number % 4
        key = draw_key(random, SHORT)
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
