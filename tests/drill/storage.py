"""Full and read-only disks, and two processes that want the same directory."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data_sets import contents

import data.prepare
import train
from training.checkpoint import Store

from .attack import Told, attack
from .children import Child, finish, leftovers, refused
from .subjects import a_preparation, a_training, evaluations, small_chunks

NOBODY = 65534


# --- full -----------------------------------------------------------------------------------------


class SmallDisk:
    """Mount a disk of so many bytes; without root, limit the size of files."""

    def __init__(self, folder: Path, size: int, largest_file: int):
        self.folder, self.largest_file = folder, largest_file
        folder.mkdir()
        options = f"size={size}"
        self.mounted = (
            os.geteuid() == 0
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
            ).returncode
        )

    def limit(self) -> None:
        """Limit the process that writes; it calls this itself."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.largest_file,) * 2)

    def enlarge(self) -> None:
        if self.mounted:
            command = ["mount", "-o", "remount,size=100m", self.folder]
            subprocess.run(command, check=True, capture_output=True)

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, *_) -> None:
        if self.mounted:
            subprocess.run(["umount", self.folder], check=True)


def fill(
    main: Callable,
    command: Callable[[Path], list[str]],
    folder: Path,
    sizes: list[tuple[int, int]],
    check,
) -> Told:
    """Run on disks of these sizes until refused, then with room; `check` the end.

    With each size goes that of the largest file, for where no small disk can be mounted.
    """
    reasons, how = {}, ""
    for number, (size, largest_file) in enumerate(sizes):
        with SmallDisk(folder / f"disk-{number}", size, largest_file) as disk:
            how = "a small tmpfs" if disk.mounted else "a limit on the size of files"
            line = refused(main, command(disk.folder), folder / "log", disk.limit)
            assert "cannot write" in line, line
            assert not leftovers_but_partial(disk.folder), leftovers(disk.folder)
            place = line.split("cannot write ")[1].split(":")[0].removeprefix("checkpoint ")
            kind = Path(place).name.rstrip("0123456789")
            reasons[kind] = reasons.get(kind, 0) + 1
            disk.enlarge()
            finish(main, command(disk.folder), folder / "log")
            check(disk.folder)
    where = ", ".join(f"{count} at {name}" for name, count in reasons.items())
    return Told(
        f"({how}) one line that names the file ({where}); with room again the same command ended "
        "as if nothing had happened",
        times=len(sizes),
        figures=reasons,
    )


def leftovers_but_partial(folder: Path) -> list[str]:
    """Return leftovers but for a shard in the making: the next start goes on with it."""
    return [name for name in leftovers(folder) if not name.endswith(".bin.tmp")]


@attack("storage", "disk full while shards are written", full=4, short=1)
def full_disk_shards(times: int, folder: Path) -> Told:
    subject = a_preparation()
    lengths = [len(written) for written in subject.whole.values()]
    shares = [(n + 1) / (times + 2) for n in range(times)]
    sizes = [
        (max(4096, int(sum(lengths) * share)), max(4096, int(max(lengths) * share)))
        for share in shares
    ]

    def check(place: Path) -> None:
        assert contents(place / "out") == subject.whole, "other bytes"

    def command(place: Path) -> list[str]:
        return [*subject.arguments, "--out", str(place / "out")]

    return fill(data.prepare.main, command, folder, sizes, check)


@attack("storage", "disk full while checkpoints are written", full=4, short=1)
def full_disk_checkpoint(times: int, folder: Path) -> Told:
    subject = a_training()
    files = [f.stat().st_size for f in Store(subject.whole).candidates()[0].iterdir()]
    sizes = [
        (20_000 + sum(files) * (n + 1) // 3, max(files) * (n + 1) // (times + 1))
        for n in range(times)
    ]

    def command(place: Path) -> list[str]:
        return subject.arguments(place, "--checkpoint.keep=99", "--resume")

    return fill(train.main, command, folder, sizes, subject.assert_same)


@attack("storage", "disk full while run.json and measurements are written", full=2, short=1)
def full_disk_metrics(times: int, folder: Path) -> Told:
    subject = a_training()
    # Two pages hold everything but what comes after the first step; one checkpoint, at the end.
    sizes = [(2 * 4096, 2500)] * times

    def command(place: Path) -> list[str]:
        return subject.arguments(place, "--checkpoint.interval=99", "--resume")

    told = fill(train.main, command, folder, sizes, subject.assert_same)
    assert set(told.figures) <= {"run.json", "metrics.jsonl"}, told.happened
    return told


@attack("storage", "disk full while results are written", full=2)
def full_disk_results(times: int, folder: Path) -> Told:
    subjects = evaluations()
    sizes = [(4096 * (1 + n // 2),) * 2 for n in range(times)]
    chosen = iter([subjects[n % 2] for n in range(times) for _ in range(2)])
    last = []

    def command(place: Path) -> list[str]:
        last[:] = [next(chosen)]
        return [*last[0].arguments, "--out", str(place / "x.json")]

    def main(argv: list[str]):
        return last[0].main(argv)

    return fill(main, command, folder, sizes, lambda place: last[0].assert_same(place / "x.json"))


# --- read-only ------------------------------------------------------------------------------------


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Callable]:
    """Let nothing in the folder be changed; yield what a child must call first."""
    bind = ["mount", "--bind", folder, folder]
    if os.geteuid() == 0 and not subprocess.run(bind, capture_output=True).returncode:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        try:
            yield lambda: None
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield lambda: os.seteuid(NOBODY) if os.geteuid() == 0 else None
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@attack("storage", "read-only directories", full=7)
def read_only_directory(times: int, folder: Path) -> Told:
    subject, log = a_training(), folder / "log"
    evaluated, prepared = evaluations(), a_preparation()
    locked, free = folder / "locked", folder / "free"
    locked.mkdir()
    free.mkdir()
    free.chmod(0o777)
    shutil.copytree(subject.corpus, locked / "corpus")
    shutil.copytree(evaluated[0].arguments[0], locked / "softmax")
    half = [*prepared.arguments, "--out", str(locked / "set")]
    child = Child(data.prepare.main, half, log, small_chunks)
    while child.poll() is None and not list(locked.glob("set/*.bin")):
        time.sleep(0.001)
    child.kill()
    tokens = f"--data.directory={locked / 'corpus'}"
    with read_only(locked) as before:
        for command, main in (
            (subject.arguments(locked, tokens), train.main),
            (subject.arguments(locked / "new", tokens), train.main),
            ([*prepared.arguments, "--out", str(locked / "other")], data.prepare.main),
            (half, data.prepare.main),
            ([*evaluated[0].arguments[1:], "--out", str(locked / "x.json")], evaluated[0].main),
        ):
            line = refused(main, command, log, before)
            assert "Read-only file system" in line or "Permission denied" in line, line
            assert str(locked) in line, line
        # To read is enough for what is only read.
        finish(train.main, subject.arguments(free, tokens), log, before)
        models = [str(locked / "softmax"), *evaluated[0].arguments[1:]]
        finish(evaluated[0].main, [*models, "--out", str(free / "x.json")], log, before)
    finish(data.prepare.main, half, log, small_chunks)
    assert contents(locked / "set") == prepared.whole, "other bytes"
    return Told(
        "writing: one line that names the directory and the reason; reading data and checkpoints "
        "from there works; a half-prepared set in it was finished afterwards to the same bytes",
        times=7,
    )


# --- contested ------------------------------------------------------------------------------------


@attack("storage", "a second process in one run directory, set or results file", full=6)
def two_in_one_place(times: int, folder: Path) -> Told:
    subject, prepared = a_training(), a_preparation()
    evaluated = evaluations()[0]
    for number in range(times):
        place = folder / str(number)
        out = [*prepared.arguments, "--out", str(place / "set")]
        x = [*evaluated.arguments, "--out", str(place / "x.json")]
        main, command, words, sign = (
            (train.main, subject.arguments(place), "by another", "nano-lssar/metrics.jsonl"),
            (data.prepare.main, out, "by another", "set/progress.json"),
            (evaluated.main, x, "another process", "x.json"),
        )[number % 3]
        first = Child(main, command, folder / "log", small_chunks)
        while first.poll() is None and not (place / sign).exists():
            time.sleep(0.001)
        os.kill(first.pid, signal.SIGSTOP)  # it holds the place for as long as the second needs
        try:
            line = refused(main, command, folder / "second", small_chunks)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert words in line, line
        assert first.wait() == 0, first.shown()
    return Told("the second was refused in one line, the first ended well", times=times)
