"""python -m benchmarks.bf16_gradients [--steps 0,30,120] [--seeds 3]

How far gradients under bf16 autocast are from those in float32, by mechanism and by step of
training: |g16 - g32| / |g32| over all weights of a nano GPT-2. Training is in float32, so that all
precisions are compared at the same weights. The last rows try what could help: the projection to q,
k and v in float32, all of the attention layers in float32, or a p that grows from 3 to 15 in the
first 60 steps.

Below it, the largest gradient where the projection to the queries begins small, or at zero.

The text is a file of Python's standard library, as bytes.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lssar.mechanisms import Mechanism, get_mechanism
from model import GPT, preset
from support.text import table
from training.distributed import autocast

LENGTH = 256
BATCH = 4
SCALES = (0.02, 1e-3, 1e-6, 0.0)
RAMP_STEPS = 60
FIRST_P = 3
REWEIGHTED = [get_mechanism("lssar", p=p) for p in (1, 3, 7, 15)]
MECHANISMS = [get_mechanism("softmax"), get_mechanism("lssa"), *REWEIGHTED]


def batches(seed: int) -> Iterator[Tensor]:
    """Yield windows (BATCH, LENGTH + 1) of the text."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts])


def gradients(model: GPT, tokens: Tensor, precision: AbstractContextManager) -> Tensor:
    """Return the gradients of all weights, one after the other."""
    model.zero_grad()
    with precision:
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def bf16() -> AbstractContextManager:
    return autocast(torch.device("cpu"), "bf16")


@contextmanager
def in_float32(model: GPT, choose: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Compute the chosen part of each attention layer in float32, within autocast."""
    parts = [choose(block.attention) for block in model.blocks]
    forwards = [part.forward for part in parts]

    def run(forward, x, *rest, **options):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float(), *rest, **options)

    for part, forward in zip(parts, forwards, strict=True):
        part.forward = partial(run, forward)
    try:
        yield
    finally:
        for part in parts:
            del part.forward


REMEDIES = {
    "": lambda model: nullcontext(),
    ", q, k and v in fp32": lambda model: in_float32(model, lambda layer: layer.qkv),
    ", attention layers in fp32": lambda model: in_float32(model, lambda layer: layer),
}


def set_p(model: GPT, p: float) -> None:
    """Compute the attention of all layers with this p from now on."""
    for block in model.blocks:
        block.attention.mechanism = replace(block.attention.mechanism, p=p)


def errors(
    m: Mechanism, steps: list[int], seed: int, *, ramped: bool = False
) -> dict[tuple[str, int], float]:
    """Return the relative error of the gradients by remedy and step; `ramped`: p grows to m.p."""
    torch.manual_seed(seed)
    model = GPT(preset("nano", m))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = batches(seed)
    found = {}
    for step in range(max(steps) + 1):
        if ramped:
            grown = min(1.0, step / RAMP_STEPS)
            set_p(model, FIRST_P + (m.p - FIRST_P) * grown)
        tokens = next(source)
        exact = gradients(model, tokens, nullcontext())
        if step in steps:
            for name, remedy in REMEDIES.items():
                with remedy(model):
                    rounded = gradients(model, tokens, bf16())
                found[name, step] = ((rounded - exact).norm() / exact.norm()).item()
            exact = gradients(model, tokens, nullcontext())
        optimiser.step()
    return found


def largest_gradient(m: Mechanism, scale: float) -> float:
    """Return the largest gradient where the projection to the queries begins at this scale."""
    torch.manual_seed(0)
    model = GPT(preset("nano", m))
    for block in model.blocks:
        queries = block.attention.qkv.weight[: model.config.width]
        with torch.no_grad():
            queries.normal_().mul_(scale)
    return gradients(model, next(batches(0)), nullcontext()).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="0,30,120")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    steps = [int(step) for step in arguments.steps.split(",")]
    rows = []
    for m in MECHANISMS:
        runs = [errors(m, steps, seed) for seed in range(arguments.seeds)]
        for name in REMEDIES if m == MECHANISMS[-1] else [""]:
            medians = [statistics.median(run[name, step] for run in runs) for step in steps]
            rows.append([m.title + name, *(f"{value:.2g}" for value in medians)])
    m = MECHANISMS[-1]
    runs = [errors(m, steps, seed, ramped=True) for seed in range(arguments.seeds)]
    for name in REMEDIES:
        medians = [statistics.median(run[name, step] for run in runs) for step in steps]
        rows.append([f"{m.title} from {FIRST_P}{name}", *(f"{value:.2g}" for value in medians)])
    print(f"relative error of bf16 gradients, median of {arguments.seeds} seeds\n")
    print(table(["after steps", *map(str, steps)], rows))
    rows = []
    for m in (MECHANISMS[0], MECHANISMS[-1]):
        rows.append([m.title, *(f"{largest_gradient(m, scale):.2g}" for scale in SCALES)])
    print("\nlargest gradient, by the scale at which the queries begin\n")
    print(table(["scale", *(f"{scale:g}" for scale in SCALES)], rows))


if __name__ == "__main__":
    # Some virtual machines announce AMX and do not have it.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    main()
