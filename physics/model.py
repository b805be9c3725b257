"""Defines a model of orbits: GPT-2's blocks with another embedding and another head.

Each position has `channels` tokens (x and y). Each channel has a table of its own, and a linear
layer joins them. Positions are learned. The head is not tied: it predicts the next token of every
channel, or `outputs` numbers per position by regression.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lssar.errors import UserError
from model import initialise, make_blocks
from modelling.config import ModelConfig
from modelling.losses import linear_cross_entropy, token_losses


class OrbitModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width = config.width
        rows = config.channels * config.vocab_rows
        self.embedding = nn.Embedding(rows, width)  # of all channels
        self.join = nn.Linear(config.channels * width, width)
        self.positions = nn.Embedding(config.position_rows, width)
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.outputs or rows)
        initialise(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss with targets, else the logits or the predicted numbers.

        tokens (B, L, channels); targets (B, L, channels) tokens, or (B, L, outputs) numbers that
        are NaN where there is no label.
        """
        hidden = self.hidden(tokens)
        if targets is None:
            return self.logits(hidden)
        if self.config.outputs:
            return labelled_mse(self.logits(hidden), targets)
        return torch.stack(self._losses(linear_cross_entropy, hidden, targets)).mean()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states (B, L, width)."""
        c = self.config
        length = tokens.shape[1]
        if length > c.position_rows:
            raise UserError(
                f"{length} is longer than the model's table of {c.position_rows} positions"
            )
        first_row = torch.arange(c.channels, device=tokens.device) * c.vocab_rows
        x = self.join(self.embedding(tokens + first_row).flatten(2))
        x = x + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (..., channels, vocab_size), or (..., outputs)."""
        c = self.config
        out = self.head(hidden).float()
        if c.outputs:
            return out
        return out.unflatten(-1, (c.channels, -1))[..., : c.vocab_size]

    def _losses(self, loss, hidden: Tensor, targets: Tensor) -> list[Tensor]:
        """Return `loss(hidden, the head's weight, targets, classes)` of each channel."""
        c = self.config
        # The bias becomes the weight of an input of ones; seven zeros keep the rows aligned.
        hidden = F.pad(F.pad(hidden, (0, 1), value=1.0), (0, 7))
        weight = F.pad(torch.cat((self.head.weight, self.head.bias.unsqueeze(1)), dim=1), (0, 7))
        tables = weight.split(c.vocab_rows)
        return [loss(hidden, w, targets[..., i], c.vocab_size) for i, w in enumerate(tables)]

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every token, in the shape of the targets, without gradients."""
        return torch.stack(self._losses(token_losses, self.hidden(tokens), targets), dim=-1)

    def use_backend(self, name: str) -> "OrbitModel":
        """Compute attention with one of `lssar.backends.BACKENDS`, or "auto"."""
        for block in self.blocks:
            block.attention.backend = name
        return self

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def labelled_mse(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of (predicted - target)^2 over the targets that are not NaN."""
    labelled = ~targets.isnan()
    error = predicted - torch.where(labelled, targets, predicted.detach())
    return error.square().sum() / labelled.sum().clamp(min=1)
