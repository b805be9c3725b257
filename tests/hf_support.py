"""Which causal language models of the installed transformers take attention "lssar".

Constructs each type at a tiny size (hf_support.toml) and tries it. A type works if

    softmax through lssar gives the logits of its own eager attention,
    lssar gives finite logits in which no token sees a later one, and finite gradients,
    and generates the same tokens with a cache and without,

or else it is refused in one line that says why. Anything else is an error. A type whose own eager
attention does not run at the tiny size is not tried: a new release may need other sizes.
"""

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError

SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORKS = "works"


def sizes(kind: str) -> dict:
    return SIZES.get("assistant" if kind.endswith("_assistant") else kind, {})


def tiny_config(config: PreTrainedConfig, own: dict) -> PreTrainedConfig:
    """Return the type's config with the common sizes that it has, and those of its own."""
    known = set(config.to_dict()) | set(config.attribute_map)
    given = {k: v for k, v in SIZES["common"].items() if k in known}
    if "qk_rope_head_dim" in known:
        given |= SIZES["latent"]
    for name in ("layer_types", "mlp_layer_types"):  # one layer of each kind that the type has
        kinds = list(dict.fromkeys(config.to_dict().get(name) or ()))
        if kinds and name not in own:
            given["num_hidden_layers"] = count = max(given.get("num_hidden_layers", 2), len(kinds))
            given[name] = (kinds * count)[:count]
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            given[name] = tiny_config(part, own.get(name, {}))
    return type(config)(**(own | given | {k: v for k, v in own.items() if type(v) is not dict}))


def build(kind: str, attention: str) -> PreTrainedModel:
    """Build a model with this attention, or with it in its language part if it has others."""
    model_class, whole = getattr(transformers, TYPES[kind]), CONFIG_MAPPING[kind]
    from_config = AutoModelForCausalLM.from_config
    if whole.sub_configs.get("decoder") is model_class.config_class:  # which alone is built here
        whole, from_config = model_class.config_class, model_class._from_config
    for given in ({"text_config": attention}, attention):
        torch.manual_seed(0)
        config = tiny_config(whole(), sizes(kind))
        if type(given) is str or "text_config" in model_class.config_class.sub_configs:
            model = from_config(config, attn_implementation=given).eval()
            parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
            if any(m.config._attn_implementation == attention for m in parts):
                break
    return model


def inputs(kind: str) -> dict:
    """Return tokens; for an assistant also states, keys and values of the model it drafts for."""
    torch.manual_seed(0)
    if not kind.endswith("_assistant"):
        return {"input_ids": torch.randint(3, 30, (2, 9))}
    text = sizes(kind)["text_config"]
    heads, width = text["num_key_value_heads"], text["head_dim"]
    shared = {name: torch.randn(2, 2, heads, 9, width).unbind() for name in text["layer_types"]}
    states = torch.randn(2, 1, 2 * sizes(kind)["backbone_hidden_size"])
    place = torch.tensor([[8]])
    return {"inputs_embeds": states, "shared_kv_states": shared, "position_ids": place}


def tried(kind: str) -> str:
    """Return WORKS, or why not; an exception for anything else."""
    given = inputs(kind)
    try:
        with torch.no_grad():
            ours = build(kind, "lssar-softmax")(**given).logits
        model = build(kind, "lssar")
        logits = model(**given).logits
    except UserError as error:
        return f"refused: {_reason(error)}"
    except Exception:
        reason = own_failure(kind, given)
        if reason is None:
            raise
        return f"not tried: {reason}"
    with torch.no_grad():
        own = build(kind, "eager")(**given).logits
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-4)
    logits.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert logits.isfinite().all() and all(g.isfinite().all() for g in grads), "not finite"
    ids = given["input_ids"]
    with torch.no_grad():
        later = model(torch.cat((ids[:, :-1], ids[:, -1:] % 29 + 1), 1)).logits
        torch.testing.assert_close(later[:, :-1], logits[:, :-1], msg="a token sees a later one")
        if kind == "musicgen":  # with a cache, transformers drops all but the last of its prompt
            ids = ids[:, :1]
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        options |= {"decoder_start_token_id": 1, "num_return_sequences": 1}  # musicgen needs both
        cached, whole = (model.generate(ids, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, whole), "generates other tokens with a cache"
    return WORKS


def own_failure(kind: str, given: dict) -> str | None:
    """Return why a type does not run with its own attention either; None: it does."""
    try:
        with torch.no_grad():
            build(kind, "eager")(**given)
    except ImportError as error:  # in several lines
        package = re.search(r"requires the (\w+) library", str(error))
        needed = package[1] if package else "one more"
        return f"transformers needs the package {needed}, which is not installed"
    except Exception as error:  # whatever it is, it is not ours
        return f"a tiny one fails with its own attention ({type(error).__name__})"
    return None


def _reason(error: UserError) -> str:
    text = str(error)
    if "has no layer" in text:
        return "computes its own attention, or has none"
    return text.partition("cannot take ")[2].partition(";")[0] or text


def table(outcomes: dict[str, str]) -> str:
    """Return one row for each outcome, what works first."""
    groups = defaultdict(list)
    for kind, outcome in outcomes.items():
        groups[outcome].append(kind)
    rows = [f"| transformers {transformers.__version__} | | model types |", "|---|---|---|"]
    for outcome in sorted(groups, key=lambda o: (o != WORKS, -len(groups[o]), o)):
        kinds = sorted(groups[outcome])
        rows.append(f"| {outcome} | {len(kinds)} | {', '.join(f'`{kind}`' for kind in kinds)} |")
    return "\n".join(rows)
