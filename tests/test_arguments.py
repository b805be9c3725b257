"""No number on a command line is a traceback or a hang: one line that names it, exit code 2."""

import argparse
import sys

import numpy as np
import pytest
import torch
from cases import cases
from checkout import ROOT, tracked
from eval_helpers import tiny_model, write_checkpoint, write_tokens

import attention_maps
import benchmark
import eval_extrapolation
import generate
import passkey
import reproduce
from data.prepare import main as prepare
from physics.simulate import main as simulate
from support import command as errors
from support.command import number, whole

NONSENSE = ("", " ", "x", "nan", "inf", "-inf", "1e999", "-1", "-2048", ",", "1,,2", "0x10")
NO_WHOLE_NUMBER = ("1.5", "1e3x", "9" * 30, "9" * 5000, "infB", "nanM", "1e999K", "-1K")
ZERO_MEANS_SOMETHING = {"--seed", "--seeds", "--workers", "--planets"}


class Captured(Exception):
    pass


def commands() -> list[str]:
    """Return every module with a command line, as it is imported."""
    found = []
    for file in tracked("*.py", ":!tests"):
        text = file.read_text(encoding="utf-8")
        if "def main(argv" in text and "Parser(" in text:
            found.append(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return found


def parser_of(main, monkeypatch) -> argparse.ArgumentParser:
    """Return the parser that a command has made when it is about to read its arguments."""
    found, read = [], argparse.ArgumentParser.parse_known_args

    def capture(parser, *given):
        if not parser.add_help:  # a part that others have in common
            return read(parser, *given)
        found.append(parser)
        raise Captured

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
    with pytest.raises(Captured):
        main([])
    return found[0]


def options(parser: argparse.ArgumentParser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from options(part)
        elif action.type is not None:
            yield action


def is_number(value) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(v, int | float) for v in values)


def accepts(kind, text: str) -> bool:
    try:
        kind(text)
    except (argparse.ArgumentTypeError, ValueError):  # argparse makes a line of these, no others
        return False
    return True


def test_no_option_takes_a_number_that_it_cannot_use(monkeypatch):
    for name in cases(sorted({*commands()} - {"benchmark"})):
        refuse_nonsense(parser_of(pytest.importorskip(name).main, monkeypatch))


def test_no_benchmark_takes_a_number_that_it_cannot_use():
    for name in cases(benchmark.BENCHMARKS):
        refuse_nonsense(benchmark.make_parser(name))


def refuse_nonsense(parser: argparse.ArgumentParser) -> None:
    for action in options(parser):
        if action.choices or not (accepts(action.type, "7") and is_number(action.type("7"))):
            continue
        option = action.option_strings[0]
        assert action.type not in (int, float), f"{option}: the types of errors.py have a range"
        bad = [*NONSENSE, *([] if accepts(action.type, "7.5") else NO_WHOLE_NUMBER)]
        bad += [] if option in ZERO_MEANS_SOMETHING else ["0"]
        taken = [text[:40] for text in bad if accepts(action.type, text)]
        assert taken == [], option


def test_types_have_inclusive_and_exclusive_ends():
    assert [whole(2, 5)(t) for t in ("2", "5")] == [2, 5]
    assert not any(accepts(whole(2, 5), t) for t in ("1", "6", "2.0"))
    assert number(0, 1)("1") == 1
    assert not any(accepts(number(0, 1), t) for t in ("0", "1.0000001", "-0.0"))
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        whole()("9" * 5000)
    assert len(str(refused.value)) < 100


# --- as a user sees it ---------------------------------------------------------------------------


@pytest.fixture
def line(tmp_path, monkeypatch, capsys):
    """Return what a command that must refuse prints, run as a program in a folder with a model."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "m", tiny_model(), tokeniser="bytes")
    write_tokens(tmp_path / "d", 99)

    def refused(main, *argv):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            errors.run(main)
        assert ended.value.code == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("error: ")
        return said

    return refused


HUGE = 2**31 - 1
EVALUATE = (eval_extrapolation.main, "m", "--data", "d", "--out", "x.json", "--lengths", "8")
PASSKEY = (passkey.main, "m", "--out", "x.json", "--lengths", "400")
ORBITS = (simulate, "orbits", "--out", "o", "--workers", "0")


def test_an_impossible_number_is_one_line(line):
    examples = [
        ((*EVALUATE, "--segment", "-2048"), "--segment: '-2048' must be at least 1"),
        ((*EVALUATE, "--segment", "0"), "--segment: '0' must be at least 1"),
        ((*EVALUATE, "--segment", HUGE), "does not divide"),
        ((*EVALUATE, "--tokens", "1"), "--tokens 1 is less than one segment"),
        ((*EVALUATE, "--lengths", HUGE), "too few for one segment"),
        ((*EVALUATE, "--window", "0"), "--window: '0' must be at least 1"),
        ((*EVALUATE, "--p", "nan"), "--p: 'nan' is not a number"),
        ((*PASSKEY, "--trials", HUGE), "--trials: '2147483647' must be at most 100000"),
        ((*PASSKEY, "--lengths", HUGE), "the lengths of a prompt"),
        ((*PASSKEY, "--seed", "-1"), "--seed: '-1' must be at least 0"),
        ((generate.main, "m", "--seed", "9" * 23), "must be at most 9223372036854775807"),
        ((generate.main, "m", "--tokens", HUGE), "--tokens: '2147483647' must be at most 1000000"),
        ((generate.main, "m", "--top-p", "1.5"), "--top-p: '1.5' must be at most 1"),
        ((attention_maps.main, "m", "--out", "x.json", "--layer", HUGE), "has layers 1 to 2"),
        ((benchmark.main, "train", "--batch", "0"), "--batch: '0' must be at least 1"),
        ((benchmark.main, "train", "--batch", HUGE, "--length", HUGE), "not fit into memory"),
        ((benchmark.main, "attention", "--p", "0.5"), "must be a number >= 1"),
        ((benchmark.main, "attention", "--threads", HUGE), "must be at most 1024"),
        ((benchmark.main, "kernels", "--workers", "0"), "--workers: '0' must be at least 1"),
        ((prepare, "stdlib", "--out", ""), "--out: '' is not a path"),
        ((prepare, "download", "fineweb", "--out="), "--out: '' is not a path"),
        ((*PASSKEY, "--out", ""), "--out: '' is not a path"),
        ((reproduce.main, "headline", "--plan", "--seeds", "0,-1"), "'-1' must be at least 0"),
        ((prepare, "stdlib", "--out", "o", "--workers", HUGE), "must be at most 1024"),
        ((*ORBITS, "--points", HUGE), "must be at most 100000"),
        ((*ORBITS, "--shard-sequences", "1"), "raise --shard-sequences"),
        ((*ORBITS, "--shard-sequences", HUGE), "do not fit in one shard"),
        ((simulate, "forces", "--out", "o", "--labelled", HUGE), "do not fit in one shard"),
    ]
    for command, part in cases(examples):
        assert part in line(*command)


LONG = "x" * 300


def test_a_name_that_no_file_can_have_is_one_line(line):
    examples = [
        (generate.main, LONG),
        (eval_extrapolation.main, "m", "--data", LONG, "--out", "x.json", "--lengths", "8"),
        (passkey.main, "m", "--lengths", "400", "--out", f"{LONG}.json"),
        (attention_maps.main, LONG, "--out", "x.json"),
    ]
    for command in cases(examples):
        said = line(*command)
        assert "too long for the name of a file" in said
        assert len(said) < 120


def test_what_does_not_fit_into_memory_is_one_line(line):
    requests = [
        lambda argv: np.empty((2**31, 2**22)),
        lambda argv: torch.empty(2**62),
        lambda argv: torch.empty(2**50),
    ]
    for request in cases(requests):
        assert "does not fit into memory; ask for less" in line(request)


def test_other_failures_keep_their_traceback(monkeypatch):
    def broken(argv):
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(RuntimeError, match="a defect of ours"):
        errors.run(broken)
