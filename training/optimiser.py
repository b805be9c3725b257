"""Optimises with AdamW, and the matrices of blocks with Muon if `train.optimiser = "muon"`.

Muon takes a momentum M of the gradient and moves a weight along the nearest orthogonal matrix,
U V^T where U S V^T = (1 - b) G + b M, scaled by 0.2 sqrt(max(rows, columns)): the size that AdamW's
steps have, so that both share one learning rate and one weight decay. The projections to q, k and
v are one matrix of the model, and are orthogonalised as one.
"""

import math

import torch
from torch import Tensor, nn

from training.sections import TrainSection

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, steep at zero
ITERATIONS = 5
MOMENTUM = (0.85, 0.95)  # before and after the warm-up of the learning rate


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Put the decay on matrices only, not on biases, norms or head scales."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class Optimiser(torch.optim.AdamW):
    """Takes steps of AdamW, and of Muon for groups that have a momentum."""

    def __init__(self, model: nn.Module, t: TrainSection):
        groups = parameter_groups(model, t.weight_decay)
        if t.optimiser == "muon":
            decayed = groups[0]
            matrices = {p: None for p in model.blocks.parameters() if p.dim() == 2}
            decayed["params"] = [p for p in decayed["params"] if p not in matrices]
            groups.append(decayed | {"params": list(matrices), "momentum": MOMENTUM[0]})
        super().__init__(groups, lr=t.lr, betas=(t.beta1, t.beta2), fused=True)

    def set_rates(self, lr: float, warmed: float) -> None:
        """Set the learning rate; `warmed`, 0 to 1, is how much of the warm-up is done."""
        first, last = MOMENTUM
        for group in self.param_groups:
            group["lr"] = lr
            if "momentum" in group:
                group["momentum"] = first + (last - first) * warmed

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """Take one step, or none if the scalar `skip` is true, which is decided on the device."""
        if skip.device.type == "mps" and skip:  # its AdamW may not look at found_inf
            return
        self.found_inf = skip.float()
        super().step()
        for group in self.param_groups:
            if "momentum" in group:
                self._muon(group, skip)

    def _init_group(self, group, *lists):
        """Hide Muon's group from AdamW."""
        return False if "momentum" in group else super()._init_group(group, *lists)

    def _muon(self, group: dict, skip: Tensor) -> None:
        lr = group["lr"]
        momentum = group["momentum"]
        go = 1 - self.found_inf
        for p in group["params"]:
            state = self.state[p]  # named as AdamW's, which looks for its step when it is loaded
            if not state:
                state |= {"step": torch.zeros_like(go), "exp_avg": torch.zeros_like(p)}
            state["step"] += go
            average = state["exp_avg"]
            # Averaging with itself leaves the momentum as it is.
            gradient = torch.where(skip, average, p.grad)
            average.lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp_(average, momentum))
            p.mul_(1 - go * (lr * group["weight_decay"]))
            p.sub_(update * (go * (lr * 0.2 * math.sqrt(max(p.shape)))))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return roughly U V^T of the matrix U S V^T: singular values of about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=1e-7)
    x = x.bfloat16() if x.is_cuda else x
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)
