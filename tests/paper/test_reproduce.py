"""Reproducing the paper: a whole registry, a plan that adds up, a table made for real."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cases import cases
from train_helpers import TINY, make_corpus

import paper.jobs
import reproduce
from evaluating.results import read_results
from lssar.errors import UserError
from paper.collect import collect
from paper.experiments import (
    FACTORS,
    SCALES,
    Column,
    Row,
    Run,
    Table,
    all_runs,
    all_tables,
    check_variants,
    load_toml,
    paper_numbers,
)
from paper.jobs import Workspace, describe, jobs_of, run_all
from paper.tables import FilledTable
from support import command
from support.files import locked
from training.config import load_config
from training.estimate import gpu_hours

ROOT = Path(__file__).parents[2]


# --- the registry --------------------------------------------------------------------------------


def test_the_paper_needs_27_fineweb_8_sweep_3_pi_and_6_edu_runs():
    runs = all_runs("paper")
    controls = {"softmax-p15-naive", "cos-softmax", "no-pi-2x", "no-pi-4x", "no-pi-8x"}
    kinds = {
        "fineweb": [k for k in runs if k in load_toml("runs.toml")["main"] and k not in controls],
        "edu": [k for k in runs if k.startswith("edu-")],
        "pi": [k for k in runs if k.startswith("pi-")],
    }
    assert {kind: len(keys) for kind, keys in kinds.items()} == {"fineweb": 27, "edu": 6, "pi": 3}
    rest = runs.keys() - controls - {k for keys in kinds.values() for k in keys}
    assert rest == {f"{s}-p{p}" for s in ("softmax", "lssar") for p in (1, 5, 10, 20)}


def test_a_run_is_trained_at_the_rate_of_its_row_or_mechanism(monkeypatch):
    monkeypatch.chdir(ROOT)
    space = Workspace(SCALES["nano"])
    runs = all_runs("nano")
    rates = SCALES["nano"].rates
    own = load_config("configs/nano-softmax.toml").train.lr
    fine_tuned = load_config("configs/nano-pi.toml").train.lr
    wanted = {
        "softmax": own,
        "ssmax": rates["ssmax"],
        "lssar-p15": rates["lssar"],
        "lssar-p3": rates["lssar-p3"],
        "passkey-lssar": rates["lssar"],
        "pi-2x": fine_tuned,
        "lssar-muon": 2e-2,
    }
    for key, rate in wanted.items():
        assert space.config(runs[key], seed=0).train.lr == rate, key


def test_every_run_has_a_valid_config_of_its_mechanism(monkeypatch):
    monkeypatch.chdir(ROOT)
    for scale in cases(SCALES):
        space = Workspace(SCALES[scale], processes=SCALES[scale].gpus or 1)
        for key, run in all_runs(scale).items():
            config = space.config(run, seed=3)
            assert config.train.seed == 3
            assert config.run_directory == Path("runs") / scale / f"{key}-s3"
            assert config.data.directory in SCALES[scale].corpora
            main = load_toml("runs.toml")["main"]
            if key in main:
                options = re.findall(r"--attention\.(\w+)=(\S+)", main[key].get("options", ""))
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
        assert printed["rows"], label
        for values in printed["rows"].values():
            assert len(values) == len(printed["columns"]), label


def test_every_row_names_a_run_that_exists():
    for scale in cases(SCALES):
        runs = all_runs(scale)
        for table in all_tables(scale).values():
            for row in table.rows if not table.measure and not table.records else ():
                for column in table.columns:
                    run = runs[column.run(row.run)]
                    passkey = table.measured_by == "passkey"
                    assert column.factor in (FACTORS["passkey"] if passkey else run.factors)
                    assert passkey or row.variant != "window" or run.windows
                    alpha = row.variant.removeprefix("alpha=")
                    assert alpha == row.variant or float(alpha) in run.alphas
                    assert row.variant != "L=current" or run.current
            assert not table.records or table.records in all_tables(scale)
            assert table.baseline is None or table.baseline in {row.key for row in table.rows}


def test_a_row_whose_variant_no_evaluation_makes_is_refused():
    for variant in ("window=256", "window, sinks=5", "alpha=0.10", "alpha=7", "ntk", "L = current"):
        row = Row("softmax", "Softmax", "softmax", variant)
        with pytest.raises(UserError, match="'softmax' of 'far' has an unknown variant"):
            check_variants("far", [row], "nano")


def test_every_extrapolation_table_has_a_sliding_window_beside_it():
    for scale in cases(SCALES):
        for table in all_tables(scale).values():
            lengths = {column.factor for column in table.columns if column.quantity == "loss"}
            if 16 in lengths and table.name not in ("p_sweep", "p_length"):
                assert any(row.variant.startswith("window") for row in table.rows), table.name


def test_every_table_has_a_script_that_makes_it():
    tables = all_tables("paper")
    for name in cases(tables):
        script = ROOT / tables[name].script
        text = script.read_text()
        assert script.stat().st_mode & 0o100
        assert "SCALE:-nano" in text
        if name != "headline":
            called = re.search(r"reproduce\.py (\w+)", text).group(1)
            assert tables[called].script == tables[name].script


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


def test_a_number_that_is_none_is_one_clear_line():
    for option in cases(["--seeds=0,x", "--seeds=", "--jobs=0", "--gpus=-1", "--jobs=two"]):
        with pytest.raises(UserError, match=r"is not a whole number|must be at least 1"):
            reproduce.main(["headline", option])


def test_a_scale_without_its_gpus_is_refused_before_anything_starts(monkeypatch):
    examples = [
        ("paper", "8 GPUs, and here are 0; --gpus N"),
        ("single", "a GPU, and here are 0; --gpus N"),
    ]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: 0)
    for scale, said in cases(examples):
        with pytest.raises(UserError, match=f"--scale {scale} trains on {said}"):
            reproduce.main(["decomposition", "--scale", scale])


def test_uncommitted_code_is_refused_unless_allowed_and_then_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its runs/ may be in use, or another user's, in the checkout
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
    five |= {"far"}
    assert {key for key, count in seeds.items() if count == 5} == five
    assert {count for key, count in seeds.items() if key not in five} == {3}
    for scale in ("single", "paper"):
        counts = {key: len(SCALES[scale].seeds_of(key)) for key in all_runs(scale)}
        assert {key for key, count in counts.items() if count == 3} == {"softmax", "lssar-p15"}


def test_a_run_has_the_seeds_of_the_run_it_starts_from():
    for scale in cases(SCALES):
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


# --- all of it, for real -------------------------------------------------------------------------


def test_a_table_is_trained_evaluated_and_collected_although_one_run_fails(
    tmp_path, monkeypatch, capsys
):
    corpus = make_corpus(tmp_path)
    small = " ".join([*TINY, f"--data.directory={corpus}"])
    runs = {
        "softmax": Run("softmax", "nano-softmax", small),
        "exp": Run("exp", "nano-softmax", f"{small} --train.lr=1e30 --attention.name=exp"),
    }
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(paper.jobs, "all_runs", lambda scale: runs)
    scale = replace(
        SCALES["nano"],
        train_length=32,
        eval_tokens=1024,
        seeds={"others": 1},
        corpora={str(corpus): {"arguments": ["none"], "tokens": 1}},
    )
    space = Workspace(scale, runs=tmp_path / "runs", results=tmp_path / "results")
    rows = (Row("softmax", "Softmax", "softmax"), Row("exp", "II", "exp"))
    columns = (Column(1, paper="1K"),)
    table = Table("decomposition", "tab:decomsoft", "title", "nats", columns, rows)
    states = run_all(jobs_of([table], space), tmp_path / "logs", parallel=2)
    collect([table], space)
    assert states["evaluate softmax-s0"] == "done"
    assert states["evaluate exp-s0"] == "not started: it needs 'train exp-s0'"
    results = read_results(space.folder / "decomposition.json")
    (run,) = [run for run in results.runs.values() if run["run"] == "softmax"]
    assert (run["seed"], run["step"]) == (0, 24)
    assert run["trained_at"] and all(r.revision for r in results.records)
    monkeypatch.setitem(SCALES, "nano", scale)
    text = FilledTable(table, "nano", results).text()
    assert re.search(r"Softmax +\d\.\d{3} +1", text)
    assert re.search(r"II +missing", text)
    capsys.readouterr()
    again = run_all(jobs_of([table], space)[:3], tmp_path / "logs", parallel=1)
    assert set(again.values()) == {"done"}
    assert "3 of 3 jobs are done already" in capsys.readouterr().out


def test_a_second_reproduce_is_refused_while_one_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "jobs_of", lambda *given: [])
    refused = pytest.raises(UserError, match=r"runs/nano is being written.*another reproduce.py")
    with locked(tmp_path / "runs/nano"), refused:
        reproduce.main(["headline", "--allow-dirty"])


def test_the_plan_adds_up(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    scale = SCALES["paper"]
    space = Workspace(scale, seeds=(0,), processes=8, runs=tmp_path)
    plan = describe(
        ["decomposition"], jobs_of([all_tables("paper")["decomposition"]], space), space
    )
    train = load_config(f"configs/{scale.config}.toml", world_size=8).train
    assert f"tokens      {4 * train.steps * train.batch_tokens:,}\n" in plan
    flops = float(re.search(r"FLOPs +(\S+)", plan)[1])
    hours = float(re.search(r"time +([\d.]+) a100-hours", plan)[1])
    assert hours == pytest.approx(gpu_hours(flops), rel=0.01)
    assert plan.count("parameters") == 4 and "GiB per GPU" in plan
    orbits = describe(["physics"], [], space)  # pre-training and two tasks, of two mechanisms
    assert "runs        6, of which 6 are still to be trained" in orbits
