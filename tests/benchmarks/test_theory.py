"""The paper's derivations, computed: against autograd, closed forms and integrals."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import cases

from benchmarks import theory
from evaluating.results import read_results
from paper.figures import draw
from paper.tables import fill_all


def test_the_gradient_of_stage_one_is_autograds():
    for phi, x in cases([torch.exp, F.softplus], [-3.0, 0.7, 9.0, 19.0]):
        others = theory.scores(draw=3, keys=37)[0, 1:]
        score = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        weight = phi(score) / (phi(score) + phi(others).sum())
        (wanted,) = torch.autograd.grad(weight, score)
        assert math.exp(theory.log_gradient(phi, others, x)) == pytest.approx(
            wanted.item(), rel=1e-9
        )


def test_slopes_are_those_of_the_derivation():
    others = theory.scores(draw=0)[0, 1:]
    assert theory.slope(torch.exp, others, 60.0) == pytest.approx(-60, rel=1e-6)
    total = F.softplus(others).sum().item()
    for x in (50.0, 5e3, 5e7):  # d log [K / (x + K)^2] / d log x
        assert theory.slope(F.softplus, others, x) == pytest.approx(-2 * x / (x + total), rel=1e-4)


def test_the_gradient_at_a_weight_is_found_where_the_weight_is():
    """Softmax: dw/dx = w (1 - w) everywhere, so the ratio is one."""
    others = theory.scores(draw=1)[0, 1:]
    for weight in (0.5, 0.99):
        assert theory.gradient_at(torch.exp, False, others, weight) == pytest.approx(1, rel=1e-6)


def test_overflow_begins_where_the_types_largest_number_does():
    for kind, largest in cases([("fp16", 65504), ("fp32", torch.finfo().max)]):
        for keys in (1024, 16384):
            wanted = (1 + largest ** (1 / 15)) / keys
            assert theory.overflow(theory.TYPES[kind], keys) == pytest.approx(wanted, rel=2e-3)
        assert theory.overflow(torch.float64, 1024) == 1


@pytest.mark.parametrize("row", ["cos-softmax", "lssar-p15"])
def test_the_cosine_needed_is_that_of_the_average_row(row, dim=64, keys=4096):
    """Random cosines have the density (1 - c^2)^((d - 3) / 2)."""
    c = np.linspace(-1, 1, 20001)[1:-1]
    density = (1 - c * c) ** ((dim - 3) / 2)
    density, scale = density / density.sum(), math.log(dim) * math.log(keys)

    def weight(cosine: float) -> float:
        f, mine = np.exp(scale * (c - 1)), np.exp(scale * (cosine - 1))
        if row == "lssar-p15":
            f, mine = np.logaddexp(0, scale * c), np.logaddexp(0, scale * cosine)
            mean = ((keys - 1) * density @ f + mine) / keys
            f, mine = np.maximum(f - mean, 0) ** 15, max(mine - mean, 0) ** 15
        return mine / (mine + (keys - 1) * density @ f)

    cosines = np.linspace(0, 1, 2001)
    wanted = next(x for x in cosines if weight(x) >= 0.5)
    found = [theory.cosine_needed(row, dim, keys, draw) for draw in range(5)]
    assert np.mean(found) == pytest.approx(wanted, abs=0.03)


def test_where_even_a_perfect_match_is_not_enough_there_is_no_cosine():
    assert theory.cosine_needed("lssa", 64, 1024, draw=0) is None


def test_suppressed_keys_and_ties_can_be_told_from_others():
    assert theory.feedback(0, F.relu, False) == 0
    assert theory.feedback(0, F.softplus, True) == 1
    assert theory.ties_error(0, p=15) > 0.1 > theory.ties_error(0)


def test_the_command_fills_its_tables_and_decides_their_claims(tmp_path, capsys):
    out = tmp_path / "nano/theory/theory.json"
    theory.main(["--out", str(out), "--draws", "4"])
    assert {r.quantity for r in read_results(out).records} >= {"rate", "dead", "cosine_needed"}
    assert out.with_suffix(".png").stat().st_size > 3000
    filled, problems = fill_all("nano", out.parent)
    assert not problems
    for name in ("theory", "overflow", "half_weight"):
        built = filled[name]
        assert built.is_measured
        assert not any(built.missing(row) for row in built.rows), "no row has all columns"
        assert draw(built) is None, "the command has drawn it"
        for column in built.columns:
            assert any(built.cell(row, column).n for row in built.rows), column
