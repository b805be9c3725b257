"""python passkey.py CKPT [CKPT ...] --lengths 1024,1536,2048,4096,8192 --out results/passkey.json

Passkey retrieval (Mohtashami and Jaggi, 2023): a number is hidden in filler text and asked for at
the end. `--trials 100` prompts per length, `--seed 0`.

A prompt is five parts joined by newlines: the task, filler, the line with the key, filler, the
question. It is cut to exactly `length - 10` tokens, so that prompt and answer fill the length. Key
and depth are uniform, drawn from (seed, length, trial): every model of one tokeniser gets the same
prompts. The answer is 10 tokens, greedy; it is right if its first run of digits is the key.

Beside the results are the figures and NAME-answers.jsonl with every answer. Accuracy comes with
its 95 % Wilson interval. `--alpha`, `--p`, `--window` and `--position-interpolation` as in
eval_extrapolation.py.
"""

import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from evaluating.protocol import EvaluationParser
from support.command import answer_early, lengths, run, seed_number, whole


def make_parser() -> EvaluationParser:
    parser = EvaluationParser(__doc__)
    parser.add_run_arguments()
    parser.add_argument("--lengths", type=lengths, default=[1024, 1536, 2048, 4096, 8192])
    parser.add_argument("--trials", type=whole(1, 100_000), default=100)
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_variant_arguments()
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import numpy as np
import torch

from data.passkey_text import ANSWER_TOKENS, Prompt, make_prompt
from data.tokeniser import Tokeniser
from evaluating import passkey_report as report
from evaluating.checkpoints import Checkpoint, open_checkpoints
from evaluating.protocol import BATCH_TOKENS, arithmetic, kept_on_interrupt, open_results, progress
from evaluating.results import Record, Results
from evaluating.variants import Variant, configure, series_label, variants
from lssar.errors import UserError
from model import GPT
from support.files import are_checked, checked_line, open_regular, read_line, writing
from training import distributed

DEPTHS = 10  # equal parts of the filler, for accuracy by depth


# --- scores --------------------------------------------------------------------------------------


def is_right(answer: str, key: int) -> bool:
    """Whether the first run of digits is the key."""
    digits = re.search(r"[0-9]+", answer)
    return digits is not None and digits.group() == str(key)


def wilson(correct: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a proportion that is right at 0 and 100 % too."""
    share = correct / trials
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


# --- asking --------------------------------------------------------------------------------------


class Answers:
    """NAME-answers.jsonl: one line per trial, appended batch by batch."""

    KEY = ("run", "variant", "length", "trial")

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[tuple, dict] = {}
        if path.exists():
            self._continue()

    def _continue(self) -> None:
        with writing(self.path):
            with open_regular(self.path) as file:
                found = file.read()
            whole = found[: found.rfind(b"\n") + 1]  # a kill may have cut the last line
            try:
                lines = whole.decode().split("\n")[:-1]
                checked = are_checked(lines)
                for line in lines:
                    self._remember(read_line(line, checked))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(
                    f"{self.path} is damaged; delete it and the results beside it, or give another "
                    "--out"
                ) from None
            if whole != found:
                self.path.write_bytes(whole)

    def _remember(self, answer: dict) -> None:
        self.known[tuple(answer[k] for k in self.KEY)] = answer

    def find(self, *key) -> dict | None:
        return self.known.get(key)

    def append(self, answers: list[dict]) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(checked_line, answers))
            file.flush()
            os.fsync(file.fileno())
        for answer in answers:
            self._remember(answer)


def answer_batch(model: GPT, tokeniser: Tokeniser, prompts: list[Prompt], device) -> list[str]:
    """Greedy continuations, all at once: prompts of one length need no padding."""
    batch = torch.from_numpy(np.stack([p.tokens for p in prompts]).astype(np.int64)).to(device)
    steps = model.stream(batch, ANSWER_TOKENS, temperature=0)
    new = torch.stack(list(steps), dim=1).cpu()  # (prompts, ANSWER_TOKENS)
    return [tokeniser.decode(row.tolist()) for row in new]


def batches(length: int, trials: int) -> Iterator[range]:
    """Trials that are asked together: always the same ones, so that a rerun rounds alike."""
    size = max(1, BATCH_TOKENS // length)
    return (range(i, min(i + size, trials)) for i in range(0, trials, size))


def ask(
    model: GPT, tokeniser: Tokeniser, key: dict, trials: int, seed: int, answers: Answers, device
) -> list[dict]:
    """The answers of one (run, variant, length), asking only what is not on disk."""
    length = key["length"]
    with progress(trials, f"{key['label']} at {length}", "trial") as bar:
        for batch in batches(length, trials):
            if any(answers.find(*identity(key), t) is None for t in batch):
                prompts = [make_prompt(tokeniser, length, t, seed) for t in batch]
                texts = answer_batch(model, tokeniser, prompts, device)
                answers.append(
                    [
                        key | {"trial": t, "key": p.key, "depth": round(p.depth, 6),
                               "answer": text, "right": is_right(text, p.key)}
                        for t, p, text in zip(batch, prompts, texts, strict=True)
                    ]
                )  # fmt: skip
            bar.update(len(batch))
    return [answers.find(*identity(key), t) for t in range(trials)]


def identity(key: dict) -> tuple:
    return tuple(key[k] for k in Answers.KEY[:3])


def details(found: list[dict]) -> dict:
    """What an accuracy was made of: its interval, and the answers by depth."""
    correct, trials = sum(a["right"] for a in found), len(found)
    low, high = wilson(correct, trials)
    by_depth = []
    for part in range(DEPTHS):
        here = [a["right"] for a in found if min(int(a["depth"] * DEPTHS), DEPTHS - 1) == part]
        edges = {"from": part / DEPTHS, "to": (part + 1) / DEPTHS}
        by_depth.append(edges | {"trials": len(here), "correct": sum(here)})
    interval = {"wilson_low": low, "wilson_high": high}
    return {"trials": trials, "correct": correct, **interval, "by_depth": by_depth}


# --- the command ---------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    arguments = make_parser().parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("passkey.py runs in one process; start it without torchrun")
    device = distributed.start(arguments.device).device
    checkpoints = open_checkpoints(arguments.checkpoints)
    chosen = variants(arguments, checkpoints)
    for checkpoint in checkpoints:  # every prompt can be made, before anything is asked
        for length in arguments.lengths:
            for trial in range(arguments.trials):
                make_prompt(checkpoint.tokeniser(), length, trial, arguments.seed)
    with arithmetic(arguments.precision, device) as precision:
        results, answers = open_files(arguments, precision)
        with kept_on_interrupt(results.path):
            for checkpoint in checkpoints:
                fill(results, answers, checkpoint, chosen, arguments, device)
    print(report.tables(results))
    for figure in report.figures(results):
        print(f"figure: {figure}")


def open_files(arguments, precision: str) -> tuple[Results, Answers]:
    settings = {
        "trials": arguments.trials,
        "seed": arguments.seed,
        "answer_tokens": ANSWER_TOKENS,
        "precision": precision,
    }
    results = open_results(arguments.out, "passkey", settings, about={})
    path = results.sibling("-answers.jsonl")
    if path.exists() and not results.path.exists():
        raise UserError(
            f"{path} has answers of unknown settings, as {results.path} is gone; delete it or give "
            "another --out"
        )
    results.save()  # the settings, before the first answer
    return results, Answers(path)


def fill(
    results: Results,
    answers: Answers,
    checkpoint: Checkpoint,
    chosen: list[Variant],
    arguments,
    device: torch.device,
) -> None:
    """Ask what the results do not have yet of one checkpoint."""
    results.runs.setdefault(checkpoint.identity, checkpoint.describe())
    tokeniser = checkpoint.tokeniser()
    model: GPT | None = None
    for variant in (v for v in chosen if v.suits(checkpoint.config)):
        for length in arguments.lengths:
            key = {"run": checkpoint.identity, "variant": variant.name, "length": length}
            if results.find(**key):
                continue
            model = model or checkpoint.load(device)
            train_length = checkpoint.info.train_length
            configure(model, variant.config(checkpoint.config, train_length, length))
            begun = time.monotonic()
            label = series_label(checkpoint.info.run, variant.name)
            found = ask(
                model, tokeniser, key | {"label": label}, arguments.trials, arguments.seed,
                answers, device,
            )  # fmt: skip
            made_of = details(found) | {"seconds": round(time.monotonic() - begun, 2)}
            accuracy = made_of["correct"] / made_of["trials"]
            results.add(Record("accuracy", value=accuracy, details=made_of, **key))
            print(f"{label} at {length}: {100 * accuracy:.0f} %", file=sys.stderr)


if __name__ == "__main__":
    run(main)
