"""python reproduce.py TABLE [TABLE ...] [--scale nano|paper] [--plan]

Trains and evaluates what the tables need, prints each table beside the paper's numbers and the
claims with their verdicts, and draws results/SCALE/TABLE.png. `all` is every table. Runs are shared
between tables. A failed run does not stop the others; run again, and only what is missing is done.

    --scale nano     byte-level models on the standard library's sources; two CPU cores (default)
    --scale paper    FineWeb and FineWeb-Edu, 8 GPUs
    --plan           print runs, tokens, hours and disk; start nothing
    --tables-only    train and evaluate nothing; make the tables from the results that exist
    --seeds 0,1,2    for every run; default: three at nano for headline and PI, else one
    --jobs 2         jobs to run at a time; default: two at nano, else one
    --gpus 8         processes per training run; default: the GPUs of this machine

Exit codes: 0 all done, 1 something failed (the last lines say what), 2 a mistake in the input.
"""

from argparse import Namespace

from lssar.errors import UserError, did_you_mean
from paper.experiments import SCALES, Table, all_tables
from support.command import Parser, answer_early, process_count, run, seed_number


def parse_arguments(argv: list[str]) -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--scale", choices=tuple(SCALES), default="nano")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--seeds", type=seeds)
    parser.add_argument("--jobs", type=process_count)
    parser.add_argument("--gpus", type=process_count)
    arguments = parser.parse_args(argv)
    names, tables = arguments.tables, all_tables(arguments.scale)
    known = ["all", *tables]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"unknown table {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    # A table comes with those of the same script, such as its passkeys.
    scripts = {tables[name].script for name in names if name != "all"}
    arguments.tables = [t for t in tables.values() if "all" in names or t.script in scripts]
    return arguments


def seeds(text: str) -> tuple[int, ...]:
    """ "0,1,2" -> (0, 1, 2), each once."""
    return tuple(dict.fromkeys(map(seed_number, text.split(","))))


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(parse_arguments)

import torch

from paper.claims import show_claims
from paper.evidence import Evidence
from paper.jobs import run_all
from paper.plan import Workspace, describe, jobs_of, write_runs
from paper.table_figures import draw
from paper.tables import build, show
from support import plots
from support.files import make_folder


def main(argv: list[str]) -> int | None:
    arguments = parse_arguments(argv)
    nano, gpus = arguments.scale == "nano", torch.cuda.device_count()
    processes = arguments.gpus or (1 if nano else gpus or 8)
    space = Workspace(SCALES[arguments.scale], arguments.seeds, processes)
    jobs = jobs_of(arguments.tables, space)
    if arguments.plan:
        print(describe([table.name for table in arguments.tables], jobs, space))
        return None
    if not (nano or arguments.tables_only) and gpus < processes:
        options = "--gpus N for fewer, --plan to see what it takes, --scale nano for this machine"
        raise UserError(f"--scale paper trains on {processes} GPUs and {gpus} are here; {options}")
    states = {}
    if not arguments.tables_only:
        parallel = arguments.jobs or (2 if nano else 1)
        states = run_all(jobs, space.runs / arguments.scale / "logs", parallel)
    show_all(arguments.tables, space)
    failed = [f"{name}: {state}" for name, state in states.items() if state != "done"]
    for line in failed:
        print(line)
    return 1 if failed else None


def show_all(tables: list[Table], space: Workspace) -> None:
    """Print and draw every table, then the claims, and record what the runs were."""
    make_folder(space.folder)
    write_runs(space)
    evidence = Evidence(space.scale.name, space.folder)
    for built in (build(evidence, table) for table in tables):
        print(show(built))
        if figure := draw(built, evidence):
            written = plots.save(figure, space.folder / f"{built.table.name}.png")
            print(f"figure: {written[0]}")
    print(show_claims(evidence))
    for path, why in evidence.problems.items():
        print(f"not read: {path}: {why}")


if __name__ == "__main__":
    run(main)
