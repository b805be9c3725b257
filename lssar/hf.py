"""Every mechanism of `attention.MECHANISMS` inside any decoder of Hugging Face transformers.

    import lssar.hf  # registers them
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")

Grouped-query heads, padding to either side, dynamic and static caches. Another exponent or length
gets a name of its own: `register("lssar-p3", get_mechanism("lssar", p=3))`. What a mechanism
cannot do (a sliding window, soft-capped scores, packed or bidirectional sequences, dropout on the
weights, masks that are not padding) is an error, never something else in silence.
"""

import functools
import math

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, Mechanism
from lssar.spans import attend_padded

# What other attention functions of transformers understand and these do not.
UNSUPPORTED = {
    "sliding_window": "a sliding window",
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
    attention_mask: Tensor | None,  # what `padding_mask` returned
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
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
    out = attend_padded(
        query, key, value, mechanism, attention_mask, params=getattr(module, HEAD_SCALE, None)
    )
    return out.transpose(1, 2).contiguous(), None


def padding_mask(
    mechanism: Mechanism,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor | None:
    """(B, n): which of the first n keys are tokens, the queries being the last; None: all are."""
    if local_size is not None:
        _refuse(mechanism, f"a sliding or chunked window of {local_size}")
    if mask_function is not causal_mask_function:
        _refuse(mechanism, "packed sequences, or any visibility that is not causal with padding")
    end = int(q_offset) + q_length
    if attention_mask is None:
        # A static cache has room for more keys than there are.
        return (
            None
            if kv_length == end
            else torch.ones(batch_size, end, dtype=torch.bool, device=device)
        )
    if attention_mask.shape[1] < end or kv_offset:
        _refuse(mechanism, f"a mask of {attention_mask.shape[1]} for {end} keys; it must cover all")
    mask = attention_mask[:, :end].bool()
    return None if kv_length == end and mask.all() else mask


def _refuse(mechanism: Mechanism, what: str):
    raise UserError(f"attention {mechanism.name!r} in a transformers model cannot take {what}")


def register(name: str, mechanism: Mechanism) -> None:
    """Make `attn_implementation=name` mean this mechanism."""
    AttentionInterface.register(name, functools.partial(attention_forward, mechanism))
    AttentionMaskInterface.register(name, functools.partial(padding_mask, mechanism))


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
