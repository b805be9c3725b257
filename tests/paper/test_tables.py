"""Records become cells, cells become tables, verdicts, figures and the page."""

import math
import random
import re

import pytest

import reproduce
from evaluating.results import Record, Results, read_results
from evaluating.statistic import interval, t_quantile
from lssar.errors import UserError
from paper import claims
from paper.collect import merge
from paper.experiments import SCALES, all_tables, load_toml
from paper.figures import draw
from paper.page import write_page
from paper.tables import Cell, compare, fill_all

LENGTHS = [256, 512, 1024, 2048, 4096]
FLAT = [1.57, 1.57, 1.57, 1.58, 1.60]
STEEP = [1.57, 1.75, 2.08, 2.40, 2.74]
CURVES = {"softmax": STEEP, "lssar-p15": FLAT, "cos-softmax": [1.55, 1.57, 1.62, 1.68, 1.75]}


def write_headline(folder, curves, seeds=5, name="headline", noise=1.0):
    """Write results/nano/NAME.json with losses on 32 pieces of text."""
    rng = random.Random(7)
    results = Results(folder / f"{name}.json", "extrapolation", {"tokens": 1}, {})
    text = [noise * rng.gauss(0, 0.1) for _ in range(32)]  # some text is harder, for every model
    for key, losses in curves.items():
        for seed in range(seeds):
            model = {"attention": {"name": key.removesuffix("-p15")}}
            run = {"run": key, "seed": seed, "trained_at": "1111111aa", "model": model}
            results.runs[f"{key}{seed}"] = run
            shift = noise * rng.gauss(0, 0.002)
            for length, loss in zip(LENGTHS, losses, strict=True):
                pieces = [loss + shift + t + noise * rng.gauss(0, 0.002) for t in text]
                fields = {"length": length, "revision": "2222222bb", "command": "c"}
                fields["details"] = {"by_segment": pieces}
                value = sum(pieces) / len(pieces)
                results.records.append(Record("loss", f"{key}{seed}", value, **fields))
    results.save()
    return folder


def filled(folder, scale="nano"):
    return fill_all(scale, folder)[0]


def test_quantiles_are_those_of_printed_tables():
    for freedom, printed in ((1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)):
        assert t_quantile(freedom) == pytest.approx(printed, abs=1e-3)


def test_an_interval_counts_seeds_and_text():
    seeds, text = [1.0, 2.0, 3.0], [1.0, 3.0, 2.0, 2.0]
    over_seeds = 4.303 * 1.0 / math.sqrt(3)
    over_text = 3.182 * math.sqrt(2 / 3) / 2
    assert interval(seeds).half_width == pytest.approx(over_seeds, abs=1e-3)
    found = interval(seeds, text)
    assert found.half_width == pytest.approx(math.hypot(over_seeds, over_text), abs=1e-3)
    assert interval([1.0]).half_width is None


def test_cells_are_paired_by_seed_and_text_that_is_hard_for_both_does_not_count():
    first = Cell({0: 1.1, 1: 1.2, 5: 9.0}, {0: [1.0, 1.2], 1: [1.1, 1.3]})
    second = Cell({0: 1.0, 1: 1.1}, {0: [0.9, 1.1], 1: [1.0, 1.2]})
    found = compare(first, second)
    assert (found.n, found.mean) == (2, pytest.approx(0.1))
    assert found.half_width == pytest.approx(0, abs=1e-9)
    assert compare(first, Cell({0: None, 1: 1.0})) is None, "a seed overflowed"
    assert compare(first, Cell()) is None


def test_the_headline_is_judged_by_the_rule_of_the_docs(tmp_path):
    cases = [
        (CURVES, "confirmed"),
        (CURVES | {"lssar-p15": [1.57, 1.6, 1.65, 1.72, 1.9]}, "refuted"),  # rises by 9.6 %
        (CURVES | {"lssar-p15": [1.63, 1.63, 1.63, 1.63, 1.63]}, "refuted"),  # costs 0.06
        (CURVES | {"lssar-p15": [1.60, 1.60, 1.60, 1.60, 1.60]}, "undecided"),  # costs 0.03
        (CURVES | {"lssar-p15": [1.57, 1.57, 1.6, 1.66, 1.7]}, "undecided"),  # rises by 5.7 %
        (CURVES | {"softmax": [1.57, 1.6, 1.7, 1.9, 2.0]}, "undecided"),  # softmax by 21 %
    ]
    for number, (curves, verdict) in enumerate(cases):
        folder = write_headline(tmp_path / str(number), curves)
        assert claims.headline(filled(folder)["headline"])[0] == verdict, number
    at_the_bounds = {"softmax": [25, 30, 35, 40, 45], "lssar-p15": [25, 25, 25, 26, 27]}
    folder = write_headline(tmp_path / "bounds", at_the_bounds, noise=0)
    assert claims.headline(filled(folder)["headline"])[0] == "confirmed"
    one_seed = write_headline(tmp_path / "one", CURVES, seeds=1)
    assert claims.headline(filled(one_seed)["headline"])[0] == "undecided"
    assert claims.headline(filled(tmp_path / "none")["headline"])[0] == "not measured"


def test_sharpening_needs_more_than_its_margin(tmp_path):
    for gap, verdict in ((0.06, "credited"), (0.03, "undecided"), (0.0, "not credited")):
        cosine = [loss + gap for loss in FLAT]
        folder = write_headline(tmp_path / str(gap), CURVES | {"cos-softmax": cosine})
        assert claims.sharpening(filled(folder)["headline"])[0] == verdict, gap


def test_a_sentence_agrees_disagrees_or_is_undecided(tmp_path):
    overflowing = {"ssmax": [1.57, 1.8, math.inf, math.inf, math.inf]}
    table = filled(write_headline(tmp_path, CURVES | overflowing))["headline"]
    given = {"text": "x", "table": "headline"}
    better = {"row": "lssar-p15", "other": "softmax", "lengths": [2, 8]}
    worse = {"row": "softmax", "other": "lssar-p15", "lengths": [8]}
    same = {"row": "lssar-p15", "other": "softmax", "lengths": [1]}
    cases = [
        ([better], "agrees"),
        ([worse], "disagrees"),
        ([better, worse], "disagrees"),
        ([better, same], "undecided"),
        ([same | {"is": "alike", "margin": 0.02}], "agrees"),
        ([better | {"is": "alike", "margin": 0.02}], "disagrees"),
        ([better | {"other": "lssa"}], "not measured"),
        ([better | {"other": "lssa"}, better], "undecided"),  # measured in part
        ([better | {"other": "ssmax"}], "undecided"),  # overflowed
    ]
    for asked, verdict in cases:
        assert claims.judge(given | {"compare": asked}, table, "nano").verdict == verdict, asked
    why = {"not_testable": {"nano": "too small"}, "compare": [better]}
    found = claims.judge(given | why, table, "nano")
    assert (found.verdict, found.points) == ("not testable", ["too small"])


def test_every_sentence_names_rows_and_columns_that_exist():
    data = load_toml("claims.toml")
    assert len(data["paper"]) <= 20 and len(data["controls"]) <= 10
    for scale in SCALES:
        tables = all_tables(scale)
        for given in (*data["rules"], *data["paper"], *data["controls"]):
            table = tables.get(given["table"])
            asked = claims.of_scale(given.get("compare", []), SCALES[scale]) if table else []
            skipped = claims.of_scale(given.get("not_testable"), SCALES[scale])
            assert table is None or asked or skipped, (scale, given["text"])
            for one in asked if not skipped else ():
                places = {(c.quantity, c.factor) for c in table.columns}
                assert table.row(one["row"]) and table.row(one["other"]), (scale, one)
                quantity = one.get("quantity", "loss")
                assert {(quantity, n) for n in one["lengths"]} <= places, (scale, one)


def test_the_summary_has_ten_sentences_the_papers_numbers_ours_and_verdicts(tmp_path, capsys):
    nano = write_headline(tmp_path / "nano", CURVES)
    lines = claims.summary({"nano": filled(nano), "mid": filled(tmp_path / "mid", "mid")})
    header, _, *rows = (line.strip("| ").split(" | ") for line in lines.split("\n"))
    assert header == ["compared", "the paper", "nano", "verdict", "mid", "verdict"]
    assert len(rows) == 10
    title, compared, printed, measured, verdict, *rest = rows[0]
    assert title == "LSSAR's loss stays nearly constant to 16x"
    assert compared == "lssar-p15, softmax"
    assert printed == "1x 3.191, 3.191; 8x 3.317, 6.282"
    assert re.fullmatch(r"1x 1\.5\d\d, 1\.5\d\d; 8x 1\.5\d\d, 2\.\d\d\d", measured)
    assert verdict == "confirmed"
    assert [part for part in rest if part.strip("| ")] == ["not measured"], "at mid"
    (tmp_path / "mid").mkdir()
    reproduce.summarise(tmp_path)
    assert capsys.readouterr().out.startswith(lines)
    assert (tmp_path / "headline.png").stat().st_size > 10_000


def test_a_table_shows_the_mean_the_interval_the_paper_and_both_commits(tmp_path):
    table = filled(write_headline(tmp_path, CURVES))["headline"]
    text = table.text()
    assert "trained at 1111111, evaluated at 2222222" in text
    assert re.search(r"LSSAR p=15 +1\.5\d\d ±0\.00\d", text)
    assert re.search(r"the paper, at its own scale +3\.1905 +3\.193 +3\.2291 +3\.3171", text)
    assert re.search(r"\| LSSAR p=15 \| 1\.5\d\d ±0\.00\d \|", table.markdown())
    assert draw(table) is not None
    assert draw(filled(tmp_path / "none")["headline"]) is None


def test_records_of_several_files_become_one_compact_one(tmp_path):
    write_headline(tmp_path / "a", {"softmax": STEEP}, seeds=2)
    write_headline(tmp_path / "b", {"lssar-p15": FLAT}, seeds=2)
    sources = [tmp_path / "a/headline.json", tmp_path / "b/headline.json"]
    runs = {
        f"{key}{seed}": {"run": key, "seed": seed, "trained_at": "1111111"}
        for key in ("softmax", "lssar-p15")
        for seed in range(2)
    }
    out = tmp_path / "nano/headline.json"
    assert merge(out, "extrapolation", runs, sources) == 20
    merge(out, "extrapolation", runs, sources)  # again: it replaces, and adds nothing
    table = filled(tmp_path / "nano")["headline"]
    row = table.table.row("lssar-p15")
    assert table.cell(row, table.columns[0]).n == 2
    assert len(table.cell(row, table.columns[0]).segments[0]) == 32
    del runs["softmax1"]  # a model that was trained again has another identity
    assert merge(out, "extrapolation", runs, sources) == 15
    alone = {"softmax1": {"run": "softmax", "seed": 1, "trained_at": "1111111"}}
    assert merge(out, "extrapolation", alone, sources, seeds=[1]) == 15  # seed 0 of both stays
    assert merge(out, "extrapolation", alone, sources, seeds=[1]) == 15
    assert {run["seed"] for run in read_results(out).runs.values()} == {0, 1}
    assert merge(out, "extrapolation", alone, sources) == 5
    other = Results(tmp_path / "c.json", "extrapolation", {"tokens": 2}, {})
    other.save()
    with pytest.raises(UserError, match=r"c\.json was measured with other settings"):
        merge(out, "extrapolation", runs, [*sources, other.path])


def test_the_page_shows_hostile_text_as_text_and_names_what_it_cannot_read(tmp_path):
    results = tmp_path / "results"
    write_headline(results / "nano", CURVES)
    (results / "nano/far.json").write_text("{")
    hostile = "<script>alert(1)</script>"
    found = Results(results / "nano/pi.json", "extrapolation", {}, {})
    found.runs["x"] = {"run": "pi-2x", "seed": 0, "trained_at": hostile}
    found.records = [Record("loss", "x", 1.5, length=512, revision=hostile)]
    found.save()
    write_page(results, tmp_path / "site")
    text = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert text.count("<script>") == 1 and "&lt;script" in text
    assert "far.json" in text and "damaged" in text
    assert (tmp_path / "site/figures/nano-headline.svg").stat().st_size > 1000
    write_page(results, tmp_path / "site")
    assert (tmp_path / "site/index.html").read_text(encoding="utf-8") == text
    (tmp_path / "interrupted/figures").mkdir(parents=True)
    write_page(results, tmp_path / "interrupted")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    for out in (tmp_path / "mine", results / "site"):
        with pytest.raises(UserError, match="--page"):
            write_page(results, out)


def test_reproduce_prints_tables_and_verdicts_of_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_headline(tmp_path / "results/nano", CURVES)
    monkeypatch.setattr(reproduce, "jobs_of", lambda *given: [])
    reproduce.main(["headline", "--tables-only", "--page", "site"])
    printed = capsys.readouterr().out
    assert "confirmed: LSSAR maintains" in printed
    assert (tmp_path / "results/nano/headline.png").exists()
    assert (tmp_path / "site/index.html").exists()
