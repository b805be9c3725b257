"""Every state that a kill or a power loss can leave: one for each event of the file system.

An event is about to happen when a file is opened to write, synced, renamed or removed, or a folder
made or removed. The process is killed there, or leaves an image of the disk and is killed: what is
there if the power fails, when some of the latest writes or names have not reached the disk.
"""

import gzip
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import data_sets
import torch
import train_helpers as training
from data_sets import contents

import data.prepare
import passkey
import train
from training import run_log
from training.checkpoint import WEIGHTS, Store, read_description, read_trainer

from .attack import Told, attack
from .children import Child
from .subjects import a_training, evaluations, fresh, numbers_of, small_chunks

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

# What has reached the disk when the power fails. Synced files and folders always have.
KILLED = "killed"
SYNCED = "only what was synced"
NAMES = "all names, and only the bytes that were synced"
SIZES = "all names and sizes, with zeros for the bytes that were not synced"
BYTES = "all bytes, and only the names that were synced"
POWER_LOSSES = (SYNCED, NAMES, SIZES, BYTES)


@dataclass
class Disk:
    """Track what of a folder would survive a power failure, by `look` and `synced`."""

    root: Path
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # of a folder: name to inode
    content: dict[int, bytes] = field(default_factory=dict)  # of a file, when it was last synced
    live: dict[int, Path] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)  # open, so that no inode is used twice

    def __post_init__(self):
        for folder, there in self._walk():
            self.names[folder] = there
        for inode, path in self.live.items():
            if path.is_file():
                self.content[inode] = path.read_bytes()

    def _walk(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield each folder with its names, as they are now, from the root on."""
        self.live = {}
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            there = {}
            for path in folder.iterdir():
                inode = path.lstat().st_ino
                there[path.name] = inode
                self.live[inode] = path
                if inode not in self.content and inode not in self.names:
                    self.held.append(os.open(path, os.O_RDONLY))
                if path.is_dir():
                    waiting.append(path)
            yield folder.lstat().st_ino, there

    def look(self) -> None:
        """Take note of new files, of which nothing is durable, and folders, whose names are."""
        for folder, there in self._walk():
            self.names.setdefault(folder, {})
            for name, inode in there.items():
                if self.live[inode].is_dir() and inode not in self.names:
                    self.names[folder][name] = inode
                elif not self.live[inode].is_dir():
                    self.content.setdefault(inode, b"")

    def sync(self, handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            if status.st_ino in self.names:
                self.names[status.st_ino] = dict(self._walk())[status.st_ino]
        elif status.st_ino in self.live:
            self.content[status.st_ino] = self.live[status.st_ino].read_bytes()

    def write_image(self, target: Path, kind: str) -> None:
        """Write to an empty folder what a power failure of this kind leaves."""
        live = dict(self._walk())
        names = self.names if kind in (SYNCED, BYTES) else live
        waiting = [(self.root.lstat().st_ino, target)]
        while waiting:
            folder, place = waiting.pop()
            place.mkdir(exist_ok=True)
            for name, inode in names.get(folder, {}).items():
                if inode in live or inode in self.names:
                    waiting.append((inode, place / name))
                else:
                    (place / name).write_bytes(self._bytes(inode, kind))

    def _bytes(self, inode: int, kind: str) -> bytes:
        durable = self.content.get(inode, b"")
        path = self.live.get(inode)
        now = path.read_bytes() if path else durable
        if kind == BYTES:
            return now
        if kind == SIZES:
            return durable[: len(now)].ljust(len(now), b"\0")
        return durable


def path_of(handle: int) -> Path:
    return Path(f"/proc/self/fd/{handle}").readlink()


@dataclass
class Watch:
    """Counts the events of a process below a folder; at event `stop` it leaves this state."""

    folder: Path
    notes: Path  # gets a line per event
    stop: int = 0
    kind: str = KILLED
    image: Path | None = None

    def install(self) -> None:
        """Call this in the process itself; what it does from here on is watched."""
        self.count = 0
        self.busy = False
        self.file = os.open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.disk = Disk(self.folder) if self.image else None
        self.unsynced: dict[str, int] = {}  # by path: the size that it had when last synced
        fsync = os.fsync

        def synced(handle: int) -> None:
            self.event("sync", path_of(handle))
            fsync(handle)
            if self.disk:
                self.disk.sync(handle)

        os.fsync = synced
        sys.addaudithook(self.hear)

    def hear(self, name: str, given: tuple) -> None:
        if self.busy or name not in CHANGES:
            return
        if name == "open" and not (given[2] or 0) & WRITES:
            return
        if isinstance(given[0], str | bytes | os.PathLike):
            place = given[-1] if name != "open" and isinstance(given[-1], int) else -1
            base = path_of(place) if place >= 0 else Path.cwd()
            self.event(name.removeprefix("os."), base / os.fsdecode(given[0]))

    def event(self, name: str, path: Path) -> None:
        if not path.is_relative_to(self.folder):
            return
        self.busy = True
        try:
            self.count += 1
            os.write(self.file, f"{name} {path.relative_to(self.folder)}\n".encode())
            if self.disk:
                self.disk.look()
            if self.count == self.stop:
                if self.disk:
                    self.disk.write_image(self.image, self.kind)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        finally:
            self.busy = False


@dataclass(frozen=True)
class Work:
    """Describe a command that writes into one folder, and what has to be there in the end."""

    main: Callable
    command: Callable[[Path], list[str]]  # for a folder
    result: Callable[[Path], object]
    before: Callable = lambda: None  # called in the process that does it

    def undisturbed(self, folder: Path) -> tuple[list[str], object]:
        """Do it once; return its events and its result."""
        log, notes = folder / "log", folder / "notes"
        place = fresh(folder / "place")  # a run's checkpoints name the folder
        child = self._start(place, log, Watch(place, notes))
        assert child.wait() == 0, child.shown()
        return notes.read_text().splitlines(), self.result(place)

    def _start(self, place: Path, log: Path, watch: "Watch | None" = None) -> Child:
        def before() -> None:
            self.before()
            if watch:
                watch.install()

        return Child(self.main, self.command(place), log, before)

    def disturbed(self, folder: Path, stop: int, kind: str) -> object:
        """Do it with a kill at that event, and again to the end; return the result then."""
        log, place = folder / "log", fresh(folder / "place")
        image = None if kind == KILLED else fresh(folder / "image")
        child = self._start(place, log, Watch(place, folder / "notes", stop, kind, image))
        assert child.wait() == -signal.SIGKILL, child.shown()
        if image:  # the same path again: it may be part of the result
            shutil.rmtree(place)
            image.rename(place)
        child = self._start(place, log)
        assert child.wait() == 0, f"exit code {child.code}: {child.shown()}"
        assert "Traceback" not in child.shown(), child.shown()
        return self.result(place)


def every_event(work: Work, times: int, folder: Path, kinds: tuple[str, ...], told: str) -> Told:
    """Stop the work at each event, or at so many that are spread over all of them."""
    events, expected = work.undisturbed(folder)
    cases = [(stop, kinds[stop % len(kinds)]) for stop in range(1, len(events) + 1)]
    if times < len(cases):
        cases = [cases[len(cases) * place // times] for place in range(times)]
    for stop, kind in cases:
        where = f"{kind} at event {stop} of {len(events)}, {events[stop - 1]}"
        try:
            assert work.disturbed(folder, stop, kind) == expected, "another result"
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
    every = "every one" if len(cases) == len(events) else f"{len(cases)}"
    return Told(
        f"at {every} of {len(events)} events: {told}",
        times=len(cases),
        kills=len(cases),
        figures={"events": len(events)},
    )


# --- what is attacked -----------------------------------------------------------------------------


def run_of_tiny_steps() -> Work:
    """Train to four checkpoints: the second is the best, and all but the last are removed."""
    subject = a_training()
    more = ("--train.steps=4", "--train.schedule=constant", "--train.warmup=1", "--train.lr=0.1")
    more += ("--model.layers=1", "--checkpoint.interval=1", "--checkpoint.keep=1")
    more += ("--eval.interval=1", "--eval.tokens=64", "--resume")

    def result(place: Path) -> dict:
        run = place / "nano-lssar"
        store = Store(run)
        found = {"losses": training.losses(run)}
        found["names"] = sorted(path.name for path in store.directory.iterdir())
        found["pointers"] = [(store.directory / name).read_text() for name in ("latest", "best")]
        for path in store.candidates():
            weights = (path / WEIGHTS).read_bytes()
            found[path.name] = weights, read_description(path), plain(read_trainer(path))
        return found

    return Work(train.main, lambda place: subject.arguments(place, *more), result, no_pictures)


def plain(value: object) -> object:
    """Return a nested value with the bytes of its tensors in their place, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def preparation_of_own_text(folder: Path) -> Work:
    """Prepare many small files, a large one, compressed ones, JSON lines and parquet."""
    texts = folder / "texts"
    data_sets.text_corpus(texts, 12)
    for number in range(20):
        (texts / f"small{number:02d}.txt").write_text(f"{number} a few words\n" * (number % 7))
    with gzip.open(texts / "packed.txt.gz", "wt") as file:
        file.writelines(f"{number} Zürich 中文 don't  stop\n" for number in range(900))
    arguments = ["text", str(texts), "--tokeniser=bytes", "--workers=0"]
    arguments += ["--shard-tokens=30K", "--val-tokens=4K"]

    def command(place: Path) -> list[str]:
        return [*arguments, "--out", str(place / "set")]

    return Work(data.prepare.main, command, lambda place: contents(place / "set"), small_chunks)


def measurements(number: int) -> Work:
    subject = evaluations()[number]

    def command(place: Path) -> list[str]:
        more = [] if subject.main is passkey.main else ["--no-figures"]
        return [*subject.arguments, *more, "--out", str(place / "x.json")]

    def result(place: Path) -> tuple:
        answers = place / "x-answers.jsonl"
        lines = answers.read_text().splitlines() if answers.exists() else []
        names = sorted(path.name for path in place.iterdir() if not path.name.endswith(".lock"))
        return numbers_of(place / "x.json"), sorted(lines), names

    return Work(subject.main, command, result, no_pictures)


def no_pictures() -> None:
    """Draw nothing, which takes a second."""
    run_log.plot_losses = lambda *given: None
    passkey.show = lambda results: None


# --- attacks --------------------------------------------------------------------------------------

ALL = 10_000
RUN = (
    "started again, the run had the checkpoints, their weights, optimiser and random state, "
    "`latest`, `best`, and the measurements of an undisturbed one, bit for bit"
)
SET = "started again, the set had the bytes of an undisturbed one, and no other file beside them"
RESULTS = "started again, the results had the numbers and answers of undisturbed ones, bit for bit"


@attack("crashes", "training, `kill -9` at every file-system event", full=ALL, short=3)
def training_events(times: int, folder: Path) -> Told:
    return every_event(run_of_tiny_steps(), times, folder, (KILLED,), RUN)


@attack("crashes", "preparation of own text, `kill -9` at every event", full=ALL, short=3)
def preparation_events(times: int, folder: Path) -> Told:
    return every_event(preparation_of_own_text(folder), times, folder, (KILLED,), SET)


@attack("crashes", "evaluation, `kill -9` at every event", full=ALL)
def evaluation_events(times: int, folder: Path) -> Told:
    return every_event(measurements(0), times, folder, (KILLED,), RESULTS)


@attack("crashes", "passkey, `kill -9` at every event", full=ALL, short=3)
def passkey_events(times: int, folder: Path) -> Told:
    return every_event(measurements(1), times, folder, (KILLED,), RESULTS)


@attack("storage", "training, power lost at every event", full=ALL, short=4)
def training_power(times: int, folder: Path) -> Told:
    return every_event(run_of_tiny_steps(), times, folder, POWER_LOSSES, RUN)


@attack("storage", "preparation of own text, power lost at every event", full=ALL, short=4)
def preparation_power(times: int, folder: Path) -> Told:
    return every_event(preparation_of_own_text(folder), times, folder, POWER_LOSSES, SET)


@attack("storage", "passkey, power lost at every event", full=ALL, short=4)
def passkey_power(times: int, folder: Path) -> Told:
    return every_event(measurements(1), times, folder, POWER_LOSSES, RESULTS)
