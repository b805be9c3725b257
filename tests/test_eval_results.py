"""Results files: strict JSON, replaced whole, refused when they are something else."""

import math
from dataclasses import replace

import pytest
from eval_helpers import tiny_model, write_checkpoint

from errors import UserError
from evaluation import Variant, labels, open_checkpoints, table
from results_io import Results, finite, read_results

KEY = {"checkpoint": "a", "variant": "as trained", "length": 8}


def begin(path, **settings) -> Results:
    results = Results(path, "kind", settings, about={})
    results.checkpoints["a"] = {"run": "a"}
    return results


def test_a_row_is_on_disk_as_soon_as_it_is_added(tmp_path):
    results = begin(tmp_path / "new" / "x.json", seed=1)
    results.add(KEY | {"loss": 1.5})
    found = read_results(tmp_path / "new" / "x.json")
    assert found["rows"][0]["loss"] == 1.5
    assert begin(tmp_path / "new" / "x.json", seed=1).find(**KEY)["loss"] == 1.5
    beside = {p.name for p in (tmp_path / "new").iterdir()} - {".x.json.lock"}  # of the writer
    assert beside == {"x.json"}


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    results = begin(tmp_path / "x.json")
    results.add(KEY | {"loss": 1.5})
    before = (tmp_path / "x.json").read_bytes()
    with pytest.raises(TypeError):
        results.add(KEY | {"length": 9, "loss": object()})
    assert (tmp_path / "x.json").read_bytes() == before


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    value = {"a": [1.0, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan, "d": "nan"}}
    assert finite(value) == {"a": [1.0, None, [None, None]], "b": {"c": None, "d": "nan"}}
    results = begin(tmp_path / "x.json")
    results.add(KEY | {"loss": math.nan})
    assert "NaN" not in (tmp_path / "x.json").read_text()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"kind": "kind", "settings": {}, "checkpoints": {}, "rows": [{}]}',
        '{"kind": "kind", "settings": {}, "checkpoints": {}, "rows": [3]}',
        '{"settings": {}, "checkpoints": {}, "rows": []}',
        "[" * 100000,
    ],
)
def test_a_file_that_is_something_else_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a results file"):
        begin(path)
    assert path.read_text() == content


def test_another_kind_and_other_settings_are_refused(tmp_path):
    begin(tmp_path / "x.json", seed=1).save()
    with pytest.raises(UserError, match="seed = 1, this is 2"):
        begin(tmp_path / "x.json", seed=2)
    with pytest.raises(UserError, match="extra = None, this is 2"):
        begin(tmp_path / "x.json", seed=1, extra=2)
    with pytest.raises(UserError, match="results of 'kind', not of 'other'"):
        Results(tmp_path / "x.json", "other", {}, about={})


def test_checkpoints_get_the_shortest_names_that_tell_them_apart(tmp_path):
    def names(*checkpoints):
        return list(labels({c.identity: c.describe() for c in checkpoints}).values())

    soft = write_checkpoint(tmp_path / "soft", tiny_model())
    sharp = write_checkpoint(tmp_path / "sharp", tiny_model("lssar"))
    seed = write_checkpoint(tmp_path / "seed", tiny_model(seed=1))
    later = write_checkpoint(tmp_path / "later", tiny_model(seed=2), run="soft", step=9)
    a, b, c, d = open_checkpoints(map(str, (soft, sharp, seed, later)))
    assert names(a, b) == ["Softmax", "LSSAR p=15"]
    assert names(a, c) == ["soft", "seed"]
    assert names(a, c, d) == ["soft @ 7", "seed @ 7", "soft @ 9"]


def test_the_identity_of_a_checkpoint_is_its_content(tmp_path):
    one = write_checkpoint(tmp_path / "one", tiny_model(), run="r")
    moved = write_checkpoint(tmp_path / "moved", tiny_model(), run="r")
    other = write_checkpoint(tmp_path / "other", tiny_model(seed=1), run="r")
    ids = [open_checkpoints([str(p)])[0].identity for p in (one, moved, other)]
    assert ids[0] == ids[1] != ids[2]


def test_variants_act_only_where_they_change_something():
    trained = tiny_model("lssar", train_length=32).config
    alpha, window = Variant("a", "alpha", 0.5), Variant("w", "window", 20)
    interpolated = Variant("PI", interpolated=True)
    # Fine-tuned at 64 with positions halved: p_i grows from the mechanism's own training length.
    tuned = replace(trained, interpolation=2.0)
    assert alpha.config(tuned, 64, 32) is tuned
    assert alpha.config(tuned, 64, 33).attention == replace(tuned.attention, alpha=0.5)
    assert window.config(tuned, 64, 20) is tuned
    assert window.config(tuned, 64, 21).attention.window == 20
    assert interpolated.config(tuned, 64, 64) is tuned
    assert interpolated.config(tuned, 64, 256).interpolation == 8
    assert Variant().config(tuned, 64, 256) is tuned


def test_tables_align():
    text = table(["", "10", "200"], [["a", "1.5", "2"], ["longer", "", "-10.25"]])
    assert text.splitlines() == [
        "         10     200",
        "-------------------",
        "a       1.5       2",
        "longer       -10.25",
    ]
