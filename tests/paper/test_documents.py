"""The tables of README and docs say what the records say."""

import json
import statistics
from pathlib import Path

import pytest

from lssar.errors import UserError
from paper.documents import BLOCK, filled, write_tables
from report import main as report

ROOT = Path(__file__).parents[2]
TABLE = "<!-- results nano headline: {}; {} -->\nold\n<!-- end -->\n"


@pytest.mark.parametrize("path", ["README.md", "docs/far_context.md"])
def test_the_tables_of_a_document_are_those_of_the_records(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert filled(text, ROOT / "results") == (text, len(BLOCK.findall(text)))
    assert BLOCK.search(text)


def test_a_table_has_the_means_of_the_files_and_names_their_commits(tmp_path):
    file = tmp_path / "x.md"
    file.write_text("before\n" + TABLE.format("lssar-p15, softmax-window", "1, 16, context_gain"))
    report([str(ROOT / "results"), "--write", str(file)])
    begin, *lines = file.read_text(encoding="utf-8").splitlines()[1:]
    assert begin.startswith("<!-- results") and lines[-1] == "<!-- end -->" and "old" not in lines
    values, commits = {}, set()
    for path in (ROOT / "results/nano/extrapolation").glob("lssar-p15-s*.json"):
        for record in json.loads(path.read_text())["records"]:
            if record.get("variant") is None and record["quantity"] in ("loss", "context_gain"):
                values.setdefault((record["quantity"], record["length"]), []).append(record)
    cells = [values["loss", 128], values["loss", 2048], values["context_gain", 2048]]
    means = [statistics.fmean(r["value"] for r in cell) for cell in cells]
    spread = [statistics.stdev(r["value"] for r in cell) for cell in cells]
    commits = {r["revision"][:7] for cell in cells for r in cell}
    shown = [f"{m:.3f} ±{s:.3f}" for m, s in zip(means, spread, strict=True)]
    shown[2] = f"{means[2]:+.3f} ±{spread[2]:.3f}".replace("-", "−")
    assert lines[3] == f"| LSSAR p=15 | {' | '.join(shown)} | {len(cells[0])} |"
    assert all(commit in lines[-3] for commit in commits)


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        (TABLE.format("sofmax", "1"), "unknown row of headline 'sofmax' of a table; did you mean"),
        (TABLE.format("softmax", "3"), "unknown column of headline '3'"),
        (TABLE.format("softmax", "1").replace("headline", "hedline"), "unknown table 'hedline'"),
        (TABLE.format("softmax", "1").replace("nano", "nanno"), "unknown scale 'nanno'"),
        ("no table at all", "has no table to fill; put '<!-- results nano"),
        (
            TABLE.format("softmax", "1").replace("end", "ende")
            + "text\n"
            + TABLE.format("ssmax", "1"),
            "headline: softmax; 1 --> begins has no '<!-- end -->'",
        ),
        (
            TABLE.format("softmax", "accuracy_by_distance").replace("headline", "far_mqar"),
            "columns of far_mqar are called 'accuracy_by_distance'; say at which length",
        ),
    ],
)
def test_a_mistyped_table_is_named_and_the_file_stays_as_it_is(tmp_path, block, wrong):
    file = tmp_path / "x.md"
    file.write_text(block)
    with pytest.raises(UserError, match=wrong):
        write_tables(file, ROOT / "results")
    assert file.read_text() == block


def test_a_missing_document_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.md"):
        report([str(ROOT / "results"), "--write", str(tmp_path / "nowhere.md")])
