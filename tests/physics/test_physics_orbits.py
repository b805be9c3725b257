"""Orbits are Kepler's, checked against closed form, and sets of them end with the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cases import cases
from data_sets import REPOSITORY, contents, read_stream

from lssar.errors import UserError
from physics.simulate import main as simulate
from physics.systems import (
    PLANETS,
    TIME_STEPS,
    G,
    Orbits,
    magnitude,
    random_orbits,
    solar_system,
    solve_kepler,
)

SMALL = ("--points", "37", "--bins", "200", "--sequences", "2300", "--val-sequences", "170")


def random_points(seed, kind, first, count, points, bins, planets=0):
    found = np.empty((count, points, 2), dtype=np.uint16)
    for index, orbits in random_orbits(seed, kind, first, count, planets):
        found[index] = orbits.points(points, bins)
    return found


def coordinates(tokens, bins):
    """Return the middle of each bin, which divide [-50, 50]."""
    return (tokens + 0.5) * (100 / bins) - 50


def some_orbits(count=7, seed=1):
    rng = np.random.default_rng(seed)
    eccentricity = np.concatenate(([0.0, 0.97], rng.beta(0.867, 3.03, count - 2)))
    return Orbits(
        axis=rng.uniform(0.3, 32, count),
        eccentricity=eccentricity,
        periapsis=rng.uniform(0, 7, count),
        phase=rng.uniform(0, 7, count),
        planet=rng.uniform(0, 1e-3, count),
        star=rng.uniform(0.1, 5, count),
        centre=None,
        time_step=None,
    )


# --- the motion ----------------------------------------------------------------------------------


def test_keplers_equation_is_solved_by_what_bisection_finds():
    for e in cases([0.0, 0.3, 0.9, 0.999, 1 - 1e-7]):
        mean = np.concatenate((np.linspace(-9, 9, 211), [0.0, 1e-9, -1e-9, np.pi, -np.pi]))
        low, high = np.full(mean.shape, -np.pi), np.full(mean.shape, np.pi)
        turned = np.mod(mean + np.pi, 2 * np.pi) - np.pi
        for _ in range(80):
            middle = (low + high) / 2
            above = middle - e * np.sin(middle) > turned
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        # Where e is nearly 1 the equation is flat at 0: compare what goes into it.
        found = solve_kepler(mean, e)
        np.testing.assert_allclose(found - e * np.sin(found), turned, atol=1e-12)
        assert np.all((1 - e < 1e-3) | (np.abs(found - middle) < 1e-12))


def test_energy_and_angular_momentum_are_conserved_and_are_keplers():
    orbits = some_orbits()
    position, velocity = orbits.at(np.linspace(0, 40, 501)[None])
    mu = G * (orbits.planet + orbits.star)
    r = np.linalg.norm(position, axis=-1)
    energy = (velocity**2).sum(-1) / 2 - mu[:, None] / r
    momentum = position[..., 0] * velocity[..., 1] - position[..., 1] * velocity[..., 0]
    expected = np.sqrt(mu * orbits.axis * (1 - orbits.eccentricity**2))
    np.testing.assert_allclose(
        energy, np.repeat(-mu / (2 * orbits.axis), 501).reshape(-1, 501), rtol=1e-9
    )
    np.testing.assert_allclose(momentum, np.repeat(expected, 501).reshape(-1, 501), rtol=1e-9)


def test_the_path_is_an_ellipse_with_the_star_in_its_focus():
    orbits = some_orbits()
    position, _ = orbits.at(np.linspace(0, 90, 300)[None])
    r, angle = np.linalg.norm(position, axis=-1), np.arctan2(position[..., 1], position[..., 0])
    a, e = orbits.axis[:, None], orbits.eccentricity[:, None]
    conic = a * (1 - e**2) / (1 + e * np.cos(angle - orbits.periapsis[:, None]))
    np.testing.assert_allclose(r, conic, rtol=1e-9)


def test_the_period_is_keplers_third_law_and_closes_the_orbit():
    orbits = some_orbits()
    period = np.sqrt(orbits.axis**3 / (orbits.planet + orbits.star))  # in years: G = 4 pi^2
    np.testing.assert_allclose(orbits.period(), period, rtol=1e-11)
    times = np.stack((0 * period, period, 5 * period), axis=1)
    position, _ = orbits.at(times)
    np.testing.assert_allclose(position[:, 1:], position[:, :1].repeat(2, axis=1), atol=1e-9)


def test_acceleration_is_the_force_over_the_reduced_mass():
    """Newton's second law by central differences of the velocity: an independent route to F."""
    orbits, h = some_orbits(), 1e-6
    times = np.linspace(0, 3, 9)[None]
    (position, _), (_, after), (_, before) = (orbits.at(times + d) for d in (0, h, -h))
    reduced = (orbits.planet * orbits.star / (orbits.planet + orbits.star))[:, None, None]
    measured = reduced * (after - before) / (2 * h)
    np.testing.assert_allclose(measured, orbits.force(position), rtol=1e-4, atol=1e-9)


# --- sequences -----------------------------------------------------------------------------------


def test_a_sequence_is_the_time_step_then_every_planet_then_the_star():
    groups = list(random_orbits(3, "train", 0, 300))
    assert sorted(s.axis.shape[1] for _, s in groups) == list(range(1, 11))
    for _, orbits in groups:
        points, n = orbits.points(100, 7000).astype(int), orbits.axis.shape[1]
        assert points.max() < 7003, "the models' vocabulary"
        assert np.array_equal(points[:, 0], np.repeat(7000 + orbits.time_step, 2, axis=1))
        walk = coordinates(points[:, 1:], 7000)
        star = walk[:, n :: n + 1]
        step = np.array(TIME_STEPS)[orbits.time_step]
        times = step[..., None] * np.arange(walk[:, :: n + 1].shape[1])
        relative, _ = orbits.at(times)
        if n > 1:  # the star stands in the centre of mass
            assert np.abs(star - orbits.centre).max() <= 50 / 7000 + 1e-9
            first = np.clip(orbits.centre + relative[:, 0], -50, 50)
            assert np.abs(walk[:, :: n + 1] - first).max() <= 50 / 7000 + 1e-9
        else:  # the centre of mass stands still between the two
            m, big = orbits.planet, orbits.star
            steps = star.shape[1]
            centre = (m[..., None] * walk[:, ::2][:, :steps] + big[..., None] * star) / (m + big)[
                ..., None
            ]
            inside = np.abs(relative).max(axis=(1, 2, 3)) < 45
            assert np.abs(centre - orbits.centre)[inside].max() <= 50 / 7000 + 1e-9


def test_a_system_depends_on_its_number_alone():
    bins = 500
    all_at_once = random_points(5, "train", 0, 2100, 31, bins)
    assert np.array_equal(random_points(5, "train", 990, 1055, 31, bins), all_at_once[990:2045])
    assert not np.array_equal(random_points(5, "val", 0, 20, 31, bins), all_at_once[:20])
    assert not np.array_equal(random_points(6, "train", 0, 20, 31, bins), all_at_once[:20])


def test_the_distributions_are_those_of_the_source():
    """Means and bounds in closed form, within four standard errors of 3,000 orbits."""
    orbits = [drawn for _, drawn in random_orbits(0, "train", 0, 3000)]

    def drawn(name):
        return np.concatenate([getattr(o, name).ravel() for o in orbits])

    def near(values, mean):
        assert abs(values.mean() - mean) < 4 * values.std() / np.sqrt(len(values))

    near(drawn("eccentricity"), 0.867 / (0.867 + 3.03))
    near(drawn("axis"), (0.3 + 32) / 2)
    near(np.concatenate([o.star[:, 0] for o in orbits]), 1.6272 * np.exp(0.2005**2 / 2) - 0.6794)
    near(np.array([o.axis.shape[1] for o in orbits for _ in o.axis], dtype=float), 5.5)
    near(np.concatenate([o.time_step for o in orbits]).astype(float), 0.5)
    assert drawn("planet").max() == 1e-3
    assert drawn("planet").min() >= 6.01e-8
    assert drawn("star").min() >= 0.1
    assert drawn("star").max() <= 5


def force_read_from_tokens(orbits: Orbits, bins: int) -> np.ndarray:
    """Return G m1 m2 / r^2, with r and m1 / (m1 + m2) read from the bins of planet and star."""
    places = coordinates(orbits.points(101, bins)[:, 1:].astype(float), bins)
    planet, star = places[:, ::2], places[:, 1::2]
    r = np.maximum(np.linalg.norm(planet - star, axis=-1), 100 / bins)
    share = np.minimum(np.linalg.norm(star - orbits.centre, axis=-1) / r, 0.5)
    return G * (share / (1 - share) * orbits.star) * orbits.star / r**2


@pytest.mark.parametrize(("heavy", "readable"), [(True, True), (False, False)])
def test_the_mass_of_a_heavy_planet_can_be_read_from_the_tokens(heavy, readable):
    ((_, orbits),) = random_orbits(3, "forces", 0, 200, planets=1, heavy=heavy)
    truth, read = magnitude(orbits.states(101)), force_read_from_tokens(orbits, bins=500)
    error = ((read - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
    assert (error < 0.05) == readable
    if heavy:
        assert (np.unique(orbits.star), orbits.eccentricity.max() <= 0.4) == (1, True)
        assert 0.1 <= orbits.planet.min() < orbits.planet.max() <= 0.6


def test_heavy_planets_are_another_set(tmp_path, capsys):
    sizes = ["--points", "24", "--labelled", "3", "--probed", "2", "--held-out", "2"]
    simulate(["forces", *sizes, "--out", str(tmp_path / "set")])
    with pytest.raises(UserError, match="heavy"):
        simulate(["forces", *sizes, "--heavy", "--out", str(tmp_path / "set")])


def test_earth_goes_round_in_a_year_and_neptune_in_165():
    periods = dict(zip(PLANETS, solar_system().period()[:, 0], strict=True))
    assert periods["Earth"] == pytest.approx(1, rel=1e-4)
    assert periods["Mercury"] == pytest.approx(0.241, rel=2e-3)
    assert periods["Neptune"] == pytest.approx(164.9, rel=2e-3)


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    out = tmp_path_factory.mktemp("orbits") / "set"
    simulate(["orbits", *SMALL, "--shard-sequences", "700", "--workers", "0", "--out", str(out)])
    return out


def test_shards_hold_the_sequences_in_order(complete):
    names = sorted(contents(complete))
    assert names == [
        *(f"orbits_train_{i:06d}.bin" for i in (1, 2, 3, 4)),
        *("orbits_val_000000.bin", "records.json"),
    ]
    stream = read_stream(complete, "train").reshape(2300, 37, 2)
    assert np.array_equal(stream, random_points(0, "train", 0, 2300, 37, 200))
    assert read_stream(complete, "val").size == 170 * 37 * 2


def test_a_killed_simulation_continues_to_the_same_bytes(complete, tmp_path):
    """SIGKILL in the middle of a parallel run, as soon as one shard is there; then again."""
    out = tmp_path / "set"
    arguments = ["orbits", *SMALL, "--shard-sequences", "700", "--workers", "2", "--out", str(out)]
    command = [sys.executable, str(REPOSITORY / "physics/simulate.py"), *arguments]
    process = subprocess.Popen(command, start_new_session=True, cwd=REPOSITORY)
    deadline = time.monotonic() + 120
    while not list(out.glob("*.bin")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = contents(out)
    if "records.json" not in left:
        assert "progress.json" in left  # so that nobody trains on half a set
        (out / ".orbits_train_000004.bin.tmp").write_bytes(b"cut short")
    simulate(arguments)
    assert contents(out) == contents(complete)


def test_a_finished_set_is_left_alone_and_other_settings_are_refused(complete, capsys):
    before = contents(complete)
    arguments = ["orbits", *SMALL, "--shard-sequences", "700", "--out", str(complete)]
    simulate(arguments)
    assert "complete" in capsys.readouterr().out
    with pytest.raises(UserError, match="seed 0 then, 1 now"):
        simulate([*arguments, "--seed", "1"])
    assert contents(complete) == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["orbits", "--points", "3"], "--points: '3' must be at least 24"),
        (["orbits", "--sequences", "0"], "--sequences: '0' must be at least 1"),
        (["orbits", "--bins", "70000"], "65533"),
        (["stars"], "stars"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, part, tmp_path):
    with pytest.raises(UserError, match=part) as error:
        simulate([*arguments, "--out", str(tmp_path / "x")])
    assert "\n" not in str(error.value)


def test_foreign_shards_and_a_damaged_record_are_refused(tmp_path):
    (tmp_path / "a_train_000000.bin").write_bytes(b"")
    with pytest.raises(UserError, match="empty folder"):
        simulate(["orbits", *SMALL, "--out", str(tmp_path)])
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        simulate(["orbits", *SMALL, "--out", str(tmp_path)])


# --- labelled sets -------------------------------------------------------------------------------

FORCES = ("--points", "25", "--bins", "500", "--labelled", "30", "--probed", "8", "--held-out", "5")


def labelled(out, *arguments):
    simulate([*arguments, "--out", str(out)])
    labels = [np.load(out / f"labels_{split}.npy") for split in ("train", "val")]
    return json.loads((out / "records.json").read_text()), np.load(out / "states.npy"), *labels


def test_force_labels_are_newtons_law_at_the_planets_points(tmp_path):
    about, states, train, val = labelled(tmp_path, "forces", *FORCES)
    assert (about["points"], about["channels"], about["outputs"], about["unit"]) == (25, 2, 1, 1.0)
    assert train.shape == (43, 24, 1)
    assert np.isnan(train[:, ::2]).all()  # the time step and the star
    x, y, _, _, m1, m2 = np.moveaxis(states, -1, 0)
    force = G * m1 * m2 / (x**2 + y**2)
    shown = np.isfinite(train[:, 1::2, 0])
    np.testing.assert_allclose(train[:, 1::2, 0][shown], force[shown], rtol=1e-6)
    assert shown[:30].all()
    assert np.all(shown[30:].sum(axis=1) == 2)
    # Held out: the other labels of sequences that are neither trained on in full nor probed.
    assert val.shape == (5, 24, 1)
    assert np.array_equal(np.isfinite(val[:, 1::2, 0]), ~shown[38:])


def test_the_sources_selection_sees_the_labels_that_are_probed(tmp_path):
    _, _, train, val = labelled(tmp_path, "forces", *FORCES, "--selection", "source")
    assert train.shape == val.shape == (38, 24, 1)
    assert np.isfinite(val[:, 1::2]).all()
    assert np.isfinite(train[30:, 1::2]).sum() == 8 * 2


def test_the_unit_only_scales_the_labels(tmp_path):
    raw = labelled(tmp_path / "raw", "forces", *FORCES)
    scaled = labelled(tmp_path / "scaled", "forces", *FORCES, "--unit", "deviation")
    assert np.nanstd(scaled[2][:30].astype(float)) == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(scaled[2] * scaled[0]["unit"], raw[2], rtol=1e-5)


def test_the_planets_forces_point_at_the_sun_and_have_ten_labels_each(tmp_path):
    about, states, train, val = labelled(tmp_path, "planets", "--points", "101", "--bins", "900")
    assert train.shape == (8, 100, 2)
    assert about["outputs"] == 2
    assert len(about["unit"]) == 8
    for planet in range(8):
        shown = np.isfinite(train[planet, 1::2, 0])
        assert shown.sum() == 10
        assert np.isfinite(val[planet, 1::2, 0]).sum() == 10
        assert not (shown & np.isfinite(val[planet, 1::2, 0])).any()
        place, force = states[planet, shown, :2], train[planet, 1::2][shown]
        np.testing.assert_allclose(force[:, 0] * place[:, 1], force[:, 1] * place[:, 0], atol=1e-5)
        assert np.all((force * place).sum(axis=1) < 0)
        assert np.linalg.norm(force, axis=1).max() <= 1 + 1e-6
