"""Tokens per CPU-second, ours against the llm.c / nanoGPT way: `python benchmark.py tokenise`.

The same documents (the standard library's sources in pieces of a web page's size) go through
each: a process pool with `encode_ordinary` and Python lists a document at a time, our pipeline
with tiktoken alone, and our pipeline as it runs, with splintr where that is installed. The CPU
time is user + system time of all processes, their start included. All must give the same tokens.
"""

import hashlib
import importlib.util
import itertools
import multiprocessing
import resource
import sysconfig
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data.pipeline import Chunk, chunks, encoded
from data.tokeniser import get_tokeniser
from lssar.errors import UserError

DOCUMENT_CHARS = 3_000


def documents(megabytes: float) -> list[str]:
    """Up to that much text, in documents, never the same twice."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    cut = (
        text[start : start + DOCUMENT_CHARS]
        for text in texts
        for start in range(0, len(text), DOCUMENT_CHARS)
    )
    found = list(itertools.islice(cut, max(1, int(megabytes * 1e6 / DOCUMENT_CHARS))))
    if not found:
        raise UserError(f"no Python sources in {root} to measure with")
    return found


def _one_document(text: str) -> np.ndarray:
    tokeniser = get_tokeniser("gpt2")
    ids = [tokeniser.eot]
    ids.extend(tokeniser._bpe.encode_ordinary(text))
    array = np.array(ids)
    if not ((array >= 0).all() and (array < 2**16).all()):
        raise ValueError("token outside uint16")
    return array.astype(np.uint16)


def usual_way(texts: list[str], workers: int) -> Iterator[np.ndarray]:
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(_one_document, texts, chunksize=16)
        pool.close()
        pool.join()


class _List:
    """A source over a list, for the pipeline."""

    def __init__(self, texts: list[str]):
        self._texts = texts

    def pieces(self, state: None):
        return ((text, True) for text in self._texts)

    def state(self) -> None:
        return None


def our_way(texts: list[str], workers: int, fast: bool) -> Iterator[np.ndarray]:
    stream: Iterator[Chunk] = chunks(_List(texts), None)
    return (tokens for _, tokens, _ in encoded(stream, "gpt2", workers, fast=fast))


def cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(run: Callable[[], Iterator[np.ndarray]]) -> tuple[int, float, float, str]:
    """Tokens, CPU-seconds, seconds, and a digest of the tokens."""
    digest, count = hashlib.sha256(), 0
    cpu, wall = cpu_seconds(), time.perf_counter()
    for tokens in run():
        digest.update(tokens)
        count += len(tokens)
    return count, cpu_seconds() - cpu, time.perf_counter() - wall, digest.hexdigest()


def main(options: Namespace) -> int:
    texts, workers = documents(options.megabytes), options.workers
    get_tokeniser("gpt2")
    ways = {
        "llm.c / nanoGPT way": lambda: usual_way(texts, workers),
        "ours, tiktoken alone": lambda: our_way(texts, workers, fast=False),
    }
    if importlib.util.find_spec("splintr"):
        ways["ours, with splintr"] = lambda: our_way(texts, workers, fast=True)
    size = sum(map(len, texts)) / 1e6
    print(f"{len(texts)} documents, {size:.1f} million characters, {workers} processes")
    baseline, digests = None, set()
    for name, run in ways.items():
        tokens, cpu, wall, digest = measure(run)
        digests.add(digest)
        rate = tokens / cpu
        baseline = baseline or rate
        print(
            f"{name:22} {rate / 1e6:6.2f} M tokens per CPU-second, {rate / baseline:5.2f}x "
            f"({tokens:,} tokens, {cpu:.1f} CPU-s, {wall:.1f} s)"
        )
    print("all token streams identical" if len(digests) == 1 else "TOKEN STREAMS DIFFER")
    return int(len(digests) != 1)
