"""Symbolic regression finds what is there, chooses as PySR does, and records say what it was."""

import json

import numpy as np
import pytest
import torch
from data_sets import contents

pytest.importorskip("scipy")  # requirements-physics.txt
pytest.importorskip("pyoperon")

from evaluating.checkpoints import open_checkpoints
from evaluating.results import read_results
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from physics import discover, regression
from physics.discover import farthest_points
from physics.force import write_origin
from physics.model import OrbitModel, OrbitModelConfig
from physics.regression import (
    Candidate,
    choose,
    constant,
    evaluate,
    exponents,
    newtonian,
)
from physics.simulate import main as simulate
from physics.systems import G
from training.checkpoint import CheckpointInfo, save_model

QUICK = {"population": 300, "evaluations": 20_000}
LAW = f"{G} * m1 * m2 / r**2"


def some_states(count=400, seed=0):
    """Return r, m1, m2 over the ranges of the protocol."""
    rng = np.random.default_rng(seed)
    r, m1 = rng.uniform(0.4, 32, count), rng.gamma(0.32, 1.1e-3, count) + 1e-7
    return np.stack((r, np.minimum(m1, 1e-3), rng.lognormal(0, 0.3, count)), axis=1)


# --- the choice ----------------------------------------------------------------------------------


def test_the_choice_is_where_the_loss_falls_most_for_a_node():
    front = [
        Candidate("1", 1, 1.0),
        Candidate("m1", 3, 0.5),  # log 2 / 2 nodes
        Candidate("m1/r", 5, 0.6),  # no better than a simpler one
        Candidate("m1/r**2", 8, 0.001),  # log 500 / 5
        Candidate("noise", 20, 0.0009),  # log 1.1 / 12
        Candidate("broken", 4, float("nan")),
    ]
    chosen, score = choose(front[::-1])
    assert chosen.equation == "m1/r**2"
    assert score == pytest.approx(np.log(500) / 5)
    assert choose([front[0]]) == (front[0], 0.0)
    with pytest.raises(UserError, match="no equation"):
        choose([front[-1]])


def test_an_exact_equation_does_not_divide_by_zero():
    chosen, score = choose(
        [Candidate("1", 1, 1.0), Candidate("m1", 3, 0.0), Candidate("r", 9, 0.0)]
    )
    assert chosen.equation == "m1"
    assert np.isfinite(score)


def test_exponents_are_those_of_a_power_law_whatever_its_constant():
    found = exponents("-26.8 * m1 / r**2 * m2**0.5", some_states())
    assert found == pytest.approx({"r": -2, "m1": 1, "m2": 0.5}, abs=1e-6)
    assert exponents("m1 / r**2 - 1e-4", some_states()) == pytest.approx(
        {"r": -2, "m1": 1, "m2": 0}, abs=1e-6
    )
    assert exponents("7.0", some_states()) == {"r": None, "m1": None, "m2": None}


def test_newtons_form_is_told_from_others_and_gives_its_constant():
    def entry(text):
        return {"equation": text, "exponents": exponents(text, some_states())}

    assert newtonian(entry(LAW))
    assert newtonian(entry("27.02 * m1 / r**2 - 0.0001"))
    for other in (
        "m1 / r",
        "m2 / r**2",
        "m1 * m2 / r**3",
        "(sin(1/sin(r - 0.24)) + 1.45)/(1/r + m2)",
    ):
        assert not newtonian(entry(other)), other
    assert constant([entry("m1"), entry("27.02 * m1 / r**2 - 0.0001")]) == pytest.approx(27.02)
    assert constant([entry(LAW)]) == pytest.approx(G)
    assert constant([entry("m1")]) is None


# --- the engine ----------------------------------------------------------------------------------


def test_operon_recovers_newtons_law_from_exact_forces():
    x = some_states()
    y = evaluate(LAW, x)
    found = regression.discover(regression.operon, x, y, QUICK)
    assert found["exponents"] == pytest.approx({"r": -2, "m1": 1, "m2": 1}, abs=0.02)
    np.testing.assert_allclose(evaluate(found["equation"], x), y, rtol=1e-3, atol=1e-4 * y.std())
    assert found["complexity"] <= regression.SETTINGS["operon"]["max_length"] == 20


def test_operon_gives_the_same_front_for_the_same_seed():
    x = some_states(100)
    y = evaluate("m1 / r", x)
    effort = {"population": 100, "evaluations": 2000}
    assert regression.operon(x, y, 1, effort) == regression.operon(x, y, 1, effort)


def test_an_engine_that_is_not_there_is_one_line(monkeypatch):
    assert regression.available("operon") == "operon"

    def refuse(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(regression.importlib, "import_module", refuse)
    with pytest.raises(UserError, match=r"requirements-physics.txt"):
        regression.available()
    with pytest.raises(UserError, match="--engine pysr"):
        regression.available("pysr")


# --- the whole -----------------------------------------------------------------------------------


def test_farthest_points_spread():
    line = np.stack((np.arange(11.0), np.zeros(11)), axis=1)
    assert farthest_points(line, 3).tolist() == [0, 10, 5]
    assert sorted(farthest_points(line, 40)) == list(range(11))


def test_r_squared_and_rank_correlation_in_closed_form():
    truth = np.array([1.0, 2.0, 3.0, 100.0])
    assert discover.r_squared(truth, truth) == 1
    assert discover.r_squared(np.full(4, truth.mean()), truth) == 0
    assert discover.rank_correlation(np.log(truth), truth) == pytest.approx(1)
    assert discover.rank_correlation(-truth, truth) == pytest.approx(-1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Sets, and two runs whose 'predictions' are known: one follows Newton's law, one nothing."""
    here = tmp_path_factory.mktemp("discover")
    sizes = ("--labelled", "60", "--probed", "20", "--held-out", "3")
    simulate(["forces", "--points", "61", *sizes, "--out", str(here / "forces")])
    simulate(["planets", "--points", "61", "--out", str(here / "planets")])
    states = np.load(here / "forces/states.npy")
    law = discover.magnitude(states)[..., None]
    vectors = discover.Vectors(here / "planets").truth
    turned = np.stack((-vectors[..., 1], vectors[..., 0]), axis=-1)
    for name, magnitudes, forces in (
        ("lssar", law * 0.7, vectors * 0.7),
        ("softmax", np.full_like(law, 1e-5) * np.sin(states[..., :1]), turned),
    ):
        run = here / f"run-{name}"
        run.mkdir()
        save_model(run, orbit_model(name), CheckpointInfo(name, 1, 60))
        for task, values in (("magnitude", magnitudes), ("vector", forces)):
            folder = here / f"run-{name}-{task}"
            folder.mkdir()
            np.save(folder / "forces.npy", values.astype(np.float32))
            write_origin(folder, identity_of(run), f"tuned-{name}-{task}")
    return here


def orbit_model(attention, p=None, layers=1):
    sizes = {"layers": layers, "heads": 1, "width": 8, "vocab_size": 53, "vocab_rows": 53}
    ends = {"positions": "none", "channels": 2, "learned_positions": 60}
    return OrbitModel(OrbitModelConfig(**sizes, **ends, attention=get_mechanism(attention, p=p)))


def identity_of(run):
    return open_checkpoints([str(run)], OrbitModel)[0].identity


def arguments(world, out, *more):
    runs = [str(world / f"run-{name}") for name in ("softmax", "lssar")]
    places = ("--forces", str(world / "forces"), "--planets", str(world / "planets"))
    effort = ("--population", "60", "--evaluations", "1000", "--states", "300")
    return [*runs, *places, "--engine", "operon", *effort, "--out", str(out), *more]


def found(out):
    """Return {(name, quantity): record}."""
    results = read_results(out)
    return {(results.runs[r.run]["run"], r.quantity): r for r in results.records}


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "nano" / "physics.json"
    discover.main(arguments(world, out))
    return out


def test_the_numbers_tell_the_law_from_its_absence(results):
    numbers = found(results)
    names = ("oracle", "truth", "softmax", "lssar")
    powers = ("exponent_r", "exponent_m1", "exponent_m2")
    everywhere = {(name, q) for name in names for q in ("constant", "R2", "rank", *powers)}
    blind = {(f"blind-s{seed}", "R2") for seed in range(5)}
    vectors = {(name, "cosine") for name in ("softmax", "lssar")}
    assert set(numbers) == everywhere | vectors | blind
    assert all(0 < numbers[key].value < 1 for key in blind)
    for name in names:
        laws = numbers[name, "constant"]
        assert len(laws.details["equations"]) == 5
        assert laws.details["newtonian"] == sum(map(newtonian, laws.details["equations"]))
        assert laws.value == pytest.approx(constant(laws.details["equations"]))
    assert numbers["softmax", "constant"].value is None
    for name in ("truth", "lssar"):
        fitted = [numbers[name, power].value for power in powers]
        assert fitted == pytest.approx([-2, 1, 1], abs=1e-4)
    assert numbers["truth", "R2"].value == pytest.approx(1)
    assert 0 < numbers["softmax", "R2"].details["positive"] < 1
    for name, cosine in (("lssar", 1), ("softmax", 0)):
        record = numbers[name, "cosine"]
        assert record.value == pytest.approx(cosine, abs=1e-6)
        for planet in ("Mercury", "Neptune"):
            assert record.details["planets"][planet]["cosine"] == pytest.approx(cosine, abs=1e-6)


def test_every_number_names_the_model_that_made_its_forces(results):
    file = read_results(results)
    made_by = {(file.runs[r.run]["run"], r.quantity): r.run for r in file.records}
    assert made_by["lssar", "R2"] == made_by["lssar", "constant"] == "tuned-lssar-magnitude"
    assert made_by["lssar", "cosine"] == "tuned-lssar-vector"
    assert file.runs["tuned-lssar-vector"]["model"]["attention"]["name"] == "lssar"
    figures = {"physics.png", "physics-earth.png", "physics-planets.png"}
    assert figures <= set(contents(results.parent))


def test_without_the_planets_mass_a_model_explains_what_does_not_vary_with_it(tmp_path):
    # Heavy planets: of others a single one may have all of the large forces, hence one mass.
    sizes = ("--points", "61", "--labelled", "60", "--probed", "20", "--held-out", "3")
    simulate(["forces", "--heavy", *sizes, "--out", str(tmp_path / "forces")])
    magnitudes = discover.Magnitudes(tmp_path / "forces", 300)
    rows = np.arange(len(magnitudes.truth))
    assert magnitudes.blind(rows) < 0.9
    magnitudes.truth = magnitudes.truth / magnitudes.inputs[:, 1]  # the acceleration
    assert magnitudes.blind(rows) == pytest.approx(1)


def test_stars_of_one_mass_leave_an_oracle_and_the_other_exponents(tmp_path):
    sizes = ["--labelled", "60", "--probed", "9", "--held-out", "5", "--points", "24"]
    simulate(["forces", "--heavy", *sizes, "--out", str(tmp_path / "forces")])
    magnitudes = discover.Magnitudes(tmp_path / "forces", 50)
    assert np.ptp(magnitudes.inputs[:, 2]) == 0
    assert np.isfinite(magnitudes.oracle()).all()
    found = discover.fitted_exponents(magnitudes.inputs, magnitudes.truth)
    assert found == pytest.approx({"exponent_r": -2, "exponent_m1": 1})


def test_the_oracle_averages_the_two_nearest_labelled_states(world):
    magnitudes = discover.Magnitudes(world / "forces", 50)
    labelled = magnitudes.labelled
    assert len(labelled) == 60 * 30 + 20 * 2
    scaled = (labelled - labelled.mean(0)) / labelled.std(0)
    asked = (magnitudes.states[7] - labelled.mean(0)) / labelled.std(0)
    near = np.argsort(((scaled - asked) ** 2).sum(1))[:2]
    expected = discover.magnitude(labelled)[near].mean()
    assert magnitudes.oracle()[7] == pytest.approx(expected)


def test_finished_regressions_are_kept_and_the_rest_is_the_same(world, results, monkeypatch):
    whole = json.loads(results.read_text())
    cut = json.loads(results.read_text())
    (laws,) = [
        record
        for record in cut["records"]
        if (record["run"], record["quantity"]) == ("tuned-lssar-magnitude", "constant")
    ]
    fifth = laws["details"]["equations"].pop()
    results.write_text(json.dumps(cut))
    done = []
    search = regression.operon
    monkeypatch.setitem(
        regression.ENGINES, "operon", lambda *given: done.append(1) or search(*given)
    )
    discover.main(arguments(world, results))
    assert len(done) == 3  # the three restarts of one regression
    again = json.loads(results.read_text())
    assert again["records"][-1]["details"]["equations"][-1] == fifth
    key = json.dumps
    assert sorted(map(key, again["records"])) == sorted(map(key, whole["records"]))
    with pytest.raises(UserError, match="states = 300, this is 200"):
        discover.main([*arguments(world, results), "--states", "200"])


@pytest.fixture
def searches(monkeypatch):
    """Return one law instead of searching, and remember every call."""
    done = []

    def engine(x, y, seed, effort):
        done.append(seed)
        return [regression.Candidate(LAW, 9, 0.0)]

    monkeypatch.setitem(regression.ENGINES, "operon", engine)
    return done


def second_seed(world, tmp_path, name="lssar-s1"):
    """Make a run with other weights, whose predictions are three times LSSAR's."""
    run = tmp_path / name
    run.mkdir()
    torch.manual_seed(1)
    save_model(run, orbit_model("lssar"), CheckpointInfo(name, 1, 60, seed=1))
    for task in ("magnitude", "vector"):
        folder = tmp_path / f"{name}-{task}"
        folder.mkdir()
        np.save(folder / "forces.npy", 3 * np.load(world / f"run-lssar-{task}/forces.npy"))
        write_origin(folder, identity_of(run), f"tuned-{name}-{task}")
    return run


def test_equations_of_a_run_that_was_trained_again_are_found_again(world, tmp_path, searches):
    run, out = second_seed(world, tmp_path), tmp_path / "nano" / "physics.json"
    given = [f"{run}/", *arguments(world, out)]  # a shell's completion adds the slash
    discover.main(given)
    assert len(searches) == 5 * 5 * 3
    discover.main(given)
    assert len(searches) == 5 * 5 * 3  # nothing is done again
    write_origin(tmp_path / "lssar-s1-magnitude", identity_of(run), "fine-tuned again")
    discover.main(given)
    assert len(searches) == (5 + 1) * 5 * 3
    save_model(run, orbit_model("lssar"), CheckpointInfo("lssar-s1", 2, 60, seed=1))
    with pytest.raises(UserError, match="fine-tuned from other weights"):
        discover.main(given)


def test_two_seeds_of_a_mechanism_are_two_runs_with_their_seeds(world, tmp_path, searches):
    run, out = second_seed(world, tmp_path, "other"), tmp_path / "nano" / "physics.json"
    discover.main([str(run), *arguments(world, out)])
    results = read_results(out)
    scores = {
        (results.runs[r.run]["run"], results.runs[r.run].get("seed")): r.value
        for r in results.select(quantity="R2")
    }
    assert set(scores) == {
        *(("oracle", None), ("truth", None), ("softmax", None)),
        *(("lssar", None), ("lssar-s1", 1)),
        *((f"blind-s{seed}", seed) for seed in range(5)),
    }
    assert scores["lssar", None] != scores["lssar-s1", 1]


def test_a_run_with_another_exponent_has_another_name(world, tmp_path, searches):
    run, out = second_seed(world, tmp_path, "lssar-p3"), tmp_path / "nano" / "physics.json"
    model = orbit_model("lssar", p=3)
    save_model(run, model, CheckpointInfo("lssar-p3", 1, 60, seed=2))
    for task in ("magnitude", "vector"):
        write_origin(tmp_path / f"lssar-p3-{task}", identity_of(run), f"tuned-p3-{task}")
    discover.main([str(run), *arguments(world, out)])
    names = {name for name, _ in found(out) if not name.startswith("blind")}
    assert names == {"oracle", "truth", "softmax", "lssar", "lssar-p3-s2"}


def test_two_runs_of_one_mechanism_and_seed_are_refused(world, tmp_path):
    run = second_seed(world, tmp_path, "x")
    save_model(run, orbit_model("lssar", layers=2), CheckpointInfo("x", 1, 60))
    for task in ("magnitude", "vector"):
        write_origin(tmp_path / f"x-{task}", identity_of(run), f"tuned-x-{task}")
    with pytest.raises(UserError, match="another run is of 'lssar' too"):
        discover.main([str(run), *arguments(world, tmp_path / "physics.json")])


def test_predictions_that_are_not_finite_are_refused(world, tmp_path):
    run = second_seed(world, tmp_path)
    forces = np.load(tmp_path / "lssar-s1-magnitude/forces.npy")
    forces[3, 5] = np.nan
    np.save(tmp_path / "lssar-s1-magnitude/forces.npy", forces)
    with pytest.raises(UserError, match="not finite"):
        discover.main([str(run), *arguments(world, tmp_path / "physics.json")])


def test_a_force_of_zero_has_no_direction_and_no_nan():
    zero, one = np.zeros((1, 2)), np.array([[3.0, 4.0]])
    assert discover.cosines(zero, one).tolist() == [0]
    assert discover.cosines(one, one).tolist() == [1]


def test_missing_predictions_say_how_to_make_them(world, tmp_path):
    run = tmp_path / "bare"
    run.mkdir()
    save_model(run, orbit_model("softmax"), CheckpointInfo("bare", 1, 60))
    places = ("--forces", str(world / "forces"), "--planets", str(world / "planets"))
    with pytest.raises(UserError, match=r"physics/force.py"):
        discover.main([str(run), *places, "--out", str(tmp_path / "x.json")])
