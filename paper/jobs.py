"""Jobs that depend on each other: each is a command, run once; its failure stops only dependents.

What a job prints goes to its own log file; the terminal shows one line per job. When run again,
finished jobs are skipped and interrupted ones continue, because every command here does.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lssar.errors import UserError
from support.files import make_folder
from training.config import Config
from training.distributed import StopSignal


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    done: Callable[[], bool]
    needs: tuple[str, ...] = ()
    trains: Config | None = None  # the run, where the job is its training
    # Where it is an evaluation: a run, the tokens that are read by length, the number of processes.
    reads: tuple[Config, dict[int, float], int] | None = None


def run_all(jobs: Iterable[Job], logs: Path, parallel: int) -> dict[str, str]:
    """Every job that is not done, `parallel` at a time; name -> "done" or why not."""
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
    """A half-written or damaged result counts as missing: the job's own command reports it."""
    try:
        return job.done()
    except UserError:
        return False


class Pool(StopSignal):
    """Processes that run jobs; on Ctrl-C and SIGTERM they get time to save."""

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
        print(f"      {job.name} ...", flush=True)
        log = self.logs / f"{job.name.replace(' ', '-')}.log"
        # One thread for every job, whoever starts it: the last bits of a run depend on it.
        options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}}
        options["start_new_session"] = True  # Ctrl-C reaches it once, through __exit__
        with log.open("a") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(job.command, **streams, **options)
        self.running[process] = job, log, time.monotonic()

    def finished(self) -> Iterator[tuple[Job, str]]:
        """The jobs that have ended, and how; waits for the first."""
        ended = []
        while self.running and not ended:
            if self.received:
                raise KeyboardInterrupt
            time.sleep(0.05)
            ended = [process for process in self.running if process.poll() is not None]
        for process in ended:
            job, log, began = self.running.pop(process)
            code, state = process.returncode, "done"
            if code == 0 and is_done(job):
                print(f"      {job.name} took {time.monotonic() - began:,.0f} s", flush=True)
            else:
                printed = reversed(log.read_text(errors="replace").splitlines())
                last = next(filter(str.strip, printed), "it printed nothing").strip()
                state = f"failed with exit code {code}: {last} (full log: {log})"
            yield job, state
