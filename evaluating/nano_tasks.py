"""Three small tasks from the held-out text of a corpus, for models too small for the paper's.

What they ask and how they are scored is in task_files/. Passages have up to 224 bytes, so that a
model trained at 128 reads beyond its training length. The same corpus gives the same documents.
"""

import json
import random
import re
from pathlib import Path

import numpy as np

from data.shards import open_split
from data.tokeniser import get_tokeniser
from lssar.errors import UserError
from support.files import write_json, write_text

PASSAGE = 224  # characters
NEAR = 32  # a name repeated within this distance does not test memory
LAST = 2  # letters of it that are asked for
COUNTS = {"nano_cloze": 400, "nano_continuation": 400, "nano_line": 100}
TEXT_TOKENS = 1 << 20
NAME = re.compile(r"(?<![A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_]{3,}")


def write_task(folder: Path, corpus: Path | None, name: str) -> Path:
    """Write a task's documents into `folder`; returns its YAML file."""
    if corpus is None:
        raise UserError(f"{name} is made from a corpus' held-out text; give --corpus DIR")
    documents = MAKERS[name](held_out_texts(corpus), random.Random(0), COUNTS[name])
    if not documents:
        raise UserError(f"{corpus}: its validation text is too short or too plain for {name}")
    file = folder / f"{name}.jsonl"
    write_text(file, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents))
    include = str(Path(__file__).parent / f"task_files/{name}.yaml")
    data = {"data_files": {"test": str(file.resolve())}}
    write_json(folder / f"{name}.yaml", {"include": include, "dataset_kwargs": data})
    return folder / f"{name}.yaml"


def held_out_texts(corpus: Path) -> list[str]:
    """The documents at the beginning of a corpus' validation set."""
    tokens = open_split(corpus, "val")
    tokeniser = get_tokeniser(tokens.tokeniser or "gpt2")
    ids = tokens.slice(0, min(tokens.total_tokens, TEXT_TOKENS))
    cuts = np.flatnonzero(ids == tokeniser.eot)
    return [tokeniser.decode(part[part != tokeniser.eot]) for part in np.split(ids, cuts)]


def cloze(texts: list[str], draw: random.Random, count: int) -> list[dict]:
    documents = []
    for text in texts:
        for match in NAME.finditer(text, PASSAGE):
            cut, name = match.end() - LAST, match[0]
            context = text[cut - PASSAGE : cut]
            earlier = context[: -NEAR - len(name)]
            if re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", earlier):
                documents.append({"context": context, "target": name[-LAST:]})
    return draw.sample(documents, min(count, len(documents)))


def continuation(texts: list[str], draw: random.Random, count: int) -> list[dict]:
    found = [
        # The newline belongs to the continuation: the harness moves whitespace there anyway.
        (text[match.start() + 1 - PASSAGE : match.start() + 1], "\n" + match[1])
        for text in texts
        for match in re.finditer(r"\S\n([^\n]{16,64})(?=\n)", text)
        if match.start() + 1 >= PASSAGE
    ]
    lines = sorted({line for _, line in found})
    documents = []
    for context, line in draw.sample(found, min(count, len(found)) if len(lines) > 3 else 0):
        others = draw.sample([other for other in lines if other != line], 3)
        label = draw.randrange(4)
        choices = [*others[:label], line, *others[label:]]
        documents.append({"context": context, "choices": choices, "label": label})
    return documents


def line_rest(texts: list[str], draw: random.Random, count: int) -> list[dict]:
    documents = []
    for text in texts:
        for match in re.finditer(r"\n([^\n]{16,48})(?=\n)", text):
            middle = match.start(1) + len(match[1]) // 2
            context = text[max(0, middle - PASSAGE + 32) : middle]
            target = text[middle : match.end()]
            if middle >= PASSAGE - 32 and re.search(r"[A-Za-z]{3}", target):
                documents.append({"context": context, "target": target})
    return draw.sample(documents, min(count, len(documents)))


MAKERS = {"nano_cloze": cloze, "nano_continuation": continuation, "nano_line": line_rest}
