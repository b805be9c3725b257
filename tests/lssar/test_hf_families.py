"""Sliding, chunked and mixed layers, capped scores, values of another width: each model's own."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from tiny_models import build, padded, tokens
from transformers import AttentionInterface
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

import lssar.hf  # noqa: F401 - registers the mechanisms
from lssar.errors import UserError
from lssar.hf.layer import attention_forward
from lssar.mechanisms import MECHANISMS
from lssar.reference import attention_weights

MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FULL = {"sliding_window": 4, "layer_types": ["full_attention"] * 2}
QWEN = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
EXPERTS = {"num_local_experts": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "head_dim": 4}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, **EXPERTS}
LATENT |= {"num_key_value_heads": 4}
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 31}
PER_LAYER |= {"num_kv_shared_layers": 0, "global_head_dim": 6, "num_global_key_value_heads": 2}
CHUNKS = {"attention_chunk_size": 5, "intermediate_size_mlp": 20, "no_rope_layers": [1, 0]}

FAMILIES = {
    "gemma2": MIXED | {"query_pre_attn_scalar": 6, "attn_logit_softcapping": 2.0},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 9},
    "gemma3_text, all full": FULL | {"query_pre_attn_scalar": 9},
    "gemma4_text": MIXED | PER_LAYER,
    "olmo3": MIXED,
    "cohere2": MIXED,
    "exaone4": MIXED,
    "ministral": MIXED,
    "mistral": {"sliding_window": 4},
    "mistral, a long window": {"sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "llama4_text": CHUNKS | EXPERTS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}


def of(family: str, attention: str, **changes):
    return build(family.split(",")[0], attention, sharp=3, **(FAMILIES[family] | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_by_this_way_is_the_familys_own(family):
    ours, theirs = of(family, "lssar-softmax"), of(family, "eager")
    ids, mask = padded([tokens(1, n)[0] for n in (13, 8)], "left")
    place = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": place}
    with torch.no_grad():
        got, expected = (m(ids, **given).logits[mask == 1] for m in (ours, theirs))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        got, expected = (m(ids[:, 5:]).logits for m in (ours, theirs))  # shorter than two windows
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_lssar_of_a_family_is_the_reference_over_what_the_family_shows(family, monkeypatch):
    """What transformers' own eager layers see, against the weights of each row's keys alone."""
    capped = {"attn_logit_softcapping": None} if family == "gemma2" else {}
    calls = []

    def watched(module, q, k, v, mask, **options):
        out = attention_forward(MECHANISMS["lssar"], module, q, k, v, mask, **options)
        calls.append((q, k, v, out[0]))
        return out

    model, ids = of(family, "lssar", **capped), tokens(1, 11)
    monkeypatch.setitem(AttentionInterface._global_mapping, "lssar", watched)
    with torch.no_grad():
        model(ids, use_cache=False)
    config = model.config
    config._attn_implementation = "eager"
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or ["sliding_attention" if window else "full_attention"] * 2
    assert len(calls) == 2
    for (q, k, v, out), kind in zip(calls, kinds, strict=True):
        mask = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](
            config=config,
            inputs_embeds=torch.zeros(1, 11, 24),
            attention_mask=None,
            past_key_values=None,
        )
        visible = mask[0, 0] == 0
        head = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        k, v = k[:, head], v[:, head]
        assert out.shape[3] == v.shape[3]
        for row, keys in enumerate(visible):
            weights = attention_weights(q[:, :, row : row + 1], k[:, :, keys], "lssar")
            expected = (weights @ v[:, :, keys])[:, :, 0]
            torch.testing.assert_close(out[:, row], expected, rtol=2e-3, atol=2e-4)


def test_what_a_family_adds_that_has_no_meaning_is_refused_by_name():
    ids = tokens(1, 7)
    sinks = build("gpt_oss", "lssar", **MIXED, **EXPERTS)
    with pytest.raises(UserError, match=r"type 'gpt_oss' cannot take learned sinks \(s_aux\)"):
        sinks(ids)
    with pytest.raises(UserError, match=r"softcap = 2.0\): its scores are those of cosines"):
        of("gemma2", "lssar")(ids)
    with pytest.raises(UserError, match=r"softcap = 2.0; scores on the cosine are bounded"):
        replace(MECHANISMS["lssar"], softcap=2.0)
    with pytest.raises(UserError, match="softcap = -1; it must be a number > 0"):
        replace(MECHANISMS["softmax"], softcap=-1)
    module = of("mistral", "lssar").model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 6)
    with pytest.raises(UserError, match=r"type 'mistral' cannot take a tensor it does not know"):
        attention_forward(MECHANISMS["lssar"], module, q, q, q, None, gate=torch.ones(1))
