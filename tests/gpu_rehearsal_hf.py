"""Models of transformers on the stand-in device: no forward of ours waits for a GPU.

Run by tests/test_gpu_rehearsal.py. By hand:
TRITON_INTERPRET=1 python tests/stand_in.py tests/gpu_rehearsal_hf.py [-k ...]
"""

import contextlib
import sys

import pytest
import torch
from eval_helpers import tiny_model
from triton_launch import check_launches

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from tiny_models import build, pack, padded, tokens
from transformers import DynamicCache, StaticCache

import lssar
import lssar.hf
from evaluating.hf_model import LssarConfig, LssarForCausalLM

check_launches()
CUDA = "cuda"
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 20},
}


@pytest.fixture(autouse=True)
def by_the_reference():
    """Use the reference: the kernels have tests of their own, and take the interpreter seconds."""
    with lssar.backend("eager"):
        yield


@contextlib.contextmanager
def reads_forbidden():
    torch.ops.stand_in.forbid_reads(True)
    try:
        yield
    finally:
        torch.ops.stand_in.forbid_reads(False)


def same(found, expected, mask=None):
    found = found.detach().cpu()
    if mask is not None:
        found, expected = found[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


def on_both(kind, **changes):
    changes = KINDS.get(kind, {}) | changes
    return build(kind, "lssar", **changes), build(kind, "lssar", **changes).to(CUDA)


def batch(side):
    """Return two sequences and their mask; without one, transformers waits to look for packing."""
    if side is None:
        return tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    return padded([tokens(1, n)[0] for n in (9, 5)], side)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_training_step_never_waits(kind, side):
    host, model = on_both(kind)
    ids, mask = batch(side)
    on_device = ids.to(CUDA), mask.to(CUDA)
    with reads_forbidden():
        logits = model(on_device[0], attention_mask=on_device[1], use_cache=False).logits
        logits.float().square().mean().backward()
    same(logits, host(ids, attention_mask=mask).logits, mask)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_and_its_continuation_never_wait(kind, side, static):
    host, model = on_both(kind)
    ids, mask = batch(side)
    mask = torch.cat((mask.bool(), torch.ones(2, 3, dtype=torch.bool)), dim=1)
    ids = torch.cat((ids, tokens(2, 3)), dim=1)
    cache = StaticCache(model.config, max_cache_len=14) if static else DynamicCache()
    place = (mask.cumsum(1) - 1).clamp(min=0)
    ends = ((0, 9), (9, 10), (10, 12))
    parts = []
    on_device = [x.to(CUDA) for x in (ids, mask, place)]
    with torch.no_grad(), reads_forbidden():
        for a, b in ends:
            x, seen, positions = on_device
            given = {"attention_mask": seen[:, :b], "position_ids": positions[:, a:b]}
            parts.append(model(x[:, a:b], past_key_values=cache, **given).logits)
    with torch.no_grad():
        expected = host(ids, attention_mask=mask, position_ids=place).logits
    same(torch.cat(parts, dim=1), expected, mask)


def test_chunks_never_wait():
    host, model = on_both("llama4_text")
    ids, mask = batch("left")
    on_device = ids.to(CUDA), mask.to(CUDA)
    with torch.no_grad(), reads_forbidden():
        logits = model(on_device[0], attention_mask=on_device[1], use_cache=False).logits
    same(logits, host(ids, attention_mask=mask).logits, mask)


def test_packed_sequences_are_told_apart_or_refused_by_the_device():
    """Without a mask transformers itself waits, to see whether positions start again."""
    host, model = on_both("llama")
    sequences = [tokens(1, n) for n in (5, 1, 8)]
    ids, place = (x.to(CUDA) for x in pack(sequences))
    alone = torch.cat([host(s).logits for s in sequences], dim=1)
    same(model(ids, position_ids=place, use_cache=False).logits, alone)
    with pytest.raises(RuntimeError, match="packed sequences, which cannot be cached"):
        model(ids, position_ids=place)
    with reads_forbidden(), pytest.raises(RuntimeError, match="apart only without attention_mask"):
        model(ids, position_ids=place, attention_mask=torch.ones_like(ids))
    bounds = torch.tensor([0, 5, 6, 14], dtype=torch.int32, device=CUDA)
    shape = (1, 2, 14, 6)
    q, k, v = (torch.randn(shape, device=CUDA) for _ in range(3))
    layer = model.model.layers[0].self_attn
    with reads_forbidden():
        out, _ = lssar.hf.layer.attention_forward(
            lssar.MECHANISMS["lssar"], layer, q, k, v, None, cu_seq_lens_q=bounds
        )
    first = lssar.spans.bounded(bounds, 14)
    torch.testing.assert_close(out.transpose(1, 2), lssar.attend(q, k, v, first=first))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("static", [False, True])
def test_an_exported_model_never_waits(side, static):
    gpt = tiny_model("lssar")
    config = LssarConfig(**gpt.config.to_dict(), train_length=16)
    models = []
    for _ in range(2):
        model = LssarForCausalLM(config)
        model.model.gpt.load_state_dict(gpt.state_dict())
        model.tie_weights()
        models.append(model.eval())
    host, model = models[0], models[1].to(CUDA)
    ids, mask = batch(side)
    mask = torch.cat((mask.bool(), torch.ones(2, 2, dtype=torch.bool)), dim=1)
    ids = torch.cat((ids, tokens(2, 2)), dim=1)
    cache = StaticCache(model.config, max_cache_len=12) if static else DynamicCache()
    x, seen = ids.to(CUDA), mask.to(CUDA)
    parts = []
    with torch.no_grad(), reads_forbidden():
        for a, b in ((0, 9), (9, 10), (10, 11)):
            given = {"attention_mask": seen[:, :b], "past_key_values": cache}
            parts.append(model(x[:, a:b], **given).logits)
    with torch.no_grad():
        expected = host(ids, attention_mask=mask).logits
    same(torch.cat(parts, dim=1), expected, mask)


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv]))
