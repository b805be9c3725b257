"""What a stranger's machine has: other corpora, a damaged cache, other users, odd paths."""

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import train_helpers as training
from data_sets import contents

import data.prepare
import eval_extrapolation
import generate
import train
from data.shards import open_split
from evaluating.results import Results
from lssar import cpu, cpu_build
from support.files import sha256_of
from training.checkpoint import Store

from .attack import Told, attack
from .children import Child, finish, refused
from .subjects import Training, a_training, fresh

ANOTHER_USER = 12345  # unknown to the system, as in a container started with --user


# --- corpora --------------------------------------------------------------------------------------


@attack("storage", "another corpus, or changed shards, under a run and `--resume`", full=8, short=2)
def corpus_swap(times: int, folder: Path) -> Told:
    subject, kinds = a_training(), list(SWAPS)
    corpus, other = folder / "corpus", another_corpus(subject.corpus, folder / "other")
    for number in range(times):
        copy(subject.corpus, corpus)
        runs, log = fresh(folder / "runs"), folder / "log"
        command = subject.arguments(runs, f"--data.directory={corpus}", "--checkpoint.interval=2")
        stop_half_way(command, Store(runs / "nano-lssar"), log)
        before, kind = checkpoints_of(runs), kinds[number % len(kinds)]
        more = SWAPS[kind](corpus, other) or []
        line = refused(train.main, [*command, "--resume", *more], log)
        assert "data" in line or "is damaged: its sha256" in line, f"{kind}: {line}"
        assert checkpoints_of(runs) == before, f"{kind}: the refused start changed the run"
        copy(subject.corpus, corpus)
        finish(train.main, [*command, "--resume"], log)
        subject.assert_same(runs)
    return Told(
        f"({', '.join(kinds[:times])}) refused in one line, the run untouched; with the first "
        "corpus back, copied anew, it ended bit for bit as undisturbed",
        times=times,
    )


def another_corpus(corpus: Path, place: Path) -> Path:
    """Write a corpus of the same sizes to the byte, with other words in it."""
    texts = shutil.copytree(corpus.parent / "text", place / "text")
    for path in Path(texts).iterdir():
        path.write_text(path.read_text().replace("sun", "fox"))
    arguments = ["text", str(texts), "--tokeniser=bytes", "--val-tokens=4000"]
    data.prepare.main([*arguments, "--out", str(place / "shards")])
    sizes = [{n: len(c) for n, c in contents(p).items()} for p in (corpus, place / "shards")]
    assert sizes[0] == sizes[1] and contents(corpus) != contents(place / "shards")
    return place / "shards"


def copy(corpus: Path, place: Path) -> None:
    """Copy with new time stamps, as most ways of copying do."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(corpus, place, copy_function=shutil.copyfile)


def a_token_changed(corpus: Path, split: str) -> None:
    """Change one byte of the text in place: still a token, of a file of the same size."""
    (shard,) = corpus.glob(f"*_{split}_*.bin")
    content = bytearray(shard.read_bytes())
    content[1024 + 2 * 777] ^= 1
    shard.write_bytes(content)


SWAPS: dict[str, Callable[[Path, Path], list[str] | None]] = {
    "another corpus in its place": lambda corpus, other: copy(other, corpus),
    "a token changed in a training shard": lambda corpus, _: a_token_changed(corpus, "train"),
    "another directory": lambda _, other: [f"--data.directory={other}"],
    "a token changed in the validation shard": lambda corpus, _: a_token_changed(corpus, "val"),
}


def stop_half_way(command: list[str], store: Store, log: Path) -> None:
    """Kill the run when it has its first checkpoint and before it has all."""
    child = Child(train.main, command, log)
    while child.poll() is None and not store.candidates():
        time.sleep(0.002)
    assert child.kill(), f"it ended by itself: {child.shown()}"


def checkpoints_of(runs: Path) -> dict[str, bytes]:
    """Return every file of every finished checkpoint."""
    return {
        str(p.relative_to(runs)): p.read_bytes()
        for p in runs.rglob("step-*/*")
        if not p.parent.name.endswith(".tmp")
    }


@attack("input", "a validation set too small for `eval.tokens`, or for one window", full=6, short=2)
def tiny_validation(times: int, folder: Path) -> Told:
    subject, log = a_training(), folder / "log"
    tokens = open_split(subject.corpus, "val").total_tokens
    there = (tokens - 1) // 32 * 32  # the last one of a window needs a successor
    for number in range(times):
        runs = fresh(folder / "runs")
        if number % 2:
            too_long = (f"--train.length={2**13}", f"--train.batch_tokens={2**13}")
            one = ("--train.micro_batch=1", f"--eval.tokens={2**13}")
            line = refused(train.main, subject.arguments(runs, *too_long, *one), log)
            assert str(tokens) in line and str(subject.corpus) in line, line
            assert not list(folder.rglob("step-*")), log.read_text()
            continue
        asked = (131_072, 4000, 32 * 10**6)[number // 2 % 3]
        few = ("--train.steps=2", "--train.warmup=1")
        command = subject.arguments(runs, f"--eval.tokens={asked}", *few)
        shown = finish(train.main, command, log)
        assert f"validation takes the {there:,} tokens there are" in shown, shown
    return Told(
        "all there are were taken, with a notice; where there is not one window, the run was "
        "refused before any step",
        times=times,
    )


# --- caches and homes -----------------------------------------------------------------------------


def truncated(sound: bytes, chance: random.Random) -> bytes:
    return sound[: chance.randrange(1, len(sound))]


def flipped(sound: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(sound)
    damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


DAMAGES = {
    "truncated": truncated,
    "a bit flipped": flipped,
    "garbage": lambda sound, chance: chance.randbytes(len(sound)),
    "empty": lambda sound, chance: b"",
}


def with_cache(folder: Path) -> Callable[[], None]:
    """Return what a child calls to look for its kernel there, as if nothing had been loaded yet."""

    def before() -> None:
        os.environ["LSSAR_CACHE"] = str(folder)
        forget_kernel()

    return before


def forget_kernel() -> None:
    for loaded in (cpu._kernel, cpu.unavailable):
        loaded.cache_clear()


@attack("storage", "the CPU kernel's library in the cache damaged", full=4, short=1)
def kernel_cache(times: int, folder: Path) -> Told:
    if reason := cpu.unavailable():
        return Told(f"not tried, as there is no kernel here: {reason}", times=0)
    subject, chance, kinds = a_training(), random.Random(10), list(DAMAGES)
    library = cpu.build()
    for number in range(times):
        cache, runs = fresh(folder / "cache"), fresh(folder / "runs")
        damage = DAMAGES[kinds[number % len(kinds)]]
        (cache / library.name).write_bytes(damage(library.read_bytes(), chance))
        finish(train.main, subject.arguments(runs), folder / "log", with_cache(cache))
        subject.assert_same(runs)
        sound = [p for p in cache.glob("*.so") if p.read_bytes() == library.read_bytes()]
        assert sound, "the damaged library was not built again"
    return Told(
        f"({', '.join(kinds[:times])}) built again without a word; the run ended bit for bit as "
        "with the sound one",
        times=times,
    )


@attack("places", "another user, and a HOME that nobody can use", full=6, short=1)
def foreign_user(times: int, folder: Path) -> Told:
    """Run the first three as another user where we are root, the others with no home at all."""
    subject, log = a_training(), folder / "log"
    readable = os.geteuid() != 0 or readable_by_another_user(training.ROOT / "configs")
    folder.chmod(0o755)
    home, temporary, out = (folder / name for name in ("home", "tmp", "out"))
    for place, mode in ((home, 0o000), (temporary, 0o1777), (out, 0o777)):
        place.mkdir()
        place.chmod(mode)
    log.touch()
    log.chmod(0o666)

    def another_user() -> None:
        os.environ.update(HOME=str(home), TMPDIR=str(temporary))
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
        no_cache()

    def no_home() -> None:
        os.environ.update(HOME="/dev/null/home", TMPDIR=str(temporary))
        no_cache()

    def no_cache() -> None:
        tempfile.tempdir = None  # to be found anew
        for name in ("LSSAR_CACHE", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        forget_kernel()

    for number in range(times):
        who = another_user if number < 3 and readable else no_home
        main, argv = commands(subject, out / who.__name__)[number % 3]
        shown = finish(main, argv, log, who)
        assert str(temporary) in shown and "LSSAR_CACHE" in shown, f"no notice: {shown}"
    home.chmod(0o755)  # or only root could delete it
    subject.assert_same(out / (another_user if readable else no_home).__name__)
    worked = "training, evaluation and generation" if times > 2 else "training"
    unread = "" if readable else "(not as another user, who cannot read this checkout) "
    return Told(
        f"{unread}{worked} worked, with a notice of where the kernel is kept; the weights were "
        "those of the undisturbed run, bit for bit",
        times=times,
    )


def readable_by_another_user(place: Path) -> bool:
    """Tell whether every folder above lets them in, which a private temporary one does not."""
    test = ["test", "-r", str(place)]
    return (
        subprocess.run(test, user=ANOTHER_USER, group=ANOTHER_USER, extra_groups=[]).returncode == 0
    )


def commands(subject: Training, out: Path) -> list[tuple[Callable, list[str]]]:
    """Train, evaluate what was trained, and let it write."""
    run = str(out / "nano-lssar")
    evaluate = [run, "--data", str(subject.corpus), "--lengths=32,64", "--tokens=512"]
    return [
        (train.main, subject.arguments(out)),
        (eval_extrapolation.main, [*evaluate, "--out", str(out / "x.json")]),
        (generate.main, [run, "--tokens=8", "--greedy"]),
    ]


# --- another user's traps -------------------------------------------------------------------------

TRAP = """
#include <sys/stat.h>
__attribute__((constructor)) void spring() { mkdir("%s", 0777); }
"""


@attack("security", "a second user plants code in the kernel's cache, and links", full=10, short=3)
def planted(times: int, folder: Path) -> Told:
    """Plant a library under the name that is looked for; loading it would make a folder."""
    if reason := cpu.unavailable():
        return Told(f"not tried, as there is no kernel here: {reason}", times=0)
    folder.chmod(0o755)
    sound = cpu.build()
    library, trap = trap_library(folder), folder / "sprung/trap"
    trap.parent.mkdir(mode=0o777)
    trap.parent.chmod(0o777)
    ctypes.CDLL(shutil.copy(library, folder / "probe.so"))
    assert trap.is_dir(), "the trap does not even spring where it may"
    trap.rmdir()
    name = f"{sound.name.rpartition('-')[0]}-{sha256_of(library)}.so"
    cases = [*PLANTED, *LINKS]
    cases = cases if os.geteuid() == 0 else [*PLANTED[2:4], *LINKS]
    for number in range(times):
        case, place = cases[number % len(cases)], fresh(folder / str(number))
        if case in LINKS:
            refuse_link(case, place, folder / "log")
            continue
        variable, cache = prepare_cache(case, place)
        shutil.copy(library, cache / name)
        (cache / name).chmod(0o755)
        if "its owner" in case or "folder of" in case:
            os.chown(cache / name, *[54321] * 2)
        temporary = place / "tmp"
        temporary.mkdir()

        def before(variable=variable, temporary=temporary) -> None:
            for other in ("LSSAR_CACHE", "XDG_CACHE_HOME"):
                os.environ.pop(other, None)
            os.environ.update(variable, TMPDIR=str(temporary))
            tempfile.tempdir = None
            cpu_build.compile_kernel = lambda output, *given: shutil.copy(sound, output)

        shown = finish(lambda argv: load_kernel(), [], folder / "log", before)
        assert not trap.exists(), f"{case}: another user's code was run"
        assert "set LSSAR_CACHE" in shown, f"{case}: no notice: {shown}"
    return Told(
        f"({', '.join(cases[:times])}) never loaded: built in a private folder, with a notice; a "
        "link was never written through",
        times=times,
    )


def trap_library(folder: Path) -> Path:
    source, library = folder / "trap.c", folder / "trap.so"
    source.write_text(TRAP % (folder / "sprung/trap"))
    command = [*cpu_build._compiler(""), "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


PLANTED = (
    "a folder of the second user",
    "a file with the second user as its owner",
    "a folder that all can write",
    "a folder that its group can write",
    "a folder of the second user, below XDG_CACHE_HOME",
    "a link to a folder of the second user",
)


def prepare_cache(case: str, place: Path) -> tuple[dict[str, str], Path]:
    """Make the cache of a case; return the variable that names it."""
    cache = place / "lssar"
    cache.mkdir()
    cache.chmod({"all": 0o777, "group": 0o770}.get(case.split()[-3], 0o755))
    if "folder of the second user" in case:
        os.chown(cache, *[54321] * 2)
    if "XDG" in case:
        return {"XDG_CACHE_HOME": str(place)}, cache
    if "link" in case:
        (place / "link").symlink_to(cache)
        return {"LSSAR_CACHE": str(place / "link")}, cache
    return {"LSSAR_CACHE": str(cache)}, cache


def load_kernel() -> None:
    ctypes.CDLL(str(cpu_build.build()))


LINKS = (".x.json.tmp", ".x.json.lock", "text_val_000000.bin.tmp", ".progress.json.tmp")


def refuse_link(name: str, place: Path, log: Path) -> None:
    """Plant a link to a file of the user under a name that a write may use."""
    mine = place / "mine"
    mine.write_text("mine")
    (place / "out").mkdir()
    (place / "out" / name).symlink_to(mine)
    (place / "a.txt").write_text("some text " * 900)

    def prepare(argv: list[str]) -> None:
        arguments = ["text", str(place / "a.txt"), "--tokeniser=bytes", "--out"]
        data.prepare.main([*arguments, str(place / "out")])

    def save(argv: list[str]) -> None:
        Results(place / "out/x.json", "kind", {}, about={}).save()

    child = Child(save if "json" in name and "progress" not in name else prepare, [], log)
    assert child.wait() in (0, 2), child.shown()  # the link is removed, or named
    assert mine.read_text() == "mine", f"{name} was written through"


# --- paths ----------------------------------------------------------------------------------------

DEEP = "/".join(["a folder in a folder in a folder in a folder, deep"] * 5)
PATHS = {"spaces and letters": "mit Leerzeichen, größer als 日本語", "deep": DEEP}


@attack("places", "paths with spaces, non-ASCII letters, and of 250 characters", full=4, short=2)
def odd_paths(times: int, folder: Path) -> Told:
    """Put corpus, run and results there; from the third on a checkout with its interpreter too."""
    subject, log = a_training(), folder / "log"
    assert len(DEEP) > 200
    for number in range(times):
        place = fresh(folder / str(number) / list(PATHS.values())[number % 2])
        texts = shutil.copytree(subject.corpus.parent / "text", place / "text of it")
        corpus = place / "corpus"
        prepare = ["text", str(texts), "--tokeniser=bytes", "--val-tokens=4000"]
        steps = [(data.prepare.main, [*prepare, "--out", str(corpus)])]
        moved = Training(corpus, subject.whole, subject.cpu)
        steps += commands(moved, place / "runs")
        if number >= 2:
            run_checkout(checkout(place / "check out"), steps, place / "cache")
        else:
            for main, argv in steps:
                finish(main, argv, log)
        # The manifest records sizes and names of the texts, not where they were.
        assert contents(corpus) == contents(subject.corpus), "another corpus"
        moved.assert_same(place / "runs")
        assert (place / "runs/x.png").exists()
    checkouts = f"; {times - 2} with the checkout and the kernel's cache there too"
    return Told(
        f"({', '.join(PATHS)}{checkouts if times > 2 else ''}) a corpus was prepared, a model "
        "trained, evaluated and sampled: bytes and weights as elsewhere",
        times=times,
    )


def checkout(place: Path) -> Path:
    """Copy what a clone of the working tree would hold."""
    listed = ["git", "ls-files", "-z"]
    names = subprocess.run(listed, cwd=training.ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if not name.startswith(("site/", "tests/", "results/")):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(training.ROOT / name, place / name)
    return place


def run_checkout(root: Path, steps: list[tuple[Callable, list[str]]], cache: Path) -> None:
    """Take the same steps by the scripts and with the configs of the checkout."""
    for main, argv in steps:
        script = Path(sys.modules[main.__module__].__file__).relative_to(training.ROOT)
        argv = [text.replace(str(training.ROOT), str(root)) for text in argv]
        done = subprocess.run(
            [sys.executable, str(root / script), *argv],
            cwd=root,
            capture_output=True,
            text=True,
            env=training.environment() | {"LSSAR_CACHE": str(cache), "PYTHONPATH": ""},
        )
        assert done.returncode == 0, f"{script}: {done.stderr}"
