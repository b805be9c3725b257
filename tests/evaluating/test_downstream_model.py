"""A checkpoint as lm-eval sees it, against likelihoods and texts computed one at a time."""

import random

import pytest
import torch

pytest.importorskip("lm_eval", reason="pip install -r requirements-downstream.txt")

from downstream_helpers import BYTES, by_hand, text_by_hand
from eval_helpers import tiny_model, write_checkpoint
from lm_eval.api.instance import Instance

from evaluating import lm_eval_model
from evaluating.checkpoints import open_checkpoints
from evaluating.lm_eval_model import CheckpointLM
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism

MAX_LENGTH = 40
TEXTS = [
    ("The grass is green", " and the sky"),
    ("The grass is green", " blue"),
    ("a", "b"),
    ("", "begins with nothing"),
    ("trailing spaces  ", "move over"),
    ("x" * 70 + " a context longer than max_length", " tail"),
    ("naïve – 日本", "語 🙂"),
    ("same", "A"),
    ("same", "B"),
    ("   ", "only blanks before"),
]


def harness(directory, mechanism="lssar", **options):
    name, settings = mechanism if isinstance(mechanism, tuple) else (mechanism, {})
    model = tiny_model(name)
    model.configure(attention=get_mechanism(name, train_length=16, **settings))
    path = write_checkpoint(directory / "model", model, tokeniser="bytes")
    return model, opened(path, **options)


def opened(path, **options):
    (checkpoint,) = open_checkpoints([str(path)])
    return CheckpointLM(checkpoint, "cpu", MAX_LENGTH, **options)


def ask(lm, kind, arguments):
    requests = [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]
    return getattr(lm, kind)(requests)


MECHANISMS = ["lssar", "softmax", "ssmax", ("sigmoid", {"length": "current"})]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_likelihoods_are_those_computed_by_hand_for_any_batch_size(tmp_path, mechanism):
    model, lm = harness(tmp_path, mechanism)
    expected = [text_by_hand(model, *text, MAX_LENGTH) for text in TEXTS]
    order = random.sample(range(len(TEXTS)), len(TEXTS))
    for size in (1, 3, 16):
        lm.batch_size = size
        found = ask(lm, "loglikelihood", [TEXTS[i] for i in order])
        for i, (likely, greedy) in zip(order, found, strict=True):
            assert likely == pytest.approx(expected[i][0], rel=2e-5), TEXTS[i]
            assert greedy == expected[i][1]


def test_a_continuation_that_the_model_would_write_is_greedy(tmp_path):
    model, lm = harness(tmp_path)
    prompt = torch.tensor([[100, 101, 102]])
    ids = model.generate(prompt, 6, temperature=0)[0].tolist()
    request = (("def", ""), ids[:3], ids[3:])
    other = (("def", ""), ids[:3], [*ids[3:-1], (ids[-1] + 1) % 256])
    (_, greedy), (_, not_greedy) = lm._loglikelihood_tokens([request, other])
    assert greedy
    assert not not_greedy


def test_requests_that_read_the_same_tokens_are_computed_once(tmp_path, monkeypatch):
    _, lm = harness(tmp_path, batch_size=1)
    passes = []
    original = lm._model.hidden
    monkeypatch.setattr(lm._model, "hidden", lambda t: passes.append(t.shape) or original(t))
    answers = [("Question", letter) for letter in "ABCD"]
    ask(lm, "loglikelihood", answers)
    assert len(passes) == 1


def test_rolling_scores_every_token_once_with_its_documented_context(tmp_path):
    model, lm = harness(tmp_path)
    short, long = "a short text", "".join(chr(97 + i % 26) for i in range(101))
    found = ask(lm, "loglikelihood_rolling", [(short,), (long,)])
    expected, _ = by_hand(model, [BYTES.eot], BYTES.encode(short).tolist(), MAX_LENGTH)
    assert found[0] == pytest.approx(expected, rel=2e-5)

    ids = [BYTES.eot, *BYTES.encode(long).tolist()]
    total = 0.0
    for first in range(1, len(ids), MAX_LENGTH):  # 40, 40, then 21 with a full context before them
        end = min(first + MAX_LENGTH, len(ids))
        read = ids[max(0, end - 1 - MAX_LENGTH) : end - 1]
        with torch.no_grad():
            logits = model(torch.tensor([read]))[0].double().log_softmax(-1)
        targets = ids[first:end]
        rows = range(len(read) - len(targets), len(read))
        total += sum(logits[r, t].item() for r, t in zip(rows, targets, strict=True))
    assert found[1] == pytest.approx(total, rel=2e-5)


PROMPTS = [
    "The grass is",
    "a",
    "",
    "x" * 90,
    "naïve 日本",
    "The grass is",
    "zz top of the",
    "qwerty",
]


def written_alone(model, prompt, new_tokens, until=()):
    """Continue the prompt alone by the model's own greedy stream, up to the first stop string."""
    ids = (BYTES.encode(prompt).tolist() or [BYTES.eot])[-(MAX_LENGTH - new_tokens) :]
    new, text = [], ""
    for token in model.stream(torch.tensor([ids]), new_tokens, temperature=0):
        if int(token) == BYTES.eot:
            break
        new.append(int(token))
        text = BYTES.decode(new)
        found = [text.index(stop) for stop in until if stop in text]
        if found:
            return text[: min(found)]
    return text


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_texts_are_those_generated_one_at_a_time(tmp_path, mechanism):
    model, lm = harness(tmp_path, mechanism)
    # Stop strings that do occur, in some of the texts.
    plain = [written_alone(model, p, 20) for p in PROMPTS]
    stops = [plain[0][2:4], plain[3][5:6]]
    for until in ([], stops):
        expected = [written_alone(model, p, 20, until) for p in PROMPTS]
        for size in (1, 3, 16):
            lm.batch_size = size
            # No max_gen_toks: half of max_length.
            assert ask(lm, "generate_until", [(p, {"until": until}) for p in PROMPTS]) == expected
    assert expected != plain


def test_a_text_that_ends_leaves_the_others_of_a_batch_alone(tmp_path, monkeypatch):
    """Of a model whose tokens see their own document only."""
    model = tiny_model("lssar", documents=True)
    lm = opened(write_checkpoint(tmp_path / "model", model, tokeniser="bytes"))
    alone = ask(lm, "generate_until", [("abc", {"until": [], "max_gen_toks": 6})])
    chosen, steps = lm_eval_model.sample, []

    def second_ends(logits, *settings):
        steps.append(len(steps))
        tokens = chosen(logits, *settings)
        tokens[1:] = BYTES.eot if len(steps) > 1 else 65
        return tokens

    monkeypatch.setattr(lm_eval_model, "sample", second_ends)
    asked = [("abc", {"until": [], "max_gen_toks": 6}), ("xyz", {"until": [], "max_gen_toks": 6})]
    assert ask(lm, "generate_until", asked) == [*alone, "A"]
    assert len(steps) == 6


def test_generation_settings_are_followed_or_refused(tmp_path):
    _, lm = harness(tmp_path)
    (short,) = ask(lm, "generate_until", [("abc", {"max_gen_toks": 3})])
    (longer,) = ask(lm, "generate_until", [("abc", {"max_gen_toks": 9})])
    assert len(short) <= 3
    assert longer.startswith(short)
    torch.manual_seed(1)
    wild = {"do_sample": True, "temperature": 50.0, "max_gen_toks": 9}
    (sampled,) = ask(lm, "generate_until", [("abc", wild)])
    assert sampled != longer
    with pytest.raises(UserError, match="'num_beams' is not supported; a task may set do_sample"):
        ask(lm, "generate_until", [("abc", {"num_beams": 4})])
    with pytest.raises(UserError, match="max_gen_toks 40 leaves no room for a prompt"):
        ask(lm, "generate_until", [("abc", {"max_gen_toks": 40})])


def test_what_cannot_be_scored_is_one_line(tmp_path):
    _, lm = harness(tmp_path)
    with pytest.raises(UserError, match="a continuation of 41 tokens cannot be scored"):
        ask(lm, "loglikelihood", [("a", "b" * 41)])


def test_likelihoods_that_are_not_finite_are_refused(tmp_path):
    """The harness takes the largest of them, and of NaN the first, without a word."""
    model = tiny_model()
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # finite weights whose logits are not
    path = write_checkpoint(tmp_path / "model", model, tokeniser="bytes")
    lm = opened(path)
    with pytest.raises(UserError, match="logits are not finite"):
        ask(lm, "loglikelihood", [("a", "b")])
    with pytest.raises(UserError, match="logits are not finite"):
        ask(lm, "generate_until", [("a", {"until": ["\n"], "max_gen_toks": 3})])
