"""Kepler orbits in closed form, many at once.

Units: astronomical units, years, solar masses; planar. A planet of mass m and a star of mass M move
on an ellipse about each other: with mu = G (m + M), mean motion n = sqrt(mu / a^3) and the
eccentric anomaly E of Kepler's equation E - e sin E = n t + phase,

    r = a (cos E - e, sqrt(1 - e^2) sin E), turned by the angle of the periapsis,
    F = -G m M r / |r|^3 on the planet.

Planets do not pull at each other. Positions come from the formula at every time, so no error grows.
"""

from dataclasses import dataclass

import numpy as np

G = 39.4784176044  # AU^3 / (solar mass year^2): 4 pi^2 to the digits of the source


@dataclass(frozen=True)
class Orbits:
    """The relative orbits of planets about their stars; every field of one shape (...)."""

    axis: np.ndarray  # semi-major, AU
    eccentricity: np.ndarray
    periapsis: np.ndarray  # its angle
    phase: np.ndarray  # mean anomaly at t = 0
    planet: np.ndarray  # mass
    star: np.ndarray  # mass

    def period(self) -> np.ndarray:
        return 2 * np.pi * np.sqrt(self.axis**3 / (G * (self.planet + self.star)))

    def at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Position and velocity of planet minus star, (..., times, 2) each; times (..., T)."""
        axis, e = self.axis[..., None], self.eccentricity[..., None]
        motion = 2 * np.pi / self.period()[..., None]
        anomaly = solve_kepler(motion * times + self.phase[..., None], e)
        cos, sin, minor = np.cos(anomaly), np.sin(anomaly), np.sqrt(1 - e * e)
        rate = motion / (1 - e * cos)  # of the eccentric anomaly
        position = np.stack((axis * (cos - e), axis * minor * sin), axis=-1)
        velocity = np.stack((-axis * sin * rate, axis * minor * cos * rate), axis=-1)
        c, s = np.cos(self.periapsis)[..., None], np.sin(self.periapsis)[..., None]
        return _turn(position, c, s), _turn(velocity, c, s)

    def force(self, position: np.ndarray) -> np.ndarray:
        """On the planet, (..., times, 2), where planet minus star is `position`."""
        cubed = np.linalg.norm(position, axis=-1, keepdims=True) ** 3
        return -G * (self.planet * self.star)[..., None, None] * position / cubed


def _turn(vectors: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    x, y = vectors[..., 0], vectors[..., 1]
    return np.stack((cos * x - sin * y, sin * x + cos * y), axis=-1)


def solve_kepler(mean: np.ndarray, e: np.ndarray) -> np.ndarray:
    """The E in [-pi, pi] with E - e sin E = mean modulo 2 pi, for 0 <= e < 1.

    Halley's iteration from Danby's start; for e near 1 a step may leave [mean, mean + e], where E
    must lie, and is cut there.
    """
    mean = np.mod(mean + np.pi, 2 * np.pi) - np.pi
    e = np.broadcast_to(e, mean.shape)
    side = np.where(mean < 0, -1.0, 1.0)
    mean = np.abs(mean)  # the equation is odd
    low, high = mean, np.minimum(mean + e, np.pi)
    anomaly = np.minimum(mean + 0.85 * e, high)
    for _ in range(30):
        sin, cos = np.sin(anomaly), np.cos(anomaly)
        miss = anomaly - e * sin - mean
        slope = 1 - e * cos
        step = miss * slope / (slope * slope - 0.5 * miss * e * sin)
        anomaly = np.clip(anomaly - step, low, high)
        if np.all(np.abs(miss) < 1e-13):
            break
    return side * anomaly
