"""Work for a few processes at a time, in order, that ends with its parent."""

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

# Its monitor's thread could take a Ctrl-C that the main thread holds back (`deaf_children`).
tqdm.monitor_interval = 0


def in_processes(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """The function's result for each task, in order; only a few tasks per worker are in memory."""
    # Spawned, not forked: threads of pyarrow and the hub's client are running here by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    waiting = collections.deque()
    try:
        for task in tasks:
            with deaf_children():
                waiting.append(pool.submit(function, task))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        again = "rerun the same command to continue, perhaps with fewer --workers"
        raise UserError(f"a worker process died (out of memory?); {again}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle, and a worker whose parent was killed must not linger."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started in this block never see Ctrl-C; the parent sees it after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
