"""Writes out the attention matrix, which every backend must equal.

weights = attention_weights(q, k, "lssar")  # (B, H, Lq, Lk)
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.arguments import (
    check_shapes,
    decay_of,
    head_scale_of,
    renamed_head_scale,
    resolve,
    working_type,
)
from lssar.mechanisms import COSINES, FLAT, SIGNED, Mechanism
from lssar.spans import Span, span_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "gelu": lambda x: x * torch.erfc(-x / math.sqrt(2)) / 2,  # F.gelu loses all digits below -5
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
}

# Far below zero these are about e^x, and gelu is x times about e^(-x^2/2) / 32. Where that is below
# the smallest normal number (in float32 at x < -87.3, or -12.9) they are set to zero, because
# backends would disagree on the digits left.
VANISHING = ("sigmoid", "softplus", "mish", "gelu")

# Rows 1..3 are not shifted: with so few keys nothing would be left above the mean.
UNSHIFTED_ROWS = 3


def attention_weights(
    q: Tensor,
    k: Tensor,
    mechanism: str | Mechanism = "lssar",
    *,
    first: Tensor | None = None,
    head_scale: Tensor | None = None,
    decay: Tensor | None = None,
    params: Tensor | None = None,
) -> Tensor:
    """Return the attention matrix (B, H, Lq, Lk) of queries (B, H, Lq, d) over keys (B, G, Lk, d).

        weights = attention_weights(q, k)  # of LSSAR; (weights @ v) is what `attend` returns

    Causal, the last query aligned with the last key: query i of Lq sees Lk - Lq + i + 1 keys, or
    those from first_i on. Each of the G heads of k serves H / G heads of q in turn. The options are
    those of `attend`. float64 in, float64 out; another type is computed, and returned, in float32.
    """
    check_shapes(q, k)
    if params is not None:
        head_scale = renamed_head_scale(head_scale, params)
    m = resolve(mechanism, keys=k.shape[2])
    head_scale = head_scale_of(m, head_scale, q)
    span = span_of(first, m, q, k)
    with no_autocast(q):
        return weights_of_span(q, k, m, head_scale, span, decay_of(decay, q, k))


def no_autocast(x: Tensor) -> AbstractContextManager:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def weights_of_span(q, k, m: Mechanism, head_scale, span: Span, decay: Tensor | None) -> Tensor:
    """Return `attention_weights` of checked arguments; the caller turns autocast off."""
    dtype = working_type(q)
    queries = q.shape[-2]
    keys = k.shape[-2]
    q, k = q.to(dtype), k.to(dtype)
    position = torch.arange(keys - queries, keys, device=q.device).unsqueeze(-1)  # (Lq, 1)
    key = torch.arange(keys, device=q.device)
    visible = key <= position  # (Lq, Lk)
    first = span.firsts(q, k)
    if first is not None:
        visible = visible & ((key >= first[:, None, :, None]) | (key < span.sinks))
    row_count = span.counts(q, k).to(dtype)

    if m.length != "train":  # `resolve` has made it a number
        _refuse_unknown(m, "length")
    x = _scores(q, k, m, row_count, head_scale)
    if decay is not None:
        x = x + _log_decay(decay, queries).to(dtype)
    if m.norm == "stick":
        return _broken_stick(x, visible, own=key == position)
    a = _normalise(_activate(x, visible, m), m, row_count, head_scale)
    a = _post_step(a, m, row_count, visible)
    if not m.sharpened:
        return a
    return sharpen(a, m, row_count, _score_bound(q, k, m, row_count, head_scale))


@torch.no_grad()
def _score_bound(q, k, m: Mechanism, row_count: Tensor, head_scale) -> Tensor | float:
    """Return the largest score each row could have; its rounding is a few eps of that."""
    d = q.shape[-1]
    if m.cosine:
        return _cosine_scale(d, m, row_count, head_scale)
    longest = _of_the_rows(k.norm(dim=-1).cummax(-1).values, q.shape[-2])
    longest = longest.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.norm(dim=-1) * longest / math.sqrt(d)).unsqueeze(-1)


def _scores(q, k, m: Mechanism, row_count: Tensor, head_scale: Tensor | None) -> Tensor:
    d = q.shape[-1]
    if m.cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q = q * _cosine_scale(d, m, row_count, head_scale)
    elif m.scale == "s log N / sqrt(d)":
        q = q * (_per_head(head_scale) * row_count.log() / math.sqrt(d))
    elif m.scale == "1/sqrt(d)":
        q = q / math.sqrt(d)
    else:
        _refuse_unknown(m, "scale")
    x = grouped_product(q, k.mT)
    if m.softcap is not None:
        x = m.softcap * (x / m.softcap).tanh()
    if m.bias == "-log N":
        x = x - row_count.log()
    elif m.bias == "-log L":
        x = x - math.log(m.train_length)
    elif m.bias != "none":
        _refuse_unknown(m, "bias")
    return x


def _refuse_unknown(m: Mechanism, part: str) -> NoReturn:
    raise NotImplementedError(
        f"attention {m.name!r}: lssar/reference.py has no branch for {part} = {getattr(m, part)!r}"
    )


# Scales that are factors of q and k; a new one belongs here once `over_root_d` has its branch.
FACTORS = ("1/sqrt(d)", "s log N / sqrt(d)", *COSINES)


def over_root_d(q, k, m: Mechanism, head_scale, row_count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and k scaled so that q.k / sqrt(d) is the score, for kernels that know no other.

    `row_count` broadcasts against q (B, H, Lq, d); a scale without N needs none.
    """
    if m.scale not in FACTORS:
        _refuse_unknown(m, "scale")
    d = q.shape[-1]
    factor = _per_head(head_scale) if m.scale.startswith("s ") else 1.0
    if m.cosine:
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = F.normalize(q.to(wide), dim=-1), F.normalize(k.to(wide), dim=-1)
        constant = _constant_scale(d, m)
        factor = factor * math.sqrt(d) * (math.log(d) if constant is None else constant)
    if row_count is not None and "log N" in m.scale:
        factor = factor * row_count.log()
    return q * factor, k


def _constant_scale(d: int, m: Mechanism) -> float | None:
    """Return the factor of cos(q, k) if it does not depend on the row, else None."""
    constant = {"sqrt(d)": math.sqrt(d), "log d log L": math.log(d) * math.log(m.train_length)}
    return constant.get(m.scale)


def _cosine_scale(
    d: int, m: Mechanism, row_count: Tensor, head_scale: Tensor | None
) -> Tensor | float:
    """Return the factor of cos(q, k)."""
    if (constant := _constant_scale(d, m)) is not None:
        return constant
    scale = math.log(d) * row_count.log()
    if m.scale == "log d log N":
        return scale
    if m.scale == "s log d log N":
        return scale * _per_head(head_scale)
    _refuse_unknown(m, "scale")


def _log_decay(decay: Tensor, queries: int) -> Tensor:
    """Return the log decay from key j to query i, (B, H, Lq, Lk): the sum of decays j + 1 .. i.

    Counted from the last key, so that the large sums, and their rounding, are those of keys that
    are far away.
    """
    wide = decay if decay.device.type == "mps" else decay.double()
    since = _sum_after(wide).to(decay.dtype)
    return since.unsqueeze(-2) - _of_the_rows(since, queries).unsqueeze(-1)


def _of_the_rows(x: Tensor, rows: int) -> Tensor:
    """Return x (..., Lk) at the last `rows` keys; zero before the first, where rows see nothing."""
    return F.pad(x, (rows - x.shape[-1], 0))


def _sum_after(x: Tensor) -> Tensor:
    """Return, for each entry of the last dimension, the sum of the entries after it."""
    return F.pad(x[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def _broken_stick(x: Tensor, visible: Tensor, own: Tensor) -> Tensor:
    """Return sigmoid(x_ij) prod_{j<k<i} (1 - sigmoid(x_ik)); the query's own key gets the rest."""
    before = visible & ~own
    kept = F.logsigmoid(-x).masked_fill(~before, 0)
    broken = torch.where(before, F.logsigmoid(x) + _sum_after(kept), -torch.inf)
    return torch.where(own & visible, kept.sum(-1, keepdim=True), broken).exp()


def grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (B, H, n, m) @ b (B, G, m, l), each of b's heads for H / G of a, without copies."""
    batch, groups = b.shape[:2]
    product = a.reshape(batch, groups, -1, a.shape[-1]) @ b
    return product.view(*a.shape[:3], b.shape[-1])


def _activate(x: Tensor, visible: Tensor, m: Mechanism) -> Tensor:
    """Return phi(x) on the visible keys, zero elsewhere."""
    if m.phi == "exp":
        x = x.masked_fill(~visible, -torch.inf)
        if m.norm != "l1":
            return x.exp()
        # l1 removes any factor of a row, so shifting by its maximum is exact and cannot overflow.
        top = x.detach().amax(-1, keepdim=True)
        return (x - top.masked_fill(top == -torch.inf, 0)).exp()
    a = ACTIVATIONS[m.phi](x)
    if m.norm == "l1" and m.phi in VANISHING and not m.cosine:
        lowest = math.log(torch.finfo(x.dtype).tiny)
        if m.phi == "gelu":
            lowest = -math.sqrt(-2 * (lowest + math.log(32)))
        visible = visible & (x >= lowest)
    return a.masked_fill(~visible, 0)


def _normalise(a: Tensor, m: Mechanism, row_count: Tensor, head_scale: Tensor | None) -> Tensor:
    if m.norm == "l1":
        return _l1(a, signed=m.phi in SIGNED)
    if m.norm == "L":
        return a / m.train_length
    if m.norm == "gamma sqrt(N/2)":
        return a / (_per_head(head_scale) * (row_count / 2).sqrt())
    if m.norm != "none":
        _refuse_unknown(m, "norm")
    return a


def _l1(a: Tensor, signed: bool) -> Tensor:
    """Divide rows by their l1-norm; a row of zeros attends to nothing and stays zero."""
    total = (a.abs() if signed else a).sum(-1, keepdim=True)
    return a / total.masked_fill(total == 0, 1)


def _post_step(a: Tensor, m: Mechanism, row_count: Tensor, visible: Tensor) -> Tensor:
    if m.post == "none":
        return a
    if m.post == "negate":
        return -a
    if m.post not in ("recentre", "recentre, l1"):
        _refuse_unknown(m, "post")
    mean = (row_count > UNSHIFTED_ROWS) / row_count
    a = (a - mean).masked_fill(~visible, 0)
    return _l1(a, signed=True) if m.post == "recentre, l1" else a


def sharpen(stage_one, m: Mechanism, row_count, score_bound: Tensor | float = 0.0) -> Tensor:
    """Return l1(relu(N A - 1[N > 3])^p), the re-weighting of stage-one rows A.

    Scaling a row changes nothing, so the safe form raises y / max(y) in [0, 1] to the power. A row
    whose largest excess over its mean is rounding noise (all keys alike) has nothing to sharpen:
    it stays the stage-one row. Scores up to `score_bound` are off by that many eps, and phi far
    below zero passes all of it on to the weights.
    """
    p = m.exponents(row_count)
    shift = (row_count > UNSHIFTED_ROWS).to(row_count.dtype)
    if m.numerics == "naive":
        x = F.relu(row_count * stage_one - shift) ** p
        return x / x.sum(-1, keepdim=True)
    if m.numerics != "safe":
        _refuse_unknown(m, "numerics")
    y = F.relu(stage_one - shift / row_count)
    # l1 removes the maximum again, so no gradient needs to pass through it.
    y_max = y.detach().amax(-1, keepdim=True)
    noise = FLAT * (4 + score_bound) * torch.finfo(y.dtype).eps
    uniform = y_max <= noise * stage_one.detach().amax(-1, keepdim=True)
    z = (y / y_max.masked_fill(uniform, 1)) ** p
    w = z / z.sum(-1, keepdim=True).masked_fill(uniform, 1)
    return torch.where(uniform, stage_one, w)


def _per_head(head_scale: Tensor | None) -> Tensor:
    assert head_scale is not None  # `head_scale_of` made them
    return head_scale.view(-1, 1, 1)  # against (B, H, Lq, Lk)
