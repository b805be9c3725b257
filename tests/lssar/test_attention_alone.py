"""`from attention import attend` with nothing but torch: every other package is out of reach."""

import runpy
import subprocess
import sys
from pathlib import Path

import torch

from lssar.mechanisms import MECHANISMS

REPOSITORY = Path(__file__).parents[2]

PROGRAM = """
import sys
from importlib.metadata import packages_distributions

# What `pip install torch` brings along.
TORCH = {"torch", "torchgen", "functorch", "typing_extensions", "filelock", "fsspec", "sympy"}
TORCH |= {"mpmath", "networkx", "jinja2", "markupsafe", "setuptools", "_distutils_hack"}
OTHERS = set(packages_distributions()) - TORCH
assert "numpy" in OTHERS


class Without:
    # A finder that does not find them.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in OTHERS
        return None if hidden else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
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
    assert done.stdout == f"{len(MECHANISMS)} mechanisms\n"


def test_the_example_of_an_own_model_learns():
    example = runpy.run_path(str(REPOSITORY / "examples" / "own_model.py"))
    assert example["main"]("lssar", steps=80) < 0.5  # log(32) = 3.47 is a guess
    tokens = torch.tensor([[33, 4, 5, 32, 33, 6, 7, 32]])
    other = torch.tensor([[33, 8, 9, 32, 33, 6, 7, 32]])  # another first document
    model = example["Model"]("lssar")
    assert torch.equal(model(tokens)[:, 4:], model(other)[:, 4:])
    assert not torch.equal(model(tokens)[:, :4], model(other)[:, :4])
