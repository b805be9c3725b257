"""Far targets by brute force, scores by plain loops, verdicts on models known by construction."""

import math
import string

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import cases
from eval_helpers import tiny_model, write_checkpoint
from retriever import retriever

from data.far_tasks import PAPER, SHORT, TASKS, ask
from data.prepare import main as prepare
from data.shards import header_bytes, open_split
from data.tokeniser import get_tokeniser
from evaluating.checkpoints import open_checkpoints
from evaluating.results import Record, Results, read_results
from far import audit, far_targets
from far.audit import HARMED, IGNORES, MARGINS, OPEN, USES, far_verdict, interval_of
from far.far_targets import last_occurrences, score_targets, text_targets
from lssar.errors import UserError

BYTES = get_tokeniser("bytes")


def write_set(directory, tokens):
    directory.mkdir(parents=True)
    tokens = np.asarray(tokens, dtype="<u2")
    (directory / "set_val_000000.bin").write_bytes(header_bytes(len(tokens)) + tokens.tobytes())
    return directory


# --- which tokens are scored ---------------------------------------------------------------------


def distances_by_hand(tokens: list[int], gram: int) -> list[int]:
    found = []
    for t in range(len(tokens)):
        before = tokens[t - gram : t] if t >= gram else None
        earlier = [j for j in range(gram, t) if tokens[j - gram : j] == before]
        found.append(t - earlier[-1] if before and earlier else 0)
    return found


def test_distances_are_those_of_a_search_by_hand():
    for gram, letters, size in cases([(1, 2, 41), (3, 3, 97), (8, 2, 201), (2, 300, 77)]):
        tokens = np.random.default_rng(size).integers(0, letters, size)
        tokens[size // 2 :] = tokens[: size - size // 2]  # so that long grams occur again
        expected = distances_by_hand(tokens.tolist(), gram)
        assert last_occurrences(tokens, gram).tolist() == expected and max(expected) > 0


def test_far_targets_are_the_tokens_that_only_far_context_can_say():
    near, gram = 20, 3
    tokens = np.random.default_rng(0).integers(0, 5, (4, 150))
    targets = text_targets(tokens, near, gram)
    by_hand = {}
    for segment, row in enumerate(tokens.tolist()):
        for place, distance in enumerate(distances_by_hand(row, gram)):
            if place >= near and (distance > near or distance == 0):
                by_hand[segment, place] = distance
    found = zip(targets.segment.tolist(), targets.place.tolist(), strict=True)
    assert dict(zip(found, targets.distance.tolist(), strict=True)) == by_hand
    for i, context in enumerate(targets.near(near)):
        row, place, distance = tokens[targets.segment[i]], targets.place[i], targets.distance[i]
        assert context.tolist() == row[place - near : place].tolist()
        assert targets.same[i] == (row[place] == row[place - distance])
        text = "".join(map(str, context))  # nothing in view has followed this 3-gram
        assert text.count(text[-gram:]) == 1 or text.find(text[-gram:]) > near - 2 * gram


def test_a_sample_of_the_targets_is_even_and_always_the_same(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 5, (40, 150))
    every = text_targets(tokens, 20, 3)
    monkeypatch.setattr(far_targets, "MOST", 300)
    some, again = (text_targets(tokens, 20, 3) for _ in range(2))
    assert some.sha256 == again.sha256 != every.sha256
    far = some.distance > 0
    assert far.sum() == 300 and (every.distance > 0).sum() > 1000
    expected = every.distance[every.distance > 0].mean()
    assert some.distance[far].mean() == pytest.approx(expected, rel=0.15)


# --- tasks ---------------------------------------------------------------------------------------


def answers_by_hand(task: str, text: str) -> dict[int, int]:
    """Return place and distance of every answer, from the rules of the task."""
    found, last = {}, {}
    if task == "flipflop":
        for place, letter in enumerate(text):
            if text[place - 1 : place] == "?":
                assert letter == text[last["bit"]]
                found[place] = place - last["bit"]
            if letter in "IO":
                last["bit"] = place
    elif task == "copy":
        first = text.split("|")[0]
        for place in range(len(first) + 1, len(text)):
            assert text[place] == text[place - len(first) - 1]
            if text[place] != "|":
                found[place] = len(first) + 1
    else:
        for place, letter in enumerate(text):
            if letter.isdigit():
                assert text[place + 1] in string.ascii_letters[6 * int(letter) :][:6]
                if letter in last:
                    assert text[place + 1] == text[last[letter] + 1]
                    found[place + 1] = place - last[letter]
                last[letter] = place
    return found


def test_the_answers_of_a_task_are_where_its_rules_put_them():
    for task, length in cases(TASKS, [64, 127, 128, 2048]):
        asked = 0
        for number in range(30):
            tokens, answers = ask(task, BYTES, length, number, seed=3)
            assert len(tokens) == length + 1 and tokens[0] == BYTES.eot
            text = BYTES.decode(tokens[1:])
            by_hand = answers_by_hand(task, text)
            assert {place - 1: distance for place, distance in answers} == by_hand
            asked += len(answers)
        assert asked > 30


def test_the_answer_of_a_passkey_prompt_is_its_key_at_the_last_mention():
    for (name, form), number in cases([("bytes", SHORT), ("gpt2", PAPER)], range(30)):
        tokeniser = get_tokeniser(name)
        tokens, answers = ask("passkey", tokeniser, 500, number, seed=3)
        assert len(tokens) == 501
        key = tokeniser.decode(tokens[[place for place, _ in answers]]).strip()
        assert key in map(str, form.keys) and tokeniser.decode(tokens).count(f" {key}") == 3
        said = tokeniser.decode(tokens[[place - distance for place, distance in answers]])
        assert said.strip() == key
        (distance,) = {distance for _, distance in answers}
        place = answers[0][0]
        between = tokeniser.decode(tokens[place - distance + len(answers) : place])
        assert key not in between and form.question in between


def test_distances_of_a_task_reach_over_the_whole_sequence():
    for task in cases(TASKS):
        found = [d for n in range(60) for _, d in ask(task, BYTES, 2048, n, seed=0).answers]
        most = 1024 if task == "copy" else 2048
        octaves = [sum(most / 2 ** (i + 1) < d <= most / 2**i for d in found) for i in range(4)]
        assert min(octaves) >= 10 and max(found) < most + 1


def test_a_corpus_of_a_task_fills_the_training_length_with_each_document(tmp_path, monkeypatch):
    from data.far_tasks import TaskSource

    monkeypatch.setattr(TaskSource, "DOCUMENTS", 50)
    monkeypatch.setattr(TaskSource, "VALIDATION", 10)
    prepare(["flipflop", "--length", "81", "--out", str(tmp_path / "c")])
    for split, count in (("val", 10), ("train", 40)):
        rows = open_split(tmp_path / "c", split).slice(0, 81 * count).reshape(count, 81)
        assert (rows[:, 0] == BYTES.eot).all() and not (rows[:, 1:] == BYTES.eot).any()
        texts = [BYTES.decode(row[1:]) for row in rows]
        farthest = [max(answers_by_hand("flipflop", text).values()) for text in texts]
        assert min(farthest) < 20 and max(farthest) > 30  # near and far
    with pytest.raises(UserError, match="length 9 is too short for 'mqar'; use at least 64"):
        prepare(["mqar", "--length", "9", "--out", str(tmp_path / "d")])


# --- scores --------------------------------------------------------------------------------------


def test_scores_are_those_of_whole_forward_passes_one_by_one():
    near, model = 20, tiny_model("lssar").double()
    tokens = np.random.default_rng(0).integers(0, 5, (3, 101))
    targets = text_targets(tokens, near, 3)
    full = score_targets(model, targets, "cpu", "")
    seen = score_targets(model, targets, "cpu", "", near)
    for i in range(0, len(targets.place), 7):
        row, place = torch.from_numpy(tokens[targets.segment[i]]), targets.place[i]
        for context, found in ((row[:place], full), (row[place - near : place], seen)):
            with torch.no_grad():
                logits = F.linear(model.hidden(context[None])[0, -1], model.embedding.weight)
            loss = F.cross_entropy(logits, row[place])
            assert found[0, i] == pytest.approx(loss.item(), rel=1e-5)
            assert found[1, i] == (logits.argmax() == row[place])


# --- the verdict ---------------------------------------------------------------------------------


def test_the_verdict_follows_the_rule_of_the_docstring():
    cases = [
        ("nats", (0.5, 0.4, 0.6), USES),
        ("nats", (-0.5, -0.4, -0.6), HARMED),
        ("nats", (0.001, -0.001, 0.002), IGNORES),
        ("nats", (0.011, 0.010, 0.012), IGNORES),  # certain, but too small to matter
        ("nats", (0.5, -0.4, -0.1), OPEN),
        ("nats", (0.5,), OPEN),  # one block or one seed shows no spread
        ("nats", (0.5, None, 0.4), HARMED),
        ("nats", (0.5, math.nan, 0.4), HARMED),
        ("accuracy", (0.9, 0.8, 0.85), USES),
        ("accuracy", (-0.9, -0.8, -0.85), HARMED),
        ("accuracy", (0.02, -0.01, 0.0), IGNORES),
        ("accuracy", (0.3, -0.1, 0.0), OPEN),
    ]
    for unit, benefits, words in cases:
        assert far_verdict(interval_of(benefits), MARGINS[unit]) == words, (unit, benefits)


def test_a_task_that_was_not_learned_is_not_judged():
    held_back = "not learned at 1x (89.9% right, the bar is 90%)"
    for benefits in ((0.9, 0.8, 0.85), (-0.9, -0.8, -0.85), (0.01, 0.0, -0.01)):
        found = interval_of(benefits)
        assert far_verdict(found, 0.05, 0.899) == held_back
        assert far_verdict(found, 0.05, 0.9) == far_verdict(found, 0.05)


def test_intervals_are_over_blocks_not_tokens():
    """The interval of a ratio of sums over clusters, written out; and copies of tokens add none."""
    random = np.random.default_rng(0)
    block = np.repeat(np.arange(6), (3, 9, 1, 7, 12, 5))
    gains = random.normal(size=len(block)) + np.repeat(random.normal(size=6), np.bincount(block))
    found = interval_of(audit.by_block(gains, block))
    mean = sum(gains) / len(gains)
    residuals = [
        sum(g - mean for g, b in zip(gains, block, strict=True) if b == n) for n in range(6)
    ]
    error = math.sqrt(sum(r * r for r in residuals) * 6 / 5) / len(gains)
    assert found.mean == pytest.approx(mean)
    assert found.half_width == pytest.approx(2.570582 * error)
    doubled = interval_of(audit.by_block(np.tile(gains, 2), np.tile(block, 2)))
    assert doubled == pytest.approx(found)


@pytest.fixture(scope="module")
def copier(tmp_path_factory):
    """Return a model that copies what followed the last five digits, and digits from afar."""
    here = tmp_path_factory.mktemp("copier")
    write_checkpoint(here / "copier", retriever(), tokeniser="bytes")
    random, rows = np.random.default_rng(0), []
    for _ in range(6):
        digits = random.integers(48, 58, 110)
        rows.append(np.concatenate((digits, random.integers(48, 58, 36), digits)))
    write_set(here / "digits", [*np.concatenate(rows), 48])
    return here


def of_copier(here, out, *options):
    given = ["--data", str(here / "digits"), "--near", "64", "--times", "4", "--segments", "12"]
    audit.main(
        [str(here / "copier"), *given, "--out", str(here / out), "--device", "cpu", *options]
    )
    return read_results(here / out)


def test_a_model_that_copies_uses_far_context_and_ignores_it_with_a_window(
    copier, monkeypatch, capsys
):
    """The window and the look-back of the first layer both fit into the near context."""
    monkeypatch.setattr(far_targets, "MOST", 32)
    results = of_copier(copier, "x.json", "--window", "56")
    free, window = results.select(quantity="far_benefit")
    assert (free.variant, window.variant) == ("as trained", "window=56")
    assert free.details["verdict"] == USES and free.value > 1
    same, differs = (free.details[kind] for kind in ("same", "differs"))
    assert same["tokens"] > 25 and same["value"] > 1 and same["tokens"] + differs["tokens"] == 32
    assert window.details["verdict"] == IGNORES
    assert window.value == pytest.approx(0, abs=1e-3)
    assert free.tokens == window.tokens == 32
    shown = capsys.readouterr().out
    assert USES in shown and IGNORES in shown
    assert (copier / "x.png").stat().st_size > 5000
    (by_distance,) = results.select(quantity="benefit_by_distance", variant="as trained")
    assert (by_distance.length, by_distance.tokens) == (256, 32)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Make three seeds of one model, another model, and a text of two letters."""
    here = tmp_path_factory.mktemp("audit")
    for seed in range(3):
        model = tiny_model(seed=seed)
        write_checkpoint(here / f"softmax-s{seed}", model, seed=seed, tokeniser="bytes")
    write_checkpoint(here / "lssar", tiny_model("lssar"), seed=0, tokeniser="bytes")
    write_set(here / "data", np.random.default_rng(0).integers(97, 99, 3000))
    return here


def command(here, runs, out, *options) -> list[str]:
    given = ["--data", str(here / "data"), "--times", "4", "--segments", "30", "--device", "cpu"]
    return [*(str(here / run) for run in runs), *given, "--out", str(here / out), *options]


def test_several_seeds_of_a_run_are_one_model(workspace, capsys):
    runs = [f"softmax-s{seed}" for seed in range(3)]
    audit.main(command(workspace, [*runs, "lssar"], "seeds.json"))
    results = read_results(workspace / "seeds.json")
    found = results.select(quantity="far_benefit")
    values = [r.value for r in found[:3]]
    spread = 4.303 * np.std(values, ddof=1) / math.sqrt(3)
    low, high = np.mean(values) - spread, np.mean(values) + spread
    shown = capsys.readouterr().out.replace("−", "-")
    (line,) = [line for line in shown.splitlines() if "softmax, 3 seeds" in line]
    assert f"{np.mean(values):+.3f} [{low:+.3f}, {high:+.3f}]" in line
    assert f"{sum(r.tokens for r in found[:3])} > 16" in line
    names = {name: [r.run for r in records] for name, records in audit.benefits_by_model(results)}
    assert [len(runs) for runs in names.values()] == [3, 1]


def test_a_finished_audit_is_not_computed_again_and_can_be_extended(workspace, monkeypatch):
    measure, calls = audit.Audit.measure, []

    def counted(*arguments):
        calls.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(audit.Audit, "measure", counted)
    audit.main(command(workspace, ["lssar"], "again.json"))
    before = read_results(workspace / "again.json").records
    audit.main(command(workspace, ["lssar", "softmax-s0"], "again.json", "--p", "3"))
    after = read_results(workspace / "again.json").records
    assert len(calls) == 3 and after[: len(before)] == before and len(after) == 3 * len(before)
    with pytest.raises(UserError, match="times = 4, this is 8"):
        audit.main(command(workspace, ["lssar"], "again.json", "--times", "8"))


def test_a_task_is_judged_by_answers_that_stacked_windows_do_not_reach(workspace, capsys):
    out = workspace / "task.json"
    size = ("--near", "64", "--times", "4", "--segments", "12", "--device", "cpu")
    audit.main([str(workspace / "lssar"), "--task", "mqar", *size, "--out", str(out)])
    (record,) = read_results(out).select(quantity="far_benefit")
    distances = [d for n in range(12) for _, d in ask("mqar", BYTES, 256, n, seed=0).answers]
    assert record.tokens == sum(d > 2 * 64 for d in distances) > 0
    assert record.details["beyond"] == 128 and record.task == "mqar"
    by_distance = {
        r.length: r.tokens for r in read_results(out).select(quantity="benefit_by_distance")
    }
    assert by_distance == {n: sum(n / 2 < d <= n for d in distances) for n in (128, 256)}
    within = [d for n in range(12) for _, d in ask("mqar", BYTES, 64, n, seed=0).answers]
    known = {n: sum(n / 2 < d <= n for d in within) for n in (8, 16, 32, 64)}
    accuracies = read_results(out).select(quantity="accuracy_by_distance")
    assert {r.length: r.tokens for r in accuracies} == known | by_distance
    assert all(0 <= r.value <= 1 and len(r.details["interval"]) == 2 for r in accuracies)
    right = record.details["accuracy_at_near"]
    assert 0 <= right < 0.5
    shown = capsys.readouterr().out
    assert f"{record.tokens} > 128" in shown
    held_back = f"not learned at 1x ({right:.1%} right, the bar is 90%)"  # it was never trained
    assert record.details["verdict"] == held_back and held_back in shown


def test_a_share_below_that_of_a_guess_counts_as_a_guess(workspace):
    """Half of the bits of flip-flop are right by chance."""
    asked = ["--near", "64", "--times", "4", "--segments", "20", "--out", "unused.json"]
    arguments = audit.make_parser().parse_args(["unused", "--task", "flipflop", *asked])
    one = audit.Audit(arguments, open_checkpoints([str(workspace / "lssar")]))
    count = len(one.targets.place)
    examples = [
        (0.5, 0.0, 0.0),
        (0.3, 0.1, 0.0),
        (0.9, 0.1, 0.4),
        (0.9, 0.6, 0.3),
        (0.4, 0.9, -0.4),
    ]
    for full, near, gain in cases(examples):
        shares = [np.arange(count) % 10 < 10 * share for share in (full, near)]
        chosen = np.arange(count) < count // 10 * 10
        found = one.benefit(np.stack(shares).astype(float), chosen)
        assert count >= 10 and found["value"] == pytest.approx(gain)
        assert found["details"]["full"] == pytest.approx(full)


def test_one_seed_that_has_not_learned_holds_the_verdict_back(tmp_path):
    details = {"by_segment": [0.5, 0.6], "beyond": 128, "full": 0.9, "near": 0.1}
    runs = {}
    for seed, right in enumerate((0.99, 0.85, 0.95)):
        write_checkpoint(tmp_path / f"m-s{seed}", tiny_model(seed=seed), seed=seed)
        (checkpoint,) = open_checkpoints([str(tmp_path / f"m-s{seed}")])
        runs[checkpoint.identity] = right, checkpoint.describe()
    results = Results(tmp_path / "x.json", "audit", {"task": "mqar"}, {})
    for identity, (right, run) in runs.items():
        results.runs[identity] = run
        known = details | {"accuracy_at_near": right}
        results.add(Record("far_benefit", identity, 0.5, tokens=9, details=known))
    *_, line = audit.verdicts(results, "accuracy").splitlines()
    assert "3 seeds" in line and "93%" in line
    assert line.endswith("not learned at 1x (85.0% right, the bar is 90%)")


def test_passkey_prompts_are_audited_too(workspace, monkeypatch):
    drawn = []
    monkeypatch.setattr(audit.plots, "publish", lambda figure, path: drawn.append(figure))
    out = workspace / "passkey.json"
    size = ("--near", "300", "--times", "4", "--segments", "4", "--device", "cpu")
    audit.main([str(workspace / "lssar"), "--task", "passkey", *size, "--out", str(out)])
    (record,) = read_results(out).select(quantity="far_benefit")
    asked = [ask("passkey", BYTES, 1200, number, seed=0).answers for number in range(4)]
    assert record.tokens == sum(d > 600 for answers in asked for _, d in answers) > 0
    (axes,) = drawn[0].axes
    assert axes.get_ylim() == (0, 1)  # shares of right answers, whatever was measured


def test_mistakes_are_one_clear_line(workspace):
    examples = [
        (("--times", "6"), "--times 6 is not a power of 2"),
        (("--times", "1024"), "too few for one segment of 16384"),
        (("--near", "1000"), "too few for one segment of 4000"),
        (("--within-documents", "--times", "512"), "too few for one segment"),
        (("--data", "nowhere"), "nowhere does not exist"),
        (("--segments", "0"), "--segments: '0' must be at least 1"),
        (("--task", "mqar"), "not allowed with argument"),
    ]
    for options, message in cases(examples):
        with pytest.raises(UserError, match=message) as caught:
            audit.main(command(workspace, ["lssar"], "never.json", *options))
        assert "\n" not in str(caught.value) and not (workspace / "never.json").exists()


def test_an_impossible_task_is_one_clear_line(workspace):
    examples = [
        ("mqar", ("--near", "9"), "length 9 is too short for 'mqar'"),
        ("passkey", ("--near", "40"), "length 40 is no larger than the passkey prompt"),
        ("mqar", ("--times", "2"), "windows of 64 reach 128 tokens in 2 layers; raise --times to"),
        ("copy", ("--times", "4"), "reach 128 tokens in 2 layers; raise --times to at least 8"),
        ("copy", ("--within-documents",), "--within-documents is about --data"),
        ("copies", (), "invalid choice: 'copies'"),
    ]
    for task, options, message in cases(examples):
        usual = ("--near", "64", "--device", "cpu", "--out", str(workspace / "never.json"))
        with pytest.raises(UserError, match=message):
            audit.main([str(workspace / "lssar"), "--task", task, *usual, *options])
        assert not (workspace / "never.json").exists()


def test_text_without_far_repetition_and_other_tokenisers_are_refused(workspace):
    write_set(workspace / "new", np.arange(200).repeat(2)[:300])
    with pytest.raises(UserError, match=r"none of the .* follows a 8-gram that last occ"):
        audit.main(command(workspace, ["lssar"], "never.json", "--data", str(workspace / "new")))
    wide = tiny_model(vocab_size=50257, vocab_rows=50304)
    write_checkpoint(workspace / "bpe", wide, tokeniser="gpt2")
    with pytest.raises(UserError, match="the models read bytes and gpt2; audit them separately"):
        audit.main(command(workspace, ["lssar", "bpe"], "never.json"))
    with pytest.raises(UserError, match="'mqar' is byte-level, but the model reads 'gpt2'"):
        out = ("--near", "64", "--out", str(workspace / "never.json"))
        audit.main([str(workspace / "bpe"), "--task", "mqar", *out])
    write_set(workspace / "words", np.random.default_rng(0).integers(0, 999, 300))
    with pytest.raises(UserError, match="outside the vocabulary of 257"):
        audit.main(command(workspace, ["lssar"], "never.json", "--data", str(workspace / "words")))
    write_checkpoint(workspace / "longer", tiny_model(train_length=32), tokeniser="bytes")
    with pytest.raises(UserError, match="trained at 16 and 32 tokens; give --near"):
        audit.main(command(workspace, ["lssar", "longer"], "never.json"))
    assert not (workspace / "never.json").exists()


def test_a_bpe_model_is_asked_for_the_followers_of_three_tokens(workspace):
    tokens = np.random.default_rng(0).integers(0, 6, 600) * 9000
    data, out = write_set(workspace / "bpe-data", tokens), workspace / "bpe.json"
    model = tiny_model(vocab_size=50257, vocab_rows=50304)
    write_checkpoint(workspace / "wide", model, tokeniser="gpt2")
    options = ("--times", "4", "--segments", "9", "--device", "cpu", "--out", str(out))
    audit.main([str(workspace / "wide"), "--data", str(data), *options])
    results = read_results(out)
    assert results.settings["gram"] == 3
    (record,) = results.select(quantity="far_benefit")
    parts = [record.details[kind]["tokens"] for kind in ("same", "differs")]
    assert sum(parts) == record.tokens and min(parts) > 0 and record.details["new"]["tokens"] > 0
