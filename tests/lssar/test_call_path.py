"""How many of our frames a call passes on its way to a kernel."""

import sys
from pathlib import Path

import pytest
import torch

from attention import Attention
from lssar import cpu, triton_form, triton_op
from model import GPT, preset

ROOT = Path(__file__).parents[2]
MOST_FRAMES = 8


def frames_from_the_layer() -> list[str]:
    """Return the repository's own frames above the caller, up to and with `Attention.forward`."""
    frame = sys._getframe(2)
    found = []
    while frame.f_code is not Attention.forward.__code__:
        path = Path(frame.f_code.co_filename)
        # An environment may lie in the checkout.
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            found.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")
        frame = frame.f_back
    return [*found, "Attention.forward"]


def run_model(backend: str) -> None:
    """Run a step with gradients and one without."""
    torch.manual_seed(0)
    model = GPT(preset("nano", "lssar")).use_backend(backend)
    tokens = torch.arange(13)[None]
    model(tokens[:, :-1], tokens[:, 1:])
    with torch.no_grad():
        model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
def test_a_layer_reaches_the_cpu_kernel_in_few_frames(monkeypatch):
    kernel = cpu._kernel()
    seen = []

    class Watched:
        @staticmethod
        def lssar_forward(call):
            seen.append(frames_from_the_layer())
            return kernel.lssar_forward(call)

    monkeypatch.setattr(cpu, "_kernel", Watched)
    run_model("cpu")
    assert seen and max(map(len, seen)) <= MOST_FRAMES, seen


def test_a_layer_reaches_the_launch_of_triton_in_few_frames(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = []

    def watched(*arguments, **constants):
        seen.append([*frames_from_the_layer(), "launch"])

    for module in (triton_op, triton_form):
        monkeypatch.setattr(module, "launch", watched)
    run_model("triton")
    assert seen and max(map(len, seen)) <= MOST_FRAMES, seen
