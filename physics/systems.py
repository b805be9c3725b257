"""Draws planetary systems, computes their Kepler orbits in closed form, and makes tokens of them.

Units: astronomical units, years, solar masses; planar. A planet of mass m and a star of mass M move
on an ellipse about each other: with mu = G (m + M), mean motion n = sqrt(mu / a^3) and the
eccentric anomaly E of Kepler's equation E - e sin E = n t + phase,

    r = a (cos E - e, sqrt(1 - e^2) sin E), turned by the angle of the periapsis,
    F = -G m M r / |r|^3 on the planet.

Planets do not attract each other. Positions come from the formula at every time, so no error grows.

The distributions are those of Vafa et al. (2025), fitted there to the known exoplanets. Systems are
drawn in blocks: number i depends on the seed, the kind of set and i alone, not on how many there
are, in which shard they lie or which process makes them.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

G = 39.4784176044  # AU^3 / (solar mass year^2): 4 pi^2 to the digits of the source
EXTENT = 50.0  # AU: coordinates in [-EXTENT, EXTENT], beyond it the outermost bin
TIME_STEPS = (0.0189, 0.486)  # years: a week, and half a year
MAX_PLANETS = 10
CHANNELS = 2  # x and y
BLOCK = 1000  # sequences drawn from one random stream
KINDS = ("train", "val", "forces")  # each has its own random streams
PLANETS = tomllib.loads(Path(__file__).with_name("planets.toml").read_text(encoding="utf-8"))


class Orbits(NamedTuple):
    """Holds equally many planets about each star; fields are (stars, planets) where not noted."""

    axis: np.ndarray  # semi-major, AU
    eccentricity: np.ndarray
    periapsis: np.ndarray  # its angle
    phase: np.ndarray  # mean anomaly at t = 0
    planet: np.ndarray  # mass
    star: np.ndarray  # mass
    centre: np.ndarray  # of mass, (stars, 1, 2)
    time_step: np.ndarray  # index into TIME_STEPS, (stars, 1)

    def period(self) -> np.ndarray:
        """Return the time of one revolution in years."""
        return 2 * np.pi * np.sqrt(self.axis**3 / (G * (self.planet + self.star)))

    def at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return position and velocity, planet minus star, (..., times, 2); times (..., T)."""
        axis = self.axis[..., None]
        e = self.eccentricity[..., None]
        angle = self.periapsis[..., None]
        motion = 2 * np.pi / self.period()[..., None]
        anomaly = solve_kepler(motion * times + self.phase[..., None], e)
        cos = np.cos(anomaly)
        sin = np.sin(anomaly)
        minor = np.sqrt(1 - e * e)
        rate = motion / (1 - e * cos)  # of the eccentric anomaly
        position = turn(axis * (cos - e), axis * minor * sin, angle)
        velocity = turn(-axis * sin * rate, axis * minor * cos * rate, angle)
        return position, velocity

    def force(self, position: np.ndarray) -> np.ndarray:
        """Return the force on the planet (..., times, 2) at `position`, relative to its star."""
        cubed = np.linalg.norm(position, axis=-1, keepdims=True) ** 3
        return -G * (self.planet * self.star)[..., None, None] * position / cubed

    def sampled(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return position and velocity at the times of a sequence of `count` points."""
        times = np.arange(-(-(count - 1) // (self.axis.shape[1] + 1)))
        return self.at(np.array(TIME_STEPS)[self.time_step][..., None] * times)

    def points(self, count: int, bins: int) -> np.ndarray:
        """Return tokens (stars, count, 2) uint16: the time step, then all bodies at each time.

        At each time every planet is followed by the star. A coordinate's token is the number of its
        bin; the tokens after the last bin are the time steps.
        """
        relative, _ = self.sampled(count)
        share = np.zeros_like(self.star)  # with more than one planet the star stands still
        if share.shape[1] == 1:
            share = self.planet / (self.planet + self.star)  # the star's part of the motion
        share = share[..., None, None]
        centre = self.centre[:, :, None]
        planets = centre + (1 - share) * relative
        star = centre - (share * relative)[:, :1]
        bodies = np.concatenate((planets, star), axis=1)
        walk = bodies.transpose(0, 2, 1, 3).reshape(len(bodies), -1, 2)[:, : count - 1]
        binned = np.clip(np.floor((walk + EXTENT) * (bins / (2 * EXTENT))), 0, bins - 1)
        first = np.broadcast_to((bins + self.time_step)[..., None], (len(walk), 1, 2))
        return np.concatenate((first, binned), axis=1).astype(np.uint16)

    def states(self, count: int) -> np.ndarray:
        """Return states (stars, (count - 1) // 2, 6) of systems of one planet at points 1, 3, ...

        They are x, y, vx, vy of the planet relative to its star, and the masses of both.
        """
        position, velocity = self.sampled(count)
        masses = np.stack((self.planet, self.star), axis=-1)[:, :, None]
        masses = np.broadcast_to(masses, position.shape)
        return np.concatenate((position, velocity, masses), axis=-1)[:, 0, : (count - 1) // 2]


def turn(x: np.ndarray, y: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Return the vectors (..., 2) turned by an angle."""
    cos = np.cos(angle)
    sin = np.sin(angle)
    return np.stack((cos * x - sin * y, sin * x + cos * y), axis=-1)


def solve_kepler(mean: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the E in [-pi, pi] with E - e sin E = mean modulo 2 pi, for 0 <= e < 1.

    Halley's iteration from Danby's start. E lies in [mean, mean + e]; for e near 1 a step may leave
    that interval and is clipped to it.
    """
    mean = np.mod(mean + np.pi, 2 * np.pi) - np.pi
    side = np.where(mean < 0, -1.0, 1.0)
    mean = np.abs(mean)  # the equation is odd
    highest = np.minimum(mean + e, np.pi)
    anomaly = np.minimum(mean + 0.85 * e, highest)
    for _ in range(30):
        sin = np.sin(anomaly)
        cos = np.cos(anomaly)
        miss = anomaly - e * sin - mean
        slope = 1 - e * cos
        step = miss * slope / (slope * slope - 0.5 * miss * e * sin)
        anomaly = np.clip(anomaly - step, mean, highest)
        if np.all(np.abs(miss) < 1e-13):
            break
    return side * anomaly


def magnitude(states: np.ndarray) -> np.ndarray:
    """Return the force of Newton's law, G m1 m2 / r^2, of states (..., 6)."""
    return G * states[..., 4] * states[..., 5] / (states[..., 0] ** 2 + states[..., 1] ** 2)


def random_orbits(seed: int, kind: str, first: int, count: int, planets=0, heavy=False) -> Iterator:
    """Yield (indices, orbits) of stars `first` ... `first + count - 1`, by number of planets.

    `planets` above 0 fixes that number. Planets that are `heavy` move a star of one solar mass so
    far that their own mass can be read from the tokens.
    """
    for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
        number, drawn = draw_block(seed, kind, block)
        if heavy:
            drawn = make_heavy(drawn, seed, kind, block)
        if planets:
            number = np.full(BLOCK, planets)
        index = np.arange(block * BLOCK, (block + 1) * BLOCK) - first
        wanted = (index >= 0) & (index < count)
        for n in np.unique(number[wanted]):
            chosen = wanted & (number == n)
            yield index[chosen], Orbits(*(values[chosen, :n] for values in drawn))


def draw_block(seed: int, kind: str, block: int) -> tuple[np.ndarray, Orbits]:
    """Draw the number of planets of each of BLOCK stars, and the orbits of MAX_PLANETS."""
    rng = np.random.default_rng([seed, KINDS.index(kind), block])
    number = rng.integers(1, MAX_PLANETS + 1, BLOCK)
    each = (BLOCK, MAX_PLANETS)
    star = np.clip(rng.lognormal(0, 0.2005, BLOCK) * 1.6272 - 0.6794, 0.1, 5.0)
    return number, Orbits(
        axis=rng.uniform(0.3, 32.0, each),
        eccentricity=rng.beta(0.867, 3.03, each),
        periapsis=rng.uniform(0, 2 * np.pi, each),
        phase=rng.uniform(0, 2 * np.pi, each),
        planet=np.clip(rng.gamma(0.3202, 1.1056e-3, each) + 6.01e-8, 1e-9, 1e-3),
        star=np.repeat(star[:, None], MAX_PLANETS, axis=1),
        centre=rng.standard_normal((BLOCK, 1, 2)),
        time_step=rng.integers(0, len(TIME_STEPS), (BLOCK, 1)),
    )


def make_heavy(drawn: Orbits, seed: int, kind: str, block: int) -> Orbits:
    """Give the systems of a block heavy planets, stars of one solar mass and half-year steps."""
    rng = np.random.default_rng([seed, KINDS.index(kind), block, 1])
    each = drawn.axis.shape
    return drawn._replace(
        axis=rng.uniform(3, 12, each),
        eccentricity=rng.uniform(0, 0.4, each),
        planet=rng.uniform(0.1, 0.6, each),
        star=np.ones(each),
        centre=np.zeros((len(drawn.axis), 1, 2)),
        time_step=np.ones((len(drawn.axis), 1), dtype=int),
    )


def solar_system() -> Orbits:
    """Return the eight planets, each alone with the Sun, in half-year steps from the periapsis."""
    mass, axis, eccentricity = np.array(list(PLANETS.values())).T[..., None]
    return Orbits(
        axis=axis,
        eccentricity=eccentricity,
        periapsis=np.zeros_like(mass),
        phase=np.zeros_like(mass),
        planet=mass,
        star=np.ones_like(mass),
        centre=np.zeros((len(PLANETS), 1, 2)),
        time_step=np.ones_like(mass, dtype=int),
    )
