"""The attention backend that a run or a dry run names, and the one that computes."""

import json
from dataclasses import replace
from functools import partial

import pytest
from train_helpers import arguments, run_process, train_here

from lssar.backends import BACKENDS


def said_backend(text):
    (line,) = [line for line in text.splitlines() if "computed by backend" in line]
    return line.split()[-1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "cpu"),
        (("--train.precision=bf16",), "cpu"),
        (("--attention.window=31",), "cpu"),
        (("--attention.numerics=naive",), "eager"),
        (("--attention.backend=rowblock",), "rowblock"),
        (("--attention.name=softmax",), "cpu"),
        (("--attention.name=softmax", "--attention.window=31"), "cpu"),
        (("--attention.name=softmax", "--attention.backend=sdpa"), "sdpa"),
        (("--attention.name=mish-l1",), "cpu"),
    ],
)
def test_a_run_names_the_backend_that_its_first_step_used(
    corpus, tmp_path, capsys, monkeypatch, more, expected
):
    config = "nano-softmax" if any("name=" in m for m in more) else "nano-lssar"
    ran = []
    for name, backend in BACKENDS.items():
        run = partial(lambda name, run, *x: ran.append(name) or run(*x), name, backend.run)
        monkeypatch.setitem(BACKENDS, name, replace(backend, run=run))
    given = arguments(corpus, tmp_path, *more, "--train.steps=5", config=config)
    assert train_here(*given) == 0
    shown = capsys.readouterr()
    assert said_backend(shown.err) == expected
    assert "planned for" not in shown.out + shown.err
    assert set(ran) == {expected}
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["attention"] == [expected]
    assert train_here(*given, "--dry-run", "--device", "cpu") == 0
    assert f"planned for cpu: backend {expected}\n" in capsys.readouterr().out


def test_a_run_names_the_backends_of_all_its_layers(corpus, tmp_path, capsys):
    kinds = ('--model.pattern=["local:5","global"]', "--model.positions=fox", "--model.layers=2")
    more = (*kinds, "--attention.name=softmax", "--local.positions=rope", "--train.steps=5")
    given = arguments(corpus, tmp_path, *more, config="nano-far")
    assert train_here(*given) == 0
    assert "attention  computed by backend cpu, eager\n" in capsys.readouterr().err
    assert train_here(*given, "--dry-run", "--device", "cpu") == 0
    assert "planned for cpu: backend cpu, eager\n" in capsys.readouterr().out


def test_without_a_compiler_the_run_names_what_it_used_instead(
    corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    given = arguments(corpus, tmp_path, "--train.steps=5")
    done = run_process(*given)
    assert done.returncode == 0, done.stderr
    assert said_backend(done.stderr) == "eager"
    assert "backend cpu" not in done.stderr
    assert done.stderr.count("UserWarning: attention runs without its fused CPU kernel") == 1
    assert train_here(*given, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "attention  lssar (p = 15), planned for cuda: backend triton\n" in shown
