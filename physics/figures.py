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
    """One panel per model and planet; several planets are drawn two per row."""
    wide = min(2, len(planets))
    rows, columns = -(-len(planets) // wide), wide * len(models)
    height = rows * plots.PAGE / columns + 0.4
    figure, axes = plots.figure(rows, columns, width=plots.PAGE, height=height, squeeze=False)
    panels = iter(axes.flat)
    for planet in planets:
        i = list(PLANETS).index(planet)
        position = vectors.position[i]
        picked = farthest_points(position, SAMPLES)
        reach = 1.45 * np.abs(position).max()
        # The largest true force is 42 % of the panel's half-width.
        shape = {"angles": "xy", "scale_units": "xy", "scale": 2.4 / reach, "headwidth": 4}
        for model in models:
            panel = next(panels)
            arrows = model.vectors[i][picked] / vectors.unit[i]
            panel.plot(0, 0, marker="o", color="#E69F00", markersize=4, linestyle="none")
            panel.plot(*position.T, ".", color="#bbbbbb", markersize=1.5)
            panel.quiver(*position[picked].T, *arrows.T, **shape, width=0.006, color=colour(model))
            panel.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
            panel.set_axis_off()
            panel.set_title(f"{planet}: {model.label}", fontsize=6)
    return figure


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
    shape = {"width": plots.PAGE, "height": 2.6, "squeeze": False}
    figure, axes = plots.figure(1, len(shown), sharex=True, sharey=True, **shape)
    limits = truth.min() / 2, truth.max() * 2
    for panel, model in zip(axes[0], shown, strict=True):
        positive = model.magnitudes > 0
        drawn = truth[positive], model.magnitudes[positive]
        panel.loglog(*drawn, ".", color=colour(model), markersize=1.5, alpha=0.4)
        panel.plot(limits, limits, color="#777777", linewidth=0.8, linestyle=":")
        below = "" if positive.all() else f" ({1 - positive.mean():.0%} below zero)"
        panel.set(title=f"{model.label}{below}", xlabel="true |F|", xlim=limits, ylim=limits)
    axes[0][0].set_ylabel("predicted |F|")
    return figure
