"""Scores of one written text, and SummScreen with them.

The harness scores its SCROLLS tasks with a script that it downloads and runs, which gives one
number without a standard error. The same measure is computed here: ROUGE F-measure with stemming,
the best reference counts, times 100, averaged over the documents.
"""

from pathlib import Path

from datasets import load_dataset
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.scrolls.task import SummScreenFD, _drop_duplicates_in_input
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import sentence_chrf

KINDS = ("rouge1", "rouge2", "rougeL")
SCORER = RougeScorer(KINDS, use_stemmer=True)


def rouge(text: str, references: list[str]) -> dict[str, float]:
    """{"rouge1": ..., ...} of the reference that fits best, 0 to 100."""
    scores = [SCORER.score(reference, text) for reference in references]
    return {kind: 100 * max(score[kind].fmeasure for score in scores) for kind in KINDS}


def score_line(doc: dict, results: list[str]) -> dict[str, float]:
    """For a task whose documents have one `target` line."""
    text, target = results[0], doc["target"]
    return {
        "chrf": sentence_chrf(text, [target]).score,
        "rouge1": rouge(text, [target])["rouge1"],
        "exact_match": float(text.strip() == target.strip()),
    }


class SummScreen(SummScreenFD):
    """The harness' prompt and documents; from `folder`/validation.jsonl where one is given."""

    def __init__(self, name: str, folder: Path | None = None):
        self.folder = folder
        ConfigurableTask.__init__(self, config={"metadata": {"version": self.VERSION}})
        self.config.task = name

    def download(self, *arguments, **options) -> None:
        if self.folder is None:
            super().download(*arguments, **options)
            return
        files = {"validation": str(self.folder / "validation.jsonl")}
        self.dataset = load_dataset("json", data_files=files)
        self.dataset["validation"] = _drop_duplicates_in_input(self.dataset["validation"])

    def has_training_docs(self) -> bool:
        return False

    def process_results(self, doc: dict, results: list[str]) -> dict[str, float]:
        return rouge(results[0], doc["outputs"])

    def aggregation(self) -> dict:
        return dict.fromkeys(KINDS, mean)
