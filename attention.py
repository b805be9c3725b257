"""LSSA and LSSAR as the paper writes them; then GPT-2's attention layer, its RoPE and its KV cache.

The layer calls the library `lssar`, which computes these two and every other mechanism of the
paper with fused kernels. Its names can be imported from here too:

    from attention import attend, attention_weights, get_mechanism, MECHANISMS
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lssar.backends import attend, attend_padded
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import document_starts, shifted_keys
from modelling.config import Layer

__all__ = [
    "MECHANISMS",
    "Attention",
    "KVCache",
    "attend",
    "attention_weights",
    "get_mechanism",
    "lssa",
    "lssar",
]


def lssa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute length-scaled softplus attention of q, k, v (..., L, d): equ:lengthscaleatt."""
    L, d = q.shape[-2:]
    q = F.normalize(q, dim=-1)  # Q_i <- Q_i / |Q_i|_2
    k = F.normalize(k, dim=-1)  # K_i <- K_i / |K_i|_2
    N = torch.arange(1, L + 1).to(q).unsqueeze(-1)  # N_ij = i, (L, 1)
    S = math.log(d) * N.log() * (q @ k.transpose(-1, -2))  # (..., L, L)
    A = F.softplus(S).tril()  # Softplus(S) times the causal mask M'
    A = A / A.sum(-1, keepdim=True)  # A_i <- A_i / |A_i|_1
    return A @ v


def lssar(q: Tensor, k: Tensor, v: Tensor, p: float = 15) -> Tensor:
    """Compute LSSA with re-weighting: algorithm alg:lssar_detailed, equation equ:reweighting.

    To be read, not run: x^p overflows float32, and a row of equal scores is 0 / 0. The library
    divides by the row's maximum first, and leaves such a row as stage 1 made it.
    """
    # Stage 1: normalisation, which is LSSA.
    L, d = q.shape[-2:]
    q = F.normalize(q, dim=-1)  # Q_i <- Q_i / |Q_i|_2
    k = F.normalize(k, dim=-1)  # K_i <- K_i / |K_i|_2
    N = torch.arange(1, L + 1).to(q).unsqueeze(-1)  # N_ij = i, (L, 1)
    S = math.log(d) * N.log() * (q @ k.transpose(-1, -2))  # (..., L, L)
    A = F.softplus(S).tril()  # Softplus(S) times the causal mask M'
    A = A / A.sum(-1, keepdim=True)  # A_i <- A_i / |A_i|_1
    # Stage 2: sharpening, which is the re-weighting.
    O = (N > 3).to(q.dtype)  # O_ij = 1 where i > 3
    A = F.relu(A * N - O) ** p  # ReLU^p(A N - O)
    A = A / A.sum(-1, keepdim=True)  # A_i <- A_i / |A_i|_1
    return A @ v


Rope = tuple[Tensor, ...]  # cos and sin; then those that turn a query towards its sinks, if any


class Attention(nn.Module):
    """One attention layer of GPT-2: projections, positions, and any mechanism."""

    def __init__(self, width: int, heads: int, layer: Layer, number: int):
        """Make the layer that is `number` in its model, from 0."""
        super().__init__()
        self.heads = heads
        self.number = number
        self.backend = "auto"
        self.configure(layer)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        init = layer.attention.parameter_init
        self.head_scale = None if init is None else nn.Parameter(torch.full((heads,), init))
        self.forget = nn.Linear(width, heads) if layer.positions == "fox" else None

    def configure(self, layer: Layer) -> None:
        """Take other settings; the weights stay."""
        self.mechanism = layer.attention
        self.positions = layer.positions
        self.shift = layer.shift

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        cache: "KVCache | None" = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output (B, L, width); `first` (B, L): where each document starts."""
        m = self.mechanism
        q, k, v = self.queries_keys_values(x, rope)  # (B, H, L, d)
        gates = [] if self.forget is None else [self.gates(x)]
        mask = None
        if cache is not None:
            mask = cache.mask
            k, v, *gates = cache.extend(self.number, k, v, *gates, window=self.kept_keys(mask))
            if first is not None:
                first = first - (cache.length + x.shape[1] - k.shape[2])
        decay = self.decay(k, *gates)
        if m.sinks and self.positions == "rope":
            q, k = self.near_sinks(q, k, rope[2:])
        options = {"head_scale": self.head_scale, "decay": decay, "backend": self.backend}
        if mask is not None:
            out = attend_padded(q, k, v, m, mask, shift=self.shift, **options)
        else:
            if self.shift:
                k = shifted_keys(k, first)
            out = attend(q, k, v, m, first=first, **options)  # (B, H, L, d)
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def kept_keys(self, mask: Tensor | None) -> int | None:
        """Return how many keys a cache has to keep for this layer; None: all of them."""
        m = self.mechanism
        if m.window is None or m.sinks:
            return None
        # Padding may lie between the tokens of a window, and the current length counts all keys.
        if mask is not None or m.length == "current":
            return None
        return m.window + self.shift

    def queries_keys_values(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, H, L, d), the first two turned by RoPE if the layer has it."""
        batch, length, _ = x.shape
        qk, v = self.qkv(x).view(batch, length, 3, self.heads, -1).split((2, 1), dim=2)
        if rope is not None and self.positions == "rope":
            qk = rotate(qk, *rope[:2])
        q, k = qk.transpose(1, 3).unbind(2)  # (B, H, L, d)
        return q, k, v.squeeze(2).transpose(1, 2)

    def near_sinks(self, q: Tensor, k: Tensor, turn: Rope) -> tuple[Tensor, Tensor]:
        """Place the sinks right before the window, as StreamingLLM does.

        Doubles the dimensions: the first half of a query meets the keys of its window, the second
        half, turned, meets the sinks.
        """
        sink = (torch.arange(k.shape[2], device=k.device) < self.mechanism.sinks).unsqueeze(-1)
        turned = rotate(q.transpose(1, 2).unsqueeze(2), *turn).squeeze(2).transpose(1, 2)
        q = torch.cat((q, turned), -1) * math.sqrt(2)  # as scores are divided by sqrt(2 d)
        return q, torch.cat((k.masked_fill(sink, 0), k.masked_fill(~sink, 0)), -1)

    def gates(self, x: Tensor) -> Tensor:
        """Return FoX's log sigmoid(w_h . x_t + b_h), (B, H, L, 1)."""
        gates = self.forget(x)
        gates = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        return gates.transpose(1, 2).unsqueeze(-1)

    def decay(self, k: Tensor, gates: Tensor | None = None) -> Tensor | None:
        """Return the log decay at each key, (B, H, Lk): its gate, or ALiBi's m_h = 2^(-8 h / H)."""
        if gates is not None:
            return gates.squeeze(-1)
        if self.positions != "alibi":
            return None
        head = torch.arange(1, self.heads + 1, device=k.device, dtype=torch.float32)
        return -(2 ** (-8 * head / self.heads)).view(1, -1, 1).expand(-1, -1, k.shape[2])


def rope_at(
    position: Tensor,
    head_dim: int,
    interpolation: float,
    scaling: str = "pi",
    train_length: int = 1024,
) -> Rope:
    """Return cos and sin (..., 1, 1, head_dim / 2) at positions (L,), or (B, L) where rows differ.

    `interpolation` s stretches them to s times the training length: "pi" divides the positions by
    s; "ntk" raises the base, so that the slowest pair turns s times slower and the fastest as
    before; "yarn" does so for each pair by its turns in the training length (fewer than 1: s times
    slower, more than 32: as before) and multiplies q and k by 0.1 ln(s) + 1.
    """
    # Angles reach 16,384 radians, where float32 has three digits after the point.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    pair = torch.arange(0, head_dim, 2, device=position.device, dtype=dtype)
    base = 10000.0
    divisor = interpolation
    size = 1.0
    if scaling == "ntk":
        base = base * interpolation ** (head_dim / max(1, head_dim - 2))
        divisor = 1.0
    speed = base ** (-pair / head_dim)  # radians per position
    if scaling == "yarn":
        turns = train_length * speed / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
        speed = kept * speed + (1 - kept) * speed / interpolation
        divisor = 1.0
        size = 0.1 * math.log(interpolation) + 1
    angle = position.to(dtype).unsqueeze(-1) / divisor * speed
    angle = angle[..., None, None, :]  # broadcasts over q and k as the projection gives them
    return (size * angle.cos()).float(), (size * angle.sin()).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to (..., d): rotate each pair of dimensions 2i, 2i + 1 by its angle."""
    pairs = x.to(torch.promote_types(x.dtype, cos.dtype)).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # the compiler fuses this form and lacks complex numbers
        a, b = pairs.unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return turned.flatten(-2).to(x.dtype)


class KVCache:
    """Keys and values of every layer, for decoding token by token.

    A layer that sees everything has buffers for `capacity` tokens, allocated once. A layer with a
    window keeps the last tokens only.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        # For a padded batch: which keys are tokens (B, keys), new ones included.
        self.mask: Tensor | None = None
        self._document: Tensor | int = 0  # (B, 1): where the last token's document starts
        self._layers: dict[int, list[Tensor]] = {}

    def extend(self, layer: int, *new: Tensor, window: int | None = None) -> list[Tensor]:
        """Append keys, values, ... (B, H, L, d) of one layer.

        Returns all so far, or those that some new token sees through the window.
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
        kept = self._layers.get(layer, [x[:, :, :0] for x in new])
        seen = [torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True)]
        start = max(0, seen[0].shape[2] - window + 1)
        self._layers[layer] = [x[:, :, start:].clone() for x in seen]
        return seen

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
