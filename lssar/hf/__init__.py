"""Puts every mechanism of `lssar.MECHANISMS` into any decoder of Hugging Face transformers.

    import lssar.hf  # registers them
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)  # LSSAR again: its config says so

Grouped-query heads, sliding windows, chunks, packed sequences, padding to either side, dynamic and
static caches. Another exponent or length gets a name of its own, before a model is built or loaded:
`register("lssar-p3", get_mechanism("lssar", p=3))`. The names are those of `lssar.MECHANISMS`; only
"softmax", "sigmoid", "exp" and "identity" are "lssar-softmax" and so on.

What a mechanism cannot do is an error, never something else in silence: bidirectional sequences,
dropout on the weights, learned sinks, masks that are not spans. So is a model whose layers do not
call it. No class of transformers is changed: import this module before the model is built, or call
`check(model)`. An adapter (LoRA) does not carry the attention: give `attn_implementation` to its
base model, or merge it. An adapter that is used with another attention gives a warning.
"""

from lssar.hf.head_scales import add_head_scales
from lssar.hf.models import check, install
from lssar.hf.names import name_of, register, register_all

__all__ = ["add_head_scales", "check", "name_of", "register"]

register_all()
install()
