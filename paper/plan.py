"""Which jobs the tables need, in what order, and what their runs were."""

import itertools
import json
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
from paper.jobs import Job
from support.files import lookup, read_text, write_json
from training.checkpoint import find, read_description
from training.config import Config, load_config, parse_config
from training.run_log import read_metrics

SINKS = 4  # as StreamingLLM keeps
PASSKEY_TRIALS = 100  # per length: the default of passkey.py


@dataclass(frozen=True)
class Workspace:
    """Where the runs and results of one scale are, and how to make them."""

    scale: Scale
    seeds: Sequence[int] | None = None
    processes: int = 1  # of one training run
    parallel: int = 1  # jobs at a time
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
    keys = dict.fromkeys(c.run(row.run) for row in table.rows for c in table.columns)
    runs = [(seed, i, key) for i, key in enumerate(keys) for seed in space.seeds_of(key)]
    jobs = []
    for seed, _, key in sorted(runs):  # the whole table with one seed, then with the next
        jobs += training_jobs(key, seed, space)
        jobs.append(evaluation_job(key, seed, space, passkey=table.folder == PASSKEY))
    return jobs


def measured_jobs(table: Table, space: Workspace) -> list[Job]:
    """The training of its runs, and the one command that measures them all."""
    keys = dict.fromkeys(row.run for row in table.rows) if "{runs}" in table.measure else []
    trained = [(key, seed) for key in keys for seed in space.seeds_of(key)]
    directories = [str(space.run_directory(*run)) for run in trained]
    out = space.folder / table.name / f"{table.name}.json"
    words = [[word] if word != "{runs}" else directories for word in table.measure.split()]
    command = python(*itertools.chain(*words), "--out", str(out))
    needs = tuple(f"train {run_name(*run)}" for run in trained)
    done = partial(is_complete, out, directories)
    training = [job for run in trained for job in training_jobs(*run, space)]
    configs = [job.trains for job in training if job.trains]
    reads = configs and (configs[0], {space.scale.train_length: table.tokens * len(trained)}, 1)
    return [*training, Job(f"measure {table.name}", command, done, needs, reads=reads or None)]


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
    stretched = run.stretched and not passkey
    words += ["--sinks", str(SINKS), "--ntk", "--yarn"] if stretched else []
    processes = 1 if passkey else space.processes
    command = python(*words, processes=processes)
    variants = [AS_TRAINED, *(f"window={n}" for n in windows)]
    variants += [f"alpha={a:g}" for a in run.alphas] + (["L=current"] if run.current else [])
    variants += [f"{variants[1]}, sinks={SINKS}", "NTK", "YaRN"] if stretched else []
    done = partial(is_evaluated, out, directory, set(itertools.product(variants, lengths)))
    each = {n: PASSKEY_TRIALS * n if passkey else scale.eval_tokens for n in lengths}
    tokens = {n: len(variants) * count for n, count in each.items()}
    name, needs = f"{'passkey' if passkey else 'evaluate'} {name}", (f"train {name}",)
    return Job(name, command, done, needs, reads=(space.config(run, seed), tokens, processes))


def is_evaluated(out: Path, directory: str, wanted: set[tuple[str, int]]) -> bool:
    """Whether the run, as it is now, was evaluated in every (variant, length)."""
    records = read_results(out).records
    identity = open_checkpoints([directory])[0].identity
    return wanted <= {(r.variant, r.length) for r in records if r.run == identity}


def write_runs(space: Workspace) -> None:
    """Add the runs and corpora that are here to those that results/SCALE/runs.json has."""
    path = space.folder / RUNS
    runs, corpora = read_runs(path), lookup(path, "corpora") or {}
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
        "processes": about["processes"],
        "threads": about["threads"],
        "status": "done" if finished else "unfinished",
    }
