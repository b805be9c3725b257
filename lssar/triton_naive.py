"""Writes out in PyTorch what the Triton kernels compute for LSSAR over full rows.

Every name and formula is that of `triton_forward.py` and `triton_backward.py`, without tiles.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: float) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of q, k, v (B, H, L, d), from the gradient of out."""
    length, d = q.shape[2:]
    count = torch.arange(1, length + 1, device=q.device, dtype=q.dtype)[:, None]
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    shifted = (count > 3).to(q.dtype)  # O

    # Forward: a pass for the mean and the largest f, and one for the values.
    scale = math.log(d) * count.log() / q.norm(dim=-1, keepdim=True)
    unit_k = F.normalize(k, dim=-1)
    s = scale * (q @ unit_k.mT)
    f = F.softplus(s).masked_fill(~seen, 0)
    mean = shifted * f.sum(-1, keepdim=True) / count
    size = f.amax(-1, keepdim=True) - mean  # M
    z = ((f - mean) / size).relu().masked_fill(~seen, 0)
    l = (z**p).sum(-1, keepdim=True)
    out = (z**p) @ v / l

    # Backward, with a = 1 / (M l^(1/p)): weights are (a (f - mean))^p then.
    a = l ** (-1 / p) / size
    z = z * l ** (-1 / p)
    r = torch.where(z > 0, z ** (p - 1), 0)
    w = r * z
    delta = (grad * out).sum(-1, keepdim=True)  # D
    t = r * (grad @ v.mT - delta)
    dense = shifted / count * p * a * t.sum(-1, keepdim=True)  # E
    slope = torch.sigmoid(s).masked_fill(~seen, 0)
    dq = scale * (p * a * ((t * slope) @ unit_k) - dense * (slope @ unit_k))
    ds = (p * a * t - dense) * slope
    dk = (scale * ds).mT @ q / k.norm(dim=-1, keepdim=True)
    return out, _through_norm(q, dq), _through_norm(k, dk), w.mT @ grad


def _through_norm(x: Tensor, grad: Tensor) -> Tensor:
    """Take off the gradient's part along x, whose length does not matter."""
    unit = F.normalize(x, dim=-1)
    return grad - unit * (unit * grad).sum(-1, keepdim=True)
