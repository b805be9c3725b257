"""`python examples/convert_llama.py` at a tiny size: every number, the schema, the figure."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from evaluating.results import read_results
from support import plots

FILE = Path(__file__).parents[2] / "examples/convert_llama.py"
TINY = ["--seeds", "1", "--steps", "2", "--tuning", "2", "--tokens", "2048"]


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("convert_llama", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setattr(module, "SIZE", module.SIZE | small)
    monkeypatch.setattr(module, "BATCH", 2)
    return module


def test_every_attention_is_measured_before_and_after_and_kept(example, tmp_path, monkeypatch):
    out = tmp_path / "new" / "out.json"
    example.main([str(out), *TINY])
    results = read_results(out)
    found = {(r.variant, r.length): r.value for r in results.records}
    lengths = [128, 256, 512, 1024, 2048]
    for name in example.SWITCHES:
        assert {n for v, n in found if v == f"{name}, 0 steps"} == set(lengths)
        assert {n for v, n in found if v == f"{name}, 2 steps"} == set(lengths)
        assert {n for v, n in found if v == f"{name}, 1 steps"} == {128}
    assert len(found) == 33 and all(0 < value < 8 for value in found.values())
    switched = [found[f"{name}, 0 steps", 128] for name in example.SWITCHES]
    assert len(set(switched)) == 3  # the same weights, three attentions
    assert all(r.revision and r.command.startswith("python examples/") for r in results.records)
    assert out.with_suffix(".png").stat().st_size > 10_000
    monkeypatch.setattr(example, "measure", None)  # a finished seed is not measured again
    example.main([str(out), *TINY])
    with pytest.raises(SystemExit) as stopped:
        example.main([str(out), *TINY, "--tokens", "4096"])
    assert stopped.value.code == 2


def test_a_mechanism_has_its_colour_of_every_figure(example):
    for name, (colour, marker) in example.LOOKS.items():
        style = plots.style({"sdpa": "softmax"}.get(name, name))
        assert (colour, marker) == (style["color"], style["marker"])
