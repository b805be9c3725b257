"""Computes LSSA in FlexAttention, a cross-check of our kernels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal(batch, head, row, key):
    return row >= key


def flex_lssa(q: Tensor, k: Tensor, v: Tensor, compiled: bool) -> Tensor:
    """Compute LSSA as softmax(log softplus(score)) in FlexAttention."""
    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=q.device)
    count = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]
    q = F.normalize(q.float(), dim=-1) * count.log() * math.log(q.shape[3])
    k = F.normalize(k.float(), dim=-1)

    def score(x, batch, head, row, key):
        return F.softplus(x).log()

    flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return flex(q.to(v.dtype), k.to(v.dtype), v, score_mod=score, block_mask=mask, scale=1.0)
