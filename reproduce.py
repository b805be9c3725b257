"""python reproduce.py TABLE [TABLE ...] [--scale nano|paper] [--plan]

Trains what the tables need, evaluates it, and writes results/SCALE/TABLE.json with its figure: the
numbers of the paper beside those of this machine. `all` is every table. Runs are shared between
tables. Run again, it continues: what is done is passed over, one failed run stops no other.

    --scale nano     byte-level models on the standard library's sources; two CPU cores (default)
    --scale paper    FineWeb and FineWeb-Edu, 8 GPUs
    --plan           print runs, tokens, hours and disk; start nothing
    --tables-only    train and evaluate nothing; make tables of what there is
    --seeds 0,1,2    for every run; default at nano three for headline and PI, else one
    --jobs 2         at a time; default one, on a CPU two
    --gpus 8         processes of a training; default the GPUs here

Exit codes: 0 all there, 1 something failed (the last lines say what), 2 a mistake in the input.
"""

if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

from pathlib import Path

import torch

from errors import Parser, UserError, did_you_mean, process_count, run, seed_number
from files import write_json
from reproduction.claims import claims_record, show_claims
from reproduction.experiments import Table, all_tables
from reproduction.figures import draw
from reproduction.jobs import Job, run_all
from reproduction.plan import Workspace, describe, jobs_of, training_jobs
from reproduction.records import runs_record
from reproduction.runs import SCALES, all_runs
from reproduction.special import SPECIALS, Special
from reproduction.tables import build, show


def main(argv: list[str]) -> int | None:
    arguments = make_parser().parse_args(argv)
    scale = SCALES[arguments.scale]
    chosen = choose(arguments.tables, arguments.scale)
    gpus = torch.cuda.device_count()
    nano = arguments.scale == "nano"
    processes = arguments.gpus or (1 if nano else gpus or 8)
    space = Workspace(scale, arguments.seeds, processes)
    tables = [t for t in chosen if isinstance(t, Table)]
    specials = [s for s in chosen if isinstance(s, Special)]
    jobs = once([*jobs_of(tables, space), *special_jobs(specials, space)])
    if arguments.plan:
        print(describe([table.name for table in chosen], jobs, space))
        return None
    if not (nano or arguments.tables_only) and gpus < processes:
        raise UserError(
            f"--scale paper trains on {processes} GPUs and {gpus} are here; --gpus N for fewer, "
            "--plan to see what it takes, --scale nano for this machine"
        )
    states = {}
    if not arguments.tables_only:
        parallel = arguments.jobs or (2 if nano else 1)
        states = run_all(jobs, space.runs / scale.name / "logs", parallel)
    write_all(tables, specials, space, states)
    failed = {name: state for name, state in states.items() if state != "done"}
    for name, state in failed.items():
        print(f"{name}: {state}")
    return 1 if failed else None


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--scale", choices=tuple(SCALES), default="nano")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--seeds", type=seeds)
    parser.add_argument("--jobs", type=process_count)
    parser.add_argument("--gpus", type=process_count)
    return parser


def seeds(text: str) -> tuple[int, ...]:
    """ "0,1,2" -> (0, 1, 2), each once."""
    return tuple(dict.fromkeys(map(seed_number, text.split(","))))


def choose(names: list[str], scale: str) -> list[Table | Special]:
    """The tables called so, with those that their scripts make beside them."""
    known = all_tables(scale) | SPECIALS
    for name in names:
        if name != "all" and name not in known:
            raise UserError(f"unknown table {name!r}; {did_you_mean(name, ['all', *known])}")
    wanted = {name + suffix for name in names for suffix in ("", "_passkey", "_edu")}
    return [table for name, table in known.items() if "all" in names or name in wanted]


def once(jobs: list[Job]) -> list[Job]:
    return list({job.name: job for job in jobs}.values())


def special_jobs(specials: list[Special], space: Workspace) -> list[Job]:
    runs, found = all_runs(space.scale.name), []
    for special in specials:
        for key, seed in special.trained(space):
            found += training_jobs(runs[key], seed, runs, space)
        found.append(special.job(space))
    return found


def write_all(
    tables: list[Table], specials: list[Special], space: Workspace, states: dict[str, str]
) -> None:
    """Every table's JSON and figure, then what only all of them together tell."""
    for table in tables:
        built = build(table, space, states)
        built["figures"] = draw(table, built, space)
        save(built, space)
    for special in specials:
        save(special.build(space, states), space)
    write_json(space.table("runs"), runs_record(space))
    claims = claims_record(space)
    write_json(space.table("claims"), claims)
    print(show_claims(claims))


def save(built: dict, space: Workspace) -> None:
    path = space.table(built["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, built)
    print(show(built))
    print("\n".join([f"table: {path}", *(f"figure: {Path(f)}" for f in built["figures"])]))


if __name__ == "__main__":
    run(main)
