"""Computes a layer of a model of transformers by one of our mechanisms."""

import math
import threading
from dataclasses import replace

import torch
from torch import Tensor, nn

from lssar.backends import attend_padded
from lssar.hf.masks import arrangement_of
from lssar.hf.refusals import refuse
from lssar.mechanisms import Mechanism
from lssar.spans import Arrangement, bounded
from lssar.tracing import trace_constant

HEAD_SCALE = "head_scale"  # a parameter of a layer: the learnable scalar of each head
# Tensors that a model may pass to its layers and that change nothing here. Any other is taken for
# one that another attention function would use.
HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "position_ids",
    "seq_idx",
}
REFUSED = {  # and what they ask for
    "s_aux": "learned sinks",
    "position_bias": "a bias on the scores",
    "indices": "a choice of keys",
    "block_indices": "a choice of keys",
    "cache": "a paged cache",
}


def attention_forward(
    mechanism: Mechanism,
    module: nn.Module,
    query: Tensor,  # (B, H, Lq, d)
    key: Tensor,  # (B, KV heads, Lk, d)
    value: Tensor,
    attention_mask: Tensor | None,  # what `visibility` returned
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Compute a layer as transformers calls it: the output as (B, Lq, H, d), no weights."""
    note_call()
    config = getattr(module, "config", None)
    if is_causal is False or not getattr(module, "is_causal", True):
        refuse(mechanism, config, "attention that is not causal")
    if dropout:
        what = f"dropout of {dropout} on the weights; set it to 0 in the model's config"
        refuse(mechanism, config, what)
    for name, given in options.items():
        unknown = isinstance(given, Tensor) and name not in HARMLESS
        if given is not None and (unknown or name in REFUSED):
            refuse(mechanism, config, f"{REFUSED.get(name, 'a tensor it does not know')} ({name})")
    seen = None if attention_mask is None else arrangement_of(attention_mask, query.shape[2])
    if cu_seq_lens_q is not None and not isinstance(seen, str):
        seen = _apart(seen, cu_seq_lens_q, query, key)
    if isinstance(seen, str):
        refuse(mechanism, config, seen)
    root_d = math.sqrt(query.shape[3])
    if scaling is not None and abs(scaling * root_d - 1) > 1e-9:
        query = query * (scaling * root_d)  # a mechanism divides by sqrt(d) itself
    if sliding_window is not None and attention_mask is None:  # else it is in the mask
        window = min(sliding_window, mechanism.window or sliding_window)
        mechanism = replace(mechanism, window=window)
    if softcap is not None:
        if mechanism.cosine:
            refuse(
                mechanism,
                config,
                f"soft-capped scores (softcap = {softcap}): its scores are those of cosines; set "
                "attn_logit_softcapping to None",
            )
        mechanism = replace(mechanism, softcap=softcap)
    head_scale = getattr(module, HEAD_SCALE, None)
    out = attend_padded(query, key, value, mechanism, seen, head_scale=head_scale)
    return out.transpose(1, 2).contiguous(), None


def _apart(seen: Arrangement | None, bounds: Tensor, query, key) -> Arrangement | str:
    """Separate packed sequences by their bounds (0, ..., Lq), as flash attention takes them."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        shape = f"queries {tuple(query.shape)}, keys {tuple(key.shape)}"
        return f"cu_seq_lens_q for {shape}; give one row and no cache"
    if seen is not None and seen.keys is not None:
        return "cu_seq_lens_q beside padding"
    first = bounded(bounds.to(query.device), query.shape[2])[None]
    if seen is not None and seen.first is not None:
        first = torch.maximum(first, seen.first)
    return Arrangement(key.shape[2], first)


_calls = threading.local()  # how many layers each thread computed, and when forwards began


@trace_constant
def note_call() -> None:
    """Note that one of our mechanisms computes a layer."""
    _calls.count = getattr(_calls, "count", 0) + 1


@trace_constant
def note_start(model: str) -> None:
    """Note that a forward of this class of model begins."""
    setattr(_calls, model, getattr(_calls, "count", 0))


@trace_constant
def called_since(model: str) -> bool:
    """Tell whether a layer was computed by one of our mechanisms since that forward began."""
    return getattr(_calls, "count", 0) > getattr(_calls, model, 0)
