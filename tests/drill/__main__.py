"""bash scripts/test.sh --drill [NAME ...]

Attacks the system and writes what happened: docs/reliability.md and results/reliability.json.

    NAME ...       only these attacks or groups (crashes, storage, input, numbers, security, load)
    --short        the short form, a minute: what the normal test suite runs
    --out FOLDER   write docs/ and results/ there instead of into the repository
    --list         print the attacks

Finished attacks are kept: a drill that was interrupted continues when it is started again, one
that was complete begins anew. Groups may run at the same time, each by its name. Exit code 1 when
an attack got through.
"""

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import training

from errors import Parser, UserError, did_you_mean, run
from files import write_json
from run_log import git_revision

from . import crashes, fuzzing, load, numbers, security, storage  # noqa: F401 - they register
from .attack import ATTACKS, GROUPS, Attack
from .report import read_outcomes, write_table
from .subjects import warm


def main(argv: list[str]) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.list:
        print("\n".join(f"{a.name:32} {a.full:6} x  {a.what}" for a in ATTACKS.values()))
        return 0
    torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = choose(arguments.names, arguments.short)
    path = arguments.out / "results/reliability.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {} if arguments.names else continued(path)
    save(path, {a.name: None for a in chosen} | kept)
    warm()
    for attack in chosen:
        if attack.name not in kept:
            print(f"== {attack.name}: {attack.what}", flush=True)
            outcome = attack.run(attack.short if arguments.short else attack.full)
            kept[attack.name] = outcome.to_dict() | {"revision": git_revision()}
            verdict = "held" if outcome.passed else "BROKE"
            print(f"   {verdict} in {outcome.seconds} s: {outcome.happened}", flush=True)
            save(path, {attack.name: kept[attack.name]})
    table = write_table(arguments.out / "docs/reliability.md", path)
    print(f"table: {table}")
    return 0 if all(outcome["passed"] for outcome in kept.values()) else 1


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="drill")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path, default=training.ROOT)
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


def continued(path: Path) -> dict[str, dict]:
    """What an interrupted drill has finished; nothing when the last one was complete."""
    found = read_outcomes(path)
    if found is None or found["unfinished"] == []:
        path.unlink(missing_ok=True)
        return {}
    return {o["name"]: o for o in found["attacks"] if o["name"] in ATTACKS and o["passed"]}


def save(path: Path, mine: dict[str, dict | None]) -> None:
    """Add these outcomes to those on disk; None for one that is still to come."""
    found = read_outcomes(path) or {"attacks": [], "unfinished": []}
    known = {o["name"]: o for o in found["attacks"]} | dict.fromkeys(found["unfinished"]) | mine
    write_json(
        path,
        {
            "command": "bash scripts/test.sh --drill",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "root": os.geteuid() == 0,
            "unfinished": [name for name in ATTACKS if name in known and known[name] is None],
            "attacks": [known[name] for name in ATTACKS if known.get(name)],
        },
    )


if __name__ == "__main__":
    sys.argv[0] = "drill"
    run(main)
