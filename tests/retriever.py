"""A GPT whose weights are written by hand so that it retrieves a passkey, at any depth.

It is an induction head over five tokens. Layer 1 has five heads; head r attends to the token r
places back, by RoPE alone, and copies its class (which digit, a blank, "i", "s", "y", or other).
Layer 2 compares the classes of the last five tokens with those before every earlier token, prefers
digits a little, and copies the token that follows the best match.
"""

import math

import numpy as np
import torch

from lssar.mechanisms import get_mechanism
from model import GPT, preset

HEADS, HEAD_DIM, CONTEXT = 5, 128, 5
WIDTH = HEADS * HEAD_DIM
CLASSES = "0123456789 isy"  # and all others
TOKEN, CLASS, DIGIT = slice(0, 64), slice(64, 80), slice(80, 82)
INTERPOLATION = 64.0  # slows RoPE, so that far and near content look alike to layer 2


def before(r: int) -> slice:
    """Return where the residual stream holds the class of the token r places back; 0: its own."""
    return CLASS if r == 0 else slice(82 + 16 * (r - 1), 82 + 16 * r)


def retriever() -> GPT:
    mechanism = get_mechanism("softmax", train_length=256)
    shape = {"layers": 2, "heads": HEADS, "width": WIDTH}
    model = GPT(preset("nano", mechanism, **shape, interpolation=INTERPOLATION)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1 if "norm" in name and name.endswith("weight") else 0)
        model.embedding.weight.copy_(embedding(model.config.vocab_size))
        # All codes are balanced and of one norm, so LayerNorm only scales; undo that.
        for block, norm in zip(model.blocks, (82, 82 + 16 * CONTEXT), strict=True):
            block.norm_attention.weight.fill_(math.sqrt(norm / WIDTH))
        look_back(model.blocks[0].attention)
        match(model.blocks[1].attention)
    return model


def embedding(tokens: int) -> torch.Tensor:
    random, table = np.random.default_rng(0), np.zeros((tokens, WIDTH))
    hadamard = np.ones((1, 1))
    while len(hadamard) < 16:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    for token in range(tokens):
        kind = CLASSES.find(chr(token)) if token < 128 else -1
        digit = 1 if 0 <= kind < 10 else -1
        table[token, TOKEN] = random.permutation([1, -1] * 32)
        table[token, CLASS] = hadamard[1 + (kind if kind >= 0 else len(CLASSES))]
        table[token, DIGIT] = digit, -digit
    return torch.from_numpy(table)


def parts(attention, head: int):
    """Return the rows of the joint projection that make this head's queries, keys and values."""
    first = head * HEAD_DIM
    return (slice(kind * WIDTH + first, kind * WIDTH + first + HEAD_DIM) for kind in range(3))


def look_back(attention) -> None:
    pairs = torch.arange(HEAD_DIM // 2)
    speed = 10000.0 ** (-2 * pairs / HEAD_DIM) / INTERPOLATION
    fast = (pairs < 16).float()
    for head in range(CONTEXT):
        q, k, v = parts(attention, head)
        angle = (head + 1) * speed
        # A pair of dimensions is a vector in the plane that RoPE turns.
        attention.qkv.bias[k] = torch.stack((fast, 0 * fast), dim=-1).flatten()
        towards = torch.stack((fast * angle.cos(), -fast * angle.sin()), dim=-1)
        attention.qkv.bias[q] = 7e5 * towards.flatten()
        copy(attention, head, v, CLASS, before(head + 1))


def match(attention) -> None:
    q, k, v = parts(attention, 0)
    # The slowest pairs of dimensions, the last, hardly turn over the whole prompt.
    slow = range(HEAD_DIM - 82, HEAD_DIM)
    for r in range(CONTEXT):
        for i in range(16):
            place = slow[16 * r + i]
            attention.qkv.weight[q.start + place, before(r).start + i] = 50
            attention.qkv.weight[k.start + place, before(r + 1).start + i] = 1
    attention.qkv.bias[q.start + slow[-1]] = 50 * 4  # half a token of agreement, for a digit
    attention.qkv.weight[k.start + slow[-1], DIGIT.start] = 1
    copy(attention, 0, v, TOKEN, TOKEN)
    attention.proj.weight[TOKEN] *= 6


def copy(attention, head: int, v: slice, source: slice, target: slice) -> None:
    size = source.stop - source.start
    first = head * HEAD_DIM
    attention.qkv.weight[v.start : v.start + size, source] = torch.eye(size)
    attention.proj.weight[target, first : first + size] = torch.eye(size)
