"""Reproducing the paper: a whole registry, jobs that survive each other, tables true to files."""

import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from training import TINY, make_corpus

import reproduce
import reproduction.plan
from config import load_config
from data.shards import describe_set
from errors import UserError
from evaluation import AS_TRAINED
from reproduction.claims import FAILS, HOLDS, UNSEEN, all_below, below, claims_record
from reproduction.experiments import Column, Row, Table, all_tables
from reproduction.jobs import Job, Pool, run_all
from reproduction.plan import Workspace, jobs_of
from reproduction.runs import HEADLINE, MECHANISM_OF, SCALES, Corpus, Run, all_runs
from reproduction.special import SPECIALS
from reproduction.tables import build, paper_numbers, script_of, show

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable


# --- the registry --------------------------------------------------------------------------------


def test_the_paper_needs_27_fineweb_8_sweep_3_pi_and_6_edu_runs():
    runs = all_runs("paper")
    controls = {"softmax-p15-naive", "no-pi-2x", "no-pi-4x", "no-pi-8x"}
    kinds = {
        "fineweb": [k for k in runs if k in MECHANISM_OF],
        "edu": [k for k in runs if k.startswith("edu-")],
        "pi": [k for k in runs if k.startswith("pi-")],
    }
    assert {kind: len(keys) for kind, keys in kinds.items()} == {"fineweb": 27, "edu": 6, "pi": 3}
    rest = runs.keys() - controls - {k for keys in kinds.values() for k in keys}
    assert rest == {f"{s}-p{p}" for s in ("softmax", "lssar") for p in (1, 5, 10, 20)}


@pytest.mark.parametrize("scale", SCALES)
def test_every_run_has_a_valid_config_of_its_mechanism(scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    space = Workspace(SCALES[scale], processes=1 if scale == "nano" else 8)
    for key, run in all_runs(scale).items():
        config = space.config(run, seed=3)
        assert config.train.seed == 3
        assert config.run_directory == Path("runs") / scale / f"{key}-s3"
        assert config.data.directory in SCALES[scale].corpora
        if key in MECHANISM_OF:
            name, p = MECHANISM_OF[key]
            assert (config.mechanism().name, config.mechanism().p) == (name, p)


def test_every_number_of_the_paper_has_a_place_in_a_table():
    tables = all_tables("paper").values()
    for label, paper in paper_numbers().items():
        measured = {row.key for table in tables if table.label == label for row in table.rows}
        columns = {c.paper for table in tables if table.label == label for c in table.columns}
        if measured:
            assert paper["rows"].keys() <= measured, label
            assert set(paper["columns"]) <= columns, label
        for values in paper["rows"].values():
            assert len(values) == len(paper["columns"]), label


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_names_a_run_that_exists(scale):
    runs = all_runs(scale)
    for table in all_tables(scale).values():
        for row in table.rows:
            for column in table.columns:
                run = runs[row.run.format(factor=f"{column.factor:g}")]
                assert column.metric == "accuracy" or column.factor in run.factors
        assert table.baseline is None or table.baseline in {row.key for row in table.rows}


@pytest.mark.parametrize("scale", SCALES)
def test_every_extrapolation_table_has_a_sliding_window_beside_it(scale):
    for table in all_tables(scale).values():
        lengths = {column.factor for column in table.columns if column.metric == "loss"}
        if 16 in lengths and table.name != "p_sweep":
            assert any(row.variant == "window" for row in table.rows), table.name


@pytest.mark.parametrize("name", [*all_tables("paper"), *SPECIALS])
def test_every_table_has_a_script_that_says_what_it_reproduces(name):
    script = ROOT / script_of(name)
    text = script.read_text()
    assert script.stat().st_mode & 0o100
    assert "SCALE:-nano" in text
    if name != "headline":
        known = all_tables("paper") | SPECIALS
        assert known[name].label in text
        called = re.search(r"reproduce\.py (\w+)", text).group(1)
        assert name in (called, f"{called}_passkey", f"{called}_edu")


def test_an_unknown_table_is_named_with_a_suggestion():
    with pytest.raises(UserError, match="unknown table 'actvations'; did you mean 'activations'"):
        reproduce.main(["actvations"])


@pytest.mark.parametrize(
    "option", ["--seeds=0,x", "--seeds=", "--jobs=0", "--gpus=-1", "--jobs=two"]
)
def test_a_number_that_is_none_is_one_clear_line(option):
    with pytest.raises(UserError, match=r"is not a whole number|must be at least 1"):
        reproduce.main(["headline", option])


def test_paper_scale_without_gpus_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="trains on 8 GPUs and 0 are here"):
        reproduce.main(["decomposition", "--scale", "paper"])


def test_the_plan_adds_up_runs_tokens_hours_and_disk(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    reproduce.main(["decomposition", "--scale", "paper", "--plan", "--gpus", "8"])
    printed = capsys.readouterr().out
    tokens = 4 * load_config("configs/gpt2-124m-softmax.toml", world_size=8).train.steps * 524288
    assert f"tokens      {tokens:,}" in printed
    hours = [float(x) for x in re.findall(r"([\d.]+) h$", printed, re.MULTILINE)]
    total = float(re.search(r"time\s+([\d.]+) A100-hours", printed).group(1))
    assert len(hours) == 4
    assert total == pytest.approx(sum(hours), abs=0.1)
    assert "GiB of checkpoints" in printed


def test_the_seconds_in_the_comments_of_the_configs_are_the_recorded_ones():
    recorded = json.loads((ROOT / "results/nano/runs.json").read_text())["runs"]
    keys = {run.config: run.key for run in reversed(all_runs("nano").values())}
    keys |= {"nano-softmax": "softmax", "nano-lssar": "lssar-p15"}
    keys["nano-passkey-softmax"] = "passkey-softmax"
    for config, key in keys.items():
        text = (ROOT / f"configs/{config}.toml").read_text(encoding="utf-8")
        (said,) = re.findall(r"one thread of two CPU cores, recorded ([\d,]+) seconds", text)
        assert int(said.replace(",", "")) == round(recorded[f"{key}-s0"]["seconds"]), config
    assert len(keys) == 10


# --- jobs ----------------------------------------------------------------------------------------


def shell_job(name: str, code: str, made: Path, *needs: str) -> Job:
    return Job(name, (PYTHON, "-c", code), made.exists, needs)


def test_a_failed_job_stops_only_those_that_need_it(tmp_path):
    touch = "import sys, pathlib; pathlib.Path({!r}).touch()"
    a, b, c = (tmp_path / name for name in "abc")
    jobs = [
        shell_job("a", "import sys; sys.exit('disk on fire')", a),
        shell_job("after a", touch.format(str(b)), b, "a"),
        shell_job("c", touch.format(str(c)), c),
        shell_job("after that", touch.format(str(b)), b, "after a"),
    ]
    states = run_all(jobs, tmp_path / "logs", parallel=2)
    assert "exit code 1: disk on fire" in states["a"]
    assert states["after a"] == "not started: it needs 'a'"
    assert states["after that"] == "not started: it needs 'after a'"
    assert states["c"] == "done"
    assert not b.exists()


def test_a_job_that_ends_well_without_its_result_has_failed(tmp_path):
    states = run_all([shell_job("idle", "pass", tmp_path / "x")], tmp_path / "logs", parallel=1)
    assert states["idle"].startswith("failed with exit code 0")


def test_what_is_done_is_not_done_again(tmp_path, capsys):
    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'a').write('x')"
    for _ in range(2):
        assert run_all([shell_job("once", code, made)], tmp_path / "logs", 1) == {"once": "done"}
    assert made.read_text() == "x"
    assert "1 of 1 jobs are done already" in capsys.readouterr().out


def test_sigterm_reaches_the_jobs_and_gives_them_time_to_save(tmp_path):
    started, saved = tmp_path / "started", tmp_path / "saved"
    child = (
        "import signal, sys, time, pathlib\n"
        f"def stop(*_): pathlib.Path({str(saved)!r}).touch(); sys.exit(75)\n"
        f"signal.signal(signal.SIGTERM, stop); pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(60)"
    )
    parent = (
        "from pathlib import Path; from reproduction.jobs import Job, run_all\n"
        f"run_all([Job('slow', ({PYTHON!r}, '-c', {child!r}), lambda: False)], "
        f"Path({str(tmp_path / 'logs')!r}), 1)"
    )
    process = subprocess.Popen([PYTHON, "-c", parent], cwd=ROOT, stderr=subprocess.PIPE)
    while not started.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert saved.exists()
    assert process.returncode != 0


@pytest.fixture
def slow_signals(monkeypatch):
    """Time for the threads to do their worst while the pool walks over its processes."""
    send = subprocess.Popen.send_signal

    def slowly(process, number):
        send(process, number)
        time.sleep(0.05)

    monkeypatch.setattr(subprocess.Popen, "send_signal", slowly)


def test_an_interrupt_among_many_quick_jobs_is_only_that(tmp_path, slow_signals):
    """It walked over a set of processes that their threads were changing."""
    handler = signal.getsignal(signal.SIGTERM)
    for round_ in range(3):
        jobs = [Job(f"{round_} {i}", ("sleep", f"0.0{i % 10}"), lambda: True) for i in range(40)]
        with pytest.raises(KeyboardInterrupt), Pool(tmp_path, 20) as pool:
            for job in jobs:
                pool.start(job)
            pool.finished()
            raise KeyboardInterrupt
        assert not pool.processes
    assert signal.getsignal(signal.SIGTERM) is handler


def test_no_job_starts_after_the_others_were_told_to_stop(tmp_path, slow_signals):
    started = tmp_path / "started"
    command = ("sh", "-c", f"echo x >> '{started}'; exec sleep 5")
    with pytest.raises(KeyboardInterrupt), Pool(tmp_path, 2) as pool:
        for i in range(6):
            pool.start(Job(str(i), command, lambda: True))
        while not started.exists() or len(started.read_text().split()) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert len(started.read_text().split()) == 2


def test_many_quick_jobs_all_end(tmp_path):
    made = [tmp_path / str(i) for i in range(200)]
    jobs = [Job(path.name, ("touch", str(path)), path.exists) for path in made]
    assert run_all(jobs, tmp_path / "logs", 16) == {path.name: "done" for path in made}


# --- tables and claims ---------------------------------------------------------------------------


def write_results(path: Path, losses: dict[tuple[str, int], float | None]) -> None:
    rows = [
        {"checkpoint": "c", "variant": v, "length": n, "loss": x, "context_gain": {"gain": 0.5}}
        for (v, n), x in losses.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"kind": "extrapolation", "settings": {}, "about": {}, "checkpoints": {"c": {}}}
    path.write_text(json.dumps(content | {"rows": rows}))


@pytest.fixture
def space(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.chdir(ROOT)
    return Workspace(SCALES["nano"], runs=tmp_path / "runs", results=tmp_path / "results")


def test_a_cell_is_the_mean_and_spread_over_the_seeds_that_are_there(space):
    for seed, loss in ((0, 1.5), (2, 1.75)):
        write_results(space.evaluation("extrapolation", "lssa", seed), {(AS_TRAINED, 128): loss})
    table = Table(
        "x", "tab:softmaxfreeatt", (Column(1, paper="1K"),), (Row("lssa", "LSSA", "lssa"),)
    )
    built = build(table, space, {})
    cell = built["rows"][0]["measured"][0]
    assert (cell["mean"], cell["n"], cell["values"]) == (1.625, 2, [1.5, 1.75])
    assert cell["sd"] == pytest.approx(statistics.stdev([1.5, 1.75]))
    assert [Path(s).name for s in cell["sources"]] == ["lssa-s0.json", "lssa-s2.json"]
    assert built["rows"][0]["paper"] == [3.1905]
    assert built["rows"][0]["status"] == "missing"  # seed 1
    # Two runs of one seed each differ by noise of twice the root of two variances.
    assert built["columns"][0]["noise"] == pytest.approx(2 * math.sqrt(2) * cell["sd"])
    assert "1.625 ±0.177" in show(built)


def test_a_run_that_was_trained_again_counts_as_it_is_now(space):
    path = space.evaluation("extrapolation", "exp", 0)
    write_results(path, {(AS_TRAINED, 128): 1.5})
    found = json.loads(path.read_text())
    found["rows"].append(found["rows"][0] | {"checkpoint": "again", "loss": 1.25})
    found["checkpoints"]["again"] = {}
    path.write_text(json.dumps(found))
    table = Table("x", "tab:decomsoft", (Column(1, paper="1K"),), (Row("exp", "II", "exp"),))
    assert build(table, space, {})["rows"][0]["measured"][0]["values"] == [1.25]


def test_an_overflow_is_a_finished_row_without_a_number(space):
    write_results(space.evaluation("extrapolation", "exp", 0), {(AS_TRAINED, 128): None})
    table = Table("x", "tab:decomsoft", (Column(1, paper="1K"),), (Row("exp", "II", "exp"),))
    built = build(table, space, {})
    row = built["rows"][0]
    assert (row["measured"][0]["mean"], row["measured"][0]["n"]) == (None, 1)
    assert "overflow" in show(built)
    assert row["status"] == "done"


def described(runs: dict[str, str]) -> dict:
    return {"checkpoints": {identity: {"run": run} for identity, run in runs.items()}}


def test_what_was_measured_of_weights_that_are_gone_is_no_further_seed():
    """A run that is trained again is measured again into the same file."""
    heads = [{"sink": 0.75, "entropy": 1.0, "zeros": 0.0}, {"sink": 0.25, "entropy": 2, "zeros": 1}]
    found = described({"a": "softmax-s0", "b": "softmax-s1", "c": "softmax-s0"})
    found["rows"] = [
        {"checkpoint": identity, "heads": [h | {"sink": h["sink"] + more} for h in heads]}
        for identity, more in (("a", 100), ("b", 2), ("c", 0))
    ]
    special = SPECIALS["attention_maps"]
    _, (row,) = special.rows(found, special)
    assert sorted(row["measured"][0]["values"]) == [0.5, 2.5]


@pytest.mark.parametrize("kind", ["attention_maps", "lambada"])
def test_a_number_that_is_not_finite_is_not_averaged_away(kind):
    found = described({"a": "softmax-s0", "b": "softmax-s1"})
    one = {"sink": 0.5, "entropy": 1.0, "zeros": 0.0}
    found["rows"] = [
        {
            **{
                "checkpoint": identity,
                "variant": "nano_cloze",
                "heads": [one, one | {"sink": bad}],
            },
            "metrics": {metric: {"value": bad, "stderr": None} for metric in ("acc", "perplexity")},
        }
        for identity, bad in (("a", 0.5), ("b", None))  # JSON's null for infinity
    ]
    special = SPECIALS[kind]
    _, (row,) = special.rows(found, special)
    cell = row["measured"][0]
    assert (cell["mean"], cell["n"], cell["values"][1]) == (None, 2, None)


def test_a_failed_run_is_shown_as_such_in_its_row(space):
    table = Table("x", "tab:decomsoft", (Column(1, paper="1K"),), (Row("exp", "II", "exp"),))
    states = {"train exp-s0": "failed with exit code 3: diverged"}
    status = build(table, space, states)["rows"][0]["status"]
    assert status == "failed: failed with exit code 3: diverged"


def test_a_window_row_reads_the_window_of_the_training_length(space):
    found = {(AS_TRAINED, 256): 2.0, ("window=128", 256): 1.5}
    write_results(space.evaluation("extrapolation", "softmax", 0), found)
    row = Row("w", "window", "softmax", "window", control=True)
    built = build(Table("x", "tab:softmaxfreeatt", (Column(2, paper="2K"),), (row,)), space, {})
    assert built["rows"][0]["measured"][0]["mean"] == 1.5
    assert built["rows"][0]["paper"] == [None]


def test_a_difference_within_the_noise_is_no_verdict():
    assert below(-0.3, 0.1) == HOLDS
    assert below(0.3, 0.1) == FAILS
    assert below(0.05, 0.1) == below(-0.05, 0.1) == UNSEEN
    assert all_below([(-0.3, 0.1), (-0.05, 0.1)]) == UNSEEN
    assert all_below([(-0.3, 0.1), (-0.05, 0.1), (0.3, 0.1)]) == FAILS
    assert all_below([(-0.3, 0.1)]) == HOLDS


def test_claims_without_measurements_cannot_be_seen(space):
    claims = claims_record(space)["claims"]
    assert {c["verdict"] for c in claims} == {UNSEEN}
    assert {c["measured"] for c in claims} == {"not measured"}


def test_the_headline_claims_follow_the_numbers(space):
    """A made-up world in which LSSAR is flat and everybody else climbs."""
    lengths = [128 * f for f in (1, 2, 4, 8, 16)]
    for key in HEADLINE:
        for seed in space.scale.seeds:
            rise = 0.0 if key == "lssar-p15" else 0.5
            losses = {(AS_TRAINED, n): 1.7 + 0.01 * seed + rise * i for i, n in enumerate(lengths)}
            losses |= {("window=128", n): 1.6 for n in lengths}
            write_results(space.evaluation("extrapolation", key, seed), losses)
    table = all_tables("nano")["headline"]
    space.table("headline").write_text(json.dumps(build(table, space, {})))
    verdicts = {c["claim"]: c["verdict"] for c in claims_record(space)["claims"]}
    assert verdicts["LSSAR p=15 loses less than softmax beyond the training length"] == HOLDS
    assert verdicts["LSSAR's loss stays nearly constant up to 16x"] == HOLDS
    context = next(c for c in verdicts if c.startswith("The flat curve"))
    assert verdicts[context] == FAILS  # the gain is +0.5 and a window is better


# --- all of it, for real -------------------------------------------------------------------------


def test_a_table_is_trained_evaluated_and_drawn_although_one_run_fails(
    tmp_path, monkeypatch, capsys
):
    corpus = make_corpus(tmp_path)
    small = (*TINY, f"--data.directory={corpus}")
    runs = {
        "softmax": Run("softmax", "nano-softmax", small),
        "exp": Run("exp", "nano-softmax", (*small, "--train.lr=1e30", "--attention.name=exp")),
    }
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(reproduction.plan, "all_runs", lambda scale: runs)
    monkeypatch.setattr("reproduction.records.all_runs", lambda scale: runs)
    scale = replace(
        SCALES["nano"],
        train_length=32,
        eval_tokens=1024,
        seeds=(0,),
        corpora={str(corpus): Corpus(("none",), 1)},
    )
    space = Workspace(scale, runs=tmp_path / "runs", results=tmp_path / "results")
    rows = (Row("softmax", "Softmax", "softmax"), Row("exp", "II", "exp"))
    table = Table(
        "decomposition", "tab:decomsoft", (Column(1, paper="1K"),), rows, "softmax", "dots"
    )
    states = run_all(jobs_of([table], space), tmp_path / "logs", parallel=2)
    reproduce.write_all([table], [], space, states)
    assert states["evaluate softmax-s0"] == "done"
    assert states["evaluate exp-s0"] == "not started: it needs 'train exp-s0'"
    built = json.loads(space.table("decomposition").read_text())
    assert built["rows"][0]["measured"][0]["mean"] > 0
    assert built["rows"][1]["status"].startswith("failed: ")
    assert Path(built["figures"][0]).stat().st_size > 1000
    record = json.loads(space.table("runs").read_text())
    assert record["corpora"] == {str(corpus): describe_set(corpus)}
    record = record["runs"]["softmax-s0"]
    assert record["tokens"] == 24 * 256
    assert record["status"] == "done"
    capsys.readouterr()
    again = run_all(jobs_of([table], space)[:3], tmp_path / "logs", parallel=1)
    assert set(again.values()) == {"done"}
    assert "3 of 3 jobs are done already" in capsys.readouterr().out
