"""Shows LSSA and LSSAR as the paper writes them, and defines GPT-2's attention layer.

Equations and Algorithm 1 are those of arXiv 2501.13428; in its LaTeX source they are called
equ:lengthscaleatt, equ:reweighting and alg:lssar_detailed.

The layer calls the library `lssar`, which computes these two and every other mechanism of the
paper with fused kernels. RoPE is in modelling/positions.py, the KV cache in modelling/cache.py. The
library's names can be imported from here too:

    from attention import attend, attention_weights, get_mechanism, MECHANISMS
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lssar.backends import attend, attend_padded
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights
from lssar.spans import shifted_keys
from modelling.cache import KVCache
from modelling.config import Layer
from modelling.positions import Rope, alibi_decay, near_sinks, rotate

__all__ = [
    "MECHANISMS",
    "Attention",
    "attend",
    "attention_weights",
    "get_mechanism",
    "lssa",
    "lssar",
]


def lssa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute length-scaled softplus attention of q, k, v (..., L, d): equation 4."""
    L, d = q.shape[-2:]
    q = F.normalize(q, dim=-1)  # Q_i <- Q_i / |Q_i|_2
    k = F.normalize(k, dim=-1)  # K_i <- K_i / |K_i|_2
    N = torch.arange(1, L + 1).to(q).unsqueeze(-1)  # N_ij = i, (L, 1)
    S = math.log(d) * N.log() * (q @ k.transpose(-1, -2))  # scores (..., L, L)
    A = F.softplus(S).tril()  # Softplus(S) times the causal mask M'
    A = A / A.sum(-1, keepdim=True)  # A_i <- A_i / |A_i|_1
    return A @ v


def lssar(q: Tensor, k: Tensor, v: Tensor, p: float = 15) -> Tensor:
    """Compute LSSA with re-weighting: Algorithm 1, whose lines have the numbers in the comments.

    To be read, not run: x^p overflows float32, and a row of equal scores is 0 / 0. The library
    divides by the row's maximum first, and leaves such a row as stage 1 made it.
    """
    L, d = q.shape[-2:]
    # Stage 1: normalisation, which is LSSA (equation 4).
    q = F.normalize(q, dim=-1)  # 1: Q_i <- Q_i / |Q_i|_2
    k = F.normalize(k, dim=-1)  # 2: K_i <- K_i / |K_i|_2
    N = torch.arange(1, L + 1).to(q).unsqueeze(-1)  # 3: N_ij <- i, (L, 1)
    S = math.log(d) * N.log() * (q @ k.transpose(-1, -2))  # 4: scores (..., L, L)
    A = F.softplus(S).tril()  # 5: Softplus(S) times the causal mask M'
    A = A / A.sum(-1, keepdim=True)  # 6: A_i <- A_i / |A_i|_1
    # Stage 2: sharpening, which is the re-weighting (equation 5).
    O = (N > 3).to(q.dtype)  # 7: O_ij <- 1 where i > 3
    A = F.relu(A * N - O) ** p  # 8: ReLU^p(A N - O)
    A = A / A.sum(-1, keepdim=True)  # 9: A_i <- A_i / |A_i|_1
    return A @ v  # 10: the weights A; the layer's output is A V


class Attention(nn.Module):
    """Computes one attention layer of GPT-2, with any mechanism and any positions."""

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
        cache: KVCache | None = None,
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
            if first is not None:  # the cache may have forgotten the first keys
                first = first - (cache.length + x.shape[1] - k.shape[2])
        decay = self.decay(k, *gates)
        if m.sinks and self.positions == "rope":
            q, k = near_sinks(q, k, rope.sink_cos, rope.sink_sin, m.sinks)
        options = {"head_scale": self.head_scale, "decay": decay, "backend": self.backend}
        if mask is not None:
            out = attend_padded(q, k, v, m, mask, shift=self.shift, **options)
        else:
            if self.shift:
                k = shifted_keys(k, first)
            out = attend(q, k, v, m, first=first, **options)  # (B, H, L, d)
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def queries_keys_values(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, H, L, d), the first two turned by RoPE if the layer has it."""
        batch, length, _ = x.shape
        qk, v = self.qkv(x).view(batch, length, 3, self.heads, -1).split((2, 1), dim=2)
        if rope is not None and self.positions == "rope":
            qk = rotate(qk, rope.cos, rope.sin)
        q, k = qk.transpose(1, 3).unbind(2)  # (B, H, L, d)
        return q, k, v.squeeze(2).transpose(1, 2)

    def gates(self, x: Tensor) -> Tensor:
        """Return the forgetting transformer's log sigmoid(w_h . x_t + b_h), (B, H, L, 1)."""
        gates = self.forget(x)
        gates = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        return gates.transpose(1, 2).unsqueeze(-1)

    def decay(self, k: Tensor, gates: Tensor | None = None) -> Tensor | None:
        """Return the log decay at each key, (B, H, Lk): its gate, or ALiBi's constant."""
        if gates is not None:
            return gates.squeeze(-1)
        return alibi_decay(self.heads, k) if self.positions == "alibi" else None

    def kept_keys(self, mask: Tensor | None) -> int | None:
        """Return how many keys a cache has to keep for this layer; None: all of them."""
        m = self.mechanism
        if m.window is None or m.sinks:
            return None
        # Padding may lie between the tokens of a window, and the current length counts all keys.
        if mask is not None or m.length == "current":
            return None
        return m.window + self.shift
