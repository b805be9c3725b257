"""The task sets of `downstream.py`, and where their documents come from.

`paper`, `lambada` and `nano` are sets; a task of one of them, or the path of a harness YAML file,
can be named by itself. Only the folders of the tasks in question are scanned: all of the harness'
own take 16 seconds. Documents come from the hub, or with a data folder from files in the hub's own
layout, DIR/ai2_arc/ARC-Easy/test*.parquet (or .jsonl), by YAML files that include the harness'.
"""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import datasets
import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from evaluating.nano_tasks import COUNTS, write_tasks
from evaluating.summaries import SummScreen
from lssar.errors import UserError, did_you_mean
from support.files import write_text

HARNESS = Path(lm_eval.tasks.__file__).parent


@dataclass(frozen=True)
class Place:
    """Where the harness has a task, and where the hub has its documents."""

    folder: str  # of lm_eval/tasks
    repository: str
    configuration: str = ""


PLACES = {
    "arc_easy": Place("arc", "allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": Place("arc", "allenai/ai2_arc", "ARC-Challenge"),
    "hellaswag": Place("hellaswag", "Rowan/hellaswag"),
    "piqa": Place("piqa", "baber/piqa"),
    "mmlu": Place("mmlu/default", "cais/mmlu"),
    "sciq": Place("sciq", "allenai/sciq"),
    "scrolls_summscreenfd": Place("scrolls", "tau/scrolls", "summ_screen_fd"),
    "lambada_openai": Place("lambada", "EleutherAI/lambada_openai"),
}
SUMMSCREEN = "scrolls_summscreenfd"
SETS = {"paper": [*PLACES], "lambada": ["lambada_openai"], "nano": [*COUNTS]}


def chosen_tasks(text: str) -> list[str]:
    """ "paper", "arc_easy,piqa" or "my_task.yaml" -> names and paths, each once."""
    names: list[str] = []
    for part in text.split(","):
        if part.endswith(".yaml"):
            if not Path(part).is_file():
                raise UserError(f"--tasks {part}: no such file")
        elif part not in SETS and part not in PLACES and part not in COUNTS:
            known = [*SETS, *PLACES, *COUNTS]
            raise UserError(
                f"--tasks {part}: unknown; {did_you_mean(part, known)}; or give the path of a "
                ".yaml file of lm-evaluation-harness"
            )
        names += SETS.get(part, [part])
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class TaskSource:
    """Loads tasks by name, with their documents."""

    scratch: Path  # for the YAML files that are made
    data: Path | None = None  # local copies of the hub's data
    corpus: Path | None = None  # whose held-out text the nano tasks are made from

    def load(self, name: str) -> dict:
        """What `lm_eval.evaluate` takes for one task, or one group of them."""
        with quiet_harness(), _documents_of(name, self.data):
            if name == SUMMSCREEN:
                folder = None if self.data is None else self._folder(name)
                if folder and not (folder / "validation.jsonl").is_file():
                    raise _missing(name, "validation", folder)
                return TaskManager(include_defaults=False).load([SummScreen(name, folder)])
            return self._manager(name).load([self._made(name)])

    def _manager(self, name: str) -> TaskManager:
        folders = [HARNESS / PLACES[name].folder] if name in PLACES else []
        if name in PLACES and self.data is not None:
            folders.append(self._localise(name))
        return TaskManager(include_defaults=False, include_path=folders)

    def _made(self, name: str) -> str:
        if name not in COUNTS:
            return name
        if self.corpus is None:
            raise UserError(f"{name} is made from a corpus' held-out text; give --corpus DIR")
        return str(write_tasks(self.scratch, self.corpus, [name])[name])

    def _folder(self, name: str, configuration: str | None = None) -> Path:
        """The folder of a data set's configuration, or of the whole set where it has none."""
        place = PLACES[name]
        base = self.data / place.repository.split("/")[1]
        return base / (configuration or place.configuration)

    def _localise(self, name: str) -> Path:
        """YAML files that include the harness' and read local documents."""
        target = self.scratch / name
        target.mkdir(parents=True, exist_ok=True)
        for original in sorted((HARNESS / PLACES[name].folder).glob("*.yaml")):
            task = _plain_yaml(original)
            if task.get("task") != name and not str(task.get("task")).startswith("mmlu_"):
                continue
            folder = self._folder(name, task.get("dataset_name") if name == "mmlu" else None)
            split = task.get("test_split") or task["validation_split"]
            files = _files(folder, split)
            if not files:
                raise _missing(name, split, folder)
            made = {
                "include": str(original),
                "dataset_path": "parquet" if files[0].suffix == ".parquet" else "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: [str(f.resolve()) for f in files]}},
                "training_split": None,
                "fewshot_split": None,
            }
            if split != task.get("validation_split"):
                made["validation_split"] = None
            write_text(target / original.name, json.dumps(made, indent=1) + "\n")
        return target


def _plain_yaml(path: Path) -> dict:
    """A task's YAML with what it includes, functions left as text."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    task = yaml.load(path.read_text(encoding="utf-8"), Loader)
    if "include" in task:
        task = _plain_yaml(path.parent / task["include"]) | task
    return task


def _files(folder: Path, split: str) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob(f"{split}*")
        if path.suffix in (".parquet", ".jsonl", ".json") and path.is_file()
    )


def _missing(name: str, split: str, folder: Path) -> UserError:
    wanted = f"{split}.jsonl" if name == SUMMSCREEN else f"{split}*.parquet or {split}*.jsonl"
    return UserError(
        f"{name}: no {wanted} in {folder}; put {PLACES[name].repository} of the hub there"
    )


@contextmanager
def _documents_of(name: str, data: Path | None) -> Iterator[None]:
    """Turn the many errors of a hub out of reach into one line that names the data set."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if name not in PLACES or data is not None:
            raise UserError(f"{name}: its documents cannot be read: {_first_line(error)}") from None
        place = PLACES[name]
        where = Path("DIR", place.repository.split("/")[1], place.configuration)
        raise UserError(
            f"{name}: the data set {place.repository} is not reachable on the hub "
            f"({type(error).__name__}); give a local copy with --data-dir DIR, in {where}"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Errors only: the harness and its libraries narrate what they do. Bars, on a terminal."""
    loggers = [logging.getLogger(n) for n in ("lm_eval", "datasets", "huggingface_hub", "httpx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    try:
        with redirect_stdout(io.StringIO()), bars:
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()
