"""config.py and every shipped configuration: the paper's schedules, and errors that help."""

import dataclasses
import os
import re
import shlex
from pathlib import Path

import pytest
from cases import cases
from checkout import tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare
from data.far_tasks import TASKS
from data.tokeniser import get_tokeniser
from lssar.errors import UserError
from paper.experiments import SCALES
from physics import simulate
from physics.config import OrbitConfig
from training.batch_plan import batch_plan
from training.config import Config, load_config

ALL = tracked("configs/*.toml")
CONFIGS = [p for p in ALL if not p.stem.startswith("physics")]  # those: test_physics_training.py
SOFTMAX = "gpt2-124m-softmax"


def kind_of(path):
    return OrbitConfig if path.stem.startswith("physics") else Config


def shipped(name, *overrides):
    return load_config(CONFIGS[0].parent / f"{name}.toml", list(overrides))


def write(directory, text, name="run.toml"):
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path, *overrides):
    """Return the one-line message with which the configuration is refused."""
    with pytest.raises(UserError) as error:
        load_config(path, list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is shipped -----------------------------------------------------------------------------

# The paper's: steps, lr, length, warm-up, schedule, micro-batch, accumulation on 8 GPUs.
PAPER = {
    "gpt2-45m": (9_000, 1e-3, 1024, 700, "cosine", 64, 1),
    "gpt2-124m": (18_865, 6e-4, 1024, 700, "cosine", 4, 16),
    "gpt2-355m": (60_000, 3e-4, 1024, 700, "cosine", 32, 2),
    "gpt2-124m-lssar-pi": (2_000, 6e-5, 2048, 100, "constant", None, None),
}
TOKENS = {"gpt2-45m": 4.72e9, "gpt2-124m": 9.89e9, "gpt2-355m": 31.46e9}


def test_every_headline_run_is_shipped():
    names = {path.stem for path in CONFIGS}
    assert {"nano-softmax", "nano-lssar", "gpt2-124m-softmax", "gpt2-124m-lssar"} <= names
    assert {"gpt2-45m-edu", "gpt2-355m-edu", "gpt2-124m-lssar-pi"} <= names
    assert len(ALL) <= 20


def test_every_shipped_config_loads_as_its_name_says():
    for path in cases(CONFIGS):
        config = load_config(path)
        size = re.match(r"(gpt2-)?([0-9a-z]+)", path.stem)[2]
        words = path.stem.split("-")[1:]
        attention = next(MECHANISM_OF[word] for word in words if word in MECHANISM_OF)
        assert config.model.preset == {"single": "45m"}.get(size, size)
        assert config.attention.name == attention
        assert config.mechanism().name == attention
        assert config.model_config().attention.train_length == config.train.length
        if attention == "lssar":
            assert config.mechanism().p == 15
        assert config.model_config().shift == ("far" in words)
        if size != "nano":
            assert ("edu" in path.stem) == ("edu" in config.data.directory)
        assert config.log.name == path.stem
        assert config.run_directory == Path("runs") / path.stem


MECHANISM_OF = {"softmax": "softmax", "lssa": "lssa", "lssar": "lssar"}
MECHANISM_OF |= {"far": "cos-softmax", "pi": "lssar", "edu": "softmax"}
# As a task's config is without an override.
MECHANISM_OF |= dict.fromkeys((*TASKS, "passkey"), "softmax")


def test_schedules_are_those_of_the_paper():
    for path in cases([p for p in CONFIGS if "gpt2" in p.stem]):
        t = load_config(path).train
        key = max((k for k in PAPER if path.stem.startswith(k)), key=len)
        *schedule, micro_batch, accumulation = PAPER[key]
        assert [t.steps, t.lr, t.length, t.warmup, t.schedule] == schedule
        assert t.batch_tokens == 524_288
        assert (t.beta1, t.beta2, t.weight_decay, t.clip) == (0.9, 0.95, 0.1, 1.0)
        assert t.micro_batch == "auto"
        plan = batch_plan(load_config(path).with_micro_batch(micro_batch or 1), world_size=8)
        assert plan.sequences == 524_288 // t.length
        assert plan.sequences == 8 * plan.accumulation * plan.micro_batch
        if micro_batch:
            assert plan.accumulation == accumulation
            assert t.steps * t.batch_tokens == pytest.approx(TOKENS[key], rel=2e-3)
        else:
            config = load_config(path)
            assert config.model.interpolation == t.length / 1024
            assert config.train.init_from == "runs/gpt2-124m-lssar"
            assert plan.sequences == {2048: 256, 4096: 128, 8192: 64}[t.length]


def test_a_run_without_settings_is_the_papers_124m():
    paper = shipped(SOFTMAX)
    assert Config().model == paper.model
    assert Config().attention == paper.attention
    fitted = dataclasses.replace(Config().train, micro_batch="auto", compile=True)  # to 8 GPUs
    assert fitted == paper.train
    assert paper.eval.tokens == 10_485_760


def test_nano_runs_on_one_process():
    for path in cases([p for p in CONFIGS if "nano" in p.stem]):
        config = load_config(path)
        plan, t = batch_plan(config), config.train
        assert plan.world_size == 1
        assert plan.accumulation * plan.micro_batch * t.length == t.batch_tokens
        assert t.steps * t.batch_tokens < 2e7  # within an hour on one core


def test_nano_configs_differ_in_the_attention_and_its_best_rate_only():
    different = shipped("nano-softmax").differences(shipped("nano-lssar"))
    keys = [line.partition(":")[0] for line in different]
    assert keys == ["attention.name", "attention.p", "train.lr"]


# --- reading -------------------------------------------------------------------------------------


def test_a_file_changes_its_base_and_keeps_the_rest(tmp_path):
    write(tmp_path, '[train]\nsteps = 900\nlr = 1e-3\n[attention]\nname = "lssar"\n', "a.toml")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", 'base = "../a.toml"\n[train]\nsteps = 800\n', "b.toml")
    path = write(tmp_path, 'base = "sub/b.toml"\n[attention]\np = 3\n', "c.toml")
    config = load_config(path)
    assert (config.train.steps, config.train.lr) == (800, 1e-3)
    assert (config.attention.name, config.attention.p) == ("lssar", 3.0)
    assert config.log.name == "c"


def test_cycles_and_missing_bases_are_named(tmp_path):
    a = write(tmp_path, 'base = "b.toml"\n', "a.toml")
    write(tmp_path, 'base = "a.toml"\n', "b.toml")
    assert "a.toml" in refused(a)
    assert "base" in refused(a)
    own = write(tmp_path, 'base = "own.toml"\n', "own.toml")
    assert "own.toml" in refused(own)
    lost = write(tmp_path, 'base = "nono.toml"\n', "lost.toml")
    assert "nono.toml" in refused(lost)
    number = write(tmp_path, "base = 3\n", "number.toml")
    assert "base = 3" in refused(number)


def test_a_missing_file_suggests_the_nearest():
    message = refused(CONFIGS[0].parent / "gpt2-124m-lsar.toml")
    assert "gpt2-124m-lsar.toml" in message
    assert "gpt2-124m-lssar.toml" in message.replace("gpt2-124m-lsar.toml", "")


def test_a_shipped_config_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano-lssar").mkdir()  # a folder is not what is meant
    for name in cases(["nano-lssar", "nano-lssar.toml", "configs/nano-lssar"]):
        assert load_config(name) == shipped("nano-lssar")
        assert "did you mean 'nano-lssar.toml'" in refused(name.replace("ssar", "sar"))
    write(tmp_path, "[train]\nsteps = 999\n", "nano-lssar.toml")
    for name in cases(["nano-lssar", "nano-lssar.toml"]):
        assert load_config(name).train.steps == 999
    monkeypatch.chdir(CONFIGS[0].parent.parent)
    assert "'pyproject.toml'" not in refused("pyproject")


def test_no_file_is_a_traceback_a_hang_or_a_page(tmp_path):
    examples = [
        "[train]\n" + ".".join("a" * 5000) + " = 1\n",
        "train." + ".".join("a" * 5000) + " = 1\n",
        "base." + ".".join("a" * 5000) + " = 1\n",
        "[" + ".".join("a" * 5000) + "]\nx = 1\n",
        "[train]\nsteps = " + "[" * 300 + "]" * 300,
        "[train]\nsteps = 0x" + "f" * 5000,
        "[train]\nsteps = '" + "x" * 50_000 + "'",
        "[" + "x" * 50_000 + "]\ny = 1\n",
        "[train]\n" + "x" * 50_000 + " = 1\n",
        "# " + "x" * 70_000,
        'base = "\\u0000"',
        'base = "/dev/zero"',
        'base = "fifo"',
        'base = "."',
        'base = "circle"',
        'base = "' + "x" * 5000 + '"',
    ]
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to("circle")
    for text in cases(examples):
        message = refused(write(tmp_path, text))
        assert len(message) < 1000 or "x" * 5000 in message  # a path is given in full


def test_broken_toml_and_stray_keys_are_named(tmp_path):
    path = write(tmp_path, "[train\nsteps = 3")
    assert "run.toml" in refused(path)
    assert "TOML" in refused(path)
    assert "steps = 5" in refused(write(tmp_path, "steps = 5\n"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    assert "bytes.toml" in refused(tmp_path / "bytes.toml")
    assert str(tmp_path) in refused(tmp_path)


def test_overrides_are_typed_like_the_file():
    config = shipped(
        SOFTMAX,
        "--train.steps=800",
        "--train.lr=1",
        "--attention.name=lssar",
        "--attention.p=3",
        "--log.name=10",
        "--data.shuffle=false",
        '--eval.sample_prompt="a\\nb"',
        "--train.init_from=runs/some-run",
    )
    assert (config.train.steps, config.train.lr) == (800, 1.0)
    assert (config.attention.name, config.attention.p) == ("lssar", 3.0)
    assert (config.log.name, config.data.shuffle) == ("10", False)
    assert (config.eval.sample_prompt, config.train.init_from) == ("a\nb", "runs/some-run")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 1


def test_an_override_of_a_string_is_taken_as_typed():
    for text in cases(["true", "2024-01-31", "1e3", "0x10", "1_000"]):
        assert shipped(SOFTMAX, f"--log.name={text}").log.name == text


def test_a_wrong_override_is_refused_with_its_value_and_what_is_right():
    examples = [
        ("--train.stpes=3", ["train.stpes = 3", "did you mean 'steps'"]),
        ("--trian.steps=3", ["[trian]", "did you mean 'train'"]),
        ("--train.steps=many", ["train.steps = 'many'", "str", "int"]),
        ("--train.steps=3.5", ["train.steps = 3.5", "float", "int"]),
        ("--train.steps=true", ["train.steps = True", "bool", "int"]),
        ("--train.compile=1", ["train.compile = 1", "int", "bool"]),
        ("--train.lr=true", ["train.lr = True", "bool", "float"]),
        ("--train.schedule=cosin", ["train.schedule = 'cosin'", "did you mean 'cosine'"]),
        ("--train.precision=bf32", ["train.precision = 'bf32'", "did you mean"]),
        ("--model.preset=124M", ["model preset '124M'", "did you mean '124m'"]),
        ("--attention.name=lsar", ["'lsar'", "did you mean 'lssar'"]),
        ("--attention.p=3", ["'softmax'", "p = 3", "lssar"]),
        ("--train.lr=0", ["train.lr = 0", "above 0"]),
        ("--train.lr=nan", ["train.lr = nan"]),
        ("--train.lr=inf", ["train.lr = inf"]),
        ("--train.weight_decay=-0.1", ["train.weight_decay = -0.1"]),
        ("--train.beta2=1", ["train.beta2 = 1: must be in [0, 1)"]),
        ("--train.lr=1e400", ["train.lr = inf", "too large"]),
        ("--train.micro_batch=0", ["train.micro_batch = 0"]),
        ("--train.micro_batch=all", ["micro_batch = 'all'", "must be int or 'auto'"]),
        ("--train.micro_batch=must be above 0", ["must be int or 'auto'"]),
        (
            "--train.long_length=3000",
            ["train.micro_batch = 'auto'", "a multiple of 375 for long_length"],
        ),
        ("--eval.tokens=1000", ["eval.tokens = 1000", "1024"]),
        ("--log.name=a/b", ["log.name = 'a/b'"]),
        ("--model.heads=7", ["heads = 7"]),
        ("--model.tokeniser=gtp2", ["'gtp2'", "did you mean 'gpt2'"]),
        ("--model.interpolation=0", ["interpolation = 0.0"]),
        ("--attention.train_length=0", ["train_length = 0"]),
        ("--train.steps", ["'--train.steps'", "--section.key=value"]),
        ("train.steps=3", ["'train.steps=3'", "--section.key=value"]),
        ("--steps=3", ["'--steps=3'", "--section.key=value"]),
    ]
    for override, parts in cases(examples):
        message = refused(CONFIGS[0].parent / f"{SOFTMAX}.toml", override)
        for part in parts:
            assert part in message


def test_errors_name_the_file_the_value_stands_in(tmp_path):
    examples = {
        "unknown key": "[train]\nstpes = 3\n",
        "wrong type": '[train]\nsteps = "3"\n',
        "choice": '[train]\nschedule = "cosin"\n',
        "range": "[train]\nlr = -1.0\n",
        "mechanism": '[attention]\nname = "lsar"\n',
    }
    for _, text in cases(examples.items()):
        write(tmp_path, text, "wrong-base.toml")
        path = write(tmp_path, 'base = "wrong-base.toml"\n[log]\ninterval = 3\n', "top.toml")
        assert "wrong-base.toml" in refused(path)
        assert "run.toml" in refused(write(tmp_path, text))


def test_an_error_about_a_default_names_the_file_that_was_given(tmp_path):
    """Where no file set a key of the section, the message began with an empty name."""
    path = write(tmp_path, "[log]\ninterval = 3\n")
    with pytest.raises(UserError, match=r"run\.toml: 512 sequences .* 3 processes"):
        load_config(path, [], world_size=3)


# --- batches -------------------------------------------------------------------------------------


def test_impossible_batches_are_refused_with_the_numbers():
    examples = [
        (["--train.batch_tokens=524289"], 1, ["batch_tokens = 524289", "1024", "524288"]),
        (["--train.batch_tokens=100"], 1, ["batch_tokens = 100", "1024"]),
        (["--train.micro_batch=3"], 1, ["micro_batch = 3", "512", ": 2"]),
        (["--train.micro_batch=5"], 1, ["micro_batch = 5", "512", ": 4"]),
        (["--train.micro_batch=500"], 1, ["micro_batch = 500", "512", ": 512"]),
        ([], 3, ["512", "3 processes"]),
        ([], 1024, ["512", "1024 processes"]),
        (["--train.micro_batch=4"], 256, ["micro_batch = 4", "256 processes", ": 2"]),
    ]
    for overrides, world_size, parts in cases(examples):
        with pytest.raises(UserError) as error:
            batch_plan(shipped(SOFTMAX, *overrides), world_size)
        for part in parts:
            assert part in str(error.value)


def test_the_global_batch_does_not_depend_on_the_processes():
    for world_size in cases([1, 2, 4, 8, 16, 128]):
        plan = batch_plan(shipped(SOFTMAX), world_size)
        assert plan.world_size * plan.accumulation * plan.micro_batch == plan.sequences == 512


# --- writing -------------------------------------------------------------------------------------


def test_a_written_config_reads_back_equal(tmp_path):
    for path in cases(CONFIGS):
        config = load_config(path)
        again = load_config(write(tmp_path, config.to_toml()))
        assert again == config
        assert again.to_toml() == config.to_toml()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(prompt=st.text(st.characters(codec="utf-8")), lr=st.floats(1e-30, 1e30))
def test_any_string_and_number_survive_writing(prompt, lr, tmp_path_factory):
    config = Config()
    config = dataclasses.replace(
        config,
        log=dataclasses.replace(config.log, name="x"),
        eval=dataclasses.replace(config.eval, sample_prompt=prompt),
        train=dataclasses.replace(config.train, lr=lr),
    )
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(config.to_toml().encode())
    assert load_config(path) == config


def test_the_tokeniser_sets_the_vocabulary_of_any_preset():
    names = ["nano-lssar", SOFTMAX, "gpt2-355m-edu"]
    for (tokeniser, rows), name in cases([("gpt2", 50304), ("bytes", 257)], names):
        plain = shipped(name).model_config()
        changed = shipped(name, f"--model.tokeniser={tokeniser}").model_config()
        size = get_tokeniser(tokeniser).vocab_size
        assert changed == dataclasses.replace(plain, vocab_size=size, vocab_rows=rows)
        more = shipped(name, f"--model.tokeniser={tokeniser}", "--model.vocab_rows=60000")
        assert more.model_config().vocab_rows == 60000


def test_a_vocabulary_that_contradicts_the_tokeniser_is_refused():
    message = refused("nano-lssar", "--model.tokeniser=gpt2", "--model.vocab_size=300")
    assert "tokeniser = 'gpt2' has 50257 ids, vocab_size = 300 contradicts it" in message


def test_every_config_carries_the_command_that_makes_its_data():
    for path in cases(ALL):
        config = load_config(path, kind=kind_of(path))
        python, script, *arguments = shlex.split(config.data_command())
        parser = {"data/prepare.py": prepare, "physics/simulate.py": simulate}[script].make_parser()
        assert python == "python"
        assert config.data.prepare
        assert str(parser.parse_args(arguments).out) == config.data.directory
        for scale in SCALES.values():
            if about := scale.corpora.get(config.data.directory):
                assert config.data.prepare == " ".join(["data/prepare.py", *about["arguments"]])


def test_the_command_of_another_directory_is_that_for_own_text():
    mine = "--data.directory=my corpora/mine"
    for name, tokeniser in {"nano-lssar": "bytes", SOFTMAX: "gpt2"}.items():
        text = f"python data/prepare.py text FILES --tokeniser {tokeniser} --out 'my corpora/mine'"
        assert shipped(name, mine).data_command() == text
    gpt2 = shipped("nano-lssar", mine, "--model.tokeniser=gpt2").data_command()
    assert "--tokeniser gpt2" in gpt2
    own = shipped("nano-lssar", mine, "--data.prepare=data/prepare.py stdlib")
    assert own.data_command() == "python data/prepare.py stdlib --out 'my corpora/mine'"


def test_differences_are_what_makes_another_run():
    base = shipped(SOFTMAX)
    assert base.differences(base) == []
    free = shipped(
        SOFTMAX,
        "--train.micro_batch=8",
        "--train.compile=false",
        "--log.interval=1",
        "--eval.interval=7",
        "--checkpoint.keep=9",
        "--data.directory=elsewhere",
    )
    assert base.differences(free) == []
    assert base.differences(shipped(SOFTMAX, "--train.lr=0.5", "--train.seed=3")) == [
        "train.lr: 0.0006 -> 0.5",
        "train.seed: 0 -> 3",
    ]
    assert len(base.differences(shipped(SOFTMAX, "--attention.name=lssa"))) == 1
    assert base.differences(shipped(SOFTMAX, "--train.steps=20000")) == [
        "train.steps: 18865 -> 20000"
    ]
    constant, longer = (
        shipped(SOFTMAX, "--train.schedule=constant", f"--train.steps={n}") for n in (900, 901)
    )
    assert constant.differences(longer) == []


def test_the_example_in_the_documentation_runs():
    from training import config as module

    path, overrides = re.search(r'load_config\("(.+?)", \[(.+?)\]\)', module.__doc__).groups()
    path = CONFIGS[0].parent.parent / path
    plain, changed = load_config(path), load_config(path, re.findall(r'"(.+?)"', overrides))
    assert (plain.train.steps, changed.train.steps) == (18865, 1000)
