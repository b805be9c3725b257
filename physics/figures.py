"""Figures of physics/discover.py: force vectors along the orbits, magnitudes against the truth."""

from pathlib import Path

import numpy as np

import plots
from physics.systems import PLANETS

SAMPLES = 40  # arrows a panel
ORDER = ("truth", "lssar", "softmax")  # the paper's panels, from left to right
INK = {"lssar": 0, "softmax": 1, "oracle": 2, "truth": 3}  # of plots.COLOURS; others: the next


def draw(out: Path, results: dict, magnitudes, predicted, vectors, directions) -> list[Path]:
    """All figures beside `out`; the PNG files."""
    models = results["models"]

    def place(name: str) -> int:
        row = models[name]["row"]
        return ORDER.index(row) if row in ORDER else len(ORDER)

    shown = sorted(directions, key=place)
    figures = {
        "": magnitude_figure(magnitudes.truth, predicted, models),
        "-earth": vector_figure(vectors, directions, shown, models, ["Earth"]),
        "-planets": vector_figure(vectors, directions, shown, models, list(PLANETS)),
    }
    return [plots.save(f, out.with_name(f"{out.stem}{end}.png"))[0] for end, f in figures.items()]


def vector_figure(vectors, directions: dict, shown: list[str], models: dict, planets: list[str]):
    """A row a planet (two in a row where there are many), a panel a model, 40 arrows each."""
    wide = 2 if len(planets) > 1 else 1
    rows, columns = -(-len(planets) // wide), wide * len(shown)
    figure, axes = plots.figure(
        rows, columns, width=plots.PAGE, height=rows * plots.PAGE / columns + 0.4, squeeze=False
    )
    for number, planet in enumerate(planets):
        i = list(PLANETS).index(planet)
        position = vectors.position[i]
        picked = farthest_points(position, SAMPLES)
        reach = 1.45 * np.abs(position).max()
        for j, name in enumerate(shown):
            panel = axes[number // wide][(number % wide) * len(shown) + j]
            arrows = directions[name][i][picked] / vectors.unit[i]
            _orbit(panel, position, picked, arrows, reach, INK.get(models[name]["row"], 4))
            panel.set_title(f"{planet}: {models[name]['label']}", fontsize=6)
    return figure


def _orbit(panel, position, picked, arrows, reach: float, colour: int) -> None:
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
        color=plots.COLOURS[colour],
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


def magnitude_figure(truth: np.ndarray, predicted: dict, models: dict):
    """Predicted against true |F| on logarithmic axes; predictions below zero cannot be drawn."""
    names = [name for name in predicted if name != "truth"]
    figure, axes = plots.figure(
        1, len(names), width=plots.PAGE, height=2.6, sharex=True, sharey=True, squeeze=False
    )
    limits = truth.min() / 2, truth.max() * 2
    for panel, name in zip(axes[0], names, strict=True):
        values = predicted[name]
        positive = values > 0
        panel.loglog(
            truth[positive],
            values[positive],
            ".",
            color=plots.COLOURS[INK.get(models[name]["row"], 4)],
            markersize=1.5,
            alpha=0.4,
        )
        panel.plot(limits, limits, color="#777777", linewidth=0.8, linestyle=":")
        below = "" if positive.all() else f" ({1 - positive.mean():.0%} below zero)"
        panel.set(
            title=f"{models[name]['label']}{below}", xlabel="true |F|", xlim=limits, ylim=limits
        )
    axes[0][0].set_ylabel("predicted |F|")
    return figure
