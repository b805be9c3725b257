"""python downstream.py CKPT [CKPT ...] --tasks paper --out results/downstream.json

Zero-shot tasks through lm-evaluation-harness: arc_easy, arc_challenge, hellaswag, piqa, mmlu, sciq,
scrolls_summscreenfd and lambada_openai. Each finished task is kept; the same command continues.

    --tasks paper                 or lambada, nano, some of their tasks, the path of a harness YAML
    --data-dir DIR                local copies of the data sets: DIR/ai2_arc/ARC-Easy/test*.parquet
    --corpus corpora/stdlib       for the nano tasks, which are made from held-out text
    --max-length 2048             longer inputs lose their beginning; default: 2 x training length
    --limit 100                   only the first documents of each task, to try it out

The harness' own command works too, see integrations/harness/sitecustomize.py.
"""

if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import distributed
from data.shards import describe_set
from errors import UserError, positive, run, whole
from evaluation import Checkpoint, EvaluationParser, arithmetic, kept_on_interrupt, open_checkpoints
from results_io import Results

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity
PACKAGES = ("lm_eval", "transformers", "datasets", "rouge_score")


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    check(arguments)
    # Here, because the harness takes seconds to import and --help should not.
    import downstream_report as report
    from downstream_tasks import TaskSource, chosen_tasks

    tasks = chosen_tasks(arguments.tasks)
    checkpoints = open_checkpoints(arguments.checkpoints)
    results = open_results(arguments)
    with tempfile.TemporaryDirectory() as scratch, kept_on_interrupt(results.path):
        source = TaskSource(Path(scratch), arguments.data_dir, arguments.corpus)
        for task in tasks:  # every document can be read, before anything is computed
            if any(missing(results, c, task, arguments) for c in checkpoints):
                source.load(task)
        for checkpoint in checkpoints:
            fill(results, checkpoint, tasks, source, arguments)
    results.save()
    print(report.tables(results))
    for figure in report.figures(results):
        print(f"figure: {figure}")


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


def check(arguments) -> None:
    if arguments.data_dir is not None and not arguments.data_dir.is_dir():
        raise UserError(f"--data-dir {arguments.data_dir}: no such folder")
    if absent := [p for p in PACKAGES if importlib.util.find_spec(p) is None]:
        raise UserError(f"{absent[0]} is not installed; pip install -r requirements-downstream.txt")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("downstream.py runs in one process; start it without torchrun")


def open_results(arguments) -> Results:
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
    if arguments.corpus:
        about["corpus"] = describe_set(arguments.corpus)
    results = Results(arguments.out, "downstream", settings, about)
    if results.rows:
        print(f"continuing {results.path}: {len(results.rows)} finished rows are kept")
    return results


def row_key(checkpoint: Checkpoint, task: str, arguments) -> dict:
    """A row is one task of one checkpoint: the task is its variant, max_length its length."""
    from integrations.lm_eval_model import default_max_length

    length = arguments.max_length or default_max_length(checkpoint)
    name = Path(task).stem if task.endswith(".yaml") else task
    return {"checkpoint": checkpoint.identity, "variant": name, "length": length}


def missing(results: Results, checkpoint: Checkpoint, task: str, arguments) -> bool:
    return results.find(**row_key(checkpoint, task, arguments)) is None


def fill(results: Results, checkpoint: Checkpoint, tasks: list[str], source, arguments) -> None:
    """Measure what the results do not have yet of one checkpoint."""
    from integrations.lm_eval_model import CheckpointLM

    results.checkpoints.setdefault(checkpoint.identity, checkpoint.describe())
    lm: CheckpointLM | None = None
    for task in tasks:
        if not missing(results, checkpoint, task, arguments):
            continue
        lm = lm or CheckpointLM(
            checkpoint,
            max_length=arguments.max_length,
            batch_size=arguments.batch,
            device=arguments.device,
            precision=arguments.precision,
        )
        begun = time.monotonic()
        measured = measure(lm, task, source, arguments.limit)
        seconds = round(time.monotonic() - begun, 2)
        results.add(row_key(checkpoint, task, arguments) | measured | {"seconds": seconds})
        shown = ", ".join(f"{k} {v['value']:.4g}" for k, v in measured["metrics"].items())
        print(f"{checkpoint.info.run}, {results.rows[-1]['variant']}: {shown}", file=sys.stderr)


def measure(lm, task: str, source, limit: int | None) -> dict:
    """All metrics of one task with their standard errors, the whole group's where it is one."""
    import lm_eval

    from downstream_tasks import quiet_harness

    loaded = source.load(task)
    with quiet_harness():
        found = lm_eval.evaluate(
            lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False
        )
    name = next(iter(loaded["groups"]), None) or next(iter(loaded["tasks"]))
    metrics: dict[str, dict] = {}
    for key, value in found["results"][name].items():
        metric, comma, _ = key.partition(",")
        if not comma or not isinstance(value, int | float):
            continue
        base = metric.removesuffix("_stderr")
        metrics.setdefault(base, {"value": None, "stderr": None})
        metrics[base]["stderr" if metric.endswith("_stderr") else "value"] = float(value)
    samples = sum(found["n-samples"][t]["effective"] for t in loaded["tasks"])
    row = {"samples": samples, "max_gen_toks": lm.max_gen_toks, "metrics": metrics}
    if len(loaded["tasks"]) > 1:
        row["subtasks"] = {
            t: {k.partition(",")[0]: v for k, v in found["results"][t].items() if "," in k}
            for t in loaded["tasks"]
        }
    return row | {"version": found["versions"].get(name)}


if __name__ == "__main__":
    run(main)
