"""Every mechanism of `lssar.MECHANISMS` inside any decoder of Hugging Face transformers.

    import lssar.hf  # registers them
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)  # LSSAR again: its config says so

Grouped-query heads, sliding windows, chunks, packed sequences, padding to either side, dynamic and
static caches. Another exponent or length gets a name of its own:
`register("lssar-p3", get_mechanism("lssar", p=3))`. What a mechanism cannot do (bidirectional
sequences, dropout on the weights, learned sinks, masks that are no spans) is an error, never
something else in silence; so is a model whose layers do not call it. An adapter (LoRA) does not
carry the attention: give `attn_implementation` to its base model, or merge it.
"""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from lssar import hf_models
from lssar.errors import UserError
from lssar.hf_masks import family_of, refuse, unpacked, visibility
from lssar.hf_models import add_head_scales
from lssar.mechanisms import MECHANISMS, Mechanism
from lssar.spans import Arrangement, attend_padded, bounded

__all__ = ["add_head_scales", "attention_forward", "register", "visibility"]

# Tensors that a model may pass to its layers and that change nothing here. Any other is taken for
# one that another attention function would use.
HARMLESS = {"position_ids", "cache_position", "cu_seq_lens_k", "num_items_in_batch", "seq_idx"}
HARMLESS |= {"max_length_q", "max_length_k", "logits_to_keep"}
MEANS = {
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
    """One attention layer as transformers calls it: the output as (B, Lq, H, d), no weights."""
    hf_models.note_call()
    family = family_of(getattr(module, "config", None))
    if is_causal is False or not getattr(module, "is_causal", True):
        refuse(mechanism, family, "attention that is not causal")
    if dropout:
        what = f"dropout of {dropout} on the weights; set it to 0 in the model's config"
        refuse(mechanism, family, what)
    for name, given in options.items():
        unknown = isinstance(given, Tensor) and name not in HARMLESS
        if given is not None and (unknown or name in MEANS):
            refuse(mechanism, family, f"{MEANS.get(name, 'a tensor it does not know')} ({name})")
    arrangement = None
    if attention_mask is not None:
        found = unpacked(attention_mask, query.shape[2])
        if isinstance(found, str):
            refuse(mechanism, family, found)
        arrangement = found
    if cu_seq_lens_q is not None:
        arrangement = _apart(mechanism, family, arrangement, cu_seq_lens_q, query, key)
    root_d = math.sqrt(query.shape[3])
    if scaling is not None and abs(scaling * root_d - 1) > 1e-9:
        query = query * (scaling * root_d)  # a mechanism divides by sqrt(d) itself
    if sliding_window is not None and attention_mask is None:  # else it is in the mask
        window = min(sliding_window, mechanism.window or sliding_window)
        mechanism = replace(mechanism, window=window)
    if softcap is not None:
        if mechanism.cosine:
            what = "its scores are those of cosines; set attn_logit_softcapping to None"
            refuse(mechanism, family, f"soft-capped scores (softcap = {softcap}): {what}")
        mechanism = replace(mechanism, softcap=softcap)
    params = getattr(module, hf_models.HEAD_SCALE, None)
    out = attend_padded(query, key, value, mechanism, arrangement, params=params)
    return out.transpose(1, 2).contiguous(), None


def _apart(
    mechanism: Mechanism,
    family: str,
    arrangement: Arrangement | None,
    bounds: Tensor,
    query: Tensor,
    key: Tensor,
) -> Arrangement:
    """Packed sequences by their bounds (0, ..., Lq), as flash attention takes them."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        shape = f"queries {tuple(query.shape)}, keys {tuple(key.shape)}"
        refuse(mechanism, family, f"cu_seq_lens_q for {shape}; give one row and no cache")
    if arrangement is not None and arrangement.keys is not None:
        refuse(mechanism, family, "cu_seq_lens_q beside padding")
    first = bounded(bounds.to(query.device), query.shape[2])[None]
    if arrangement is not None and arrangement.first is not None:
        first = torch.maximum(first, arrangement.first)
    return Arrangement(key.shape[2], first)


def register(name: str, mechanism: Mechanism) -> None:
    """Make `attn_implementation=name` mean this mechanism."""
    known = hf_models.REGISTERED.get(name)
    if known is None and (name == "eager" or name in AttentionInterface()):
        raise UserError(f"attention {name!r} is one of transformers' own; choose another name")
    hf_models.REGISTERED[name] = mechanism
    AttentionInterface.register(name, functools.partial(attention_forward, mechanism))
    AttentionMaskInterface.register(name, functools.partial(visibility, mechanism))


for _name, _mechanism in MECHANISMS.items():
    register(_name, _mechanism)
hf_models.install(register)
