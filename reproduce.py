"""python reproduce.py TABLE [TABLE ...] [--scale nano|mid|single|paper] [--plan]

Trains and evaluates what the tables need, writes results/SCALE/TABLE.json, prints each table beside
the paper's numbers and the verdicts, and draws results/SCALE/TABLE.png. `all` is every table. Runs
are shared between tables. A table comes with the others of its script: `heads` with `parts`. A
failed run does not stop the others; run again, and only what is missing is done.

    --scale nano     byte-level models on the standard library's sources; two CPU cores (default)
    --scale mid      one scale nearer to the paper; two CPU cores
    --scale single   the 45M model on FineWeb, one GPU of 24 GB
    --scale paper    FineWeb and FineWeb-Edu, 8 GPUs
    --plan           print runs, parameters, tokens, FLOPs, memory, disk and hours; start nothing.
                     Without a TABLE: of all of them
    --tables-only    train and evaluate nothing; make the tables from the results that exist
    --markdown       print the tables as Markdown
    --page site/     also write one HTML page of all scales: verdicts, tables, figures
    --summary        print README's table of sentences, numbers and verdicts and draw its figure,
                     results/headline.png; nothing else
    --figures        draw results/SCALE/TABLE.png for every table; default: for the headline
    --seeds 0,1,2    for every run of these tables; results/ keeps its other seeds. Default: by run
                     and scale, in paper/runs.toml
    --jobs 2         jobs to run at a time; default: two on a CPU, else one
    --gpus 8         processes per training run; default: the scale's
    --allow-dirty    run although the code has uncommitted changes; + after the commit marks what
                     is made then

Exit codes: 0 all done, 1 something failed (the last lines say what), 2 a mistake in the input.
"""

from argparse import Namespace
from pathlib import Path

import torch

from lssar.errors import UserError, did_you_mean
from paper import claims, figures
from paper.collect import collect
from paper.experiments import SCALES, all_tables
from paper.jobs import Workspace, describe, jobs_of, run_all
from paper.page import write_page
from paper.tables import fill_all
from support import plots
from support.command import Parser, process_count, revision, run, seed_number
from support.files import locked, make_folder


def parse_arguments(argv: list[str]) -> Namespace:
    """Return the options; `tables` become Tables, with the others of the same scripts."""
    parser = Parser(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--scale", choices=tuple(SCALES), default="nano")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--figures", action="store_true")
    parser.add_argument("--seeds", type=seeds)
    parser.add_argument("--jobs", type=process_count)
    parser.add_argument("--gpus", type=process_count)
    parser.add_argument("--allow-dirty", action="store_true")
    arguments = parser.parse_args(argv)
    tables = all_tables(arguments.scale)
    names = arguments.tables or (["all"] if arguments.plan or arguments.summary else [])
    if not names:
        raise UserError(f"name a table ({', '.join(tables)}), or all; --plan shows the cost first")
    for name in names:
        if name == "all" or name in tables:
            continue
        elsewhere = [scale for scale in SCALES if name in all_tables(scale)]
        if elsewhere:
            raise UserError(
                f"unknown table {name!r} at --scale {arguments.scale}; "
                f"it is one of --scale {', '.join(elsewhere)}"
            )
        raise UserError(f"unknown table {name!r}; {did_you_mean(name, ['all', *tables])}")
    # A table comes with the others of the same script, such as its passkeys.
    scripts = {tables[name].script for name in names if name != "all"}
    arguments.tables = [t for t in tables.values() if "all" in names or t.script in scripts]
    return arguments


def seeds(text: str) -> tuple[int, ...]:
    """Turn "0,1,2" into (0, 1, 2), each once."""
    return tuple(dict.fromkeys(map(seed_number, text.split(","))))


def main(argv: list[str]) -> int | None:
    arguments = parse_arguments(argv)
    scale = SCALES[arguments.scale]
    processes = arguments.gpus or scale.gpus or 1
    parallel = arguments.jobs or (1 if scale.gpus else 2)
    space = Workspace(scale, arguments.seeds, processes)
    if arguments.summary:
        summarise(space.results)
        return None
    jobs = jobs_of(arguments.tables, space)
    if arguments.plan:
        print(describe([table.name for table in arguments.tables], jobs, space))
        return None
    states = {}
    if not arguments.tables_only:
        refuse_to_start(arguments, scale.gpus and processes)
        remedy = "another reproduce.py works there; wait for it, or stop it"
        with locked(space.runs / scale.name, remedy):
            states = run_all(jobs, space.runs / scale.name / "logs", parallel)
            collect(arguments.tables, space)
    show_all(arguments, space)
    failed = [f"{name}: {state}" for name, state in states.items() if state != "done"]
    for line in failed:
        print(line)
    return 1 if failed else None


def summarise(results: Path) -> None:
    """Print README's table and draw its figure, from all scales that have results."""
    scales = [name for name in SCALES if (results / name).is_dir()]
    tables = {name: fill_all(name, results / name)[0] for name in scales}
    print(claims.summary(tables))
    headlines = {name: filled["headline"] for name, filled in tables.items()}
    measured = {name: table for name, table in headlines.items() if table.is_measured}
    plots.save(figures.summary(measured), results / "headline.png", (".png",))
    print(f"figure: {results / 'headline.png'}")


def refuse_to_start(arguments: Namespace, gpus: int) -> None:
    """Refuse a scale that needs more GPUs than there are, and code with uncommitted changes."""
    here = torch.cuda.device_count()
    if here < gpus:
        wanted = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        raise UserError(
            f"--scale {arguments.scale} trains on {wanted}, and here are {here}; --gpus N for "
            "fewer, --plan to see what it takes, --scale nano for this machine"
        )
    if revision().endswith("+") and not arguments.allow_dirty:
        raise UserError(
            "the code has uncommitted changes, so the results would be of no commit; "
            "commit them, or pass --allow-dirty to mark the results with +"
        )


def show_all(arguments: Namespace, space: Workspace) -> None:
    """Print and draw every table, then the verdicts; write the page."""
    filled, problems = fill_all(space.scale.name, space.folder)
    make_folder(space.folder)
    for table in arguments.tables:
        found = filled[table.name]
        print(found.markdown() if arguments.markdown else found.text())
        if arguments.figures or table.name == "headline":
            figure = figures.draw(found)
            if figure is not None:
                written = plots.save(figure, space.folder / f"{table.name}.png", (".png",))
                print(f"figure: {written[0]}")
    print(claims.show(claims.judge_all(filled, space.scale.name)))
    for path, why in problems.items():
        print(f"not read: {path}: {why}")
    if arguments.page:
        write_page(space.results, arguments.page)


if __name__ == "__main__":
    run(main)
