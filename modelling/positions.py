"""Computes RoPE with its stretches to longer texts, ALiBi, and StreamingLLM's sinks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rope(NamedTuple):
    """Holds RoPE at the tokens' positions, each (..., 1, 1, head_dim / 2)."""

    cos: Tensor
    sin: Tensor
    sink_cos: Tensor | None = None  # with sinks: RoPE of the queries that meet them
    sink_sin: Tensor | None = None


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


def near_sinks(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
    """Place the sinks right before the window, as StreamingLLM does.

    Doubles the dimensions: the first half of a query meets the keys of its window. The second half,
    turned by cos and sin, meets the first keys, which are the sinks.
    """
    is_sink = (torch.arange(k.shape[2], device=k.device) < sinks).unsqueeze(-1)
    turned = rotate(q.transpose(1, 2).unsqueeze(2), cos, sin).squeeze(2).transpose(1, 2)
    q = torch.cat((q, turned), -1) * math.sqrt(2)  # as scores are divided by sqrt(2 d)
    return q, torch.cat((k.masked_fill(is_sink, 0), k.masked_fill(~is_sink, 0)), -1)


def alibi_decay(heads: int, k: Tensor) -> Tensor:
    """Return ALiBi's log decay at each key, (1, H, Lk): head h of H has -2^(-8 h / H)."""
    head = torch.arange(1, heads + 1, device=k.device, dtype=torch.float32)
    return -(2 ** (-8 * head / heads)).view(1, -1, 1).expand(-1, -1, k.shape[2])
