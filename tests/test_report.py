"""The report page: what it shows, where its links lead, and what no result can do to it."""

import base64
import json
import os
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import report_results as made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plots
import report
from errors import UserError

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """A page as a list of (tag, attributes, text inside), read by Python's own parser."""

    VOID = ("meta", "link", "img", "br", "hr")

    def __init__(self, site: Path):
        super().__init__()
        self.elements, self._open = [], []
        self.source = (site / "index.html").read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **wanted):
        found = [e for e in self.elements if e["tag"] == tag]
        return [e for e in found if all(e.get(k) == v for k, v in wanted.items())]

    def rows(self):
        """Text of the cells of every table row, by the row's own header."""
        names, rows = [e["text"] for e in self.all("th", scope="row")], []
        for element in self.elements:
            if element["tag"] == "tr":
                rows.append([])
            elif element["tag"] in ("td", "th") and rows:
                rows[-1].append(element["text"])
        assert len(names) <= len(rows)
        return rows


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return made.nano(tmp_path_factory.mktemp("made") / "results")


@pytest.fixture(scope="module")
def site(results, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "site"
    report.main([str(results), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def shown(site):
    return Page(site)


def build(results: Path, out: Path) -> Page:
    report.main([str(results), "--out", str(out)])
    return Page(out)


def one_table(tmp_path, **fields) -> Path:
    row = made.row("softmax", [3.1], [made.cell(1.5)])
    made.write(tmp_path / "results/nano/t.json", made.table("t", ["1K"], [row], **fields))
    return tmp_path / "results"


# --- what it shows -------------------------------------------------------------------------------


def test_every_cell_has_paper_value_measured_value_difference_and_verdict(results, shown):
    table = json.loads((results / "nano/softmax_free.json").read_text())
    by_name = {row[0]: row for row in shown.rows() if len(row) == 6}
    base = table["rows"][0]
    for row in table["rows"][1:5]:
        cells = next(cells for name, cells in by_name.items() if name.startswith(row["title"]))
        for column in range(4):
            text, cell = cells[column + 1], row["measured"][column]
            gap = cell["mean"] - base["measured"][column]["mean"]
            paper_gap = row["paper"][column] - base["paper"][column]
            assert f"{cell['mean']:.4f} ± {cell['sd']:.4f}" in text
            assert f"paper {row['paper'][column]:,} · n=3" in text
            minus = f"Δ {gap:+.4f} (paper {paper_gap:+.4f})".replace("-", "−")
            assert minus in text
            verdicts = ("same direction", "opposite direction", "within noise")
            assert sum(v in text for v in verdicts) == 1
            if "within noise" not in text:
                assert ("same direction" in text) == (gap * paper_gap > 0)


def test_one_column_has_its_parts_in_columns_of_their_own(shown):
    row = next(row for row in shown.rows() if row and row[0] == "recentred-l1")
    assert row[1] == "3.1954"
    assert re.fullmatch(r"1\.\d{4} n=1", row[2])
    assert "(paper +0.0043)" in row[3]
    assert row[4] == "≈ within noise"


def test_missing_and_failed_rows_are_shown_as_such(shown):
    rows = {row[0]: row for row in shown.rows() if row}
    assert rows["sigmoid-l1missing"][1] == "–paper 3.2"
    failed = next(name for name in rows if name.startswith("relu-length✗ failed"))
    assert "the loss was not finite at step 41" in failed


def test_claims_come_before_every_table_with_verdict_and_evidence(shown):
    ids = [e["id"] for e in shown.elements if "id" in e]
    assert ids.index("claims") < ids.index("scale-nano")
    row = next(row for row in shown.rows() if row and row[0].startswith("LSSA extrapolates"))
    assert row[1] == "✗ does not hold"
    assert "JSON" in row[4]


def test_runs_show_config_commit_seed_tokens_and_time(shown):
    row = next(row for row in shown.rows() if row and row[0] == "lssar-p15-s2")
    assert row[1:8] == ["✓ done", "2", "1,228,800", "71.2", "1.6831", "360,672", "3d5c3b0a1b"]
    assert "optimiser.lr = 0.003" in row[-1]


def test_headline_figure_draws_the_rows_with_most_seeds_and_has_a_caption(shown):
    drawn = [e for e in shown.all("svg") if e.get("role") == "img"]
    assert len(drawn) == 2, "the paper's panel and the measured one"
    assert all("LSSAR p=15 " in e["aria-label"] for e in drawn)
    assert "sliding window" not in drawn[0]["aria-label"]
    assert "mean of 3 seeds" in shown.all("figcaption")[0]["text"]


def test_figures_are_inside_the_page(results, shown):
    png = (results / "nano/softmax_free.png").read_bytes()
    images = shown.all("img")
    assert len(images) == 1
    assert base64.b64decode(images[0]["src"].partition("base64,")[2]) == png


def test_both_scales_stand_on_one_page_each_judged_by_its_rule(tmp_path):
    page = build(made.paper(made.nano(tmp_path / "results")), tmp_path / "site")
    headings = [e["text"] for e in page.all("h2")]
    assert headings.index("Paper scale") < headings.index("Nano scale")
    section = next(e for e in page.all("section") if e.get("id") == "scale-paper")["text"]
    for words in ("✓ reproduced", "✗ differs by +0.034", "✗ differs by −1.551", "tolerance ±0.02"):
        assert words in section
    assert "direction" not in section


def test_a_row_with_some_of_its_seeds_does_not_pass_for_complete(tmp_path):
    rows = [made.row("softmax", [3.1], [made.cell(1.5)], status="missing", title="IV: Softmax")]
    made.write(tmp_path / "results/nano/t.json", made.table("t", ["1K"], rows))
    page = build(tmp_path / "results", tmp_path / "site")
    row = next(row for row in page.rows() if row and row[0].startswith("IV"))
    assert row[0] == "IV: Softmaxsome seeds missing"
    assert "Gap to IV: Softmax" in page.rows()[0], "a name keeps its letters"


def test_tables_of_one_title_are_told_apart(tmp_path):
    for name in ("headline", "softmax_free"):
        one = made.table(name, ["1K"], [GOOD_ROW], title="Loss")
        made.write(tmp_path / f"results/nano/{name}.json", one)
    page = build(tmp_path / "results", tmp_path / "site")
    assert {"Loss (headline)", "Loss (softmax_free)"} <= {e["text"] for e in page.all("h3")}


def test_a_table_without_rows_is_not_yet_measured(tmp_path):
    made.write(tmp_path / "results/nano/t.json", made.table("t", [], [], baseline=None))
    page = build(tmp_path / "results", tmp_path / "site")
    assert "Nothing measured yet." in page.source
    assert "Could not be read" not in page.source


def test_a_folder_without_tables_says_so(tmp_path):
    (tmp_path / "results").mkdir()
    page = build(tmp_path / "results", tmp_path / "site")
    assert "no tables" in page.source


def test_the_page_and_the_figures_have_one_palette():
    css = (ROOT / "reporting/page.css").read_text(encoding="utf-8")
    found = re.findall(r"--s\d: light-dark\((#\w+),", css)
    assert tuple(found) == plots.COLOURS


# --- links and files -----------------------------------------------------------------------------


def hrefs(page: Page) -> list[str]:
    return [e["href"] for e in page.all("a") if "href" in e]


def test_every_link_leads_to_a_copied_file_or_to_a_place_on_the_page(site, shown):
    ids = {e["id"] for e in shown.elements if "id" in e}
    assert len(ids) == len([e for e in shown.elements if "id" in e])
    for href in hrefs(shown):
        if href.startswith("#"):
            assert href[1:] in ids
        else:
            assert (site / unquote(href)).is_file(), href


def test_every_measured_number_links_to_a_file_that_holds_it(site, shown):
    def numbers(value):
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from numbers(part)
        elif isinstance(value, int | float):
            yield value

    checked = 0
    for element in shown.all("a", **{"class": "num"}):
        told = re.match(r"-?[\d.]+(e-?\d+)?", element.get("title", ""))
        if told:
            found = json.loads((site / unquote(element["href"])).read_text(encoding="utf-8"))
            assert float(told[0]) in set(numbers(found)), element
            checked += 1
    # 6 rows x 5 lengths and 4 scores with mean and seeds, and five numbers of 19 runs
    assert checked == 6 * 5 * 4 + 3 * 4 + 1 + 19 * 5 - 1


def test_copies_are_the_bytes_of_the_results(results, site):
    copied = {p.relative_to(site / "data/results") for p in (site / "data/results").rglob("*.json")}
    assert copied == {p.relative_to(results) for p in results.rglob("*.json")}
    for path in copied:
        assert (site / "data/results" / path).read_bytes() == (results / path).read_bytes()
    assert (site / "data/paper.json").read_bytes() == (ROOT / "paper.json").read_bytes()


def test_the_page_asks_for_nothing_from_elsewhere(shown):
    for element in shown.elements:
        for name in ("src", "href", "action", "poster", "srcset"):
            value = element.get(name, "#")
            assert value.startswith(("#", "data:", "data/")), element
    assert "@import" not in shown.source
    assert "url(" not in shown.source


def test_same_results_give_the_same_bytes(results, site, tmp_path):
    copy = tmp_path / "elsewhere/results"
    files = sorted(results.rglob("*"))
    random.Random(3).shuffle(files)  # files appear on the disk in another order
    for path in files:
        if path.is_file():
            target = copy / path.relative_to(results)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    build(copy, tmp_path / "site")
    assert (tmp_path / "site/index.html").read_bytes() == (site / "index.html").read_bytes()


def test_one_scale_alone_can_be_given(results, tmp_path):
    page = build(results / "nano", tmp_path / "site")
    assert all((tmp_path / "site" / h).is_file() for h in hrefs(page) if not h.startswith("#"))
    assert any(h.endswith("evaluations/lssa-s0.json") for h in hrefs(page))


def test_a_second_build_drops_the_copies_of_results_that_are_gone(tmp_path):
    results, out = one_table(tmp_path), tmp_path / "site"
    made.write(results / "nano/old/gone.json", {"kind": "passkey"})
    build(results, out)
    (out / "CNAME").write_text("kept")
    shutil.rmtree(results / "nano/old")
    page = build(results, out)
    assert not (out / "data/results/nano/old").exists()
    assert "gone.json" not in page.source
    assert (out / "CNAME").read_text() == "kept"
    assert (out / "data/results/nano/t.json").is_file()


# --- mistakes of the user ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("results/site", "inside"),
        ("mine", "holds other things"),
        ("file", "is a file"),
        ("foreign", "holds other things"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_and_left_alone(tmp_path, out, message):
    results = one_table(tmp_path)
    made.write(tmp_path / "mine/data/precious.json", {})
    (tmp_path / "file").write_text("text")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/index.html").write_text("<h1>Another page</h1>")
    with pytest.raises(UserError, match=message):
        report.main([str(results), "--out", str(tmp_path / out)])
    assert (tmp_path / "mine/data/precious.json").exists()
    assert not (tmp_path / "mine/index.html").exists()
    assert (tmp_path / "foreign/index.html").read_text() == "<h1>Another page</h1>"


def test_a_missing_folder_of_results_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        report.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "site")])
    assert not (tmp_path / "site").exists()


# --- broken, foreign and hostile files -----------------------------------------------------------

GOOD_ROW = made.row("softmax", [3.1], [made.cell(1.5)])
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


def problems(page: Page) -> str:
    return next((e["text"] for e in page.all("section", id="unread")), "")


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


# --- the page that is committed ------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_results_give(tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "-z", "results", "site"], cwd=ROOT, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode or not names:
        pytest.skip("not a git checkout")
    for name in names:
        if name.startswith("results/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    build(tmp_path / "results", tmp_path / "site")
    made_now = {p.relative_to(tmp_path) for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert made_now == {Path(name) for name in names if name.startswith("site/")}
    for path in made_now:
        message = f"{path} is old; run: python report.py results/ --out site/"
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes(), message
