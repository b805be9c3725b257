"""Every mechanism inside transformers' models: weights, padding, caches, gradients, refusals."""

import functools

import pytest
import torch
from cases import cases

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from tiny_models import build, pack, padded, tokens
from transformers import AttentionInterface

from lssar.errors import UserError
from lssar.hf import add_head_scales, name_of, register
from lssar.hf.layer import attention_forward
from lssar.hf.masks import visibility
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights

KINDS = ("llama", "qwen2", "qwen3", "gpt2")


def test_a_layer_computes_the_reference_weights(monkeypatch):
    """What goes into and comes out of each layer, against `attention_weights` on repeated heads."""
    calls = []

    def watched(mechanism, module, q, k, v, mask, **options):
        assert mask.dtype == torch.int8  # nothing is hidden
        out = attention_forward(mechanism, module, q, k, v, mask, **options)
        calls.append((q, k, v, out[0]))
        return out

    for mechanism, kind in cases(MECHANISMS, KINDS):
        calls.clear()
        model = build(kind, name_of(mechanism))
        layer = functools.partial(watched, MECHANISMS[mechanism])
        monkeypatch.setitem(AttentionInterface._global_mapping, name_of(mechanism), layer)
        with torch.no_grad():
            model(tokens(2, 9), use_cache=False)
        assert len(calls) == 2
        for q, k, v, out in calls:
            assert (k.shape[1] == 2) == (kind != "gpt2")
            head = torch.arange(4) // (4 // k.shape[1])  # query head h reads key head h // groups
            weights = attention_weights(q.double(), k[:, head].double(), mechanism)
            expected = (weights @ v[:, head].double()).transpose(1, 2).float()
            torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-4)


def test_softmax_by_this_way_is_transformers_own():
    ids = tokens(3, 8)
    for kind in KINDS:
        ours, theirs = build(kind, "lssar-softmax"), build(kind, "eager")
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        batch, mask = padded([ids[0], ids[1, :5], ids[2, :2]], "left")
        got, expected = (m(batch, attention_mask=mask).logits for m in (ours, theirs))
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_padded_batch_equals_the_sequences_alone():
    for side, kind in cases(["left", "right"], KINDS):
        model = build(kind, "lssar")
        sequences = [tokens(1, n)[0] for n in (9, 4, 1, 7)]
        ids, mask = padded(sequences, side)
        place = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=place).logits
            for row, sequence in enumerate(sequences):
                expected, got = model(sequence[None]).logits[0], logits[row, mask[row].bool()]
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_of_a_left_padded_batch_equals_each_prompt_uncached(kind):
    mechanisms = ["lssar", "ssmax", "sigmoid-logn-l1-reweighted"]
    for cache, mechanism in cases(["dynamic", "static"], mechanisms):
        model = build(kind, mechanism)
        prompts = [tokens(1, n)[0] for n in (6, 2, 5)]
        ids, mask = padded(prompts, "left")
        options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
        batch = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
        for row, prompt in enumerate(prompts):
            alone = prompt[None]
            for _ in range(7):
                with torch.no_grad():
                    best = model(alone, use_cache=False).logits[:, -1].argmax(-1)
                alone = torch.cat((alone, best[:, None]), dim=1)
            assert batch[row, 6:].tolist() == alone[0, len(prompt) :].tolist()


def test_a_prompt_read_in_two_parts_equals_the_prompt_read_at_once():
    for kind in cases(KINDS):
        model, ids = build(kind, "lssar"), tokens(2, 9)
        with torch.no_grad():
            first = model(ids[:, :4], use_cache=True)
            second = model(ids[:, 4:], past_key_values=first.past_key_values)
            whole = model(ids).logits
        got = torch.cat((first.logits, second.logits), dim=1)
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_weight_and_training_lowers_the_loss():
    for kind in cases(KINDS):
        model = build(kind, "lssar").train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        ids, mask = padded([tokens(1, n)[0] for n in (8, 5)], "right")
        labels = ids.masked_fill(mask == 0, -100)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(8):
            loss = model(ids, attention_mask=mask, labels=labels).loss
            optimiser.zero_grad()
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters()}
            assert all(g is not None and g.isfinite().all() for g in gradients.values())
            assert all(
                g.count_nonzero()
                for n, g in gradients.items()
                if "q_proj.w" in n or "c_attn.w" in n
            )
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_the_scalar_of_a_head_is_learnt_where_it_is_asked_for():
    model = add_head_scales(build("llama", "ssmax"))
    scales = [p for n, p in model.named_parameters() if n.endswith("head_scale")]
    assert [p.tolist() for p in scales] == [pytest.approx([0.43] * 4)] * 2
    plain, ids = build("llama", "ssmax"), tokens(1, 7)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.count_nonzero() for p in scales)
    with pytest.raises(
        UserError, match="no learnable scalar per head; these have: ssmax, relu-shen"
    ):
        add_head_scales(build("llama", "lssar"))


def test_another_exponent_gets_a_name_of_its_own():
    register("lssar-p3", get_mechanism("lssar", p=3))
    ids = tokens(1, 9)
    assert not torch.allclose(
        build("llama", "lssar-p3")(ids).logits, build("llama", "lssar")(ids).logits
    )


def test_a_scale_other_than_the_usual_one_is_applied():
    models = [
        build("gpt2", attention, sharp=1, scale_attn_by_inverse_layer_idx=True)
        for attention in ("lssar-softmax", "eager")
    ]
    ids = tokens(2, 7)
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, rtol=1e-4, atol=1e-5)


def sliding(attention: str, window: int | None = 3):
    return build("mistral", attention, sharp=1, sliding_window=window)


def test_a_sliding_window_is_the_models_own():
    """Softmax against transformers', LSSAR against a mechanism with that window; cached too."""
    register("lssar-window", get_mechanism("lssar", window=3))
    ids, mask = padded([tokens(1, n)[0] for n in (12, 7)], "left")
    place = (mask.cumsum(1) - 1).clamp(min=0)
    pairs = {"lssar-softmax": sliding("eager"), "lssar": sliding("lssar-window", None)}
    for name, expected in pairs.items():
        model = sliding(name)
        options = {"attention_mask": mask, "position_ids": place}
        got, want = model(ids, **options).logits, expected(ids, **options).logits
        torch.testing.assert_close(got[mask == 1], want[mask == 1], rtol=1e-4, atol=1e-5)
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        for cache in ("dynamic", "static"):
            written = [
                m.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
                for m in (model, expected)
            ]
            assert torch.equal(*written), (name, cache)


def test_packed_sequences_do_not_see_one_another():
    for kind, mechanism in cases(["llama", "qwen3"], ["lssar-softmax", "lssar", "relu-shen"]):
        model = build(kind, mechanism)
        sequences = [tokens(1, n) for n in (5, 1, 8)]
        ids, place = pack(sequences)
        with torch.no_grad():
            packed = model(ids, position_ids=place, use_cache=False).logits
            alone = torch.cat([model(s, use_cache=False).logits for s in sequences], dim=1)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_what_a_mechanism_cannot_do_is_refused():
    ids = tokens(2, 6)
    with pytest.raises(UserError, match=r"dropout of 0.1 on the weights; set it to 0"):
        build("gpt2", "lssar").train()(ids)
    model = build("llama", "lssar")
    with pytest.raises(UserError, match=r"a mask of shape \(2, 1, 6, 6\); give the padding mask"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=bool))
    with pytest.raises(UserError, match=r"'llama' never makes its weights; leave output_att"):
        model(ids, output_attentions=True)
    module = model.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 6), torch.randn(1, 2, 5, 6)
    seen = functools.partial(visibility, MECHANISMS["lssar"], batch_size=1, q_length=5, kv_length=5)
    gaps = seen(mask_function=lambda batch, head, query, key: (key <= query) & (key % 2 == 0))
    padded_right = seen(attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    for mask, what in (
        (gaps, "other keys than a span up to itself"),
        (seen() & (torch.ones(5, 5) > 0), "a mask that the model has combined with one of its own"),
        (seen() * (torch.ones(5, 5).tril() > 0), "a mask that the model has combined"),
        (padded_right & torch.ones(5, dtype=torch.bool), "a mask that the model has combined"),
    ):
        with pytest.raises(UserError, match=what):
            attention_forward(MECHANISMS["lssar"], module, q, k, k, mask)
    others = seen(q_length=1, mask_function=lambda batch, head, query, key: query >= 0)
    with pytest.raises(UserError, match="other keys than a span up to itself"):
        attention_forward(MECHANISMS["lssar"], module, q[:, :, :1], k, k, others)
    moved = seen().clone(), padded_right.clone()  # to another device, where it is no view
    for mask, same in zip((seen(), padded_right), moved, strict=True):
        outs = [attention_forward(MECHANISMS["lssar"], module, q, k, k, m)[0] for m in (mask, same)]
        assert torch.equal(*outs)
    for name, what in (("softcap", "soft-capped scores"), ("s_aux", "learned sinks")):
        with pytest.raises(UserError, match=what):
            attention_forward(MECHANISMS["lssar"], module, q, k, k, None, **{name: 1.0})
    with pytest.raises(UserError, match="not causal"):
        attention_forward(MECHANISMS["lssar"], module, q, k, k, None, is_causal=False)
