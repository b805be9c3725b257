"""What `lssar.hf` adds to models of transformers that use one of our mechanisms.

A saved model's config records the mechanism: it is loaded with it, and a warning is given where it
is run with another. A variant under a name of its own must be registered before it is loaded. A
model whose layers do not call our function is refused when it is built, or by its first forward.
Packed batches run without a KV cache, which has no place for several sequences in one row.

No class of transformers is changed. Models are seen while they are built, by a hook of torch, and
what is added is added to the model itself.
"""

import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, Mechanism
from lssar.tracing import can_look_at, trace_constant

REGISTERED: dict[str, Mechanism] = {}  # by the name that `attn_implementation` takes
FIELD = "lssar_attention"  # of a config: the name, the mechanism, whether heads have a scalar
WATCHED = "_lssar_watched"
PREFIX = "Lssar"  # of the architectures that a saved config names
HEAD_SCALE = "head_scale"
DEFAULTS = {field.name: field.default for field in fields(Mechanism)}


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
    if record and record.get("head_scales") and _is_attention(child):
        _add_head_scale(child, record["name"])
    adapted = getattr(child, "model", None)  # where a PeftModel gets its LoraModel
    if name == "base_model" and isinstance(adapted, PreTrainedModel):
        _check_adapters(adapted, getattr(child, "peft_config", {}))


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
    _check_adapters(model, getattr(model, "peft_config", {}))
    with _recorded(model):
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


# --- adapters ------------------------------------------------------------------------------------


def _load_adapter(model: Any, *args, **options):
    found = type(model).load_adapter(model, *args, **options)
    _check_adapters(model, model.peft_config)
    return found


def _check_adapters(model: PreTrainedModel, adapters: dict) -> None:
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


# --- the record in the config --------------------------------------------------------------------


def _check_record(record: dict) -> None:
    """Refuse a name that means another mechanism here than it did where the model was saved."""
    try:
        name, mechanism = record["name"], Mechanism(**record["mechanism"])
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
def _recorded(model: PreTrainedModel) -> Iterator[None]:
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


def _check_attention(model: PreTrainedModel) -> None:
    """Warn where the weights are of another attention; refuse a model that cannot take ours."""
    name = model.config._attn_implementation
    record = getattr(model.config, FIELD, None)
    if record:
        _check_record(record)
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


def family_of(config) -> str:
    return f"a model of type {config.model_type!r}" if config is not None else "a model"


def _refuse_model(model: PreTrainedModel, name: str):
    what = f"{type(model).__name__} ({model.config.model_type})"
    remedy = "choose a model whose attention transformers lets one replace"
    if model.config.base_config_key not in ("", "text_config"):  # images, sound
        remedy = f"give attn_implementation={{'text_config': {name!r}}}"
    raise UserError(
        f"{what} has no layer that calls attention {name!r}: it computes its own, or none; {remedy}"
    )


# --- what happens in a forward -------------------------------------------------------------------

_calls = threading.local()


@trace_constant
def note_call() -> None:
    """Note that one of our mechanisms computes a layer."""
    _calls.count = getattr(_calls, "count", 0) + 1


@trace_constant
def _note_start(model: str) -> None:
    setattr(_calls, model, getattr(_calls, "count", 0))


@trace_constant
def _called_since(model: str) -> bool:
    return getattr(_calls, "count", 0) > getattr(_calls, model, 0)


def _before(model: PreTrainedModel, args: tuple, options: dict):
    name = model.config._attn_implementation
    if name not in REGISTERED:
        return None
    if options.get("output_attentions"):
        raise UserError(
            f"attention {name!r} in {family_of(model.config)} never makes its weights; "
            "leave output_attentions out, or call lssar.attention_weights"
        )
    _note_start(type(model).__name__)
    positions = options.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] == 1:
        return None
    return args, _packed_apart(model, positions, options)


def _after(model: PreTrainedModel, args: tuple, output) -> None:
    name = model.config._attn_implementation
    if name in REGISTERED and not _called_since(type(model).__name__):
        _refuse_model(model, name)


def _packed_apart(model: PreTrainedModel, positions: Tensor, options: dict) -> dict:
    """Return options that make transformers separate packed sequences: no cache, no mask."""
    mask, cache = options.get("attention_mask"), options.get("past_key_values")
    if not can_look_at(positions):  # in a graph, or on a GPU, which is not waited for
        _assert_not_packed(model, positions, options)
        return options
    sequences = find_packed_sequence_indices(positions)
    if sequences is None:
        return options
    if mask is not None:
        if not _covers(mask, positions) or not _start_again(positions, mask):
            return options
        tokens = mask.bool()
        together = sequences[:, 1:] == sequences[:, :-1]
        if (together & tokens[:, 1:] & ~tokens[:, :-1]).any():
            raise UserError(
                "position_ids of packed sequences go on from padding to a token; "
                "give position 0 to padding"
            )
    if cache is not None:
        raise UserError(PACKED_AND_CACHED)
    return options | {"attention_mask": None, "use_cache": False}


PACKED_AND_CACHED = (
    "position_ids that start again are packed sequences, which cannot be cached; "
    "give use_cache=False and no past_key_values"
)
PACKED_AND_MASKED = (
    "position_ids that start again are packed sequences, which a compiled graph or a GPU tells "
    "apart only without attention_mask; leave it out"
)


def _assert_not_packed(model: PreTrainedModel, positions: Tensor, options: dict) -> None:
    """Let the device check what the host cannot look at, where packed sequences cannot be told."""
    mask, cache = options.get("attention_mask"), options.get("past_key_values")
    if mask is not None:
        if _covers(mask, positions):
            _assert_on_device(~_start_again(positions, mask), PACKED_AND_MASKED)
        return
    wanted = options.get("use_cache")
    if wanted is None:
        wanted = getattr(model.config, "use_cache", False)
    if torch.compiler.is_compiling() and cache is None and wanted:
        raise UserError(
            f"position_ids for {family_of(model.config)} in a compiled graph may be of packed "
            "sequences, which cannot be cached; give use_cache=False, or attention_mask"
        )
    if cache is not None or wanted:
        _assert_on_device((positions.diff(dim=1) == 1).all(), PACKED_AND_CACHED)


def _assert_on_device(condition: Tensor, message: str) -> None:
    if not condition.is_meta:
        torch._assert_async(condition, message)


def _covers(mask: Any, positions: Tensor) -> TypeGuard[Tensor]:
    """Tell whether a mask says of each position whether it is a token."""
    return isinstance(mask, Tensor) and mask.shape == positions.shape


def _start_again(positions: Tensor, mask: Tensor) -> Tensor:
    """Tell whether the tokens of some row, without the padding, are several sequences."""
    order = mask.bool().to(torch.uint8).argsort(dim=1, stable=True)  # padding first
    place = positions.expand_as(mask).gather(1, order)
    token = mask.bool().gather(1, order)
    return ((place.diff(dim=1) != 1) & token[:, 1:] & token[:, :-1]).any()


# --- the learnable scalar of a head (ssmax, relu-shen) -------------------------------------------


def add_head_scales(model: PreTrainedModel) -> PreTrainedModel:
    """Make the scalar of each head of `ssmax` and `relu-shen` a parameter of every layer.

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
        if _is_attention(layer):
            _add_head_scale(layer, name, model.config.num_attention_heads)
    return model


def _is_attention(layer: nn.Module | None) -> bool:
    return hasattr(layer, "layer_idx") and hasattr(layer, "is_causal")


def _add_head_scale(layer: Any, name: str, heads: int | None = None) -> None:
    if hasattr(layer, HEAD_SCALE):
        return
    if heads is None:
        heads = layer.config.num_attention_heads
    initial: Any = REGISTERED[name].parameter_init
    scale = torch.full((heads,), initial, device=next(layer.parameters()).device)
    layer.register_parameter(HEAD_SCALE, nn.Parameter(scale))
