"""The fault drill in its short form, and what the drill promises of itself."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from drill.__main__ import main
from training import ROOT

from errors import UserError


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


@pytest.mark.slow
def test_a_killed_drill_keeps_what_it_has_finished(tmp_path):
    names = ("security-shared-formats", "security-escaping-names", "storage-full-disk-metrics")
    process = drill(tmp_path, "--short", *names)
    path = tmp_path / "results/reliability.json"
    while process.poll() is None and not (path.exists() and len(outcomes(tmp_path)[1]) == 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    unfinished, kept = outcomes(tmp_path)
    assert unfinished == ["storage-full-disk-metrics"] and len(kept) == 2
    process = drill(tmp_path, "--short", "security-shared-formats")
    assert process.wait() == 0
    assert outcomes(tmp_path)[1]["security-escaping-names"] == kept["security-escaping-names"]


@pytest.mark.parametrize("name", ["crashes-trainin", "all"])
def test_an_unknown_attack_is_one_line(name):
    with pytest.raises(UserError, match=f"no attack '{name}'; "):
        main([name])
