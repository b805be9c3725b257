"""The README's table of model types is what the script finds: works, or refused with a reason."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

import transformers

from lssar.errors import UserError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(ROOT / "scripts/hf_support.py"), run_name="scripts.support")
TABLE = README.partition(SCRIPT["BEGIN"])[2].partition(SCRIPT["END"])[0].strip()
SAID = {
    kind: row.split(" | ")[0].removeprefix("| ")
    for row in TABLE.splitlines()[2:]
    for kind in re.findall("`(.+?)`", row)
}
SAMPLE = {  # what a type is an example of
    "llama": "works",
    "bart": "works",  # makes a mask for an encoder that it does not have
    "qwen3_5": "works",  # an image part, linear layers
    "deepseek_v3": "works",
    "gpt_oss": "refused: learned sinks",
    "git": "refused: computes its own attention",  # chooses a class by the attention's name
    "got_ocr2": "works",  # an image part that computes its own
    "qwen4_exp_text": "refused: a mask that the model has combined",  # in silence, once
    "xlstm": "refused: computes its own attention, or has none",
}


def test_the_table_has_every_type_once():
    counts = [int(row.split(" | ")[1]) for row in TABLE.splitlines()[2:]]
    assert sorted(SAID) == sorted(SCRIPT["TYPES"]) and sum(counts) == len(SAID)
    kinds = {said.partition(":")[0] for said in SAID.values()}
    assert kinds == {"works", "refused", "not tried"}
    assert f"transformers {transformers.__version__}" in TABLE


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_does_what_the_table_says(kind):
    assert SCRIPT["tried"](kind) == SAID[kind]
    assert SAID[kind].startswith(SAMPLE[kind])


@pytest.mark.slow
def test_every_type_does_what_the_table_says():
    assert SCRIPT["table"]({kind: SCRIPT["tried"](kind) for kind in SCRIPT["TYPES"]}) == TABLE


def test_a_type_that_does_something_else_is_an_error(monkeypatch, capsys):
    broken = {**SCRIPT["SIZES"], "llama": {"num_attention_heads": 3}}
    monkeypatch.setitem(SCRIPT["main"].__globals__, "SIZES", broken)
    assert SCRIPT["main"](["llama", "bloom"]) == 1
    found = capsys.readouterr()
    assert "llama: FAILED: " in found.err and "`bloom`" in found.out and "`llama`" not in found.out
    with pytest.raises(UserError, match="unknown model type 'lama'; did you mean 'llama'"):
        SCRIPT["main"](["lama"])
