"""The same targets at every length, exact means and errors, and nothing finished is lost."""

import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from training import make_corpus

import eval_extrapolation
from data.shards import describe_set, open_split
from errors import UserError
from eval_extrapolation import main, position_buckets

ROOT = Path(__file__).parent.parent
TRAIN = 16  # training length of the tiny models
LENGTHS = (8, 16, 32, 64)
TOKENS = 64 * 5
SET_TOKENS = 1000


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Two checkpoints, a set, and the results of one evaluation with every kind of variant."""
    here = tmp_path_factory.mktemp("extrapolation")
    write_tokens(here / "data", SET_TOKENS)
    for name in ("softmax", "lssar"):
        write_checkpoint(here / name, tiny_model(name))
    options = ["--window", "12", "--p", "3", "--alpha", "0.5", "--position-interpolation"]
    main(command(here, ["softmax", "lssar"], "all.json", *options))
    return here


def command(here: Path, checkpoints: list[str], out: str, *options: str) -> list[str]:
    return [
        *(str(here / name) for name in checkpoints),
        *("--data", str(here / "data"), "--lengths", ",".join(map(str, LENGTHS))),
        *("--tokens", str(TOKENS), "--out", str(here / out), "--device", "cpu", *options),
    ]


def load(here: Path, out: str) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((here / out).read_text(), parse_constant=refuse)


def find(results: dict, run: str, variant: str, length: int) -> dict:
    (row,) = [
        r
        for r in results["rows"]
        if results["checkpoints"][r["checkpoint"]]["run"] == run
        and (r["variant"], r["length"]) == (variant, length)
    ]
    return row


def plain_losses(model, tokens: np.ndarray, length: int) -> torch.Tensor:
    """Reference: whole logits in float64, one window at a time; (windows, length)."""
    model, rows = model.double(), []
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        with torch.no_grad():
            logits = F.linear(model.hidden(window[None, :-1])[0], model.embedding.weight)
        rows.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.stack(rows)


def first_tokens(here: Path) -> np.ndarray:
    return np.array(open_split(here / "data", "val").slice(0, TOKENS + 1))


@pytest.mark.parametrize("run", ["softmax", "lssar"])
@pytest.mark.parametrize("length", LENGTHS)
def test_loss_equals_a_plain_loop_over_windows(workspace, run, length):
    losses = plain_losses(tiny_model(run), first_tokens(workspace), length)
    row = find(load(workspace, "all.json"), run, "as trained", length)
    assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-12)


def test_standard_error_is_over_segments_of_the_longest_length(workspace):
    segments = plain_losses(tiny_model("lssar"), first_tokens(workspace), 16).view(5, 64).mean(1)
    row = find(load(workspace, "all.json"), "lssar", "as trained", 16)
    assert row["segment_losses"] == pytest.approx(segments.tolist(), rel=1e-6)
    assert row["standard_error"] == pytest.approx(segments.std().item() / math.sqrt(5), rel=1e-5)


def test_paired_difference_is_that_of_the_same_segments(workspace):
    results = load(workspace, "all.json")
    base, row = (find(results, run, "as trained", 32) for run in ("softmax", "lssar"))
    difference = np.subtract(row["segment_losses"], base["segment_losses"])
    (paired,) = [
        p
        for p in results["paired"]
        if all(p[k] == row[k] for k in ("checkpoint", "variant", "length"))
    ]
    assert paired["reference"] == base["checkpoint"]
    assert paired["difference"] == pytest.approx(row["loss"] - base["loss"], rel=1e-9)
    assert paired["standard_error"] == pytest.approx(difference.std(ddof=1) / 5**0.5, rel=1e-9)


@pytest.mark.parametrize("length", [1, 8, 16, 17, 37, 64, 1024, 1536, 16384])
def test_position_buckets_cover_every_position_once(length):
    covered = [i for a, b in position_buckets(length) for i in range(a, b)]
    assert covered == list(range(length))


def test_buckets_have_the_mean_loss_of_their_positions(workspace):
    losses = plain_losses(tiny_model("softmax"), first_tokens(workspace), 64)
    row = find(load(workspace, "all.json"), "softmax", "as trained", 64)
    assert len(row["by_position"]) == len(position_buckets(64)) > 4
    for bucket in row["by_position"]:
        here = losses[:, bucket["from"] - 1 : bucket["to"]]
        assert bucket["loss"] == pytest.approx(here.mean().item(), rel=1e-6)


def test_context_gain_compares_the_same_tokens(workspace):
    tokens, model = first_tokens(workspace), tiny_model("lssar")
    full = plain_losses(model, tokens, 64)[:, -TRAIN // 2 :]
    near = [
        plain_losses(model, tokens[end - TRAIN : end + 1], TRAIN)[0, -TRAIN // 2 :]
        for end in range(64, TOKENS + 1, 64)
    ]
    gain = find(load(workspace, "all.json"), "lssar", "as trained", 64)["context_gain"]
    assert gain["gain"] == pytest.approx((full - torch.stack(near)).mean().item(), abs=1e-6)
    assert gain["near_context"] == pytest.approx(torch.stack(near).mean().item(), rel=1e-6)


def test_without_longer_context_there_is_no_context_gain(workspace):
    for length in (8, TRAIN):
        row = find(load(workspace, "all.json"), "lssar", "as trained", length)
        assert row["context_gain"] is None


def test_a_model_blind_to_context_scores_alike_at_every_length(tmp_path):
    """Only identical targets at every length give identical losses."""
    write_tokens(tmp_path / "data", SET_TOKENS)
    model = tiny_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.proj.weight.zero_()
    write_checkpoint(tmp_path / "blind", model)
    for name, options in (("first.json", ()), ("spread.json", ("--spread",))):
        main(command(tmp_path, ["blind"], name, *options))
        rows = load(tmp_path, name)["rows"]
        assert [r["loss"] for r in rows] == pytest.approx([rows[0]["loss"]] * 4, rel=1e-6)
        assert [abs(r["context_gain"]["gain"]) < 1e-6 for r in rows[2:]] == [True, True]


def test_spread_segments_reach_from_the_first_token_to_the_last(tmp_path):
    data = open_split(write_tokens(tmp_path / "data", SET_TOKENS), "val")
    targets = eval_extrapolation.choose_targets(data, [64], TOKENS, spread=True)
    inputs = torch.cat([pair[1] for pair in targets.batches()])
    wanted = torch.cat([pair[2] for pair in targets.batches()])
    assert inputs[0].tolist() == data.slice(0, 64).tolist()
    assert wanted[-1].tolist() == data.slice(SET_TOKENS - 64, 64).tolist()
    assert len(inputs) == 5


VARIANTS = {
    "window=12": lambda c, length: replace(c, attention=replace(c.attention, window=12)),
    "p=3": lambda c, length: replace(c, attention=replace(c.attention, p=3)),
    "alpha=0.5": lambda c, length: replace(c, attention=replace(c.attention, alpha=0.5)),
    "PI": lambda c, length: replace(c, interpolation=length / TRAIN),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_same_weights_under_another_setting(workspace, variant):
    model = tiny_model("lssar")
    changed = VARIANTS[variant](model.config, 64)
    model.configure(attention=changed.attention, interpolation=changed.interpolation)
    results = load(workspace, "all.json")
    row = find(results, "lssar", variant, 64)
    losses = plain_losses(model, first_tokens(workspace), 64)
    assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert row["loss"] != find(results, "lssar", "as trained", 64)["loss"]


def test_a_variant_that_changes_nothing_at_a_length_has_the_same_row(workspace):
    results = load(workspace, "all.json")
    for variant, length in (("window=12", 8), ("alpha=0.5", 16), ("PI", 16)):
        row, base = (find(results, "lssar", v, length) for v in (variant, "as trained"))
        assert row["segment_losses"] == base["segment_losses"]


def test_softmax_has_no_exponent_to_vary(workspace):
    runs = load(workspace, "all.json")
    softmax = next(i for i, c in runs["checkpoints"].items() if c["run"] == "softmax")
    found = {r["variant"] for r in runs["rows"] if r["checkpoint"] == softmax}
    assert found == {"as trained", "window=12", "PI"}


def test_results_name_what_made_them(workspace):
    results = load(workspace, "all.json")
    described = next(iter(results["checkpoints"].values()))
    assert described["step"] == 7
    assert described["model"]["attention"]["name"] == "softmax"
    assert results["settings"]["tokens"] == TOKENS
    assert len(results["settings"]["targets_sha256"]) == 64
    assert all(row["torch"] == torch.__version__ for row in results["rows"])
    assert results["about"] == describe_set(workspace / "data") | {"seed": None}


def test_results_name_the_text_that_they_are_of(workspace, tmp_path):
    corpus = make_corpus(tmp_path)
    options = ("--data", str(corpus), "--out", str(tmp_path / "x.json"))
    main(command(workspace, ["softmax"], "unused.json", *options))
    about = load(tmp_path, "x.json")["about"]
    assert about["source"] == "text"
    assert (
        about["manifest_sha256"]
        == hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    )


def test_an_interrupted_evaluation_continues_to_the_same_bits(workspace, monkeypatch):
    measure, calls = eval_extrapolation.measure, []

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(eval_extrapolation, "measure", counted)
    again = command(workspace, ["softmax", "lssar"], "again.json")
    with pytest.raises(KeyboardInterrupt):
        main(again)
    assert len(load(workspace, "again.json")["rows"]) == 2
    main(again)
    assert len(calls) == 3 + 6  # two rows of eight were there
    main(again)
    assert len(calls) == 3 + 6
    whole, parts = load(workspace, "all.json"), load(workspace, "again.json")
    for run in ("softmax", "lssar"):
        for length in LENGTHS:
            rows = [find(r, run, "as trained", length) for r in (whole, parts)]
            assert rows[0]["segment_losses"] == rows[1]["segment_losses"]
            assert rows[0]["by_position"] == rows[1]["by_position"]


def test_more_checkpoints_and_variants_extend_a_file(workspace, capsys):
    main(command(workspace, ["softmax"], "grown.json"))
    main(command(workspace, ["lssar"], "grown.json", "--alpha", "0.5"))
    assert "4 finished rows are kept" in capsys.readouterr().out
    assert len(load(workspace, "grown.json")["rows"]) == 4 + 8


def test_a_segment_makes_a_short_evaluation_predict_the_tokens_of_a_long_one(workspace):
    short = [
        "--lengths",
        str(LENGTHS[0]),
        "--segment",
        str(LENGTHS[-1]),
        "--no-figures",
    ]
    main(command(workspace, ["softmax"], "short.json", *short))
    main(command(workspace, ["softmax"], "long.json", "--no-figures"))
    alone, among = load(workspace, "short.json"), load(workspace, "long.json")
    assert alone["settings"] == among["settings"]
    assert len(alone["rows"]) == 1
    assert alone["rows"][0]["loss"] == find(among, "softmax", "as trained", LENGTHS[0])["loss"]
    assert not list(workspace.glob("short*.png"))


def test_results_of_other_settings_are_not_mixed(workspace):
    before = (workspace / "all.json").read_bytes()
    other = command(workspace, ["softmax"], "all.json")
    other[other.index("--tokens") + 1] = "128"
    with pytest.raises(UserError, match=r"tokens = 320, this is 128"):
        main(other)
    with pytest.raises(UserError, match="spread = False, this is True"):
        main(command(workspace, ["softmax"], "all.json", "--spread"))
    assert (workspace / "all.json").read_bytes() == before


def test_two_processes_give_the_bits_of_one(workspace):
    arguments = command(workspace, ["lssar"], "shared.json", "--window", "12")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launch, ROOT / "eval_extrapolation.py", *arguments], check=True, env=environment,
        capture_output=True,
    )  # fmt: skip
    one, two = load(workspace, "all.json"), load(workspace, "shared.json")
    assert len(two["rows"]) == 8
    for row in two["rows"]:
        alone = find(one, "lssar", row["variant"], row["length"])
        for key in ("loss", "segment_losses", "by_position", "context_gain"):
            assert row[key] == alone[key]


def test_table_and_figures_are_made(workspace, capsys):
    main(command(workspace, ["softmax", "lssar"], "all.json"))
    shown = capsys.readouterr().out
    row = find(load(workspace, "all.json"), "lssar", "as trained", 64)
    assert f"{row['loss']:.4f} ±{row['standard_error']:.4f}" in shown
    assert "LSSAR p=15, window=12" in shown
    for name in ("all.png", "all.pdf", "all-gain.png", "all-position.png"):
        assert (workspace / name).stat().st_size > 5000


def test_overflow_is_reported_and_the_file_stays_json(tmp_path, capsys):
    write_tokens(tmp_path / "data", SET_TOKENS)
    model = tiny_model("exp")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(100)
    write_checkpoint(tmp_path / "exp", model)
    main(command(tmp_path, ["exp"], "x.json"))
    assert load(tmp_path, "x.json")["rows"][-1]["loss"] is None
    assert "overflow" in capsys.readouterr().out


def test_as_many_tokens_as_the_set_has_are_used_and_said(tmp_path, capsys):
    write_tokens(tmp_path / "data", 200)
    write_checkpoint(tmp_path / "softmax", tiny_model())
    arguments = command(tmp_path, ["softmax"], "x.json")
    del arguments[arguments.index("--tokens") : arguments.index("--tokens") + 2]
    main(arguments)
    assert load(tmp_path, "x.json")["settings"]["tokens"] == 192
    assert "192 target tokens instead of 10,485,760" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "16,4096"], "1000 validation tokens, too few for one window of 4096"),
        (["--lengths", "24,64"], "24 does not divide 64"),
        (["--lengths", "0,64"], "--lengths: '0' must be at least 1"),
        (["--lengths", "a"], "--lengths: 'a' is not a whole number"),
        (["--tokens", "63"], "--tokens 63 is less than one window of 64"),
        (["--p", "3"], "no checkpoint given re-weights"),
        (["--window", "0"], "--window: '0' must be at least 1"),
        (["--out", "x.txt"], "ends in .json"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_one_clear_line(workspace, options, message):
    with pytest.raises(UserError, match=message) as caught:
        main(command(workspace, ["softmax"], "never.json", *options))
    assert "\n" not in str(caught.value)
    assert not (workspace / "never.json").exists()


def test_impossible_exponents_are_refused_before_anything_runs(workspace):
    for option, value in (("--p", "0.5"), ("--alpha", "-1"), ("--p", "nan")):
        with pytest.raises(UserError, match=option.removeprefix("--")):
            main(command(workspace, ["lssar"], "never.json", f"{option}={value}"))
    assert not (workspace / "never.json").exists()


def test_a_checkpoint_of_another_vocabulary_is_refused(workspace):
    small = tiny_model(vocab_size=100, vocab_rows=100)
    write_checkpoint(workspace / "small", small)
    with pytest.raises(UserError, match="outside the vocabulary of 100"):
        main(command(workspace, ["small"], "never.json"))
    large = tiny_model(vocab_size=300, vocab_rows=300)
    write_checkpoint(workspace / "large", large)
    with pytest.raises(UserError, match="cannot be compared"):
        main(command(workspace, ["softmax", "large"], "never.json"))


def test_the_same_model_twice_is_refused(workspace):
    with pytest.raises(UserError, match="same model"):
        main(command(workspace, ["softmax", "softmax"], "never.json"))


def test_what_is_no_checkpoint_ends_with_one_line_and_code_2(workspace):
    arguments = command(workspace, ["data"], "never.json")
    ended = subprocess.run(
        [sys.executable, ROOT / "eval_extrapolation.py", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "is not a checkpoint" in ended.stderr


PEAK = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from eval_extrapolation import main
here = Path({here!r})
write_tokens(here / "data", 4100)
write_checkpoint(here / "model", tiny_model("lssar", layers=1, heads=8, width=32))
def peak(length):
    main([str(here / "model"), "--data", str(here / "data"), "--lengths", str(length), "--tokens",
          "4096", "--window", "1000", "--out", str(here / f"{{length}}.json"), "--device", "cpu"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak(64)
print("extra MB", peak(4096) - before)
"""


def test_memory_does_not_grow_with_the_square_of_the_length(tmp_path):
    """One map of all heads at 4,096 takes 512 MB; LSSAR as written needs several of them."""
    program = PEAK.format(root=str(ROOT), tests=str(ROOT / "tests"), here=str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout.split("extra MB")[1]) < 256
