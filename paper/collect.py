"""Makes results/SCALE/TABLE.json of the numbers that the jobs have measured.

Evaluations write to runs/SCALE/evaluations, one file for each run, with every detail. A table has
one file of all its runs, with the details that tables, figures and comparisons need.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluating.checkpoints import open_checkpoints
from evaluating.results import Record, Results, read_results
from lssar.errors import UserError
from paper.experiments import Run, Table
from paper.jobs import Workspace
from support.files import lookup, make_folder

# Details of a record that stay.
KEPT = ("by_segment", "wilson_low", "wilson_high", "verdict", "accuracy_at_near", "equations")


def collect(tables: list[Table], space: Workspace) -> None:
    """Write results/SCALE/TABLE.json of every table that has evaluations here."""
    make_folder(space.folder)
    for table in tables:
        if table.records:
            continue
        runs = space.runs_of(table)
        sources = [path for path in evaluation_files(table, runs, space) if path.exists()]
        if not sources:
            continue
        if table.has_runs:
            described = trained_runs(runs, space)
        else:
            described = {}
            for path in sources:
                described |= read_results(path).runs
        kind = table.name if table.measure else table.measured_by
        merge(space.folder / f"{table.name}.json", kind, described, sources, space.seeds)


def evaluation_files(table: Table, runs: list[tuple[Run, int]], space: Workspace) -> list[Path]:
    """Return the files that the jobs of a table write."""
    if table.measure:
        return [space.evaluations / f"{table.name}.json"]
    names = [f"{table.measured_by}-{run.key}-s{seed}.json" for run, seed in runs]
    return [space.evaluations / name for name in names]


def trained_runs(runs: list[tuple[Run, int]], space: Workspace) -> dict[str, dict]:
    """Describe the models that are here for a table's file, by their identity."""
    found = {}
    for run, seed in runs:
        directory = space.run_directory(run.key, seed)
        try:
            checkpoint = open_checkpoints([str(directory)])[0]
        except UserError:
            continue  # it has not been trained here
        found[checkpoint.identity] = {
            "run": run.key,
            "seed": seed,
            "config": run.config,
            "options": run.options,
            "lr": space.config(run, seed).train.lr,
            "step": checkpoint.info.step,
            "train_length": checkpoint.info.train_length,
            "trained_at": lookup(directory / "run.json", "revision") or "",
            "model": {"attention": {"name": checkpoint.config.attention.name}},
        }
    return found


def merge(
    out: Path,
    kind: str,
    runs: dict[str, dict],
    sources: Sequence[Path],
    seeds: Sequence[int] | None = None,
) -> int:
    """Write the records of several results files, of these runs alone, into one compact file.

    `runs` has the description of each model by its identity. With `seeds`, records of other seeds
    that `out` has stay. Returns the number of records.
    """
    measured = [read_results(path) for path in sources]
    settings = measured[0].settings
    results = Results(out, kind, settings, measured[0].about)
    if seeds is not None and out.exists():
        earlier = read_results(out)
        settings = earlier.settings
        for identity, run in earlier.runs.items():
            if identity not in runs and run.get("seed") not in seeds:
                results.runs[identity] = run
        results.records = [record for record in earlier.records if record.run in results.runs]
    for found in measured:
        if found.settings != settings:
            raise UserError(
                f"{found.path} was measured with other settings than the rest of {out}; "
                "delete it, and the same command measures it again"
            )
        results.records += [compact(record) for record in found.records if record.run in runs]
    results.runs |= runs
    results.save()
    return len(results.records)


def compact(record: Record) -> Record:
    """Return the record without details that no table, figure or comparison needs."""
    details = {key: value for key, value in record.details.items() if key in KEPT}
    values = details.get("by_segment")
    if values and None not in values:
        details["by_segment"] = [float(f"{value:.6g}") for value in values]
    return replace(record, details=details, command="")
