"""Checks the arguments of a call, and completes them."""

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from lssar.errors import UserError
from lssar.mechanisms import Mechanism, get_mechanism


def resolve(mechanism: str | Mechanism, keys: int) -> Mechanism:
    """Return the mechanism of this call, where L is a number."""
    m = mechanism if isinstance(mechanism, Mechanism) else get_mechanism(mechanism)
    return replace(m, length="train", train_length=keys) if m.length == "current" else m


def check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise a `UserError` for tensors that attention does not take."""
    rule = _broken_rule(q, k, v)
    if rule is None:
        return
    given = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    if rule == FLOATS:
        found = ", ".join(f"{name} {t.dtype}" for name, t in given.items())
    else:
        found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
    raise UserError(f"{rule}; got {found}")


FLOATS = "attention takes floating-point tensors"


def _broken_rule(q: Tensor, k: Tensor, v: Tensor | None) -> str | None:
    if q.dim() != 4 or k.dim() != 4:
        return "attention takes q (B, H, Lq, d) and k, v (B, H, Lk, d)"
    batch, heads, queries, width = q.shape
    key_batch, groups, keys, key_width = k.shape
    if batch != key_batch or width != key_width:
        return "attention takes q (B, H, Lq, d) and k, v (B, H, Lk, d)"
    if groups == 0 or heads % groups:
        return "attention needs heads of q that the heads of k and v divide"
    if v is not None and (v.dim() != 4 or v.shape[:3] != k.shape[:3]):
        return "attention needs one value for each key"
    if not 1 <= queries <= keys:
        return "causal attention needs 1 <= Lq <= Lk"
    floats = q.is_floating_point() and k.is_floating_point()
    if not floats or (v is not None and not v.is_floating_point()):
        return FLOATS
    return None


def decay_of(decay: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the log decay at each key, (1 or B, H, Lk), in the type of the computation."""
    if decay is None:
        return None
    shape = (q.shape[0], q.shape[1], k.shape[2])
    if decay.shape not in (shape, (1, *shape[1:])) or not decay.is_floating_point():
        raise UserError(
            f"decay must be a floating-point tensor (B, H, Lk), here {shape}; "
            f"got {decay.dtype} {tuple(decay.shape)}"
        )
    return decay.to(working_type(q))


def head_scale_of(m: Mechanism, head_scale: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the learnable scalar of each head, (H,), in the type the weights are computed in."""
    if m.parameter_init is None:
        if head_scale is not None:
            raise UserError(f"attention {m.name!r} has no learnable scalar; leave head_scale out")
        return None
    heads = q.shape[1]
    dtype = working_type(q)
    if head_scale is None:
        return torch.full((heads,), m.parameter_init, device=q.device, dtype=dtype)
    if head_scale.shape != (heads,):
        shape = tuple(head_scale.shape)
        raise UserError(f"attention {m.name!r} takes head_scale of shape ({heads},), not {shape}")
    return head_scale.to(dtype)


def renamed_head_scale(head_scale: Tensor | None, params: Tensor) -> Tensor:
    """Return the scalars that were given by their old name, with a warning."""
    if head_scale is not None:
        raise UserError("params is the old name of head_scale; give head_scale alone")
    warnings.warn("params is now called head_scale", DeprecationWarning, stacklevel=3)
    return params


def working_type(q: Tensor) -> torch.dtype:
    """Return the type in which weights are computed."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
