"""bash scripts/test.sh --drill [NAME ...]

Attacks the system and writes what happened: docs/reliability.md and results/reliability.json.

    NAME ...       only these attacks or groups (crashes, storage, input, numbers, security, load)
    --short        the short form, a minute: what the normal test suite runs
    --out FOLDER   write docs/ and results/ there instead of into the repository
    --list         print the attacks

Finished attacks are kept: a drill that was interrupted continues when it is started again, one
that was complete begins anew. Exit code 1 when an attack succeeded against the system.
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
    kept = keep(path, chosen, everything=not arguments.names)
    warm()
    for attack in chosen:
        if attack.name not in kept:
            print(f"== {attack.name}: {attack.what}", flush=True)
            outcome = attack.run(attack.short if arguments.short else attack.full)
            kept[attack.name] = outcome.to_dict()
            verdict = "held" if outcome.passed else "BROKE"
            print(f"   {verdict} in {outcome.seconds} s: {outcome.happened}", flush=True)
            save(path, kept, complete=False)
    save(path, kept, complete=True)
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


def keep(path: Path, chosen: list[Attack], everything: bool) -> dict[str, dict]:
    """Outcomes that need not be made again, by name."""
    found = read_outcomes(path)
    if found is None:
        return {}
    outcomes = {o["name"]: o for o in found["attacks"] if o["name"] in ATTACKS}
    if everything:
        return {} if found["complete"] else {n: o for n, o in outcomes.items() if o["passed"]}
    return {n: o for n, o in outcomes.items() if n not in {a.name for a in chosen}}


def save(path: Path, kept: dict[str, dict], complete: bool) -> None:
    write_json(
        path,
        {
            "command": "bash scripts/test.sh --drill",
            "complete": complete,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "revision": git_revision(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "root": os.geteuid() == 0,
            "attacks": [kept[name] for name in ATTACKS if name in kept],
        },
    )


if __name__ == "__main__":
    sys.argv[0] = "drill"
    run(main)
