"""Makes the learnable scalars of `ssmax` and `relu-shen`, one per head, parameters of a model."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lssar.errors import UserError
from lssar.hf.layer import HEAD_SCALE
from lssar.hf.names import REGISTERED
from lssar.mechanisms import MECHANISMS


def add_head_scales(model: PreTrainedModel) -> PreTrainedModel:
    """Make the scalar of each head of `ssmax` and `relu-shen` a parameter of every layer.

        model = AutoModelForCausalLM.from_config(config, attn_implementation="ssmax")
        model = lssar.hf.add_head_scales(model)

    Without it these mechanisms use the paper's initial value, which is then not trained. A model
    that was saved with them is loaded with them.
    """
    name = model.config._attn_implementation
    mechanism = REGISTERED.get(name)
    if mechanism is None or mechanism.parameter_init is None:
        learnable = ", ".join(n for n, m in MECHANISMS.items() if m.parameter_init is not None)
        raise UserError(
            f"attention {name!r} has no learnable scalar per head; these have: {learnable}"
        )
    for layer in model.modules():
        if is_attention(layer):
            add_head_scale(layer, name, model.config.num_attention_heads)
    return model


def is_attention(layer: nn.Module | None) -> bool:
    """Tell whether a module is an attention layer, by the attributes that transformers gives it."""
    return hasattr(layer, "layer_idx") and hasattr(layer, "is_causal")


def add_head_scale(layer: Any, name: str, heads: int | None = None) -> None:
    """Make the scalars of a layer's heads a parameter, at the paper's initial value."""
    if hasattr(layer, HEAD_SCALE):
        return
    if heads is None:
        heads = layer.config.num_attention_heads
    initial: Any = REGISTERED[name].parameter_init
    scale = torch.full((heads,), initial, device=next(layer.parameters()).device)
    layer.register_parameter(HEAD_SCALE, nn.Parameter(scale))
