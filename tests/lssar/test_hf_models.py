"""Models of transformers around our attention: refused, recorded, packed; nothing in silence."""

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from cases import cases, example_of
from tiny_models import build, config_of, pack, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import lssar.hf
from lssar.errors import UserError
from lssar.hf import add_head_scales, check, register
from lssar.mechanisms import MECHANISMS, get_mechanism

ROOT = Path(__file__).parents[2]


# --- a model whose layers do not call our function ----------------------------------------------

COMPUTE_THEIR_OWN = {  # and what they do when nobody stops them
    "bloom": "not causal",
    "codegen": "not causal",
    "xglm": "not causal",
    "gpt_neox_japanese": "not causal",
    "xlnet": "not causal",
    "mpt": "fails in its forward",
    "gptj": "fails in its construction",
    "openai-gpt": "ignores the name",
}
SMALL = {"d_model": 24, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_heads": 4, "n_layers": 2}
SMALL |= {"num_heads": 4, "num_layers": 2, "rotary_dim": 4, "ffn_dim": 20, "attention_heads": 4}


@pytest.mark.parametrize("kind", COMPUTE_THEIR_OWN)
def test_a_model_that_computes_its_own_attention_is_refused_at_construction(kind):
    with pytest.raises(UserError, match=rf"\({kind}\) has no layer that calls attention 'lssar'"):
        build(kind, "lssar", **SMALL)
    if kind != "gptj":  # transformers writes a line to its log and goes on
        with pytest.raises(UserError, match=rf"\({kind}\) has no layer that calls"):
            build(kind, None, **SMALL).set_attn_implementation("lssar")


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "roformer", "rembert"])
def test_a_model_in_which_our_attention_is_not_called_is_refused_by_its_first_forward(kind):
    options = {"is_decoder": True} if kind.startswith("r") else {}
    try:
        model = build(kind, "lssar", **options, embedding_size=24)
    except UserError as error:
        assert f"({kind}) has no layer that calls attention 'lssar'" in str(error)
        return
    with pytest.raises(UserError, match=rf"\({kind}\) has no layer that calls attention 'lssar'"):
        model(tokens(1, 5))


class Deaf(LlamaForCausalLM):
    """A Llama of someone's own, in a file that mentions ALL_ATTENTION_FUNCTIONS as this one does,
    whose layers compute something else."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def test_the_check_is_of_what_happened():
    config = config_of("llama")
    config._attn_implementation = "lssar"
    model, ids = Deaf(config), tokens(1, 5)
    for broken in (model, copy.deepcopy(model)):
        with pytest.raises(UserError, match=r"\(llama\) has no layer that calls attention 'lssar'"):
            broken(ids)
    with pytest.raises(UserError, match="has no layer that calls"):
        torch.compile(model, backend="eager")(ids)
    model.set_attn_implementation("eager")
    model(ids)  # its own affair


# --- what a saved model was trained with --------------------------------------------------------


def quiet_load(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def test_a_saved_model_is_loaded_with_the_attention_it_had(tmp_path):
    model, ids = build("llama", "lssar"), tokens(2, 9)
    model.save_pretrained(tmp_path / "a")
    assert not hasattr(model.config, "lssar_attention")  # the user's config is left as it was
    again = quiet_load(tmp_path / "a")
    assert again.config._attn_implementation == "lssar"
    assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "b")
    assert torch.equal(quiet_load(tmp_path / "b")(ids).logits, model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path / "b")
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "lssar"
    model.set_attn_implementation("sdpa")  # never loaded: a fresh model may change its mind
    model.save_pretrained(tmp_path / "c")
    assert quiet_load(tmp_path / "c").config._attn_implementation == "sdpa"


def test_weights_of_one_attention_under_another_are_noticed(tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path / "a")
    with pytest.warns(UserWarning, match="saved with attention 'lssar' and runs with 'sdpa'"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="sdpa")
    with pytest.warns(UserWarning, match="saved with attention 'lssar' and runs with 'eager'"):
        model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "b")  # the record stays until it is removed
    assert quiet_load(tmp_path / "b").config._attn_implementation == "lssar"
    model.config.lssar_attention = None
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "c")
    assert quiet_load(tmp_path / "c").config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_variant_is_loaded_once_its_name_is_registered(tmp_path):
    register("lssar-p3-test", get_mechanism("lssar", p=3, window=5))
    model, ids = build("llama", "lssar-p3-test"), tokens(2, 9)
    model.save_pretrained(tmp_path)
    program = f"""
import sys, torch, lssar.hf
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
    sys.exit("loaded without its attention")
except ValueError as error:
    assert "lssar-p3-test" in str(error)
lssar.hf.register("lssar-p3-test", lssar.get_mechanism("lssar", p=3, window=5))
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
ids = torch.tensor({ids.tolist()})
print(model(ids).logits.double().abs().sum().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(model(ids).logits.double().abs().sum().item())
    register("lssar-p3-test", get_mechanism("lssar", p=4))
    with pytest.raises(UserError, match=r"another attention 'lssar-p3-test': here p = 4, not 3"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_without_this_library_a_marked_model_is_not_loaded(tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "lssar"
    program = "from transformers import AutoModelForCausalLM as A; import sys; "
    program += "A.from_pretrained(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert 'Specified `attn_implementation="lssar"` is not supported' in done.stderr


def test_a_saved_config_names_no_class_that_another_engine_would_run(tmp_path):
    """vLLM, SGLang and llama.cpp choose by `architectures`, transformers does not."""
    model, ids = build("llama", "lssar"), tokens(1, 7)
    for number in range(2):  # and again, once loaded
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        assert saved["architectures"] == ["LssarLlamaForCausalLM"]
        assert "save_pretrained" not in saved and "save_pretrained" not in vars(model.config)
        again = quiet_load(folder)
        assert type(again) is LlamaForCausalLM
        assert torch.equal(again(ids).logits, model(ids).logits)
        model = again
    model.config.lssar_attention = None
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "plain")
    plain = json.loads((tmp_path / "plain/config.json").read_text())
    assert plain["architectures"] == ["LlamaForCausalLM"]


def test_a_part_that_a_model_does_not_have_is_refused(tmp_path):
    asked = {"attn_implementation": {"text_config": "lssar"}}
    what = r"type 'llama' has no part 'text_config' to take 'lssar'; give attn_imp.*='lssar'"
    with pytest.raises(UserError, match=what):
        AutoModelForCausalLM.from_config(config_of("llama"), **asked)
    model = build("llama", "sdpa")
    with pytest.raises(UserError, match=what):
        model.set_attn_implementation({"text_config": "lssar"})
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=what):
        AutoModelForCausalLM.from_pretrained(tmp_path, **asked)
    # A class's own from_pretrained forgets what it was asked for before it builds the model.
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, **asked)
    with pytest.raises(UserError, match="LlamaForCausalLM runs attention 'sdpa', and 'lssar' now"):
        check(loaded, "lssar")
    assert check(loaded) is loaded
    loaded.set_attn_implementation("lssar")
    assert check(loaded, "lssar") is loaded
    model.set_attn_implementation({"text_config": "sdpa"})  # none of ours: as transformers has it


def test_generic_names_have_a_prefix():
    program = "from transformers import AttentionInterface as A; before = set(A())\n"
    program += "import lssar.hf; print(*sorted(set(A()) - before))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    names = set(done.stdout.split())
    generic = {"softmax", "sigmoid", "exp", "identity"}
    assert names == (set(MECHANISMS) - generic) | {f"lssar-{name}" for name in generic}


def test_the_scalars_of_heads_are_loaded_again(tmp_path):
    model, ids = add_head_scales(build("llama", "ssmax")), tokens(1, 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("head_scale"):
                parameter.copy_(torch.rand(4) + 0.5)
    model.save_pretrained(tmp_path)
    assert torch.equal(quiet_load(tmp_path)(ids).logits, model(ids).logits)


def test_no_class_of_transformers_is_changed():
    program = """
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel
before = [dict(vars(c)) for c in (PreTrainedModel, LlamaForCausalLM, transformers.PretrainedConfig)]
import lssar.hf
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=2)
AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
after = [dict(vars(c)) for c in (PreTrainedModel, LlamaForCausalLM, transformers.PretrainedConfig)]
for old, new in zip(before, after):
    assert all(new[name] is value for name, value in old.items())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_built_before_is_watched_on_request(tmp_path):
    program = """
import torch, transformers
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig
size = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(LlamaConfig(**size, num_attention_heads=2))
bloom = BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)
own = AutoModelForCausalLM.from_config(bloom)
import lssar.hf
lssar.hf.check(model).set_attn_implementation("lssar")
packed = torch.tensor([[0, 1, 2, 0, 1]])
ids = torch.arange(5)[None]
alone = [model(ids[:, :3]).logits, model(ids[:, 3:]).logits]
assert torch.allclose(model(ids, position_ids=packed).logits, torch.cat(alone, 1), atol=1e-5)
try:
    lssar.hf.check(own).set_attn_implementation("lssar")
except lssar.errors.UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(bloom) has no layer that calls attention 'lssar'" in done.stdout


def test_the_docstring_of_each_public_name_has_an_example_that_runs(tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path)
    known = {"lssar": lssar, "folder": tmp_path, "config": config_of("llama")}
    known |= {"AutoModelForCausalLM": AutoModelForCausalLM, "LlamaForCausalLM": LlamaForCausalLM}
    for name in cases(lssar.hf.__all__):
        code = example_of(getattr(lssar.hf, name))
        assert f"lssar.hf.{name}(" in code
        exec(code, dict(known))


def test_a_name_of_transformers_stays_theirs():
    for name in ("sdpa", "eager", "flash_attention_2"):
        with pytest.raises(UserError, match=f"attention {name!r} is one of transformers' own"):
            register(name, get_mechanism("lssar"))


# --- packed sequences ---------------------------------------------------------------------------

PASS_NO_POSITIONS = {  # to their layers
    "llama4_text": {
        "num_local_experts": 2,
        "attention_chunk_size": 64,
        "intermediate_size_mlp": 20,
        "no_rope_layers": [1, 1],
    },
    "gpt_bigcode": {"multi_query": True},
}


@pytest.mark.parametrize("kind", ["llama", "gpt2", *PASS_NO_POSITIONS])
def test_packed_sequences_in_evaluation_do_not_see_one_another(kind):
    """With the cache that transformers makes by default, where it looks for no packed sequences."""
    model = build(kind, "lssar", **PASS_NO_POSITIONS.get(kind, {}))
    sequences = [tokens(1, n) for n in (5, 1, 8)]
    ids, place = pack(sequences)
    with torch.no_grad():
        alone = torch.cat([model(s).logits for s in sequences], dim=1)
        for options in ({}, {"use_cache": True}, {"attention_mask": torch.ones_like(ids)}):
            packed = model(ids, position_ids=place, **options)
            torch.testing.assert_close(packed.logits, alone, rtol=1e-4, atol=1e-4)
            assert packed.past_key_values is None
    with pytest.raises(UserError, match="packed sequences, which cannot be cached"):
        model(ids, position_ids=place, past_key_values=DynamicCache())


def test_positions_that_do_not_start_again_keep_their_cache():
    model, ids = build("llama", "lssar"), tokens(2, 9)
    place = torch.arange(9)[None].expand(2, -1)
    with torch.no_grad():
        first = model(ids[:, :4], position_ids=place[:, :4])
        cache = first.past_key_values
        second = model(ids[:, 4:], position_ids=place[:, 4:], past_key_values=cache)
        whole = model(ids).logits
    got = torch.cat((first.logits, second.logits), dim=1)
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)


def test_bounds_of_packed_sequences_are_taken():
    model = build("llama", "lssar")
    sequences = [tokens(1, n) for n in (5, 1, 8)]
    ids, place = pack(sequences)
    bounds = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    options |= {"max_length_q": 8, "max_length_k": 8}
    with torch.no_grad():
        alone = torch.cat([model(s).logits for s in sequences], dim=1)
        for given in (options, options | {"position_ids": place}):
            torch.testing.assert_close(model(ids, **given).logits, alone, rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match=r"cu_seq_lens_q for .*; give one row and no"):
            model(ids.expand(2, -1), **options)


def test_packed_rows_may_be_padded():
    """As in an exported model, whose tests have the same rows."""
    model = build("llama", "lssar")
    sequences = [tokens(1, n) for n in (4, 3)]
    ids, place = pack(sequences)
    other = tokens(1, 6)
    pad = torch.nn.functional.pad
    cases = {
        "right": (pad(ids, (0, 2)), pad(place, (0, 2)), [1] * 7 + [0] * 2, slice(0, 7)),
        "left": (pad(ids, (2, 0)), pad(place, (2, 0)), [0] * 2 + [1] * 7, slice(2, 9)),
    }
    with torch.no_grad():
        alone = torch.cat([model(s).logits for s in sequences], dim=1)[0]
        for side, (padded_ids, padded_place, mask, kept) in cases.items():
            rows = torch.cat((padded_ids, pad(other, (3, 0))))
            places = torch.cat((padded_place, pad(torch.arange(6)[None], (3, 0))))
            masks = torch.tensor([mask, [0] * 3 + [1] * 6])
            got = model(rows, position_ids=places, attention_mask=masks).logits
            torch.testing.assert_close(got[0, kept], alone, rtol=1e-4, atol=1e-4, msg=side)
            expected = model(other).logits[0]
            torch.testing.assert_close(got[1, 3:], expected, rtol=1e-4, atol=1e-4, msg=side)
        joined = pad(place + 1, (2, 0))  # the first token's position goes on from padding
        with pytest.raises(UserError, match="go on from padding to a token; give position 0"):
            model(pad(ids, (2, 0)), position_ids=joined, attention_mask=torch.tensor([mask]))


def test_packed_and_masked_rows_are_refused_in_a_graph():
    model = build("llama", "lssar")
    graph = torch.compile(model, backend="eager", fullgraph=True)
    ids, place = pack([tokens(1, n) for n in (4, 3)])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        for masks in (mask, mask.clone().index_fill(1, torch.tensor([6]), 0)):
            with pytest.raises(RuntimeError, match="only without attention_mask; leave it out"):
                graph(ids, position_ids=place, attention_mask=masks, use_cache=False)
        left = mask.clone().index_fill(1, torch.tensor([0, 1]), 0)
        place = (left.cumsum(1) - 1).clamp(min=0)
        options = {"position_ids": place, "attention_mask": left, "use_cache": False}
        got, expected = (f(ids, **options).logits[:, 2:] for f in (graph, model))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
