"""What a command says, and imports, for --help and a mistyped option."""

import re
import shlex
import subprocess
import sys

import pytest
from checkout import ROOT, tracked

SLOW = {"torch", "matplotlib", "transformers", "datasets", "wandb", "lm_eval", "triton", "scipy"}
COMMANDS = {
    "train.py": ["configs/nano-lssar.toml"],
    "generate.py": ["runs/x"],
    "eval_extrapolation.py": ["runs/x", "--data", "x", "--out", "x.json"],
    "passkey.py": ["runs/x", "--out", "x.json"],
    "far/audit.py": ["runs/x", "--data", "x", "--out", "x.json"],
    "attention_maps.py": ["runs/x", "--out", "x.json"],
    "downstream.py": ["runs/x", "--out", "x.json"],
    "benchmark.py": [],
    "benchmark.py attention": [],
    "benchmark.py attention --table cost": [],
    "benchmark.py kernels": [],
    "benchmark.py gpu-check": [],
    "benchmark.py train": [],
    "reproduce.py": ["headline"],
    "export_hf.py": ["runs/x", "x"],
    "data/prepare.py": ["text", "x", "--out", "x"],
    "paper/theory.py": ["--out", "x.json"],
    "physics/simulate.py": ["orbits", "--out", "x"],
    "physics/force.py": ["magnitude", "runs/x", "--config", "configs/physics-nano-magnitude.toml"],
    "physics/discover.py": ["--forces", "x", "--planets", "x", "--out", "x.json"],
    "physics/train.py": ["configs/physics-nano.toml"],
}
ANSWERS_LATE = {"physics/train.py"}  # it is train.py with another model, and imports that first


def answer(*arguments):
    """Exit code, stdout, stderr, and the top-level packages that the command imported."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    imported = {m[1] for line in lines if (m := re.match(r"import time:.*\|\s*(\w+)", line))}
    said = [line for line in lines if not line.startswith("import time:")]
    assert "argparse" in imported  # that is, imports were seen at all
    return done.returncode, done.stdout, said, imported


def test_every_command_is_here():
    scripts = {
        str(file.relative_to(ROOT))
        for file in tracked("*.py", ":!tests")
        if "run(main)" in file.read_text("utf-8")
    }
    names = {command.removeprefix("-m ").split()[0] for command in COMMANDS}
    assert scripts == {n if n.endswith(".py") else f"{n.replace('.', '/')}.py" for n in names}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed_without_slow_imports(command):
    code, shown, said, imported = answer(*command.split(), "--help")
    assert (code, said) == (0, [])
    assert "--help" in shown or command == "benchmark.py"
    assert command in ANSWERS_LATE or not imported & SLOW


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_option_is_one_line_without_slow_imports(command):
    code, shown, said, imported = answer(*command.split(), *COMMANDS[command], "--mistyped")
    assert (code, shown) == (2, "")
    assert len(said) == 1 and said[0].startswith("error: ") and "--mistyped" in said[0]
    assert command in ANSWERS_LATE or not imported & SLOW


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["configs/nano-lssar.toml", "--train.stepz=3"], "did you mean 'steps'"),
        (["configs/nano-lssar.toml", "--trian.steps=3"], "did you mean 'train'"),
        (["configs/nano-lssar.toml", "--train.steps=many"], "must be int"),
        (["configs/nano-lsar.toml"], "no config file"),
        (["x" * 5000], "File name too long"),
    ],
    ids=lambda value: value[-1][-40:] if isinstance(value, list) else "",
)
def test_a_mistyped_config_is_one_line_without_slow_imports(arguments, message):
    code, shown, (line,), imported = answer("train.py", *arguments)
    assert (code, shown) == (2, "")
    assert line.startswith("error: ") and message in line
    assert not imported & SLOW


def test_an_unknown_table_is_one_line_without_slow_imports():
    code, shown, (line,), imported = answer("reproduce.py", "headlin")
    assert (code, shown) == (2, "")
    assert line.startswith("error: unknown table 'headlin'; did you mean 'headline'")
    assert not imported & SLOW


def test_what_is_printed_to_a_closed_stream_goes_nowhere():
    code = """
import sys
from support.command import run
def main(argv):
    print("said")
    print("complained", file=sys.stderr)
run(main)
"""
    for closed, out, err in (("1>&-", "", "complained\n"), ("2>&-", "said\n", "")):
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, out, err), closed


@pytest.mark.parametrize("lines", [1, 100_000])  # left in the buffer, and more than a pipe holds
def test_a_reader_that_leaves_early_is_no_traceback(lines):
    main = f"lambda argv: print(*range({lines}), sep='\\n')"
    code = f"import time; from support.command import run; time.sleep(0.5); run({main})"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
    process.stderr.close()
