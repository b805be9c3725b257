"""The weights shown are the weights the model uses, and the numbers are what they say."""

import math

import pytest
import torch
from cases import cases
from eval_helpers import tiny_model, write_checkpoint

from attention_maps import (
    CAPTION_TEXT,
    head_statistics,
    layer_weights,
    main,
    token_names,
    visible_keys,
)
from data.tokeniser import get_tokeniser
from evaluating.results import read_results
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS


def test_weights_times_values_are_what_the_layer_computes():
    seen = {}

    def watch(module, given, out):
        seen.update(given=given, out=out)

    names = ["softmax", "ssmax", "lssar", "relu-shen", "softmax-inverse"]
    for attention, layer in cases(names, [0, 1]):
        model, tokens = tiny_model(attention), torch.randint(0, 257, (23,))
        block = model.blocks[layer].attention
        hook = block.register_forward_hook(watch)
        with torch.no_grad():
            model.hidden(tokens[None])
            _, _, v = block.queries_keys_values(*seen["given"][:2])
            hook.remove()
            weights, cosines, _ = layer_weights(model, tokens, layer)
            mixed = (weights @ v[0]).transpose(0, 1).reshape(23, -1)
            torch.testing.assert_close(block.proj(mixed), seen["out"][0], rtol=2e-4, atol=2e-4)
        assert weights.shape == cosines.shape == (2, 23, 23)
        assert cosines.abs().max() <= 1 + 1e-6
        assert torch.equal(weights, weights.tril())


def test_statistics_of_rows_that_are_known():
    length = 7
    uniform = torch.ones(length, length).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    sink = torch.zeros(length, length)
    sink[:, 0] = 1
    diagonal = -torch.eye(length)  # signed, as the inverse mechanism's are
    cosines = torch.arange(length) / length * torch.ones(3, length, 1)  # key j has j / 7
    found = head_statistics(
        torch.stack((uniform, sink, -diagonal)), cosines, visible_keys(length, None)
    )
    assert found["top_weight"] == pytest.approx([sum(1 / i for i in range(4, 8)) / 4, 1, 1])
    assert found["top_cosine"][1:] == pytest.approx([0, (3 + 4 + 5 + 6) / 4 / 7])
    found = head_statistics(
        torch.stack((uniform, sink, diagonal)), cosines, visible_keys(length, None)
    )
    rows = range(4, length + 1)
    alone = sum(i - 1 for i in rows) / sum(rows)  # of the visible, all but one
    assert found["sink"] == pytest.approx([sum(1 / i for i in rows) / 4, 1, 0])
    assert found["entropy"] == pytest.approx([sum(math.log(i) for i in rows) / 4, 0, 0])
    assert found["zeros"] == pytest.approx([0, alone, alone])


def test_a_row_that_attends_to_nothing_has_finite_numbers():
    found = head_statistics(torch.zeros(1, 6, 6), torch.ones(1, 6, 6), visible_keys(6, None))
    assert found == {
        "sink": [0],
        "entropy": [0],
        "zeros": [1],
        "top_weight": [0],
        "top_cosine": [1],
    }


def test_tokens_are_shown_as_something_visible():
    bytes_, gpt2 = get_tokeniser("bytes"), get_tokeniser("gpt2")
    assert token_names(bytes_, bytes_.encode("a b\n$").tolist()) == ["a", "␣", "b", "↵", "$"]
    assert token_names(bytes_, [0, 13, 256]) == ["<0>", "<d>", "<|endoftext|>"]
    names = token_names(gpt2, gpt2.encode(CAPTION_TEXT).tolist())
    assert names[:3] == ["Working", "␣from", "␣home"]


def test_a_figure_and_numbers_for_each_checkpoint(tmp_path, capsys):
    paths = [
        str(write_checkpoint(tmp_path / name, tiny_model(name, heads=6)))
        for name in ("softmax", "lssar")
    ]
    out = tmp_path / "maps.json"
    main([*paths, "--out", str(out), "--device", "cpu"])
    results = read_results(out)
    assert len(results.records) == 2 * 5
    for record in results.records:
        heads = record.details["heads"]
        assert (len(heads), record.details["layer"], record.length) == (6, 2, len(CAPTION_TEXT))
        assert record.value == pytest.approx(sum(heads) / 6)
    soft, sharp = (results.find(quantity="zeros", run=run) for run in results.runs)
    assert soft.value == 0
    assert sharp.details["heads"][0] > 0.2
    shown = capsys.readouterr().out
    assert "sink  entropy  zeros" in shown and f"{sharp.value:.3f}" in shown
    for label in ("Softmax", "LSSAR_p_15"):
        assert (tmp_path / f"maps-{label}.png").stat().st_size > 5000


def test_text_that_looks_like_formulas_or_has_no_glyphs_is_drawn(tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_model())
    out = tmp_path / "maps.json"
    main([str(path), "--text", "$x_1$ \\frac{ \0 日", "--layer", "1", "--out", str(out)])
    assert {r.details["layer"] for r in read_results(out).records} == {1}
    assert (tmp_path / "maps-Softmax.pdf").stat().st_size > 5000


def test_every_mechanism_has_a_name_for_the_figure():
    assert all(m.label for m in MECHANISMS.values())


def test_mistakes_are_one_clear_line(tmp_path):
    examples = [
        (["--layer", "3"], "has layers 1 to 2"),
        (["--layer", "0"], "must be at least 1"),
        (["--text", "abc"], "has 3 tokens"),
        (["--text", ""], "has 0 tokens"),
    ]
    path = write_checkpoint(tmp_path / "model", tiny_model())
    for options, message in cases(examples):
        with pytest.raises(UserError, match=message):
            main([str(path), "--out", str(tmp_path / "maps.json"), *options])
    with pytest.raises(UserError, match="is not a checkpoint"):
        main([str(tmp_path), "--out", str(tmp_path / "maps.json")])


def test_the_numbers_are_those_of_the_layer_that_was_asked_for(tmp_path):
    model = tiny_model("lssar", layers=3)
    path = write_checkpoint(tmp_path / "m", model)
    text = "the cat sat on the mat"
    tokens = torch.tensor(list(text.encode()))
    for layer in (1, 2, 3):
        out = tmp_path / f"{layer}.json"
        main([str(path), "--text", text, "--layer", str(layer), "--out", str(out), "--device=cpu"])
        with torch.no_grad():
            weights, cosines, _ = layer_weights(model, tokens, layer - 1)
        expected = head_statistics(weights, cosines, visible_keys(len(tokens), None))
        heads = read_results(out).find(quantity="entropy").details["heads"]
        assert heads == pytest.approx(expected["entropy"]), f"layer {layer}"


def test_what_lies_outside_a_local_layers_window_is_not_counted_as_zeros():
    """A layer that spreads its weight over its whole window has no zeros."""
    length, window = 9, 3
    visible = visible_keys(length, window)
    assert visible.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    weights = visible.float() / visible.sum(-1, keepdim=True)
    found = head_statistics(weights[None], torch.ones(1, length, length), visible)
    assert found["zeros"] == [0]
