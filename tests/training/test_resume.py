"""What `--resume` notices: other data, another machine, other steps; and what starts a new run."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import write_set
from eval_helpers import tiny_model
from train_helpers import arguments, losses, make_corpus, train_here, weights

from data.identity import BLOCK_BYTES, BLOCKS, check_data_unchanged, identity
from data.shards import open_split
from lssar.errors import UserError
from physics.loader import open_records
from physics.simulate import main as simulate
from training.checkpoint import TRAINER, find, load_moments, read_trainer
from training.optimiser import parameter_groups
from training.run_log import other_machine

CONSTANT = ("--train.schedule=constant", "--train.warmup=2")


@pytest.fixture(scope="module")
def six_steps(corpus, tmp_path_factory):
    """Train six steps at a constant rate, to be copied."""
    runs = tmp_path_factory.mktemp("six")
    assert train_here(*arguments(corpus, runs, *CONSTANT, "--train.steps=6")) == 0
    return runs / "nano-lssar"


def resume(run: Path, corpus: Path, runs: Path, *more: str) -> int:
    """Continue a copy of `run` in `runs`, to eight steps."""
    shutil.copytree(run, runs / run.name)
    given = arguments(corpus, runs, *CONSTANT, "--train.steps=8", *more)
    return train_here(*given, "--resume")


def overwrite(path: Path, place: int, content: bytes) -> None:
    """Change a file in place, as a program does that has it open."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def touch(path: Path) -> None:
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def assert_equal_weights(run: Path, other: Path) -> None:
    mine, theirs = weights(run), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# --- data ----------------------------------------------------------------------------------------


def test_another_corpus_is_refused_and_named_until_it_is_accepted(six_steps, tmp_path, capfd):
    other = make_corpus(tmp_path / "other", ("the sum", "a moon", "one star", "this sea"))
    with pytest.raises(UserError) as refused:
        resume(six_steps, other, tmp_path / "runs")
    line = str(refused.value)
    assert "sha256 of manifest.json: " in line and "--accept-data" in line and "\n" not in line
    shutil.rmtree(tmp_path / "runs")
    capfd.readouterr()
    assert resume(six_steps, other, tmp_path / "runs", "--accept-data") == 0
    assert "warning: training continues on other data" in capfd.readouterr().err
    # What was accepted is what the next checkpoint is of.
    given = arguments(other, tmp_path / "runs", *CONSTANT, "--train.steps=9", "--resume")
    assert train_here(*given) == 0


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_changed_in_place_is_refused_by_name(corpus, six_steps, tmp_path, split):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    (shard,) = copy.glob(f"*_{split}_*.bin")
    overwrite(shard, shard.stat().st_size - 2, b"\x07\x00")
    with pytest.raises(UserError, match=f"{shard.name} is damaged: .*manifest.json says"):
        resume(six_steps, copy, tmp_path / "runs")


def test_a_copied_corpus_continues_bit_for_bit_without_a_word(corpus, six_steps, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy, copy_function=shutil.copyfile)
    for file in copy.iterdir():
        touch(file)
    assert resume(six_steps, copy, tmp_path / "moved") == 0
    assert "warning" not in capfd.readouterr().err
    assert resume(six_steps, corpus, tmp_path / "stayed") == 0
    assert_equal_weights(tmp_path / "moved/nano-lssar", tmp_path / "stayed/nano-lssar")


def check(saved: dict, folder: Path, accept: bool = False) -> str | None:
    now = identity(open_split(folder, "train"), open_split(folder, "val"))
    return check_data_unchanged(saved, now, folder, accept)


def test_shards_without_a_manifest_are_known_by_their_sizes_and_samples(tmp_path):
    small, large = np.arange(5000), np.arange(BLOCKS * BLOCK_BYTES) % 999
    write_set(tmp_path, train=[small, large], val=[small])
    saved = identity(open_split(tmp_path, "train"), open_split(tmp_path, "val"))
    assert check(saved, tmp_path) is None
    first, second = tmp_path / "x_train_000001.bin", tmp_path / "x_train_000002.bin"
    touch(first)
    assert check(saved, tmp_path) is None  # a small file is compared whole
    touch(second)
    assert "x_train_000002.bin was written since" in check(saved, tmp_path)
    overwrite(first, 6000, b"\x01")
    with pytest.raises(UserError, match=r"x_train_000001\.bin: other contents;"):
        check(saved, tmp_path)
    overwrite(second, second.stat().st_size - 1, b"\x01")
    with pytest.raises(UserError, match=r"000001\.bin: other contents; x_train_000002\.bin: other"):
        check(saved, tmp_path)
    assert "000002.bin" in check(saved, tmp_path, accept=True)
    write_set(tmp_path, train=[small, large, small], val=[small[1:]])
    with pytest.raises(UserError, match=r"x_train_000003\.bin: added; x_val_0+\.bin: 11024 -> "):
        check(saved, tmp_path)


def test_changed_labels_of_orbits_are_other_data(tmp_path):
    sizes = (
        "--points",
        "25",
        "--bins",
        "50",
        "--labelled",
        "6",
        "--probed",
        "2",
        "--held-out",
        "2",
    )
    simulate(["forces", "--out", str(tmp_path / "forces"), *sizes])
    ends = {"vocab_size": 53, "channels": 2, "outputs": 1}

    def now() -> dict:
        return identity(*(open_records(tmp_path / "forces", s, **ends) for s in ("train", "val")))

    saved = now()
    assert {"records.json", "labels_train.npy", "labels_val.npy"} <= saved["files"].keys()
    labels = tmp_path / "forces/labels_train.npy"
    overwrite(labels, labels.stat().st_size - 1, b"\x42")
    with pytest.raises(UserError, match=r"labels_train\.npy: other contents"):
        check_data_unchanged(saved, now(), tmp_path / "forces", False)


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train.batch_tokens=32768"], "540 training sequences.*batch_tokens to 17152 "),
        (["--train.batch_tokens=1099511627776", "--train.micro_batch=1"], "set .*batch_tokens to"),
        (
            [f"--{k}=4096" for k in ("train.length", "train.batch_tokens", "eval.tokens")]
            + ["--train.micro_batch=1"],
            "in sequences of 4096; prepare a larger validation set",
        ),
        (
            ["--train.batch_tokens=32768", "--train.micro_batch=1024"],
            "lower train.micro_batch .now",
        ),
    ],
)
def test_too_few_data_are_refused_before_the_first_step(corpus, tmp_path, more, message, dry):
    """A validation set was found too small at the first validation, with nothing saved."""
    given = arguments(corpus, tmp_path, *more, *(["--dry-run"] if dry else []))
    with pytest.raises(UserError, match=message) as refused:
        train_here(*given)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_small_validation_set_is_taken_whole_and_a_long_warm_up_is_cut(corpus, tmp_path, capfd):
    given = ("--eval.tokens=32000", "--train.steps=20", "--train.warmup=100", "--dry-run")
    assert train_here(*arguments(corpus, tmp_path, *given)) == 0
    assert "validation takes the 3,904 tokens there are" in capfd.readouterr().out
    assert train_here(*arguments(corpus, tmp_path, *given[:-1])) == 0
    said = capfd.readouterr().err
    assert "validation takes the 3,904 tokens there are" in said
    assert "train.warmup = 100 is longer than train.steps = 20; cut to 2" in said


def test_the_sizes_that_are_offered_are_possible(corpus, tmp_path):
    offered = ("--eval.tokens=3904", "--train.batch_tokens=17152", "--train.steps=1")
    assert train_here(*arguments(corpus, tmp_path, *offered, "--train.warmup=1")) == 0


# --- the machine ---------------------------------------------------------------------------------


def test_another_number_of_threads_is_recorded_and_said(corpus, six_steps, tmp_path, capfd):
    threads = torch.get_num_threads()
    assert json.loads((six_steps / "run.json").read_text())["threads"] == threads
    try:
        torch.set_num_threads(threads + 1)
        assert resume(six_steps, corpus, tmp_path) == 0
    finally:
        torch.set_num_threads(threads)
    (line,) = (s for s in capfd.readouterr().err.splitlines() if "warning" in s)
    assert f"threads {threads} -> {threads + 1}" in line
    assert f"OMP_NUM_THREADS={threads}" in line


def test_the_threads_beside_a_gpu_change_nothing_and_its_name_does():
    saved = {"torch": "2.13", "processes": 8, "device": "A100", "threads": 4}
    assert other_machine(saved, saved | {"threads": 5}) is None
    assert "device A100 -> H100" in other_machine(saved, saved | {"device": "H100"})


# --- steps ---------------------------------------------------------------------------------------


def test_more_steps_at_a_constant_rate_are_those_of_a_longer_run(corpus, six_steps, tmp_path):
    longer = arguments(corpus, tmp_path, *CONSTANT, "--train.steps=13", "--log.name=longer")
    assert train_here(*longer) == 0
    shutil.copytree(six_steps, tmp_path / "nano-lssar")
    given = arguments(corpus, tmp_path, *CONSTANT, "--train.steps=13", "--resume")
    assert train_here(*given) == 0
    assert_equal_weights(tmp_path / "nano-lssar", tmp_path / "longer")
    trained = [[m for m in losses(tmp_path / r) if m[1]] for r in ("nano-lssar", "longer")]
    assert trained[0] == trained[1]
    with pytest.raises(UserError, match=r"train\.steps = 12, but .* has done 13"):
        train_here(*given, "--train.steps=12")


def test_a_longer_cosine_is_refused_with_the_way_to_it(corpus, tmp_path):
    given = arguments(corpus, tmp_path, "--train.steps=6")
    assert train_here(*given) == 0
    with pytest.raises(UserError, match=r"train\.steps: 6 -> 9; .*--train\.init_optimiser=true"):
        train_here(*given, "--resume", "--train.steps=9")
    new = (f"--train.init_from={tmp_path / 'nano-lssar'}", "--train.init_optimiser=true")
    assert train_here(*given, *new, "--train.steps=9", "--log.name=second") == 0
    assert train_here(*given, "--resume", "--train.steps=9", "--log.name=second") == 0


def moments(run: Path) -> dict[int, dict]:
    return read_trainer(find(run))["optimiser"]["state"]


def test_a_new_run_takes_the_optimisers_moments_and_keeps_its_own_rates(
    corpus, six_steps, tmp_path
):
    given = (f"--train.init_from={six_steps}", "--train.steps=1", "--train.warmup=0")
    given = arguments(corpus, tmp_path, *given, "--train.lr=1e-4", "--train.weight_decay=0.3")
    assert train_here(*given, "--log.name=weights") == 0
    assert train_here(*given, "--log.name=both", "--train.init_optimiser=true") == 0
    old, alone, both = map(moments, (six_steps, tmp_path / "weights", tmp_path / "both"))
    for i in old:
        assert (old[i]["step"], alone[i]["step"], both[i]["step"]) == (6, 1, 7)
        # The gradient is the same in both, and its share of a moment is what weights alone give.
        for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.95)):
            torch.testing.assert_close(both[i][name], beta * old[i][name] + alone[i][name])
    (decayed, _) = read_trainer(find(tmp_path / "both"))["optimiser"]["param_groups"]
    assert (decayed["lr"], decayed["weight_decay"]) == (1e-4, 0.3)


def test_an_optimiser_that_does_not_fit_or_is_not_there_is_refused(corpus, six_steps, tmp_path):
    shutil.copytree(six_steps, tmp_path / "bare")
    given = arguments(corpus, tmp_path, "--train.init_optimiser=true")
    with pytest.raises(UserError, match=r"train\.init_optimiser = True: needs train\.init_from"):
        train_here(*given)
    given.append(f"--train.init_from={tmp_path / 'bare'}")
    with pytest.raises(UserError, match="has another architecture"):
        train_here(*given, "--model.layers=1", "--log.name=a")
    for other in (tiny_model(width=32, layers=1), tiny_model(width=48)):
        optimiser = torch.optim.AdamW(parameter_groups(other, 0.1))
        with pytest.raises(UserError, match="is not that of this model's parameters"):
            load_moments(optimiser, tmp_path / "bare")
    (find(tmp_path / "bare") / TRAINER).unlink()
    with pytest.raises(UserError, match=rf"{TRAINER} (does not exist|is missing)"):
        train_here(*given, "--log.name=c")


# --- lengths -------------------------------------------------------------------------------------


def test_lengths_mixed_in_training_resume_bit_for_bit_and_make_another_model(
    corpus, six_steps, tmp_path
):
    mixed = (*CONSTANT, "--train.long_length=64", "--train.long_interval=2")
    given = arguments(corpus, tmp_path / "once", *mixed, "--train.steps=6")
    assert train_here(*given) == 0
    for steps in (3, 6):
        given = arguments(corpus, tmp_path / "twice", *mixed, f"--train.steps={steps}")
        assert train_here(*given, *(["--resume"] if steps == 6 else [])) == 0
    whole = tmp_path / "once" / six_steps.name
    assert_equal_weights(whole, tmp_path / "twice" / six_steps.name)
    plain = weights(six_steps)
    assert not all(torch.equal(plain[name], w) for name, w in weights(whole).items())
