"""benchmark.py attention: the right things are measured, reported, left out. No time is judged."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import attention_maps
import benchmark
from attention import BACKENDS, attend, attention_weights, get_mechanism
from benchmarks import attention as bench
from benchmarks import attention_report, cost, measure
from benchmarks.attention import BASELINE, PAPER, Contestant
from checkpoint import CheckpointInfo, save_model
from errors import UserError
from model import GPT, preset

ROOT = Path(__file__).parent.parent
SMALL = ("--heads", "2", "--head-dim", "8", "--rounds", "2", "--device", "cpu")


def options_of(*arguments):
    options = bench.make_parser().parse_args(["--device", "cpu", *arguments])
    options.dtype = options.dtype or "fp32"
    bench._checkpoint(options)
    return options


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    info = CheckpointInfo(run="tiny", step=1, train_length=32, tokeniser="bytes")
    save_model(folder, GPT(preset("nano", "lssar", layers=2, heads=2, width=32)), info)
    return folder


# --- the run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "new" / "x.json"
    arguments = ["--lengths", "32,16", "--mechanisms", "lssa,lssar", *SMALL, "--out", str(out)]
    assert benchmark.main(["attention", *arguments]) == 0
    return out, json.loads(out.read_text())


def test_every_backend_is_measured_at_every_length_or_left_out_with_a_reason(run):
    _, result = run
    measured = {(r["mechanism"], r["backend"], r["length"]) for r in result["rows"]}
    skipped = {(s["mechanism"], s["backend"]): s["reason"] for s in result["skipped"]}
    for mechanism in ("lssa", "lssar"):
        for backend in (*BACKENDS, PAPER):
            here = {(mechanism, backend, n) in measured for n in (16, 32)}
            assert here == {(mechanism, backend) not in skipped}
    assert ("softmax", "sdpa", 16) in measured  # the baseline, though nobody asked for softmax
    assert "GPU" in skipped["lssar", "triton"]


def test_ratios_are_to_pytorchs_softmax_at_the_same_length(run):
    _, result = run
    for phase in bench.PHASES:
        base = {r["length"]: r[phase]["ms"] for r in result["rows"] if r["backend"] == "sdpa"}
        for row in result["rows"]:
            ratio = row[phase]["ms"] / base[row["length"]]
            assert row[phase]["ratio"] == pytest.approx(ratio)
            assert row[phase]["ms"] > 0


def test_figure_and_settings_are_beside_the_numbers(run):
    out, result = run
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert out.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert result["settings"]["lengths"] == [16, 32]
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["machine"]["torch"] == torch.__version__


def test_table_shows_every_row(run):
    _, result = run
    shown = attention_report.text(result)
    for row in result["rows"]:
        assert f"{row['mechanism']} {row['backend']}" in shown
        assert f"{row['forward']['ms']:.2f}" in shown
    assert "computes on a GPU" in shown


# --- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["softmax", "lssa", "lssar"])
def test_every_contestant_computes_its_mechanism(mechanism):
    options = options_of("--mechanisms", mechanism, "--heads", "2", "--head-dim", "8", "--p", "3")
    inputs = bench.make_inputs(options, 37)
    contestants, _ = bench.choose(options)
    for contestant in contestants:
        p = {"p": 3} if contestant.mechanism == "lssar" else {}
        q, k, v = (x.double().requires_grad_() for x in inputs[:3])
        value = get_mechanism(contestant.mechanism, **p)
        out = attention_weights(q, k, value) @ v
        exact = [out, *torch.autograd.grad(out, (q, k, v), inputs[3].double())]
        forward, both = bench.steps_of(contestant, inputs, 3)
        for got, want in zip([forward(), *both()], exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_the_papers_form_is_the_literal_power():
    assert Contestant("lssar", PAPER).value(15).numerics == "naive"
    assert Contestant("lssar", "eager").value(15).numerics == "safe"
    assert "eager" in Contestant("lssa", PAPER).cannot("cpu", torch.float32, 64, 15)


def test_forward_keeps_nothing_for_a_backward_pass():
    inputs = bench.make_inputs(options_of(*SMALL[:4]), 16)
    forward, _ = bench.steps_of(Contestant("lssar", "eager"), inputs, 15)
    assert not forward().requires_grad


def test_trained_inputs_are_what_the_layer_sees(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and then the dog. " * 3)
    options = options_of("--inputs", str(checkpoint), "--layer", "2", "--text", str(text))
    q, k, v, _ = bench.make_inputs(options, 50)
    assert q.shape == k.shape == v.shape == (1, 2, 50, 16)
    model = bench.open_checkpoints([checkpoint])[0].load(torch.device("cpu"))
    tokens = torch.tensor(list(text.read_bytes())[:50])
    seen = attention_maps.layer_weights(model, tokens, 1)
    torch.testing.assert_close(attention_weights(q, k, "lssar")[0], seen)


def test_a_short_text_is_repeated_into_a_batch(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefg")
    options = options_of("--inputs", str(checkpoint), "--text", str(text), "--batch", "2")
    q, *_ = bench.make_inputs(options, 21)
    assert q.shape == (2, 2, 21, 16)
    torch.testing.assert_close(q[0], q[1])


def test_eager_forms_that_cannot_fit_are_left_out_and_the_others_are_not():
    options = options_of()
    eager, fused = Contestant("lssar", PAPER), Contestant("lssar", "rowblock")
    kept, skipped = bench._that_fit([(eager, 2**20), (fused, 2**20), (eager, 16)], options)
    assert kept == [(fused, 2**20), (eager, 16)]
    assert skipped[0]["length"] == 2**20
    assert "GB" in skipped[0]["reason"]


# --- how it is measured --------------------------------------------------------------------------


def test_contestants_take_turns_and_a_slow_one_stops_early():
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    medians = measure.median_seconds(steps, device="cpu", rounds=5)
    assert "".join(calls) == "ab" * 6  # one warm-up each
    assert set(medians) == set("ab")
    calls.clear()
    measure.median_seconds(steps, device="cpu", rounds=50, budget=0)
    assert "".join(calls) == "ab" * (1 + measure.LEAST_ROUNDS)


def allocate(megabytes):
    torch.ones(600 * 10**6 // 4)  # making the step has a peak of its own, which is not counted
    kept = torch.ones(50 * 10**6 // 4)
    return [lambda m=m: kept.sum() + torch.ones(m * 10**6 // 4).sum() for m in megabytes]


def test_memory_is_what_the_steps_hold_at_their_peak():
    small, large = measure.peak_megabytes(allocate, (100, 300), device="cpu")
    assert 145 <= small <= 175
    assert 345 <= large <= 375


def die():
    os._exit(9)


def test_a_process_that_dies_is_reported_and_does_not_hang():
    with pytest.raises(measure.Crashed, match="killed"):
        measure.in_new_process(die)


def test_slopes_are_exact_on_power_laws():
    def row(backend, n, power):
        values = {"ms": 3 * n**power, "MB": 5 * n}
        return {"mechanism": "lssar", "backend": backend, "length": n} | dict.fromkeys(
            bench.PHASES, values
        )

    rows = [row("eager", n, 2) for n in (128, 4096, 512)] + [row("cpu", 128, 1)]
    eager, alone = attention_report.slopes(rows)
    assert eager["forward, ms"] == pytest.approx(2)
    assert eager["forward + backward, peak MB"] == pytest.approx(1)
    assert alone["forward, ms"] is None


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backends", "cpu,trition"], "did you mean 'triton'"),
        (["--mechanisms", "lsar"], "did you mean 'lssar'"),
        (["--lengths", "12,x"], "'x' is not a whole number"),
        (["--heads", "0"], "at least 1"),
        (["--layer", "2"], "add --inputs"),
        (["--p", "0.5"], ">= 1"),
        (["--table", "costs"], "choose from"),
        (["--inputs", "no/such/run"], "no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        bench.main(arguments)
    assert "\n" not in str(error.value)


def test_mistakes_about_a_checkpoint(checkpoint, tmp_path):
    given = ["--inputs", str(checkpoint)]
    with pytest.raises(UserError, match="has layers 1 to 2"):
        bench.main([*given, "--layer", "3"])
    with pytest.raises(UserError, match="drop them"):
        bench.main([*given, "--heads", "3"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="is empty"):
        bench.make_inputs(options_of(*given, "--text", str(tmp_path / "empty.txt")), 8)
    with pytest.raises(UserError, match="cannot be read"):
        bench.make_inputs(options_of(*given, "--text", str(tmp_path / "absent.txt")), 8)


# --- the paper's table of costs ------------------------------------------------------------------


def test_cost_table_has_the_papers_lines_with_its_numbers_beside(tmp_path, capsys):
    out = tmp_path / "cost.json"
    small = ["--preset", "nano", "--batch", "1", "--length", "32", "--rounds", "1"]
    arguments = ["--table", "cost", *small, "--device", "cpu", "--out", str(out)]
    assert benchmark.main(["attention", *arguments]) == 0
    shown, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    assert [r["mechanism"] for r in rows[:3]] == ["softmax", "lssa", "lssar"]
    assert {r["backend"] for r in rows[:3]} == {"eager"}
    assert rows[2]["paper"]["train_ms"] == 250.32
    assert ("softmax", "sdpa") in {(r["mechanism"], r["backend"]) for r in rows[3:]}
    assert all(r["paper"] is None for r in rows[3:])
    assert all(r[c] > 0 for r in rows for c in ("train_ms", "train_MB", "eval_ms", "eval_MB"))
    assert "250.32 (2.08x)" in shown
    assert "16685.57 (1.74x)" in shown


def test_the_paper_file_holds_the_papers_table():
    table = cost.paper_table("tab:comp_analysis")
    assert table["columns"] == ["train_ms", "train_MB", "eval_ms", "eval_MB"]
    assert table["rows"]["softmax"] == [120.48, 9609.45, 49.26, 2324.71]
    assert (table["setting"]["batch"], table["setting"]["length"]) == (4, 1024)


def test_one_model_serves_every_line_of_the_cost_table():
    options = cost_options()
    bench_ = cost.Workbench(options)
    losses = {}
    for entry in cost.table_entries(options, p=15):
        bench_.step(entry, "eval")()
        with torch.no_grad():
            losses[str(entry)] = bench_.model(bench_.inputs, bench_.targets).item()
        alone = GPT(preset("nano", entry.mechanism))
        alone.load_state_dict(bench_.model.state_dict())
        alone.use_backend("eager")
        expected = alone(bench_.inputs, bench_.targets).item()
        assert losses[str(entry)] == pytest.approx(expected, rel=1e-5)


def cost_options():
    return Namespace(preset="nano", batch=2, length=40, device="cpu")


def test_the_baseline_is_pytorchs_own_function():
    inputs = bench.make_inputs(options_of(*SMALL[:4]), 33)
    q, k, v, _ = inputs
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(bench.steps_of(BASELINE, inputs, 15)[0](), expected)
    torch.testing.assert_close(attend(q, k, v, "softmax"), expected)
