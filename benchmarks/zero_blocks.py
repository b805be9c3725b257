"""python benchmark.py zero-blocks --inputs random|RUN --lengths 1024: would skipping zeros pay?

The share of attention weights that are exactly zero in LSSAR, and of whole blocks of them: a tile
kernel can leave out a block only if every row of it looks at none of its keys. For RUN, a training
run or checkpoint, the q and k of every layer for a text.
"""

from argparse import Namespace
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from attention import attention_weights
from benchmarks.attention import make_inputs
from errors import Parser, UserError
from evaluation import lengths, open_checkpoints

BLOCKS = ((64, 64), (64, 32), (32, 32), (16, 16))
SIZES = ((1, 1), *BLOCKS)
SHORTEST = 2 * BLOCKS[0][0]


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--inputs", default="random", metavar="random|RUN")
    parser.add_argument("--lengths", type=lengths, default=[1024])
    parser.add_argument("--text", type=Path, help="for RUN; default a Python library's source")
    options = parser.parse_args(argv)
    if options.lengths[0] < SHORTEST:
        raise UserError(
            f"--lengths {options.lengths[0]}: no block of {BLOCKS[0][0]} rows and keys lies wholly "
            f"on visible keys; use at least {SHORTEST}"
        )
    shape = {"batch": 1, "heads": 12, "head_dim": 64, "device": "cpu", "dtype": "fp32"}
    layers = 1
    if options.inputs != "random":
        (checkpoint,) = open_checkpoints([options.inputs])
        layers = checkpoint.config.layers
        shape |= {"heads": checkpoint.config.heads, "head_dim": checkpoint.config.head_dim}
    print(f"{'layer':>5} {'length':>6} {'zeros':>7} " + " ".join(f"{m}x{n:<5}" for m, n in BLOCKS))
    for length in options.lengths:
        for layer in range(1, layers + 1):
            q, k, *_ = make_inputs(Namespace(**vars(options), **shape, layer=layer), length)
            found = " ".join(f"{share:7.2%}" for share in shares(q, k))
            print(f"{layer:5} {length:6} {found}")


@torch.no_grad()
def shares(q: Tensor, k: Tensor) -> list[float]:
    """Of the weights, and of the blocks of each of BLOCKS that lie wholly on visible keys."""
    zero, total = Counter(), Counter()
    for head in range(q.shape[1]):
        weights = attention_weights(q[:, head : head + 1], k[:, head : head + 1], "lssar")[0, 0]
        for block in SIZES:
            empty, visible = _blocks(weights, *block)
            zero[block] += (empty & visible).sum().item()
            total[block] += visible.sum().item()
    return [zero[block] / total[block] for block in SIZES]


def _blocks(weights: Tensor, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Which blocks hold only zeros, and which hold no key that a row of theirs cannot see."""
    weights = weights[: len(weights) // rows * rows, : len(weights) // keys * keys]
    tiles = weights.unflatten(0, (-1, rows)).unflatten(-1, (-1, keys))  # (M, rows, N, keys)
    first_row = torch.arange(tiles.shape[0])[:, None] * rows
    last_key = torch.arange(tiles.shape[2]) * keys + keys - 1
    return (tiles == 0).all(3).all(1), first_row >= last_key
