"""Real processes to attack: forked after the imports, which cost seconds, and before any thread.

A forked child runs a script's own `main` as `python SCRIPT` would and can be killed like any other
process; nothing of torch's threads exists in the parent, so nothing of them is inherited.
"""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from lssar.errors import UserError

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
PATIENCE = 900.0  # seconds until a child counts as hanging


class Child:
    """Fork `main(argv)`, its output in a file."""

    def __init__(self, main: Callable, argv: list[str], log: Path, before: Callable = lambda: None):
        self.log, self.code, self.cpu = log, None, 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with(parent)
            _be(main, argv, log, before)

    def poll(self) -> int | None:
        """Return the exit code, -9 when killed; None while it runs."""
        if self.code is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            self.cpu = used.ru_utime + used.ru_stime
        return self.code

    def cpu_so_far(self) -> float:
        """Return seconds of computing, which mean the same on a loaded machine."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError):
            return self.cpu

    def wait(self, seconds: float = PATIENCE) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"hung for {seconds} s: {self.shown()}")
            time.sleep(0.01)
        return code

    def kill(self) -> bool:
        """Send kill -9; return False when it had ended by itself."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def shown(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _be(main: Callable, argv: list[str], log: Path, before: Callable) -> None:
    """Be the child: exit with the codes of a command, without the parent's exit handlers."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - a test may have replaced them
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        # tqdm's own is shared between forked processes, and one that is killed never gives it back.
        tqdm.set_lock(threading.RLock())
        before()
        code = main(argv) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def finished(main: Callable, argv: list[str], log: Path, before: Callable = lambda: None) -> Child:
    """Run to the end; it must succeed."""
    child = Child(main, argv, log, before)
    code = child.wait()
    assert code == 0, f"exit code {code}: {child.shown()}"
    return child


def finish(main: Callable, argv: list[str], log: Path, before: Callable = lambda: None) -> str:
    """Run to the end; it must succeed. What it printed."""
    return finished(main, argv, log, before).shown()


def refused(main: Callable, argv: list[str], log: Path, before: Callable = lambda: None) -> str:
    """Run to the end; it must stop with one line and exit code 2. The line."""
    child = Child(main, argv, log, before)
    code = child.wait()
    shown = child.shown()
    assert code == 2, f"exit code {code}: {shown}"
    assert "Traceback" not in shown, shown
    return next(line for line in shown.splitlines() if line.startswith("error: "))


def killed_until_done(
    main: Callable,
    argv: list[str],
    log: Path,
    random: random.Random,
    longest: float,
    most: int,
    before: Callable = lambda: None,
) -> Iterator[Child]:
    """Kill at most so many children at random instants of their work, then let one finish.

    `longest` is in seconds of computing. Yields the dead.
    """
    for number in itertools.count():
        child = Child(main, argv, log, before)
        instant = random.uniform(0, longest) if number < most else PATIENCE
        end = time.monotonic() + PATIENCE
        while child.poll() is None and child.cpu_so_far() < instant:
            assert time.monotonic() < end or not child.kill(), f"hung: {child.shown()}"
            time.sleep(0.005)
        if not child.kill():
            assert child.code == 0, f"exit code {child.code}: {child.shown()}"
            return
        assert number < most, f"hung: {child.shown()}"
        yield child


def leftovers(folder: Path) -> list[str]:
    """Names that only a file in the making has."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.tmp*"))


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os._exit(1)
