"""A transformer of your own with lssar.attend: python examples/own_model.py [mechanism]

Grouped heads (four query heads share two heads of keys and values) and packed documents: every row
sees its own document only. It learns to recall, after each document's separator, the token it
began with, and prints the loss of that token: log(32) = 3.47 for a guess.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from lssar import attend
from lssar.spans import documents

VOCAB, WIDTH, HEADS, GROUPS, LAYERS = 34, 64, 4, 2, 2
ASK, END = 32, 33  # "which token did this document begin with?", and the end of a document


class Block(nn.Module):
    def __init__(self, mechanism: str):
        super().__init__()
        self.mechanism = mechanism
        head = WIDTH // HEADS
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * GROUPS * head)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, GROUPS, -1)).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, self.mechanism, first=first)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, mechanism: str):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        self.blocks = nn.ModuleList(Block(mechanism) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = documents(tokens, END)
        place = torch.arange(tokens.shape[1]) - first  # counted from the document's own start
        x = self.tokens(tokens) + self.places(place)
        for block in self.blocks:
            x = block(x, first)
        return self.norm(x) @ self.tokens.weight.T


def packed(batch: int, count: int = 4, length: int = 12) -> torch.Tensor:
    """Documents END a b c ... ASK a, one after the other in each row."""
    words = torch.randint(0, 32, (batch, count, length))
    parts = [torch.full_like(words[..., :1], END), words, torch.full_like(words[..., :1], ASK)]
    return torch.cat([*parts, words[..., :1]], -1).flatten(1)


def main(mechanism: str = "lssar", steps: int = 150) -> float:
    torch.manual_seed(0)
    model = Model(mechanism)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = packed(32)
        asked = tokens[:, :-1] == ASK
        loss = F.cross_entropy(model(tokens[:, :-1])[asked], tokens[:, 1:][asked])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:2])
