"""Claims: each is judged on what it says, and never against its own table, figure or page."""

from pathlib import Path

import pytest
import report_results as made

from evaluating.results import AS_TRAINED
from paper.claims import OUR_CONTROLS, PAPER_CLAIMS, findings, judge_all, judged, show_claims
from paper.evidence import Evidence
from paper.experiments import SCALES, SWEPT_P, all_tables
from paper.statistic import FAILS, HOLDS, OPEN
from paper.tables import build

ROOT = Path(__file__).parents[2]


def evidence(folder: Path) -> Evidence:
    folder.mkdir(parents=True, exist_ok=True)
    return Evidence("nano", folder)


def claim(words: str):
    return next(c for c in (*PAPER_CLAIMS, *OUR_CONTROLS) if words in c.text)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("found", [*PAPER_CLAIMS, *OUR_CONTROLS], ids=lambda c: c.text[:40])
def test_every_claim_names_rows_and_lengths_that_its_table_has(found, scale):
    table = all_tables(scale).get(found.table)
    if table is None:
        return  # as sizes at the scale of one size: it is not judged there
    keys = {row.key for row in table.rows}
    asked = [(row, other) for row, _, other, _ in found.pairs]
    known = [pair for pair in asked if keys.issuperset(pair)]
    sizes = found.table == "scaling_edu"  # it names the sizes of both scales
    assert bool(known) == bool(asked)
    assert sizes or known == asked or found.caveat or found.open
    factors = {c.factor for c in table.columns} | {c.quantity for c in table.columns}
    assert all(set(at) & factors for *_, at in found.pairs)


@pytest.mark.parametrize("scale", SCALES)
def test_a_claim_is_judged_where_its_table_is(scale, tmp_path):
    tables = all_tables(scale)
    groups = judge_all(Evidence(scale, tmp_path))
    for group, known in zip(groups, (PAPER_CLAIMS, OUR_CONTROLS), strict=True):
        assert [j.claim for j in group] == [c for c in known if c.table in tables]


def test_claims_of_the_paper_say_where_and_ours_are_apart():
    assert all(c.where for c in PAPER_CLAIMS)
    assert not any(c.where for c in OUR_CONTROLS)


def test_without_measurements_every_claim_is_open_and_nothing_was_found(tmp_path):
    found = evidence(tmp_path / "nano")
    for group in judge_all(found):
        assert {(j.verdict, j.settles) for j in group} == {(OPEN, "not measured")}
    assert findings(found) == []


def world(root: Path, curves: dict[str, list[float]], gain: float = 0.5) -> Evidence:
    for key, values in curves.items():
        for seed in range(3):
            made.curve(root, key, seed, [v + 0.001 * seed for v in values], gain)
    return evidence(root)


HEADLINE = ("softmax", "ssmax", "lssa", "lssar-p3", "lssar-p15")
FLAT, CLIMBING = [1.7] * 5, [1.7, 1.9, 2.4, 2.9, 3.4]


def test_in_a_world_of_a_flat_lssar_its_claims_hold_and_the_controls_decide_the_rest(tmp_path):
    curves = dict.fromkeys(HEADLINE, CLIMBING) | {"lssar-p15": FLAT}
    found = world(tmp_path / "nano", curves)
    assert judged(claim("dramatically improve"), found).verdict == HOLDS
    assert judged(claim("nearly constant"), found).verdict == HOLDS
    assert judged(claim("as good as softmax at the training"), found).verdict == HOLDS
    assert judged(claim("With all of 16x"), found).verdict == HOLDS
    sentences = findings(found)
    assert len(sentences) == 3
    assert sentences[0].startswith("At 16 times the training length LSSAR has degraded less")
    assert "is open" in sentences[1], "window and flat LSSAR are equal: neither beats the other"


def test_in_the_opposite_world_they_do_not_hold_and_the_findings_say_so(tmp_path):
    curves = dict.fromkeys(HEADLINE, FLAT) | {"lssar-p15": CLIMBING}
    found = world(tmp_path / "nano", curves, gain=-0.2)
    assert judged(claim("dramatically improve"), found).verdict == FAILS
    assert judged(claim("nearly constant"), found).verdict == FAILS
    assert judged(claim("With all of 16x"), found).verdict == FAILS
    assert "not degraded less" in findings(found)[0]
    assert "does not harm every model" in findings(found)[2]


def test_equal_needs_the_interval_inside_the_margin_and_not_a_lack_of_evidence(tmp_path):
    root = tmp_path / "nano"
    for seed, gap in enumerate((-0.02, 0.0, 0.026)):
        made.curve(root, "softmax", seed, FLAT)
        made.curve(root, "lssar-p15", seed, [v + gap for v in FLAT])
    found = judged(claim("as good as softmax at the training"), evidence(root))
    assert found.verdict == OPEN
    assert "seeds would settle it" in found.settles


@pytest.mark.parametrize(("best", "expected"), [(20, OPEN), (15, HOLDS), (1, OPEN)])
def test_a_best_exponent_at_the_edge_of_the_sweep_confirms_nothing(tmp_path, best, expected):
    root = tmp_path / "nano"
    for p in SWEPT_P:
        for seed in range(3):
            loss = 2 + 0.1 * abs(p - best) + 0.001 * seed
            made.losses(root, f"lssar-p{p}", seed, {(AS_TRAINED, 2048): loss})
    found = judged(claim("best performance in this sweep"), evidence(root))
    assert found.verdict == expected
    assert ("edge of the sweep" in found.settles) == (expected == OPEN)


def test_passkeys_of_unequal_budgets_stay_open_whatever_the_numbers(tmp_path):
    root = tmp_path / "nano"
    for seed in range(3):
        for key, share in (("passkey-softmax", 0.0), ("passkey-lssar-more", 0.5 + 0.01 * seed)):
            records = [made.record("accuracy", share, length=n) for n in (384, 576, 768, 1536)]
            path = root / f"passkey/{key}-s{seed}.json"
            made.results(path, f"{key}-s{seed}", seed, records, kind="passkey")
    found = judged(claim("succeeds far beyond"), evidence(root))
    assert found.verdict == OPEN
    assert "10,000 steps" in found.settles
    assert "+51 [+49, +53], 3 seeds" in found.points[0].text


def test_one_seed_is_never_more_than_open_however_large_the_difference(tmp_path):
    root = tmp_path / "nano"
    for key, values in ((k, CLIMBING) for k in HEADLINE):
        made.curve(root, key, 0, FLAT if key == "lssar-p15" else values)
    for group in judge_all(evidence(root)):
        assert {j.verdict for j in group} == {OPEN}


def test_a_claim_and_its_table_have_the_very_same_comparison(tmp_path):
    found = evidence(made.nano(tmp_path / "results") / "nano")
    shared = 0
    for one in (*PAPER_CLAIMS, *OUR_CONTROLS):
        table = found.tables[one.table]
        cells = {
            (line.row.title, title): entry.comparison
            for built in [build(found, table)]
            for line in built.lines
            for entry, (_, title) in zip(line.entries, built.columns, strict=True)
        }
        base = table.base
        for point in judged(one, found).points if one.pairs and base else ():
            row, _, rest = point.label.partition(" − ")
            if point.found.n and rest.startswith(f"{base.title}, "):
                heading = rest.removeprefix(f"{base.title}, ")
                assert point.found is cells[row, heading]
                shared += 1
    assert shared > 10


def test_the_committed_results_give_the_findings_that_readme_tells():
    found = Evidence("nano", ROOT / "results/nano")
    assert not found.problems
    first, second, third = findings(found)
    assert first.startswith("At 16 times the training length LSSAR has degraded less than softmax")
    assert second.endswith("3 seeds).")
    assert "beats both" in second
    assert third.startswith("No model gains from far context")
    printed = show_claims(found)
    assert "the best exponent here, p = 20, is the edge of the sweep" in printed
    assert printed.index("the paper's claims") < printed.index("our controls")
