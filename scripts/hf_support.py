"""python scripts/hf_support.py [TYPE ...] [--write README.md]

Which causal language models of the installed transformers take attention 'lssar': constructs each
type at a tiny size and tries it. A type works if

    softmax by our door gives the logits of its own eager attention,
    lssar gives finite logits in which no token sees a later one, and finite gradients,
    and generates the same tokens with a cache and without,

or else it is refused in one line that says why. Anything else is an error, and the exit code is 1.
hf_support.toml has the sizes, and the types that transformers itself does not run.
"""

import sys
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.command import Parser, answer_early, run

BEGIN, END = "<!-- scripts/hf_support.py -->", "<!-- end -->"


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this file")
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError, did_you_mean
from support.files import read_text, write_text

SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORKS = "works"
LAYERS = ("layer_types", "mlp_layer_types")  # a config's kinds of layers


def tiny_config(config: PreTrainedConfig, own: dict) -> PreTrainedConfig:
    """The type's default with the common sizes, as far as it has them, and those of its own."""
    known = set(config.to_dict()) | set(config.attribute_map)
    given = {k: v for k, v in SIZES["common"].items() if k in known}
    if "qk_rope_head_dim" in known:
        given |= SIZES["latent"]
    for name in LAYERS:  # one layer of each kind that the type has
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
    for given in ({"text_config": attention}, attention):
        torch.manual_seed(0)
        config = tiny_config(AutoConfig.for_model(kind), SIZES.get(kind, {}))
        if type(given) is str or "text_config" in config.sub_configs:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=given).eval()
            parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
            if any(m.config._attn_implementation == attention for m in parts):
                break
    return model


def tried(kind: str) -> str:
    """WORKS, or why not; an exception for anything else."""
    if kind in SIZES["not_tried"]:
        return f"not tried: {SIZES['not_tried'][kind]}"
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            ours = build(kind, "softmax")(ids).logits
        model = build(kind, "lssar")
        logits = model(ids).logits
    except UserError as error:
        return f"refused: {_reason(error)}"
    with torch.no_grad():
        own = build(kind, "eager")(ids).logits
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-4)
    logits.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert logits.isfinite().all() and all(g.isfinite().all() for g in grads), "not finite"
    with torch.no_grad():
        later = model(torch.cat((ids[:, :-1], ids[:, -1:] % 29 + 1), 1)).logits
        torch.testing.assert_close(later[:, :-1], logits[:, :-1], msg="a token sees a later one")
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        cached, whole = (model.generate(ids, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, whole), "generates other tokens with a cache"
    return WORKS


def _reason(error: UserError) -> str:
    text = str(error)
    if "has no layer" in text:
        return "computes its own attention, or has none"
    return text.partition("cannot take ")[2].partition(";")[0] or text


def table(outcomes: dict[str, str]) -> str:
    """One row per outcome, what works first."""
    groups = defaultdict(list)
    for kind, outcome in outcomes.items():
        groups[outcome].append(f"`{kind}`")
    order = sorted(groups, key=lambda o: (o != WORKS, o.startswith("not"), -len(groups[o]), o))
    lines = [f"| transformers {transformers.__version__} | | model types |", "|---|---|---|"]
    for outcome in order:
        lines.append(f"| {outcome} | {len(groups[outcome])} | {', '.join(groups[outcome])} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    arguments = make_parser().parse_args(argv)
    for kind in arguments.types:
        if kind not in TYPES:
            raise UserError(f"unknown model type {kind!r}; {did_you_mean(kind, TYPES)}")
    outcomes, failed = {}, {}
    for kind in arguments.types or TYPES:
        try:
            outcomes[kind] = tried(kind)
            print(f"{kind}: {outcomes[kind]}", file=sys.stderr, flush=True)
        except Exception as error:  # whatever it is, it must not occur
            failed[kind] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"{kind}: FAILED: {failed[kind]}", file=sys.stderr, flush=True)
    print(table(outcomes))
    if arguments.write and not failed:
        text = read_text(arguments.write)
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        write_text(arguments.write, f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{after}")
    return int(bool(failed))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a hundred models have a hundred things to say
    transformers.utils.logging.set_verbosity_error()
    run(main)
