"""Likelihoods by hand, and small copies of the paper's data sets in the hub's layout."""

import json
from pathlib import Path

import torch

from data.tokeniser import get_tokeniser

BYTES = get_tokeniser("bytes")


def by_hand(model, context, continuation, max_length) -> tuple[float, bool]:
    """Return log p(continuation | context) from a pass over the two alone, cut from the left."""
    ids = [*context, *continuation][-max_length - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double()
    total, greedy = 0.0, True
    for place in range(len(ids) - len(continuation), len(ids)):
        row = logits[place - 1]
        total += row.log_softmax(-1)[ids[place]].item()
        greedy &= int(row.argmax()) == ids[place]
    return total, greedy


def text_by_hand(model, context: str, continuation: str, max_length: int) -> tuple[float, bool]:
    """Return the same for text of bytes: blanks that end a context begin the continuation."""
    kept = context.rstrip()
    first = BYTES.encode(kept).tolist() or [BYTES.eot]
    second = BYTES.encode(context[len(kept) :] + continuation).tolist()
    return by_hand(model, first, second, max_length)


WORDS = ["sun", "moon", "star", "tree", "river", "stone", "cloud", "bird"]
DOCUMENTS = {
    "arc": [
        {
            "id": str(i),
            "question": f"What is number {i}?",
            "choices": {
                "text": [WORDS[i], "a long answer", WORDS[i + 1] * 2],
                "label": list("ABC"),
            },
            "answerKey": "ABC"[i % 3],
        }
        for i in range(6)
    ],
    "hellaswag": [
        {
            "ctx_a": f"A person sees the {WORDS[i]}.",
            "ctx_b": "he",
            "activity_label": "Looking",
            "endings": [f"sings {w}." for w in WORDS[i : i + 4]],
            "label": str(i % 4),
        }
        for i in range(4)
    ],
    "piqa": [
        {"goal": f"Find the {w}", "sol1": "look up", "sol2": f"ask {w} again", "label": i % 2}
        for i, w in enumerate(WORDS)
    ],
    "sciq": [
        {
            "support": f"The {w} is old.",
            "question": "What is old?",
            "distractor1": "fire",
            "distractor2": "ice",
            "distractor3": "air",
            "correct_answer": w,
        }
        for w in WORDS
    ],
    "lambada": [{"text": f"He saw the {w} and then he drew the {w}"} for w in WORDS],
    "scrolls": [
        {"id": str(i // 2), "pid": f"{i // 2}_0", "input": f"A: the {w}!\n" * 9, "output": f"A {w}"}
        for i, w in enumerate(WORDS[:6])
    ],
    "mmlu": [
        {"question": "2 + 2?", "choices": ["1", "2", "3", "4"], "answer": 3},
        {"question": "3 - 2?", "choices": ["1", "2", "3", "4"], "answer": 0},
    ],
}


def write_lines(path: Path, documents: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    return path


def write_hub_copies(folder: Path) -> Path:
    """Write all tasks but MMLU, which has 57 parts."""
    import pandas

    for configuration in ("ARC-Easy", "ARC-Challenge"):
        write_lines(folder / "ai2_arc" / configuration / "test.jsonl", DOCUMENTS["arc"])
    write_lines(folder / "hellaswag/data/validation.jsonl", DOCUMENTS["hellaswag"])
    (folder / "piqa").mkdir(parents=True)
    parquet = folder / "piqa/validation-00000-of-00001.parquet"
    pandas.DataFrame(DOCUMENTS["piqa"]).to_parquet(parquet)
    write_lines(folder / "sciq/test.jsonl", DOCUMENTS["sciq"])
    write_lines(folder / "lambada_openai/test.jsonl", DOCUMENTS["lambada"])
    write_lines(folder / "scrolls/summ_screen_fd/validation.jsonl", DOCUMENTS["scrolls"])
    return folder
