"""Defines a model of orbits: GPT-2's blocks with another embedding and another head.

Each position has `channels` tokens (x and y). Each channel has a table of its own, and a linear
layer joins them. Positions are learned. The head is not tied: it predicts the next token of every
channel, or `outputs` numbers per position by regression.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lssar.errors import UserError
from model import initialise, make_blocks
from modelling.config import ModelConfig, check_count
from modelling.losses import linear_cross_entropy, token_losses


@dataclass(frozen=True)
class OrbitModelConfig(ModelConfig):
    """Says what a model of orbits is."""

    channels: int = 2  # tokens per position
    learned_positions: int = 0  # rows of the table
    outputs: int = 0  # numbers per position from a regression head; 0: tokens

    @property
    def head_rows(self) -> int:
        """Return how many numbers the head gives for each position."""
        return self.outputs or self.channels * self.vocab_rows

    def check(self) -> None:
        """Refuse values that no model of orbits can have."""
        super().check()
        check_count("channels", self.channels)
        check_count("learned_positions", self.learned_positions)
        check_count("outputs", self.outputs, least=0)
        kinds = {layer.positions for layer in self.all_layers}
        if kinds != {"none"}:
            raise UserError(
                f"model: positions = {', '.join(sorted(kinds))!r}; orbits have learned ones, "
                "write 'none'"
            )
        if self.documents:
            raise UserError("model: documents = True; data.document_mask is for text")


class OrbitModel(nn.Module):
    """Computes GPT-2's blocks between an embedding and a head for orbits."""

    config_type = OrbitModelConfig

    def __init__(self, config: OrbitModelConfig):
        super().__init__()
        self.config = config
        width = config.width
        rows = config.channels * config.vocab_rows
        self.embedding = nn.Embedding(rows, width)  # of all channels
        self.join = nn.Linear(config.channels * width, width)
        self.positions = nn.Embedding(config.learned_positions, width)
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.head_rows)
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
        if length > c.learned_positions:
            raise UserError(
                f"{length} is longer than the model's table of {c.learned_positions} positions"
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
        """Count the parameters."""
        return sum(p.numel() for p in self.parameters())

    def weights_per_token(self) -> int:
        """Count the weights that every position is multiplied by, which linear layers have."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))


def labelled_mse(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of (predicted - target)^2 over the targets that are not NaN."""
    labelled = ~targets.isnan()
    error = predicted - torch.where(labelled, targets, predicted.detach())
    return error.square().sum() / labelled.sum().clamp(min=1)
