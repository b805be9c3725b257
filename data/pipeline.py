"""Source -> chunks of text -> worker processes -> tokens, in order and in bounded memory.

A chunk carries the source's state before it, so that the writer can always name a place to
continue from. What a chunk encodes to depends on nothing but its text.
"""

import collections
import functools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from data.tokeniser import get_tokeniser
from errors import UserError

CHUNK_CHARS = 1_000_000
# Compared with tiktoken in every chunk before the fast encoder may do the rest of it.
SAMPLE_CHARS = 8_192
# Nothing in GPT-2's pattern joins a non-blank to a following blank, nor looks behind, so a text
# may be cut there without changing its tokens.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
# A source yields pieces of documents, (text, starts a document), or this between its splits.
Piece = tuple[str, bool]
END_OF_VALIDATION = None


@dataclass(frozen=True)
class Chunk:
    """About a megabyte of consecutive pieces, and the source's state before the first."""

    pieces: list[Piece]
    state: object
    ends_validation: bool = False


def chunks(source, state: object) -> Iterator[Chunk]:
    """Group the source's pieces from `state` on."""
    pieces, size = [], 0
    for piece in source.pieces(state):
        if piece is not END_OF_VALIDATION:
            pieces.append(piece)
            size += len(piece[0])
        if piece is END_OF_VALIDATION or size >= CHUNK_CHARS:
            yield Chunk(pieces, state, ends_validation=piece is END_OF_VALIDATION)
            pieces, size, state = [], 0, source.state()
    if pieces:
        yield Chunk(pieces, state)


def cut_safely(text: str, *, limit: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a long text into parts of about `limit` characters that encode to the same tokens."""
    while len(text) > limit:
        cut = SAFE_CUT.search(text, limit - 1)
        if cut is None:
            break
        yield text[: cut.end()]
        text = text[cut.end() :]
    yield text


class ChunkEncoder:
    """Pieces -> one uint16 array, EOT before each document; says whether it could go fast."""

    def __init__(self, tokeniser: str, fast: bool = True):
        self._tokeniser = get_tokeniser(tokeniser)
        self._fast = self._tokeniser.fast_encoder() if fast else None

    def __call__(self, pieces: list[Piece]) -> tuple[np.ndarray, bool]:
        encode = self._tokeniser.encode
        agrees = self._fast is None or self._fast_agrees(pieces)
        if agrees and self._fast is not None:
            encode = self._fast
        eot = np.array([self._tokeniser.eot], dtype=np.uint16)
        parts = [eot[:0]]
        for text, starts in pieces:
            if starts:
                parts.append(eot)
            parts += [encode(part) for part in cut_safely(text)]
        return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), agrees

    def _fast_agrees(self, pieces: list[Piece]) -> bool:
        share = SAMPLE_CHARS // max(1, min(len(pieces), 8))
        step = max(1, len(pieces) // 8)
        samples = (text[:share] for text, _ in pieces[::step])
        return all(np.array_equal(self._fast(s), self._tokeniser.encode(s)) for s in samples)


@functools.cache
def _encoder_of_this_process(tokeniser: str, fast: bool) -> ChunkEncoder:
    return ChunkEncoder(tokeniser, fast)


def _encode_in_worker(tokeniser: str, fast: bool, pieces: list[Piece]) -> tuple[np.ndarray, bool]:
    return _encoder_of_this_process(tokeniser, fast)(pieces)


def start_worker() -> None:
    """Ctrl-C is the parent's to handle, and a worker whose parent was killed must not linger."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encoded(
    stream: Iterable[Chunk], tokeniser: str, workers: int, *, fast: bool = True
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """(chunk, its tokens) in order. With 0 workers in this process, otherwise in that many."""
    warn = _Warning()
    if workers == 0:
        encoder = ChunkEncoder(tokeniser, fast)
        for chunk in stream:
            yield chunk, warn(encoder(chunk.pieces))
        return
    get_tokeniser(tokeniser)  # a missing vocabulary is reported here, once, not by every worker
    # Spawned, not forked: threads of pyarrow and the hub's client are running here by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    try:
        submit = functools.partial(pool.submit, _encode_in_worker, tokeniser, fast)
        for chunk, future in _in_order(stream, submit, limit=2 * workers + 1):
            yield chunk, warn(future.result())
    except BrokenProcessPool:
        raise UserError(
            "a tokeniser process died (out of memory?); run the same command again, perhaps with "
            "fewer --workers: it continues where it stopped"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    stream: Iterable[Chunk], submit: Callable[[list[Piece]], Future], limit: int
) -> Iterator[tuple[Chunk, Future]]:
    """Keep `limit` chunks under way: enough for every worker, no more in memory."""
    waiting = collections.deque()
    for chunk in stream:
        waiting.append((chunk, submit(chunk.pieces)))
        if len(waiting) >= limit:
            yield waiting.popleft()
    yield from waiting


class _Warning:
    """Unwraps an encoder's answer and tells the user, once, that the fast encoder was dropped."""

    def __init__(self):
        self._told = False

    def __call__(self, answer: tuple[np.ndarray, bool]) -> np.ndarray:
        tokens, agrees = answer
        if not agrees and not self._told:
            self._told = True
            print("note: splintr differs from tiktoken on this text; tiktoken is used instead")
        return tokens
