"""Which jobs the tables need, in what order, what they will take, and what their runs were."""

import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from data.shards import MANIFEST, describe_set
from evaluating.checkpoints import open_checkpoints
from evaluating.results import AS_TRAINED, read_results
from paper import experiments
from paper.evidence import RUNS, read_runs
from paper.experiments import EXTRAPOLATION, PASSKEY, Run, Scale, Table, all_runs, run_name
from paper.jobs import Job, is_done
from support.files import read_text, write_json
from training.checkpoint import find, read_description
from training.config import Config, load_config, parse_config
from training.estimate import ASSUMED_DEVICE, ASSUMED_MFU, estimate, planned_backends
from training.run_log import read_metrics

GIB = 2**30


@dataclass(frozen=True)
class Workspace:
    """Where the runs and results of one scale are, and how to make them."""

    scale: Scale
    seeds: Sequence[int] | None = None
    processes: int = 1
    runs: Path = Path("runs")
    results: Path = Path("results")

    @property
    def folder(self) -> Path:
        return self.results / self.scale.name

    def run_directory(self, key: str, seed: int) -> Path:
        return self.runs / self.scale.name / run_name(key, seed)

    def seeds_of(self, key: str) -> Sequence[int]:
        return self.scale.seeds_of(key) if self.seeds is None else self.seeds

    def config(self, run: Run, seed: int) -> Config:
        path = f"configs/{run.config}.toml"
        return load_config(path, self.options(run, seed), world_size=self.processes)

    def options(self, run: Run, seed: int) -> list[str]:
        """Of train.py."""
        path = self.run_directory(run.key, seed)
        changes = {"log.directory": path.parent, "log.name": path.name, "train.seed": seed}
        if run.init_from:
            changes["train.init_from"] = self.run_directory(run.init_from, seed)
        return [*run.options.split(), *(f"--{key}={value}" for key, value in changes.items())]


def python(*command: str, processes: int = 1) -> tuple[str, ...]:
    """The command line of a script, started by torchrun if it takes several processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return (sys.executable, *(launcher if processes > 1 else ()), *command)


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
    """The training of its runs, and one evaluation of each."""
    jobs = []
    for key in dict.fromkeys(c.run(row.run) for row in table.rows for c in table.columns):
        for seed in space.seeds_of(key):
            jobs += training_jobs(key, seed, space)
            jobs.append(evaluation_job(key, seed, space, passkey=table.folder == PASSKEY))
    return jobs


def measured_jobs(table: Table, space: Workspace) -> list[Job]:
    """The training of its runs, and the one command that measures them all."""
    keys = [row.run for row in table.rows] if "{runs}" in table.measure else []
    count = None if table.all_seeds else 1
    trained = [(key, seed) for key in keys for seed in space.seeds_of(key)[:count]]
    directories = [str(space.run_directory(*run)) for run in trained]
    out = space.folder / table.name / f"{table.name}.json"
    words = [[word] if word != "{runs}" else directories for word in table.measure.split()]
    command = python(*itertools.chain(*words), "--out", str(out))
    needs = tuple(f"train {run_name(*run)}" for run in trained)
    done = partial(is_complete, out, directories)
    training = [job for run in trained for job in training_jobs(*run, space)]
    return [*training, Job(f"measure {table.name}", command, done, needs)]


def is_complete(out: Path, directories: list[str]) -> bool:
    """Whether every run, as it is now, was measured in all that any run was measured in."""
    done = {(r.run, r.variant, r.task) for r in read_results(out).records}
    runs = [c.identity for c in open_checkpoints(directories)]
    return bool(done) and all((run, *measured) in done for run in runs for _, *measured in done)


def training_jobs(key: str, seed: int, space: Workspace) -> list[Job]:
    """The corpus, the run whose weights it starts from, and the run itself."""
    run = all_runs(space.scale.name)[key]
    config = space.config(run, seed)
    folder = config.data.directory
    prepare = python("data/prepare.py", *space.scale.corpora[folder]["arguments"], "--out", folder)
    needs = [Job(f"prepare {Path(folder).name}", prepare, (Path(folder) / MANIFEST).exists)]
    needs += training_jobs(run.init_from, seed, space) if run.init_from else []
    arguments = (f"configs/{run.config}.toml", *space.options(run, seed), "--resume")
    command = python("train.py", *arguments, processes=space.processes)
    name, done = f"train {run_name(key, seed)}", partial(is_trained, config)
    return [*needs, Job(name, command, done, tuple(job.name for job in needs), trains=config)]


def is_trained(config: Config) -> bool:
    _, info = read_description(find(config.run_directory))
    return info.step >= config.train.steps


def evaluation_job(key: str, seed: int, space: Workspace, *, passkey: bool) -> Job:
    """The passkeys or the losses of one run, written to a file of its own."""
    scale, run = space.scale, all_runs(space.scale.name)[key]
    factors = experiments.PASSKEY_FACTORS if passkey else run.factors
    lengths = [scale.length(factor, passkey) for factor in factors]
    windows = [scale.length(1, passkey)] if passkey or run.windows else []
    options = {"lengths": lengths, "window": windows, "alpha": run.alphas}
    if passkey:
        options["form"] = [run.form]
    else:
        options["data"] = [space.config(run, seed).data.directory]
        options["tokens"] = [scale.eval_tokens]
        options["segment"] = [scale.length(max(experiments.ALL_FACTORS))]
    name, directory = run_name(key, seed), str(space.run_directory(key, seed))
    out = space.folder / (PASSKEY if passkey else EXTRAPOLATION) / f"{name}.json"
    words = ["passkey.py" if passkey else "eval_extrapolation.py", directory, "--out", str(out)]
    for option, values in options.items():
        words += [f"--{option}", ",".join(map(str, values))] if values else []
    words += [] if passkey else ["--no-figures", *(["--spread"] if scale.spread else [])]
    words += ["--current-length"] if run.current else []
    command = python(*words, processes=1 if passkey else space.processes)
    variants = [AS_TRAINED, *(f"window={n}" for n in windows)]
    variants += [f"alpha={a:g}" for a in run.alphas] + (["L=current"] if run.current else [])
    done = partial(is_evaluated, out, directory, set(itertools.product(variants, lengths)))
    return Job(f"{'passkey' if passkey else 'evaluate'} {name}", command, done, (f"train {name}",))


def is_evaluated(out: Path, directory: str, wanted: set[tuple[str, int]]) -> bool:
    """Whether the run, as it is now, was evaluated in every (variant, length)."""
    records = read_results(out).records
    identity = open_checkpoints([directory])[0].identity
    return wanted <= {(r.variant, r.length) for r in records if r.run == identity}


def describe(names: list[str], jobs: list[Job], space: Workspace) -> str:
    """Runs, tokens, hours and disk of what is still to be done."""
    speed = space.scale.tokens_per_second
    left = {job.name for job in jobs if not is_done(job)}
    training = {job.name: job.trains for job in jobs if job.trains}
    costs = {c.log.name: config_cost(c, speed) if n in left else None for n, c in training.items()}
    sizes = {f"prepare {Path(d).name}": c["tokens"] for d, c in space.scale.corpora.items()}
    shards = 2 * sum(tokens for name, tokens in sizes.items() if name in left)
    other = {job.name for job in jobs} - sizes.keys() - training.keys()
    made = f"{len(other)}, of which {len(other & left)} are still to be made"
    lines = [f"tables      {', '.join(names)}", *training_lines(costs, speed, space.processes)]
    lines += [f"evaluations {made}; their time is not counted", disk_line(costs, shards)]
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
    lines, wide = [], max(map(len, costs), default=0)
    for name, cost in costs.items():
        shown = "done" if cost is None else f"{cost[0]:>15,} tokens  {cost[1]:8.2f} h"
        lines.append(f"  {name:{wide}s} {shown}")
    trained = f"runs        {len(costs)}, of which {len(left)} are still to be trained"
    return [trained, *lines, f"tokens      {tokens:,}", f"time        {hours:,.1f} {unit}"]


def disk_line(costs: dict[str, Cost | None], shards: float) -> str:
    checkpoints = sum(cost[2] for cost in costs.values() if cost is not None)
    needed = f"{checkpoints / GIB:,.1f} GiB of checkpoints, {shards / GIB:,.2f} GiB of shards"
    return f"disk        {needed}; {shutil.disk_usage('.').free / GIB:,.0f} GiB are free"


def config_cost(config: Config, tokens_per_second: float | None) -> Cost:
    e = estimate(config, planned_backends(config, "cpu" if tokens_per_second else "cuda"))
    hours = e.tokens / tokens_per_second / 3600 if tokens_per_second else e.gpu_hours
    # Weights and AdamW's moments, in the newest checkpoints and the best.
    return e.tokens, hours, 12.0 * e.parameters * (config.checkpoint.keep + 1)


def write_runs(space: Workspace) -> None:
    """Add the runs and corpora that are here to those that results/SCALE/runs.json has."""
    path, runs, corpora = space.folder / RUNS, {}, {}
    if path.exists():
        runs, corpora = read_runs(path), json.loads(read_text(path)).get("corpora", {})
    for key in all_runs(space.scale.name):
        for seed in space.seeds_of(key):
            if record := run_record(space.run_directory(key, seed), seed):
                runs[run_name(key, seed)] = record
    for directory in space.scale.corpora:
        if (Path(directory) / MANIFEST).exists():
            corpora[directory] = describe_set(directory)
    write_json(path, {"kind": "runs", "scale": space.scale.name, "corpora": corpora, "runs": runs})


def run_record(directory: Path, seed: int) -> dict | None:
    """What the run's own directory says about it; None for a run that has not begun."""
    try:
        about = json.loads(read_text(directory / "run.json"))
        text = read_text(directory / "config.toml")
    except (OSError, ValueError):
        return None
    metrics, config = read_metrics(directory), parse_config(text, str(directory / "config.toml"))
    losses = [m["val_loss"] for m in metrics if "val_loss" in m]
    speeds = [m["tokens_per_s"] for m in metrics if "tokens_per_s" in m]
    tokens = config.train.steps * config.train.batch_tokens
    finished = bool(metrics) and metrics[-1]["step"] >= config.train.steps
    sections = {name: values for name, values in asdict(config).items() if name != "log"}
    return {
        "config": {s: {k: v for k, v in d.items() if v is not None} for s, d in sections.items()},
        "commit": about["revision"],
        "seed": seed,
        "tokens": tokens,
        "seconds": round(tokens / statistics.harmonic_mean(speeds), 1) if speeds else None,
        "loss": losses[-1] if losses else None,
        "torch": about["torch"],
        "device": about["device"],
        "status": "done" if finished else "unfinished",
    }
