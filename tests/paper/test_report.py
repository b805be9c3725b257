"""The report page: what it shows, where its links lead, what it refuses to overwrite."""

import json
import os
import random
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import report_results as made
from report_page import Page, build, hrefs, one_run

import report
from evaluating.results import AS_TRAINED
from lssar.errors import UserError
from paper.experiments import SCALES
from paper.statistic import compare, signed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return made.nano(tmp_path_factory.mktemp("made") / "results")


@pytest.fixture(scope="module")
def site(results):
    report.main([str(results), "--out", str(results.parent / "site")])
    return results.parent / "site"


@pytest.fixture(scope="module")
def shown(site):
    return Page(site)


def loss_of(results: Path, key: str, seed: int, length: int) -> float:
    found = json.loads((results / f"nano/extrapolation/{key}-s{seed}.json").read_text())
    return next(
        r["value"]
        for r in found["records"]
        if (r["quantity"], r["length"]) == ("loss", length) and "variant" not in r
    )


# --- what it shows -------------------------------------------------------------------------------


def test_every_cell_has_the_measured_value_its_interval_and_the_papers_value(results, shown):
    row = next(row for row in shown.rows() if row and row[0].startswith("LSSAR p=15"))
    paper = [3.1905, 3.193, 3.2291, 3.3171]
    base = [3.1911, 4.1662, 5.4513, 6.2823]
    for i, length in enumerate(made.LENGTHS[:4]):
        ours, theirs = (
            {seed: loss_of(results, key, seed, length) for seed in range(3)}
            for key in ("lssar-p15", "softmax")
        )
        text = " ".join(row[i + 1].split())
        mean, sd = statistics.fmean(ours.values()), statistics.stdev(ours.values())
        assert text.startswith(f"{mean:.3f} ±{sd:.3f} ")
        found = compare(ours, theirs, margin=0.02 if i == 0 else 0.1)
        low, high = map(signed, found.interval)
        assert f"{signed(found.mean)} {found.words}[{low}, {high}]" in text
        assert f"paper {paper[i]} ({signed(paper[i] - base[i])})" in text
        decided = "same direction" in text or "opposite direction" in text
        assert decided == (found.sign != 0 and abs(paper[i] - base[i]) > 0.02)


def test_overflowed_and_missing_rows_are_shown_as_such(shown):
    rows = {row[0].partition("seeds 0")[0]: row for row in shown.rows() if row}
    assert rows["ReLU / Lsome seeds missing"][1].split()[0] == "overflow"
    assert rows["Sigmoid, l1missing"][1].split()[0] == "–"


def test_findings_and_claims_come_before_every_table(shown):
    assert len(shown.all("ol", **{"class": "findings"})) == 1
    ids = [e["id"] for e in shown.elements if "id" in e]
    assert ids.index("nano-claims") < ids.index("nano-tables") < ids.index("nano-headline")
    cards = [e["text"] for e in shown.all("li", **{"class": "claim"})]
    lssa = next(c for c in cards if "[LSSA] outperforms" in c)
    assert "✗ does not hold" in " ".join(lssa.split())
    assert any("it rests on one run: at least 3 seeds" in card for card in cards)
    assert any("not measured" in card for card in cards)
    totals = {e["text"].partition(" ")[2] for e in shown.all("p", **{"class": "total"})}
    assert {"of the paper's claims", "controls and findings of ours"} <= totals


def test_the_far_parts_are_folded(shown):
    folded = shown.all("details", **{"class": "table"})
    assert len(folded) > 10
    assert not any("open" in e for e in folded)


def test_runs_show_their_own_settings_commit_seed_tokens_and_time(shown):
    row = next(row for row in shown.rows() if row and row[0] == "lssar-p15-s2")
    assert row[1:9] == ["done", "2", "1", "1,228,800", "71.2", "1.6831256803125143", "3d5c3b0a1b",
                        "2.13.0+cpu"]  # fmt: skip
    assert row[-1] == ""  # no setting that most runs do not have
    other = next(row for row in shown.rows() if row and row[0] == "exp-s0")
    assert other[-1] == "attention.name = exp"
    assert "nano/runs.json" in " ".join(hrefs(shown))


def test_both_scales_stand_on_one_page_each_judged_by_its_rule(tmp_path):
    page = build(made.paper(made.nano(tmp_path / "results")), tmp_path / "site")
    headings = [e["text"] for e in page.all("h2")]
    assert headings.index("Paper scale") < headings.index("Nano scale")
    section = next(e for e in page.all("section") if e.get("id") == "paper-scale")["text"]
    text = " ".join(section.split())
    assert "✓ reproduced" in text
    assert "✗ differsby +0.100, more than 0.05" in text
    assert "✗ differsby −1.551, more than 0.1" in text
    assert "same direction" not in text and "opposite direction" not in text


def test_a_row_with_some_of_its_seeds_does_not_pass_for_complete(tmp_path):
    page = build(one_run(tmp_path, "softmax"), tmp_path / "site")
    names = {row[0] for row in page.rows() if row}
    assert "IV: exp x, l1 (softmax)some seeds missingseeds 0" in names


def test_a_folder_without_results_says_so(tmp_path):
    (tmp_path / "results").mkdir()
    page = build(tmp_path / "results", tmp_path / "site")
    assert "no results in this folder" in page.source


# --- links and files -----------------------------------------------------------------------------


def test_every_link_leads_to_a_file_or_to_a_place_on_the_page(site, shown):
    ids = [e["id"] for e in shown.elements if "id" in e]
    assert len(set(ids)) == len(ids)
    for href in hrefs(shown):
        if href.startswith("#"):
            assert href[1:] in ids
        elif not href.startswith("https://arxiv.org/abs/"):
            assert (site / unquote(href.partition("#")[0])).is_file(), href


def test_every_measured_number_is_in_a_file_that_its_row_links_to(site, shown):
    checked, links, rows = 0, set(), []
    for element in shown.elements:
        if element["tag"] == "tr":
            rows.append((links := set(), values := []))
        elif element.get("class") == "num":
            links.add(site / unquote(element["href"]))
        elif element["tag"] == "b" and element.get("title"):
            values += [value for value in element["title"].split() if value != "none"]
    for links, values in rows:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in links]
        found = [r["value"] for file in files for r in file["records"] if r["value"] is not None]
        assert set(values) <= {f"{v * factor:.6g}" for v in found for factor in (1, 100)}
        checked += len(values)
    assert checked > 200


def test_nothing_of_the_results_is_copied(site):
    assert {p.suffix for p in site.rglob("*") if p.is_file()} == {".html", ".svg"}
    assert not list(site.rglob("*.json"))


def test_the_page_asks_for_nothing_from_elsewhere(site, shown):
    for element in shown.elements:
        for name in ("src", "action", "poster", "srcset"):
            assert ":" not in element.get(name, ""), element
    assert all((site / unquote(e["src"])).is_file() for e in shown.all("img"))
    assert [e["href"] for e in shown.all("link")] == ["data:,"], "else /favicon.ico"
    assert "@import" not in shown.source
    assert "url(" not in shown.source


def test_figures_are_loaded_when_they_are_seen_and_keep_their_place(shown):
    first, *others = shown.all("img")
    assert "loading" not in first
    assert {e["loading"] for e in others} == {"lazy"}
    assert all(int(e["width"]) > 0 and int(e["height"]) > 0 for e in shown.all("img"))


def test_same_results_give_the_same_bytes(results, site, tmp_path):
    copy = tmp_path / "elsewhere/results"
    files = sorted(results.rglob("*"))
    random.Random(3).shuffle(files)  # files appear on the disk in another order
    for path in files:
        if path.is_file():
            target = copy / path.relative_to(results)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    build(copy, copy.parent / "site")
    for path in site.rglob("*.svg"):
        assert (copy.parent / "site" / path.relative_to(site)).read_bytes() == path.read_bytes()
    readme = re.compile(rb'href="[^"]*README.md')  # the checkout is elsewhere, seen from there
    first, second = ((p / "index.html").read_bytes() for p in (site, copy.parent / "site"))
    assert readme.sub(b"", first) == readme.sub(b"", second)


def test_one_scale_alone_can_be_given(results, tmp_path):
    page = build(results / "nano", tmp_path / "site")
    assert any(h.endswith("extrapolation/lssa-s0.json") for h in hrefs(page))


def test_every_scale_has_a_heading_of_its_own(tmp_path):
    for scale in SCALES:
        made.losses(tmp_path / "results" / scale, "softmax", 0, {(AS_TRAINED, 1024): 3.2})
    page = build(tmp_path / "results", tmp_path / "site")
    headings = [e["text"] for e in page.all("h2")]
    assert headings[:3] == ["Paper scale", "One GPU", "Nano scale"]


def test_a_second_build_drops_figures_of_results_that_are_gone(tmp_path):
    results, out = one_run(tmp_path, "softmax"), tmp_path / "site"
    made.losses(results / "nano", "softmax-inverse", 0, {(AS_TRAINED, 128): 1.6})
    build(results, out)
    assert (out / "figures/nano-modified_scores.svg").is_file()
    (out / "CNAME").write_text("kept")
    (results / "nano/extrapolation/softmax-inverse-s0.json").unlink()
    build(results, out)
    assert not (out / "figures/nano-modified_scores.svg").exists()
    assert (out / "CNAME").read_text() == "kept"


def test_the_page_of_the_committed_results_is_whole_and_of_moderate_size(tmp_path):
    page = build(ROOT / "results", tmp_path / "site")
    assert "Could not be read" not in page.source
    way = os.path.relpath((ROOT / "results").resolve(), (tmp_path / "site").resolve())
    beside = page.source.replace(quote(way), "../results")  # as README has it, wherever this is
    assert beside.count("../results/") > 500 and len(beside.encode()) < 1_000_000
    row = next(row for row in page.rows() if row and row[0].startswith("Softmax"))
    assert [cell.split()[0] for cell in row[1:6]] == ["1.729", "1.807", "2.020", "2.283", "2.517"]


def test_no_committed_number_names_a_commit_that_this_history_lacks():
    def git(*words) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("not a whole checkout")
    known = {commit[:7] for commit in git("rev-list", "HEAD").split()}
    named = re.compile(r'"(?:revision|commit)": "([0-9a-f]{7})[0-9a-f]{33}\+?"')
    told = re.compile(r"\bat ([0-9a-f]{7})\b|\b([0-9a-f]{40})\b")
    for pattern, files in ((named, "results/**/*.json"), (told, "**/*.md")):
        for path in map(ROOT.joinpath, git("ls-files", f":(glob){files}").splitlines()):
            found = {"".join(m.groups(""))[:7] for m in pattern.finditer(path.read_text("utf-8"))}
            assert found <= known, f"{path.name}: {found - known}"


# --- one file ------------------------------------------------------------------------------------


def test_a_results_file_is_a_table_on_the_terminal(tmp_path, capsys):
    records = [made.record("accuracy", 0.25, length=n) for n in (384, 1536)]
    records += [made.record("accuracy", None, length=384, variant="window=384")]
    path = made.results(tmp_path / "x.json", "lssar-s0", 0, records, kind="passkey")
    report.main([str(path)])
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["accuracy", "384", "1.5K"]
    assert first.split() == ["lssar-s0,", "as", "trained", "0.25", "0.25"]
    assert second.split()[-1] == "overflow"


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
    results = one_run(tmp_path)
    made.write(tmp_path / "mine/data/precious.json", {})
    (tmp_path / "file").write_text("text")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/index.html").write_text("<h1>Another page</h1>")
    with pytest.raises(UserError, match=message):
        report.main([str(results), "--out", str(tmp_path / out)])
    assert (tmp_path / "mine/data/precious.json").exists()
    assert not (tmp_path / "mine/index.html").exists()
    assert (tmp_path / "foreign/index.html").read_text() == "<h1>Another page</h1>"


def test_what_an_interrupted_first_run_leaves_is_taken_over_and_foreign_figures_are_not(tmp_path):
    results, out = one_run(tmp_path), tmp_path / "site"
    (out / "figures").mkdir(parents=True)
    (out / "figures/nano-headline.svg").touch()
    build(results, out)
    assert not (out / "figures/nano-headline.svg").exists()
    mine = tmp_path / "mine/figures/cat.svg"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(UserError, match="holds other things"):
        report.main([str(results), "--out", str(tmp_path / "mine")])
    assert mine.exists()


def test_a_missing_folder_or_option_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not there"):
        report.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "site")])
    with pytest.raises(UserError, match="--out SITE is missing"):
        report.main([str(tmp_path)])
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
