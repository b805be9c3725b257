"""python passkey.py CKPT [CKPT ...] --lengths 1024,1536,2048,4096,8192 --out results/passkey.json

Measures passkey retrieval (Mohtashami and Jaggi, 2023): a number is hidden in filler text and asked
for at the end, in `--trials 100` prompts per length. `torchrun --nproc_per_node=N` shares the work
and gives the same numbers.

A prompt is five parts joined by newlines: the task, filler, the line with the key, filler, the
question. It has exactly `length - 10` tokens, so that prompt and answer fill the length. Key and
depth are uniform, drawn from (`--seed 0`, length, trial): every model of one tokeniser gets the
same prompts. The answer is 10 tokens, greedy; it is right if its first run of digits is the key.

`--form short`, for byte-level models, has no task and fewer words. Its key is one letter of 22, so
that guessing is right 4.5 times in a hundred.

Reported per length:

    accuracy        with its 95 % Wilson interval, and by depth and distance of the key
    reach           share of the keys at most a training length before the answer: a model that
                    sees no further can be right on these alone
    far accuracy    accuracy on the other keys

Beside the results are the figures and NAME-answers.jsonl with every answer. The options for
variants are the same as in eval_extrapolation.py.
"""

import itertools
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from data.far_tasks import ANSWER_TOKENS, FORMS, Prompt, make_prompt
from evaluating import report
from evaluating.arguments import EvaluationParser
from evaluating.protocol import BATCH_TOKENS, Case, measuring, opened, progress, unmeasured
from evaluating.results import Record, Results
from lssar.errors import UserError
from model import GPT
from support import plots
from support.command import lengths, run, seed_number, whole
from support.files import open_regular, reading, sync, write_text, writing
from support.text import short_number
from training.distributed import World

DEPTHS = [part / 10 for part in range(11)]  # shares of the filler before the key
DISTANCES = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 8, 16]  # in training lengths


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__, variants=True)
    parser.add_argument("--lengths", type=lengths, default=[1024, 1536, 2048, 4096, 8192])
    parser.add_argument("--trials", type=whole(1, 100_000), default=100)
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--form", choices=("paper", "short"), default="paper")
    return parser


def is_right(answer: str, key: str) -> bool:
    """Tell whether the first number, or capital letter, of an answer is the key."""
    found = re.search(r"[0-9]+" if key.isdigit() else r"[A-Z]", answer)
    return found is not None and found.group() == key


def wilson(correct: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % interval of a proportion, valid at 0 and 100 % too."""
    share = correct / trials
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def score(answers: list[dict]) -> dict:
    """Count the answers and the right ones, with the interval of their share."""
    trials = len(answers)
    correct = sum(answer["right"] for answer in answers)
    low, high = wilson(correct, trials)
    return {"trials": trials, "correct": correct, "wilson_low": low, "wilson_high": high}


def by_part(places: list[tuple[float, bool]], edges: list[float]) -> list[dict]:
    """Count right answers by depth or distance; a part is above its lower edge, up to its upper."""
    parts = []
    for low, high in itertools.pairwise(edges):
        here = [right for place, right in places if low < min(place, edges[-1]) <= high]
        parts.append({"from": low, "to": high, "trials": len(here), "correct": sum(here)})
    return parts


def measure(answers: list[dict], train_length: int) -> list[Record]:
    """Return the records of the answers of one case; the caller adds run, variant and length."""
    depths = [(a["depth"], a["right"]) for a in answers]
    distances = [(a["distance"] / train_length, a["right"]) for a in answers]
    far = [a for a in answers if a["distance"] > train_length]
    accuracy = score(answers)
    accuracy["by_depth"] = by_part(depths, DEPTHS)
    accuracy["by_distance"] = by_part(distances, DISTANCES)
    scores = {"accuracy": accuracy}
    if far:
        scores["far_accuracy"] = score(far)
    scores["reach"] = {"trials": len(answers), "correct": len(answers) - len(far)}
    records = []
    for quantity, found in scores.items():
        share = found["correct"] / found["trials"]
        records.append(Record(quantity, run="", value=share, details=found))
    return records


class Answers:
    """Keeps the answers of NAME-answers.jsonl: one line per trial, appended batch by batch.

    A kill may cut the last line short, which is then ignored. Before the next line is appended, the
    whole lines replace the file atomically, so that a kill at any moment keeps them.
    """

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[tuple, dict] = {}  # by run, variant, length and trial
        self.whole_lines: bytes | None = None  # the part to keep of a file with a torn line
        if not path.exists():
            return
        with reading(path), open_regular(path) as file:
            found = file.read()
        whole_lines = found[: found.rfind(b"\n") + 1]
        try:
            self._remember([json.loads(line) for line in whole_lines.decode().split("\n")[:-1]])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path} is damaged; delete it and the results beside it, or give another --out"
            ) from None
        if whole_lines != found:
            self.whole_lines = whole_lines

    def _remember(self, answers: list[dict]) -> None:
        self.known |= {(a["run"], a["variant"], a["length"], a["trial"]): a for a in answers}

    def append(self, answers: list[dict], save: bool) -> None:
        """Add answers; only the process with `save` writes them to the file."""
        self._remember(answers)
        if not save:
            return
        with writing(self.path):
            if self.whole_lines is not None:
                write_text(self.path, self.whole_lines.decode())
                self.whole_lines = None
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(a, ensure_ascii=False) + "\n" for a in answers)
            sync(self.path)


def answer_batch(model: GPT, prompts: list[Prompt], device) -> torch.Tensor:
    """Return greedy continuations (B, 10), all at once: prompts of one length need no padding."""
    batch = torch.from_numpy(np.stack([p.tokens for p in prompts]).astype(np.int64)).to(device)
    steps = list(model.stream(batch, ANSWER_TOKENS, temperature=0))
    return torch.stack(steps, dim=1).cpu()


def ask(model: GPT, case: Case, arguments, answers: Answers, world: World) -> list[dict]:
    """Return the answers of one case; ask only for answers that are not on disk yet.

    The missing batches are shared out among the processes, one to each per turn.
    """
    tokeniser = case.checkpoint.tokeniser()
    length = case.length
    trials = arguments.trials
    form = FORMS[arguments.form]
    keys = [(*case.key.values(), trial) for trial in range(trials)]
    size = max(1, BATCH_TOKENS // length)  # always the same batches, to round alike
    batches = [range(trials)[first : first + size] for first in range(0, trials, size)]
    missing = [b for b in batches if any(keys[trial] not in answers.known for trial in b)]
    with progress(trials, f"{case.label} at {length}", "trial", world.is_main) as bar:
        bar.update(trials - sum(map(len, missing)))
        for turn in range(0, len(missing), world.size):
            shared = missing[turn : turn + world.size]
            prompts = {}
            for trial in itertools.chain(*shared):
                prompts[trial] = make_prompt(tokeniser, length, trial, arguments.seed, form)
            tokens = torch.zeros(trials, ANSWER_TOKENS, dtype=torch.int64)
            for mine in shared[world.rank : world.rank + 1]:
                own = [prompts[trial] for trial in mine]
                tokens[mine.start : mine.stop] = answer_batch(model, own, world.device)
            tokens = world.sum(tokens)  # a row is zero on all processes but the one that made it
            new = []
            for trial, prompt in prompts.items():
                text = tokeniser.decode(tokens[trial].tolist())
                answer = {
                    "label": case.label,
                    "trial": trial,
                    "key": prompt.key,
                    "depth": round(prompt.depth, 6),
                    "distance": prompt.distance,
                    "answer": text,
                    "right": is_right(text, prompt.key),
                }
                new.append(case.key | answer)
            answers.append(new, save=world.is_main)
            bar.update(len(new))
    return [answers.known[key] for key in keys]


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    settings = {key: getattr(arguments, key) for key in ("trials", "seed", "form")}
    settings["answer_tokens"] = ANSWER_TOKENS
    with opened(arguments) as (world, checkpoints, chosen):
        # Every prompt once before the first model runs: one that is too short is an error.
        form = FORMS[arguments.form]
        trials = range(arguments.trials)
        for checkpoint, length, trial in itertools.product(checkpoints, arguments.lengths, trials):
            make_prompt(checkpoint.tokeniser(), length, trial, arguments.seed, form)
        with measuring(arguments, "passkey", settings, {}, world) as results:
            answers = open_answers(results, world)
            for case, model in unmeasured(results, checkpoints, chosen, arguments.lengths, world):
                begun = time.monotonic()
                answered = ask(model, case, arguments, answers, world)
                found = measure(answered, case.checkpoint.info.train_length)
                found[0].details["seconds"] = round(time.monotonic() - begun, 2)
                results.add(*(replace(record, **case.key) for record in found), save=world.is_main)
                if world.is_main:
                    accuracy = f"{100 * found[0].value:.0f} %"
                    print(f"{case.label} at {case.length}: {accuracy}", file=sys.stderr)
    if world.is_main:
        show(results)


def open_answers(results: Results, world: World) -> Answers:
    """Open the answers beside a results file, which holds their settings."""
    path = results.sibling("-answers.jsonl")
    if path.exists() and not results.path.exists():
        raise UserError(
            f"{path} has answers of unknown settings, as {results.path} is gone; "
            "delete it or give another --out"
        )
    if world.is_main:
        results.save()  # the settings, before the first answer
    world.barrier()
    return Answers(path)


def show(results: Results) -> None:
    """Print the tables and draw the figures."""

    def share(record: Record) -> str:
        low = round(100 * record.details["wilson_low"])
        high = round(100 * record.details["wilson_high"])
        return f"{100 * record.value:.0f} % [{low}, {high}]"

    titles = {"accuracy": "passkey accuracy", "far_accuracy": "keys beyond a training length back"}
    for quantity, title in titles.items():
        title += f", {results.settings['trials']} trials, 95 % Wilson interval"
        print(report.table_by_length(results, title, quantity, share))
    figure, axes = report.figure_by_length(
        results, "accuracy", "passkey accuracy (%)", "prompt length (tokens)", with_interval
    )
    axes.set_ylim(0, 100)
    plots.publish(figure, results.sibling(".png"))
    plots.publish(accuracy_by_distance(results), results.sibling("-distance.png"))


def with_interval(record: Record) -> tuple[float, float, float]:
    """Return the accuracy in per cent and how far its interval goes below and above it."""
    below = max(0, record.value - record.details["wilson_low"])
    above = max(0, record.details["wilson_high"] - record.value)
    return 100 * record.value, 100 * below, 100 * above


def accuracy_by_distance(results: Results):
    """Draw a panel per series: length across, distance of the key down, accuracy as colour."""
    series = list(report.styled_series(results, "accuracy"))
    columns = 2 if len(series) == 4 else min(3, len(series))
    rows = math.ceil(len(series) / columns)
    width = plots.COLUMN if columns == 1 else plots.PAGE
    figure, grid = plots.figure(rows, columns, width=width, height=0.5 + 2.1 * rows, squeeze=False)
    for axes, (label, _, found) in zip(grid.flat, series, strict=False):
        parts = [[(p["correct"], p["trials"]) for p in r.details["by_distance"]] for r in found]
        correct, trials = np.array(parts).T  # (distances, lengths)
        shares = np.divide(correct, trials, out=np.full(correct.shape, np.nan), where=trials > 0)
        image = plots.heatmap(axes, 100 * shares, low=0, high=100, numbers=True)
        axes.set_xticks(range(len(found)), [short_number(r.length) for r in found])
        axes.set_yticks(np.arange(len(DISTANCES)) - 0.5, [f"{edge:g}" for edge in DISTANCES])
        axes.axhline(DISTANCES.index(1) - 0.5, color=plots.INK, linewidth=1)
        axes.set_title(label)
    for axes in grid.flat[len(series) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("distance of the key\n(training lengths)")
    for index in range(max(0, len(series) - columns), len(series)):  # the last of each column
        grid.flat[index].set_xlabel("prompt length (tokens)")
    figure.colorbar(image, ax=grid, label="accuracy (%)", fraction=0.03, pad=0.02)
    return figure


if __name__ == "__main__":
    run(main)
