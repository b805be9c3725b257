"""Layers of two kinds, and other positions than RoPE: weights, decoding, masks, variants."""

import json
import math
from dataclasses import replace

import pytest
import torch
from cases import cases
from eval_helpers import small_gpt, tiny_model, write_checkpoint
from loops import dot, softmax, weights_of_batch

from attention_maps import layer_weights
from evaluating.checkpoints import layer_inputs, model_label
from evaluating.variants import Variant
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from model import GPT, Layer, ModelConfig, preset
from modelling.cache import KVCache
from modelling.positions import Rope, rope_at, rotate
from training.checkpoint import load_weights
from training.config import load_config, parse_config
from training.estimate import dry_run, flops_per_token
from training.optimiser import parameter_groups

HYBRID = {
    "layers": 3,
    "pattern": ("local:8", "global"),
    "positions": "none",
    "local": Layer(get_mechanism("softmax"), "rope"),
}
KINDS = {
    "none": {"positions": "none"},
    "alibi": {"positions": "alibi"},
    "fox": {"positions": "fox"},
    "hybrid": HYBRID,
    "hybrid of fox": HYBRID | {"positions": "fox", "local": Layer(get_mechanism("lssar"), "alibi")},
    "shifted": {"shift": True},
    "shifted hybrid": HYBRID | {"shift": True},
    "shifted hybrid of fox": HYBRID | {"shift": True, "positions": "fox"},
    "shifted windows": {"layers": 2, "pattern": ("global", "local:5"), "shift": True},
    "three windows": {"layers": 3, "pattern": ("local:1", "local:5", "global")},
}


@pytest.fixture
def tokens():
    return torch.randint(61, (2, 45))


def attentions(config):
    return [layer.attention for layer in config.all_layers]


def places(config):
    return [layer.positions for layer in config.all_layers]


def assert_alike(got, expected):
    scale = expected.abs().amax()
    torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=2e-4)


# --- what the layers are -------------------------------------------------------------------------


def test_a_pattern_is_repeated_over_the_layers():
    config = preset("nano", "lssar", **HYBRID)
    local = Layer(get_mechanism("softmax", window=8), "rope")
    assert config.all_layers == [local, Layer(get_mechanism("lssar"), "none"), local]
    plain = preset("nano", "lssar")
    assert plain.all_layers == [Layer(get_mechanism("lssar"), "rope")] * 3


def test_a_description_reads_back_and_a_plain_one_has_no_new_key():
    known = {"layers", "heads", "width", "vocab_size", "vocab_rows", "attention", "interpolation"}
    assert set(preset("nano").to_dict()) == known
    for kind in cases(KINDS):
        config = preset("nano", "lssar", **KINDS[kind])
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layers_that_cannot_be_are_refused():
    examples = [
        ({"pattern": ["local"]}, "pattern has 'local'"),
        ({"pattern": ["local:0"]}, "'local:0'"),
        ({"pattern": ["local:" + "9" * 5000]}, "'local:999"),
        ({"pattern": []}, r"pattern = \[\]"),
        ({"pattern": ["global"] * 4}, "1 to layers = 3"),
        ({"pattern": [3]}, "pattern has 3"),
        ({"pattern": 3}, "mistyped"),
        ({"positions": "rop"}, "positions = 'rop'"),
        ({"positions": True}, "positions = True"),
        ({"local": {"attention": {"name": "softmax"}, "positions": "rope"}}, "has none"),
        ({"local": {"attention": {"name": "softmax"}}}, "mistyped"),
        ({"positions": "none", "interpolation": 2.0}, "interpolation = 2.0"),
        ({"scaling": "linear"}, "scaling = 'linear'"),
        ({"shift": 1}, "shift = 1 must be true or false"),
        ({"shift": True, "attention": {"name": "softmax", "window": 9, "sinks": 2}}, "sinks = 2"),
    ]
    for change, part in cases(examples):
        with pytest.raises(UserError, match=part):
            ModelConfig.from_dict(preset("nano").to_dict() | change)


def test_a_config_file_says_the_pattern_and_the_command_line_the_mechanism_of_one_kind(tmp_path):
    lines = '[model]\npreset = "nano"\npattern = ["local:32", "global"]\npositions = "none"\n'
    lines += '[attention]\nname = "lssar"\np = 3\n[local]\npositions = "rope"\n'
    lines += "[train]\nlength = 128\nbatch_tokens = 2048\n[eval]\ntokens = 128\n"
    (tmp_path / "hybrid.toml").write_text(lines)
    config = load_config(tmp_path / "hybrid.toml")
    lssar = get_mechanism("lssar", p=3, train_length=128)
    assert config.model_config().local == Layer(lssar, "rope")
    config = load_config(tmp_path / "hybrid.toml", ["--local.name=softmax"])
    model = config.model_config()
    softmax_32 = get_mechanism("softmax", train_length=128, window=32)
    assert model.all_layers[::2] == [Layer(softmax_32, "rope")] * 2
    assert model.all_layers[1] == Layer(lssar, "none")
    assert parse_config(config.to_toml(), "saved") == config
    shown = "\n".join(dry_run(config, 1, "cpu"))
    assert "layers 1, 3: softmax, positions rope, window 32; layer 2: lssar (p = 3)" in shown
    other = load_config(tmp_path / "hybrid.toml", ['--model.pattern=["global", "local:9"]'])
    assert [m.window for m in attentions(other.model_config())] == [None, 9, None]
    assert other.differences(config) != []
    with pytest.raises(UserError, match=r"model.pattern = 'local:9': is of type str, must be list"):
        load_config(tmp_path / "hybrid.toml", ["--model.pattern=local:9"])
    with pytest.raises(UserError, match=r"'softmax' does not use p = 3"):
        load_config(tmp_path / "hybrid.toml", ["--local.name=softmax", "--local.p=3"])


def test_a_window_costs_what_it_shows():
    length, config = 100, preset("nano", "softmax", **HYBRID)
    plain = preset("nano")
    seen = sum(sum(min(i + 0.5, 8) for i in range(length)) for _ in range(2)) / length
    saved = 12 * 128 * (2 * length / 2 - seen)  # keys per token in two of three layers
    found = flops_per_token(GPT(plain), length) - flops_per_token(GPT(config), length)
    assert found == pytest.approx(saved, rel=1e-2)


# --- what they compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decode_equals_prefill(kind, tokens):
    names = ["lssar", "softmax", "stick-breaking", "cos-ssmax"]
    for steps, name in cases([(1,) * 45, (7, 1, 13, 24), (45,)], names):
        model, cache = small_gpt(name, **KINDS[kind]), KVCache(45)
        with torch.no_grad():
            prefill = model(tokens)
            decoded = torch.cat([model.hidden(part, cache) for part in tokens.split(steps, 1)], 1)
        assert_alike(model.logits(decoded), prefill)
        kept = [layer[0].shape[2] for layer in cache._layers.values()]
        windows = [m.window for m in attentions(model.config)]
        assert kept == [45 if window is None else window - 1 for window in windows]


def test_every_kind_learns_and_its_gates_too(tokens):
    for kind in cases(KINDS):
        model = small_gpt("softmax", **KINDS[kind])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens, tokens.roll(-1, 1)).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        gates = [p for n, p in model.named_parameters() if "forget" in n]
        assert len(gates) == 2 * sum(place == "fox" for place in places(model.config))
        assert all(p.grad.any() for p in gates)
        _, plain = parameter_groups(model, 0.1)
        assert {id(p) for p in gates if p.dim() == 1} <= {id(p) for p in plain["params"]}


def test_alibi_and_fox_have_the_weights_of_the_loop_reference(tokens):
    for name, kind in cases(["lssar", "softmax", "stick-breaking"], ["alibi", "fox"]):
        model = small_gpt(name, positions=kind).double()
        attention, x, rope, _ = layer_inputs(model, tokens[:1], 1)
        q, k, _ = attention.queries_keys_values(x, rope)
        if kind == "alibi":
            decay = [[[-(2.0 ** (-8 * h / 2))] * 45 for h in (1, 2)]]
        else:
            w, b = attention.forget.weight.tolist(), attention.forget.bias.tolist()
            gate = [[dot(w[h], row) + b[h] for row in x[0].tolist()] for h in (0, 1)]
            decay = [[[-math.log1p(math.exp(-z)) for z in head] for head in gate]]
        expected = weights_of_batch(name, q, k, decay=torch.tensor(decay, dtype=torch.float64))
        got, _, _ = layer_weights(model, tokens[0], 1)
        torch.testing.assert_close(got, expected[0], rtol=1e-9, atol=1e-12)


def test_shifted_keys_have_the_weights_of_the_loop_reference_on_the_keys_before(tokens):
    for name in cases(["lssar", "softmax", "cos-softmax"]):
        model = small_gpt(name, shift=True, positions="none").double()
        attention, x, rope, _ = layer_inputs(model, tokens[:1], 1)
        q, k, _ = attention.queries_keys_values(x, rope)
        before = k.clone()
        for place in range(1, 45):
            before[:, :, place] = k[:, :, place - 1]
        got, _, _ = layer_weights(model, tokens[0], 1)
        expected = weights_of_batch(name, q, before)[0]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(got, weights_of_batch(name, q, k)[0])


def test_shifted_keys_show_nothing_of_later_tokens_and_decode_through_a_window(tokens):
    other = tokens.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 61
    parts = tokens.split((7, 1, 13, 24), dim=1)
    for kind in cases(["shifted", "shifted hybrid", "shifted hybrid of fox"]):
        model, cache = small_gpt("lssar", **KINDS[kind]), KVCache(45)
        with torch.no_grad():
            assert_alike(model(other)[:, :20], model(tokens)[:, :20])
            model.configure(attention=get_mechanism("lssar", window=9))
            seen = model(tokens)
            decoded = torch.cat([model.hidden(part, cache) for part in parts], 1)
        assert_alike(model.logits(decoded), seen)


def test_without_positions_the_order_of_earlier_tokens_does_not_matter(tokens):
    model, shuffled = small_gpt("lssar", layers=1, positions="none"), tokens.clone()
    shuffled[:, :30] = shuffled[:, torch.randperm(30)]
    with torch.no_grad():
        assert_alike(model(shuffled)[:, 30:], model(tokens)[:, 30:])


def test_documents_in_one_row_are_as_they_are_alone():
    for kind in cases(KINDS):
        model = small_gpt("lssar", documents=True, **KINDS[kind])
        pieces = [torch.randint(0, 60, (1, n)) for n in (7, 1, 30)]
        pieces = [torch.cat((torch.full((1, 1), 60), piece), dim=1) for piece in pieces]
        packed, cache = torch.cat(pieces, dim=1), KVCache(41)
        with torch.no_grad():
            together = model(packed)
            assert_alike(torch.cat([model(piece) for piece in pieces], dim=1), together)
            parts = [model.hidden(part, cache) for part in packed.split((5, 1, 3, 20, 12), dim=1)]
            assert_alike(model.logits(torch.cat(parts, dim=1)), together)


def test_a_padded_batch_decodes_each_sequence_as_alone():
    """Padding to the right of the prompts ends up between their tokens."""
    for kind in cases(KINDS):
        model = small_gpt("lssar", **KINDS[kind])
        rows = [torch.randint(61, (n,)) for n in (9, 4, 1)]
        more = torch.randint(61, (3, 12))
        prompt = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(9) < torch.tensor([[len(row)] for row in rows])
        cache = KVCache(21)
        with torch.no_grad():
            cache.mask = mask
            model.hidden(prompt, cache)
            for step in range(12):
                cache.mask = torch.cat((cache.mask, torch.ones(3, 1, dtype=bool)), 1)
                got = model.logits(model.hidden(more[:, step : step + 1], cache))[:, 0]
            for row, sequence in enumerate(rows):
                expected = model(torch.cat((sequence, more[row]))[None])[0, -1]
                assert_alike(got[row], expected)


def test_compiled_equals_eager(tokens):
    torch.compiler.reset()
    model = small_gpt("lssar", **KINDS["shifted hybrid of fox"])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for length in (45, 30):
            assert_alike(compiled(tokens[:, :length]), model(tokens[:, :length]))


# --- the same weights under other positions ------------------------------------------------------


def test_ntk_and_yarn_turn_each_pair_by_its_band():
    d, stretch, train_length, place = 32, 4.0, 128, 300

    def angle(scaling, i):
        cos, sin = rope_at(torch.tensor([place]), d, stretch, scaling, train_length)
        return cos.flatten()[i].item(), sin.flatten()[i].item()

    for i in range(d // 2):
        base = 10000 * stretch ** (d / (d - 2))
        turn = place * base ** (-2 * i / d)
        assert angle("ntk", i) == pytest.approx((math.cos(turn), math.sin(turn)), abs=1e-5)
        speed = 10000 ** (-2 * i / d)
        wavelength = 2 * math.pi / speed
        kept = min(max((train_length / wavelength - 1) / 31, 0), 1)
        turn = place * ((1 - kept) * speed / stretch + kept * speed)
        size = 0.1 * math.log(stretch) + 1
        expected = (size * math.cos(turn), size * math.sin(turn))
        assert angle("yarn", i) == pytest.approx(expected, abs=1e-5)
    slowest = 10000 ** (-(d - 2) / d)  # NTK turns it as position interpolation does
    assert angle("ntk", d // 2 - 1)[1] == pytest.approx(math.sin(place / stretch * slowest))
    for scaling in ("ntk", "yarn"):
        for plain, same in zip(
            rope_at(torch.arange(9), d, 1.0),
            rope_at(torch.arange(9), d, 1.0, scaling, train_length),
            strict=True,
        ):
            torch.testing.assert_close(plain, same)


def test_sinks_stand_right_before_the_window(tokens):
    """StreamingLLM by hand: the kept keys, turned by their places in the cache."""
    window, sinks = 7, 3
    for name in cases(["softmax", "ssmax"]):
        mechanism = get_mechanism(name, window=window, sinks=sinks)
        model = small_gpt(name, layers=1).double()
        attention, x, _, _ = layer_inputs(model, tokens[:1], 0)
        still = Rope(*rope_at(torch.zeros(45), 20, 1.0))
        q, k, v = attention.queries_keys_values(x, still)  # not turned yet
        model.configure(attention=mechanism)
        with torch.no_grad():
            got = attention(x, model.rope(torch.arange(45)), None)
        rows = []
        for i in range(45):
            kept = [j for j in range(i + 1) if j < sinks or j > i - window]
            cos, sin = rope_at(torch.arange(len(kept)), 20, 1.0)
            keys = rotate(k[0].transpose(0, 1)[kept].unsqueeze(1), cos, sin).squeeze(1)
            query = rotate(q[0, :, i][None, None], cos[-1:], sin[-1:])[0, 0]
            heads = []
            for h in range(2):
                scale = 0.43 * math.log(len(kept)) if name == "ssmax" else 1.0
                scores = [scale * dot(query[h].tolist(), key.tolist()) for key in keys[:, h]]
                weights = torch.tensor(softmax([s / math.sqrt(20) for s in scores]))
                heads.append(weights.double() @ v[0, h, kept])
            rows.append(torch.cat(heads))
        expected = attention.proj(torch.stack(rows))
        torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-4)
        cache = KVCache(45)
        with torch.no_grad():
            prefill = model(tokens)
            decoded = torch.cat([model.hidden(t, cache) for t in tokens.split(4, dim=1)], 1)
        assert_alike(model.logits(decoded), prefill)


def test_variants_of_layers_of_two_kinds():
    hybrid = preset("nano", "lssar", **(HYBRID | {"local": Layer(get_mechanism("lssar"), "rope")}))
    narrow = Variant("w", "window", 20).config(hybrid, 16, 64)
    assert [m.window for m in attentions(narrow)] == [8, 20, 8]
    narrower = Variant("w", "window", 4).config(hybrid, 16, 64)
    assert [m.window for m in attentions(narrower)] == [4, 4, 4]
    sharper = Variant("p", "p", 3.0).config(hybrid, 16, 64)
    assert [m.p for m in attentions(sharper)] == [3, 3, 3]
    kept = Variant("s", "window", 20, sinks=4)
    assert [m.sinks for m in attentions(kept.config(hybrid, 16, 64))] == [0, 4, 0]
    assert kept.needs(hybrid) is None
    assert "q.k" in kept.needs(preset("nano", "lssar"))
    windowed = preset("nano", get_mechanism("lssar", window=32))
    assert "q.k" in kept.needs(windowed), "its window does not make its cosines another's"
    assert "shift" in kept.needs(replace(hybrid, shift=True))
    assert "document" in kept.needs(preset("nano", documents=True))
    assert "cosine" in Variant("YaRN", "yarn").needs(preset("nano", "lssar"))
    assert "RoPE" in Variant("PI", "pi").needs(hybrid)
    assert "re-weights" in Variant("p", "p", 3).needs(preset("nano", "ssmax"))
    yarn = Variant("YaRN", "yarn").config(preset("nano"), 16, 64)
    assert (yarn.interpolation, yarn.scaling) == (4.0, "yarn")
    assert model_label(hybrid) == "LSSAR p=15, NoPE + local:8"
    assert model_label(preset("nano", "softmax", positions="fox")) == "Softmax, FoX"
    softmax_local = preset("nano", "lssar", **HYBRID)
    assert model_label(softmax_local) == "LSSAR p=15, NoPE + local:8 Softmax"


def test_rope_can_be_removed_after_training_but_gates_cannot_be_added(tmp_path, tokens):
    trained = tiny_model("softmax")
    path = write_checkpoint(tmp_path / "run", trained)
    without = tiny_model("softmax", seed=1, positions="none")
    load_weights(without, str(path))
    with torch.no_grad():
        trained.configure(positions="none")
        torch.testing.assert_close(without(tokens), trained(tokens))
    with pytest.raises(UserError, match="another architecture"):
        load_weights(tiny_model("softmax", positions="fox"), str(path))
    with pytest.raises(UserError, match=r"positions 'none' lacks the parameters of .* 'fox'"):
        trained.configure(positions="fox")


def test_a_backend_that_cannot_let_scores_fall_refuses_in_one_line(tokens):
    model = small_gpt("softmax", positions="alibi").use_backend("sdpa")
    with pytest.raises(UserError, match=r"'sdpa' cannot take this call: its scores do not decay"):
        model(tokens)
