"""The tables of model types are what the script finds: works, or refused with a reason."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

import transformers

from lssar.errors import UserError

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/hf_support.py"), run_name="scripts.support")


def table(path: str, form: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.partition(SCRIPT["BEGIN"][form])[2].partition(SCRIPT["END"])[0].strip()


WRITTEN = {"all": table("docs/hf_support.md", "all"), "few": table("README.md", "few")}
SAID = {
    kind: row.split(" | ")[0].removeprefix("| ")
    for row in WRITTEN["all"].splitlines()[2:]
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
    "blt": "refused: attention that is not causal",
    "gemma4_assistant": "refused: a mask in which a token sees other keys",  # in silence, once
    "musicgen": "works",  # the decoder of several models, with a generate() of its own
}


def test_the_tables_have_every_type_once():
    counts = [int(row.split(" | ")[1]) for row in WRITTEN["all"].splitlines()[2:]]
    assert sorted(SAID) == sorted(SCRIPT["TYPES"]) and sum(counts) == len(SAID)
    assert {said.partition(":")[0] for said in SAID.values()} == {"works", "refused", "not tried"}
    assert f"transformers {transformers.__version__}" in WRITTEN["all"]
    assert SCRIPT["tables"]({kind: SAID[kind] for kind in SCRIPT["TYPES"]}) == WRITTEN


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_does_what_the_table_says(kind):
    assert SCRIPT["tried"](kind) == SAID[kind]
    assert SAID[kind].startswith(SAMPLE[kind])


@pytest.mark.slow
def test_every_type_does_what_the_table_says():
    assert {kind: SCRIPT["tried"](kind) for kind in SCRIPT["TYPES"]} == SAID


def test_a_type_that_does_something_else_is_an_error(monkeypatch, capsys):
    broken = {**SCRIPT["SIZES"], "llama": {"num_attention_heads": 3}}
    monkeypatch.setitem(SCRIPT["main"].__globals__, "SIZES", broken)
    assert SCRIPT["main"](["llama", "bloom"]) == 1
    found = capsys.readouterr()
    assert "llama: FAILED: " in found.err and "`bloom`" in found.out and "`llama`" not in found.out
    with pytest.raises(UserError, match="unknown model type 'lama'; did you mean 'llama'"):
        SCRIPT["main"](["lama"])
    with pytest.raises(UserError, match="--write needs every type"):
        SCRIPT["main"](["llama", "--write", "README.md"])


def test_tables_are_put_in_their_places_and_nowhere_else(tmp_path):
    file, begin, end = tmp_path / "x.md", SCRIPT["BEGIN"], SCRIPT["END"]
    file.write_text(f"a\n{begin['few']}\nold\n{end}\nb\n{begin['all']}\n{end}\nc\n")
    SCRIPT["put"]({"all": "ALL", "few": "FEW"}, file)
    parts = ("a", begin["few"], "", "FEW", "", end, "b", begin["all"], "", "ALL", "", end, "c", "")
    assert file.read_text() == "\n".join(parts)
    file.write_text("nothing")
    with pytest.raises(UserError, match=r"x\.md has no table to replace"):
        SCRIPT["put"]({"all": "ALL", "few": "FEW"}, file)
