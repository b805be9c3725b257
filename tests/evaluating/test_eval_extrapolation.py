"""The same targets at every length, exact means and errors, and nothing finished is lost."""

import hashlib
import itertools
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
from cases import cases
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from train_helpers import make_corpus

import eval_extrapolation
from data.shards import describe_set, open_split
from eval_extrapolation import main, position_ranges
from evaluating import report
from evaluating.results import Record, Results, read_results
from evaluating.targets import Targets
from lssar.backends import BACKENDS
from lssar.errors import UserError
from support import plots

ROOT = Path(__file__).parents[2]
TRAIN = 16  # training length of the tiny models
LENGTHS = (8, 16, 32, 64)
TOKENS = 64 * 5
SET_TOKENS = 1000


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Make two checkpoints, a set, and the results of one evaluation with every kind of variant."""
    here = tmp_path_factory.mktemp("extrapolation")
    write_tokens(here / "data", SET_TOKENS)
    for name in ("softmax", "lssar"):
        write_checkpoint(here / name, tiny_model(name), seed=5)
    options = ["--window", "12", "--p", "3", "--alpha", "0.5", "--position-interpolation"]
    main(command(here, ["softmax", "lssar"], "all.json", *options))
    return here


def command(here: Path, checkpoints: list[str], out: str, *options: str) -> list[str]:
    return [
        *(str(here / name) for name in checkpoints),
        *("--data", str(here / "data"), "--lengths", ",".join(map(str, LENGTHS))),
        *("--tokens", str(TOKENS), "--out", str(here / out), "--device", "cpu", *options),
    ]


def load(here: Path, out: str) -> Results:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((here / out).read_text(), parse_constant=refuse)
    return read_results(here / out)


def find(results: Results, run: str, variant: str, length: int, quantity: str = "loss") -> Record:
    (record,) = [
        r
        for r in results.select(variant=variant, length=length, quantity=quantity)
        if results.runs[r.run]["run"] == run
    ]
    return record


def losses(results: Results) -> list[Record]:
    return results.select(quantity="loss")


def plain_losses(model, tokens: np.ndarray, length: int) -> torch.Tensor:
    """Return the losses from whole logits in float64, one window at a time; (windows, length)."""
    model, rows = model.double(), []
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        with torch.no_grad():
            logits = F.linear(model.hidden(window[None, :-1])[0], model.embedding.weight)
        rows.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.stack(rows)


def first_tokens(here: Path) -> np.ndarray:
    return np.array(open_split(here / "data", "val").slice(0, TOKENS + 1))


def test_loss_equals_a_plain_loop_over_windows(workspace):
    for run, length in cases(["softmax", "lssar"], LENGTHS):
        expected = plain_losses(tiny_model(run), first_tokens(workspace), length)
        record = find(load(workspace, "all.json"), run, "as trained", length)
        assert record.value == pytest.approx(expected.mean().item(), rel=1e-6)
        assert record.tokens == TOKENS


def test_standard_error_is_over_segments_of_the_longest_length(workspace):
    segments = plain_losses(tiny_model("lssar"), first_tokens(workspace), 16).view(5, 64).mean(1)
    record = find(load(workspace, "all.json"), "lssar", "as trained", 16)
    assert record.details["by_segment"] == pytest.approx(segments.tolist(), rel=1e-6)
    assert record.error == pytest.approx(segments.std().item() / math.sqrt(5), rel=1e-5)


def test_paired_difference_is_that_of_the_same_segments(workspace):
    results = load(workspace, "all.json")
    base, other = (find(results, run, "as trained", 32) for run in ("softmax", "lssar"))
    parts = np.subtract(*(r.details["by_segment"] for r in (other, base)))
    paired = report.paired_differences(results, base.run)
    difference, error = paired[other.run, "as trained", 32]
    assert difference == pytest.approx(other.value - base.value, rel=1e-9)
    assert error == pytest.approx(parts.std(ddof=1) / 5**0.5, rel=1e-9)
    assert (base.run, "as trained", 32) not in paired


def test_position_ranges_cover_every_position_once():
    for length in cases([1, 8, 16, 17, 37, 64, 1024, 1536, 16384]):
        covered = [i for a, b in position_ranges(length) for i in range(a, b)]
        assert covered == list(range(length))


def test_position_ranges_are_quarters_of_octaves():
    edges = [0, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100]
    assert position_ranges(100) == list(itertools.pairwise(edges))


def test_buckets_have_the_mean_loss_of_their_positions(workspace):
    expected = plain_losses(tiny_model("softmax"), first_tokens(workspace), 64)
    buckets = find(load(workspace, "all.json"), "softmax", "as trained", 64).details["by_position"]
    assert len(buckets) == len(position_ranges(64)) > 4
    for bucket in buckets:
        here = expected[:, bucket["from"] - 1 : bucket["to"]]
        assert bucket["loss"] == pytest.approx(here.mean().item(), rel=1e-6)


def test_far_context_benefit_compares_the_same_tokens(workspace):
    tokens, model = first_tokens(workspace), tiny_model("lssar")
    full = plain_losses(model, tokens, 64)[:, -TRAIN // 2 :]
    near = [
        plain_losses(model, tokens[end - TRAIN : end + 1], TRAIN)[0, -TRAIN // 2 :]
        for end in range(64, TOKENS + 1, 64)
    ]
    gain = find(load(workspace, "all.json"), "lssar", "as trained", 64, "far_context_benefit")
    assert gain.value == pytest.approx((torch.stack(near) - full).mean().item(), abs=1e-6)
    assert gain.details["full_context"] == pytest.approx(full.mean().item(), rel=1e-6)
    assert gain.details["near_context"] == pytest.approx(torch.stack(near).mean().item(), rel=1e-6)
    assert gain.tokens == full.numel() == TRAIN // 2 * 5


def test_without_longer_context_there_is_no_far_context_benefit(workspace):
    results = load(workspace, "all.json")
    assert {r.length for r in losses(results)} == set(LENGTHS)
    assert {r.length for r in results.select(quantity="far_context_benefit")} == {32, 64}


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
        results = load(tmp_path, name)
        values = [r.value for r in losses(results)]
        assert values == pytest.approx([values[0]] * 4, rel=1e-6)
        gains = [r.value for r in results.select(quantity="far_context_benefit")]
        assert gains == pytest.approx([0, 0], abs=1e-6)


def test_spread_segments_reach_from_the_first_token_to_the_last_without_overlap(tmp_path):
    data = open_split(write_tokens(tmp_path / "data", SET_TOKENS), "val")
    for tokens, segment in ((TOKENS, 64), (999, 100), (998, 499), (999, 999), (5, 5)):
        targets = Targets(data, [segment], tokens=tokens, spread=True)
        inputs = torch.cat([pair[1] for pair in targets.batches()])
        wanted = torch.cat([pair[2] for pair in targets.batches()])
        assert inputs[0].tolist() == data.slice(0, segment).tolist()
        assert len(inputs) == tokens // segment
        if len(inputs) > 1:
            assert wanted[-1].tolist() == data.slice(SET_TOKENS - segment, segment).tolist()
            assert np.diff(targets.starts).min() >= segment


def documents_by_hand(tokens: list[int], eot: int) -> list[tuple[int, int]]:
    """Return (start, size) of each document, one token at a time."""
    found = [[0, 0]]
    for place, token in enumerate(tokens):
        if token == eot and place:
            found.append([place, 0])
        found[-1][1] += 1
    return [tuple(document) for document in found]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("first", [256, 65])  # the set may begin within a document
def test_segments_within_documents_never_cross_an_end_of_text(tmp_path, spread, first):
    random = np.random.default_rng(1)
    tokens = random.integers(0, 256, 5000).astype("<u2")
    tokens[random.permutation(5000)[:60]] = 256
    tokens[0] = first
    write_tokens(tmp_path / "data", 5000)
    for file, part in zip(
        sorted((tmp_path / "data").iterdir()), np.split(tokens, [1667]), strict=True
    ):
        file.write_bytes(file.read_bytes()[:1024] + part.tobytes())
    data = open_split(tmp_path / "data", "val", vocab_size=257)
    segment, documents = 50, documents_by_hand(tokens.tolist(), 256)
    expected = [
        start + segment * number
        for start, size in documents
        for number in range(size)
        if segment * (number + 1) < size
    ]
    targets = Targets(data, [segment], tokens=10**9, spread=spread, within_documents=True)
    assert targets.starts.tolist() == expected and len(expected) > 20
    for _, inputs, wanted in targets.batches():
        assert not (wanted == 256).any() and not (inputs[:, 1:] == 256).any()
    long = sum(size > segment for _, size in documents)
    share = len(expected) * segment / 5000
    assert f"{long} of {len(documents)} documents" in targets.coverage()
    assert f"{share:.1%} of the set" in targets.coverage()
    few = Targets(data, [segment], tokens=350, spread=spread, within_documents=True)
    assert few.count == 7 and set(few.starts) <= set(expected)
    assert (few.starts[-1] == expected[-1]) == spread
    with pytest.raises(UserError, match=r"no document of 900 \+ 1 tokens, the longest"):
        Targets(data, [900], tokens=10**9, within_documents=True)


def test_the_results_say_how_much_of_the_set_has_long_documents(tmp_path, capsys):
    write_tokens(tmp_path / "data", SET_TOKENS)
    write_checkpoint(tmp_path / "softmax", tiny_model())
    main(command(tmp_path, ["softmax"], "x.json", "--within-documents", "--no-figures"))
    about, shown = load(tmp_path, "x.json").about, capsys.readouterr().out
    assert f"{about['long_documents']} of {about['documents']} documents hold a segment" in shown
    with pytest.raises(UserError, match="not comparable"):
        main(command(tmp_path, ["softmax"], "x.json"))


VARIANTS = {
    "window=12": lambda c, length: replace(c, attention=replace(c.attention, window=12)),
    "p=3": lambda c, length: replace(c, attention=replace(c.attention, p=3)),
    "alpha=0.5": lambda c, length: replace(c, attention=replace(c.attention, alpha=0.5)),
    "PI": lambda c, length: replace(c, interpolation=length / TRAIN),
}


def test_a_variant_is_the_same_weights_under_another_setting(workspace):
    for variant in cases(VARIANTS):
        model = tiny_model("lssar")
        changed = VARIANTS[variant](model.config, 64)
        model.configure(attention=changed.attention, interpolation=changed.interpolation)
        results = load(workspace, "all.json")
        record = find(results, "lssar", variant, 64)
        expected = plain_losses(model, first_tokens(workspace), 64)
        assert record.value == pytest.approx(expected.mean().item(), rel=1e-6)
        assert record.value != find(results, "lssar", "as trained", 64).value


def test_sinks_and_ways_to_stretch_rope_are_variants_too(workspace):
    options = ["--window", "12", "--sinks", "2", "--ntk", "--yarn", "--no-figures"]
    main(command(workspace, ["softmax"], "more.json", *options))
    results, trained = load(workspace, "more.json"), tiny_model("softmax").config
    streaming = replace(trained.attention, window=12, sinks=2)
    for variant, changes in {
        "window=12, sinks=2": {"attention": streaming},
        "NTK": {"interpolation": 64 / TRAIN, "scaling": "ntk"},
        "YaRN": {"interpolation": 64 / TRAIN, "scaling": "yarn"},
    }.items():
        model = tiny_model("softmax").configure(**changes)
        expected = plain_losses(model, first_tokens(workspace), 64).mean().item()
        assert find(results, "softmax", variant, 64).value == pytest.approx(expected, rel=1e-6)
    values = {r.value for r in results.select(quantity="loss", length=64)}
    assert len(values) == 5  # as trained, and with a window alone


def test_a_variant_that_changes_nothing_at_a_length_has_the_same_numbers(workspace):
    results = load(workspace, "all.json")
    for variant, length in (("window=12", 8), ("alpha=0.5", 16), ("PI", 16)):
        one, base = (find(results, "lssar", v, length) for v in (variant, "as trained"))
        assert one == replace(base, variant=variant)  # it was not computed twice


def test_an_l_of_the_evaluation_is_a_variant_where_there_is_an_l(workspace):
    model = tiny_model("sigmoid")
    write_checkpoint(workspace / "sigmoid", model, tokeniser="bytes")
    main(command(workspace, ["sigmoid", "softmax"], "current.json", "--current-length"))
    results = load(workspace, "current.json")
    changed = replace(model.config.attention, length="current")
    model.configure(attention=changed, interpolation=1.0)
    expected = plain_losses(model, first_tokens(workspace), 64).mean().item()
    found = find(results, "sigmoid", "L=current", 64).value
    assert found == pytest.approx(expected, rel=1e-6)
    assert found != find(results, "sigmoid", "as trained", 64).value
    base = find(results, "sigmoid", "as trained", 16)
    assert find(results, "sigmoid", "L=current", 16) == replace(base, variant="L=current")
    softmax = next(i for i, run in results.runs.items() if run["run"] == "softmax")
    assert {r.variant for r in results.select(run=softmax)} == {"as trained"}
    with pytest.raises(UserError, match="no checkpoint given has an L"):
        main(command(workspace, ["softmax"], "none.json", "--current-length"))


def test_softmax_has_no_exponent_to_vary(workspace):
    results = load(workspace, "all.json")
    softmax = next(i for i, run in results.runs.items() if run["run"] == "softmax")
    found = {r.variant for r in results.select(run=softmax)}
    assert found == {"as trained", "window=12", "PI"}


def test_results_name_what_made_them(workspace):
    results = load(workspace, "all.json")
    described = next(iter(results.runs.values()))
    assert (described["step"], described["seed"]) == (7, 5)
    assert described["model"]["attention"]["name"] == "softmax"
    assert results.settings["tokens"] == TOKENS
    assert len(results.settings["targets_sha256"]) == 64
    assert results.about == describe_set(workspace / "data")
    for record in results.records:
        assert record.details["torch"] == torch.__version__
        assert record.details["threads"] == torch.get_num_threads()
        (backend,) = record.details["attention"]
        assert backend in BACKENDS
        assert record.command and record.revision


def bits(record: Record) -> tuple:
    """Return everything but when and by which command it was measured."""
    details = {k: v for k, v in record.details.items() if k != "seconds"}
    return record.key, record.value, record.error, record.tokens, details


def test_results_name_the_text_that_they_are_of(workspace, tmp_path):
    corpus = make_corpus(tmp_path)
    options = ("--data", str(corpus), "--out", str(tmp_path / "x.json"))
    main(command(workspace, ["softmax"], "unused.json", *options))
    about = read_results(tmp_path / "x.json").about
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
    assert len(losses(load(workspace, "again.json"))) == 2
    main(again)
    assert len(calls) == 3 + 6  # two measurements of eight were there
    main(again)
    assert len(calls) == 3 + 6
    whole, parts = load(workspace, "all.json"), load(workspace, "again.json")
    for run in ("softmax", "lssar"):
        for length in LENGTHS:
            one, other = (find(r, run, "as trained", length) for r in (whole, parts))
            assert bits(one) == bits(other)


def test_more_checkpoints_and_variants_extend_a_file(workspace, capsys):
    main(command(workspace, ["softmax"], "grown.json"))
    main(command(workspace, ["lssar"], "grown.json", "--alpha", "0.5"))
    assert "6 finished numbers are kept" in capsys.readouterr().out
    assert len(losses(load(workspace, "grown.json"))) == 4 + 8


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
    assert alone.settings == among.settings
    (record,) = alone.records
    assert bits(record) == bits(find(among, "softmax", "as trained", LENGTHS[0]))
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
    assert len(losses(two)) == 8
    for record in two.records:
        assert bits(record) == bits(find(one, "lssar", *record.key[2::2], record.quantity))


def test_table_and_figures_are_made(workspace, capsys):
    main(command(workspace, ["softmax", "lssar"], "all.json"))
    shown = capsys.readouterr().out
    record = find(load(workspace, "all.json"), "lssar", "as trained", 64)
    assert f"{record.value:.4f} ±{record.error:.4f}" in shown
    assert f"{math.exp(record.value):.2f}" in shown
    assert "LSSAR p=15, window=12" in shown
    for name in ("all.png", "all.pdf", "all-benefit.png", "all-position.png"):
        assert (workspace / name).stat().st_size > 5000


def test_the_names_of_axes_fit_into_the_figures(tmp_path, monkeypatch):
    """That of the far-context benefit was cut off at both ends."""
    write_tokens(tmp_path / "data", SET_TOKENS)
    for name in ("softmax", "lssar"):
        write_checkpoint(tmp_path / name, tiny_model(name), run=name)
    drawn = []
    monkeypatch.setattr(plots, "publish", lambda figure, path: drawn.append((path.name, figure)))
    main([*command(tmp_path, ["softmax", "lssar"], "x.json"), "--window", "16"])
    assert len(drawn) == 3
    for name, figure in drawn:
        figure.draw_without_rendering()
        for axes in figure.axes:
            for label in (axes.xaxis.label, axes.yaxis.label):
                box = label.get_window_extent()
                inside = box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1
                assert inside and box.x1 <= figure.bbox.x1, (name, label.get_text())


def test_overflow_is_reported_and_the_file_stays_json(tmp_path, capsys):
    write_tokens(tmp_path / "data", SET_TOKENS)
    model = tiny_model("exp")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(100)
    write_checkpoint(tmp_path / "exp", model)
    main(command(tmp_path, ["exp"], "x.json"))
    assert losses(load(tmp_path, "x.json"))[-1].value is None
    assert "overflow" in capsys.readouterr().out
    main([*command(tmp_path, ["exp"], "x.json"), "--window", "100"])  # the same numbers again
    assert losses(load(tmp_path, "x.json"))[-1].variant == "window=100"


def test_one_length_is_drawn_as_bars(workspace, tmp_path):
    results = load(workspace, "all.json")
    results.path, results.records = tmp_path / "x.json", results.select(length=64)
    _, axes = report.figure_by_length(results, "loss", ylabel="loss")
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown[:2] == ["Softmax", "Softmax, window=12"] and "LSSAR p=15, α=0.5" in shown
    assert [round(bar.get_height(), 4) for bar in axes.patches] == [
        round(r.value, 4) for _, _, found in report.styled_series(results, "loss") for r in found
    ]
    colours = {bar.get_facecolor() for bar in axes.patches}
    assert len(colours) == 3  # one per mechanism, one for the window of either
    report.figures(results)
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_of_many_lines_four_have_colours_and_all_have_names_at_their_ends(workspace):
    results = load(workspace, "all.json")
    series = report.styled_series(results, "loss")
    kept = [style for _, style, _ in series if style["color"] not in (plots.GREY, plots.INK)]
    assert len(series) > 6 and len(kept) == plots.MOST_COLOURS
    figure, axes = report.figure_by_length(results, "loss", ylabel="loss")
    assert not figure.legends
    assert {label for label, *_ in series} <= {text.get_text() for text in axes.texts}


def test_as_many_tokens_as_the_set_has_are_used_and_said(tmp_path, capsys):
    write_tokens(tmp_path / "data", 200)
    write_checkpoint(tmp_path / "softmax", tiny_model())
    arguments = command(tmp_path, ["softmax"], "x.json")
    del arguments[arguments.index("--tokens") : arguments.index("--tokens") + 2]
    main(arguments)
    assert load(tmp_path, "x.json").settings["tokens"] == 192
    assert "192 target tokens instead of 10,485,760" in capsys.readouterr().out


def test_mistakes_are_one_clear_line(workspace):
    examples = [
        (["--lengths", "16,4096"], "1000 validation tokens, too few for one segment of 4096"),
        (["--lengths", "24,64"], "24 does not divide 64"),
        (["--lengths", "0,64"], "--lengths: '0' must be at least 1"),
        (["--lengths", "a"], "--lengths: 'a' is not a whole number"),
        (["--tokens", "63"], "--tokens 63 is less than one segment of 64"),
        (["--p", "3"], "no checkpoint given re-weights"),
        (["--window", "0"], "--window: '0' must be at least 1"),
        (["--sinks", "4"], "--sinks 4 are kept beside a window"),
        (["--out", "x.txt"], "ends in .json"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--nonsense"], "unrecognized arguments"),
    ]
    for options, message in cases(examples):
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


def test_what_is_no_checkpoint_is_one_clear_line(workspace):
    with pytest.raises(UserError, match="is not a checkpoint") as refused:
        main(command(workspace, ["data"], "never.json"))
    assert "\n" not in str(refused.value)


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
