"""python downstream.py CKPT [CKPT ...] --tasks paper --out results/downstream.json

Zero-shot tasks through lm-evaluation-harness: arc_easy, arc_challenge, hellaswag, piqa, mmlu, sciq,
scrolls_summscreenfd and lambada_openai. Each finished task is kept; the same command continues.

    --tasks paper                 or lambada, nano, some of their tasks, the path of a harness YAML
    --data-dir DIR                local copies of the data sets: DIR/ai2_arc/ARC-Easy/test*.parquet
    --corpus corpora/stdlib       for the nano tasks, which are made from held-out text
    --max-length 2048             longer inputs lose their beginning; default: 2 x training length
    --limit 100                   only the first documents of each task, to try it out

The harness' own command works too, see evaluating/harness/sitecustomize.py.
"""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

from evaluating.protocol import EvaluationParser
from support.command import answer_early, positive, run, whole


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__)
    parser.add_run_arguments()
    parser.add_argument("--tasks", default="paper", help="paper, lambada, nano, or names and paths")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--max-length", type=whole(2))
    parser.add_argument(
        "--batch", type=positive, default=16, help="sequences at once; changes no result"
    )
    parser.add_argument("--limit", type=positive)
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

from data.shards import describe_set
from evaluating.checkpoints import Checkpoint, open_checkpoints
from evaluating.protocol import arithmetic, kept_on_interrupt, open_results
from evaluating.results import Record, Results
from lssar.cache import ensure_hub_cache
from lssar.errors import UserError
from training import distributed

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
PACKAGES = ("lm_eval", "transformers", "datasets", "rouge_score")


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    check(arguments)
    ensure_hub_cache()
    # Here, because the harness takes seconds to import and --help should not.
    from evaluating import downstream_report as report
    from evaluating.tasks import TaskSource, chosen_tasks

    tasks = chosen_tasks(arguments.tasks)
    checkpoints = open_checkpoints(arguments.checkpoints)
    results = open_results(arguments.out, "downstream", *protocol(arguments))
    with tempfile.TemporaryDirectory() as scratch, kept_on_interrupt(results.path):
        source = TaskSource(Path(scratch), arguments.data_dir, arguments.corpus)
        for task in tasks:  # every document can be read, before anything is computed
            if not all(results.find(**key_of(c, task, arguments)) for c in checkpoints):
                source.load(task)
        for checkpoint in checkpoints:
            fill(results, checkpoint, tasks, source, arguments)
    print(report.tables(results))
    for figure in report.figures(results):
        print(f"figure: {figure}")


def check(arguments) -> None:
    if arguments.data_dir is not None and not arguments.data_dir.is_dir():
        raise UserError(f"--data-dir {arguments.data_dir}: no such folder")
    if absent := [p for p in PACKAGES if importlib.util.find_spec(p) is None]:
        raise UserError(f"{absent[0]} is not installed; pip install -r requirements-downstream.txt")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("downstream.py runs in one process; start it without torchrun")


def protocol(arguments) -> tuple[dict, dict]:
    """What has to be equal for scores to be comparable, and what is good to know."""
    versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    with arithmetic(arguments.precision, distributed.start(arguments.device).device) as precision:
        pass  # only its name is needed here
    settings = {
        "fewshot": 0,
        "limit": arguments.limit,
        "bootstrap": BOOTSTRAP,
        "precision": precision,
        "lm_eval": versions["lm_eval"],
    }
    about = {"versions": versions, "data": str(arguments.data_dir or "hub")}
    corpus = {"corpus": describe_set(arguments.corpus)} if arguments.corpus else {}
    return settings, about | corpus


def key_of(checkpoint: Checkpoint, task: str, arguments) -> dict:
    """What the records of one task of one checkpoint share; their length is max_length."""
    from evaluating.lm_eval_model import default_max_length

    length = arguments.max_length or default_max_length(checkpoint)
    name = Path(task).stem if task.endswith(".yaml") else task
    return {"run": checkpoint.identity, "task": name, "length": length}


def fill(results: Results, checkpoint: Checkpoint, tasks: list[str], source, arguments) -> None:
    """Measure what the results do not have yet of one checkpoint."""
    from evaluating.lm_eval_model import CheckpointLM

    results.runs.setdefault(checkpoint.identity, checkpoint.describe())
    lm: CheckpointLM | None = None
    for task in tasks:
        key = key_of(checkpoint, task, arguments)
        if results.find(**key):
            continue
        lm = lm or CheckpointLM(
            checkpoint,
            max_length=arguments.max_length,
            batch_size=arguments.batch,
            device=arguments.device,
            precision=arguments.precision,
        )
        found = measure(lm, key, source.load(task), arguments.limit)
        results.add(*found)
        shown = ", ".join(f"{r.quantity} {r.value:.4g}" for r in found)
        print(f"{checkpoint.info.run}, {key['task']}: {shown}", file=sys.stderr)


def measure(lm, key: dict, loaded: dict, limit: int | None) -> list[Record]:
    """Every metric of one task with its standard error, the whole group's where it is one."""
    import lm_eval

    from evaluating.tasks import quiet_harness

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
    whole = metrics(found["results"][name])
    parts = {t: metrics(found["results"][t]) for t in loaded["tasks"] if t != name}
    records = []
    for metric, value in whole.items():
        if metric.endswith("_stderr"):
            continue
        subtasks = {t: scores[metric] for t, scores in parts.items() if metric in scores}
        more = {"subtasks": subtasks} if subtasks else {}
        error = whole.get(f"{metric}_stderr")
        records.append(Record(metric, value=value, error=error, details=details | more, **key))
    return records


def metrics(scores: dict) -> dict[str, float]:
    """The harness' "acc,none" and "acc_stderr,none" without the name of the filter."""
    numbers = {k: v for k, v in scores.items() if "," in k and isinstance(v, int | float)}
    return {key.partition(",")[0]: float(value) for key, value in numbers.items()}


if __name__ == "__main__":
    run(main)
