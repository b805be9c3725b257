"""Source -> chunks of text -> worker processes -> tokens, in order and in bounded memory.

A chunk carries the source's state after it, so that the writer can always name a place to
continue from. What a chunk encodes to depends on nothing but its text.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data.tokeniser import Tokeniser, get_tokeniser
from support.processes import in_processes

CHUNK_CHARS = 1_000_000
PART_CHARS = 16_384  # what the fast encoder is given at once
ONE_IN = 16  # of these parts, and at least one per chunk, is compared with tiktoken's ids
# Nothing in GPT-2's pattern joins a non-blank to a following blank, nor looks behind, so a text
# may be cut there without changing its tokens.
SAFE_CUT = re.compile(r"\S(?=[ \n])")


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    starts: bool = True  # a document
    validation: bool = False


class Chunk(NamedTuple):
    """About a megabyte of pieces."""

    pieces: list[Piece]
    state: object = None  # of the source after them; None: it has ended
    skipped: dict | None = None  # what the source has left out so far


def chunks(source, state: object) -> Iterator[Chunk]:
    """Group the source's pieces from `state` on; the last chunk may be empty."""
    pieces, size, skipped = [], 0, getattr(source, "skipped", {})
    for group in source.pieces(state):
        pieces += group
        size += sum(len(piece.text) for piece in group)
        if size >= CHUNK_CHARS:
            yield Chunk(pieces, source.state(), dict(skipped))
            pieces, size = [], 0
    yield Chunk(pieces, None, dict(skipped))


def cut_safely(text: str, *, limit: int) -> Iterator[str]:
    """Cut a long text into parts of about `limit` characters that encode to the same tokens."""
    start = 0
    while len(text) - start > limit and (cut := SAFE_CUT.search(text, start + limit - 1)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class Encoded(NamedTuple):
    tokens: np.ndarray
    validation: int  # so many of the tokens, the first
    encoder: str  # name and version of what made them
    dropped: bool  # the fast encoder, because it differed


def encode_pieces(tokeniser: str, fast: bool, pieces: list[Piece]) -> Encoded:
    """One uint16 array of the pieces, those of validation first, with EOT before each document.

    What the fast encoder returns is used when all of it decodes to the text, to the byte, and one
    part in sixteen has tiktoken's ids; otherwise tiktoken encodes the chunk. Decoding shows that
    no text was lost or changed; that the merges are the same rests on the parts compared.
    """
    exact = get_tokeniser(tokeniser)
    quick = exact.fast_encoder if fast else None
    parts = [
        piece._replace(text=text, starts=piece.starts and number == 0)
        for piece in sorted(pieces, key=lambda piece: not piece.validation)
        for number, text in enumerate(cut_safely(piece.text, limit=PART_CHARS))
    ]
    texts = [part.text for part in parts]
    found = quick and _fast_ids(quick.encode, exact, texts)
    dropped = quick is not None and found is None
    eot, validation = np.array([exact.eot], dtype=np.uint16), 0
    arrays = [eot[:0]]
    for part, ids in zip(parts, found or map(exact.encode, texts), strict=True):
        arrays += [eot, ids] if part.starts else [ids]
        validation += (part.starts + len(ids)) * part.validation
    tokens = np.concatenate(arrays, dtype=np.uint16, casting="unsafe")
    used = exact.encoder_name if found is None else quick.name
    return Encoded(tokens, validation, used, dropped)


def _fast_ids(encode: Callable, exact: Tokeniser, texts: list[str]) -> list[np.ndarray] | None:
    """The ids of every part; None when they are not tiktoken's."""
    try:
        ids = [encode(text) for text in texts]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of Rust is no Exception
        return None
    if not all(map(exact.spells, ids, texts)):
        return None
    # Where to begin depends on nothing but the text, and is not the same place in every chunk.
    seed = zlib.crc32("".join(texts[:1]).encode(errors="replace"))
    compared = range(seed % max(1, min(ONE_IN, len(texts))), len(texts), ONE_IN)
    same = (np.array_equal(ids[i], exact.encode(texts[i])) for i in compared)
    return ids if all(same) else None


def encoded(
    stream: Iterable[Chunk], tokeniser: str, workers: int, *, fast: bool = True
) -> Iterator[tuple[Chunk, Encoded]]:
    """The chunks and what they encode to, in order, by `workers` processes; 0: in this one."""
    kept, given = itertools.tee(stream)
    pieces, told = (chunk.pieces for chunk in given), False
    encode = functools.partial(encode_pieces, tokeniser, fast)
    answers = in_processes(encode, pieces, workers) if workers else map(encode, pieces)
    for chunk, answer in zip(kept, answers, strict=True):
        if answer.dropped and not told:
            told = True
            print("note: splintr fails or differs from tiktoken here; tiktoken is used instead")
        yield chunk, answer
