"""Finds the jobs that tables need, and runs them.

Each job is a command, run once; its failure stops only those that need it. What a job prints goes
to its own log file; the terminal shows one line per job. When run again, finished jobs are skipped
and interrupted ones continue, because every command here does.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

from data.shards import MANIFEST
from evaluating.checkpoints import open_checkpoints
from evaluating.results import AS_TRAINED, read_results
from evaluating.variants import CURRENT_LENGTH, NTK, YARN, alpha_name, window_name
from lssar.errors import UserError
from paper.experiments import FACTORS, PASSKEY, SINKS, Run, Scale, Table, all_runs
from physics.config import OrbitConfig
from support.files import make_folder, read_text
from training.checkpoint import find, read_info
from training.config import Config, load_config, parse_config
from training.distributed import StopSignal
from training.estimate import (
    GIB,
    checkpoint_bytes,
    disk_line,
    estimate,
    gpu_hours,
    planned_backends,
)


@dataclass(frozen=True)
class Job:
    """Holds one command, and how to see that it is done."""

    name: str
    command: tuple[str, ...]
    done: Callable[[], bool]
    needs: tuple[str, ...] = ()
    trains: Config | None = None  # the run, where the job is its training
    writes: Path | None = None  # the results file, where the job is an evaluation


@dataclass(frozen=True)
class Workspace:
    """Says where the runs and results of one scale are, and with which seeds they are made."""

    scale: Scale
    seeds: Sequence[int] | None = None
    processes: int = 1  # of one training run
    runs: Path = Path("runs")
    results: Path = Path("results")

    @property
    def folder(self) -> Path:
        """Return the folder of the tables' results."""
        return self.results / self.scale.name

    @property
    def evaluations(self) -> Path:
        """Return the folder where evaluations write."""
        return self.runs / self.scale.name / "evaluations"

    def run_directory(self, key: str, seed: int) -> Path:
        """Return the folder of one training."""
        return self.runs / self.scale.name / f"{key}-s{seed}"

    def seeds_of(self, key: str) -> Sequence[int]:
        """Return the seeds of a run: those asked for, or the scale's."""
        return self.scale.seeds_of(key) if self.seeds is None else self.seeds

    def arguments(self, run: Run, seed: int) -> list[str]:
        """Return the arguments of train.py: the config file and the changed keys."""
        path = self.run_directory(run.key, seed)
        changes = {"log.directory": path.parent, "log.name": path.name, "train.seed": seed}
        if run.init_from:
            changes["train.init_from"] = self.run_directory(run.init_from, seed)
        options = [*run.options.split(), *(f"--{key}={value}" for key, value in changes.items())]
        return [f"configs/{run.config}.toml", *options]

    def config(self, run: Run, seed: int) -> Config:
        """Return the config that train.py makes of these arguments."""
        path, *options = self.arguments(run, seed)
        return load_config(path, options, world_size=self.processes)

    def runs_of(self, table: Table) -> list[tuple[Run, int]]:
        """Return the runs of a table with their seeds, all of one seed before the next."""
        if not table.has_runs:
            return []
        known = all_runs(self.scale.name)
        keys = dict.fromkeys(c.run(row.run) for row in table.rows for c in table.columns)
        found = [(known[key], seed) for key in keys for seed in self.seeds_of(key)]
        return sorted(found, key=itemgetter(1))


def python(*command: str, processes: int = 1) -> tuple[str, ...]:
    """Return the command line of a script, started by torchrun if it takes several processes."""
    if processes == 1:
        return (sys.executable, *command)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return (sys.executable, *launcher, *command)


def jobs_of(tables: list[Table], space: Workspace) -> list[Job]:
    """Return corpora, runs and evaluations, each once."""
    jobs = []
    for table in tables:
        runs = space.runs_of(table)
        for run, seed in runs:
            jobs += training_jobs(run, seed, space)
            if not table.measure:
                jobs.append(evaluation_job(run, seed, space, table.measured_by))
        if table.measure:
            jobs.append(measuring_job(table, runs, space))
    return list({job.name: job for job in jobs}.values())


def training_jobs(run: Run, seed: int, space: Workspace) -> list[Job]:
    """Return the corpus, the run whose weights it starts from, and the run itself."""
    config = space.config(run, seed)
    folder = config.data.directory
    prepare = python("data/prepare.py", *space.scale.corpora[folder]["arguments"], "--out", folder)
    needs = [Job(f"prepare {Path(folder).name}", prepare, (Path(folder) / MANIFEST).exists)]
    if run.init_from:
        needs += training_jobs(all_runs(space.scale.name)[run.init_from], seed, space)
    arguments = ("train.py", *space.arguments(run, seed), "--resume")
    command = python(*arguments, processes=space.processes)
    needed = tuple(job.name for job in needs)
    done = partial(is_trained, config)
    return [*needs, Job(f"train {config.log.name}", command, done, needed, trains=config)]


def is_trained(config: Config) -> bool:
    """Tell whether a run is finished with these settings; if not, its own command says why."""
    info = read_info(find(config.run_directory))
    if info.step < config.train.steps:
        return False
    path = config.run_directory / "config.toml"
    try:
        saved = parse_config(read_text(path), str(path), type(config))
        return not saved.differences(config)
    except OSError:
        return False


def evaluation_job(run: Run, seed: int, space: Workspace, kind: str) -> Job:
    """Return the job that measures the losses or the passkeys of one run."""
    scale = space.scale
    config = space.config(run, seed)
    name = config.log.name
    directory = str(config.run_directory)
    out = space.evaluations / f"{kind}-{name}.json"
    window = scale.train_length
    options = []
    variants = [AS_TRAINED]
    if kind == PASSKEY or run.windows:
        options.append(f"--window={window}")
        variants.append(window_name(window))
    if run.alphas:
        options.append(f"--alpha={','.join(map(str, run.alphas))}")
        variants += [alpha_name(alpha) for alpha in run.alphas]
    if run.current:
        options.append("--current-length")
        variants.append(CURRENT_LENGTH)
    if run.stretched and kind != PASSKEY:
        options += [f"--sinks={SINKS}", "--ntk", "--yarn"]
        variants += [window_name(window, SINKS), NTK, YARN]
    if kind == PASSKEY:
        label = "passkey"
        factors = FACTORS[PASSKEY]
        processes = 1
        words = ["passkey.py", directory, f"--form={run.form}"]
    else:
        label = "evaluate"
        factors = run.factors
        processes = space.processes
        words = ["eval_extrapolation.py", directory, f"--data={config.data.directory}"]
        words += [f"--tokens={scale.eval_tokens}", "--no-figures"]
        words += [f"--segment={scale.length(max(FACTORS[kind]))}"]
        words += ["--spread"] if scale.spread else []
    lengths = [scale.length(factor) for factor in factors]
    words += [f"--lengths={','.join(map(str, lengths))}", *options, f"--out={out}"]
    command = python(*words, processes=processes)
    done = partial(is_evaluated, out, directory, set(itertools.product(variants, lengths)))
    return Job(f"{label} {name}", command, done, (f"train {name}",), writes=out)


def is_evaluated(out: Path, directory: str, wanted: set[tuple[str, int]]) -> bool:
    """Tell whether the run, as it is now, was evaluated in every (variant, length)."""
    records = read_results(out).records
    identity = open_checkpoints([directory])[0].identity
    return wanted <= {(r.variant, r.length) for r in records if r.run == identity}


def measuring_job(table: Table, runs: list[tuple[Run, int]], space: Workspace) -> Job:
    """Return the one job that measures a table: all of its runs, or numbers without a run."""
    out = space.evaluations / f"{table.name}.json"
    directories = [str(space.run_directory(run.key, seed)) for run, seed in runs]
    needs = tuple(f"train {Path(directory).name}" for directory in directories)
    if table.measure.endswith(".sh"):
        seeds = ",".join(map(str, space.seeds_of(table.name)))
        settings = (f"SCALE={space.scale.name}", f"OUT={out}", f"SEEDS={seeds}")
        command = ("env", *settings, f"GPUS={space.processes}", "bash", table.measure, "--run")
        return Job(f"measure {table.name}", command, out.exists, writes=out)
    words = []
    for word in table.measure.split():
        words += directories if word == "{runs}" else [word]
    command = python(*words, "--out", str(out))
    done = partial(is_complete, out, directories)
    return Job(f"measure {table.name}", command, done, needs, writes=out)


def is_complete(out: Path, directories: list[str]) -> bool:
    """Tell whether every run, as it is now, was measured in all that any run was measured in."""
    by_run: dict[str, set[tuple]] = {}
    for r in read_results(out).records:
        by_run.setdefault(r.run, set()).add((r.variant, r.task, r.length))
    wanted = set().union(*by_run.values())
    runs = [checkpoint.identity for checkpoint in open_checkpoints(directories)]
    return bool(wanted) and all(by_run.get(run) == wanted for run in runs)


def run_all(jobs: Iterable[Job], logs: Path, parallel: int) -> dict[str, str]:
    """Run every job that is not done, `parallel` at a time; return by name "done" or why not."""
    jobs = {job.name: job for job in jobs}
    states = {name: "done" for name, job in jobs.items() if is_done(job)}
    if states:
        print(f"{len(states)} of {len(jobs)} jobs are done already")
    queue = [job for name, job in jobs.items() if name not in states]
    with Pool(logs) as pool:
        while queue or pool.running:
            for job in list(queue):
                unfinished = [n for n in job.needs if states.get(n) != "done"]
                failed = [n for n in unfinished if n in states or n not in jobs]
                if failed:
                    states[job.name] = f"not started: it needs '{failed[0]}'"
                    queue.remove(job)
                elif not unfinished and len(pool.running) < parallel:
                    pool.start(job)
                    queue.remove(job)
            for job, state in pool.finished():
                states[job.name] = state
                print(f"[{len(states)}/{len(jobs)}] {job.name}: {state}", flush=True)
    return states


def is_done(job: Job) -> bool:
    """Tell whether a job is done; a damaged result counts as missing, and its command says so."""
    try:
        return job.done()
    except UserError:
        return False


class Pool(StopSignal):
    """Runs jobs in processes; on Ctrl-C and SIGTERM they get time to save."""

    def __init__(self, logs: Path):
        self.logs = logs
        self.running: dict[subprocess.Popen, tuple[Job, Path, float]] = {}
        make_folder(logs)

    def __exit__(self, *_) -> None:
        try:
            for process in self.running:
                process.send_signal(signal.SIGTERM)
            for process in self.running:
                process.wait()
        finally:
            super().__exit__()

    def start(self, job: Job) -> None:
        """Start a job, whose output goes to its log."""
        print(f"      {job.name} ...", flush=True)
        log = self.logs / f"{job.name.replace(' ', '-')}.log"
        # One thread for every job, whoever starts it: the last bits of a run depend on it.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("a") as output:
            process = subprocess.Popen(
                job.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it once, through __exit__
            )
        self.running[process] = (job, log, time.monotonic())

    def finished(self) -> Iterator[tuple[Job, str]]:
        """Wait for the first job to end; yield those that have, and how."""
        ended = []
        while self.running and not ended:
            if self.received:
                raise KeyboardInterrupt
            time.sleep(0.05)
            ended = [process for process in self.running if process.poll() is not None]
        for process in ended:
            job, log, began = self.running.pop(process)
            if process.returncode == 0 and is_done(job):
                print(f"      {job.name} took {time.monotonic() - began:,.0f} s", flush=True)
                yield job, "done"
                continue
            printed = reversed(log.read_text(errors="replace").splitlines())
            last = next(filter(str.strip, printed), "it printed nothing").strip()
            failed = f"failed with exit code {process.returncode}"
            yield job, f"{failed}: {last} (full log: {log})"


def describe(names: list[str], jobs: list[Job], space: Workspace) -> str:
    """Return the plan: runs, parameters, tokens, FLOPs, memory, disk and hours still to spend."""
    scale = space.scale
    device = "cuda" if scale.gpus else "cpu"
    lines = [f"tables      {', '.join(names)}"]
    configs = [(job.trains, is_done(job)) for job in jobs if job.trains]
    if "physics" in names:
        configs += [(config, False) for config in physics_configs(scale)]
    left = sum(not done for _, done in configs)
    lines.append(f"runs        {len(configs)}, of which {left} are still to be trained")
    tokens = 0
    flops = 0.0
    disk = 0.0
    memory = 0.0
    for config, done in configs:
        if done:
            lines.append(f"  {config.log.name}: done")
            continue
        sized = config.with_micro_batch(1) if config.train.micro_batch == "auto" else config
        found = estimate(sized, planned_backends(sized, device), device)
        tokens += found.tokens
        flops += found.flops
        disk += checkpoint_bytes(config, found)
        memory = max(memory, sum(found.memory.values()))
        size = f"{found.parameters:,} parameters, {found.tokens:,} tokens, {found.flops:.2g} FLOPs"
        lines.append(f"  {config.log.name}: {size}")
    data = 0.0
    for folder, corpus in scale.corpora.items():
        if not (Path(folder) / MANIFEST).exists():
            data += 2 * corpus["tokens"]  # two bytes each
    lines.append(f"tokens      {tokens:,.0f}")
    lines.append(f"FLOPs       {flops:.3g}")
    per = "GPU" if scale.gpus else "process"
    lines.append(f"memory      at least {memory / GIB:,.1f} GiB per {per}")
    lines.append(f"disk        {disk_line(disk, data)}")
    if scale.gpus:
        hours = gpu_hours(flops, scale.gpu)
        lines.append(f"time        {hours:,.1f} {scale.gpu}-hours of training")
    else:
        hours = tokens / scale.tokens_per_second / 3600
        rate = f"{scale.tokens_per_second:,.0f} tokens per second and core"
        lines.append(f"time        {hours:,.1f} core-hours of training at {rate}")
    return "\n".join(lines)


def physics_configs(scale: Scale) -> list[Config]:
    """Return the configs of scripts/table_physics.sh with one seed: pre-training, then forces."""
    stem = "configs/physics-nano" if scale.name == "nano" else "configs/physics-109m"
    smaller = ["--model.preset=45m"] if scale.name == "single" else []
    fewer = ["--train.steps=3906"] if scale.name == "single" else []
    found = []
    for attention in ("--attention.name=softmax", "--attention.name=lssar"):
        orbits = load_config(f"{stem}.toml", [*smaller, *fewer, attention], kind=OrbitConfig)
        found.append(orbits)
        for task in ("magnitude", "vector"):
            path = f"{stem}-{task}.toml"
            found.append(load_config(path, [*smaller, attention], kind=OrbitConfig))
    return found
