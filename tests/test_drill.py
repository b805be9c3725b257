"""The fault drill in its short form."""

import json
import os
import subprocess
import sys

from train_helpers import ROOT


def test_the_system_withstands_the_short_drill(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "drill", "--short", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results/reliability.json").read_text())
    assert not found["unfinished"] and len(found["attacks"]) > 20
    assert sum(attack["kills"] for attack in found["attacks"]) >= 8
    table = (tmp_path / "docs/reliability.md").read_text()
    assert all(attack["what"] in table for attack in found["attacks"])
