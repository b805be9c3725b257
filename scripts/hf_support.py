"""python scripts/hf_support.py [TYPE ...] [--write README.md docs/hf_support.md]

Which causal language models of the installed transformers take attention 'lssar': constructs each
type at a tiny size and tries it. A type works if

    softmax through lssar gives the logits of its own eager attention,
    lssar gives finite logits in which no token sees a later one, and finite gradients,
    and generates the same tokens with a cache and without,

or else it is refused in one line that says why. Anything else is an error, and the exit code is 1.
hf_support.toml has the sizes. --write replaces the tables in these files: every type in
docs/hf_support.md, a few of each kind in the README.
"""

import re
import sys
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.command import Parser, answer_early, run

BEGIN = {"all": "<!-- scripts/hf_support.py: all -->", "few": "<!-- scripts/hf_support.py: few -->"}
END = "<!-- end -->"


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; default: all")
    write = {"metavar": "FILE", "help": "replace the tables in these files", "default": []}
    parser.add_argument("--write", type=Path, nargs="+", **write)
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError, did_you_mean
from support.files import read_text, write_text

SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORKS = "works"


def sizes(kind: str) -> dict:
    return SIZES.get("assistant" if kind.endswith("_assistant") else kind, {})


def tiny_config(config: PreTrainedConfig, own: dict) -> PreTrainedConfig:
    """The type's default with the common sizes, as far as it has them, and those of its own."""
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
    """With this attention, or in its language part if it has others."""
    model_class, whole = getattr(transformers, TYPES[kind]), CONFIG_MAPPING[kind]
    from_config = AutoModelForCausalLM.from_config
    if whole.has_no_defaults_at_init:  # of encoder and decoder, where only the latter is built here
        whole, from_config = model_class.config_class, model_class._from_config
    for given in ({"text_config": attention}, attention):
        torch.manual_seed(0)
        config = tiny_config(whole(), sizes(kind))
        if type(given) is str or "text_config" in config.sub_configs:
            model = from_config(config, attn_implementation=given).eval()
            parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
            if any(m.config._attn_implementation == attention for m in parts):
                break
    return model


def inputs(kind: str) -> dict:
    """Tokens; for an assistant the states, keys and values of the model that it drafts for."""
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
    """WORKS, or why not; an exception for anything else."""
    given = inputs(kind)
    try:
        with torch.no_grad():
            ours = build(kind, "lssar-softmax")(**given).logits
        model = build(kind, "lssar")
        logits = model(**given).logits
    except UserError as error:
        return f"refused: {_reason(error)}"
    except ImportError as error:  # transformers' own, in several lines
        package = re.search(r"requires the (\w+) library", str(error))
        if package is None:
            raise
        return f"not tried: transformers needs the package {package[1]}, which is not installed"
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


def _reason(error: UserError) -> str:
    text = str(error)
    if "has no layer" in text:
        return "computes its own attention, or has none"
    return text.partition("cannot take ")[2].partition(";")[0] or text


def tables(outcomes: dict[str, str]) -> dict[str, str]:
    """One row per outcome, what works first: with all of its types, and with a few."""
    groups = defaultdict(list)
    for kind, outcome in outcomes.items():
        groups[outcome].append(kind)
    head = f"| transformers {transformers.__version__} | | model types |\n|---|---|---|"
    found = dict.fromkeys(BEGIN, head)
    for outcome in sorted(groups, key=lambda o: (o != WORKS, -len(groups[o]), o)):
        kinds = groups[outcome]
        few = [kind for kind in kinds if kind in SIZES["known"]] or kinds[:2]
        for form, shown in (("all", kinds), ("few", few)):
            names = [f"`{kind}`" for kind in shown] + ["..."] * (len(shown) < len(kinds))
            found[form] += f"\n| {outcome} | {len(kinds)} | {', '.join(names)} |"
    return found


def put(found: dict[str, str], path: Path) -> None:
    """Replace the tables in a file."""
    text = read_text(path)
    if not any(begin in text for begin in BEGIN.values()):
        raise UserError(f"{path} has no table to replace; put {BEGIN['all']!r} and {END!r} into it")
    for form, table in found.items():
        before, begin, rest = text.partition(BEGIN[form])
        if begin:
            text = f"{before}{begin}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
    write_text(path, text)


def main(argv: list[str]) -> int:
    arguments = make_parser().parse_args(argv)
    for kind in arguments.types:
        if kind not in TYPES:
            raise UserError(f"unknown model type {kind!r}; {did_you_mean(kind, TYPES)}")
    if arguments.types and arguments.write:
        raise UserError("--write needs every type for its tables; leave the TYPEs out")
    outcomes, failed = {}, False
    for kind in arguments.types or TYPES:
        try:
            said = outcomes[kind] = tried(kind)
        except Exception as error:  # whatever it is, it must not occur
            failed, said = True, f"FAILED: {type(error).__name__}: {str(error).strip()[:300]}"
        print(f"{kind}: {said}", file=sys.stderr, flush=True)
    found = tables(outcomes)
    print(found["all"])
    for path in [] if failed else arguments.write:
        put(found, path)
    return int(failed)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a hundred models have a hundred things to say
    transformers.utils.logging.set_verbosity_error()
    run(main)
