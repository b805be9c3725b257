"""bash scripts/test.sh --drill [NAME ...]

Attacks the system and writes what happened: docs/reliability.md and results/reliability.json.

    NAME ...       only these attacks or groups (crashes, storage, input, numbers, security, places,
                   load)
    --jobs 2       attacks at a time; default one
    --short        the short form, a minute or two: what the normal test suite runs
    --out FOLDER   write docs/ and results/ there; default the repository for the whole drill, which
                   must be a clean revision, else a temporary folder
    --list         print the attacks

A table is of one run of one revision. Finished attacks are kept: a drill that was interrupted
continues when the same command is run again at the same revision; otherwise it begins anew. Exit
code 1 when an attack got through.
"""

import functools
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch
import train_helpers as training

from lssar.errors import UserError, did_you_mean
from support.command import Parser, run
from support.command import revision as git_revision
from support.files import write_json

from . import crashes, events, fuzzing, load, numbers, rot, security, storage, strangers  # noqa: F401
from .attack import ATTACKS, GROUPS, Attack
from .children import die_with
from .subjects import shared, warm
from .summary import read_outcomes, write_table

RESULTS, TABLE = "results/reliability.json", "docs/reliability.md"


def main(argv: list[str]) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.list:
        print("\n".join(f"{a.name:32} {a.full:6} x  {a.what}" for a in ATTACKS.values()))
        return 0
    if arguments.jobs < 1:
        raise UserError(f"--jobs {arguments.jobs} must be at least 1")
    chosen = choose(arguments.names, arguments.short)
    out = arguments.out or place_for(arguments)
    torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent
    os.environ["OMP_NUM_THREADS"] = "1"
    form = "short" if arguments.short else "full"
    drill = Drill(out / RESULTS, form, chosen)
    warm()
    waiting = [a.name for a in chosen if drill.outcomes[a.name] is None]
    for outcome in performed(waiting, form, arguments.jobs):
        drill.add(outcome)
    print(f"table: {write_table(out / TABLE, drill.path)}")
    return 0 if all(outcome["passed"] for outcome in drill.outcomes.values()) else 1


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="drill")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    return parser


def choose(names: list[str], short: bool) -> list[Attack]:
    for name in names:
        if name not in ATTACKS and name not in GROUPS:
            raise UserError(f"no attack {name!r}; {did_you_mean(name, [*ATTACKS, *GROUPS])}")
    return [
        a
        for a in ATTACKS.values()
        if (not names or a.name in names or a.group in names) and (a.short or not short)
    ]


def place_for(arguments) -> Path:
    """Return where to write: the repository for the whole drill of a clean revision."""
    if arguments.names or arguments.short:
        return Path(tempfile.mkdtemp(prefix="drill-"))
    if (found := revision()).endswith("+") or found == "unknown":
        raise UserError(
            f"the table in {TABLE} is of one clean revision, this is {found}; commit first, or "
            "give --out FOLDER"
        )
    return training.ROOT


def revision() -> str:
    """Return the code's revision, with + when changed since; what a drill writes is no change."""
    found = git_revision()
    if not found.endswith("+"):
        return found
    but = [f":(top,exclude){name}" for name in (RESULTS, TABLE)]
    command = ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", *but]
    done = subprocess.run(command, cwd=training.ROOT, capture_output=True, text=True, check=True)
    return found if done.stdout else found[:-1]


def performed(names: list[str], form: str, jobs: int) -> Iterator[dict]:
    """Yield the outcomes as they come, of so many attacks at a time."""
    perform_one = functools.partial(perform, form=form)
    if jobs == 1:
        yield from map(perform_one, names)
        return
    # Forked, like all that is attacked: nothing here has a thread, and imports cost seconds.
    options = {"mp_context": get_context("fork"), "initializer": start_worker}
    with ProcessPoolExecutor(jobs, initargs=(os.getpid(),), **options) as pool:
        coming = [pool.submit(perform_one, name) for name in names]
        yield from (done.result() for done in as_completed(coming))


def start_worker(parent: int) -> None:
    die_with(parent)
    shared.cache_clear()  # its subjects are its own


def perform(name: str, form: str) -> dict:
    attack = ATTACKS[name]
    print(f"== {name}: {attack.what}", flush=True)
    outcome = attack.run(getattr(attack, form))
    verdict = "held" if outcome.passed else "BROKE"
    print(f"   {name} {verdict} in {outcome.seconds} s: {outcome.happened}", flush=True)
    return outcome.to_dict()


class Drill:
    """Keep the record of one run: what is finished, on disk at once, and what is to come."""

    def __init__(self, path: Path, form: str, chosen: list[Attack]):
        self.path, self.revision = path, revision()
        self.about = {
            "command": "bash scripts/test.sh --drill" + (" --short" if form == "short" else ""),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "revision": self.revision,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "root": os.geteuid() == 0,
            "left_out": [name for name in ATTACKS if name not in {a.name for a in chosen}],
        }
        self.outcomes: dict[str, dict | None] = {a.name: None for a in chosen}
        self.outcomes |= self._continued()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._save()

    def _continued(self) -> dict[str, dict]:
        """Return what this drill, interrupted, has finished; nothing of another one."""
        found = read_outcomes(self.path)
        if found is None or not found["unfinished"]:
            return {}
        if any(found.get(key) != value for key, value in self.about.items() if key != "date"):
            print(f"{self.path} is of another drill or revision: beginning anew")
            return {}
        return {o["name"]: o for o in found["attacks"] if o["passed"]}

    def add(self, outcome: dict) -> None:
        self.outcomes[outcome["name"]] = outcome | {"revision": revision()}
        self._save()

    def _save(self) -> None:
        unfinished = [name for name, outcome in self.outcomes.items() if outcome is None]
        attacks = [outcome for outcome in self.outcomes.values() if outcome is not None]
        write_json(self.path, self.about | {"unfinished": unfinished, "attacks": attacks})


if __name__ == "__main__":
    sys.argv[0] = "drill"
    run(main)
