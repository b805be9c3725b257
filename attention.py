"""GPT-2's attention layer: projections, positions, the KV cache, the call of `attend`.

The mechanisms themselves are in the library `lssar`; its names can be imported from here too:

    from attention import attend, attention_weights, get_mechanism, MECHANISMS
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lssar.backends import attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import attend_padded, document_starts, shifted_keys

__all__ = ["MECHANISMS", "Attention", "KVCache", "attend", "attention_weights", "get_mechanism"]


# How a layer knows where tokens are: RoPE; not at all (NoPE); scores that fall with the distance,
# at a fixed rate per head (ALiBi) or by a gate per token (FoX, the forgetting transformer).
POSITIONS = ("rope", "none", "alibi", "fox")


class KVCache:
    """Keys and values of every layer: in buffers that are allocated once for `capacity` tokens, or
    those of the last ones, where a layer has a window."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        # For a padded batch: which keys are tokens (B, keys), new ones included.
        self.mask: Tensor | None = None
        self._document: Tensor | int = 0  # (B, 1): where the last token's document starts
        self._layers: dict[int, list[Tensor]] = {}

    def extend(self, layer: int, *new: Tensor, window: int | None = None) -> list[Tensor]:
        """Append keys, values, ... (B, H, L, d) of one layer; returns all so far, or those that
        some new token sees through the window."""
        end = self.length + new[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache of {self.capacity} tokens cannot hold {end}")
        if window is not None:
            kept = self._layers.get(layer, [x[:, :, :0] for x in new])
            seen = [torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True)]
            start = max(0, seen[0].shape[2] - window + 1)
            self._layers[layer] = [x[:, :, start:].clone() for x in seen]
            return seen
        if layer not in self._layers:
            shapes = [(*x.shape[:2], self.capacity, x.shape[3]) for x in new]
            self._layers[layer] = [x.new_empty(shape) for x, shape in zip(new, shapes, strict=True)]
        for room, x in zip(self._layers[layer], new, strict=True):
            room[:, :, self.length : end] = x
        return [room[:, :, :end] for room in self._layers[layer]]

    def document_starts(self, starts: Tensor) -> Tensor | None:
        """Where each new token's document starts; `starts` (B, L) is True where one begins."""
        if self.mask is not None:
            if starts[:, self.length == 0 :].any():
                several = "a padded batch holds several documents per row"
                raise UserError(f"{several}; pass them one by one")
            return None
        first = torch.where(starts.cummax(1).values, self.length + document_starts(starts), 0)
        first = first.clamp(min=self._document)
        self._document = first[:, -1:]
        return first


Rope = tuple[Tensor, ...]  # cos and sin; then those that turn a query towards its sinks, if any


def rope_at(
    position: Tensor, head_dim: int, interpolation: float, scaling="pi", train_length=1024
) -> Rope:
    """cos and sin (..., 1, 1, head_dim / 2) of positions (L,), or (B, L) where rows differ.

    `interpolation` s stretches them to s times the training length: "pi" divides the positions by
    s; "ntk" raises the base, so that the slowest pair turns s times slower and the fastest as
    before; "yarn" does so for each pair by its turns in the training length (fewer than 1: s times
    slower, more than 32: as before) and multiplies q and k by 0.1 ln(s) + 1.
    """
    # Angles reach 16,384 radians, where float32 has three digits after the point.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    pair = torch.arange(0, head_dim, 2, device=position.device, dtype=dtype)
    base, divisor, size = 10000.0, interpolation, 1.0
    if scaling == "ntk":
        base, divisor = base * interpolation ** (head_dim / max(1, head_dim - 2)), 1.0
    speed = base ** (-pair / head_dim)  # radians per position
    if scaling == "yarn":
        turns = train_length * speed / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
        speed = kept * speed + (1 - kept) * speed / interpolation
        divisor, size = 1.0, 0.1 * math.log(interpolation) + 1
    angle = position.to(dtype).unsqueeze(-1) / divisor * speed
    angle = angle[..., None, None, :]  # broadcasts over q and k as the projection gives them
    return (size * angle.cos()).float(), (size * angle.sin()).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (..., d): rotates each pair of dimensions 2i, 2i + 1 by its angle."""
    pairs = x.to(torch.promote_types(x.dtype, cos.dtype)).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # the compiler fuses this form and lacks complex numbers
        a, b = pairs.unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, layer: int):
        """One layer, counted from 0, of a `model.ModelConfig`."""
        super().__init__()
        width, self.heads, self.layer, self.backend = config.width, config.heads, layer, "auto"
        self.configure(config)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        init = self.mechanism.parameter_init
        self.head_scale = None if init is None else nn.Parameter(torch.full((self.heads,), init))
        self.forget = nn.Linear(width, self.heads) if self.positions == "fox" else None

    def configure(self, config) -> None:
        self.mechanism, self.positions = config.layer(self.layer)
        self.shift = config.shifts(self.layer)

    def forward(self, x: Tensor, rope: Rope | None, cache: KVCache | None, first=None) -> Tensor:
        m, (q, k, v) = self.mechanism, self.queries_keys_values(x, rope)
        gates = [] if self.forget is None else [self.gates(x)]
        mask = None if cache is None else cache.mask
        if cache is not None:
            # Padding may lie between the tokens of a window, and the current length counts all.
            whole = mask is not None or m.length == "current" or m.sinks
            window = None if whole or m.window is None else m.window + self.shift
            k, v, *gates = cache.extend(self.layer, k, v, *gates, window=window)
            if first is not None:
                first = first - (cache.length + x.shape[1] - k.shape[2])
        options = {"params": self.head_scale, "backend": self.backend}
        options["decay"] = self.decay(k, *gates)
        if m.sinks and self.positions == "rope":
            q, k = self.near_sinks(q, k, rope[2:])
        if mask is not None:
            out = attend_padded(q, k, v, m, mask, shift=self.shift, **options)
        else:
            k = shifted_keys(k, first) if self.shift else k
            out = attend(q, k, v, m, first=first, **options)  # (B, H, L, d)
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def queries_keys_values(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        qk, v = self.qkv(x).view(batch, length, 3, self.heads, -1).split((2, 1), dim=2)
        turned = qk if rope is None or self.positions != "rope" else rotate(qk, *rope[:2])
        q, k = turned.transpose(1, 3).unbind(2)  # (B, H, L, d)
        return q, k, v.squeeze(2).transpose(1, 2)

    def near_sinks(self, q: Tensor, k: Tensor, turn: Rope) -> tuple[Tensor, Tensor]:
        """As StreamingLLM has it: the sinks stand right before the window. Twice the dimensions:
        the first half of a query meets the keys of its window, the second, turned, the sinks."""
        sink = (torch.arange(k.shape[2], device=k.device) < self.mechanism.sinks).unsqueeze(-1)
        turned = rotate(q.transpose(1, 2).unsqueeze(2), *turn).squeeze(2).transpose(1, 2)
        q = torch.cat((q, turned), -1) * math.sqrt(2)  # as scores are divided by sqrt(2 d)
        return q, torch.cat((k.masked_fill(sink, 0), k.masked_fill(~sink, 0)), -1)

    def gates(self, x: Tensor) -> Tensor:
        """FoX: log sigmoid(w_h . x_t + b_h), (B, H, L, 1)."""
        gates = self.forget(x)
        gates = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        return gates.transpose(1, 2).unsqueeze(-1)

    def decay(self, k: Tensor, gates: Tensor | None = None) -> Tensor | None:
        """The log decay at each key, (B, H, Lk): of its gate, or ALiBi's m_h = 2^(-8 h / H)."""
        if gates is not None:
            return gates.squeeze(-1)
        if self.positions != "alibi":
            return None
        head = torch.arange(1, self.heads + 1, device=k.device, dtype=torch.float32)
        return -(2 ** (-8 * head / self.heads)).view(1, -1, 1).expand(-1, -1, k.shape[2])
