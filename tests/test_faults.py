"""What the fault drill (`bash scripts/test.sh --drill`) found, each kept as a claim."""

import contextlib
import copy
import errno
import fcntl
import functools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import cases
from drill.children import refused
from eval_helpers import tiny_model, write_checkpoint, write_tokens
from full_disk import files_of_at_most
from train_helpers import arguments, make_corpus, train_here

import attention_maps
import benchmark
import eval_extrapolation
import generate
import passkey
from data.far_tasks import make_prompt
from data.shards import open_split
from data.tokeniser import get_tokeniser
from data.writer import read_progress
from evaluating.results import Record, Results, continue_results, read_results
from lssar import cpu
from lssar.backends import attend
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from lssar.reference import attention_weights
from model import GPT, WEIGHTS_VERSION, preset
from physics.loader import describe
from physics.model import OrbitModel, OrbitModelConfig
from support.files import Claim, read_text, sync, write_text
from support.processes import block_sigint_in_children, in_processes
from training.checkpoint import CheckpointInfo, Store, find, load_latest, load_model, read_trainer
from training.config import load_config
from training.run_log import read_metrics

ROOT = Path(__file__).parents[1]
LOSS = Record("loss", "a", 3.25, length=8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def flip(path: Path, chance: random.Random) -> bytes:
    """Turn one bit over; the bytes as they were."""
    sound = path.read_bytes()
    damaged = bytearray(sound)
    place = chance.randrange(8 * len(sound))
    damaged[place // 8] ^= 1 << place % 8
    path.write_bytes(damaged)
    return sound


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """Return a checkpoint of a real run."""
    runs = tmp_path_factory.mktemp("finished")
    assert train_here(*arguments(corpus, runs, "--train.steps=5")) == 0
    return find(runs / "nano-lssar")


@pytest.mark.parametrize(
    ("name", "read"), [("model.safetensors", load_model), ("trainer.pt", read_trainer)]
)
def test_a_flipped_bit_in_a_checkpoint_is_named_before_anything_is_computed(
    finished, tmp_path, name, read
):
    """safetensors has no checksum and torch ignores the one of its zip: weights were just wrong."""
    path, chance = Path(shutil.copytree(finished, tmp_path / "copy")), random.Random(0)
    for _ in range(40):
        sound = flip(path / name, chance)
        with pytest.raises(UserError) as refused:
            read(path)
        assert name in str(refused.value) and "\n" not in str(refused.value)
        (path / name).write_bytes(sound)
    read(path)


def test_a_damaged_measurement_is_named_and_the_others_are_kept(tmp_path, capsys):
    lines = [json.dumps({"step": n, "loss": n / 7}) + "\n" for n in range(4)]
    lines[2] = lines[2].replace("}", "")
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "lo')
    assert [m["step"] for m in read_metrics(tmp_path)] == [0, 1, 3]
    assert "metrics.jsonl, line 3 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "place", "more"),
    [(60_000, "step-00000005", []), (2_500, "metrics.jsonl", ["--checkpoint.interval=100"])],
)
def test_a_full_disk_stops_training_with_one_line(corpus, tmp_path, limit, place, more):
    """torch's error hides the reason, and that of a measurement was nobody's to catch."""
    with files_of_at_most(limit), pytest.raises(UserError) as stopped:
        train_here(*arguments(corpus, tmp_path, *more))
    line = str(stopped.value)
    assert line.startswith("cannot write") and f"{place}: File too large" in line
    assert "\n" not in line
    assert not list(tmp_path.rglob("*.tmp"))


def test_weights_that_do_not_fit_on_the_disk_are_one_line_and_leave_nothing(tmp_path):
    """safetensors raises an error of its own."""
    store, info = Store(tmp_path), CheckpointInfo("run", 1, 16)
    too_large = pytest.raises(UserError, match=r"cannot write checkpoint .*File too large")
    with files_of_at_most(10_000), too_large:
        store.save(tiny_model(), info, {}, keep=1, best=False)
    assert not list(store.directory.iterdir())


def test_a_checkpoint_half_removed_by_a_kill_is_tidied_up(tmp_path, monkeypatch):
    """It had no weights any more, so nothing ever looked at it again."""
    store, model = Store(tmp_path), tiny_model()
    for step in (1, 2):
        store.save(model, CheckpointInfo("run", step, 16), {}, keep=2, best=False)

    def killed(path, **_):
        next(Path(path).iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(model, CheckpointInfo("run", 3, 16), {}, keep=2, best=False)
    assert [p.name for p in store.candidates()] == ["step-00000003", "step-00000002"]
    store.remove_leftovers()
    kept = {p.name for p in store.directory.iterdir()}
    assert kept == {"step-00000002", "step-00000003", "latest"}


def test_a_second_evaluation_of_one_file_is_refused_and_loses_nothing(tmp_path):
    """Both wrote through the same temporary file, and the last to finish won."""
    path = tmp_path / "x.json"
    first = Results(path, "kind", {}, about={})
    first.runs["a"] = {"run": "a"}
    first.save()

    def second(argv):
        Results(argv[0], "kind", {}, about={}).save()

    line = refused(second, [str(path)], tmp_path / "log")
    (tmp_path / "log").unlink()
    assert f"{path} is being written by another process" in line
    first.add(LOSS)
    late = continue_results(path, "kind", {}, about={})
    first.add(replace(LOSS, length=9))
    with pytest.raises(UserError, match="another process has added"):
        late.save()
    assert len(read_results(path).records) == 2
    del first, late
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_no_override_is_a_traceback_or_leaves_the_run_directory():
    """A name of `..` put a run above its directory; the others ended in Python's own errors."""
    examples = [
        "--log.name=..",
        "--log.name=\0",
        "--log.name=\udcff",
        "--log.directory=a\0b",
        "--log.directory=",
        "--data.directory=",
        "--data.directory=\udcff",
        "--train.lr=" + "9" * 400,
        "--train.steps=" + "9" * 5000,
        "--train.steps=" + "[" * 5000,
        "--train.batch_tokens=" + "9" * 25,
        "--train.steps=1\n[model]",
    ]
    for override in cases(examples):
        with pytest.raises(UserError) as caught:
            load_config(ROOT / "configs/nano-lssar.toml", [override])
        assert "command line" in str(caught.value) and "\n" not in str(caught.value)


def test_a_hint_about_a_huge_batch_does_not_take_years():
    """The nearest divisor was sought among all smaller numbers."""
    config = ROOT / "configs/nano-lssar.toml"
    overrides = ["--train.length=1", "--eval.tokens=1", f"--train.batch_tokens={2**40 - 87}"]
    with pytest.raises(UserError, match="nearest that does: 1"):
        load_config(config, [*overrides, "--train.micro_batch=2"])


def test_an_impossible_passkey_prompt_is_one_line():
    for length, seed in cases([(10**30, 0), (2**40, 0), (-1, 0), (1024, -1)]):
        with pytest.raises(UserError, match=r"length|--seed"):
            make_prompt(get_tokeniser("bytes"), length, 0, seed)


@pytest.mark.parametrize(
    ("key", "value"), [("layers", 2**40), ("width", 2**40), ("layers", 1.5), ("vocab_rows", "9")]
)
def test_a_description_of_an_impossible_model_is_refused_at_once(tmp_path, key, value):
    path = write_checkpoint(tmp_path / "model", tiny_model())
    description = json.loads((path / "model.json").read_text())
    description["model"][key] = value
    kept = {part: description[part] for part in ("meaning", "model", "info")}
    (path / "model.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=r"do not belong together|model\.json"):
        load_model(path)


@pytest.mark.parametrize("meaning", [None, 1, 3, "2"])
def test_weights_of_another_meaning_are_refused_in_one_line(tmp_path, meaning):
    """After the pairing of RoPE changed, older checkpoints loaded and computed nonsense."""
    path = write_checkpoint(tmp_path / "model", tiny_model())
    description = json.loads((path / "model.json").read_text())
    assert description.pop("meaning") == WEIGHTS_VERSION == 2
    known = {} if meaning is None else {"meaning": meaning}
    (path / "model.json").write_text(json.dumps(description | known))
    with pytest.raises(UserError, match=rf"model\.json: .*version {meaning!r}, .* computes 2") as e:
        load_model(path)
    assert "\n" not in str(e.value)


def read_tokens(folder: Path):
    return open_split(folder, "val")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run/model.json", load_model),
        ("run/trainer.pt", read_trainer),
        ("data/manifest.json", read_tokens),
        ("data/set_val_000000.bin", read_tokens),
        ("data/progress.json", read_progress),
        ("data/records.json", describe),
        ("data/metrics.jsonl", read_metrics),
        ("data/x.json", lambda folder: read_results(folder / "x.json")),
    ],
)
def test_a_fifo_in_place_of_a_file_is_refused_and_waits_for_nobody(tmp_path, name, read):
    write_checkpoint(tmp_path / "run", tiny_model())
    write_tokens(tmp_path / "data", 99)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError) as refused:
        read((tmp_path / name).parent)
    assert Path(name).name in str(refused.value) and "regular file" in str(refused.value)


def test_whoever_may_read_one_file_of_a_checkpoint_may_read_all(tmp_path):
    path = write_checkpoint(tmp_path / "run", tiny_model())
    modes = {file.name: file.stat().st_mode & 0o777 for file in Path(path).iterdir()}
    assert len(modes) > 1 and len(set(modes.values())) == 1, modes


def test_a_trainers_state_that_lacks_something_is_passed_over(tmp_path, capsys):
    config = load_config("nano-softmax", [f"--log.directory={tmp_path}", "--log.name=x"])
    store, model = Store(config.run_directory), GPT(config.model_config())
    state = {"config": config.to_toml(), "progress": {"step": 1}}
    store.save(model, CheckpointInfo("x", 1, 128), state, keep=2, best=False)
    with pytest.raises(UserError, match=r"no checkpoint of .* can be read"):
        load_latest(config, store)
    assert "trainer.pt holds the wrong things ('rng')" in capsys.readouterr().err


def test_a_sound_archive_with_wrong_things_in_it_is_refused_in_one_line(finished, tmp_path):
    """Its sha256 may be right: whoever wrote the file wrote that too."""
    path = Path(shutil.copytree(finished, tmp_path / "copy"))
    description = json.loads((path / "model.json").read_text())
    del description["files"]
    (path / "model.json").write_text(json.dumps(description))
    sound = read_trainer(path)
    damages = {
        "a state of one parameter": lambda s: s["optimiser"]["state"].update({3: torch.zeros(3)}),
        "a moment": lambda s: s["optimiser"]["state"][3].update(exp_avg_sq=None),
        "a generator": lambda s: s["rng"][0].update(cpu=torch.zeros_like(s["rng"][0]["cpu"])),
        "a step": lambda s: s["progress"].update(step=-1),
        "the skipped steps": lambda s: s["progress"].update(skipped=-1),
        "a file": lambda s: s["data"]["files"].update(x=[]),
        "the manifest": lambda s: s["data"].pop("manifest"),
        "the whole": None,
    }
    for name, damage in damages.items():
        state = copy.deepcopy(sound) if damage else [1, 2]
        if damage:
            damage(state)
        torch.save(state, path / "trainer.pt")
        with pytest.raises(UserError, match=r"trainer\.pt holds the wrong things") as refused:
            read_trainer(path)
        assert "\n" not in str(refused.value), name


def test_moments_of_another_optimiser_are_passed_over(finished, corpus, tmp_path, capsys):
    """A missing second moment was found at the first step, with a traceback."""
    config = load_config("nano-lssar", arguments(corpus, tmp_path)[1:])
    checkpoint = config.run_directory / "checkpoints" / finished.name
    path = Path(shutil.copytree(finished, checkpoint))
    description = json.loads((path / "model.json").read_text())
    del description["files"]
    (path / "model.json").write_text(json.dumps(description))
    state = read_trainer(path)
    del state["optimiser"]["state"][3]["exp_avg_sq"]
    torch.save(state, path / "trainer.pt")
    with pytest.raises(UserError, match=r"no checkpoint of .* can be read"):
        load_latest(config, Store(config.run_directory))
    assert "trainer.pt holds the moments of another model" in capsys.readouterr().err


def test_a_link_among_the_leftovers_is_removed_and_not_followed(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    store.directory.mkdir()
    (store.directory / ".step-00000001.tmp").symlink_to(tmp_path / "mine")
    store.remove_leftovers()
    assert not list(store.directory.iterdir()) and (tmp_path / "mine/file").exists()


def test_a_pointer_that_is_a_fifo_is_no_pointer(tmp_path):
    store = Store(tmp_path)
    for step in (1, 2):
        store.save(tiny_model(), CheckpointInfo("run", step, 16), {}, keep=2, best=True)
    for name in ("latest", "best"):
        (store.directory / name).unlink()
        os.mkfifo(store.directory / name)
    assert [p.name for p in store.candidates()] == ["step-00000002", "step-00000001"]
    assert store.best() is None
    assert load_model(tmp_path)[1].step == 2


def test_a_disk_without_locks_is_named_and_the_work_goes_on(tmp_path, monkeypatch, capsys):
    def without_locks(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr(fcntl, "lockf", without_locks)
    corpus = make_corpus(tmp_path / "corpus")
    assert train_here(*arguments(corpus, tmp_path, "--train.steps=2", "--eval.tokens=64")) == 0
    run = tmp_path / "nano-lssar"
    assert f"note: {run} cannot be locked (No locks available)" in capsys.readouterr().err
    assert load_model(run)[1].step == 2
    Claim(tmp_path / "loss.json")
    assert "loss.json cannot be locked" in capsys.readouterr().err
    (tmp_path / ".a.json.0123456789abcdef.tmp").write_text("of a process that may still be writing")
    write_text(tmp_path / "a.json", "{}")
    assert len(list(tmp_path.glob(".a.json.*"))) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors cannot be listed")
def test_writing_and_syncing_leaves_no_descriptor_open(tmp_path):
    open_here = Path("/proc/self/fd")
    before = len(list(open_here.iterdir()))
    write_text(tmp_path / "a.json", "{}")
    sync(tmp_path / "a.json")
    sync(tmp_path)
    with contextlib.suppress(UserError), files_of_at_most(100):
        write_text(tmp_path / "b.json", "x" * 1000)
    assert len(list(open_here.iterdir())) == before


def test_a_text_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "x"
    path.write_text("ü" * 100)
    assert read_text(path, limit=100) == "ü" * 100
    with pytest.raises(OSError, match="larger than the 99 characters"):
        read_text(path, limit=99)


def test_workers_do_not_hear_an_interrupt_and_their_parent_does():
    """A terminal sends Ctrl-C to all of them, and workers that were still importing told of it."""
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK)
    for blocked in in_processes(block, [set(), set()], workers=2):
        assert signal.SIGINT in blocked
    before, after = signal.signal(signal.SIGINT, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt), block_sigint_in_children():
            signal.raise_signal(signal.SIGINT)  # to this thread: others may not block it
            after.append("inside")
    finally:
        signal.signal(signal.SIGINT, before)
    assert after == ["inside"] and signal.SIGINT not in block(set())


def test_no_worker_outlives_the_one_who_takes_its_results():
    results = in_processes(abs, range(-20, 0), workers=2)
    assert next(results) == 20
    assert multiprocessing.active_children()
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_a_huge_exponent_does_not_hang_the_cpu_kernel():
    """It counted down the whole part of p in an int that could not hold it."""
    for p in cases([1e9, 1e30, 1e308]):
        q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
        got = attend(q, k, v, get_mechanism("lssar", p=p), backend="cpu")
        sharpest = attention_weights(q, k, "lssar").argmax(-1)  # of each row: the limit of p
        torch.testing.assert_close(got, v.gather(2, sharpest.unsqueeze(-1).expand_as(got)))


@pytest.mark.parametrize(
    "command",
    [
        (generate.main, "--greedy"),
        (generate.main, "--tokens", "3"),
        (eval_extrapolation.main, "--lengths", "8", "--data", "data", "--out", "x.json"),
        (passkey.main, "--lengths", "400", "--trials", "1", "--out", "x.json"),
        (attention_maps.main, "--out", "x.json"),
    ],
    ids=lambda command: " ".join((command[0].__module__, *command[1:])),
)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, monkeypatch, command):
    """They gave tracebacks, rubbish with exit code 0, or an "overflow" that was none."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "data", 99)
    model, (main, *options) = tiny_model(), command
    said = r"blocks\.1\.mlp_out\.weight has weights .* not finite"
    for value in cases([math.nan, math.inf, -math.inf]):
        with torch.no_grad():
            model.blocks[1].mlp_out.weight[3, 5] = value
        write_checkpoint(tmp_path / str(value), model, tokeniser="bytes")
        with pytest.raises(UserError, match=said):
            main([f"./{value}", *options, "--device", "cpu"])
        assert not list(tmp_path.glob("*.png"))


def test_a_model_of_orbits_is_refused_where_text_is_evaluated(tmp_path):
    """Its batches failed deep in the model."""
    text = preset("nano", layers=1, positions="none")
    model = OrbitModel(OrbitModelConfig(**vars(text), learned_positions=8))
    path = str(write_checkpoint(tmp_path / "model", model))
    words = [path, "--data", str(tmp_path), "--lengths", "8", "--out", str(tmp_path / "x.json")]
    with pytest.raises(UserError, match="is it a model of another type"):
        eval_extrapolation.main(words)


@pytest.mark.parametrize("name", ["attention", "train"])
def test_a_benchmark_that_cannot_write_says_so_before_it_measures(name):
    with pytest.raises(UserError, match="cannot write"):
        benchmark.main([name, "--out", "/proc/none/x.json"])
