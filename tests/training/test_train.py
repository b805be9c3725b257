"""Training: what a run promises about its numbers, its signals and its errors."""

import contextlib
import json
import math
import shutil
import signal
import subprocess

import pytest
import torch
from train_helpers import (
    arguments,
    assert_close_run,
    command,
    environment,
    losses,
    run_process,
    train_here,
    weights,
)

import eval_extrapolation
import export_hf
import generate
import train
from lssar.errors import UserError
from support import files
from train import EXIT_DIVERGED, EXIT_PREEMPTED
from training.checkpoint import Store, _check_trainer, load_model, read_trainer, save_model
from training.config import load_config
from training.distributed import World
from training.run_log import RunLog


def test_a_checkpoint_says_with_which_seed_it_was_trained(corpus, tmp_path):
    short = ("--train.steps=1", "--train.warmup=0", "--train.seed=41")
    assert train_here(*arguments(corpus, tmp_path, *short)) == 0
    assert load_model(tmp_path / "nano-lssar")[1].seed == 41


def assert_same_run(run, whole_run):
    assert losses(run) == losses(whole_run)
    mine, reference = weights(run), weights(whole_run)
    assert mine.keys() == reference.keys()
    for name in reference:
        assert torch.equal(mine[name], reference[name]), name


def test_masked_documents_are_part_of_the_model(corpus, whole_run, tmp_path, capfd):
    """In training, evaluation, generation and --resume."""
    short = ("--data.document_mask=true", "--train.steps=8", "--checkpoint.interval=4")
    assert train_here(*arguments(corpus, tmp_path, *short)) == 0
    run = tmp_path / "nano-lssar"
    model, _ = load_model(run)
    assert model.config.documents and not load_model(whole_run)[0].config.documents
    with pytest.raises(UserError, match="document_mask"):
        train_here(*arguments(corpus, tmp_path, *short[1:], "--resume"))
    measure = [str(run), "--data", str(corpus), "--lengths=32,64", "--tokens=512"]
    eval_extrapolation.main([*measure, "--out", str(tmp_path / "x.json")])
    generate.main([str(run), "--tokens=8", "--greedy"])
    with pytest.raises(UserError, match=r"data\.document_mask = true.*train without it"):
        export_hf.main([str(run), str(tmp_path / "hf")])


def test_a_run_leaves_config_revision_metrics_checkpoints_and_curve(whole_run):
    names = {p.name for p in whole_run.iterdir()}
    assert {"config.toml", "run.json", "metrics.jsonl", "loss.png", "checkpoints"} <= names
    assert json.loads((whole_run / "run.json").read_text())["revision"]
    assert load_config(whole_run / "config.toml").train.steps == 24
    model, info = load_model(whole_run)
    assert (info.step, info.train_length, info.tokeniser) == (24, 32, "bytes")
    assert model.config.attention.name == "lssar"
    assert not list(whole_run.rglob("*.tmp"))


def test_keeps_the_last_k_checkpoints_and_the_best(corpus, tmp_path):
    more = ("--eval.interval=1", "--checkpoint.interval=1", "--checkpoint.keep=3")
    # The learning rate of a diverging run: the best checkpoint is an early one.
    assert train_here(*arguments(corpus, tmp_path, *more, "--train.lr=3", "--train.steps=12")) == 0
    run = tmp_path / "nano-lssar"
    validated = {step: loss for step, _, loss in losses(run) if loss is not None}
    best = min(validated, key=validated.get)
    kept = {p.name for p in (run / "checkpoints").glob("step-*")}
    assert best < 10
    assert kept == {f"step-{s:08d}" for s in (best, 10, 11, 12)}
    assert (run / "checkpoints/best").read_text().strip() == f"step-{best:08d}"


def test_resume_is_bit_exact_after_a_stop_at_any_step(corpus, whole_run, tmp_path):
    """Stop by SIGINT in the middle, resume, compare with the run that was never stopped."""
    given = arguments(corpus, tmp_path)
    process = subprocess.Popen(
        command(*given), stderr=subprocess.PIPE, text=True, env=environment()
    )
    for line in process.stderr:
        if line.startswith("step 7/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait() == EXIT_PREEMPTED, rest
    assert "stopped by SIGINT" in rest
    step = load_model(tmp_path / "nano-lssar")[1].step
    assert 7 <= step < 24
    assert train_here(*given, "--status") == EXIT_PREEMPTED
    assert train_here(*given, "--resume") == 0
    assert_same_run(tmp_path / "nano-lssar", whole_run)
    assert train_here(*given, "--status") == 0


def test_resume_is_bit_exact_after_kill_9(corpus, whole_run, tmp_path):
    """With a checkpoint at every step; the drill kills at every change of a file."""
    given = (*arguments(corpus, tmp_path), "--checkpoint.interval=1")
    process = subprocess.Popen(
        command(*given), stderr=subprocess.PIPE, text=True, env=environment()
    )
    for line in process.stderr:
        if line.startswith("step 9/"):
            process.kill()
            break
    process.stderr.read()
    assert process.wait() in (-signal.SIGKILL, 0)
    store = Store(tmp_path / "nano-lssar")
    assert store.candidates()
    assert train_here(*given, "--resume") == 0
    assert_same_run(tmp_path / "nano-lssar", whole_run)
    assert not list(tmp_path.rglob("*.tmp"))


def test_status_of_a_run_that_did_not_save_or_was_killed_is_neither_finished_nor_stopped(
    corpus, tmp_path, capsys
):
    given = arguments(corpus, tmp_path)
    assert train_here(*given, "--status") == 1
    assert "0 of 24 steps are saved; not finished" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert train_here(*given, "--train.steps=5", "--train.schedule=constant") == 0
    (tmp_path / "nano-lssar/run.json").write_text("{")
    assert train_here(*given, "--status") == 1
    assert "5 of 24 steps are saved; not finished" in capsys.readouterr().out


# Sums over ranks are taken in another order. Softmax carries that through 24 steps at 1e-6; the
# early, nearly uniform rows of LSSAR amplify it, whatever computes them.
def test_one_process_with_four_micro_batches_equals_two_with_two(corpus, tmp_path):
    more = ("--train.micro_batch=2", "--train.steps=10")
    assert train_here(*arguments(corpus, tmp_path / "one", *more, config="nano-softmax")) == 0
    two = arguments(corpus, tmp_path / "two", *more, config="nano-softmax")
    result = run_process(*two, processes=2)
    assert result.returncode == 0, result.stderr
    assert_close_run(tmp_path / "one/nano-softmax", tmp_path / "two/nano-softmax", 1e-5)


def test_resume_with_another_number_of_processes_sees_the_same_data(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.micro_batch=4", config="nano-softmax")
    assert train_here(*given) == 0
    result = run_process(*given, "--log.name=two", processes=2)
    assert result.returncode == 0, result.stderr
    shutil.rmtree(tmp_path / "two/checkpoints/step-00000024")
    assert load_model(tmp_path / "two")[1].step == 20
    assert train_here(*given, "--log.name=two", "--resume") == 0
    assert_close_run(tmp_path / "two", tmp_path / "nano-softmax", 1e-5)


def test_a_damaged_latest_checkpoint_falls_back_to_the_previous(corpus, whole_run, tmp_path, capfd):
    given = arguments(corpus, tmp_path)
    assert train_here(*given) == 0
    run = tmp_path / "nano-lssar"
    latest = run / "checkpoints/step-00000024"
    for name in ("model.safetensors", "trainer.pt"):
        whole = (latest / name).read_bytes()
        (latest / name).write_bytes(whole[: len(whole) // 2])
        assert train_here(*given, "--resume") == 0
        assert "warning: passing over" in capfd.readouterr().err
        assert_same_run(run, whole_run)


def test_resume_passes_over_weights_that_are_not_finite(corpus, whole_run, tmp_path, capfd):
    given = arguments(corpus, tmp_path)
    assert train_here(*given) == 0
    run = tmp_path / "nano-lssar"
    latest = run / "checkpoints/step-00000024"
    model, info = load_model(latest)
    with torch.no_grad():
        model.norm.bias[7] = math.nan
    save_model(latest, model, info)  # whole and with the right checksums
    assert train_here(*given, "--resume") == 0
    said = capfd.readouterr().err
    assert "warning: passing over" in said
    assert "norm.bias has weights that are not finite" in said
    assert_same_run(run, whole_run)
    save_model(latest, model, info)
    with pytest.raises(UserError, match=r"norm\.bias has weights that are not finite"):
        train_here(*arguments(corpus, tmp_path / "tuned", f"--train.init_from={latest}"))


def test_resume_with_a_contradicting_config_lists_the_differences(corpus, whole_run):
    given = arguments(corpus, whole_run.parent, "--resume")
    with pytest.raises(UserError) as refused:
        train_here(*given, "--train.lr=0.5", "--attention.p=3")
    assert "train.lr: 0.003 -> 0.5" in str(refused.value)
    assert "attention.p: 15.0 -> 3.0" in str(refused.value)
    assert train_here(*given, "--log.interval=3") == 0  # finished already, nothing contradicts


def test_a_run_is_never_overwritten_without_being_asked(corpus, whole_run):
    with pytest.raises(UserError, match="continue it with --resume"):
        train_here(*arguments(corpus, whole_run.parent))


def test_a_second_run_in_the_same_directory_is_refused(corpus, tmp_path):
    path, *overrides = arguments(corpus, tmp_path)
    config, world = load_config(path, overrides), World(0, 1, torch.device("cpu"))
    with RunLog(config, world):
        assert run_process(path, *overrides).returncode == 2
        with pytest.raises(UserError, match=r"by another process; choose another --log\.name"):
            RunLog(config, world)
    assert train_here(path, *overrides) == 0


def test_a_diverging_run_stops_with_the_numbers_and_a_good_checkpoint(corpus, tmp_path, capfd):
    given = arguments(corpus, tmp_path, "--train.clip=0", "--train.schedule=constant")
    code = train_here(*given, "--train.lr=1e30", "--train.steps=100", "--checkpoint.interval=1")
    assert code == EXIT_DIVERGED
    shown = capfd.readouterr().err
    assert "not finite" in shown and "train.lr" in shown
    run = tmp_path / "nano-lssar"
    for path in Store(run).candidates():
        assert all(t.isfinite().all() for t in weights(path).values())


def test_one_bad_step_is_skipped_and_said(corpus, tmp_path, capfd, monkeypatch):
    accumulate = train.accumulate

    def poisoned(run, step):
        loss = accumulate(run, step)
        if step in (3, 4):
            run.model.norm.weight.grad[0] = math.nan
        return loss

    monkeypatch.setattr(train, "accumulate", poisoned)
    given = arguments(corpus, tmp_path, "--train.steps=8")
    assert train_here(*given, "--train.max_skipped_steps=2") == 0
    shown = capfd.readouterr().err
    assert "step 3 is not finite and was skipped: gradient norm nan" in shown
    assert "batch of token offsets" in shown
    assert all(t.isfinite().all() for t in weights(tmp_path / "nano-lssar").values())
    given = arguments(corpus, tmp_path / "strict", "--train.steps=8")
    assert train_here(*given, "--train.max_skipped_steps=1") == EXIT_DIVERGED
    assert "2 steps in a row were not finite, the last was 4" in capfd.readouterr().err


def test_validating_and_sampling_more_often_changes_nothing(corpus, whole_run, tmp_path):
    more = ("--eval.interval=1", "--eval.sample_interval=2", "--checkpoint.interval=3")
    assert train_here(*arguments(corpus, tmp_path, *more)) == 0
    mine, reference = weights(tmp_path / "nano-lssar"), weights(whole_run)
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


def test_a_tiny_run_learns(corpus, tmp_path):
    """The corpus repeats itself: a model that learned is far below the 5.5 nats of chance."""
    given = arguments(corpus, tmp_path, "--train.steps=150", "--train.lr=1e-2")
    assert train_here(*given, "--eval.interval=150") == 0
    assert load_model(tmp_path / "nano-lssar")[1].val_loss < 1.2


def test_fine_tuning_starts_from_another_runs_weights(corpus, whole_run, tmp_path):
    given = arguments(
        corpus,
        tmp_path,
        f"--train.init_from={whole_run}",
        "--train.length=64",
        "--model.interpolation=2.0",
        "--train.schedule=constant",
        "--train.steps=4",
        "--train.micro_batch=4",
    )
    assert train_here(*given) == 0
    first = losses(tmp_path / "nano-lssar")[0][1]
    assert first < losses(whole_run)[0][1] - 1
    assert load_model(tmp_path / "nano-lssar")[0].config.interpolation == 2.0
    with pytest.raises(UserError, match="another architecture"):
        train_here(*given, "--model.width=64", "--log.name=other")


def test_a_kill_between_the_pointers_loses_no_best_model(corpus, whole_run, tmp_path, monkeypatch):
    """At every writing of a pointer: both pointers and what is kept are an undisturbed run's."""
    expected = {p.name: p.read_text() for p in (whole_run / "checkpoints").glob("[lb]*")}
    kept = sorted(p.name for p in (whole_run / "checkpoints").glob("step-*"))

    class Killed(BaseException):
        pass

    write = files.write_text
    for number in (1, 2, 3, 5, 7):
        runs = tmp_path / str(number)
        written = []

        def dying(path, text, number=number, written=written):
            if path.name in ("latest", "best"):
                written.append(path.name)
                if len(written) == number:
                    raise Killed
            write(path, text)

        with monkeypatch.context() as patch:
            patch.setattr(files, "write_text", dying)
            with contextlib.suppress(Killed):
                train_here(*arguments(corpus, runs))
        assert train_here(*arguments(corpus, runs, "--resume")) == 0
        found = runs / "nano-lssar/checkpoints"
        assert {p.name: p.read_text() for p in found.glob("[lb]*")} == expected, number
        assert sorted(p.name for p in found.glob("step-*")) == kept, number


def test_a_trainer_state_with_the_wrong_things_is_one_line(whole_run):
    state = read_trainer(Store(whole_run).candidates()[0])
    for change in ({"progress": {"step": "a"}}, {"rng": [3]}, {"optimiser": {}}, {"data": 1}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            _check_trainer(state | change)
