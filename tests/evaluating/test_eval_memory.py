"""The memory of GPT-2 124M at 16K tokens.

Two of its twelve layers: evaluation keeps nothing of a layer but its output, so that more of them
take more time and the same memory above the weights.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from eval_helpers import write_checkpoint, write_tokens

from model import GPT, preset

ROOT = Path(__file__).parents[2]

PROGRAM = """
import resource, sys
sys.path.insert(0, {root!r})
from eval_extrapolation import main
main(sys.argv[1:])
print("peak MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.parametrize("attention", ["softmax", "lssar"])
def test_124m_at_16k_takes_less_than_4_gb_above_the_weights(tmp_path, attention):
    data = write_tokens(tmp_path / "data", 16385, vocab_size=50257)
    model = GPT(preset("124m", attention, layers=2))
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    checkpoint = write_checkpoint(tmp_path / attention, model)
    del model
    arguments = ["--data", data, "--lengths", "16384", "--out", tmp_path / "x.json"]
    program = PROGRAM.format(root=str(ROOT))
    ended = subprocess.run(
        [sys.executable, "-c", program, checkpoint, *arguments, "--device", "cpu"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    above = float(ended.stdout.split("peak MB")[1]) - weights
    print(f"\n{attention}: {above:.0f} MB above the {weights:.0f} MB of weights")
    assert above < 4096
