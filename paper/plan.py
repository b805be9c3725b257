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
from paper.evidence import RUNS, read_runs
from paper.experiments import FACTORS, PASSKEY, Run, Scale, Table, all_runs
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
        return self.runs / self.scale.name / f"{key}-s{seed}"

    def seeds_of(self, key: str) -> Sequence[int]:
        return self.scale.seeds_of(key) if self.seeds is None else self.seeds

    def arguments(self, run: Run, seed: int) -> list[str]:
        """Of train.py: the config file and the settings that differ from it."""
        path = self.run_directory(run.key, seed)
        changes = {"log.directory": path.parent, "log.name": path.name, "train.seed": seed}
        if run.init_from:
            changes["train.init_from"] = self.run_directory(run.init_from, seed)
        options = [*run.options.split(), *(f"--{key}={value}" for key, value in changes.items())]
        return [f"configs/{run.config}.toml", *options]

    def config(self, run: Run, seed: int) -> Config:
        path, *options = self.arguments(run, seed)
        return load_config(path, options, world_size=self.processes)


def python(*command: str, processes: int = 1) -> tuple[str, ...]:
    """The command line of a script, started by torchrun if it takes several processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return (sys.executable, *(launcher if processes > 1 else ()), *command)


def jobs_of(tables: list[Table], space: Workspace) -> list[Job]:
    """Corpora, runs and evaluations, each once. The physics table has its own script."""
    known, jobs = all_runs(space.scale.name), []
    for table in tables:
        keys = dict.fromkeys(c.run(row.run) for row in table.rows for c in table.columns)
        runs = [(known[k], seed) for k in keys for seed in space.seeds_of(k)] if table.runs else []
        each = table.folder in FACTORS  # an evaluation per run, else one of all
        if each:  # the whole table with one seed, then with the next
            runs.sort(key=lambda one: one[1])
        configs = []
        for run, seed in runs:
            jobs += training_jobs(run, seed, space)
            configs.append(jobs[-1].trains)
            if each:
                jobs.append(evaluation_job(run, configs[-1], space, table.folder))
        if table.measure:
            jobs.append(measuring_job(table, configs, space))
    return list({job.name: job for job in jobs}.values())


def measuring_job(table: Table, configs: list[Config], space: Workspace) -> Job:
    """The one command that measures all runs of a table."""
    directories = [str(config.run_directory) for config in configs]
    out = space.folder / table.name / f"{table.name}.json"
    words = [[word] if word != "{runs}" else directories for word in table.measure.split()]
    command = python(*itertools.chain(*words), "--out", str(out))
    needs = tuple(f"train {config.log.name}" for config in configs)
    done = partial(is_complete, out, directories)
    tokens = {space.scale.train_length: table.tokens * len(configs)}
    reads = (configs[0], tokens, 1) if configs else None
    return Job(f"measure {table.name}", command, done, needs, reads=reads)


def is_complete(out: Path, directories: list[str]) -> bool:
    """Whether every run, as it is now, was measured in all that any run was measured in."""
    done = {(r.run, r.variant, r.task, r.length) for r in read_results(out).records}
    runs = [c.identity for c in open_checkpoints(directories)]
    return bool(done) and all((run, *measured) in done for run in runs for _, *measured in done)


def training_jobs(run: Run, seed: int, space: Workspace) -> list[Job]:
    """The corpus, the run whose weights it starts from, and the run itself."""
    config = space.config(run, seed)
    folder = config.data.directory
    prepare = python("data/prepare.py", *space.scale.corpora[folder]["arguments"], "--out", folder)
    needs = [Job(f"prepare {Path(folder).name}", prepare, (Path(folder) / MANIFEST).exists)]
    if run.init_from:
        needs += training_jobs(all_runs(space.scale.name)[run.init_from], seed, space)
    arguments = ("train.py", *space.arguments(run, seed), "--resume")
    command, done = python(*arguments, processes=space.processes), partial(is_trained, config)
    needed = tuple(job.name for job in needs)
    return [*needs, Job(f"train {config.log.name}", command, done, needed, trains=config)]


def is_trained(config: Config) -> bool:
    """Whether it is finished, with these settings; with others its own command says which."""
    _, info = read_description(find(config.run_directory))
    if info.step < config.train.steps:
        return False
    try:
        return not saved_config(config.run_directory).differences(config)
    except OSError:
        return False


def saved_config(run_directory: Path) -> Config:
    path = run_directory / "config.toml"
    return parse_config(read_text(path), str(path))


def evaluation_job(run: Run, config: Config, space: Workspace, folder: str) -> Job:
    """The passkeys or the losses of one run, written to a file of its own."""
    scale, passkey, directory = space.scale, folder == PASSKEY, str(config.run_directory)
    name, processes = config.log.name, 1 if passkey else space.processes
    out, window = space.folder / folder / f"{name}.json", f"window={scale.train_length}"
    lengths = [scale.length(factor) for factor in (FACTORS[PASSKEY] if passkey else run.factors)]
    if passkey:
        words = ["passkey.py", directory, f"--form={run.form}"]
    else:
        words = ["eval_extrapolation.py", directory, f"--data={config.data.directory}"]
        longest, spread = scale.length(max(FACTORS[folder])), ["--spread"] if scale.spread else []
        words += [f"--tokens={scale.eval_tokens}", f"--segment={longest}", "--no-figures", *spread]
    more = {}  # options, with the variants that they add
    if passkey or run.windows:
        more[f"--{window}"] = [window]
    if run.alphas:
        more[f"--alpha={','.join(map(str, run.alphas))}"] = [f"alpha={a:g}" for a in run.alphas]
    if run.current:
        more["--current-length"] = ["L=current"]
    if run.stretched and not passkey:
        more[f"--sinks={SINKS} --ntk --yarn"] = [f"{window}, sinks={SINKS}", "NTK", "YaRN"]
    words += [f"--lengths={','.join(map(str, lengths))}", *" ".join(more).split(), f"--out={out}"]
    variants = [AS_TRAINED, *itertools.chain(*more.values())]
    done = partial(is_evaluated, out, directory, set(itertools.product(variants, lengths)))
    each = {n: PASSKEY_TRIALS * n if passkey else scale.eval_tokens for n in lengths}
    reads = config, {n: len(variants) * tokens for n, tokens in each.items()}, processes
    job = f"{'passkey' if passkey else 'evaluate'} {name}"
    return Job(job, python(*words, processes=processes), done, (f"train {name}",), reads=reads)


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
            directory = space.run_directory(key, seed)
            if record := run_record(directory, seed):
                runs[directory.name] = record
    for directory in space.scale.corpora:
        if (Path(directory) / MANIFEST).exists():
            corpora[directory] = describe_set(directory)
    write_json(path, {"kind": "runs", "scale": space.scale.name, "corpora": corpora, "runs": runs})


def run_record(directory: Path, seed: int) -> dict | None:
    """What the run's own directory says about it; None for a run that has not begun."""
    try:
        about, config = json.loads(read_text(directory / "run.json")), saved_config(directory)
        commit = about["revision"]
        about = {key: about[key] for key in ("torch", "device", "processes", "threads")}
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:  # of another revision
        print(f"warning: {directory} is not in {RUNS}: {error}", file=sys.stderr)
        return None
    metrics = read_metrics(directory)
    losses = [m["val_loss"] for m in metrics if "val_loss" in m]
    speeds = [m["tokens_per_s"] for m in metrics if "tokens_per_s" in m]
    tokens = config.train.steps * config.train.batch_tokens
    finished = bool(metrics) and metrics[-1]["step"] >= config.train.steps
    sections = {name: values for name, values in asdict(config).items() if name != "log"}
    return {
        "config": {s: {k: v for k, v in d.items() if v is not None} for s, d in sections.items()},
        "commit": commit,
        "seed": seed,
        "tokens": tokens,
        "seconds": round(tokens / statistics.harmonic_mean(speeds), 1) if speeds else None,
        "loss": losses[-1] if losses else None,
        **about,
        "status": "done" if finished else "unfinished",
    }
