"""Figures of physics/discover.py: force vectors along the orbits, magnitudes against the truth."""

from pathlib import Path

import numpy as np

from physics.systems import PLANETS
from support import plots

SAMPLES = 40  # arrows per panel
ORDER = ("truth", "lssar", "softmax")  # the paper's panels, from left to right


def draw(results, models: list, magnitudes, vectors) -> list[Path]:
    """All figures beside the results; the PNG files."""

    def place(model) -> int:
        key = model.mechanism or model.name
        return ORDER.index(key) if key in ORDER else len(ORDER)

    shown = sorted((m for m in models if m.vectors is not None), key=place)
    figures = {
        ".png": magnitude_figure(magnitudes.truth, models),
        "-earth.png": vector_figure(vectors, shown, ["Earth"]),
        "-planets.png": vector_figure(vectors, shown, list(PLANETS)),
    }
    return [plots.save(f, results.sibling(end))[0] for end, f in figures.items()]


def colour(model) -> str:
    if model.mechanism is None:
        return plots.INK if model.name == "truth" else plots.GREY
    return plots.style(model.mechanism)["color"]


def vector_figure(vectors, models: list, planets: list[str]):
    """One row per planet (two in a row where there are many), one panel per model."""
    wide = 2 if len(planets) > 1 else 1
    rows, columns = -(-len(planets) // wide), wide * len(models)
    figure, axes = plots.figure(
        rows, columns, width=plots.PAGE, height=rows * plots.PAGE / columns + 0.4, squeeze=False
    )
    for number, planet in enumerate(planets):
        i = list(PLANETS).index(planet)
        position = vectors.position[i]
        picked = farthest_points(position, SAMPLES)
        reach = 1.45 * np.abs(position).max()
        for j, model in enumerate(models):
            panel = axes[number // wide][(number % wide) * len(models) + j]
            arrows = model.vectors[i][picked] / vectors.unit[i]
            _orbit(panel, position, picked, arrows, reach, colour(model))
            panel.set_title(f"{planet}: {model.label}", fontsize=6)
    return figure


def _orbit(panel, position, picked, arrows, reach: float, ink: str) -> None:
    panel.plot(0, 0, marker="o", color="#E69F00", markersize=4, linestyle="none")
    panel.plot(*position.T, ".", color="#bbbbbb", markersize=1.5)
    panel.quiver(
        *position[picked].T,
        *arrows.T,
        angles="xy",
        scale_units="xy",
        scale=2.4 / reach,  # the largest true force is 42 % of the panel's half-width
        width=0.006,
        headwidth=4,
        color=ink,
    )
    panel.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    panel.set_axis_off()


def farthest_points(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of up to `count` points, each the farthest from those before it, from the first."""
    chosen, distance = [0], np.linalg.norm(points - points[0], axis=1)
    while len(chosen) < min(count, len(points)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(points - points[chosen[-1]], axis=1))
    return np.array(chosen)


def magnitude_figure(truth: np.ndarray, models: list):
    """Predicted against true |F| on logarithmic axes; predictions below zero cannot be drawn."""
    shown = [model for model in models if model.name != "truth"]
    figure, axes = plots.figure(
        1, len(shown), width=plots.PAGE, height=2.6, sharex=True, sharey=True, squeeze=False
    )
    limits = truth.min() / 2, truth.max() * 2
    for panel, model in zip(axes[0], shown, strict=True):
        values = model.magnitudes
        positive = values > 0
        panel.loglog(
            truth[positive],
            values[positive],
            ".",
            color=colour(model),
            markersize=1.5,
            alpha=0.4,
        )
        panel.plot(limits, limits, color="#777777", linewidth=0.8, linestyle=":")
        below = "" if positive.all() else f" ({1 - positive.mean():.0%} below zero)"
        panel.set(title=f"{model.label}{below}", xlabel="true |F|", xlim=limits, ylim=limits)
    axes[0][0].set_ylabel("predicted |F|")
    return figure
