"""python examples/own_model.py [mechanism]

Trains a transformer of your own with lssar.attend. Four heads of queries share two of keys and
values, and no token sees another document. The model learns to recall the token that a document
began with; a guess has a loss of log(32) = 3.47.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # a clone in which lssar is not installed

from lssar import MECHANISMS, attend
from lssar.spans import documents

ASK = 32  # the token that asks: "which token did this document begin with?"
END = 33  # the token between documents


class Block(nn.Module):
    def __init__(self, mechanism: str):
        super().__init__()
        self.mechanism = mechanism
        self.qkv = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, (4 + 2 + 2) * 16))
        self.out = nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2)  # (B, 8, L, 16)
        q, k, v = heads.split((4, 2, 2), dim=1)
        y = attend(q, k, v, self.mechanism, first=first)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, mechanism: str):
        super().__init__()
        self.tokens = nn.Embedding(34, 64)
        self.places = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(Block(mechanism) for _ in range(2))
        self.head = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 34))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = documents(tokens, END)  # the first key that each token sees
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]) - first)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


def main(mechanism: str = "lssar", steps: int = 100) -> float:
    torch.manual_seed(0)
    model = Model(mechanism)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        words = torch.randint(0, 32, (32, 4, 12))  # four documents per row: END, words, ASK
        tokens = F.pad(F.pad(words, (1, 0), value=END), (0, 1), value=ASK).flatten(1)
        loss = F.cross_entropy(model(tokens)[tokens == ASK], words[..., 0].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"{mechanism}: loss {loss.item():.3f} after {steps} steps")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "mechanism", nargs="?", default="lssar", choices=MECHANISMS, metavar="MECHANISM"
    )
    main(parser.parse_args().mechanism)
