"""python reproduce.py TABLE [TABLE ...] [--scale nano|single|paper] [--plan]

Trains and evaluates what the tables need, prints each table beside the paper's numbers and the
claims with their verdicts, and draws results/SCALE/TABLE.png. `all` is every table. Runs are shared
between tables. A failed run does not stop the others; run again, and only what is missing is done.

    --scale nano     byte-level models on the standard library's sources; two CPU cores (default)
    --scale single   the 45M model on FineWeb, one GPU of 24 GB
    --scale paper    FineWeb and FineWeb-Edu, 8 GPUs
    --plan           print runs, tokens, hours, memory and disk; start nothing. Without a TABLE:
                     of all of them
    --tables-only    train and evaluate nothing; make the tables from the results that exist
    --seeds 0,1,2    for every run of these tables; default: by run and scale, in paper/runs.toml
    --jobs 2         jobs to run at a time; default: two at nano, else one
    --gpus 8         processes per training run; default: the scale's
    --gpu h100       count the hours of a plan on this GPU (training/devices.toml); default: the
                     one that is here, else the scale's
    --allow-dirty    run although the code has uncommitted changes; + after the commit marks what
                     is made then

Exit codes: 0 all done, 1 something failed (the last lines say what), 2 a mistake in the input.
"""

from argparse import Namespace

from lssar.errors import UserError, did_you_mean
from paper.experiments import SCALES, Table, all_tables
from support.command import Parser, answer_early, process_count, revision, run, seed_number
from training.hours import DEVICES, planned_device


def parse_arguments(argv: list[str]) -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--scale", choices=tuple(SCALES), default="nano")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--seeds", type=seeds)
    parser.add_argument("--jobs", type=process_count)
    parser.add_argument("--gpus", type=process_count)
    parser.add_argument("--gpu", choices=tuple(DEVICES))
    parser.add_argument("--allow-dirty", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.gpu and not SCALES[arguments.scale].gpus:
        place = f"--scale {arguments.scale} is for a CPU"
        raise UserError(f"--gpu {arguments.gpu}: {place}; leave it out")
    names, tables = arguments.tables or ["all"] * arguments.plan, all_tables(arguments.scale)
    if not names:
        raise UserError(f"name a table ({', '.join(tables)}), or all; --plan shows the cost first")
    for name in (name for name in names if name not in ("all", *tables)):
        wrong, guess = f"unknown table {name!r}", did_you_mean(name, ["all", *tables])
        if elsewhere := [scale for scale in SCALES if name in all_tables(scale)]:
            wrong += f" at --scale {arguments.scale}"
            guess = f"it is one of --scale {', '.join(elsewhere)}"
        raise UserError(f"{wrong}; {guess}")
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
from paper.costs import describe
from paper.evidence import Evidence
from paper.jobs import run_all
from paper.plan import Workspace, jobs_of, write_runs
from paper.table_figures import draw
from support import plots
from support.files import make_folder


def main(argv: list[str]) -> int | None:
    arguments = parse_arguments(argv)
    scale = SCALES[arguments.scale]
    processes = arguments.gpus or scale.gpus or 1
    parallel = arguments.jobs or (1 if scale.gpus else 2)
    space = Workspace(scale, arguments.seeds, processes, parallel)
    jobs = jobs_of(arguments.tables, space)
    if arguments.plan:
        device = planned_device(arguments.gpu, scale.gpu) if scale.gpus else None
        print(describe([table.name for table in arguments.tables], jobs, space, device))
        return None
    states = {}
    if not arguments.tables_only:
        refuse_to_start(arguments, scale.gpus and processes)
        states = run_all(jobs, space.runs / arguments.scale / "logs", parallel)
    show_all(arguments.tables, space)
    failed = [f"{name}: {state}" for name, state in states.items() if state != "done"]
    for line in failed:
        print(line)
    return 1 if failed else None


def refuse_to_start(arguments: Namespace, needed: int) -> None:
    here = torch.cuda.device_count()
    if here < needed:
        fewer = "--gpus N for fewer, " if needed > 1 else ""
        options = f"{fewer}--plan to see what it takes, --scale nano for this machine"
        gpus = "a GPU, and there is none" if needed == 1 else f"{needed} GPUs, and there are {here}"
        trains = f"--scale {arguments.scale} trains on {gpus} here"
        raise UserError(f"{trains}; {options}")
    if revision().endswith("+") and not arguments.allow_dirty:
        dirty = "the code has uncommitted changes, so the results would be of no commit"
        raise UserError(f"{dirty}; commit them, or pass --allow-dirty to mark the results with +")


def show_all(tables: list[Table], space: Workspace) -> None:
    """Print and draw every table, then the claims, and record what the runs were."""
    make_folder(space.folder)
    write_runs(space)
    evidence = Evidence(space.scale.name, space.folder)
    for sheet in map(evidence.sheet, tables):
        print(sheet)
        if figure := draw(sheet):
            written = plots.save(figure, space.folder / f"{sheet.table.name}.png")
            print(f"figure: {written[0]}")
    print(show_claims(evidence))
    for path, why in evidence.problems.items():
        print(f"not read: {path}: {why}")


if __name__ == "__main__":
    run(main)
