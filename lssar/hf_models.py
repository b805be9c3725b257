"""What `lssar.hf` adds to models of transformers that use one of our mechanisms.

A saved model's config records the mechanism: it is loaded with it, and a warning is given where it
is run with another. A forward in which no layer called it is refused. Packed sequences are computed
without a cache, which has no place for where they begin.
"""

import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from lssar.backends import _constant  # runs while a graph is traced, and leaves nothing in it
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, Mechanism

REGISTERED: dict[str, Mechanism] = {}  # by the name that `attn_implementation` takes
FIELD = "lssar_attention"  # of a config: the name, the mechanism, whether heads have a scalar
WATCHED = "_lssar_watched"
HEAD_SCALE = "head_scale"
DEFAULTS = {field.name: field.default for field in fields(Mechanism)}


def install(register: Callable[[str, Mechanism], None]) -> None:
    """Let every model that transformers constructs from now on pass through here."""
    if hasattr(PreTrainedModel, WATCHED):
        return
    setattr(PreTrainedModel, WATCHED, False)
    construct, finish = PreTrainedModel.__init__, PreTrainedModel.post_init
    switch, save = PreTrainedModel.set_attn_implementation, PreTrainedModel.save_pretrained

    @functools.wraps(construct)
    def __init__(self, config, *args, **options):
        record = getattr(config, FIELD, None)
        if record:
            _recall(record, register)
            if config._attn_implementation is None:
                config._attn_implementation_internal = record["name"]
        construct(self, config, *args, **options)
        _settle(self)

    @functools.wraps(finish)
    def post_init(self):
        record = getattr(self.config, FIELD, None)
        if record and record.get("head_scales"):
            add_head_scales(self)
        finish(self)

    @functools.wraps(switch)
    def set_attn_implementation(self, attn_implementation, *args, **options):
        wanted = attn_implementation
        if isinstance(wanted, dict):
            wanted = wanted.get("", self.config._attn_implementation)
        switch(self, attn_implementation, *args, **options)
        if wanted in REGISTERED and self.config._attn_implementation != wanted:
            _refuse_model(self, wanted)
        for model in self.modules():
            if isinstance(model, PreTrainedModel):
                _settle(model)

    @functools.wraps(save)
    def save_pretrained(self, *args, **options):
        with _recorded(self):
            return save(self, *args, **options)

    for method in (__init__, post_init, set_attn_implementation, save_pretrained):
        setattr(PreTrainedModel, method.__name__, method)


# --- the record in the config --------------------------------------------------------------------


def _recall(record: dict, register: Callable[[str, Mechanism], None]) -> None:
    """Register what a loaded config was trained with, or see that the name still means it."""
    try:
        name, mechanism = record["name"], Mechanism(**record["mechanism"])
    except (TypeError, KeyError) as error:
        raise UserError(f"config.{FIELD} = {record!r:.80} is not a mechanism: {error}") from None
    known = REGISTERED.get(name)
    if known is None:
        register(name, mechanism)
    elif known != mechanism:
        pairs = zip(vars(known).items(), vars(mechanism).values(), strict=True)
        meant = ", ".join(f"{key} = {a!r}, not {b!r}" for (key, a), b in pairs if a != b)
        what = f"the weights were trained with another attention {name!r}: here {meant}"
        raise UserError(f"{what}; register that one under another name")


@contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[None]:
    """While the model is saved, its configs say with which attention it runs."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = {id(m.config): (m.config, dict(vars(m.config))) for m in models}
    try:
        for m in models:
            name = m.config._attn_implementation
            if name in REGISTERED:
                scales = any(hasattr(layer, HEAD_SCALE) for layer in m.modules())
                parts = vars(REGISTERED[name]).items()
                changed = {key: value for key, value in parts if value != DEFAULTS[key]}
                record = {"name": name, "mechanism": changed}
                setattr(m.config, FIELD, record | ({"head_scales": True} if scales else {}))
                # Without this library, transformers refuses a name that it does not know.
                m.config.attn_implementation = name
        yield
    finally:
        for config, values in before.values():
            for key in {FIELD, "attn_implementation"} & set(vars(config)):
                delattr(config, key)
                if key in values:
                    setattr(config, key, values[key])


def _settle(model: PreTrainedModel) -> None:
    """Watch a model that uses one of our mechanisms; warn where its weights are of another."""
    name = model.config._attn_implementation
    record = getattr(model.config, FIELD, None)
    if record and record["name"] != name:
        warnings.warn(
            f"{type(model).__name__} was saved with attention {record['name']!r} and runs with "
            f"{name!r}; leave attn_implementation out to use the former, or set "
            f"model.config.{FIELD} = None if the latter is meant",
            stacklevel=3,
        )
    if name in REGISTERED:
        whole = "text_config" not in model.config.sub_configs  # else its text model is judged
        if whole and not _asks_the_interface(type(model)):
            _refuse_model(model, name)
        if not getattr(model, WATCHED):
            setattr(model, WATCHED, True)
            model.register_forward_pre_hook(_before, with_kwargs=True)
            model.register_forward_hook(_after)


def _asks_the_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the attention layers of the model's file look up the attention by its name."""
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


@_constant
def note_call() -> None:
    """One of our mechanisms computes a layer."""
    _calls.count = getattr(_calls, "count", 0) + 1


@_constant
def _note_start(model: str) -> None:
    setattr(_calls, model, getattr(_calls, "count", 0))


@_constant
def _called_since(model: str) -> bool:
    return getattr(_calls, "count", 0) > getattr(_calls, model, 0)


def _before(model: PreTrainedModel, args: tuple, options: dict):
    name = model.config._attn_implementation
    if name not in REGISTERED:
        return None
    if options.get("output_attentions"):
        what = f"attention {name!r} in {family_of(model.config)} never makes its weights"
        raise UserError(f"{what}; leave output_attentions out, or call lssar.attention_weights")
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
    """Options under which transformers tells packed sequences apart: no cache, no padding mask."""
    mask, cache = options.get("attention_mask"), options.get("past_key_values")
    if torch.compiler.is_compiling():
        wanted = options.get("use_cache")
        keeps = getattr(model.config, "use_cache", False) if wanted is None else wanted
        if mask is None and cache is None and keeps:
            raise UserError(
                f"position_ids for {family_of(model.config)} in a compiled graph may be of packed "
                "sequences, which a cache has no place for; give use_cache=False, or attention_mask"
            )
        return options
    if find_packed_sequence_indices(positions) is None:
        return options
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.all()):
        return options
    if cache is not None:
        raise UserError(
            "position_ids that start again are packed sequences, which a cache has no place for; "
            "leave past_key_values out"
        )
    return options | {"attention_mask": None, "use_cache": False}


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
    heads = model.config.num_attention_heads
    for layer in model.modules():
        plain = not hasattr(layer, HEAD_SCALE)
        if plain and hasattr(layer, "layer_idx") and hasattr(layer, "is_causal"):
            weight = next(layer.parameters())
            scale = torch.full((heads,), mechanism.parameter_init, device=weight.device)
            layer.register_parameter(HEAD_SCALE, nn.Parameter(scale))
    return model
