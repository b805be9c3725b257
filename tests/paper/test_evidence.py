"""Tables true to the files of records, and what counts as done."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import report_results as made
from eval_helpers import tiny_model, write_checkpoint

import paper.plan
import reproduce
from evaluating.checkpoints import open_checkpoints
from evaluating.results import AS_TRAINED
from lssar.errors import UserError
from paper import paper_numbers
from paper.evidence import Evidence, read_runs, tolerance_of
from paper.experiments import (
    SCALES,
    Column,
    Row,
    Table,
    all_tables,
)
from paper.plan import Workspace, write_runs
from training.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def space(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.chdir(ROOT)
    return Workspace(SCALES["nano"], runs=tmp_path / "runs", results=tmp_path / "results")


def built(space: Workspace, label: str, row: Row, column: Column, baseline: str | None = None):
    table = Table("x", label, (column,), (row,), baseline)
    return Evidence("nano", space.folder).sheet(table)


FIRST = Column(1, paper="1K")
LSSA, EXP = Row("lssa", "LSSA", "lssa"), Row("exp", "II", "exp")


def test_a_cell_is_the_mean_and_spread_over_the_seeds_that_are_there(space):
    for seed, loss in ((0, 1.5), (2, 1.75)):
        made.losses(space.folder, "lssa", seed, {(AS_TRAINED, 128): loss})
    found = built(space, "tab:softmaxfreeatt", LSSA, FIRST)
    line = found.lines[0]
    cell = line.entries[0].cell
    assert (cell.mean, cell.n, cell.values) == (1.625, 2, {0: 1.5, 2: 1.75})
    assert cell.sd == pytest.approx(statistics.stdev([1.5, 1.75]))
    assert [path.name for path in cell.sources.values()] == ["lssa-s0.json", "lssa-s2.json"]
    assert cell.mechanism == "lssa"
    assert line.entries[0].paper == 3.1905
    assert line.missing  # seed 1
    assert "1.625 ±0.177" in str(found)


def test_a_seed_is_what_the_file_says_and_not_what_it_is_called(space):
    path = made.losses(space.folder, "lssa", 1, {(AS_TRAINED, 128): 1.5})
    path.rename(path.with_name("anything.json"))
    foreign = made.record("loss", 9.0, length=128)
    made.results(space.folder / "extrapolation/lssa-s0.json", "other-s0", 0, [foreign])
    cell = built(space, "tab:softmaxfreeatt", LSSA, FIRST).lines[0].entries[0].cell
    assert cell.values == {1: 1.5}


def test_a_run_that_was_trained_again_counts_as_it_is_now(space):
    path = made.losses(space.folder, "exp", 0, {(AS_TRAINED, 128): 1.5})
    found = json.loads(path.read_text())
    found["records"].append(found["records"][0] | {"run": "again", "value": 1.25})
    found["runs"]["again"] = found["runs"]["id"]
    made.write(path, found)
    cell = built(space, "tab:decomsoft", EXP, FIRST).lines[0].entries[0].cell
    assert cell.values == {0: 1.25}


def test_a_row_never_mixes_a_model_with_the_one_before_it_was_trained_again(space):
    path = made.losses(space.folder, "exp", 0, {(AS_TRAINED, 128): 1.5, (AS_TRAINED, 256): 1.75})
    found = json.loads(path.read_text())
    found["records"].append(found["records"][0] | {"run": "again", "value": 1.25})
    found["runs"]["again"] = found["runs"]["id"]
    made.write(path, found)
    cell = built(space, "tab:decomsoft", EXP, Column(2, paper="2K")).lines[0].entries[0].cell
    assert cell.values == {}, "the evaluation at 256 was not made again"


def test_rows_that_were_measured_on_other_tokens_are_not_compared(space):
    for key, loss, tokens in (("lssa", 1.5, 4096), ("exp", 1.7, 4096), ("lssa", 1.4, 512)):
        for seed in range(3):
            records = [made.record("loss", loss + seed / 100, length=128)]
            name = f"{key}-s{seed}"
            file = space.folder / f"extrapolation/{name}.json"
            made.results(file, name, seed, records, settings={"tokens": tokens})
        table = Table("x", "tab:softmaxfreeatt", (FIRST,), (LSSA, EXP), "lssa")
        compared = Evidence("nano", space.folder).sheet(table).lines[1].entries[0].comparison
        assert compared.n == (3 if key == "exp" else 0)
    assert "not measured with the same settings" in compared.settles


def of_pieces(space: Workspace, key: str, seed: int, pieces: list[float], **more) -> None:
    loss = sum(pieces) / len(pieces)
    records = [made.record("loss", loss, length=128, details={"segment_losses": pieces})]
    records.append(made.record("bits_per_byte", loss / math.log(2), length=128))
    records += [made.record("context_gain", 0.5, length=2048, error=0.1)]
    path, name = space.folder / f"extrapolation/{key}-s{seed}.json", f"{key}-s{seed}"
    made.results(path, name, seed, records, settings={"tokens": 8192, "segment": 2048} | more)


def test_losses_of_the_same_text_differ_by_what_its_pieces_say(space):
    apart = [0.1, 0.3, 0.1, 0.3]  # LSSA is worse by this on each of four pieces, with every seed
    for seed in range(3):
        of_pieces(space, "exp", seed, [1.0, 2.0, 3.0, 4.0 + seed])
        of_pieces(space, "lssa", seed, [1.1, 2.3, 3.1, 4.3 + seed])
    bits = Column(1, "bits_per_byte")
    gain = Column(16, "context_gain")
    table = Table("x", "tab:softmaxfreeatt", (FIRST, bits, gain), (LSSA, EXP), "exp")
    sheet = Evidence("nano", space.folder).sheet(table)
    error = statistics.stdev(apart) / 2
    found = sheet.compare(LSSA, EXP, FIRST)
    assert (found.text_error, found.pieces) == (pytest.approx(error), 4)
    assert found.half_width == pytest.approx(3.182446 * error), "the seeds agree"
    assert sheet.compare(LSSA, EXP, bits).text_error == pytest.approx(error / math.log(2))
    assert sheet.text_error(gain, LSSA) == {"text_error": pytest.approx(0.1), "pieces": 4}
    assert sheet.compare(LSSA, EXP, gain).text_error == pytest.approx(math.hypot(0.1, 0.1))


@pytest.mark.parametrize("pieces", [[1.0], [], "1.0", [1.0, None], ["a", "b"], {"a": 1.0}, None])
def test_pieces_that_are_none_say_nothing_of_the_text(space, pieces):
    for seed in range(3):
        for key in ("lssa", "exp"):
            details = {"segment_losses": pieces}
            records = [made.record("loss", 1.5 + seed, length=128, details=details)]
            path, name = space.folder / f"extrapolation/{key}-s{seed}.json", f"{key}-s{seed}"
            made.results(path, name, seed, records)
    found = built(space, "tab:softmaxfreeatt", LSSA, FIRST)
    assert found.text_error(FIRST, LSSA) == {}
    assert found.compare(LSSA, EXP, FIRST).half_width == 0.0


def test_a_table_that_was_interrupted_in_its_last_run_is_not_complete(tmp_path):
    names = ("a", "b")
    folders = [write_checkpoint(tmp_path / n, tiny_model(seed=i)) for i, n in enumerate(names)]
    runs = {c.identity: c.describe() for c in open_checkpoints(map(str, folders))}
    one, other = runs
    places = [(one, 128), (one, 256), (other, 128), (other, 256)]
    whole = {"kind": "extrapolation", "settings": {}, "about": {}, "runs": runs}
    for count in (3, 4):
        records = [{"quantity": "loss", "run": r, "value": 1.0, "length": n} for r, n in places]
        path = made.write(tmp_path / "x.json", whole | {"records": records[:count]})
        assert paper.plan.is_complete(path, list(map(str, folders))) == (count == 4)


def test_a_run_with_other_settings_is_trained_again_by_its_own_command(space, tmp_path):
    config = load_config(ROOT / "configs/nano-softmax.toml", [f"--log.directory={space.runs}"])
    folder = config.run_directory / "checkpoints/step-00000600"
    write_checkpoint(folder, tiny_model(), step=config.train.steps)
    (folder.parent / "latest").write_text(folder.name)
    settings = config.run_directory / "config.toml"
    for text, trained in ((config.to_toml(), True), ("[model]\nheads = 2\n", False), (None, False)):
        settings.write_text(text) if text else settings.unlink()
        assert paper.plan.is_trained(config) == trained


def test_a_run_of_another_revision_leaves_the_others_in_the_list(space, capsys):
    for key, text in (("softmax", "[model]\nshift = 2\n"), ("ssmax", "[model]\nshift = false\n")):
        folder = space.run_directory(key, 0)
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(text)
        about = dict.fromkeys(("torch", "device", "revision"), "x") | {"processes": 1, "threads": 1}
        made.write(folder / "run.json", about)
    space.folder.mkdir(parents=True)
    write_runs(space)
    assert list(read_runs(space.folder / "runs.json")) == ["ssmax-s0"]
    assert re.search(r"softmax-s0 is not in runs\.json: .*shift = 2", capsys.readouterr().err)


def test_a_tolerance_is_of_the_column_and_may_be_a_share_of_the_number():
    printed = paper_numbers()["tab:lambada_results"]
    accuracy, perplexity = Column(paper="acc"), Column(paper="perplexity")
    assert tolerance_of(printed, accuracy, 8.79) == 1.3
    assert tolerance_of(printed, perplexity, 10720.58) == pytest.approx(1072.058)
    assert tolerance_of(printed, perplexity, 33.27) == pytest.approx(3.327)
    assert tolerance_of(paper_numbers()["tab:decomsoft"], FIRST, 3.2) == 0.03


def test_an_overflow_is_a_finished_row_without_a_number(space):
    for seed in SCALES["nano"].seeds_of("exp"):
        made.losses(space.folder, "exp", seed, {(AS_TRAINED, 128): None})
    found = built(space, "tab:decomsoft", EXP, FIRST)
    line = found.lines[0]
    assert (line.entries[0].cell.mean, line.entries[0].cell.n) == (None, 3)
    assert "overflow" in str(found)
    assert not line.missing


def test_a_row_that_was_not_measured_is_missing(space):
    space.folder.mkdir(parents=True)
    found = built(space, "tab:decomsoft", EXP, FIRST)
    assert found.lines[0].missing
    assert not found.is_measured
    assert "missing" in str(found)


def test_a_window_row_reads_the_window_of_the_training_length(space):
    found = {(AS_TRAINED, 256): 2.0, ("window=128", 256): 1.5, ("window=64", 256): 1.0}
    made.losses(space.folder, "softmax", 0, found)
    row = Row("w", "window", "softmax", "window", control=True)
    entry = built(space, "tab:softmaxfreeatt", row, Column(2, paper="2K")).lines[0].entries[0]
    assert entry.cell.mean == 1.5
    assert entry.paper is None


def test_runs_that_are_no_longer_here_stay_in_the_list_of_runs(space):
    path = made.write(space.folder / "runs.json", {"runs": {"softmax-s0": made.run(0)}})
    write_runs(space)
    assert read_runs(path) == {"softmax-s0": made.run(0)}


def test_nothing_is_read_from_a_file_that_is_damaged_and_it_is_named(space, capsys):
    made.losses(space.folder, "exp", 0, {(AS_TRAINED, 128): 1.5})
    (space.folder / "half.json").write_text('{"kind": ')
    reproduce.show_all([all_tables("nano")["decomposition"]], space)
    printed = capsys.readouterr().out
    assert "1.500" in printed
    assert re.search(r"not read: .*half\.json", printed)
    assert "the paper's claims" in printed
    assert not list(space.folder.glob("decomposition.json")), "tables are not stored"


def test_a_file_in_the_place_of_the_results_is_one_clear_line(space):
    space.results.write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write .*nano: Not a directory"):
        reproduce.show_all([], space)
