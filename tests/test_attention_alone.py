"""`from attention import attend` with nothing but torch: every other package is out of reach."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

PROGRAM = """
import sys

# torch itself cannot be imported without these.
OWN = {"torch", "torchgen", "functorch", "typing_extensions", "attention", "errors", "kernels"}


class Refuse:
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in OWN and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
import torch
from attention import MECHANISMS, attend

q, k, v = torch.randn(3, 2, 3, 17, 8, requires_grad=True).unbind()
for name in MECHANISMS:
    out = attend(q, k, v, name)
    out.square().mean().backward(retain_graph=True)
    assert out.shape == v.shape and out.isfinite().all(), name
assert "numpy" not in sys.modules and "transformers" not in sys.modules
print(len(MECHANISMS), "mechanisms")
"""


def test_every_mechanism_runs_with_nothing_but_torch_installed():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "24 mechanisms\n"
