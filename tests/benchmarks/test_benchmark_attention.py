"""benchmark.py attention: the right things are measured, reported, left out. No time is judged."""

import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from cases import cases
from matplotlib.colors import to_hex

import attention_maps
import benchmark
from benchmarks import attention_study as bench
from benchmarks import measure, model_step
from benchmarks import study as reports
from benchmarks.attention_study import (
    PAPER,
    PHASES,
    Case,
    complete_options,
    make_inputs,
    mechanism_of,
    steps_of,
)
from benchmarks.study import Study
from evaluating.checkpoints import open_checkpoints
from evaluating.results import Record, read_results
from lssar.backends import BACKENDS, attend
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from lssar.reference import attention_weights
from model import GPT, preset
from support import plots
from training.checkpoint import CheckpointInfo, save_model

ROOT = Path(__file__).parents[2]
SMALL_MODEL = ("--preset", "nano", "--batch", "1", "--length", "16")
SMALL = ("--heads", "2", "--head-dim", "8", "--rounds", "2", "--device", "cpu")


def options_of(*arguments):
    options = benchmark.make_parser("attention").parse_args(["--device", "cpu", *arguments])
    options.dtype, options.threads = options.dtype or "fp32", options.threads or 1
    complete_options(options)
    return options


def case_of(name, backend, length, p=15):
    return Case(mechanism_of(name, backend, p), backend, length)


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
    benchmark.main(["attention", *arguments])
    return out, read_results(out)


def test_every_backend_is_measured_at_every_length_or_left_out_with_a_reason(run):
    _, results = run
    measured = {(r.run, r.variant.split(",")[0], r.length) for r in results.records}
    left_out = dict(line.split(": ", 1) for line in results.about["left_out"])
    for label in ("LSSA", "LSSAR p=15"):
        for backend in (*BACKENDS, PAPER):
            here = {(label, backend, n) in measured for n in (16, 32)}
            assert here == {f"{label}, {backend}" not in left_out}
    assert ("Softmax", "sdpa", 16) in measured  # the baseline, though nobody asked for softmax
    assert "GPU" in left_out["LSSAR p=15, triton"]


def test_ratios_are_to_pytorchs_softmax_at_the_same_length(run):
    _, results = run
    for phase in PHASES:
        times = {(r.run, r.variant, r.length): r.value for r in of(results, f"{phase}_ms")}
        base = {n: time for (run, variant, n), time in times.items() if run == "Softmax"}
        ratios = of(results, f"{phase}_ratio")
        assert len(ratios) == len(times) >= 8
        for r in ratios:
            assert r.value == pytest.approx(times[r.run, r.variant, r.length] / base[r.length])
            assert r.value > 0


def of(results, quantity):
    return [r for r in results.records if r.quantity == quantity]


def test_a_time_is_the_median_of_the_rounds_beside_it(run):
    for record in of(run[1], "forward_ms"):
        assert len(record.details["rounds"]) == 2
        assert record.value == pytest.approx(sum(record.details["rounds"]) / 2)


def test_figure_settings_and_command_are_beside_the_numbers(run):
    out, results = run
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert out.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert results.settings["lengths"] == [16, 32]
    assert results.about["threads"] == torch.get_num_threads()
    assert results.about["torch"] == torch.__version__
    assert results.runs["LSSAR p=15"]["attention"] == {"name": "lssar", "p": 15}
    assert all(r.command and r.revision for r in results.records)


def test_table_shows_every_number(run):
    _, results = run
    shown = reports.text(results.records, results.about["left_out"])
    for record in results.records:
        assert record.run in shown
        assert f"{record.value:,.2f}" in shown
    assert "computes on a GPU" in shown


def test_measured_again_the_numbers_are_replaced_and_other_settings_are_refused(run):
    out, results = run
    arguments = ["attention", "--mechanisms", "lssa,lssar", *SMALL, "--out", str(out)]
    with pytest.raises(UserError, match="give another --out"):
        benchmark.main([*arguments, "--lengths", "48"])
    assert len(read_results(out).records) == len(results.records)
    benchmark.main([*arguments, "--lengths", "16,32"])
    again = read_results(out).records
    assert [r.key for r in again] == [r.key for r in results.records]
    assert [r.value for r in again] != [r.value for r in results.records]


@pytest.mark.parametrize(
    "arguments",
    [
        ["attention", "--lengths", "16", "--mechanisms", "lssar", "--backends", "eager", *SMALL],
        ["train", "--attention", "lssar", *SMALL_MODEL, "--rounds", "1"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_nothing_is_written_without_out(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not benchmark.main(arguments)
    assert not list(tmp_path.iterdir())


# --- what is measured ----------------------------------------------------------------------------


def test_every_contestant_computes_its_mechanism():
    for mechanism in cases(["softmax", "lssa", "lssar"]):
        options = options_of(
            "--mechanisms", mechanism, "--heads", "2", "--head-dim", "8", "--p", "3"
        )
        inputs = make_inputs(options, 37)
        chosen = bench.choose(Study(options))
        assert len(chosen) >= 3 * len(options.lengths)
        for case in chosen:
            p = {"p": 3} if case.mechanism.sharpened else {}
            q, k, v = (x.double().requires_grad_() for x in inputs[:3])
            value = get_mechanism(case.mechanism.name, **p)
            out = attention_weights(q, k, value) @ v
            exact = [out, *torch.autograd.grad(out, (q, k, v), inputs[3].double())]
            forward, both = steps_of(case, inputs)
            for got, want in zip([forward(), *both()], exact, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_the_papers_form_is_the_literal_power():
    assert mechanism_of("lssar", PAPER, 15).numerics == "naive"
    assert mechanism_of("lssar", "eager", 15).numerics == "safe"
    assert "eager" in case_of("lssa", PAPER, 16).cannot(options_of())


def test_forward_keeps_nothing_for_a_backward_pass():
    inputs = make_inputs(options_of(*SMALL[:4]), 16)
    forward, _ = steps_of(case_of("lssar", "eager", 16), inputs)
    assert not forward().requires_grad


def test_trained_inputs_are_what_the_layer_sees(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and then the dog. " * 3)
    options = options_of("--inputs", str(checkpoint), "--layer", "2", "--text", str(text))
    q, k, v, _ = make_inputs(options, 50)
    assert q.shape == k.shape == v.shape == (1, 2, 50, 16)
    model = open_checkpoints([checkpoint])[0].load(torch.device("cpu"))
    tokens = torch.tensor(list(text.read_bytes())[:50])
    seen, _, _ = attention_maps.layer_weights(model, tokens, 1)
    torch.testing.assert_close(attention_weights(q, k, "lssar")[0], seen)


def test_a_short_text_is_repeated_into_a_batch(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefg")
    options = options_of("--inputs", str(checkpoint), "--text", str(text), "--batch", "2")
    q, *_ = make_inputs(options, 21)
    assert q.shape == (2, 2, 21, 16)
    torch.testing.assert_close(q[0], q[1])


def test_eager_forms_that_cannot_fit_are_left_out_and_the_others_are_not():
    lengths = ["--lengths", f"16,{2**20}"]
    study = Study(options_of("--mechanisms", "lssar", "--backends", "rowblock,paper", *lengths))
    kept = [(c.backend, c.length) for c in bench.choose(study)]
    fused = [(backend, n) for n in (16, 2**20) for backend in ("sdpa", "rowblock")]
    assert sorted(kept) == sorted([*fused, ("paper", 16)])
    (line,) = study.left_out
    assert line.startswith(f"LSSAR p=15, paper at {2**20}: ") and "GB" in line


# --- how it is measured --------------------------------------------------------------------------


def test_contestants_take_turns_and_a_slow_one_stops_early():
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = measure.round_seconds(steps, "cpu", rounds=5)
    assert "".join(calls) == "ab" * 6  # one warm-up each
    assert {name: len(times) for name, times in seconds.items()} == {"a": 5, "b": 5}
    calls.clear()
    measure.round_seconds(steps, "cpu", rounds=50, budget=0)
    assert "".join(calls) == "ab" * (1 + measure.LEAST_ROUNDS)


def allocate(megabytes):
    torch.ones(600 * 10**6 // 4)  # making the step has a peak of its own, which is not counted
    kept = torch.ones(50 * 10**6 // 4)
    return [lambda m=m: kept.sum() + torch.ones(m * 10**6 // 4).sum() for m in megabytes]


def test_memory_is_what_the_steps_hold_at_their_peak():
    task = measure.peak_megabytes, "cpu", allocate, (100, 300)
    small, large = measure.in_new_process(*task)
    assert 145 <= small <= 175
    assert 345 <= large <= 375


def die():
    os._exit(9)


def test_a_process_that_dies_is_reported_and_does_not_hang():
    with pytest.raises(measure.Crashed, match="killed"):
        measure.in_new_process(die)


def test_slopes_are_exact_on_power_laws():
    def points(backend, n, power):
        values = {"ms": 3 * n**power, "MB": 5 * n}
        for phase in PHASES:
            for unit, value in values.items():
                yield Record(f"{phase}_{unit}", "LSSAR", value, variant=backend, length=n)

    records = [r for n in (128, 4096, 512) for r in points("eager", n, 2)]
    found = reports.slopes([*records, *points("cpu", 128, 1)])  # one length: no growth
    assert list(found) == ["LSSAR, eager"]
    assert found["LSSAR, eager"]["forward_ms"] == pytest.approx(2)
    assert found["LSSAR, eager"]["forward_backward_MB"] == pytest.approx(1)


@pytest.fixture
def figure(monkeypatch):
    """Return a function that gives the last figure drawn."""
    drawn = []
    monkeypatch.setattr(plots.plt, "close", drawn.append)
    yield lambda: drawn[-1]
    monkeypatch.undo()
    plots.plt.close("all")


def test_a_single_length_is_drawn_as_bars_and_names_leave_out_what_all_share(tmp_path, figure):
    records = [
        Record(quantity, run, 2.0, variant=f"{backend}, random, 1 thread", length=64)
        for quantity in reports.GROWING
        for run, backend in (("Softmax", "sdpa"), ("LSSAR", "cpu"))
    ]
    assert list(reports.curves(records, "forward_ms")) == ["Softmax, sdpa", "LSSAR, cpu"]
    runs = {run: {"attention": {"name": run.lower()}} for run in ("Softmax", "LSSAR")}
    results = Namespace(records=records, runs=runs)
    png, pdf = reports.draw("attention", results, tmp_path / "x.json")
    assert png.stat().st_size > 5_000 and pdf.exists()
    colours = [to_hex(bar.get_facecolor()).upper() for bar in figure().axes[0].patches]
    assert colours == [plots.MECHANISMS[name][0] for name in ("softmax", "lssar")]


def test_of_many_mechanisms_four_have_their_colour_and_the_others_a_name_at_the_end(
    tmp_path, figure
):
    names = ["mish-l1", "relu-l1", "lssa", "ssmax", "softmax", "lssar"]
    results = Namespace(runs={n: {"attention": {"name": n}} for n in names}, records=[])
    for quantity, name, length in itertools.product(reports.GROWING, names, (64, 3072)):
        results.records.append(Record(quantity, name, 2.0, variant="cpu", length=length))
    reports.draw("attention", results, tmp_path / "x.json")
    last = figure().axes[-1]
    assert [tick.get_text() for tick in last.get_xticklabels()] == ["64", "3K"]
    found = {line.get_label(): line.get_color() for line in last.lines}
    main = ("lssar", "softmax", "lssa", "ssmax")
    assert found == dict.fromkeys(names, plots.GREY) | {n: plots.MECHANISMS[n][0] for n in main}
    assert {text.get_text() for text in last.texts} == set(names)


# --- mistakes ------------------------------------------------------------------------------------


def test_mistakes_are_one_line():
    examples = [
        (["--backends", "cpu,trition"], "did you mean 'triton'"),
        (["--mechanisms", "lsar"], "did you mean 'lssar'"),
        (["--lengths", "12,x"], "is not a whole number"),
        (["--heads", "0"], "at least 1"),
        (["--layer", "2"], "add --inputs"),
        (["--p", "0.5"], ">= 1"),
        (["--table", "costs"], "choose from"),
        (["--lenghts", "12"], "unrecognized arguments: --lenghts"),
        (["--inputs", "no/such/run"], "no such file"),
    ]
    for arguments, message in cases(examples):
        with pytest.raises(UserError, match=message) as error:
            benchmark.main(["attention", *arguments])
        assert "\n" not in str(error.value)


def test_mistakes_about_a_checkpoint(checkpoint, tmp_path):
    given = ["--inputs", str(checkpoint)]
    with pytest.raises(UserError, match="has layers 1 to 2"):
        benchmark.main(["attention", *given, "--layer", "3"])
    with pytest.raises(UserError, match="drop them"):
        benchmark.main(["attention", *given, "--heads", "3"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="is empty"):
        make_inputs(options_of(*given, "--text", str(tmp_path / "empty.txt")), 8)
    with pytest.raises(UserError, match="cannot be read"):
        make_inputs(options_of(*given, "--text", str(tmp_path / "absent.txt")), 8)


# --- the paper's table of costs ------------------------------------------------------------------


def test_cost_table_has_the_papers_lines_with_its_numbers_beside(tmp_path, capsys):
    out = tmp_path / "cost.json"
    small = ["--preset", "nano", "--batch", "1", "--length", "32", "--rounds", "1"]
    arguments = ["--table", "cost", *small, "--device", "cpu", "--out", str(out)]
    assert not benchmark.main(["attention", *arguments])
    shown, results = capsys.readouterr().out, read_results(out)
    assert (results.kind, results.settings["preset"]) == ("cost", "nano")
    lines = dict.fromkeys((r.run, r.variant) for r in results.records)
    assert list(lines)[:3] == [(name, "eager") for name in ("softmax", "lssa", "lssar")]
    assert ("softmax", "cpu") in lines
    assert results.runs["lssar"]["model"] == {
        "preset": "nano",
        "attention": {"name": "lssar", "p": 15},
    }
    for run, variant in lines:
        found = {r.quantity: r for r in results.select(run=run, variant=variant)}
        assert set(found) == {"train_ms", "train_MB", "eval_ms", "eval_MB"}
        assert all(r.value > 0 and (r.length, r.tokens) == (32, 32) for r in found.values())
    (literal,) = results.select(quantity="train_ms", run="lssar", variant="eager")
    assert literal.details["numerics"] == "naive"  # as the paper writes it
    assert "LSSAR p=15, eager" in shown
    assert "250.32 (2.08x)" in shown
    assert "16685.57 (1.74x)" in shown


def test_the_paper_file_holds_the_papers_table():
    table = json.loads(model_step.PAPER.read_text())["tab:comp_analysis"]
    assert table["columns"] == ["train_ms", "train_MB", "eval_ms", "eval_MB"]
    assert table["rows"]["softmax"] == [120.48, 9609.45, 49.26, 2324.71]
    assert (table["setting"]["batch"], table["setting"]["length"]) == (4, 1024)


def test_one_model_serves_every_line_of_the_cost_table():
    options = cost_options()
    shared = model_step.Workbench(options)
    for line in model_step.table_lines(options, p=15):
        shared.run(line, "eval")
        with torch.no_grad():
            loss = shared.model(shared.inputs, shared.targets).item()
        alone = GPT(preset("nano", line.mechanism))
        alone.load_state_dict(shared.model.state_dict())
        alone.use_backend("eager")
        expected = alone(shared.inputs, shared.targets).item()
        assert loss == pytest.approx(expected, rel=1e-5)


def cost_options():
    return Namespace(preset="nano", batch=2, length=40, device="cpu")


def test_the_baseline_is_pytorchs_own_function():
    inputs = make_inputs(options_of(*SMALL[:4]), 33)
    q, k, v, _ = inputs
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(steps_of(case_of("softmax", "sdpa", 33), inputs)[0](), expected)
    torch.testing.assert_close(attend(q, k, v, "softmax"), expected)


@pytest.mark.parametrize(
    "command",
    [
        ["attention", "--dtype", "bf16", "--lengths", "256", "--backends", "sdpa,eager", *SMALL],
        ["train", "--bf16", "--attention", "lssar", "--batch", "4", "--rounds", "1"],
    ],
    ids=lambda command: command[0],
)
def test_bf16_does_not_die_of_amx_that_is_announced_but_missing(command):
    """Without what conftest.py sets for such processors: the benchmark finds out by itself."""
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "benchmark.py", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
