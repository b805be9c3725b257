"""python physics/simulate.py orbits|forces|planets --out DIR: orbits as records for training.

  orbits    random systems of 1 to 10 planets, for pre-training (10,000,000 sequences, 40 GB)
  forces    systems of one planet with the magnitude of the force on it as labels
  planets   the eight planets, each alone with the Sun, with the force's direction and relative size

Defaults are the paper's scale. `--selection source` validates force predictions as Vafa et al.
do, on the very labels that are hidden from training; by default labels are held out for it that
nothing else sees.

An interrupted simulation continues when the same command is run again, and ends with the same
bytes, for any number of --workers.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.command import MOST_PROCESSES, Parser, answer_early, positive, run, seed_number, whole


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("set", choices=("orbits", "forces", "planets"))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--points", type=whole(24, 100_000), default=1000, help="of a sequence")
    parser.add_argument("--bins", type=whole(2, 65533), default=7000, help="of a coordinate")
    parser.add_argument("--seed", type=seed_number, default=0)
    group = parser.add_argument_group("orbits")
    group.add_argument("--sequences", type=positive, default=10_000_000)
    group.add_argument("--val-sequences", type=positive, default=3_000)
    group.add_argument("--shard-sequences", type=positive, default=50_000)
    some, workers = whole(0, 10), whole(0, MOST_PROCESSES)
    group.add_argument("--planets", type=some, default=0, help="of a system; 0: 1 to 10 at random")
    group.add_argument("--workers", type=workers, default=os.cpu_count() or 1, help="processes")
    group = parser.add_argument_group("forces and planets")
    group.add_argument("--labelled", type=positive, default=9_000, help="sequences with all labels")
    group.add_argument("--probed", type=positive, default=1_000, help="sequences with two labels")
    group.add_argument("--held-out", type=positive, default=300, help="sequences for the selection")
    group.add_argument("--selection", default="held-out", choices=("held-out", "source"))
    group.add_argument("--unit", default="raw", choices=("raw", "deviation"), help="of forces")
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import numpy as np
from tqdm import tqdm

from data.pipeline import deaf_children, start_worker
from data.records import DESCRIPTION, describe
from data.shards import MAX_SHARD_TOKENS, PROGRESS, check_shard, header_bytes
from data.writer import locked
from lssar.errors import UserError
from physics.kepler import G
from physics.systems import BLOCK, CHANNELS, PLANETS, Grid, points_of, random_systems, solar_system
from support.files import read_text, reading, sync, temporary_of, write_json, writing

MAX_SHARDS = 10**6
STATES = "states.npy"  # (sequences, times, 6) float64 beside the labels


def main(argv: list[str]) -> None:
    options = make_parser().parse_args(argv)
    check(options)
    with locked(options.out):
        SETS[options.set](options)


def check(options) -> None:
    """Whether the set's shards can be written: their number has six digits, their size 31 bits."""
    largest = options.labelled + options.probed + options.held_out
    if options.set == "orbits":
        sizes = (options.sequences, options.val_sequences)
        largest = min(options.shard_sequences, max(sizes))
        if sum(-(-size // options.shard_sequences) for size in sizes) > MAX_SHARDS:
            raise UserError(
                f"--sequences {options.sequences} in shards of {options.shard_sequences} are more "
                f"than {MAX_SHARDS} files; raise --shard-sequences"
            )
    if options.set != "planets" and largest * options.points * CHANNELS > MAX_SHARD_TOKENS:
        raise UserError(
            f"{largest} sequences of --points {options.points} do not fit in one shard; give fewer "
            f"(at most {MAX_SHARD_TOKENS // (options.points * CHANNELS)})"
        )


# --- a folder that is begun, continued or finished -----------------------------------------------


def begin(out: Path, settings: dict) -> bool:
    """Whether there is anything left to do in `out`, which belongs to these settings alone."""
    found = None
    if (out / DESCRIPTION).exists():
        found = describe(out).get("settings")
    elif (out / PROGRESS).exists():
        with reading(out / PROGRESS):
            found = _json(out / PROGRESS)
    elif any(out.glob("*.bin")):
        raise UserError(f"{out} holds other shards already; choose an empty folder for --out")
    if found is not None and found != settings:
        key = next(k for k in {**settings, **found} if settings.get(k) != found.get(k))
        raise UserError(
            f"{out} was made with {key} = {found.get(key)}, this is {settings.get(key)}; "
            "choose another --out or delete it"
        )
    if (out / DESCRIPTION).exists():
        (out / PROGRESS).unlink(missing_ok=True)
        print(f"{out} is complete")
        return False
    write_json(out / PROGRESS, settings)
    return True


def _json(path: Path) -> dict:
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; delete {path.parent} and start again") from None


def finish(out: Path, settings: dict, outputs: int, **more) -> None:
    """Declare the set complete."""
    sizes = {"points": settings["points"], "channels": CHANNELS, "outputs": outputs}
    write_json(out / DESCRIPTION, {**sizes, "settings": settings, **more})
    (out / PROGRESS).unlink(missing_ok=True)
    sync(out)


# --- orbits --------------------------------------------------------------------------------------


def orbits(options) -> None:
    keys = ("set", "points", "bins", "seed", "planets")
    keys += ("sequences", "val_sequences", "shard_sequences")
    settings = {key: getattr(options, key) for key in keys}
    if not begin(options.out, settings):
        return
    tasks = list(shard_tasks(options.out, settings))
    left = [task for task in tasks if not is_written(task)]
    with tqdm(total=len(tasks), initial=len(tasks) - len(left), unit="shard", disable=None) as bar:
        for _ in in_processes(write_shard, left, options.workers):
            bar.update()
    finish(options.out, settings, outputs=0)
    total = settings["sequences"] + settings["val_sequences"]
    print(f"{options.out}: {total:,} sequences of {settings['points']} points, {len(tasks)} shards")


def shard_tasks(out: Path, settings: dict):
    """(path, settings, split, first, count) of every shard, validation first."""
    index, size = 0, settings["shard_sequences"]
    for split, total in (("val", settings["val_sequences"]), ("train", settings["sequences"])):
        for first in range(0, total, size):
            path = out / f"orbits_{split}_{index:06d}.bin"
            yield path, settings, split, first, min(size, total - first)
            index += 1


def is_written(task: tuple) -> bool:
    path, settings, _, _, count = task
    if not path.exists():
        return False
    expected = count * settings["points"] * CHANNELS
    if check_shard(path) != expected:
        raise UserError(f"{path} has not the {expected} tokens it should; delete it and run again")
    return True


def write_shard(task: tuple) -> None:
    """One shard, block by block under a temporary name; there whole or not at all."""
    path, settings, split, first, count = task
    grid, points, temporary = Grid(settings["bins"]), settings["points"], temporary_of(path)
    with writing(path):
        with temporary.open("wb") as file:
            file.write(header_bytes(count * points * CHANNELS))
            for start in range(first, first + count, BLOCK):
                size = min(BLOCK, first + count - start)
                systems = random_systems(settings["seed"], split, start, size, settings["planets"])
                walk = points_of(systems, size, points, grid)
                file.write(np.ascontiguousarray(walk, dtype="<u2"))
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)


def in_processes(function, tasks: list, workers: int):
    """Yields as each task is done; with 0 or 1 workers in this process."""
    if workers < 2 or len(tasks) < 2:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(workers, len(tasks)), mp_context=context, initializer=start_worker
    ) as pool:
        try:
            with deaf_children():
                futures = [pool.submit(function, task) for task in tasks]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# --- labelled sets -------------------------------------------------------------------------------


def forces(options) -> None:
    """Sequences 0 ... labelled - 1 with every label, then `probed` and `held_out` with two each."""
    keys = ("set", "points", "bins", "seed", "labelled", "probed", "held_out", "selection", "unit")
    settings = {key: getattr(options, key) for key in keys}
    if not begin(options.out, settings):
        return
    labelled, probed, held_out = options.labelled, options.probed, options.held_out
    count = labelled + probed + held_out
    points = np.empty((count, options.points, CHANNELS), dtype=np.uint16)
    states = np.empty((count, (options.points - 1) // 2, 6))
    for index, systems in random_systems(options.seed, "forces", 0, count, planets=1):
        points[index] = systems.points(options.points, Grid(options.bins))
        states[index] = systems.states(options.points)
    truth = magnitude(states)[..., None]
    unit = float(truth[:labelled].std()) if options.unit == "deviation" else 1.0
    rng = np.random.default_rng([options.seed, labelled])
    shown = np.ones(truth.shape[:2], dtype=bool)
    shown[labelled:] = choose(rng, probed + held_out, truth.shape[1], 2)
    labels = truth / unit
    if options.selection == "source":  # every label of all but the held-out, seen or not
        train, val = slice(0, labelled + probed), slice(0, labelled + probed)
        hidden = np.ones_like(shown)
    else:
        train, val, hidden = slice(None), slice(labelled + probed, None), ~shown
    write_labelled(
        options.out,
        train=(points[train], only(labels, shown)[train]),
        val=(points[val], only(labels, hidden)[val]),
        states=states,
    )
    finish(options.out, settings, outputs=1, unit=unit)
    print(f"{options.out}: {labelled:,} labelled, {probed:,} probed, {held_out:,} held out")


def planets(options) -> None:
    """The force over each planet's largest, ten labels a planet; ten more for the selection."""
    settings = {
        key: getattr(options, key) for key in ("set", "points", "bins", "seed", "selection")
    }
    if not begin(options.out, settings):
        return
    systems = solar_system()
    points = systems.points(options.points, Grid(options.bins))
    states = systems.states(options.points)
    vectors = systems.orbits.force(states[:, None, :, :2])[:, 0]
    unit = np.linalg.norm(vectors, axis=-1).max(axis=1)
    rng = np.random.default_rng(options.seed)
    shown = choose(rng, len(PLANETS), vectors.shape[1], 10)
    hidden = choose(rng, len(PLANETS), vectors.shape[1], 10, among=~shown)
    labels = vectors / unit[:, None, None]
    if options.selection == "source":
        hidden = np.ones_like(shown)
    write_labelled(
        options.out,
        train=(points, only(labels, shown)),
        val=(points, only(labels, hidden)),
        states=states,
    )
    finish(options.out, settings, outputs=2, unit=unit.tolist())
    print(f"{options.out}: {', '.join(PLANETS)}")


def magnitude(states: np.ndarray) -> np.ndarray:
    """Newton's law: G m1 m2 / r^2 of states (..., 6)."""
    return G * states[..., 4] * states[..., 5] / (states[..., 0] ** 2 + states[..., 1] ** 2)


def choose(
    rng: np.random.Generator, rows: int, columns: int, count: int, among: np.ndarray | None = None
) -> np.ndarray:
    """(rows, columns) bool with `count` chosen in every row, out of `among`, or all of those."""
    among = np.ones((rows, columns), dtype=bool) if among is None else among
    lot = np.where(among, rng.random((rows, columns)), np.inf)
    return (lot.argsort(axis=1).argsort(axis=1) < count) & among


def only(labels: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Labels (N, times, outputs) where `shown`, NaN elsewhere."""
    return np.where(shown[..., None], labels, np.nan)


def write_labelled(out: Path, *, train: tuple, val: tuple, states: np.ndarray) -> None:
    for index, (split, (points, labels)) in enumerate((("val", val), ("train", train))):
        # The planet is at points 1, 3, 5, ...; the time step and the star have no label.
        every = np.full((len(points), points.shape[1] - 1, labels.shape[-1]), np.nan, np.float32)
        every[:, 1::2] = labels
        write_whole(out / f"labels_{split}.npy", lambda file, value=every: np.save(file, value))
        body = np.ascontiguousarray(points, dtype="<u2")
        write_whole(
            out / f"labelled_{split}_{index:06d}.bin",
            lambda file, value=body: file.write(header_bytes(value.size) + value.tobytes()),
        )
    write_whole(out / STATES, lambda file: np.save(file, states))


def write_whole(path: Path, write) -> None:
    temporary = temporary_of(path)
    with writing(path):
        with temporary.open("wb") as file:
            write(file)
        sync(temporary)
        temporary.replace(path)


SETS = {"orbits": orbits, "forces": forces, "planets": planets}


if __name__ == "__main__":
    run(main)
