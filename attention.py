"""GPT-2's attention layer: projections, rotary positions, the KV cache, the call of `attend`.

The mechanisms themselves are in the library `lssar`; its names can be imported from here too:

    from attention import attend, attention_weights, get_mechanism, MECHANISMS
"""

import torch
import torch.nn as nn
from torch import Tensor

from lssar.backends import attend
from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import attend_padded

__all__ = ["MECHANISMS", "Attention", "KVCache", "attend", "attention_weights", "get_mechanism"]


class KVCache:
    """Keys and values of every layer, in buffers that are allocated once for `capacity` tokens."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        # For a padded batch: which keys are tokens (B, keys), new ones included.
        self.mask: Tensor | None = None
        self.document: Tensor | None = None  # (B, 1): where the last token's document starts
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, L, d) for one layer; returns all keys and values so far."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache of {self.capacity} tokens cannot hold {end}")
        if layer not in self._layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


Rope = tuple[Tensor, Tensor]


def rope_at(position: Tensor, head_dim: int, interpolation: float) -> Rope:
    """cos and sin (..., 1, 1, head_dim / 2) of positions (L,), or (B, L) where rows differ."""
    # Angles reach 16,384 radians, where float32 has three digits after the point.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    pair = torch.arange(0, head_dim, 2, device=position.device, dtype=dtype)
    angle = position.to(dtype).unsqueeze(-1) / interpolation * 10000.0 ** (-pair / head_dim)
    angle = angle[..., None, None, :]  # broadcasts over q and k as the projection gives them
    return angle.cos().float(), angle.sin().float()


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
    def __init__(self, width: int, heads: int, mechanism: Mechanism, layer: int):
        super().__init__()
        self.layer, self.heads, self.mechanism = layer, heads, mechanism
        self.backend = "auto"
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        init = mechanism.parameter_init
        self.head_scale = None if init is None else nn.Parameter(torch.full((heads,), init))

    def forward(self, x: Tensor, rope: Rope | None, cache: KVCache | None, first=None) -> Tensor:
        q, k, v = self.queries_keys_values(x, rope)
        options = {"params": self.head_scale, "backend": self.backend}
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if cache is None or cache.mask is None:
            out = attend(q, k, v, self.mechanism, first=first, **options)  # (B, H, L, d)
        else:
            out = attend_padded(q, k, v, self.mechanism, cache.mask, **options)
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def queries_keys_values(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        qk, v = self.qkv(x).view(batch, length, 3, self.heads, -1).split((2, 1), dim=2)
        turned = qk if rope is None else rotate(qk, *rope)
        q, k = turned.transpose(1, 3).unbind(2)  # (B, H, L, d)
        return q, k, v.squeeze(2).transpose(1, 2)
