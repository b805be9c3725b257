"""q, k and v to measure attention with: random, with keys nearly alike, or of a trained layer."""

import argparse
import inspect
import math
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from attention import rope_tables
from benchmarks.measure import DTYPES
from evaluating.checkpoints import open_checkpoints
from lssar.errors import UserError

# How far the keys are from each other, all but one that lies opposite; None: keys at random.
RANDOM, ALIKE = None, 1e-4


def fill_shape(options: Namespace) -> None:
    """Heads and head size of the checkpoint that --inputs names, 12 of 64 without one."""
    if options.inputs == "random":
        if options.layer or options.text:
            raise UserError("--layer and --text say where in a checkpoint; add --inputs RUN")
        options.heads, options.head_dim = options.heads or 12, options.head_dim or 64
        options.layers, options.checkpoint = 1, None
        return
    if options.heads or options.head_dim:
        raise UserError(f"--heads and --head-dim are those of --inputs {options.inputs}; drop them")
    (checkpoint,) = open_checkpoints([options.inputs])
    config = checkpoint.config
    options.heads, options.head_dim, options.layers = config.heads, config.head_dim, config.layers
    options.checkpoint = checkpoint.identity
    options.layer = options.layer or config.layers
    if options.layer > config.layers:
        raise UserError(
            f"--layer {options.layer}: {options.inputs} has layers 1 to {config.layers}"
        )


def make_inputs(options: Namespace, length: int, spread: float | None = RANDOM) -> list[Tensor]:
    """q, k, v and a gradient of the output, each (B, H, L, d), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.heads, length, options.head_dim)
    if options.inputs == "random":
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    else:
        q, k, v = trained_inputs(options, length)
    grad = torch.randn(shape, generator=generator)
    if spread is not RANDOM:
        one = (options.batch, options.heads, 1, options.head_dim)
        base = torch.randn(one, generator=torch.Generator().manual_seed(1))
        q, k = base + 0.1 * q, base + spread * k
        k[:, :, 0] = -base[:, :, 0]
    return [x.to(options.device, DTYPES[options.dtype]) for x in (q, k, v, grad)]


@torch.no_grad()
def trained_inputs(options: Namespace, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a checkpoint's layer for the first tokens of a text, the next ones a sequence."""
    (checkpoint,) = open_checkpoints([options.inputs])
    model = checkpoint.load(torch.device("cpu"))
    path = options.text or Path(inspect.getsourcefile(argparse))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: cannot be read as text ({error})") from None
    tokens = torch.from_numpy(checkpoint.tokeniser().encode(text).astype("int64"))
    needed = options.batch * length
    if len(tokens) == 0:
        raise UserError(f"--text {path} is empty")
    tokens = tokens.repeat(math.ceil(needed / len(tokens)))[:needed].view(options.batch, length)
    config, last = model.config, model.blocks[options.layer - 1]
    rope = rope_tables(0, length, config.head_dim, config.interpolation, "cpu")
    x = model.embedding(tokens)
    for block in model.blocks[: options.layer - 1]:
        x = block(x, rope, None)
    return last.attention.queries_keys_values(last.norm_attention(x), rope)
