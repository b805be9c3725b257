"""Prompts of exact length, a scorer that takes the first digits, 100 % where it must be."""

import json
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from cases import cases
from eval_helpers import tiny_model, write_checkpoint
from retriever import retriever
from train_helpers import on_two_nodes

import passkey
from data.far_tasks import (
    ANSWER_TOKENS,
    FILLER,
    PAPER,
    SHORT,
    PasskeySource,
    make_prompt,
    shortest_length,
)
from data.tokeniser import get_tokeniser
from evaluating.results import Results, read_results
from lssar.errors import UserError
from passkey import is_right, main, wilson

BYTES, GPT2 = get_tokeniser("bytes"), get_tokeniser("gpt2")
LENGTHS = (301, 420)


# --- prompts -------------------------------------------------------------------------------------


def test_prompt_and_answer_fill_the_length_exactly():
    examples = [(BYTES, length) for length in (301, 777, 1024)]
    examples += [(GPT2, length) for length in (120, 1024, 1536, 8192)]
    for (tokeniser, length), trial in cases(examples, range(12)):
        prompt = make_prompt(tokeniser, length, trial, seed=3)
        assert len(prompt.tokens) + ANSWER_TOKENS == length
        answer = tokeniser.encode(f" {prompt.key}")
        assert len(answer) < ANSWER_TOKENS  # the digits and what ends them


def test_prompt_is_the_five_parts_joined_by_newlines():
    filler = " ".join([FILLER] * 20)
    for (tokeniser, length), trial in cases([(BYTES, 500), (GPT2, 333)], range(20)):
        prompt = make_prompt(tokeniser, length, trial, seed=0)
        text = tokeniser.decode(prompt.tokens)
        task, before, key_line, after, question = text.split("\n")
        assert (task, question) == (PAPER.task.removesuffix("\n"), PAPER.question)
        assert before and filler.startswith(before)
        assert after and filler.startswith(after)
        key = prompt.key
        assert key_line == f"The pass key is {key}. Remember it. {key} is the pass key."
        # The tokens are those of the text, not of pieces that the tokeniser would have merged.
        assert tokeniser.encode(text).tolist() == prompt.tokens.tolist()


def test_the_distance_leads_from_the_answer_to_the_last_mention_of_the_key():
    forms = [(BYTES, PAPER), (BYTES, SHORT), (GPT2, PAPER)]
    for (tokeniser, form), trial in cases(forms, range(30)):
        prompt = make_prompt(tokeniser, 400, trial, seed=0, form=form)
        since = tokeniser.decode(prompt.tokens[-prompt.distance :]).strip()
        before = tokeniser.decode(prompt.tokens[: -prompt.distance])
        assert since.startswith(f"{prompt.key}")
        assert since.count(f"{prompt.key}") == 1
        assert f"{prompt.key}" in before


def test_prompts_depend_on_seed_length_and_trial_only():
    def keys(length, seed):
        return [make_prompt(GPT2, length, trial, seed).key for trial in range(20)]

    assert keys(500, 0) == keys(500, 0)
    assert keys(500, 0) != keys(500, 1)
    assert keys(500, 0) != keys(501, 0)


def test_key_and_depth_are_uniform():
    prompts = [make_prompt(BYTES, 2000, trial, seed=0) for trial in range(2000)]
    keys, depths = np.array([(int(p.key), p.depth) for p in prompts]).T
    assert keys.min() >= 1
    assert keys.max() <= 50000
    assert abs(keys.mean() - 25000) < 1500
    assert np.histogram(depths, bins=10, range=(0, 1))[0].min() > 150
    assert 0 < depths.min() < 0.01
    assert 0.99 < depths.max() < 1


def test_every_document_of_the_corpus_repeats_its_own_key():
    for longest in cases([128, 300]):
        texts = [piece.text for (piece,) in islice(PasskeySource(longest).pieces(None), 400)]
        for number, text in enumerate(texts):
            keys = re.findall(f"[{SHORT.keys}]", text)  # letters that are nowhere else
            assert len(keys) == (10, 10, 6, 3)[number % 4]
            assert len(set(keys)) == 1
        whole = texts[3::4]
        assert all(SHORT.question in text and len(text) <= longest for text in whole)
        assert max(map(len, whole)) > 0.9 * longest
        found = Counter(re.search(f"[{SHORT.keys}]", text).group() for text in texts)
        assert set(found) == set(SHORT.keys)  # all of them occur, none of them mostly
        assert max(found.values()) < 3 * len(texts) / len(SHORT.keys)


def test_a_corpus_of_prompts_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="--longest 50: give more than"):
        PasskeySource(50)


def test_the_corpus_continues_at_any_document_and_ends_validation_once():
    source = PasskeySource()
    source.count, source.border = 30, 7
    everything = list(source.pieces(None))
    assert [piece.validation for (piece,) in everything] == [True] * 7 + [False] * 22
    for done in (1, 7, 8, 28):
        *_, state = [source.state() for _ in zip(range(done), source.pieces(None), strict=False)]
        assert list(source.pieces(state)) == everything[done:]


def test_the_shortest_length_named_in_the_error_works():
    for tokeniser in (BYTES, GPT2):
        with pytest.raises(UserError, match="length 50 is no larger than the passkey prompt") as e:
            make_prompt(tokeniser, 50, 0, seed=0)
        shortest = int(re.search(r"at least (\d+)", str(e.value)).group(1))
        for trial in range(200):
            make_prompt(tokeniser, shortest, trial, seed=0)


# --- scores --------------------------------------------------------------------------------------


def test_the_scorer_takes_the_first_run_of_digits():
    examples = [
        (" 1234.", True),
        (" 1234", True),
        ("1234 5678", True),
        (" the key\n1234x", True),
        (" 12345", False),
        (" 123", False),
        (" 5678. 1234", False),
        (" 01234", False),
        (" 12 34", False),
        ("", False),
        (" ١٢٣٤", False),
    ]
    for answer, right in cases(examples):
        assert is_right(answer, "1234") is right


def test_the_scorer_takes_the_first_letter_of_the_short_form():
    for answer, right in cases([(" Q.\nThe", True), (" 3 Q", True), (" RQ", False), ("", False)]):
        assert is_right(answer, "Q") is right


def test_wilson_interval():
    examples = [  # from the roots of (p - x)^2 = z^2 x (1 - x) / n
        (0, 100, 0.0, 0.036995),
        (100, 100, 0.963005, 1.0),
        (86, 100, 0.778633, 0.914724),
        (1, 2, 0.094531, 0.905469),
    ]
    for correct, trials, low, high in cases(examples):
        assert wilson(correct, trials) == pytest.approx((low, high), abs=2e-5)
        share, z = correct / trials, 1.959964
        for x in wilson(correct, trials):
            assert (share - x) ** 2 == pytest.approx(z**2 * x * (1 - x) / trials, abs=1e-9)


# --- models that can and cannot ------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_model(), tokeniser="bytes")


def command(checkpoint, out: str, *options: str) -> list[str]:
    where = checkpoint.parent / out
    lengths = ",".join(map(str, LENGTHS))
    start = [str(checkpoint), "--lengths", lengths, "--trials", "3", "--out", str(where)]
    return [*start, "--device", "cpu", *options]


def test_a_transformer_that_retrieves_scores_100_percent_and_blindfolded_0(tmp_path):
    """Hand-written weights; the key is more than 40 tokens from the end of every prompt."""
    path = write_checkpoint(tmp_path / "retriever", retriever(), tokeniser="bytes")
    main(command(path, "x.json", "--trials", "10", "--window", "40"))
    (_, can, able), (_, cannot, unable) = read_results(tmp_path / "x.json").series("accuracy")
    assert (can, cannot) == ("as trained", "window=40")
    assert [r.length for r in able] == [r.length for r in unable] == list(LENGTHS)
    for record in able:
        found = record.details
        assert (record.value, found["correct"], found["trials"]) == (1, 10, 10)
        for parts in (found["by_depth"], found["by_distance"]):
            assert sum(part["trials"] for part in parts) == 10
            assert all(part["correct"] == part["trials"] for part in parts)
        assert (found["wilson_low"], found["wilson_high"]) == pytest.approx(wilson(10, 10))
    for record in unable:
        assert (record.value, record.details["correct"]) == (0, 0)


def test_a_random_transformer_scores_0_percent_and_every_answer_is_kept(checkpoint):
    main(command(checkpoint, "x.json", "--trials", "7", "--window", "100"))
    results = read_results(checkpoint.parent / "x.json")
    lines = (checkpoint.parent / "x-answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 2 * len(LENGTHS) * 7
    assert {r.value for r in results.select(quantity="accuracy")} == {0}
    assert {answer["run"] for answer in answers} == set(results.runs)
    for answer in answers:
        prompt = make_prompt(BYTES, answer["length"], answer["trial"], seed=0)
        assert (answer["key"], answer["right"]) == (prompt.key, False)
    for name in ("x.png", "x.pdf", "x-distance.png", "x-distance.pdf"):
        assert (checkpoint.parent / name).stat().st_size > 3000


def test_far_keys_are_those_beyond_the_training_length_and_the_rest_is_in_reach():
    distances = (10, 99, 100, 101, 150, 250)
    found = [
        {"distance": n, "depth": 0.5, "right": right}
        for n, right in zip(distances, (True, True, False, True, False, False), strict=True)
    ]
    records = {r.quantity: r for r in passkey.measure(found, train_length=100)}
    assert records["accuracy"].value == 3 / 6
    assert records["reach"].value == 3 / 6
    assert (records["far_accuracy"].value, records["far_accuracy"].details["trials"]) == (1 / 3, 3)
    by_distance = {p["to"]: p for p in records["accuracy"].details["by_distance"]}
    assert (by_distance[1]["trials"], by_distance[1]["correct"]) == (2, 1)
    assert (by_distance[1.25]["trials"], by_distance[1.25]["correct"]) == (1, 1)
    assert [r.quantity for r in passkey.measure(found[:3], 100)] == ["accuracy", "reach"]


def test_the_short_form_fits_a_byte_model_and_is_not_mixed_with_the_papers(checkpoint):
    shortest = shortest_length(BYTES, SHORT)
    short = ["--lengths", f"{shortest},150", "--form", "short"]
    main(command(checkpoint, "x.json", *short))
    assert read_results(checkpoint.parent / "x.json").settings["form"] == "short"
    with pytest.raises(UserError, match="form = short, this is paper"):
        main(command(checkpoint, "x.json"))


def test_answers_are_the_greedy_continuation_without_cache_or_batch():
    model = tiny_model("lssar")
    prompts = [make_prompt(BYTES, 301, trial, seed=0) for trial in range(3)]
    answers = passkey.answer_batch(model, prompts, torch.device("cpu"))
    for prompt, answer in zip(prompts, answers.tolist(), strict=True):
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        for _ in range(ANSWER_TOKENS):
            with torch.no_grad():
                tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
        assert answer == tokens[0, -ANSWER_TOKENS:].tolist()


def test_two_nodes_give_the_answers_and_numbers_of_one_process(checkpoint):
    """Three and four batches, the last of each smaller, and the very first answered before."""
    folder = checkpoint.parent
    main(command(checkpoint, "one.json", "--trials", "130"))
    one = read_results(folder / "one.json")
    answers = (folder / "one-answers.jsonl").read_text()
    first_batch = answers.splitlines(keepends=True)[: passkey.BATCH_TOKENS // LENGTHS[0]]
    (folder / "two-answers.jsonl").write_text("".join(first_batch) + '{"run": "cut sho')
    Results(folder / "two.json", one.kind, one.settings, one.about).save()
    arguments = command(checkpoint, "two.json", "--trials", "130")
    shown = on_two_nodes(folder / "log", "passkey.py", *arguments)
    two = read_results(folder / "two.json")
    assert [numbers(r) for r in two.records] == [numbers(r) for r in one.records]
    assert (folder / "two-answers.jsonl").read_text() == answers, shown
    assert shown.count("at 420: 0 %") == 1 and (folder / "two-distance.png").exists()


def numbers(record):
    """Return all of a record but its time and its command."""
    details = {k: v for k, v in record.details.items() if k != "seconds"}
    return record.key, record.value, details


# --- interruption and mistakes -------------------------------------------------------------------


def test_an_interrupted_run_asks_only_what_is_missing(monkeypatch, checkpoint):
    monkeypatch.setattr(passkey, "BATCH_TOKENS", 301 * 8)  # batches of 8 and 5 trials
    asked, answer_batch = [], passkey.answer_batch

    def counted(*arguments):
        asked.append(arguments)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer_batch(*arguments)

    monkeypatch.setattr(passkey, "answer_batch", counted)
    arguments = command(checkpoint, "x.json", "--trials", "20")
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    answers = checkpoint.parent / "x-answers.jsonl"
    assert len(answers.read_text().splitlines()) == 20
    with answers.open("a") as file:
        file.write('{"run": "cut sho')
    main(arguments)
    assert len(asked) == 3 + 1 + 4  # three batches at 301 were there, four at 420 were not
    main(command(checkpoint, "y.json", "--trials", "20"))
    whole = (checkpoint.parent / "y-answers.jsonl").read_text()
    assert answers.read_text() == whole


def test_other_settings_are_not_mixed(checkpoint):
    main(command(checkpoint, "x.json"))
    with pytest.raises(UserError, match="seed = 0, this is 1"):
        main(command(checkpoint, "x.json", "--seed", "1"))
    (checkpoint.parent / "x.json").unlink()
    with pytest.raises(UserError, match="answers of unknown settings"):
        main(command(checkpoint, "x.json"))


def test_damaged_answers_are_named(checkpoint):
    main(command(checkpoint, "x.json", "--lengths", "301"))
    answers = checkpoint.parent / "x-answers.jsonl"
    for damage in (b"{}\n", b"not json\n", b"\xff\xfe\n"):
        answers.write_bytes(damage)
        with pytest.raises(UserError, match="is damaged"):
            main(command(checkpoint, "x.json"))


def test_mistakes_are_one_clear_line(checkpoint):
    examples = [
        (["--lengths", "128"], "length 128 is no larger than the passkey prompt"),
        (["--lengths", "1e3"], "--lengths: '1e3' is not a whole number"),
        (["--trials", "0"], "--trials: '0' must be at least 1"),
        (["--alpha", "0.1"], "no checkpoint given re-weights"),
    ]
    for options, message in cases(examples):
        with pytest.raises(UserError, match=message) as caught:
            main(command(checkpoint, "x.json", *options))
        assert "\n" not in str(caught.value)
        assert not (checkpoint.parent / "x.json").exists()


def test_a_vocabulary_without_a_tokeniser_is_refused(tmp_path):
    odd = write_checkpoint(tmp_path / "odd", tiny_model(vocab_size=300, vocab_rows=300))
    with pytest.raises(UserError, match="vocabulary of 300"):
        main(command(odd, "x.json"))
    wrong = write_checkpoint(tmp_path / "wrong", tiny_model(), tokeniser="gpt2")
    with pytest.raises(UserError, match="vocabulary of 257 and the tokeniser 'gpt2'"):
        main(command(wrong, "x.json"))
