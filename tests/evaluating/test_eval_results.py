"""Results files: strict JSON, replaced whole, refused when they are something else."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from cases import cases
from eval_helpers import tiny_model, write_checkpoint

from evaluating.checkpoints import labels, open_checkpoints
from evaluating.protocol import progress, say_left_out
from evaluating.results import Record, Results, continue_results, read_results
from evaluating.variants import Variant
from lssar.errors import UserError
from support import command
from support.files import finite
from support.text import short_number, table

LOSS = Record("loss", "a", 1.5, length=8)


def begin(path, **settings) -> Results:
    results = continue_results(path, "kind", settings, about={})
    results.made_with = lambda run: {"threads": 3}
    results.runs["a"] = {"run": "name of a", "seed": 4}
    return results


def test_a_number_is_on_disk_as_soon_as_it_is_added(tmp_path):
    results = begin(tmp_path / "new" / "x.json", seed=1)
    results.add(LOSS)
    assert read_results(tmp_path / "new" / "x.json").records[0].value == 1.5
    assert begin(tmp_path / "new" / "x.json", seed=1).find(quantity="loss", length=8).value == 1.5
    beside = {p.name for p in (tmp_path / "new").iterdir()} - {".x.json.lock"}  # of the writer
    assert beside == {"x.json"}


def test_a_record_says_what_was_measured_by_which_command_at_which_revision(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(command.ROOT / "physics/discover.py"), "run x", "--p=3"])
    begin(tmp_path / "x.json").add(
        replace(LOSS, error=0.25, tokens=640, variant="p=3", task="t", details={"parts": [1, 2]})
    )
    (found,) = read_results(tmp_path / "x.json").records
    assert (found.quantity, found.value, found.error, found.tokens) == ("loss", 1.5, 0.25, 640)
    assert (found.variant, found.task, found.length) == ("p=3", "t", 8)
    assert found.details == {"parts": [1, 2], "threads": 3}
    assert found.command == "python physics/discover.py 'run x' --p=3"
    assert found.revision == command.revision()


def test_a_revision_tells_changed_code_from_rewritten_results(tmp_path, monkeypatch):
    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def revision():
        return command.revision.__wrapped__()

    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert revision() == "unknown"
    for name in ("code.py", "results/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = revision()
    assert len(clean) == 40
    (tmp_path / "results/x.json").write_text("2")
    (tmp_path / "notes").write_text("not in git")
    assert revision() == clean
    (tmp_path / "code.py").write_text("2")
    assert revision() == f"{clean}+"


def test_a_number_measured_again_replaces_the_old_one(tmp_path):
    results = begin(tmp_path / "x.json")
    results.add(LOSS, replace(LOSS, length=16))
    results.add(replace(LOSS, value=1.25))
    found = read_results(tmp_path / "x.json")
    assert {r.length: r.value for r in found.records} == {8: 1.25, 16: 1.5}


def test_a_number_taken_over_keeps_the_command_and_revision_that_measured_it(tmp_path):
    before = replace(LOSS, command="python before.py", revision="abc", details={"threads": 1})
    begin(tmp_path / "x.json").add(before)
    assert read_results(tmp_path / "x.json").records == [before]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    results = begin(tmp_path / "x.json")
    results.add(LOSS)
    before = (tmp_path / "x.json").read_bytes()
    with pytest.raises(TypeError):
        results.add(replace(LOSS, length=9, value=object()))
    assert (tmp_path / "x.json").read_bytes() == before


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    value = {"a": [1.0, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan, "d": "nan"}}
    assert finite(value) == {"a": [1.0, None, [None, None]], "b": {"c": None, "d": "nan"}}
    begin(tmp_path / "x.json").add(replace(LOSS, value=math.nan, details={"parts": [math.inf]}))
    assert "NaN" not in (tmp_path / "x.json").read_text()
    (record,) = read_results(tmp_path / "x.json").records
    assert (record.value, record.details["parts"]) == (None, [None])


HEAD, RUNS = '{"kind": "kind", "settings": {}, "about": {}, ', '"runs": {"a": {"run": "a"}}, '


def test_a_file_that_is_something_else_is_refused_and_kept(tmp_path):
    examples = [
        "",
        "[]",
        "null",
        "{}",
        HEAD + '"runs": {}, "records": [{}]}',
        HEAD + '"runs": {}, "records": [3]}',
        HEAD + '"runs": [], "records": []}',
        HEAD + '"runs": {}, "records": [{"quantity": "loss", "run": "a", "value": 1}]}',
        HEAD + '"runs": {"a": {}}, "records": [{"quantity": "loss", "run": "a", "value": 1}]}',
        HEAD + RUNS + '"records": [{"quantity": "x", "run": "a", "value": "1"}]}',
        HEAD + RUNS + '"records": [{"quantity": "x", "run": "a", "value": 1, "tokens": true}]}',
        HEAD + RUNS + '"records": [{"quantity": 1, "run": "a", "value": 1}]}',
        HEAD + RUNS + '"records": [{"quantity": "x", "run": "a", "value": 1, "foreign": 2}]}',
        '{"settings": {}, "about": {}, "runs": {}, "records": []}',
        '{"kind": "kind", "settings": {}, "checkpoints": {}, "rows": []}',
        "[" * 100000,
    ]
    for content in cases(examples):
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
        continue_results(tmp_path / "x.json", "other", {}, about={})


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


def test_a_described_checkpoint_has_its_seed_as_a_field(tmp_path):
    path = write_checkpoint(tmp_path / "one", tiny_model(), run="r-s9", seed=3)
    (checkpoint,) = open_checkpoints([str(path)])
    assert (checkpoint.describe()["run"], checkpoint.describe()["seed"]) == ("r-s9", 3)


def test_variants_act_only_where_they_change_something():
    trained = tiny_model("lssar", train_length=32).config
    alpha, window = Variant("a", "alpha", 0.5), Variant("w", "window", 20)
    interpolated = Variant("PI", "pi")
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


def test_lengths_are_written_as_papers_do():
    written = {64: "64", 1000: "1000", 1024: "1K", 1100: "1100", 1536: "1.5K", 16384: "16K"}
    assert {length: short_number(length) for length in written} == written


def test_a_variant_that_a_model_cannot_have_is_left_out_with_the_reason(tmp_path, capsys):
    for name in ("softmax", "lssar"):
        write_checkpoint(tmp_path / name, tiny_model(name), run=name)
    found = open_checkpoints([str(tmp_path / name) for name in ("softmax", "lssar")])
    say_left_out(found, [Variant("YaRN", "yarn")])
    assert re.fullmatch("YaRN is left out for lssar: [^:]*cosine[^:]*\n", capsys.readouterr().err)


def test_a_bar_is_shown_on_a_terminal_and_by_one_process_only(monkeypatch, capsys):
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for enabled in (True, False):
            with progress(2, "passkey", "prompt", enabled) as bar:
                bar.update()
            shown = "passkey" in capsys.readouterr().err
            assert shown == (terminal and enabled), (terminal, enabled)
