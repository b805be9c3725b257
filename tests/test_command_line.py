"""What a command says for --help and for mistakes."""

import shlex
import subprocess
import sys

import pytest
from cases import cases
from checkout import ROOT, help_of, main_of, tracked

from lssar.errors import UserError

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
    "-m benchmarks.theory": ["--out", "x.json"],
    "physics/simulate.py": ["orbits", "--out", "x"],
    "physics/force.py": ["magnitude", "runs/x", "--config", "configs/physics-nano-magnitude.toml"],
    "physics/discover.py": ["--forces", "x", "--planets", "x", "--out", "x.json"],
    "physics/train.py": ["configs/physics-nano.toml"],
}


def programs() -> list[str]:
    """Return how each program of the project is started: by its path, or else as a module."""
    found = []
    for file in tracked("*.py", ":!tests"):
        if "run(main)" in file.read_text("utf-8"):
            path = str(file.relative_to(ROOT))
            module = path.removesuffix(".py").replace("/", ".")
            found.append(path if path in COMMANDS else f"-m {module}")
    return found


def test_help_is_printed(capsys):
    for command in cases(COMMANDS):
        script, *words = command.removeprefix("-m ").split()
        assert "--help" in help_of(script, *words)
        assert capsys.readouterr().err == ""


def test_a_mistyped_option_is_named():
    for command, arguments in cases(COMMANDS.items()):
        script, *words = command.removeprefix("-m ").split()
        with pytest.raises(UserError, match="--mistyped") as error:
            main_of(script)([*words, *arguments, "--mistyped"])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("program", programs())
def test_a_mistake_is_one_line_and_exit_code_2_of_the_process(program):
    words = [sys.executable, *program.split(), *COMMANDS[program], "--mistyped"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "--mistyped" in line


def test_mistakes_are_answered_with_what_was_meant():
    config = "configs/nano-lssar.toml"
    for script, words, message in (
        ("train.py", [config, "--train.stepz=3"], "did you mean 'steps'"),
        ("train.py", [config, "--trian.steps=3"], "did you mean 'train'"),
        ("train.py", [config, "--train.steps=many"], "must be int"),
        ("train.py", ["configs/nano-lsar.toml"], "no config file"),
        ("train.py", ["x" * 5000], "File name too long"),
        ("reproduce.py", ["headlin"], "unknown table 'headlin'; did you mean 'headline'"),
    ):
        with pytest.raises(UserError) as error:
            main_of(script)(words)
        assert message in str(error.value), (script, words)


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
