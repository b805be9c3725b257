"""Softmax over a span by PyTorch's FlexAttention, to be put beside the fused kernels."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.attention_study import DOCUMENTS, GROUPED, WINDOW
from benchmarks.measure import Step


def flex_steps(span: str, inputs: list[Tensor]) -> list[Step]:
    """One call of each phase, as `attention_study.steps_of`; on a CPU it has no backward."""
    q, k, v, grad = inputs
    flex = flex_attention
    if q.is_cuda:
        torch.compiler.reset()
        flex = torch.compile(flex_attention, dynamic=False)
    if span == GROUPED:
        k, v = k[:, :4], v[:, :4]

    def visible(batch, head, row, key):
        seen = key <= row
        if span == WINDOW:
            seen = seen & (key > row - 128)
        if span == DOCUMENTS:
            seen = seen & (key // 256 == row // 256)
        return seen

    mask = create_block_mask(visible, None, None, q.shape[2], q.shape[2], device=q.device)
    run = partial(flex, block_mask=mask, enable_gqa=span == GROUPED)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return [lambda: run(q, k, v), lambda: torch.autograd.grad(run(*leaves), leaves, grad)]
