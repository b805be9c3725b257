"""Watches models of transformers that use one of our mechanisms, from when they are built.

A model whose layers do not call our function is refused when it is built, or by its first forward.
A warning is given where weights run with another attention than they were saved with.

No class of transformers is changed. Models are seen while they are built, by a hook of torch, and
what is added is added to the model itself.
"""

import functools
import inspect
import re
import sys
import warnings
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from lssar.errors import UserError
from lssar.hf.head_scales import add_head_scale, is_attention
from lssar.hf.layer import called_since, note_start
from lssar.hf.names import REGISTERED
from lssar.hf.packed import packed_apart
from lssar.hf.refusals import family_of
from lssar.hf.saved import FIELD, check_adapters, check_record, recorded

WATCHED = "_lssar_watched"


def install() -> None:
    """Watch every model of transformers that is built from now on.

    torch calls `_on_registration` whenever a module becomes part of another, which is while models
    are built; nothing of transformers is changed.
    """
    global _installed
    if not _installed:
        _installed = True
        register_module_module_registration_hook(_on_registration)


_installed = False


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, PreTrainedModel) and not vars(parent).get(WATCHED):
        _watch(parent)
    record = getattr(getattr(child, "config", None), FIELD, None)
    if record and record.get("head_scales") and is_attention(child):
        add_head_scale(child, record["name"])
    adapted = getattr(child, "model", None)  # where a PeftModel gets its LoraModel
    if name == "base_model" and isinstance(adapted, PreTrainedModel):
        check_adapters(adapted, getattr(child, "peft_config", {}))


def check(model: nn.Module, attention: str | None = None) -> nn.Module:
    """Return the model, watched from now on as one that was built after `lssar.hf` was imported.

        model = lssar.hf.check(LlamaForCausalLM.from_pretrained(folder), "lssar")

    Refuse it where one of our mechanisms cannot work, and where no part of it runs `attention`.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        if not vars(part).get(WATCHED):
            _watch(part)
    found = sorted({str(part.config._attn_implementation) for part in parts})
    if attention is not None and attention not in found:
        raise UserError(
            f"{type(model).__name__} runs attention {', '.join(map(repr, found)) or None}, "
            f"and {attention!r} nowhere; give attn_implementation={attention!r}"
        )
    return model


def _watch(model: PreTrainedModel) -> None:
    """Look at the model's calls, and at what it is saved and switched with."""
    setattr(model, WATCHED, True)
    _check_request()
    _check_attention(model)
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after)
    # Of this model alone: they hide the methods of its class.
    model.save_pretrained = functools.partial(_save_pretrained, model)
    model.set_attn_implementation = functools.partial(_set_attn_implementation, model)
    model.load_adapter = functools.partial(_load_adapter, model)


def _save_pretrained(model: PreTrainedModel, *args, **options):
    check_adapters(model, getattr(model, "peft_config", {}))
    with recorded(model):
        return type(model).save_pretrained(model, *args, **options)


def _set_attn_implementation(model: PreTrainedModel, attn_implementation, *args, **options) -> None:
    wanted = attn_implementation
    _check_parts(model.config, wanted)
    if isinstance(wanted, dict):
        wanted = wanted.get("", model.config._attn_implementation)
    type(model).set_attn_implementation(model, attn_implementation, *args, **options)
    if wanted in REGISTERED and model.config._attn_implementation != wanted:
        _refuse_model(model, wanted)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _check_attention(part)


def _check_request() -> None:
    """Check the `attn_implementation` that the model which is being built was asked for.

    Of a dict, transformers ignores what names no part of the model. The Auto classes still hold it
    in the arguments of their functions that are running; a class's own `from_pretrained` does not.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers.models.auto."):
            config = frame.f_locals.get("config")
            for value in frame.f_locals.values():
                if type(value) is dict and config is not None:
                    _check_parts(config, value.get("attn_implementation"))
        frame = frame.f_back


def _check_parts(config, wanted: Any) -> None:
    """Refuse a dict that gives one of our mechanisms to a part that the model does not have."""
    if not isinstance(wanted, dict):
        return
    parts = config.sub_configs
    for part, name in wanted.items():
        if part and part not in parts and isinstance(name, str) and name in REGISTERED:
            known = ", ".join(map(repr, parts))
            remedy = f"choose from {known}" if known else f"give attn_implementation={name!r}"
            raise UserError(f"{family_of(config)} has no part {part!r} to take {name!r}; {remedy}")


def _load_adapter(model: Any, *args, **options):
    found = type(model).load_adapter(model, *args, **options)
    check_adapters(model, model.peft_config)
    return found


def _check_attention(model: PreTrainedModel) -> None:
    """Warn where the weights are of another attention; refuse a model that cannot take ours."""
    name = model.config._attn_implementation
    record = getattr(model.config, FIELD, None)
    if record:
        check_record(record)
        if record["name"] != name:
            warnings.warn(
                f"{type(model).__name__} was saved with attention {record['name']!r} and runs with "
                f"{name!r}; leave attn_implementation out to use the former, or set "
                f"model.config.{FIELD} = None if the latter is meant",
                stacklevel=3,
            )
    has_text_model = "text_config" in model.config.sub_configs  # which is judged instead
    if name in REGISTERED and not has_text_model and not _asks_the_interface(type(model)):
        _refuse_model(model, name)


def _asks_the_interface(model: type[PreTrainedModel]) -> bool:
    """Tell whether the layers of the model's file look up the attention by its name."""
    try:
        code = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        code = ""
    if re.search(r"_CLASSES\[.*_attn_implementation\]", code):  # a layer class per name (GIT)
        return False
    return not code or "ALL_ATTENTION_FUNCTIONS" in code or model._can_set_attn_implementation()


def _refuse_model(model: PreTrainedModel, name: str):
    what = f"{type(model).__name__} ({model.config.model_type})"
    remedy = "choose a model whose attention transformers lets one replace"
    if model.config.base_config_key not in ("", "text_config"):  # images, sound
        remedy = f"give attn_implementation={{'text_config': {name!r}}}"
    raise UserError(
        f"{what} has no layer that calls attention {name!r}: it computes its own, or none; {remedy}"
    )


def _before(model: PreTrainedModel, args: tuple, options: dict):
    name = model.config._attn_implementation
    if name not in REGISTERED:
        return None
    if options.get("output_attentions"):
        raise UserError(
            f"attention {name!r} in {family_of(model.config)} never makes its weights; "
            "leave output_attentions out, or call lssar.attention_weights"
        )
    note_start(type(model).__name__)
    positions = options.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] == 1:
        return None
    return args, packed_apart(model, positions, options)


def _after(model: PreTrainedModel, args: tuple, output) -> None:
    name = model.config._attn_implementation
    if name in REGISTERED and not called_since(type(model).__name__):
        _refuse_model(model, name)
