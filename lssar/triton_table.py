"""Lists tile shapes of the Triton kernels, chosen beforehand and not by timing.

Timing would choose differently from run to run and from rank to rank, and the order of a sum with
it: a resumed run would not give the same bits. `python benchmark.py kernels` compiles every entry
for its cards and says what it needs. None has run on hardware.
"""

import warnings
from functools import cache

# (BLOCK_M rows, BLOCK_N keys, warps, stages), by the kernel, the head dimension of the tiles (64
# and below share one) and whether the input has 16 bits or 32; "plain" is for rows without a mean,
# which need fewer registers.
_AMPERE = {
    ("forward", 64, 16): (128, 32, 4, 2),
    ("forward", 128, 16): (128, 64, 8, 2),
    ("forward", 256, 16): (32, 32, 8, 2),
    ("dq", 64, 16): (128, 32, 8, 3),
    ("dq", 64, 16, "plain"): (128, 32, 4, 2),
    ("dq", 128, 16): (128, 16, 8, 2),
    ("dq", 128, 16, "plain"): (128, 32, 8, 2),
    ("dq", 256, 16): (32, 32, 8, 2),
    ("dkv", 64, 16): (16, 128, 4, 2),
    ("dkv", 128, 16): (16, 128, 8, 2),
    ("dkv", 256, 16): (16, 32, 8, 2),
    ("forward", 64, 32): (16, 32, 4, 2),
    ("forward", 128, 32): (16, 32, 8, 2),
    ("forward", 256, 32): (16, 16, 8, 1),
    ("dq", 64, 32): (16, 32, 4, 2),
    ("dq", 128, 32): (16, 32, 8, 2),
    ("dq", 256, 32): (16, 16, 8, 1),
    ("dkv", 64, 32): (32, 32, 8, 2),
    ("dkv", 128, 32): (32, 16, 8, 2),
    ("dkv", 256, 32): (16, 16, 8, 1),
}
_HOPPER = {key: shape for key, shape in _AMPERE.items() if "plain" not in key} | {
    ("forward", 64, 16): (128, 64, 8, 3),
    ("forward", 128, 16): (128, 64, 8, 3),
    ("dq", 64, 16): (128, 64, 8, 2),
    ("dkv", 64, 16): (32, 128, 8, 2),
}
_BLACKWELL_RTX = _AMPERE | {
    ("dq", 128, 16): (128, 16, 8, 3),
    ("dkv", 64, 16): (32, 128, 8, 2),
}
# By compute capability: 80 is an A100, 86 an RTX 3090, 89 an RTX 4090, 90 an H100, 100 a B200, 120
# an RTX 5090. Older ones, as a T4 (75), are refused. Below 80 Triton multiplies by scalar
# instructions (triton-lang/triton#5066), and `forward` spills a kilobyte per thread.
TILES = {
    80: _AMPERE,
    86: _AMPERE,
    89: _AMPERE,
    90: _HOPPER,
    100: _HOPPER,
    120: _BLACKWELL_RTX,
}
# What a block of programs may have of shared memory, in KiB.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Splitting a few rows over their keys: rows of a tile are those of all heads that share a key.
DECODE = {64: (64, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2)}  # keys, warps, stages


OLDEST = min(TILES)


@cache
def entry_of(architecture: int) -> int:
    """Return the entry of the table for a card, the next smaller one if it has none."""
    if architecture in TILES:
        return architecture
    entry = max(known for known in TILES if known < architecture)
    warnings.warn(
        f"the Triton kernels have no tile shapes for sm_{architecture}; they take those of "
        f"sm_{entry}, which may be slow or not fit",
        stacklevel=2,
    )
    return entry


def tiles(
    kernel: str, head_dim: int, bits: int, plain: bool, architecture: int
) -> tuple[int, int, int, int]:
    """Return rows, keys, warps and stages of a kernel on a card."""
    entry = TILES[entry_of(architecture)]
    key = (kernel, max(head_dim, 64), bits)
    return entry.get((*key, "plain"), entry[key]) if plain else entry[key]
