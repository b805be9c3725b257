"""Tokens per CPU-second, ours against the llm.c / nanoGPT way: `python benchmark.py tokenise`.

The same documents (the standard library's sources in pieces of a web page's size) go through a
process pool with `encode_ordinary` and Python lists, one document at a time; through our pipeline
with tiktoken alone; and through our pipeline as it runs, with splintr where that is installed. CPU
time is user + system time of all processes, their start included. All must give the same tokens.
"""

import hashlib
import importlib.util
import multiprocessing
import os
import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from data.pipeline import Piece, chunks, encoded
from data.tokeniser import get_tokeniser
from lssar.errors import UserError

DOCUMENT_CHARS = 3_000


def documents(megabytes: float) -> list[str]:
    """Up to that much text in documents, each of them once."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [text[i : i + DOCUMENT_CHARS] for i in range(0, len(text), DOCUMENT_CHARS)]
    if not found:
        raise UserError(f"no Python sources in {root} to measure with")
    return found[: max(1, int(megabytes * 1e6 / DOCUMENT_CHARS))]


def one_document(text: str) -> np.ndarray:
    tokeniser = get_tokeniser("gpt2")
    array = np.array([tokeniser.eot, *tokeniser._bpe.encode_ordinary(text)])
    if not ((array >= 0).all() and (array < 2**16).all()):
        raise ValueError("token outside uint16")
    return array.astype(np.uint16)


def usual_way(texts: list[str], workers: int) -> Iterator[np.ndarray]:
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(one_document, texts, chunksize=16)
        pool.close()
        pool.join()


def our_way(texts: list[str], workers: int, fast: bool) -> Iterator[np.ndarray]:
    pieces = [[Piece(text)] for text in texts]
    source = SimpleNamespace(pieces=lambda state: pieces, state=lambda: None)
    for _, answer in encoded(chunks(source, None), "gpt2", workers, fast=fast):
        yield answer.tokens


def main(options: Namespace) -> int:
    texts, workers = documents(options.megabytes), options.workers
    get_tokeniser("gpt2")  # loads the vocabulary before anything is timed
    ways = {"llm.c / nanoGPT way": usual_way(texts, workers)}
    ways["ours, tiktoken alone"] = our_way(texts, workers, fast=False)
    if importlib.util.find_spec("splintr"):
        ways["ours, with splintr"] = our_way(texts, workers, fast=True)
    size = sum(map(len, texts)) / 1e6
    print(f"{len(texts)} documents, {size:.1f} million characters, {workers} processes")
    baseline, digests = None, set()
    for name, arrays in ways.items():
        digest, count = hashlib.sha256(), 0
        cpu, wall = sum(os.times()[:4]), time.perf_counter()  # with that of child processes
        for tokens in arrays:  # generators: nothing is computed before
            digest.update(tokens)
            count += len(tokens)
        cpu, wall = sum(os.times()[:4]) - cpu, time.perf_counter() - wall
        digests.add(digest.hexdigest())
        baseline = baseline or count / cpu
        speed = f"{count / cpu / 1e6:6.2f} M tokens per CPU-second, {count / cpu / baseline:5.2f}x"
        print(f"{name:22} {speed} ({count:,} tokens, {cpu:.1f} CPU-s, {wall:.1f} s)")
    print("all token streams identical" if len(digests) == 1 else "TOKEN STREAMS DIFFER")
    return int(len(digests) != 1)
