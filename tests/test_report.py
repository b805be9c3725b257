"""The report page: what it shows, where its links lead, what it refuses to overwrite."""

import base64
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
import report_results as made
from report_page import GOOD_ROW, Page, build, hrefs, one_table

import plots
import report
from errors import UserError

ROOT = Path(__file__).parent.parent


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
    assert [e["href"] for e in shown.all("link", rel="icon")] == ["data:,"], "else /favicon.ico"
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


# --- the browser of the other tests --------------------------------------------------------------


INSTALL = 'for n in chromium chromedriver; do echo >"$STUB/$n"; chmod +x "$STUB/$n"; done'


@pytest.mark.parametrize(
    ("user", "apt", "said"),
    [
        (1000, None, "none; its tests are skipped"),
        (0, None, "none; its tests are skipped"),
        (0, "exit 100", "could not be installed"),
        (0, INSTALL, "installed"),
    ],
)
def test_installing_the_browser_never_fails_its_caller_and_says_one_line(tmp_path, user, apt, said):
    stubs = {"id": f"echo {user}"} | ({"apt-get": apt} if apt else {})
    bash, chmod = shutil.which("bash"), shutil.which("chmod")
    (tmp_path / "chmod").symlink_to(chmod)
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!{bash}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [bash, ROOT / "scripts/browser.sh"],
        env={"PATH": str(tmp_path), "STUB": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith(f"browser: {said}")


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
