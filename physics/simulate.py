"""python physics/simulate.py orbits|forces|planets --out DIR

Simulates orbits and writes them as tokens, and forces as labels:

  orbits    random systems of 1 to 10 planets, for pre-training (10,000,000 sequences, 40 GB)
  forces    systems of one planet with the magnitude of the force on it as labels
  planets   the eight planets, each alone with the Sun, with the force's direction and relative size

Defaults are the paper's scale. Force predictions are validated on labels that nothing else uses;
`--selection source` validates them as Vafa et al. do, on the labels that are hidden from training.

An interrupted simulation continues when the same command is run again, and ends with the same
bytes, for any number of --workers.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from tqdm import tqdm

from data import shards
from data.writer import forget_progress, refuse_other_settings
from lssar.errors import UserError
from physics import systems
from physics.loader import DESCRIPTION, describe
from physics.systems import CHANNELS, PLANETS, random_orbits
from support.command import MOST_PROCESSES, Parser, positive, run, seed_number, whole
from support.files import json_record, locked, whole_file, write_json
from support.processes import in_processes

MAX_SHARDS = 10**6
STATES = "states.npy"  # (sequences, times, 6) float64 beside the labels


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("set", choices=tuple(SETS))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--points", type=whole(24, 100_000), default=1000, help="of a sequence")
    parser.add_argument("--bins", type=whole(2, 65533), default=7000, help="of a coordinate")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument(
        "--heavy",
        action="store_true",
        help="planets of 0.1 to 0.6 solar masses, which move their star visibly",
    )
    group = parser.add_argument_group("orbits")
    group.add_argument("--sequences", type=positive, default=10_000_000)
    group.add_argument("--val-sequences", type=positive, default=3_000)
    group.add_argument("--shard-sequences", type=positive, default=50_000)
    group.add_argument(
        "--planets", type=whole(0, 10), default=0, help="of a system; 0: 1 to 10 at random"
    )
    group.add_argument(
        "--workers", type=whole(0, MOST_PROCESSES), default=os.cpu_count() or 1, help="processes"
    )
    group = parser.add_argument_group("forces and planets")
    group.add_argument("--labelled", type=positive, default=9_000, help="sequences with all labels")
    group.add_argument("--probed", type=positive, default=1_000, help="sequences with two labels")
    group.add_argument("--held-out", type=positive, default=300, help="sequences for the selection")
    group.add_argument("--selection", default="held-out", choices=("held-out", "source"))
    group.add_argument("--unit", default="raw", choices=("raw", "deviation"), help="of forces")
    return parser


def main(argv: list[str]) -> None:
    options = make_parser().parse_args(argv)
    check(options)
    make, keys = SETS[options.set]
    settings = {key: getattr(options, key) for key in ("set", "points", "bins", "seed", *keys)}
    if options.heavy:
        settings["heavy"] = True
    with locked(options.out):
        if is_complete(options.out, settings):
            print(f"{options.out} is complete")
            return
        write_json(options.out / shards.PROGRESS, settings)
        summary, outputs, more = make(options)
        description = {
            "points": options.points,
            "channels": CHANNELS,
            "outputs": outputs,
            "settings": settings,
            **more,
        }
        write_json(options.out / DESCRIPTION, description)
        forget_progress(options.out)
    print(f"{options.out}: {summary}")


def check(options: Namespace) -> None:
    """Raise if the shards are too many for six digits, or too large for a size of 31 bits."""
    largest = options.labelled + options.probed + options.held_out
    if options.set == "orbits":
        sizes = (options.sequences, options.val_sequences)
        largest = min(options.shard_sequences, max(sizes))
        if sum(-(-size // options.shard_sequences) for size in sizes) > MAX_SHARDS:
            raise UserError(
                f"--sequences {options.sequences} in shards of {options.shard_sequences}: "
                f"more than {MAX_SHARDS} files; raise --shard-sequences"
            )
    if options.set != "planets" and largest * options.points * CHANNELS > shards.MAX_SHARD_TOKENS:
        most = shards.MAX_SHARD_TOKENS // (options.points * CHANNELS)
        raise UserError(
            f"{largest} sequences of --points {options.points} do not fit in one shard; "
            f"give at most {most}"
        )


def is_complete(out: Path, settings: dict) -> bool:
    """Say whether `out` has the whole set with these settings; refuse a folder with any other."""
    complete = (out / DESCRIPTION).exists()
    found = None
    if complete:
        found = describe(out).get("settings")
        forget_progress(out)
    elif (out / shards.PROGRESS).exists():
        with json_record(out / shards.PROGRESS, f"; delete {out} and start again") as record:
            found = dict(record)
    elif any(out.glob("*.bin")):
        raise UserError(f"{out} holds other shards already; choose an empty folder for --out")
    refuse_other_settings(out, found, settings)
    return complete


def save(path: Path, array: np.ndarray) -> None:
    """Write an array whole or not at all."""
    with whole_file(path) as file:
        np.save(file, array)


# Each set's function writes its files and returns a summary, the number of outputs per point, and
# further fields of the set's description.


def orbits(options: Namespace) -> tuple[str, int, dict]:
    """Write random systems, shard by shard."""
    tasks = []
    size = options.shard_sequences
    for split, total in (("val", options.val_sequences), ("train", options.sequences)):
        for first in range(0, total, size):
            path = options.out / f"orbits_{split}_{len(tasks):06d}.bin"
            tasks.append((path, options, split, first, min(size, total - first)))
    for path, *_, count in tasks:
        expected = count * options.points * CHANNELS
        if path.exists() and shards.check_shard(path) != expected:
            raise UserError(f"{path} does not have {expected} tokens; delete it and rerun")
    left = [task for task in tasks if not task[0].exists()]
    workers = min(options.workers, len(left))
    done = in_processes(write_orbits, left, workers) if workers > 1 else map(write_orbits, left)
    list(tqdm(done, total=len(tasks), initial=len(tasks) - len(left), unit="shard", disable=None))
    total = options.sequences + options.val_sequences
    return f"{total:,} sequences of {options.points} points, {len(tasks)} shards", 0, {}


def write_orbits(task: tuple[Path, Namespace, str, int, int]) -> None:
    """Write one shard: `count` sequences of a split from the number `first`."""
    path, options, split, first, count = task
    with whole_file(path) as file:
        file.write(shards.header_bytes(count * options.points * CHANNELS))
        for start in range(first, first + count, systems.BLOCK):
            size = min(systems.BLOCK, first + count - start)
            points = np.empty((size, options.points, CHANNELS), dtype="<u2")
            stars = random_orbits(
                options.seed, split, start, size, planets=options.planets, heavy=options.heavy
            )
            for index, drawn in stars:
                points[index] = drawn.points(options.points, options.bins)
            file.write(points)


def forces(options: Namespace) -> tuple[str, int, dict]:
    """Write `labelled` sequences with every label, then `probed` and `held_out` with two each."""
    labelled = options.labelled
    probed = options.probed
    held_out = options.held_out
    count = labelled + probed + held_out
    times = (options.points - 1) // 2
    points = np.empty((count, options.points, CHANNELS), dtype=np.uint16)
    states = np.empty((count, times, 6))
    stars = random_orbits(options.seed, "forces", 0, count, planets=1, heavy=options.heavy)
    for index, drawn in stars:
        points[index] = drawn.points(options.points, options.bins)
        states[index] = drawn.states(options.points)
    truth = systems.magnitude(states)[..., None]
    unit = float(truth[:labelled].std()) if options.unit == "deviation" else 1.0
    rng = np.random.default_rng([options.seed, labelled])
    train = np.ones((count, times), dtype=bool)
    train[labelled:] = choose(rng, probed + held_out, times, 2)
    val = ~train
    val[: labelled + probed] = False
    if options.selection == "source":  # all labels but the held-out ones, trained on or not
        val = np.ones_like(train)
        train[labelled + probed :] = False
        val[labelled + probed :] = False
    write_labelled(options.out, points, states, truth / unit, train, val)
    summary = f"{labelled:,} labelled, {probed:,} probed, {held_out:,} held out"
    return summary, 1, {"unit": unit}


def planets(options: Namespace) -> tuple[str, int, dict]:
    """Write each planet's force, divided by its largest; ten labels train, ten more select."""
    solar = systems.solar_system()
    points = solar.points(options.points, options.bins)
    states = solar.states(options.points)
    vectors = solar.force(states[:, None, :, :2])[:, 0]
    unit = np.linalg.norm(vectors, axis=-1).max(axis=1)
    rng = np.random.default_rng(options.seed)
    train = choose(rng, *vectors.shape[:2], 10)
    val = choose(rng, *vectors.shape[:2], 10, among=~train)
    if options.selection == "source":
        val = np.ones_like(train)
    write_labelled(options.out, points, states, vectors / unit[:, None, None], train, val)
    return ", ".join(PLANETS), 2, {"unit": unit.tolist()}


def choose(rng, rows: int, columns: int, count: int, among: np.ndarray | bool = True) -> np.ndarray:
    """Choose at random up to `count` places of `among` in every row; bool (rows, columns)."""
    lot = np.where(among, rng.random((rows, columns)), np.inf)
    return (lot.argsort(axis=1).argsort(axis=1) < count) & among


def write_labelled(out: Path, points, states, labels, train: np.ndarray, val: np.ndarray) -> None:
    """Write both splits: sequences that have a chosen label; labels are (N, times, outputs)."""
    save(out / STATES, states)
    for index, (split, chosen) in enumerate({"val": val, "train": train}.items()):
        kept = chosen.any(axis=1)
        # The planet is at points 1, 3, 5, ...; the time step and the star have no label.
        every = np.full((kept.sum(), points.shape[1] - 1, labels.shape[-1]), np.nan, np.float32)
        every[:, 1::2] = np.where(chosen[kept, :, None], labels[kept], np.nan)
        save(out / f"labels_{split}.npy", every)
        with whole_file(out / f"labelled_{split}_{index:06d}.bin") as file:
            file.write(shards.header_bytes(points[kept].size))
            file.write(points[kept].astype("<u2"))


SETS = {  # name: (function, options of this set alone)
    "orbits": (orbits, ("planets", "sequences", "val_sequences", "shard_sequences")),
    "forces": (forces, ("labelled", "probed", "held_out", "selection", "unit")),
    "planets": (planets, ("selection",)),
}


if __name__ == "__main__":
    run(main)
