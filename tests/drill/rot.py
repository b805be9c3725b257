"""Rotten files: weights, shards and trainer states are never taken for sound; JSON is named if it
cannot be read, as it has no checksums."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from eval_helpers import tiny_model, write_checkpoint

import train
from data.shards import open_split, read_manifest, verify
from data.tokeniser import get_tokeniser
from data.writer import ShardWriter, read_progress
from evaluating.results import Record, Results, read_results
from lssar.errors import UserError
from training.checkpoint import Store, load_model, read_description, read_trainer
from training.config import load_config

from .attack import Told, attack
from .children import finish
from .subjects import a_preparation, a_training


def damages(sound: bytes, times: int, chance: random.Random) -> Iterator[bytes]:
    """Yield damages: three in four turn one bit over, the others cut out the end or a middle."""
    for number in range(times):
        damaged = bytearray(sound)
        if number % 4 < 3:
            place = chance.randrange(8 * len(sound))
            damaged[place // 8] ^= 1 << place % 8
        else:
            start = chance.randrange(len(sound))
            del damaged[start : start + chance.choice([1, 2, 100, len(sound)])]
        yield bytes(damaged)


def spoil(file: Path, times: int, read: Callable[[], object], checked: bool = True) -> Told:
    """Damage the file again and again: `read` must name it, or return what it did before.

    A file that is not `checked` may also give other values, but nothing worse.
    """
    sound, expected, chance = file.read_bytes(), read(), random.Random(file.name)
    named = harmless = changed = 0
    for damaged in damages(sound, times, chance):
        file.write_bytes(damaged)
        try:
            got = read()
        except UserError as error:
            assert file.name in str(error) and "\n" not in str(error), str(error)
            named += 1
        else:
            if got != expected and not checked:
                changed += 1
                continue
            place = next(
                (i for i, (a, b) in enumerate(zip(sound, damaged, strict=False)) if a != b), -1
            )
            assert got == expected, f"damage at byte {place} of {file.name} was taken for sound"
            harmless += 1
    file.write_bytes(sound)
    assert read() == expected
    without = f", {harmless} changed nothing that is read" if harmless else ""
    without += f", {changed} read with other values (no checksum)" if changed else ""
    figures = {"named": named, "harmless": harmless, "changed": changed}
    return Told(f"{named} named{without}", times=times, figures=figures)


@attack("storage", "shard: a bit flipped or bytes cut (`prepare.py verify`)", full=400, short=20)
def rotten_shard(times: int, folder: Path) -> Told:
    place = a_preparation().copy(folder / "set")
    return spoil(max(place.glob("*.bin")), times, lambda: verify(place))


@attack("storage", "manifest: a bit flipped or bytes cut", full=400, short=20)
def rotten_manifest(times: int, folder: Path) -> Told:
    place = a_preparation().copy(folder / "set")
    keys = sorted(read_manifest(place))

    def read():
        open_split(place, "train")
        found = read_manifest(place)
        return [found.get(key) for key in keys]

    return spoil(place / "manifest.json", times, read, checked=False)


@attack("storage", "record of an unfinished set: a bit flipped or bytes cut", full=200, short=20)
def rotten_progress(times: int, folder: Path) -> Told:
    writer = ShardWriter(folder, "x", get_tokeniser("bytes"), {"a": 1}, 100)
    writer.save({"file": 3, "at": 77})
    return spoil(folder / "progress.json", times, lambda: read_progress(folder), checked=False)


@attack("storage", "model.safetensors: a bit flipped or bytes cut", full=200, short=20)
def rotten_weights(times: int, folder: Path) -> Told:
    path = write_checkpoint(folder / "model", tiny_model())
    return spoil(path / "model.safetensors", times, lambda: load_model(path)[1])


@attack("storage", "model.json: a bit flipped or bytes cut", full=400, short=20)
def rotten_description(times: int, folder: Path) -> Told:
    path = write_checkpoint(folder / "model", tiny_model())
    return spoil(path / "model.json", times, lambda: read_description(path), checked=False)


@attack("storage", "trainer.pt: a bit flipped or bytes cut", full=200, short=20)
def rotten_trainer(times: int, folder: Path) -> Told:
    latest = Store(a_training().whole).candidates()[0]
    path = Path(shutil.copytree(latest, folder / "checkpoint"))
    return spoil(path / "trainer.pt", times, lambda: sorted(read_trainer(path)))


@attack("storage", "the latest checkpoint damaged, `--resume`", full=3)
def rotten_latest(times: int, folder: Path) -> Told:
    subject, chance = a_training(), random.Random(5)
    for number in range(times):
        runs = folder / f"runs-{number}"
        finish(train.main, subject.arguments(runs), folder / "log")
        latest = Store(runs / "nano-lssar").candidates()[0]
        name = ("model.safetensors", "trainer.pt")[number % 2]
        sound = (latest / name).read_bytes()
        (latest / name).write_bytes(list(damages(sound, number + 1, chance))[-1])
        shown = finish(train.main, subject.arguments(runs, "--resume"), folder / "log")
        assert f"warning: passing over {latest}" in shown and name in shown, shown
        subject.assert_same(runs)
    return Told(
        "the damaged file was named, the checkpoint before it taken, and the run ended bit for bit "
        "as undisturbed",
        times=times,
    )


@attack("storage", "config.toml of a run: a bit flipped or bytes cut", full=4)
def rotten_run_config(times: int, folder: Path) -> Told:
    subject, chance = a_training(), random.Random(6)
    file = folder / "runs/nano-lssar/config.toml"
    finish(train.main, subject.arguments(folder / "runs"), folder / "log")
    sound = file.read_bytes()
    for damaged in damages(sound, times, chance):
        file.write_bytes(damaged)
        finish(train.main, subject.arguments(folder / "runs", "--resume"), folder / "log")
        assert file.read_bytes() == sound
        subject.assert_same(folder / "runs")
    return Told(
        "harmless: it is written for the reader, the checkpoint has its own copy, and the next "
        "start wrote it anew",
        times=times,
    )


@attack("storage", "a config given to `--resume`: a bit flipped or bytes cut", full=400, short=30)
def rotten_config(times: int, folder: Path) -> Told:
    file, counts = folder / "x.toml", {"refused": 0, "difference listed": 0, "of no consequence": 0}
    text = load_config("configs/nano-lssar.toml").to_toml()
    file.write_text(text)
    expected = load_config(file)
    for damaged in damages(text.encode(), times, random.Random(7)):
        file.write_bytes(damaged)
        try:
            found = load_config(file)
        except UserError as error:
            assert file.name in str(error), str(error)
            counts["refused"] += 1
        else:  # `--resume` refuses what `differences` lists
            listed = bool(expected.differences(found))
            counts["difference listed" if listed else "of no consequence"] += 1
    shown = ", ".join(f"{n} {what}" for what, n in counts.items())
    return Told(
        f"{shown} (only places, or how often is reported and saved)", times=times, figures=counts
    )


@attack("storage", "results JSON: a bit flipped or bytes cut", full=400, short=20)
def rotten_results(times: int, folder: Path) -> Told:
    results = Results(folder / "x.json", "kind", {"seed": 1}, about={})
    results.runs["a"] = {"run": "a", "step": 7}
    for length in (8, 16, 32):
        results.add(Record("loss", "a", 1 / length, variant="v", length=length))

    def read():
        found = read_results(folder / "x.json")
        return json.dumps([found.kind, found.settings, found.runs, *map(asdict, found.records)])

    return spoil(folder / "x.json", times, read, checked=False)
