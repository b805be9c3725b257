"""Every causal language model of transformers works with "lssar", or says why it does not.

    LSSAR_WRITE_TABLE=1 bash scripts/test.sh --ecosystem tests/lssar/test_hf_support.py

writes what it finds to docs/hf_support.md.
"""

import os
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

import transformers
from hf_support import TYPES, WORKS, table, tried

DOCUMENT = Path(__file__).parents[2] / "docs/hf_support.md"
HEAD = """# Models of transformers that take attention "lssar"

```bash
LSSAR_WRITE_TABLE=1 bash scripts/test.sh --ecosystem tests/lssar/test_hf_support.py
```

Every causal language model of transformers, built at a tiny size with its default settings and
tried; `tests/hf_support.py` says what counts as working. Types with an encoder are tried as a
decoder alone: attention to an encoder is not causal, and is refused. The command above
writes this page.

"""
SAMPLE = {  # what a type is an example of
    "llama": WORKS,
    "bart": WORKS,  # makes a mask for an encoder that it does not have
    "qwen3_5": WORKS,  # an image part, linear layers
    "deepseek_v3": WORKS,
    "gpt_oss": "refused: learned sinks",
    "git": "refused: computes its own attention",  # chooses a class by the attention's name
    "got_ocr2": WORKS,  # an image part that computes its own
    "qwen4_exp_text": "refused: a choice of keys (indexer)",  # in silence, once
    "xlstm": "refused: computes its own attention, or has none",
    "blt": "refused: attention that is not causal",
    "gemma4_assistant": "refused: a mask in which a token sees other keys",  # in silence, once
    "musicgen": WORKS,  # the decoder of several models, with a generate() of its own
}


def test_every_type_works_or_says_why_not():
    transformers.utils.logging.set_verbosity_error()
    outcomes = {}
    failures = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hundred models have a hundred things to say
        for kind in TYPES:
            try:
                outcomes[kind] = tried(kind)
            except Exception as error:  # whatever it is, it must not occur
                failures[kind] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    assert failures == {}
    # A few need other sizes; if it is many, it is not their sizes that are wrong.
    untried = {kind: said for kind, said in outcomes.items() if said.startswith("not tried")}
    assert len(untried) <= len(TYPES) / 10, untried
    for kind, expected in SAMPLE.items():
        if kind in outcomes and kind not in untried:  # types come and go
            assert outcomes[kind].startswith(expected), (kind, outcomes[kind])
    found = HEAD + table(outcomes) + "\n"
    if os.environ.get("LSSAR_WRITE_TABLE") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    if f"transformers {transformers.__version__} " in DOCUMENT.read_text(encoding="utf-8"):
        assert DOCUMENT.read_text(encoding="utf-8") == found
