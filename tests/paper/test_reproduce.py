"""Reproducing the paper: a whole registry, a plan that adds up, a table made for real."""

import json
import re
import shutil
import subprocess
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from train_helpers import TINY, make_corpus

import paper.plan
import reproduce
from data.shards import describe_set
from lssar.errors import UserError
from paper import paper_numbers
from paper.costs import Cost, Speed, describe, room_lines
from paper.evidence import read_runs
from paper.experiments import (
    DATA,
    FACTORS,
    SCALES,
    Column,
    Row,
    Run,
    Table,
    all_runs,
    all_tables,
)
from paper.jobs import run_all
from paper.plan import Workspace, jobs_of
from support import command
from training.config import load_config
from training.hours import DEVICES

ROOT = Path(__file__).parents[2]


# --- the registry --------------------------------------------------------------------------------


def test_the_paper_needs_27_fineweb_8_sweep_3_pi_and_6_edu_runs():
    runs = all_runs("paper")
    controls = {"softmax-p15-naive", "cos-softmax", "no-pi-2x", "no-pi-4x", "no-pi-8x"}
    kinds = {
        "fineweb": [k for k in runs if k in DATA["main"] and k not in controls],
        "edu": [k for k in runs if k.startswith("edu-")],
        "pi": [k for k in runs if k.startswith("pi-")],
    }
    assert {kind: len(keys) for kind, keys in kinds.items()} == {"fineweb": 27, "edu": 6, "pi": 3}
    rest = runs.keys() - controls - {k for keys in kinds.values() for k in keys}
    assert rest == {f"{s}-p{p}" for s in ("softmax", "lssar") for p in (1, 5, 10, 20)}


@pytest.mark.parametrize("scale", SCALES)
def test_every_run_has_a_valid_config_of_its_mechanism(scale, monkeypatch):
    monkeypatch.chdir(ROOT)
    space = Workspace(SCALES[scale], processes=SCALES[scale].gpus or 1)
    for key, run in all_runs(scale).items():
        config = space.config(run, seed=3)
        assert config.train.seed == 3
        assert config.run_directory == Path("runs") / scale / f"{key}-s3"
        assert config.data.directory in SCALES[scale].corpora
        if key in DATA["main"]:
            options = re.findall(r"--attention\.(\w+)=(\S+)", DATA["main"][key].get("options", ""))
            wanted = {"name": key, "p": None} | dict(options)
            wanted["p"] = wanted["p"] and float(wanted["p"])
            assert {name: getattr(config.mechanism(), name) for name in wanted} == wanted


def test_every_number_of_the_paper_has_a_place_in_a_table():
    tables = all_tables("paper").values()
    for label, printed in paper_numbers().items():
        measured = {row.key for table in tables if table.label == label for row in table.rows}
        columns = {c.paper for table in tables if table.label == label for c in table.columns}
        assert printed["rows"].keys() <= measured, label
        assert set(printed["columns"]) <= columns, label
        tolerance = printed["tolerance"]
        assert not isinstance(tolerance, list) or len(tolerance) == len(printed["columns"]), label
        assert printed["reason"], label
        for values in printed["rows"].values():
            assert len(values) == len(printed["columns"]), label


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_names_a_run_that_exists(scale):
    runs = all_runs(scale)
    for table in all_tables(scale).values():
        for row in table.rows if table.folder in ("extrapolation", "passkey") else ():
            for column in table.columns:
                run = runs[column.run(row.run)]
                passkey = table.folder == "passkey"
                assert column.factor in (FACTORS["passkey"] if passkey else run.factors)
                assert passkey or row.variant != "window" or run.windows
                alpha = row.variant.removeprefix("alpha=")
                assert alpha == row.variant or float(alpha) in run.alphas
                assert row.variant != "L=current" or run.current
        assert not table.measure or table.folder == table.name
        assert table.baseline is None or table.baseline in {row.key for row in table.rows}


@pytest.mark.parametrize("scale", SCALES)
def test_every_extrapolation_table_has_a_sliding_window_beside_it(scale):
    for table in all_tables(scale).values():
        lengths = {column.factor for column in table.columns if column.quantity == "loss"}
        if 16 in lengths and table.name not in ("p_sweep", "p_length"):
            assert any(row.variant.startswith("window") for row in table.rows), table.name


@pytest.mark.parametrize("name", all_tables("paper"))
def test_every_table_has_a_script_that_says_what_it_reproduces(name):
    script = ROOT / all_tables("paper")[name].script
    text = script.read_text()
    assert script.stat().st_mode & 0o100
    assert "SCALE:-nano" in text
    if name != "headline":
        assert all_tables("paper")[name].label in text
    if name not in ("headline", "symbolic_regression"):
        called = re.search(r"reproduce\.py (\w+)", text).group(1)
        assert all_tables("paper")[called].script == all_tables("paper")[name].script


def test_without_a_table_the_plan_is_of_all_and_nothing_else_starts():
    tables = reproduce.parse_arguments(["--plan", "--scale", "single"]).tables
    assert tables == reproduce.parse_arguments(["all", "--scale", "single"]).tables
    with pytest.raises(UserError, match=r"name a table \(headline, .*\), or all; --plan shows"):
        reproduce.parse_arguments([])


def test_an_unknown_table_is_named_with_a_suggestion():
    with pytest.raises(UserError, match="unknown table 'actvations'; did you mean 'activations'"):
        reproduce.main(["actvations"])
    with pytest.raises(UserError, match="at --scale single; it is one of --scale nano, paper"):
        reproduce.main(["scaling_edu", "--scale", "single"])


@pytest.mark.parametrize(
    "option", ["--seeds=0,x", "--seeds=", "--jobs=0", "--gpus=-1", "--jobs=two"]
)
def test_a_number_that_is_none_is_one_clear_line(option):
    with pytest.raises(UserError, match=r"is not a whole number|must be at least 1"):
        reproduce.main(["headline", option])


@pytest.mark.parametrize(
    "scale, said",
    [
        ("paper", "8 GPUs, and there are 0 here; --gpus N"),
        ("single", "a GPU, and there is none here; --plan"),
    ],
)
def test_a_scale_without_its_gpus_is_refused_before_anything_starts(monkeypatch, scale, said):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=f"--scale {scale} trains on {said}"):
        reproduce.main(["decomposition", "--scale", scale])


def test_uncommitted_code_is_refused_unless_allowed_and_then_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for words in ("init -q", "commit -q --allow-empty -m a"):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words.split()], check=True)
    started = []
    monkeypatch.setattr(reproduce, "run_all", lambda *given: started.append(given) or {})
    monkeypatch.setattr(reproduce, "show_all", lambda *given: None)
    command.revision.cache_clear()
    reproduce.main(["decomposition"])
    assert len(started) == 1
    (tmp_path / "train.py").write_text("changed")
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    command.revision.cache_clear()
    with pytest.raises(UserError, match=r"uncommitted changes.*--allow-dirty"):
        reproduce.main(["decomposition"])
    assert reproduce.main(["decomposition", "--tables-only"]) is None  # which runs nothing
    assert len(started) == 1
    reproduce.main(["decomposition", "--allow-dirty"])
    assert len(started) == 2
    assert command.revision().endswith("+"), "what runs and results record"
    command.revision.cache_clear()


def test_headline_rows_have_five_seeds_and_everything_else_at_least_three_at_nano():
    seeds = {key: len(SCALES["nano"].seeds_of(key)) for key in all_runs("nano")}
    five = {"softmax", "ssmax", "lssa", "lssar-p3", "lssar-p15", "cos-softmax"}
    five |= {"far-softmax", "far-ssmax", "far-cos-softmax", "far-global-last"}  # not all count
    assert {key for key, count in seeds.items() if count == 5} == five
    assert {count for key, count in seeds.items() if key not in five} == {3}
    for scale in ("single", "paper"):
        counts = {key: len(SCALES[scale].seeds_of(key)) for key in all_runs(scale)}
        assert {key for key, count in counts.items() if count == 3} == {"softmax", "lssar-p15"}


@pytest.mark.parametrize("scale", SCALES)
def test_a_run_has_the_seeds_of_the_run_it_starts_from(scale):
    for key, run in all_runs(scale).items():
        if run.init_from:
            mine, others = (SCALES[scale].seeds_of(k) for k in (key, run.init_from))
            assert set(mine) <= set(others)


def test_a_table_is_made_whole_with_one_seed_before_the_next_and_as_asked(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = [all_tables("nano")["headline"]]
    jobs = jobs_of(tables, Workspace(SCALES["nano"]))
    seeds = [int(job.name[-1]) for job in jobs if job.trains]
    assert seeds == sorted(seeds) and set(seeds) == set(range(5))
    asked = jobs_of(tables, Workspace(SCALES["nano"], seeds=(7,)))
    assert {job.name[-2:] for job in asked if job.trains} == {"s7"}


@pytest.mark.parametrize("scale, gpus", [("paper", 8), ("single", 1)])
def test_the_plan_adds_up_runs_tokens_hours_memory_and_disk(monkeypatch, capsys, scale, gpus):
    monkeypatch.chdir(ROOT)
    plan = ["decomposition", "--scale", scale, "--plan", "--gpu", "a100", "--seeds", "0"]
    reproduce.main(plan)
    printed = capsys.readouterr().out
    train = load_config(f"configs/{SCALES[scale].config}.toml", world_size=gpus).train
    assert f"tokens      {4 * train.steps * train.batch_tokens:,}, " in printed
    hours = [float(x) for x in re.findall(r"([\d.]+) h$", printed, re.MULTILINE)]
    evaluating = float(re.search(r"evaluations 4, .*: ([\d.]+) hours", printed).group(1))
    preparing = float(re.search(r"data .*: ([\d.]+) hours", printed).group(1))
    found = re.search(r"time +([\d.]+) A100-hours .* ([\d.]+) hours on (\d)", printed)
    total, elapsed, count = map(float, found.groups())
    assert (len(hours), count) == (4, gpus)
    assert total == pytest.approx(sum(hours) + evaluating, abs=0.2)
    assert elapsed == pytest.approx(sum(hours) / gpus + evaluating + preparing, abs=0.2)
    assert re.search(r"memory +at most [\d.]+ of the 78\.6 GiB of one A100\n", printed)
    assert "GiB of checkpoints" in printed and "too little" not in printed
    reproduce.main([*plan[:-4], "--gpu", "3090", "--seeds", "0,1"])
    slower = re.search(r"time +([\d.]+) RTX 3090-hours", capsys.readouterr().out)
    assert float(slower.group(1)) > 2 * total


def test_what_does_not_fit_the_gpu_or_the_disk_is_said(monkeypatch):
    cost = Cost(1, 1.0, 3 * 2**30, 25 * 2**30, "sdpa", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Namespace(free=4 * 2**30))
    fits, short = (room_lines({"a": cost}, data, DEVICES["4090"]) for data in (1e8, 2e9))
    assert "too little: lower train.micro_batch" in fits[0]
    assert "too little" not in fits[1] and "too little: make room" in short[1]
    assert "too little" not in room_lines({"a": cost}, 0, DEVICES["a100"])[0]


def test_a_plan_takes_the_speed_that_was_recorded_for_a_run_or_its_like(monkeypatch):
    monkeypatch.chdir(ROOT)
    space = Workspace(SCALES["nano"])
    runs = all_runs("nano")
    softmax, longer, smaller = (
        space.config(runs[key], 1) for key in ("softmax", "pi-2x", "edu-small-softmax")
    )
    record = {"tokens": 1000, "device": "cpu", "config": asdict(softmax)}
    recorded = {f"softmax-s{i}": record | {"seconds": 36.0 + i} for i in (0, 2)}
    recorded["ssmax-s0"] = record | {"seconds": 360.0}
    recorded["softmax-s3"] = record | {"seconds": 1.0, "device": "NVIDIA A100-SXM4-80GB"}
    speed = Speed(None, 500.0, recorded)
    tokens = softmax.train.steps * softmax.train.batch_tokens
    assert speed.cost(softmax).hours == pytest.approx(tokens * 0.037 / 3600)
    other = replace(softmax, log=replace(softmax.log, name="lssa-s0"))
    assert speed.cost(other).hours == pytest.approx(tokens * 0.038 / 3600)  # their median
    for unlike in (longer, smaller):
        tokens = unlike.train.steps * unlike.train.batch_tokens
        assert speed.cost(unlike).hours == pytest.approx(tokens / 500 / 3600)
    on_gpu = replace(speed, device=DEVICES["a100"])
    assert on_gpu.cost(softmax).hours == pytest.approx(softmax.train.steps * 2048 * 0.001 / 3600)
    assert on_gpu.cost(other).hours == Speed(DEVICES["a100"]).cost(other).hours
    # Reading as many tokens as were trained on, at the same length, is a third of the work.
    trained = {128: softmax.train.steps * softmax.train.batch_tokens}
    assert speed.reading(softmax, trained) == pytest.approx(speed.cost(softmax).hours / 3)


def test_the_gpu_of_a_plan_for_a_cpu_is_refused():
    with pytest.raises(UserError, match="--gpu 4090: --scale nano is for a CPU"):
        reproduce.main(["headline", "--gpu", "4090", "--plan"])


def planned(tables: list[Table], runs: Path) -> tuple[float, int]:
    """Hours on two cores and runs at nano, with nothing trained yet."""
    space = Workspace(SCALES["nano"], parallel=2, runs=runs)
    plan = describe([], jobs_of(tables, space), space, None)
    hours = re.search(r"time .*, ([\d.]+) hours on 2 cores", plan)[1]
    return float(hours), int(re.search(r"runs +(\d+)", plan)[1])


def test_the_hours_in_the_headers_of_the_scripts_are_those_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = list(all_tables("nano").values())
    by_script = {"scripts/reproduce_all.sh": tables.copy()}
    for table in tables:
        by_script.setdefault(table.script, []).append(table)
    wrong, checked = {}, 0
    for script, tables in by_script.items():
        text = (ROOT / script).read_text(encoding="utf-8")
        if found := re.search(r"nano ([\d.]+) on two cores(?: \((\d+) runs)?", text):
            said, (hours, runs) = float(found[1]), planned(tables, tmp_path)
            checked += 1
            if abs(said - hours) > 0.05 + 0.05 * hours or found[2] not in (None, str(runs)):
                wrong[script] = (found[0], hours, runs)
    assert not wrong
    assert checked == 15


def test_the_seconds_in_the_comments_of_the_configs_are_the_recorded_ones():
    """A config that has not run as it is now says no seconds."""
    recorded = json.loads((ROOT / "results/nano/runs.json").read_text())["runs"]
    keys = {run.config: run.key for run in reversed(all_runs("nano").values())}
    keys |= {"nano-softmax": "softmax", "nano-lssar": "lssar-p15"}
    keys["nano-passkey-softmax"] = "passkey-softmax"
    for config, key in keys.items():
        text = (ROOT / f"configs/{config}.toml").read_text(encoding="utf-8")
        said = re.findall(r"one thread of two CPU cores, recorded ([\d,]+) seconds?", text)
        run = recorded.get(f"{key}-s0")
        seconds = [f"{round(run['seconds']):,}"] if run else []
        assert said == seconds, config
    assert len(keys) == 17


# --- all of it, for real -------------------------------------------------------------------------


def test_a_table_is_trained_evaluated_and_drawn_although_one_run_fails(
    tmp_path, monkeypatch, capsys
):
    corpus = make_corpus(tmp_path)
    small = " ".join([*TINY, f"--data.directory={corpus}"])
    runs = {
        "softmax": Run("softmax", "nano-softmax", small),
        "exp": Run("exp", "nano-softmax", f"{small} --train.lr=1e30 --attention.name=exp"),
    }
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(paper.plan, "all_runs", lambda scale: runs)
    scale = replace(
        SCALES["nano"],
        train_length=32,
        eval_tokens=1024,
        seeds={"others": 1},
        corpora={str(corpus): {"arguments": ["none"], "tokens": 1}},
    )
    space = Workspace(scale, runs=tmp_path / "runs", results=tmp_path / "results")
    rows = (Row("softmax", "Softmax", "softmax"), Row("exp", "II", "exp"))
    table = Table("decomposition", "tab:decomsoft", (Column(1, paper="1K"),), rows, None, "bars")
    states = run_all(jobs_of([table], space), tmp_path / "logs", parallel=2)
    monkeypatch.setitem(SCALES, "nano", scale)
    reproduce.show_all([table], space)
    assert states["evaluate softmax-s0"] == "done"
    assert states["evaluate exp-s0"] == "not started: it needs 'train exp-s0'"
    printed = capsys.readouterr().out
    assert re.search(r"Softmax +\d\.\d{3} +1", printed)
    assert re.search(r"II +missing", printed)
    assert (space.folder / "decomposition.png").stat().st_size > 1000
    record = read_runs(space.folder / "runs.json")["softmax-s0"]
    corpora = json.loads((space.folder / "runs.json").read_text())["corpora"]
    assert corpora == {str(corpus): describe_set(corpus)}
    assert record["tokens"] == 24 * 256
    assert (record["status"], record["threads"], record["processes"]) == ("done", 1, 1)
    capsys.readouterr()
    again = run_all(jobs_of([table], space)[:3], tmp_path / "logs", parallel=1)
    assert set(again.values()) == {"done"}
    assert "3 of 3 jobs are done already" in capsys.readouterr().out
