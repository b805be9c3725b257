"""Loads and scores the tasks of `downstream.py`.

Only the folders of the chosen tasks are scanned: scanning all of the harness takes 16 seconds.
Documents come from the hub. With a data folder, they come from files in the hub's own layout,
DIR/ai2_arc/ARC-Easy/test*.parquet (or .jsonl), through YAML files that include the harness' own.
"""

import io
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import datasets
import lm_eval.tasks
import numpy as np
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import sentence_chrf

from data.shards import open_split
from data.tokeniser import get_tokeniser
from evaluating.results import Record
from evaluating.task_columns import TASKS
from lssar.errors import UserError, did_you_mean
from support.files import first_line, write_json, write_text

# The nano tasks: three from the held-out text of a corpus, for models too small for the others.
# With passages of 224 a model trained at 128 reads beyond its training length.
PASSAGE = 224  # characters
NEAR = 32  # characters; a name repeated within them does not test memory
LAST = 2  # letters of the name that are asked for
COUNTS = {"nano_cloze": 400, "nano_continuation": 400, "nano_line": 100}
TEXT_TOKENS = 1 << 20
NAME = re.compile(r"(?<![A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_]{3,}")
HARNESS = Path(lm_eval.tasks.__file__).parent
OURS = Path(__file__).with_name("task_files")
BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
PLACES = TASKS["places"]
SETS = {"paper": [*PLACES], "lambada": ["lambada_openai"], "nano": [*COUNTS]}
ROUGE = ("rouge1", "rouge2", "rougeL")
SCORER = RougeScorer(ROUGE, use_stemmer=True)


def chosen_tasks(text: str) -> list[str]:
    """Return the names and paths in "paper", "arc_easy,piqa" or "my_task.yaml", each once."""
    known = [*SETS, *PLACES, *COUNTS]
    names = []
    for part in text.split(","):
        if part.endswith(".yaml"):
            if not Path(part).is_file():
                raise UserError(f"--tasks {part}: no such file")
        elif part not in known:
            raise UserError(
                f"--tasks {part}: unknown; {did_you_mean(part, known)}; "
                "or give the path of a .yaml file of lm-evaluation-harness"
            )
        names += SETS.get(part, [part])
    return list(dict.fromkeys(names))


def load_task(name: str, scratch: Path, data: Path | None, corpus: Path | None) -> dict:
    """Load a task or a group for `lm_eval.evaluate`; YAML files are written to `scratch`."""
    try:
        with quiet_harness():
            task = name
            folders = []
            if name in PLACES:
                inside = PLACES[name].get("folder")
                folders = [HARNESS / inside if inside else OURS]
                if data is not None:
                    folders.append(localise(name, *folders, scratch / name, data))
            elif name in COUNTS:
                task = write_task(scratch, corpus, name)
            return TaskManager(include_defaults=False, include_path=folders).load([task])
    except UserError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if name in PLACES and data is None:
            raise UserError(
                f"{name}: the data set {PLACES[name]['repository']} is not reachable on the hub "
                f"({type(error).__name__}); give a local copy with --data-dir DIR, in "
                f"{local_folder(name, Path('DIR'))}"
            ) from None
        raise UserError(f"{name}: its documents cannot be read: {first_line(error)}") from None


def local_folder(name: str, data: Path, configuration: str | None = None) -> Path:
    """Return the folder of a data set's configuration, or of the whole set if it has none."""
    configuration = configuration or PLACES[name].get("configuration", "")
    return data / PLACES[name]["repository"].split("/")[1] / configuration


def localise(name: str, harness: Path, target: Path, data: Path) -> Path:
    """Fill `target` with YAML files that include the harness' own and read local documents."""
    target.mkdir(parents=True, exist_ok=True)
    for original in sorted(harness.glob("*.yaml")):
        task = load_yaml(original, resolve_func=False)
        if task.get("task") != name and not str(task.get("task")).startswith("mmlu_"):
            continue
        folder = local_folder(name, data, task.get("dataset_name") if name == "mmlu" else None)
        split = task.get("test_split") or task["validation_split"]
        found = (path for path in sorted(folder.rglob(f"{split}*")) if path.is_file())
        files = [str(p.resolve()) for p in found if p.suffix in (".parquet", ".jsonl", ".json")]
        if not files:
            raise UserError(
                f"{name}: no {split}*.parquet or {split}*.jsonl in {folder}; "
                f"put {PLACES[name]['repository']} of the hub there"
            )
        local = {
            "include": str(original),
            "dataset_path": "parquet" if files[0].endswith(".parquet") else "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: files}},
            "training_split": None,
            "validation_split": split if split == task.get("validation_split") else None,
            "fewshot_split": None,
        }
        write_json(target / original.name, local)
    return target


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Show only errors, and progress bars on a terminal: the harness logs a lot."""
    disabled = logging.root.manager.disable
    bars_shown = not datasets.are_progress_bars_disabled()
    bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(io.StringIO()), bars:
            yield
    finally:
        logging.disable(disabled)
        if bars_shown:
            datasets.enable_progress_bars()


def measure(lm, key: dict, loaded: dict, limit: int | None) -> list[Record]:
    """Measure every metric of one task, or of a group as a whole, with its standard error."""
    begun = time.monotonic()
    with quiet_harness():
        found = lm_eval.evaluate(
            lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
        )
    name = next(iter(loaded["groups"]), None) or next(iter(loaded["tasks"]))
    details = {
        "samples": sum(found["n-samples"][t]["effective"] for t in loaded["tasks"]),
        "max_gen_toks": lm.max_gen_toks,
        "version": found["versions"].get(name),
        "seconds": round(time.monotonic() - begun, 2),
    }
    scores: dict[str, dict[str, float]] = {}
    for task in (name, *loaded["tasks"]):  # "acc,none" and "acc_stderr,none": a metric, a filter
        numbers = {k: v for k, v in found["results"][task].items() if isinstance(v, int | float)}
        scores[task] = {k.partition(",")[0]: float(v) for k, v in numbers.items() if "," in k}
    records = []
    for metric in (m for m in scores[name] if not m.endswith("_stderr")):
        parts = {t: scores[t][metric] for t in loaded["tasks"] if t != name and metric in scores[t]}
        records.append(
            Record(
                metric,
                value=scores[name][metric],
                error=scores[name].get(f"{metric}_stderr"),
                details=details | ({"subtasks": parts} if parts else {}),
                **key,
            )
        )
    return records


def rouge(text: str, references: list[str]) -> dict[str, float]:
    """Return {"rouge1": ..., ...}, 0 to 100, each of the reference that fits best."""
    scores = [SCORER.score(reference, text) for reference in references]
    return {kind: 100 * max(score[kind].fmeasure for score in scores) for kind in ROUGE}


def score_summary(doc: dict, results: list[str]) -> dict[str, float]:
    """Score a summary for task_files/scrolls_summscreenfd.yaml."""
    return rouge(results[0], doc["outputs"])


def score_line(doc: dict, results: list[str]) -> dict[str, float]:
    """Score the rest of a line for task_files/nano_line.yaml."""
    text = results[0]
    target = doc["target"]
    return {
        "chrf": sentence_chrf(text, [target]).score,
        "rouge1": rouge(text, [target])["rouge1"],
        "exact_match": float(text.strip() == target.strip()),
    }


def write_task(folder: Path, corpus: Path | None, name: str) -> dict:
    """Write a nano task's documents into `folder`, and return the task's description."""
    if corpus is None:
        raise UserError(f"{name} is made from a corpus' held-out text; give --corpus DIR")
    draw = random.Random(0)
    found = [document for text in held_out_texts(corpus) for document in FINDERS[name](text)]
    documents = draw.sample(found, min(COUNTS[name], len(found)))
    if name == "nano_continuation":
        documents = with_choices(documents, sorted({d["target"] for d in found}), draw)
    if not documents:
        raise UserError(f"{corpus}: its validation text is too short or too plain for {name}")
    file = folder / f"{name}.jsonl"
    write_text(file, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents))
    data = {"data_files": {"test": str(file.resolve())}}
    return load_yaml(OURS / f"{name}.yaml") | {"dataset_kwargs": data}


def held_out_texts(corpus: Path) -> list[str]:
    """Return the documents at the beginning of a corpus' validation set."""
    tokens = open_split(corpus, "val")
    tokeniser = get_tokeniser(tokens.tokeniser or "gpt2")
    ids = tokens.slice(0, min(tokens.total_tokens, TEXT_TOKENS))
    cuts = np.flatnonzero(ids == tokeniser.eot)
    return [tokeniser.decode(part[part != tokeniser.eot]) for part in np.split(ids, cuts)]


def cloze(text: str) -> Iterator[dict]:
    """Yield passages that end inside a name which occurs earlier in them, and the name's rest."""
    for match in NAME.finditer(text, PASSAGE):
        name = match[0]
        cut = match.end() - LAST
        context = text[cut - PASSAGE : cut]
        earlier = context[: -NEAR - len(name)]
        if re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", earlier):
            yield {"context": context, "target": name[-LAST:]}


def continuation(text: str) -> Iterator[dict]:
    """Yield passages that end at the end of a line, and the next line."""
    for match in re.finditer(r"\S\n([^\n]{16,64})(?=\n)", text):
        cut = match.start() + 1
        if cut >= PASSAGE:
            # The newline belongs to the continuation: the harness moves whitespace there anyway.
            yield {"context": text[cut - PASSAGE : cut], "target": "\n" + match[1]}


def with_choices(documents: list[dict], lines: list[str], draw: random.Random) -> list[dict]:
    """Put the true line at a random place among three others; without three others, return []."""
    found = []
    for document in documents if len(lines) > 3 else ():
        others = draw.sample([line for line in lines if line != document["target"]], 3)
        label = draw.randrange(4)
        choices = [*others[:label], document["target"], *others[label:]]
        found.append({"context": document["context"], "choices": choices, "label": label})
    return found


def line_rest(text: str) -> Iterator[dict]:
    """Yield passages that end in the middle of a line, and the rest of the line."""
    for match in re.finditer(r"\n([^\n]{16,48})(?=\n)", text):
        middle = match.start(1) + len(match[1]) // 2
        target = text[middle : match.end()]
        if middle >= PASSAGE - 32 and re.search(r"[A-Za-z]{3}", target):
            yield {"context": text[middle - PASSAGE + 32 : middle], "target": target}


FINDERS = {"nano_cloze": cloze, "nano_continuation": continuation, "nano_line": line_rest}
