"""Broken, foreign and hostile results: named on the page, or shown as text; they cannot harm it."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import report_results as made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_page import GOOD_ROW, build, hrefs, one_table, problems


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of well-behaved results."""
    root = tmp_path_factory.mktemp("page")
    return build(made.nano(root / "results"), root / "site")


BROKEN = {
    "half.json": (b'{"kind": "table", "rows": [', "not JSON"),
    "empty.json": (b"", "not JSON"),
    "list.json": (b"[1, 2]", "not an object"),
    "binary.json": (b"\xff\xfe\x00\x01", "not UTF-8"),
    "deep.json": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "no-rows.json": (b'{"kind": "table", "columns": []}', "it has no 'rows'"),
    "kind.json": (b'{"kind": ["table"]}', "'kind' is not a text"),
    "sealed.json": (b'{"kind": "passkey", "rows": [], "sha256": "0"}', "checksum"),
    "digits.json": (b'{"kind": "passkey", "n": ' + b"9" * 5000 + b"}", "5000 digits"),
    "picture.png": (b"GIF89a", "not a PNG"),
}
MALFORMED = {
    "cells": ({"rows": [{**GOOD_ROW, "measured": []}]}, "has 0 measured cells for 1 columns"),
    "words": ({"rows": [{**GOOD_ROW, "measured": ["1.5"]}]}, "is not an object"),
    "true": ({"rows": [{**GOOD_ROW, "paper": [True]}]}, "is not a number"),
    "n": ({"rows": [{**GOOD_ROW, "measured": [made.cell(1.5, n=0)]}]}, "not a count of seeds"),
    "sd": ({"rows": [{**GOOD_ROW, "measured": [made.cell(1.5, -1.0)]}]}, "sd is negative"),
    "twins": ({"rows": [GOOD_ROW, GOOD_ROW]}, "two rows are called 'softmax'"),
    "baseline": ({"baseline": "nobody"}, "'nobody' is none of the rows"),
    "notes": ({"notes": [1]}, "'notes' holds something that is not a text"),
    "rows": ({"rows": {}}, "'rows' is not a list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path, name):
    content, reason = BROKEN[name]
    results = one_table(tmp_path)
    (results / "nano" / name).write_bytes(content)
    page = build(results, tmp_path / "site")
    assert f"nano/{name}" in problems(page)
    assert reason in problems(page)
    assert any(row and row[0] == "softmax" for row in page.rows())
    assert not list((tmp_path / "site").rglob(name))


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_table_is_named_with_what_is_wrong(tmp_path, name):
    change, reason = MALFORMED[name]
    results = one_table(tmp_path)
    made.write(results / "nano/bad.json", made.table("bad", ["1K"], [GOOD_ROW]) | change)
    page = build(results, tmp_path / "site")
    assert re.search(rf"nano/bad\.json: .*{re.escape(reason)}", problems(page))
    assert any(row and row[0] == "softmax" for row in page.rows())


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    secret = made.write(tmp_path / "secret.json", {"kind": "secret", "key": "hunter2"})
    results = one_table(tmp_path)
    (results / "nano/link.json").symlink_to(secret)
    (results / "linked").symlink_to(tmp_path)
    page = build(results, tmp_path / "site")
    assert "nano/link.json: it is a link" in problems(page)
    assert "hunter2" not in "".join(p.read_text() for p in (tmp_path / "site").rglob("*.json"))


def test_a_pipe_that_calls_itself_a_result_is_not_waited_for(tmp_path):
    results = one_table(tmp_path)
    os.mkfifo(results / "nano/pipe.json")
    assert "nano/pipe.json: it is a link or a device" in problems(build(results, tmp_path / "site"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    results = one_table(tmp_path)
    made.write(results / "nano/locked.json", {}).chmod(0)
    assert "nano/locked.json: Permission denied" in problems(build(results, tmp_path / "site"))


def test_numbers_that_are_not_finite_are_shown_as_such(tmp_path):
    rows = [
        made.row("softmax", [3.1], [made.cell(1.5)]),
        made.row("exp", [3.2], [made.cell(float("nan"))]),
        made.row("huge", [3.2], [made.cell(10**400)]),
        made.row("largest", [3.2], [made.cell(1.7e308, 1.7e308, 2)]),
    ]
    made.write(tmp_path / "results/nano/t.json", made.table("t", ["1K"], rows))
    page = build(tmp_path / "results", tmp_path / "site")
    rows = {row[0]: row for row in page.rows() if row}
    assert "not finite" in rows["exp"][2]
    assert "not finite" in rows["huge"][2]
    assert rows["largest"][2].startswith("1.7e+308")


def test_a_source_that_is_not_there_is_named_and_not_linked(tmp_path):
    sources = ["results/nano/lost.json", "javascript:alert(1)//x.json", "../../../etc/passwd"]
    row = made.row("softmax", [3.1], [made.cell(1.5, 0.1, 3, sources)])
    made.write(tmp_path / "results/nano/t.json", made.table("t", ["1K"], [row]))
    page = build(tmp_path / "results", tmp_path / "site")
    assert all(source in problems(page) for source in sources)
    assert {h for h in hrefs(page) if not h.startswith("#")} == {
        "data/results/nano/t.json",
    } | {h for h in hrefs(page) if h == "data/paper.json"}


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></textarea><svg onload=alert(1)>",
    "$style ${script} %s {0}",
    "\ud800 lone \x00 nul \u202e reversed",
    "x" * 5000,
)


def hostile_results(root: Path, text: str) -> Path:
    """Every string of every record is the hostile one, and so are names of files and folders."""
    rows = [
        made.row(text, [3.1, 3.2], [made.cell(1.5, 0.1, 2, [text, text]), None], title=text),
        made.row("b", [3.1, 3.2], [made.cell(1), made.cell(2)], title=text, status=text),
        made.row("c", [3.1, 3.2], [made.cell(1), made.cell(2)], status=f"failed: {text}"),
    ]
    fields = ("title", "unit", "better", "label", "command", "scale", "name")
    table = made.table("t", [text, "b"], rows, baseline=text, notes=[text], figures=[text])
    made.write(root / "nano/t.json", table | dict.fromkeys(fields, text))
    claim = dict.fromkeys(("claim", "paper", "measured", "verdict"), text) | {"sources": [text]}
    made.write(root / "nano/claims.json", {"kind": "claims", "scale": text, "claims": [claim]})
    run = made.run(0, status=text, commit=text, torch=text, config={text: {text: [text]}})
    made.write(root / "nano/runs.json", {"kind": "runs", "scale": text, "runs": {text: run}})
    made.write(root / "nano/kind.json", {"kind": text})
    name = re.sub(r"[/\x00\ud800]", "_", text)[:80]
    made.write(root / name / f"{name}.json", {"kind": "passkey"})
    (root / f"{name}.json").write_text("{")
    return root


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_string_of_a_result_becomes_markup(tmp_path, text, shown):
    page = build(hostile_results(tmp_path / "results", text), tmp_path / "site")
    tags = {e["tag"] for e in page.elements}
    assert tags <= {e["tag"] for e in shown.elements}
    assert len(page.all("script")) == len(page.all("style")) == len(page.all("title")) == 1
    allowed = {name for e in shown.elements for name in e}
    assert {name for e in page.elements for name in e} <= allowed, "a new attribute"
    readable = text.replace("\ud800", "?").replace("\x00", "�")
    assert any(e["text"] == readable for e in page.all("th", scope="row"))
    for href in hrefs(page):
        assert href.startswith("#") or (tmp_path / "site" / unquote(href)).is_file()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_change_to_a_record_breaks_the_page(tmp_path_factory, data):
    """Any value of a table, claim or run replaced by any other: a page, and never a traceback."""
    rows = [made.row(k, [3.1, None], [made.cell(1.5, 0.1, 2, ["x"]), None]) for k in ("a", "b")]
    claim = {"claim": "c", "paper": "p", "measured": "m", "verdict": "holds", "sources": ["x"]}
    record = {
        "t": made.table("t", ["1", "2"], rows, baseline="a", notes=["n"], figures=["f"]),
        "claims": {"kind": "claims", "scale": "nano", "claims": [claim]},
        "runs": {"kind": "runs", "scale": "nano", "runs": {"r": made.run(0)}},
    }
    holder, key = record, data.draw(st.sampled_from(sorted(record)))
    while isinstance(holder[key], dict | list) and holder[key] and data.draw(st.integers(0, 5)):
        holder = holder[key]
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(keys))
    holder[key] = data.draw(JSON)
    root = tmp_path_factory.mktemp("changed")
    for name, value in record.items():
        made.write(root / f"results/nano/{name}.json", value)
    build(root / "results", root / "site")
