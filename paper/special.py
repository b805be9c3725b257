"""Measurements that are one command over several runs: attention maps, costs, downstream tasks.

Each fills results/SCALE/NAME/NAME.json, and the table of that name is made of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evaluating.checkpoints import open_checkpoints
from evaluating.results import read_results
from paper.jobs import Job, python
from paper.plan import Workspace
from paper.runs import MAIN_PAIR, edu_runs, run_name

Arguments = Callable[[Workspace, list[str], Path], tuple[str, ...]]


@dataclass(frozen=True)
class Special:
    name: str
    runs: Callable[[str], tuple[str, ...]]  # keys of the runs that it needs, by scale
    arguments: Arguments  # of the command
    all_seeds: bool = False

    def job(self, space: Workspace) -> Job:
        runs, out = self.trained(space), space.folder / self.name / f"{self.name}.json"
        directories = [str(space.run_directory(key, seed)) for key, seed in runs]
        return Job(
            f"measure {self.name}",
            python(*self.arguments(space, directories, out)),
            lambda: out.exists() and is_complete(out, directories),
            tuple(f"train {run_name(key, seed)}" for key, seed in runs),
        )

    def trained(self, space: Workspace) -> list[tuple[str, int]]:
        """(key, seed) of every run that it measures."""
        return [
            (key, seed)
            for key in dict.fromkeys(self.runs(space.scale.name))
            for seed in space.seeds_of(key)[: None if self.all_seeds else 1]
        ]


def is_complete(out: Path, directories: list[str]) -> bool:
    """Every run has been measured as it is now, in everything that any run was measured in."""
    found = read_results(out).records
    wanted = {c.identity for c in open_checkpoints(directories)} if directories else set()
    tasks = {(r.variant, r.task) for r in found}
    done = {(r.run, r.variant, r.task) for r in found}
    return bool(done) and all((run, *task) in done for run in wanted for task in tasks)


def map_arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
    return ("attention_maps.py", *directories, "--out", str(out))


def cost_arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
    small = ("--preset", "nano", "--batch", "4", "--length", "1024")
    return (
        *("benchmark.py", "attention", "--table", "cost"),
        *(small if space.scale.name == "nano" else ()),
        *("--out", str(out)),
    )


def downstream_arguments(**tasks: str) -> Arguments:
    """With the tasks of each scale."""

    def arguments(space: Workspace, directories: list[str], out: Path) -> tuple[str, ...]:
        nano = space.scale.name == "nano"
        corpus = ("--corpus", next(iter(space.scale.corpora))) if nano else ()
        chosen = ("--tasks", tasks[space.scale.name])
        return ("downstream.py", *directories, *chosen, *corpus, "--out", str(out))

    return arguments


ALL_TASKS = downstream_arguments(nano="nano", paper="paper")
LAMBADA = downstream_arguments(nano="nano_cloze", paper="lambada")


def both(scale: str) -> tuple[str, ...]:
    return (*MAIN_PAIR, *edu_runs(scale))


SPECIALS = {
    special.name: special
    for special in (
        Special("attention_maps", both, map_arguments),
        Special("cost", lambda scale: (), cost_arguments),
        Special("downstream", lambda scale: MAIN_PAIR, ALL_TASKS, all_seeds=True),
        Special("downstream_edu", edu_runs, ALL_TASKS),
        Special("lambada", both, LAMBADA),
    )
}
