"""Records the attention of a saved model or a saved adapter, and checks it.

A model's config records the mechanism, so that it is loaded with it, and names an architecture that
no other engine has. An adapter (LoRA) does not carry the attention; it records a name, to compare.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from transformers import PreTrainedModel

from lssar.errors import UserError
from lssar.hf.layer import HEAD_SCALE
from lssar.hf.names import REGISTERED
from lssar.mechanisms import Mechanism

FIELD = "lssar_attention"  # of a config: the name, the mechanism, whether heads have a scalar
PREFIX = "Lssar"  # of the architectures that a saved config names
DEFAULTS = {field.name: field.default for field in fields(Mechanism)}


def check_record(record: dict) -> None:
    """Refuse a name that means another mechanism here than it did where the model was saved."""
    try:
        name = record["name"]
        mechanism = Mechanism(**record["mechanism"])
    except (TypeError, KeyError) as error:
        raise UserError(f"config.{FIELD} = {record!r:.80} is not a mechanism: {error}") from None
    known = REGISTERED.get(name, mechanism)
    if known != mechanism:
        pairs = zip(vars(known).items(), vars(mechanism).values(), strict=True)
        changes = ", ".join(f"{key} = {a!r}, not {b!r}" for (key, a), b in pairs if a != b)
        raise UserError(
            f"the weights were trained with another attention {name!r}: here {changes}; "
            "register that one under another name"
        )


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[None]:
    """Record in the configs, while the model is saved, with which attention it runs."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = {id(m.config): (m.config, dict(vars(m.config))) for m in models}
    try:
        for m in models:
            name = m.config._attn_implementation
            record = getattr(m.config, FIELD, None)
            if name in REGISTERED:
                parts = vars(REGISTERED[name]).items()
                changed = {key: value for key, value in parts if value != DEFAULTS[key]}
                record = {"name": name, "mechanism": changed}
                if any(hasattr(layer, HEAD_SCALE) for layer in m.modules()):
                    record["head_scales"] = True
                setattr(m.config, FIELD, record)
            if record:
                # Without this library, transformers refuses a name that it does not know.
                m.config.attn_implementation = record["name"]
        if getattr(model.config, FIELD, None):
            model.config.save_pretrained = functools.partial(_save_config, model.config)
        yield
    finally:
        for config, values in before.values():
            for key in {FIELD, "attn_implementation", "save_pretrained"} & set(vars(config)):
                delattr(config, key)
                if key in values:
                    setattr(config, key, values[key])


def _save_config(config, *args, **options) -> None:
    """Save a config that names no class of transformers.

    Engines that choose by `architectures` would run their own attention on the weights. Those that
    look at `model_type` cannot be kept from it.
    """
    del vars(config)["save_pretrained"]  # which is not to be saved
    config.architectures = [PREFIX + name.removeprefix(PREFIX) for name in config.architectures]
    type(config).save_pretrained(config, *args, **options)


def check_adapters(model: PreTrainedModel, adapters: dict) -> None:
    """Warn of an adapter of another attention; in one that is new, record that of its base.

    The record is in `auto_mapping` of the adapter's config, which peft reads only of adapters
    without a task. Those replace it, and go without a record.
    """
    name = model.config._attn_implementation
    for adapter in adapters.values():
        trained = (adapter.auto_mapping or {}).get(FIELD)
        if trained is not None and trained != name:
            warnings.warn(
                f"an adapter was trained with attention {trained!r} and is used with {name!r}; "
                f"load its base model with attn_implementation={trained!r}",
                stacklevel=3,
            )
        elif trained is None and name in REGISTERED and adapter.task_type is not None:
            adapter.auto_mapping = (adapter.auto_mapping or {}) | {FIELD: name}
