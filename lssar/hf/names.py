"""Registers the names by which transformers knows our mechanisms."""

import functools

from transformers import AttentionInterface, AttentionMaskInterface

from lssar.errors import UserError
from lssar.hf.layer import attention_forward
from lssar.hf.masks import visibility
from lssar.mechanisms import MECHANISMS, Mechanism

REGISTERED: dict[str, Mechanism] = {}  # by the name that `attn_implementation` takes
# A word that anyone may give to an attention of theirs gets a prefix.
GENERIC = ("softmax", "sigmoid", "exp", "identity")


def register(name: str, mechanism: Mechanism) -> None:
    """Make `attn_implementation=name` mean this mechanism, in models built or loaded from now on.

    lssar.hf.register("lssar-p3", lssar.get_mechanism("lssar", p=3))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar-p3")
    """
    known = REGISTERED.get(name)
    if known is None and (name == "eager" or name in AttentionInterface()):
        raise UserError(f"attention {name!r} is one of transformers' own; choose another name")
    REGISTERED[name] = mechanism
    AttentionInterface.register(name, functools.partial(attention_forward, mechanism))
    AttentionMaskInterface.register(name, functools.partial(visibility, mechanism))


def name_of(mechanism: str) -> str:
    """Return the name by which `import lssar.hf` registers this entry of MECHANISMS.

    name = lssar.hf.name_of("softmax")  # "lssar-softmax"
    """
    return f"lssar-{mechanism}" if mechanism in GENERIC else mechanism


def register_all() -> None:
    """Register every entry of MECHANISMS."""
    for name, mechanism in MECHANISMS.items():
        register(name_of(name), mechanism)
