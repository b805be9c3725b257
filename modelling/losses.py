"""Computes the cross-entropy of a linear head, without the logits of all tokens in memory.

The logits are the largest tensor of a GPT-2 (50,304 floats per token). Here they are computed
exactly, chunk by chunk. The loss is a scalar, so the forward pass also computes its gradients, up
to the factor that arrives with the backward pass: no logit is computed twice.
"""

import threading

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # targets with this value do not count

# Logits held at once: enough to keep a GPU busy, small enough for a CPU's memory traffic.
CHUNK_LOGITS = {"cpu": 2**24, "default": 2**28}


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight[:classes].T)[target] over targets.

    hidden (..., C), weight (rows >= classes, C), targets (...), of which IGNORE does not count.
    Softmax and sums are in float32; the products follow autocast.
    """
    # Inside a Function gradients look needed even under no_grad.
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _LinearCrossEntropy.apply(flat, weight, targets.reshape(-1), classes, training)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return -log softmax(...)[target] of every token in float32, in the shape of targets."""
    dtype = _product_type(hidden)
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    table = weight.to(dtype)
    wanted = targets.reshape(-1)
    with torch.autocast(hidden.device.type, enabled=False):
        chunks = _chunks(flat, table)
        losses = [_losses(flat[rows], table, wanted[rows], classes)[0] for rows in chunks]
    return torch.cat(losses).view(targets.shape)


def _product_type(hidden: Tensor) -> torch.dtype:
    """Return the type of products: autocast's, or that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _chunks(hidden: Tensor, weight: Tensor):
    """Cut the tokens into slices of about the same size, as products of few rows are slow."""
    logits = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["default"])
    tokens = hidden.shape[0]
    most = max(1, logits // weight.shape[0])
    count = max(1, -(-tokens // most))
    size = max(1, -(-tokens // count))
    return (slice(i, i + size) for i in range(0, tokens, size))


def _losses(hidden: Tensor, weight: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, ...]:
    """Return the loss of each row (0 for IGNORE), log-probabilities, the targets as an index.

    There is a log-probability for every row of the weight, -inf for the padding that makes products
    faster. On a CPU the next call overwrites them.
    """
    shape = (hidden.shape[0], weight.shape[0])
    logits = torch.mm(hidden, weight.T, out=_buffer("logits", shape, hidden)).float()
    logits[:, classes:] = -torch.inf
    log_probability = torch.log_softmax(logits, -1, out=_buffer("probabilities", shape, logits))
    ignored = targets == IGNORE
    index = targets.masked_fill(ignored, 0).unsqueeze(-1)
    losses = -log_probability[:, :classes].gather(-1, index).squeeze(-1).masked_fill(ignored, 0)
    return losses, log_probability, index


_buffers = threading.local()


def _buffer(use: str, shape: tuple[int, int], like: Tensor) -> Tensor | None:
    """Return this thread's memory for a result on a CPU, the same in every step; else None.

    The system clears new memory of this size page by page, which takes time. On a GPU the allocator
    keeps it.
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    kept = vars(_buffers).get((use, like.dtype))
    if kept is None or kept.numel() < shape[0] * shape[1]:
        with torch.inference_mode(False):  # or only inference could write to it
            kept = torch.empty(shape[0] * shape[1], dtype=like.dtype)
        vars(_buffers)[use, like.dtype] = kept
    return kept[: shape[0] * shape[1]].view(shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss and its gradients in one pass over the chunks."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, classes, training):
        dtype = _product_type(hidden)
        counted = targets != IGNORE
        count = counted.sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if training:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            table = weight.to(dtype)
            for rows in _chunks(hidden, weight):
                h = hidden[rows].to(dtype)
                losses, log_probability, index = _losses(h, table, targets[rows], classes)
                total += losses.sum()
                if training:
                    # d loss / d logits = (softmax - onehot) / count, made in place.
                    delta = log_probability.exp_()
                    delta.scatter_add_(-1, index, delta.new_full(index.shape, -1.0))
                    delta = delta.mul_((counted[rows] / count).unsqueeze(-1)).to(dtype)
                    grad_hidden[rows] = delta @ table
                    if dtype == grad_weight.dtype:
                        grad_weight.addmm_(delta.T, h)
                    else:
                        grad_weight += delta.T @ h
        if training:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: the weight's is as large as the table, and nobody else holds it.
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None
