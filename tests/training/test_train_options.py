"""What a run is asked for: bf16, wandb, a rate, a dry run; and the mistakes in asking."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import cases
from checkout import tracked
from train_helpers import (
    ROOT,
    arguments,
    assert_close_run,
    command,
    environment,
    train_here,
)

import train
from lssar import cpu, cpu_build
from lssar.errors import UserError
from physics import train as orbits
from support.command import SECONDS_FOR_RANK_0, _report
from train import learning_rate
from training import distributed
from training.config import load_config
from training.estimate import gpu_hours


def without_isa_limit() -> dict[str, str]:
    """Return the environment of a user, without what tests/conftest.py sets."""
    return {k: v for k, v in environment().items() if k != "ONEDNN_MAX_CPU_ISA"}


announces_amx = pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "amx_tile" not in Path("/proc/cpuinfo").read_text(),
    reason="the processor does not announce AMX",
)


@announces_amx
def test_bf16_does_not_die_of_amx_that_is_announced_but_missing(corpus, whole_run, tmp_path):
    """It ended with `Illegal instruction` on virtual machines that pass on the flag alone."""
    given = arguments(corpus, tmp_path, "--train.precision=bf16")
    done = subprocess.run(
        command(*given), capture_output=True, text=True, timeout=300, env=without_isa_limit()
    )
    assert done.returncode == 0, done.stderr
    assert_close_run(tmp_path / "nano-lssar", whole_run, tolerance=0.05)
    assert done.stderr.count("bf16 without AMX") <= 1  # none where AMX is real


@announces_amx
def test_bf16_that_can_no_longer_be_made_safe_is_one_line():
    """After its first product, oneDNN does not look at the environment again."""
    program = (
        "import torch\n"
        "from training.distributed import autocast\n"
        "x = torch.ones(64, 64)\n"
        "x @ x\n"
        "with autocast(torch.device('cpu'), 'bf16'):\n"
        "    print((x @ x).dtype)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, env=without_isa_limit(),
    )  # fmt: skip
    if done.returncode:
        assert "UserError: bf16 fails on this processor; set ONEDNN_MAX_CPU_ISA=" in done.stderr
    else:  # AMX is real
        assert done.stdout == "torch.bfloat16\n"


def test_bf16_trains_to_about_the_same_losses(corpus, whole_run, tmp_path):
    assert train_here(*arguments(corpus, tmp_path, "--train.precision=bf16")) == 0
    assert_close_run(tmp_path / "nano-lssar", whole_run, 0.03)


def test_wandb_without_a_key_is_offline_and_asks_nothing(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.steps=5", "--log.wandb=true")
    alone = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    if cpu.unavailable() is None:  # a home without the kernel would have it compiled again
        alone["LSSAR_CACHE"] = str(cpu_build.build().parent)
    result = subprocess.run(
        command(*given),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        env=environment() | alone,
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "nano-lssar").rglob("offline-run-*"))


def test_learning_rate_warms_up_and_ends_at_zero():
    config = load_config(ROOT / "configs/gpt2-124m-lssar.toml")
    assert learning_rate(config, 0) == pytest.approx(6e-4 / 700)
    assert learning_rate(config, 699) == pytest.approx(6e-4)
    middle = (700 + 18865) // 2
    assert learning_rate(config, middle) == pytest.approx(3e-4, rel=1e-3)
    assert learning_rate(config, 18865) == pytest.approx(0)
    fine_tune = load_config(ROOT / "configs/gpt2-124m-lssar-pi.toml")
    assert learning_rate(fine_tune, 1999) == 6e-5


def test_every_config_has_a_dry_run(capsys):
    for path in cases(tracked("configs/*.toml")):
        alone = "nano" in path.stem or path.stem.endswith(("-magnitude", "-vector"))
        processes = "1" if alone else "8"
        main = orbits.main if path.stem.startswith("physics") else train.main
        assert main([str(path), "--dry-run", "--world-size", processes]) == 0
        shown = capsys.readouterr().out
        words = ["parameters", "tokens per step", "GiB per process", "A100-hours at 40%"]
        for word in cases([*words, "are free", "data"]):
            assert word in shown


def test_a_users_mistake_is_named_with_what_to_do(corpus, tmp_path):
    examples = [
        (["--data.directory=/nowhere"], "text FILES --tokeniser bytes --out /nowhere"),
        (["--train.lr=fast"], "command line: train.lr = 'fast'"),
        (["--train.micro_batch=3"], "micro_batch"),
        (["--attention.name=lsar"], "did you mean 'lssar'"),
        (["--train.init_from=/nowhere"], "/nowhere"),
        (["--resum"], "--section.key=value"),
        (["--dry-run", "--world-size", "0"], "--world-size: '0' must be at least 1"),
        (["--model.layers=1000000000"], "at most 1000"),
        (["--model.width=96000000"], "GiB of main memory"),
        (["--log.directory=/proc/none"], "/proc/none"),
    ]
    if not torch.cuda.is_available():
        examples.append((["--device", "cuda"], "no GPU found"))
    for more, message in cases(examples):
        with pytest.raises(UserError) as refused:
            train_here(*arguments(corpus, tmp_path, *more))
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_mistake_under_torchrun_is_printed_once_and_last(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.lr=1e400")
    done = subprocess.run(
        command(*given, processes=2), capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 1
    message = "error: command line: train.lr = inf: is too large"
    assert done.stderr.count(message) == 1
    assert message in "".join(done.stderr.splitlines()[-2:])


def test_a_mistake_that_torchrun_will_not_report_is_printed(tmp_path, capsys, monkeypatch):
    """It reports the last attempt alone."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for attempt, printed in (("0", "error: a\\nb\n"), ("1", "")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert _report("a\nb") == 2
        assert capsys.readouterr().err == printed
    assert json.loads(report.read_text())["message"]["message"] == "error: a\\nb"


def test_other_processes_let_the_first_one_report_a_mistake(monkeypatch):
    for rank, waits in (("0", []), ("1", [SECONDS_FOR_RANK_0])):
        waited = []
        monkeypatch.setattr("support.command.time.sleep", waited.append)
        monkeypatch.setenv("RANK", rank)
        assert _report("a mistake") == 2
        assert waited == waits, rank


@pytest.mark.parametrize(
    ("config", "made", "command"),
    [
        ("nano-lssar", "stdlib", "data/prepare.py stdlib"),
        ("gpt2-124m-lssar", "fineweb10B", "data/prepare.py fineweb"),
        ("physics-109m-vector", "physics/planets", "physics/simulate.py planets"),
    ],
)
def test_without_its_data_a_config_says_how_they_are_made(
    config, made, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for _missing_then_empty in range(2):
        with pytest.raises(UserError) as error:
            (orbits if config.startswith("physics") else train).main([config])
        assert str(error.value).endswith(f"with: python {command} --out corpora/{made}")
        (tmp_path / "corpora" / made).mkdir(parents=True, exist_ok=True)


def test_variables_of_torchrun_that_do_not_belong_together_are_one_line(monkeypatch):
    cases = (
        ({"RANK": "7"}, "RANK=7 in the environment without WORLD_SIZE"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' in the environment is no whole"),
        ({"WORLD_SIZE": "9" * 5000, "RANK": "0"}, "in the environment is no whole"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment without RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "5"}, "LOCAL_RANK=5 must be below"),
    )
    for given, message in cases:
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            with pytest.raises(UserError, match=message):
                distributed.place()
    assert distributed.place() == (0, 1, 0)


def test_processes_that_cannot_meet_are_told_so_in_one_line(monkeypatch):
    """They were tracebacks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for port in (None, "abc", "99999999"):
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(
            UserError, match=r"process 0 cannot meet the others .*torchrun"
        ) as error:
            distributed.start("cpu")
        assert "\n" not in str(error.value), port


def test_a_failed_start_leaves_no_folder(tmp_path, corpus):
    with pytest.raises(UserError, match="no checkpoint at"):
        train.main(arguments(corpus, tmp_path, "--train.init_from=/nowhere"))
    assert not list(tmp_path.iterdir())


def test_gpu_hours_are_flops_at_one_utilisation():
    assert gpu_hours(0.4 * 312e12 * 3600) == pytest.approx(1.0)
    assert gpu_hours(1e20, "h100") < gpu_hours(1e20, "a100")
