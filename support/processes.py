"""Runs a function in a few processes at a time, which end with their parent."""

import collections
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tqdm import tqdm

from lssar.errors import UserError

# Its monitor's thread could take a Ctrl-C that `block_sigint_in_children` holds back.
tqdm.monitor_interval = 0


def in_processes(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """Yield the function's results in order; only a few tasks per worker are in memory."""
    # Spawned, not forked: threads of pyarrow and the hub's client are running here by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    waiting = collections.deque()
    try:
        for task in tasks:
            with block_sigint_in_children():
                waiting.append(pool.submit(function, task))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died (out of memory?); "
            "rerun the same command to continue, perhaps with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it: a killed one cannot stop its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


@contextlib.contextmanager
def block_sigint_in_children() -> Iterator[None]:
    """Start processes that never see Ctrl-C; the parent sees it after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
