"""Turns text into tokens: in chunks, by worker processes, in order and in bounded memory.

A chunk carries the source's state after it, so that the writer can always name a place to
continue from. The tokens of a chunk depend on nothing but its text.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data.tokeniser import get_tokeniser
from support.processes import in_processes

CHUNK_CHARS = 1_000_000
PART_CHARS = 16_384  # encoded at once
# Nothing in GPT-2's pattern joins a non-blank to a following blank, nor looks behind, so a text
# may be cut there without changing its tokens.
SAFE_CUT = re.compile(r"\S(?=[ \n])")


class Piece(NamedTuple):
    """Holds a document or a part of one."""

    text: str
    starts: bool = True  # a document
    validation: bool = False


class Chunk(NamedTuple):
    """Holds about a megabyte of pieces."""

    pieces: list[Piece]
    state: object = None  # of the source after them; None: it has ended
    skipped: dict | None = None  # what the source has left out so far


def chunks(source, state: object) -> Iterator[Chunk]:
    """Group the source's pieces from `state` on; the last chunk may be empty."""
    pieces = []
    size = 0
    skipped = getattr(source, "skipped", {})
    for group in source.pieces(state):
        pieces += group
        size += sum(len(piece.text) for piece in group)
        if size >= CHUNK_CHARS:
            yield Chunk(pieces, source.state(), dict(skipped))
            pieces = []
            size = 0
    yield Chunk(pieces, None, dict(skipped))


def cut_safely(text: str, *, limit: int) -> Iterator[str]:
    """Cut a long text into parts of about `limit` characters that encode to the same tokens."""
    start = 0
    while len(text) - start > limit and (cut := SAFE_CUT.search(text, start + limit - 1)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class Encoded(NamedTuple):
    tokens: np.ndarray  # validation first
    validation: int  # how many of the tokens are validation


def encode_pieces(tokeniser: str, pieces: list[Piece]) -> Encoded:
    """Return one uint16 array of the pieces, validation first, with EOT before each document."""
    exact = get_tokeniser(tokeniser)
    eot = np.array([exact.eot], dtype=np.uint16)
    arrays = [eot[:0]]
    validation = 0
    for piece in sorted(pieces, key=lambda piece: not piece.validation):
        added = [eot] if piece.starts else []
        added += [exact.encode(part) for part in cut_safely(piece.text, limit=PART_CHARS)]
        arrays += added
        if piece.validation:
            validation += sum(map(len, added))
    return Encoded(np.concatenate(arrays, dtype=np.uint16, casting="unsafe"), validation)


def encoded(
    stream: Iterable[Chunk], tokeniser: str, workers: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield the chunks and their tokens, in order, by `workers` processes; 0: in this one."""
    kept, given = itertools.tee(stream)
    pieces = (chunk.pieces for chunk in given)
    encode = functools.partial(encode_pieces, tokeniser)
    answers = in_processes(encode, pieces, workers) if workers else map(encode, pieces)
    yield from zip(kept, answers, strict=True)
