"""`python downstream.py`: the paper's tasks offline, on local copies, against numbers by hand."""

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("lm_eval", reason="pip install -r requirements-downstream.txt")

import datasets
import huggingface_hub
from data_sets import run_prepare
from downstream_helpers import DOCUMENTS, text_by_hand, write_hub_copies, write_lines
from eval_helpers import tiny_model, write_checkpoint, write_tokens

import downstream
from data.shards import describe_set
from evaluating.results import Record, read_results
from evaluating.tasks import COUNTS, HARNESS, PASSAGE, PLACES, SETS, chosen_tasks, rouge, write_task
from lssar.errors import UserError

ROOT = Path(__file__).parents[2]
MAX_LENGTH = 64
SOURCES = "".join(
    (ROOT / name).read_text("utf-8")
    for name in ("lssar/mechanisms.py", "lssar/backends.py", "training/config.py")
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Hide the hub, and whatever an earlier run may have left of it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run-a", tiny_model("lssar"), tokeniser="bytes")


def evaluate(checkpoint, out, *arguments):
    common = ["--out", str(out), "--device", "cpu", "--max-length", str(MAX_LENGTH)]
    downstream.main([str(checkpoint), *common, *map(str, arguments)])
    found: dict[str, dict[str, Record]] = {}
    for record in read_results(out).records:
        found.setdefault(record.task, {})[record.quantity] = record
    return found


def choice_scores(model, documents, context, choices, gold) -> tuple[float, float]:
    """Return acc and acc_norm: the likeliest choice, and the likeliest for its characters."""
    right = [0, 0]
    for document in documents:
        found = choices(document)
        likely = [text_by_hand(model, context(document), f" {c}", MAX_LENGTH)[0] for c in found]
        per_length = [value / len(c) for value, c in zip(likely, found, strict=True)]
        for i, values in enumerate((likely, per_length)):
            right[i] += values.index(max(values)) == gold(document)
    return right[0] / len(documents), right[1] / len(documents)


def test_the_papers_tasks_run_offline_and_give_the_numbers_by_hand(tmp_path, checkpoint, capsys):
    data, model = write_hub_copies(tmp_path / "data"), tiny_model("lssar")
    tasks = [task for task in SETS["paper"] if task != "mmlu"]
    out = tmp_path / "results/d.json"
    found = evaluate(checkpoint, out, "--tasks", ",".join(tasks), "--data-dir", data)
    assert list(found) == tasks
    metrics = {task: {m: r.value for m, r in scores.items()} for task, scores in found.items()}

    def arc_gold(d):
        return d["choices"]["label"].index(d["answerKey"])

    expected = {
        "arc_easy": choice_scores(
            model,
            DOCUMENTS["arc"],
            lambda d: f"Question: {d['question']}\nAnswer:",
            lambda d: d["choices"]["text"],
            arc_gold,
        ),
        "piqa": choice_scores(
            model,
            DOCUMENTS["piqa"],
            lambda d: f"Question: {d['goal']}\nAnswer:",
            lambda d: [d["sol1"], d["sol2"]],
            lambda d: d["label"],
        ),
        "sciq": choice_scores(
            model,
            DOCUMENTS["sciq"],
            lambda d: f"{d['support']}\nQuestion: {d['question']}\nAnswer:",
            lambda d: [d["distractor1"], d["distractor2"], d["distractor3"], d["correct_answer"]],
            lambda d: 3,
        ),
    }
    expected["arc_challenge"] = expected["arc_easy"]
    for task, (acc, acc_norm) in expected.items():
        assert (metrics[task]["acc"], metrics[task]["acc_norm"]) == (acc, acc_norm), task
        n = len(DOCUMENTS[task.partition("_")[0]])
        assert found[task]["acc"].error == pytest.approx(math.sqrt(acc * (1 - acc) / (n - 1)))

    last = [d["text"].rpartition(" ") for d in DOCUMENTS["lambada"]]
    by_hand = [text_by_hand(model, before, f" {word}", MAX_LENGTH) for before, _, word in last]
    mean = sum(likely for likely, _ in by_hand) / len(by_hand)
    assert metrics["lambada_openai"]["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert metrics["lambada_openai"]["acc"] == sum(greedy for _, greedy in by_hand) / len(by_hand)
    assert found["lambada_openai"]["perplexity"].error > 0

    # Six lines, two of each document: three summaries to write, each with two references.
    assert found["scrolls_summscreenfd"]["rouge1"].details["samples"] == 3
    assert {"rouge1", "rouge2", "rougeL"} == set(metrics["scrolls_summscreenfd"])
    assert found["scrolls_summscreenfd"]["rouge1"].length == MAX_LENGTH

    printed = capsys.readouterr().out
    assert "ARC-E" in printed and "SummScreen" in printed and "Perplexity" in printed
    assert "max_length = 64 tokens lose their beginning" in printed
    assert (tmp_path / "results/d.png").stat().st_size > 0
    file = read_results(out)
    assert file.kind == "downstream"
    assert set(file.about["versions"]) == {"lm_eval", "transformers", "datasets", "rouge_score"}

    # A second run computes nothing, and the table is printed again.
    again = evaluate(checkpoint, out, "--tasks", ",".join(tasks), "--data-dir", data)
    assert again == found
    second = capsys.readouterr().out
    assert f"{len(file.records)} finished numbers are kept" in second
    assert "ARC-E" in second


@pytest.mark.slow
def test_mmlu_is_the_mean_over_the_questions_of_its_57_parts(tmp_path, checkpoint):
    parts = sorted(p.stem.removeprefix("mmlu_") for p in (HARNESS / "mmlu/default").glob("mmlu_*"))
    assert len(parts) == 57
    for part in parts:
        write_lines(tmp_path / "data/mmlu" / part / "test.jsonl", DOCUMENTS["mmlu"])
    accuracy = evaluate(
        checkpoint, tmp_path / "m.json", "--tasks", "mmlu", "--data-dir", tmp_path / "data"
    )["mmlu"]["acc"]
    assert accuracy.details["samples"] == 114
    parts = accuracy.details["subtasks"]
    assert len(parts) == 57
    assert accuracy.value == pytest.approx(sum(parts.values()) / 57)


def test_rouge_is_the_best_references_f_measure_with_stems():
    found = rouge("The cats sat", ["nothing here", "the cat ran fast"])
    assert found["rouge1"] == pytest.approx(100 * 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert found["rouge2"] == pytest.approx(100 * 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert rouge("", ["words"])["rouge1"] == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.parquet"  # of which validation is the beginning, in one piece
    pyarrow.parquet.write_table(pyarrow.table({"text": [SOURCES]}), text)
    size = ("--tokeniser", "bytes", "--val-tokens", 30_000, "--workers", 0)
    done = run_prepare("fineweb", "--from-files", text, *size, "--out", folder / "c")
    assert done.returncode == 0, done.stderr
    return folder / "c"


def test_nano_tasks_are_the_same_every_time_and_what_they_say(tmp_path, corpus):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for task in COUNTS:
            write_task(tmp_path / name, corpus, task)
    documents = {}
    for task in COUNTS:
        first, second = (tmp_path / n / f"{task}.jsonl" for n in "ab")
        assert first.read_bytes() == second.read_bytes()
        documents[task] = [json.loads(line) for line in first.read_text("utf-8").splitlines()]
        assert 20 < len(documents[task]) <= COUNTS[task]
    for d in documents["nano_cloze"]:
        assert len(d["context"]) == PASSAGE
        assert d["context"] + d["target"] in SOURCES
        name = d["context"].split()[-1] + d["target"]  # the name, perhaps with marks before it
        assert any(d["context"].count(name[-n:]) for n in range(4, len(name) + 1))
    for d in documents["nano_continuation"]:
        assert len(set(d["choices"])) == 4
        assert d["context"] + d["choices"][d["label"]] + "\n" in SOURCES
    for d in documents["nano_line"]:
        assert d["context"] + d["target"] + "\n" in SOURCES


def test_nano_tasks_go_through_the_same_command(tmp_path, checkpoint, corpus, capsys):
    out = tmp_path / "n.json"
    # A continuation has up to 65 bytes, and all of it has to fit.
    options = ("--tasks", "nano", "--max-length", 128, "--corpus", corpus, "--limit", 6)
    found = evaluate(checkpoint, out, *options)
    assert {task: set(scores) for task, scores in found.items()} == {
        "nano_cloze": {"acc", "perplexity"},
        "nano_continuation": {"acc", "acc_norm"},
        "nano_line": {"chrf", "rouge1", "exact_match"},
    }
    assert all(r.details["samples"] == 6 for scores in found.values() for r in scores.values())
    assert "cloze ppl" in capsys.readouterr().out
    assert read_results(out).about["corpus"] == describe_set(corpus)
    with pytest.raises(UserError, match="was made with limit = 6, this is 7"):
        evaluate(checkpoint, out, *options[:-1], 7)
    other = write_tokens(tmp_path / "other", 2000)
    with pytest.raises(UserError, match=r"n\.json was made from another corpus than .*other"):
        evaluate(checkpoint, out, *options[:5], other, *options[6:])


def test_a_yaml_of_ones_own_is_a_task(tmp_path, checkpoint):
    documents = [{"before": "The sky is", "after": " blue"}, {"before": "a", "after": "b"}]
    data = write_lines(tmp_path / "own.jsonl", documents)
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "before",
        "doc_to_target": "after",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(task), encoding="utf-8")
    found = evaluate(checkpoint, tmp_path / "o.json", "--tasks", tmp_path / "own.yaml")
    model = tiny_model("lssar")
    by_hand = [text_by_hand(model, d["before"], d["after"], MAX_LENGTH)[0] for d in documents]
    value = found["own"]["perplexity"].value
    assert value == pytest.approx(math.exp(-sum(by_hand) / 2), rel=1e-4)


def test_mistakes_are_one_line(tmp_path, checkpoint):
    out = tmp_path / "x.json"

    def fails(message, *arguments):
        with pytest.raises(UserError, match=message):
            evaluate(checkpoint, out, *arguments)

    fails("--tasks papr: unknown; did you mean 'paper'", "--tasks", "papr")
    fails("no such file", "--tasks", "nowhere.yaml")
    fails("--limit: '0' must be at least 1", "--limit", 0)
    fails("--data-dir .*: no such folder", "--data-dir", tmp_path / "nowhere")
    fails("nano_cloze is made from a corpus' held-out text; give --corpus", "--tasks", "nano")
    (tmp_path / "empty").mkdir()
    data = ("--data-dir", tmp_path / "empty")
    fails(r"arc_easy: no test\*.parquet or test\*.jsonl in .*ARC-Easy; put allenai/ai2_arc", *data)
    fails(
        r"no validation\*.parquet or validation\*.jsonl in .*summ_screen_fd",
        "--tasks",
        "scrolls_summscreenfd",
        *data,
    )
    bad = write_lines(tmp_path / "bad/sciq/test.jsonl", [])
    bad.write_text("{not json", encoding="utf-8")
    fails("sciq: its documents cannot be read", "--tasks", "sciq", "--data-dir", tmp_path / "bad")
    assert not out.exists()


def test_sets_and_names_can_be_mixed():
    assert chosen_tasks("lambada,arc_easy,lambada_openai") == ["lambada_openai", "arc_easy"]
    assert chosen_tasks("paper") == list(PLACES)


def test_a_hub_out_of_reach_is_named_with_the_way_out(tmp_path, checkpoint):
    for task, repository, where in (
        ("arc_easy", "allenai/ai2_arc", "DIR/ai2_arc/ARC-Easy"),
        ("lambada", "EleutherAI/lambada_openai", "DIR/lambada_openai"),
        ("scrolls_summscreenfd", "tau/scrolls", "DIR/scrolls/summ_screen_fd"),
    ):
        message = f"data set {repository} is not reachable on the hub .*--data-dir DIR, in {where}$"
        with pytest.raises(UserError, match=message):
            evaluate(checkpoint, tmp_path / "x.json", "--tasks", task)
