"""Keeps keys and values of earlier tokens, for decoding token by token."""

import torch
from torch import Tensor

from lssar.errors import UserError
from lssar.spans import document_starts, token_positions


class KVCache:
    """Holds keys and values of every layer, for decoding token by token.

    A layer that sees everything has buffers for `capacity` tokens, allocated once. A layer with a
    window keeps the last tokens only.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0  # tokens so far
        # For a padded batch: which keys are tokens (B, keys), new ones included.
        self.mask: Tensor | None = None
        self._document: Tensor | int = 0  # (B, 1): where the last token's document starts
        self._layers: dict[int, list[Tensor]] = {}

    def extend(self, layer: int, *new: Tensor, window: int | None = None) -> list[Tensor]:
        """Append keys, values and gates (B, H, L, d) of one layer.

        Return all so far; with a window, only those that a new token sees.
        """
        end = self.length + new[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache of {self.capacity} tokens cannot hold {end}")
        if window is not None:
            return self._extend_window(layer, new, window)
        if layer not in self._layers:
            shapes = [(*x.shape[:2], self.capacity, x.shape[3]) for x in new]
            self._layers[layer] = [x.new_empty(shape) for x, shape in zip(new, shapes, strict=True)]
        for buffer, x in zip(self._layers[layer], new, strict=True):
            buffer[:, :, self.length : end] = x
        return [buffer[:, :, :end] for buffer in self._layers[layer]]

    def _extend_window(self, layer: int, new: tuple[Tensor, ...], window: int) -> list[Tensor]:
        """Append to a layer with a window, and forget keys that no later token sees."""
        kept = self._layers.get(layer, [x[:, :, :0] for x in new])
        seen = [torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True)]
        start = max(0, seen[0].shape[2] - (window - 1))  # the next token sees itself and these
        self._layers[layer] = [x[:, :, start:].clone() for x in seen]
        return seen

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of the next `count` tokens: (L,), or (B, L) in a padded batch."""
        if self.mask is not None:
            return token_positions(self.mask, count)
        return torch.arange(self.length, self.length + count, device=device)

    def document_starts(self, starts: Tensor) -> Tensor | None:
        """Return where each new token's document starts, (B, L).

        `starts` (B, L) is True where a document begins.
        """
        if self.mask is not None:
            skip = 1 if self.length == 0 else 0  # the first token may begin the only document
            if starts[:, skip:].any():
                raise UserError("a padded batch holds several documents per row; pass each alone")
            return None
        first = torch.where(starts.cummax(1).values, self.length + document_starts(starts), 0)
        first = first.clamp(min=self._document)
        self._document = first[:, -1:]
        return first
