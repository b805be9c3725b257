"""Broken, foreign and hostile results: named on the page, or shown as text; they cannot harm it."""

import os
import re

import pytest
import report_results as made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_page import HOSTILE, assert_shown_as_text, build, one_run, problems


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of well-behaved results."""
    root = tmp_path_factory.mktemp("page")
    return build(made.nano(root / "results"), root / "site")


HEAD = b'{"kind": "passkey", "settings": {}, "about": {}, '
BROKEN = {
    "half.json": (b'{"kind": "passkey", "records": [', "is damaged"),
    "empty.json": (b"", "is damaged"),
    "list.json": (b"[1, 2]", "a list where an object belongs"),
    "binary.json": (b"\xff\xfe\x00\x01", "is damaged"),
    "deep.json": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is damaged"),
    "kind.json": (b'{"kind": ["table"]}', "kind = ['table'] is of a wrong type"),
    "sealed.json": (HEAD + b'"runs": {}, "records": [], "sha256": "0"}', "checksum"),
    "digits.json": (HEAD + b'"n": ' + b"9" * 5000 + b"}", "5000 digits"),
    "run.json": (HEAD + b'"runs": {}, "records": [{"quantity": "a", "run": "b", "value": 1}]}',
                 "unknown run 'b'"),
    "value.json": (HEAD + b'"runs": {"b": {"run": "b"}}, "records": '
                   b'[{"quantity": "a", "run": "b", "value": true}]}', "value = True"),
    "field.json": (HEAD + b'"runs": {"b": {"run": "b"}}, "records": '
                   b'[{"quantity": "a", "run": "b", "value": 1, "extra": 2}]}', "extra"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path, name):
    content, reason = BROKEN[name]
    results = one_run(tmp_path)
    (results / "nano" / name).write_bytes(content)
    page = build(results, tmp_path / "site")
    assert f"nano/{name}" in problems(page)
    assert reason in problems(page)
    assert "give another --out" not in problems(page)
    assert any(row and row[0].startswith("II: exp x") for row in page.rows())


RUNS = {
    "list": ([], "damaged"),
    "seed": ({"runs": {"a": made.run("0")}}, "seed = '0'"),
    "config": ({"runs": {"a": made.run(0, config={"lr": 1})}}, "without a section"),
    "field": ({"runs": {"a": {"seed": 1}}}, "commit"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_damaged_list_of_runs_is_named(tmp_path, name):
    content, reason = RUNS[name]
    results = one_run(tmp_path)
    made.write(results / "nano/runs.json", content)
    found = problems(build(results, tmp_path / "site"))
    assert "nano/runs.json" in found
    assert reason in found


def test_a_damaged_file_elsewhere_and_a_false_picture_are_named(tmp_path):
    results = one_run(tmp_path)
    made.write(results / "cpu/good.json", {"kind": "attention"})
    (results / "cpu/good.png").write_bytes(b"GIF89a")
    (results / "cpu/bad.json").write_text("{")
    found = problems(build(results, tmp_path / "site"))
    assert "cpu/bad.json" in found
    assert "cpu/good.png: it is not a PNG picture" in found


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    secret = made.write(tmp_path / "secret.json", {"kind": "secret", "key": "hunter2"})
    results = one_run(tmp_path)
    (results / "nano/link.json").symlink_to(secret)
    (results / "linked").symlink_to(tmp_path)
    page = build(results, tmp_path / "site")
    assert "nano/link.json: it is a link" in problems(page)
    assert "hunter2" not in page.source
    assert "secret" not in page.source


def test_a_pipe_that_calls_itself_a_result_is_not_waited_for(tmp_path):
    results = one_run(tmp_path)
    os.mkfifo(results / "nano/pipe.json")
    assert "nano/pipe.json: it is a link or a device" in problems(build(results, tmp_path / "site"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path):
    results = one_run(tmp_path)
    made.write(results / "nano/locked.json", {}).chmod(0)
    made.write(results / "cpu/good.json", {"kind": "attention"})
    (results / "cpu/good.png").touch(mode=0)
    found = problems(build(results, tmp_path / "site"))
    assert re.search(r"nano/locked.json: .*Permission denied", found)
    assert re.search(r"cpu/good.png: .*Permission denied", found)


def test_numbers_that_no_result_can_have_are_an_overflow_and_flatten_no_figure(tmp_path):
    results = one_run(tmp_path)
    for key, value in (("identity", 10**400), ("identity-l1", 1.7e308)):
        made.losses(results / "nano", key, 0, {("as trained", 128): value})
    made.losses(results / "nano", "softmax", 0, {("as trained", 128): float("nan")})
    page = build(results, tmp_path / "site")
    rows = {row[0].partition("some seeds missing")[0]: row for row in page.rows() if row}
    for title in ("I: x", "III: x, l1", "IV: exp x, l1 (softmax)"):
        assert rows[title][1].split()[0] == "overflow"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_string_of_a_result_becomes_markup(tmp_path, text, shown):
    assert_shown_as_text(tmp_path, text, shown)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_change_to_a_record_breaks_the_page(tmp_path_factory, data):
    """Any value of a results file or run replaced by any other: a page, and never a traceback."""
    details = {"equations": [{"equation": "m1"}]}
    run = {"run": "lssar", "seed": 0, "model": {"attention": {"name": "lssar"}}}
    record = {
        "physics": {
            **{"kind": "physics", "settings": {}, "about": {}, "runs": {"id": run}},
            "records": [
                made.record("constant", 1.5, details=details),
                made.record("R2", 0.5, variant="as trained", length=7),
            ],
        },
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
