"""Streamed text is the text: no character is cut, and a seed makes it repeatable."""

import pytest
import torch
from cases import cases
from eval_helpers import tiny_model, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokeniser import get_tokeniser
from generate import main, text_pieces
from lssar.errors import UserError

BYTES, GPT2 = get_tokeniser("bytes"), get_tokeniser("gpt2")


def test_characters_of_several_tokens_arrive_whole():
    for tokeniser in cases([BYTES, GPT2]):
        text = "héllo 日本語 🙂🙂 naïve – 𝔘𝔫𝔦 end"
        pieces = list(text_pieces(tokeniser, tokeniser.encode(text).tolist()))
        assert "".join(pieces) == text
        assert len(pieces) > 10
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=40), st.text(max_size=12))
def test_pieces_of_any_tokens_join_to_their_decoding(ids, text):
    tokens = ids + BYTES.encode(text).tolist() + ids
    assert "".join(text_pieces(BYTES, tokens)) == BYTES.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50300), max_size=25))
def test_pieces_of_any_bpe_tokens_join_to_their_decoding(tokens):
    assert "".join(text_pieces(GPT2, tokens)) == GPT2.decode(tokens)


def test_plain_text_is_not_held_back():
    given_so_far = []

    def watched(tokens):
        for token in tokens:
            given_so_far.append(token)
            yield token

    for piece in text_pieces(BYTES, watched(BYTES.encode("plain").tolist())):
        assert piece == chr(given_so_far[-1])


@pytest.fixture
def checkpoint(tmp_path):
    return str(write_checkpoint(tmp_path / "model", tiny_model(), tokeniser="bytes"))


def written(capsys, *arguments: str) -> str:
    main([*arguments, "--device", "cpu"])
    return capsys.readouterr().out


def test_the_prompt_is_continued_and_the_seed_decides_how(checkpoint, capsys):
    one, same, other = (
        written(capsys, checkpoint, "--prompt", "def ", "--tokens", "40", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert one.startswith("def ")
    assert one == same != other


def test_greedy_text_is_the_models_own(checkpoint, capsys):
    tokens = torch.tensor([[BYTES.eot, *b"ab"]])
    expected = tiny_model().generate(tokens, 30, temperature=0, stop=(BYTES.eot,))[0, 1:].tolist()
    text = written(capsys, checkpoint, "--prompt", "ab", "--tokens", "30", "--greedy")
    assert text == BYTES.decode(t for t in expected if t != BYTES.eot) + "\n"


def test_text_ends_with_the_document(tmp_path, capsys):
    model = tiny_model()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.copy_(model.embedding.weight[BYTES.eot] * 100)
    path = write_checkpoint(tmp_path / "model", model)
    assert written(capsys, str(path), "--prompt", "x", "--greedy") == "x\n"


def test_no_prompt_begins_a_document(checkpoint, capsys):
    assert written(capsys, checkpoint, "--tokens", "5").endswith("\n")


def test_mistakes_are_one_clear_line(checkpoint):
    examples = [
        (["--tokens", "0"], "--tokens: '0' must be at least 1"),
        (["--temperature", "0"], "--temperature: '0' must be above 0"),
        (["--top-k", "0"], "--top-k: '0' must be at least 1"),
        (["--top-p", "1.5"], "--top-p: '1.5' must be at most 1"),
        (["--seed", "x"], "--seed: 'x' is not a whole number"),
    ]
    for options, message in cases(examples):
        with pytest.raises(UserError, match=message):
            main([checkpoint, *options])


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        main([str(tmp_path / "nothing")])


def test_the_smallest_settings_are_greedy_and_the_largest_are_none(checkpoint, capsys):
    """1e-300 is zero in float32: a division by it, or a sum compared with it, was a traceback."""
    for option in cases(["--temperature", "--top-p", "--top-k"]):
        given = (checkpoint, "--prompt", "ab", "--tokens", "20")
        least, most = ("1", "2147483647") if option == "--top-k" else ("1e-300", "1")
        assert written(capsys, *given, option, least) == written(capsys, *given, "--greedy")
        if option != "--temperature":
            assert written(capsys, *given, option, most) == written(capsys, *given)


@pytest.mark.parametrize("more", [[], ["--greedy"]])
def test_logits_that_are_not_finite_are_one_clear_line(tmp_path, more):
    model = tiny_model()
    with torch.no_grad():
        model.norm.weight.fill_(3e38)  # finite weights whose logits are not
    path = write_checkpoint(tmp_path / "model", model, tokeniser="bytes")
    with pytest.raises(UserError, match="logits are not finite"):
        main([str(path), "--device", "cpu", *more])
