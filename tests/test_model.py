"""model.py: sizes, positions, causality, decoding, optimiser groups, configuration."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import REPRESENTATIVE, cases
from eval_helpers import small_gpt
from torch.utils.flop_counter import FlopCounterMode

from attention import attend, lssa, lssar
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS, get_mechanism
from model import GPT, PRESETS, ModelConfig, preset
from modelling.cache import KVCache
from modelling.positions import rope_at, rotate
from training.optimiser import parameter_groups

NAMES = tuple(MECHANISMS)


@pytest.fixture
def tokens():
    return torch.randint(61, (2, 45))


# --- sizes ---------------------------------------------------------------------------------------


def test_parameter_counts_are_those_of_the_paper():
    counts = [
        ("45m", 44_646_912, 44_670_976),
        ("124m", 123_653_376, 123_689_472),
        ("355m", 353_774_592, 353_822_720),
    ]
    for name, unpadded, padded in cases(counts):
        with torch.device("meta"):
            assert GPT(preset(name)).parameter_count() == padded
            assert GPT(preset(name, vocab_rows=50257)).parameter_count() == unpadded
            config = preset(name)
            extra = GPT(preset(name, "ssmax")).parameter_count() - padded
        assert extra == config.layers * config.heads
        assert config.head_dim == 64
        assert (config.vocab_size, config.vocab_rows) == (50257, 50304)


def test_initialisation_is_gpt2s():
    model = GPT(preset("45m", layers=3, vocab_size=5000, vocab_rows=5000))
    for name, parameter in model.named_parameters():
        residual = name.endswith(("proj.weight", "mlp_out.weight"))
        if parameter.dim() >= 2:
            expected = 0.02 / math.sqrt(6) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.01), name
            assert abs(parameter.mean().item()) < 2e-4, name
        else:
            assert (parameter == (1 if "norm" in name and "weight" in name else 0)).all(), name


def test_learnable_scales_start_at_the_papers_value_and_learn(tokens):
    for name, init in cases([("ssmax", 0.43), ("relu-shen", 1.0)]):
        model = small_gpt(name)
        scales = [p for n, p in model.named_parameters() if "scale" in n]
        assert len(scales) == 2
        assert all(p.shape == (2,) and torch.allclose(p, torch.tensor(init)) for p in scales)
        model(tokens, tokens.roll(-1, 1)).backward()
        assert all((p.grad != 0).all() for p in scales)


def test_weight_decay_is_on_matrices_only():
    for name in cases(["softmax", "ssmax", "relu-shen"]):
        model = small_gpt(name)
        decayed, plain = parameter_groups(model, 0.1)
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
        assert all(p.dim() >= 2 for p in decayed["params"])
        assert all(p.dim() < 2 for p in plain["params"])
        together = [*decayed["params"], *plain["params"]]
        assert {id(p) for p in together} == {id(p) for p in model.parameters()}
        assert len(together) == len(set(map(id, together)))
        torch.optim.AdamW(parameter_groups(model, 0.1))


# --- positions -----------------------------------------------------------------------------------


def test_rotated_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 64).unbind(0)

    def score(i, j, interpolation=1.0):
        at = [rope_at(torch.tensor([m]), 64, interpolation) for m in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    for distance in (0, 1, 17, 300):
        for start in (0, 5, 1000, 16000):
            torch.testing.assert_close(score(start + distance, start), score(distance, 0))
            torch.testing.assert_close(
                score(4 * (start + distance), 4 * start, 4.0), score(distance, 0)
            )
    assert (score(17, 0) - score(18, 0)).abs() > 1e-3


def test_rope_is_accurate_at_16k():
    """Against scalar float64 rotations, dimension 2i paired with 2i + 1."""
    x = torch.randn(1, 3, 1, 1, 64)
    tables = rope_at(torch.arange(16382, 16385), 64, 1.0)
    assert tables[0].shape == (3, 1, 1, 32)
    for row in range(3):
        got = rotate(x, *tables)[0, row, 0, 0]
        for i in range(32):
            angle = (16382 + row) * 10000.0 ** (-2 * i / 64)
            pair = complex(*x[0, row, 0, 0, 2 * i : 2 * i + 2].tolist())
            turned = pair * complex(math.cos(angle), math.sin(angle))
            assert got[2 * i].item() == pytest.approx(turned.real, abs=1e-6)
            assert got[2 * i + 1].item() == pytest.approx(turned.imag, abs=1e-6)


def test_position_interpolation_divides_the_positions():
    stretched = rope_at(torch.arange(9), 20, 4.0)
    plain = rope_at(torch.arange(3), 20, 1.0)
    for long, short in zip(stretched, plain, strict=True):
        torch.testing.assert_close(long[::4], short)


def test_interpolation_changes_the_positions_and_not_the_row_count(tokens):
    model = small_gpt("ssmax")
    before = model(tokens)
    after = model.configure(interpolation=2.0)(tokens)
    assert model.config.interpolation == 2.0
    torch.testing.assert_close(before[:, 0], after[:, 0])
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


# --- the forward pass ----------------------------------------------------------------------------


def test_a_later_token_never_changes_an_earlier_logit(tokens):
    for name in cases(REPRESENTATIVE):
        model = small_gpt(name)
        changed = tokens.clone()
        changed[:, 20:] = torch.randint(61, (2, 25))
        with torch.no_grad():
            before, after = model(tokens), model(changed)
        scale = before.abs().amax()
        torch.testing.assert_close(before[:, :20] / scale, after[:, :20] / scale, rtol=0, atol=1e-5)
        assert not torch.equal(before[:, 20:], after[:, 20:])


def test_decode_equals_prefill(tokens):
    for name, steps in cases(REPRESENTATIVE, [(1,) * 45, (20, *(1,) * 25), (7, 1, 13, 24), (45,)]):
        model = small_gpt(name)
        cache = KVCache(50)
        with torch.no_grad():
            prefill = model(tokens)
            parts = [model.hidden(part, cache) for part in tokens.split(steps, dim=1)]
            decoded = model.logits(torch.cat(parts, 1))
        assert cache.length == 45
        scale = prefill.abs().amax()
        torch.testing.assert_close(decoded / scale, prefill / scale, rtol=0, atol=2e-4)


def test_decode_equals_prefill_with_adaptive_p_window_and_interpolation(tokens):
    for settings in cases([{"alpha": 0.5, "train_length": 20}, {"window": 6}, {"p": 3}]):
        model = small_gpt(get_mechanism("lssar", **settings), interpolation=2.0)
        with torch.no_grad():
            prefill, cache = model(tokens), KVCache(45)
            decoded = torch.cat([model.hidden(t, cache) for t in tokens.split(4, dim=1)], 1)
            decoded = model.logits(decoded)
        scale = prefill.abs().amax()
        torch.testing.assert_close(decoded / scale, prefill / scale, rtol=0, atol=2e-4)


def test_a_full_cache_says_so(tokens):
    model, cache = small_gpt(), KVCache(10)
    model.hidden(tokens[:, :10], cache)
    with pytest.raises(ValueError, match=r"10 tokens cannot hold 11"):
        model.hidden(tokens[:, :1], cache)


def test_the_loss_is_the_cross_entropy_of_the_logits_with_all_gradients(tokens):
    model, targets = small_gpt("softplus-l1"), tokens.roll(-1, 1)
    targets[0, :5] = -100
    loss = model(tokens, targets)
    logits = model(tokens)
    assert logits.shape == (2, 45, 61)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    losses = model.token_losses(tokens, targets)
    torch.testing.assert_close(losses.sum() / (targets != -100).sum(), loss)
    assert not losses.requires_grad


def test_every_mechanism_trains_under_bf16_autocast(tokens):
    for name in cases(NAMES):
        model = GPT(preset("nano", name, layers=1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_compiled_equals_eager_at_two_lengths(tokens):
    for name, backend in cases([("ssmax", "eager"), ("gelu-l1", "eager"), ("lssar", "aot_eager")]):
        torch.compiler.reset()
        model = GPT(preset("nano", name, layers=1))
        compiled = torch.compile(model, backend=backend)
        for length in cases([45, 30]):
            x = tokens[:, :length]
            y = x.roll(-1, 1)
            model.zero_grad()
            model(x, y).backward()
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            loss = compiled(x, y)
            loss.backward()
            torch.testing.assert_close(loss, model(x, y))
            for parameter, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5)


# --- configuration -------------------------------------------------------------------------------


def test_model_config_round_trips_through_json():
    for name in cases(NAMES):
        overrides = {"train_length": 77, "window": 9}
        if MECHANISMS[name].sharpened:
            overrides |= {"p": 3, "alpha": 0.2, "numerics": "naive"}
        mechanism = get_mechanism(name, **overrides)
        for config in (preset("124m", name), preset("nano", mechanism, interpolation=4.0)):
            assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_wrong_model_config_is_refused():
    examples = [
        ({"layres": 3}, "'layres'"),
        ({"layers": None}, "layers = None"),
        ({"layers": 0}, "layers = 0"),
        ({"heads": 5}, "heads = 5"),
        ({"width": 33}, "width = 33"),
        ({"vocab_rows": 256}, "vocab_rows = 256"),
        ({"interpolation": 0.0}, "interpolation = 0.0"),
        ({"interpolation": math.nan}, "interpolation = nan"),
        ({"interpolation": math.inf}, "interpolation = inf"),
        ({"attention": {"name": "lsar"}}, "'lssar'"),
        ({"attention": {"name": "lssar", "beta": 1}}, "'beta'"),
        ({"attention": {}}, "name"),
        ({"attention": "lssar"}, "type"),
    ]
    for change, part in cases(examples):
        with pytest.raises(UserError, match=part):
            ModelConfig.from_dict(preset("nano").to_dict() | change)


def test_a_model_config_needs_every_key():
    for key in ("layers", "width", "attention", "vocab_size"):
        values = preset("nano").to_dict()
        del values[key]
        with pytest.raises(UserError, match=key):
            ModelConfig.from_dict(values)


def test_presets_are_named_and_typos_answered():
    assert set(PRESETS) == {"nano", "mid", "45m", "124m", "355m"}
    with pytest.raises(UserError, match=r"'124M'.*did you mean '124m'"):
        preset("124M")


def test_configure_swaps_the_mechanism_but_not_the_parameters(tokens):
    model = small_gpt("lssa")
    weights = [p.clone() for p in model.parameters()]
    sharpened = model.configure(attention=get_mechanism("lssar", p=3))(tokens)
    reference = small_gpt("lssar")
    reference.load_state_dict(model.state_dict())
    reference.configure(attention=get_mechanism("lssar", p=3))
    torch.testing.assert_close(sharpened, reference(tokens))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    with pytest.raises(UserError, match=r"'lssar'.*'ssmax'"):
        model.configure(attention=get_mechanism("ssmax"))


def test_a_model_of_documents_gives_each_what_it_gives_alone_cached_or_not():
    config = replace(preset("nano", "lssar"), documents=True)
    torch.manual_seed(0)
    model = GPT(config).eval()
    pieces = [torch.randint(0, 256, (1, n)) for n in (7, 1, 30)]
    pieces = [torch.cat((torch.full((1, 1), config.end_of_text), p), dim=1) for p in pieces]
    packed = torch.cat(pieces, dim=1)
    with torch.no_grad():
        together = model(packed)
        alone = torch.cat([model(piece) for piece in pieces], dim=1)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=5e-5)
        plain = GPT(preset("nano", "lssar")).eval()
        plain.load_state_dict(model.state_dict())
        assert not torch.allclose(plain(packed), together, atol=1e-2)
        cache, parts = KVCache(packed.shape[1]), []
        for part in packed.split((5, 1, 3, 20, 12), dim=1):
            parts.append(model.logits(model.hidden(part, cache)))
    torch.testing.assert_close(torch.cat(parts, dim=1), together, rtol=1e-4, atol=5e-5)


def test_a_description_names_documents_only_where_they_are_masked():
    masked = replace(preset("nano"), documents=True)
    assert "documents" not in preset("nano").to_dict()
    assert ModelConfig.from_dict(masked.to_dict()) == masked


# --- the paper on one screen ---------------------------------------------------------------------


def test_lssa_and_lssar_as_the_paper_writes_them_are_those_of_the_library():
    q, k, v = torch.randn(3, 2, 3, 37, 20, dtype=torch.float64)
    torch.testing.assert_close(lssa(q, k, v), attend(q, k, v, "lssa"), rtol=1e-10, atol=1e-12)
    for p in (1, 3, 15):
        library = attend(q, k, v, get_mechanism("lssar", p=p))
        torch.testing.assert_close(lssar(q, k, v, p), library, rtol=1e-9, atol=1e-12)


def test_the_weights_per_token_are_those_that_pytorch_counts():
    for changes in ({}, {"positions": "fox"}, {"attention": "ssmax"}):
        model = GPT(preset("nano", **changes))
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 8, dtype=torch.long))
        counts = counter.get_flop_counts()["Global"]
        products = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
        assert products == 2 * 8 * model.weights_per_token(), changes
