"""Every mechanism of `attention.MECHANISMS` inside any decoder of Hugging Face transformers.

    import lssar.hf  # registers them
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")

Grouped-query heads, sliding windows, packed sequences, padding to either side, dynamic and static
caches. Another exponent or length gets a name of its own:
`register("lssar-p3", get_mechanism("lssar", p=3))`. What a mechanism cannot do (soft-capped scores,
bidirectional sequences, dropout on the weights, masks that are no spans) is an error, never
something else in silence.
"""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from lssar.backends import attend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, Mechanism
from lssar.spans import attend_padded

# What other attention functions of transformers understand and these do not.
UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "learned sinks",
    "position_bias": "a bias on the scores",
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
    **options,
) -> tuple[Tensor, None]:
    """One attention layer as transformers calls it: the output as (B, Lq, H, d), no weights."""
    if is_causal is False or not getattr(module, "is_causal", True):
        _refuse(mechanism, "attention that is not causal")
    if dropout:
        _refuse(
            mechanism, f"dropout of {dropout} on the weights; set it to 0 in the model's config"
        )
    for name, what in UNSUPPORTED.items():
        if options.get(name) is not None:
            _refuse(mechanism, f"{what} ({name})")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        _refuse(mechanism, f"a mask of shape {shape}; give the padding mask (batch, keys)")
    root_d = math.sqrt(query.shape[3])
    if scaling is not None and not math.isclose(scaling * root_d, 1):
        query = query * (scaling * root_d)  # a mechanism divides by sqrt(d) itself
    if sliding_window is not None:
        window = min(sliding_window, mechanism.window or sliding_window)
        mechanism = replace(mechanism, window=window)
    params = getattr(module, HEAD_SCALE, None)
    if attention_mask is None or attention_mask.dtype == torch.bool:
        out = attend_padded(query, key, value, mechanism, attention_mask, params=params)
    else:
        end, first = int(attention_mask[0, 0]), attention_mask[:, 1:]
        key, value = key[:, :, :end], value[:, :, :end]
        out = attend(query, key, value, mechanism, first=first, params=params)
    return out.transpose(1, 2).contiguous(), None


def visibility(
    mechanism: Mechanism,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor | None:
    """What each query sees, for all layers of one kind. None: every key up to its own.

    Causal with padding: a bool tensor (B, n), which of the first n keys are tokens, the queries
    being the last. Windows, chunks, packed sequences: an int tensor (B, 1 + Lq), the number of keys
    and the first that each query sees.
    """
    end = int(q_offset) + q_length - kv_offset  # a static cache has room for more keys
    if attention_mask is None:
        tokens = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    elif attention_mask.shape[1] < kv_offset + end:
        shape, keys = tuple(attention_mask.shape), kv_offset + end
        _refuse(mechanism, f"a mask of shape {shape} for {keys} keys; it must cover all")
    else:
        tokens = attention_mask[:, kv_offset : kv_offset + end].bool()
    if mask_function is causal_mask_function:
        return None if kv_length == end and tokens.all() else tokens
    first = _first_seen(mechanism, mask_function, tokens, q_length, kv_offset)
    if kv_length == end and not first.any():
        return None
    return torch.cat((torch.full_like(first[:, :1], end), first), dim=1)


ENTRIES = 2**24  # of a mask function that are looked at together


def _first_seen(
    mechanism: Mechanism, mask_function, tokens: Tensor, queries: int, offset: int
) -> Tensor:
    """The first key that each query sees by a mask function of transformers, (B, queries)."""
    batch, keys = tokens.shape
    key = torch.arange(keys, device=tokens.device)
    sequence, head = torch.arange(batch, device=tokens.device), key[:1]
    found = []
    for position in key[keys - queries :].split(max(1, ENTRIES // (batch * keys))):
        visible = mask_function(
            sequence[:, None, None, None],
            head[None, :, None, None],
            (position + offset)[None, None, :, None],
            (key + offset)[None, None, None, :],
        )
        visible = visible.expand(batch, 1, len(position), keys)[:, 0] & tokens[:, None]
        asking = tokens[:, position]
        first = torch.where(asking, position + 1 - visible.sum(-1), position + 1)
        span = (key >= first[..., None]) & (key <= position[:, None])
        if not torch.equal(visible & asking[..., None], span):
            _refuse(mechanism, "a mask in which a token sees other keys than a span up to itself")
        found.append(first)
    return torch.cat(found, dim=1)


def _refuse(mechanism: Mechanism, what: str):
    raise UserError(f"attention {mechanism.name!r} in a transformers model cannot take {what}")


def register(name: str, mechanism: Mechanism) -> None:
    """Make `attn_implementation=name` mean this mechanism."""
    AttentionInterface.register(name, functools.partial(attention_forward, mechanism))
    AttentionMaskInterface.register(name, functools.partial(visibility, mechanism))


for _name, _mechanism in MECHANISMS.items():
    register(_name, _mechanism)


# --- the learnable scalar of a head (ssmax, relu-shen) -------------------------------------------

HEAD_SCALE = "head_scale"


def add_head_scales(model: PreTrainedModel) -> PreTrainedModel:
    """Make the scalar of each head of `ssmax` and `relu-shen` a parameter of every layer.

    Without it these mechanisms use the paper's initial value, which is then not trained. Call it
    before weights that have them are loaded.
    """
    name = model.config._attn_implementation
    entry = AttentionInterface()[name]
    mechanism = entry.args[0] if isinstance(entry, functools.partial) else None
    if mechanism is None or mechanism.parameter_init is None:
        learnable = ", ".join(n for n, m in MECHANISMS.items() if m.parameter_init is not None)
        raise UserError(
            f"attention {name!r} has no learnable scalar a head; these have: {learnable}"
        )
    heads = model.config.num_attention_heads
    for layer in model.modules():
        if hasattr(layer, "layer_idx") and hasattr(layer, "is_causal"):
            weight = next(layer.parameters())
            scale = torch.full((heads,), mechanism.parameter_init, device=weight.device)
            layer.register_parameter(HEAD_SCALE, nn.Parameter(scale))
    return model
