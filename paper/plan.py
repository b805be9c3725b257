"""Which jobs the tables need, in what order, and what they will take."""

import itertools
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.shards import MANIFEST
from evaluating.checkpoints import open_checkpoints
from evaluating.results import AS_TRAINED, read_results
from paper.experiments import EXTRAPOLATION, PASSKEY, Table
from paper.jobs import Job, is_done, python, torchrun
from paper.runs import ALL_FACTORS, PASSKEY_FACTORS, Run, Scale, all_runs, run_name, run_seeds
from training.checkpoint import find, read_description
from training.config import Config, load_config
from training.estimate import ASSUMED_DEVICE, ASSUMED_MFU, estimate, planned_backend

GIB = 2**30


@dataclass(frozen=True)
class Workspace:
    """Where the runs and results of one scale are, and how to make them."""

    scale: Scale
    seeds: tuple[int, ...] | None = None
    processes: int = 1
    runs: Path = Path("runs")
    results: Path = Path("results")

    @property
    def folder(self) -> Path:
        """The results of this scale."""
        return self.results / self.scale.name

    def run_directory(self, key: str, seed: int) -> Path:
        return self.runs / self.scale.name / run_name(key, seed)

    def seeds_of(self, key: str) -> tuple[int, ...]:
        return run_seeds(self.scale, key, self.seeds)

    def config(self, run: Run, seed: int) -> Config:
        path, overrides = f"configs/{run.config}.toml", self.overrides(run, seed)
        return load_config(path, overrides, world_size=self.processes)

    def overrides(self, run: Run, seed: int) -> list[str]:
        directory = self.run_directory(run.key, seed)
        changes = {"log.directory": directory.parent, "log.name": directory.name}
        changes["train.seed"] = seed
        if run.init_from:
            changes["train.init_from"] = self.run_directory(run.init_from, seed)
        return [*run.overrides, *(f"--{key}={value}" for key, value in changes.items())]


def jobs_of(tables: list[Table], space: Workspace) -> list[Job]:
    """Corpora, runs and evaluations, each once. The physics table has its own script."""
    found: dict[str, Job] = {}
    for table in tables:
        if table.folder in (EXTRAPOLATION, PASSKEY):
            jobs = length_jobs(table, space)
        else:
            jobs = measured_jobs(table, space) if table.measure else []
        for job in jobs:
            found.setdefault(job.name, job)
    return list(found.values())


def length_jobs(table: Table, space: Workspace) -> list[Job]:
    runs, jobs = all_runs(space.scale.name), []
    evaluate = passkey_job if table.folder == PASSKEY else extrapolation_job
    keys = dict.fromkeys(column.run(row.run) for row in table.rows for column in table.columns)
    for key in keys:
        for seed in space.seeds_of(key):
            jobs += [*training_jobs(key, seed, space), evaluate(runs[key], seed, space)]
    return jobs


def training_jobs(key: str, seed: int, space: Workspace) -> list[Job]:
    """The corpus, the run whose weights it starts from, and the run itself."""
    run = all_runs(space.scale.name)[key]
    config, overrides = space.config(run, seed), space.overrides(run, seed)
    before = training_jobs(run.init_from, seed, space) if run.init_from else []
    corpus = corpus_job(config.data.directory, space.scale)
    arguments = ("train.py", f"configs/{run.config}.toml", *overrides, "--resume")
    command, needs = torchrun(space.processes, *arguments), [j.name for j in (corpus, *before)]
    name, done = f"train {run_name(key, seed)}", partial(is_trained, config)
    return [corpus, *before, Job(name, command, done, tuple(needs), trains=config)]


def corpus_job(directory: str, scale: Scale) -> Job:
    arguments = (*scale.corpora[directory].arguments, "--out", directory)
    name, manifest = f"prepare {Path(directory).name}", Path(directory) / MANIFEST
    return Job(name, python("data/prepare.py", *arguments), manifest.exists)


def is_trained(config: Config) -> bool:
    _, info = read_description(find(config.run_directory))
    return info.step >= config.train.steps


def extrapolation_job(run: Run, seed: int, space: Workspace) -> Job:
    scale, directory = space.scale, space.run_directory(run.key, seed)
    lengths = [scale.length(f) for f in run.factors]
    variants, extra = [AS_TRAINED], []
    if run.windows:
        variants.append(f"window={scale.train_length}")
        extra += ["--window", str(scale.train_length)]
    if run.alphas and seed == space.seeds_of(run.key)[0]:
        variants += [f"alpha={a:g}" for a in run.alphas]
        extra += ["--alpha", ",".join(f"{a:g}" for a in run.alphas)]
    command = torchrun(
        *(space.processes, "eval_extrapolation.py", str(directory)),
        *("--data", space.config(run, seed).data.directory),
        *("--lengths", ",".join(map(str, lengths)), "--tokens", str(scale.eval_tokens)),
        *("--segment", str(scale.length(max(ALL_FACTORS)))),
        *(["--spread"] if scale.spread else []),
        *(*extra, "--no-figures"),
    )
    out = space.folder / EXTRAPOLATION / f"{directory.name}.json"
    return evaluation_job("evaluate", directory, command, out, variants, lengths)


def passkey_job(run: Run, seed: int, space: Workspace) -> Job:
    directory = space.run_directory(run.key, seed)
    lengths = [space.scale.length(f, passkey=True) for f in PASSKEY_FACTORS]
    window = str(space.scale.length(1, passkey=True))
    arguments = ("--lengths", ",".join(map(str, lengths)), "--window", window)
    command = python("passkey.py", str(directory), *arguments)
    out = space.folder / PASSKEY / f"{directory.name}.json"
    variants = [AS_TRAINED, f"window={window}"]
    return evaluation_job("passkey", directory, command, out, variants, lengths)


def evaluation_job(kind: str, directory: Path, command: tuple, out: Path, variants, lengths) -> Job:
    def is_evaluated() -> bool:
        if not out.exists():
            return False
        identity = open_checkpoints([str(directory)])[0].identity
        found = {(r.variant, r.length) for r in read_results(out).records if r.run == identity}
        return found.issuperset(itertools.product(variants, lengths))

    name = directory.name
    return Job(f"{kind} {name}", (*command, "--out", str(out)), is_evaluated, (f"train {name}",))


def measured_jobs(table: Table, space: Workspace) -> list[Job]:
    """The training of its runs, and the one command that measures them all."""
    keys = [row.run for row in table.rows] if "{runs}" in table.measure else []
    count = None if table.all_seeds else 1
    trained = [(key, seed) for key in keys for seed in space.seeds_of(key)[:count]]
    directories = [str(space.run_directory(key, seed)) for key, seed in trained]
    out = space.folder / table.name / f"{table.name}.json"
    words = [[w] if w != "{runs}" else directories for w in table.measure.split()]
    command = python(*itertools.chain(*words), "--out", str(out))
    needs = tuple(f"train {run_name(key, seed)}" for key, seed in trained)
    done = partial(is_complete, out, directories)
    training = [job for key, seed in trained for job in training_jobs(key, seed, space)]
    return [*training, Job(f"measure {table.name}", command, done, needs)]


def is_complete(out: Path, directories: list[str]) -> bool:
    """Whether every run, as it is now, was measured in all that any run was measured in."""
    if not out.exists():
        return False
    found = read_results(out).records
    wanted = {c.identity for c in open_checkpoints(directories)} if directories else set()
    tasks = {(r.variant, r.task) for r in found}
    done = {(r.run, r.variant, r.task) for r in found}
    return bool(done) and all((run, *task) in done for run in wanted for task in tasks)


def describe(names: list[str], jobs: list[Job], space: Workspace) -> str:
    """Runs, tokens, hours and disk of what is still to be done."""
    speed = space.scale.tokens_per_second
    left = {job.name for job in jobs if not is_done(job)}
    training = {job.name: job.trains for job in jobs if job.trains}
    costs = {c.log.name: config_cost(c, speed) if n in left else None for n, c in training.items()}
    named = {f"prepare {Path(d).name}": corpus for d, corpus in space.scale.corpora.items()}
    shards = 2 * sum(corpus.tokens for name, corpus in named.items() if name in left)
    other = {job.name for job in jobs} - named.keys() - training.keys()
    lines = [
        f"tables      {', '.join(names)}",
        *training_lines(costs, speed, space.processes),
        f"evaluations {len(other)}, of which {len(other & left)} are still to be made; "
        "their time is not counted",
        disk_line(costs, shards),
    ]
    return "\n".join(lines)


# Of a run that is still to be trained: tokens, hours (of a GPU, or of this CPU), bytes.
Cost = tuple[int, float, float]


def training_lines(
    costs: dict[str, Cost | None], tokens_per_second: float | None, processes: int, alone=()
) -> list[str]:
    """What the runs take; None is a finished run, and those in `alone` use one process each."""
    left = {name: cost for name, cost in costs.items() if cost is not None}
    tokens, hours = sum(c[0] for c in left.values()), sum(c[1] for c in left.values())
    elapsed = sum(c[1] / (1 if name in alone else processes) for name, c in left.items())
    unit = f"{ASSUMED_DEVICE}-hours at {ASSUMED_MFU:.0%} MFU"
    unit += f", {elapsed:,.1f} hours on {processes} GPUs"
    if tokens_per_second is not None:
        unit = f"hours on this CPU at {tokens_per_second:,.0f} tokens/s"

    def shown(cost: Cost | None) -> str:
        return "done" if cost is None else f"{cost[0]:>15,} tokens  {cost[1]:8.2f} h"

    wide = max(map(len, costs), default=0)
    return [
        f"runs        {len(costs)}, of which {len(left)} are still to be trained",
        *(f"  {name:{wide}s} {shown(cost)}" for name, cost in costs.items()),
        f"tokens      {tokens:,}",
        f"time        {hours:,.1f} {unit}",
    ]


def disk_line(costs: dict[str, Cost | None], shards: float) -> str:
    checkpoints = sum(cost[2] for cost in costs.values() if cost is not None)
    return (
        f"disk        {checkpoints / GIB:,.1f} GiB of checkpoints, {shards / GIB:,.2f} GiB of "
        f"shards; {shutil.disk_usage('.').free / GIB:,.0f} GiB are free"
    )


def config_cost(config: Config, tokens_per_second: float | None) -> Cost:
    e = estimate(config, planned_backend(config, "cpu" if tokens_per_second else "cuda"))
    hours = e.tokens / tokens_per_second / 3600 if tokens_per_second else e.gpu_hours
    # Weights and AdamW's moments, in the newest checkpoints and the best.
    return e.tokens, hours, 12.0 * e.parameters * (config.checkpoint.keep + 1)
