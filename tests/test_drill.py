"""The fault drill in its short form, and what the drill promises of itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_helpers as training
from drill.__main__ import Drill, main, revision
from drill.attack import ATTACKS, Outcome
from drill.children import Child
from drill.summary import write_table
from tqdm import tqdm
from train_helpers import ROOT

from lssar.errors import UserError


def drill(out, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, "-m", "drill", "--out", str(out), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcomes(out):
    found = json.loads((out / "results/reliability.json").read_text())
    return found["unfinished"], {a["name"]: a for a in found["attacks"]}


def test_the_system_withstands_the_short_drill(tmp_path):
    process = drill(tmp_path, "--short")
    shown = process.communicate()[0]
    assert process.returncode == 0, shown
    unfinished, found = outcomes(tmp_path)
    assert not unfinished and len(found) > 20
    assert sum(a["kills"] for a in found.values()) >= 8
    table = (tmp_path / "docs/reliability.md").read_text()
    assert all(a["what"] in table for a in found.values())
    assert len({len(line.split(" | ")) for line in table.splitlines() if " | " in line}) == 1


QUICK = ("security-shared-formats", "security-escaping-names", "storage-rotten-progress")


def test_attacks_side_by_side_give_one_table_in_the_usual_order(tmp_path):
    process = drill(tmp_path, "--short", "--jobs=2", *QUICK)
    shown = process.communicate()[0]
    assert process.returncode == 0, shown
    unfinished, found = outcomes(tmp_path)
    assert not unfinished
    assert list(found) == [name for name in ATTACKS if name in QUICK]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_killed_drill_keeps_what_it_has_finished_and_leaves_no_process(tmp_path):
    names = (*QUICK, "storage-full-disk-metrics")
    process = drill(tmp_path, "--short", "--jobs=2", *names)
    path = tmp_path / "results/reliability.json"
    while process.poll() is None and not (path.exists() and len(outcomes(tmp_path)[1]) == 3):
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    unfinished, kept = outcomes(tmp_path)
    assert unfinished == ["storage-full-disk-metrics"] and len(kept) == 3 and len(workers) == 2
    end = time.monotonic() + 60
    while any(is_running(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in workers)
    process = drill(tmp_path, "--short", "--jobs=2", *names)
    assert process.wait() == 0
    unfinished, found = outcomes(tmp_path)
    assert not unfinished and kept.items() <= found.items()


def is_running(pid):
    """Tell whether a process has not ended, and does not wait for its parent to ask how."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def begun(path, **changes):
    """Return the record, read back, of a drill of two attacks that was killed after the first."""
    chosen = [ATTACKS[name] for name in QUICK[:2]]
    drill = Drill(path, "short", chosen)
    drill.add({"name": chosen[0].name, "passed": True})
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    again = Drill(path, "short", chosen)
    return [name for name, outcome in again.outcomes.items() if outcome]


def test_a_drill_continues_only_where_the_same_one_stopped(tmp_path, capsys):
    assert begun(tmp_path / "a.json") == ["security-shared-formats"]
    assert begun(tmp_path / "b.json", date="1999-12-31") == ["security-shared-formats"]
    assert not capsys.readouterr().out
    for other in ({"revision": "0" * 40}, {"left_out": []}, {"python": "2.7"}, {"command": "x"}):
        assert begun(tmp_path / "c.json", **other) == []
        assert "beginning anew" in capsys.readouterr().out
        (tmp_path / "c.json").unlink()
    assert begun(tmp_path / "d.json", unfinished=[]) == []


CLEAN = "1" * 40


@pytest.mark.parametrize(
    ("begun", "during", "words"),
    [
        (CLEAN, CLEAN, f"One run of the code at {CLEAN}."),
        (CLEAN, "2" * 40, "**Not one revision**"),
        (CLEAN, f"{CLEAN}+", "**Not one revision**"),
        (f"{CLEAN}+", f"{CLEAN}+", f"**Not a clean revision**: the code was at {CLEAN} with"),
    ],
)
def test_the_table_says_whether_it_is_of_one_clean_revision(tmp_path, begun, during, words):
    outcomes = [
        Outcome(name, "security", "what", 1, "nothing", True, 1.0, 1.0).to_dict()
        | {"revision": revision}
        for name, revision in (("a", begun), ("b", during))
    ]
    about = {"command": "x", "date": "d", "revision": begun, "python": "3", "torch": "2"}
    about |= {"root": True, "left_out": [], "unfinished": [], "attacks": outcomes}
    (tmp_path / "x.json").write_text(json.dumps(about))
    table = write_table(tmp_path / "x.md", tmp_path / "x.json").read_text()
    assert words in table
    assert ("**Not" in table) == (words[0] == "*")
    assert "Not the whole drill" not in table


def test_the_repository_s_table_is_only_written_at_a_clean_revision(monkeypatch):
    monkeypatch.setattr("drill.__main__.git_revision", lambda: "unknown")
    with pytest.raises(UserError, match="is of one clean revision, this is unknown; commit first"):
        main([])


def test_what_a_drill_writes_does_not_make_its_revision_a_changed_one(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    for name in ("docs/reliability.md", "results/reliability.json", "code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    monkeypatch.setattr("drill.__main__.git_revision", lambda: f"{CLEAN}+")
    monkeypatch.setattr(training, "ROOT", tmp_path)
    (tmp_path / "docs/reliability.md").write_text("after")
    (tmp_path / "results/reliability.json").write_text("after")
    assert revision() == CLEAN
    (tmp_path / "code.py").write_text("after")
    assert revision() == f"{CLEAN}+"


def test_a_child_killed_while_it_draws_its_bar_does_not_stop_the_next(tmp_path):
    """tqdm has a lock that forked processes share, and a killed one never gives it back."""

    def draw_for_ever(argv):
        tqdm.get_lock().acquire()
        print("drawing", flush=True)
        time.sleep(600)

    tqdm.get_lock()
    child = Child(draw_for_ever, [], tmp_path / "first")
    while child.poll() is None and "drawing" not in child.shown():
        time.sleep(0.01)
    assert child.kill()
    second = Child(lambda argv: tqdm.write("drawn"), [], tmp_path / "second")
    assert second.wait(60) == 0


@pytest.mark.parametrize("name", ["crashes-trainin", "all"])
def test_an_unknown_attack_is_one_line(name):
    with pytest.raises(UserError, match=f"no attack '{name}'; "):
        main([name])
