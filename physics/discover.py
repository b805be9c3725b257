"""python physics/discover.py RUN [RUN ...] --forces DIR --planets DIR --out results/physics.json

Finds the law that predicted forces follow. RUNs are pre-trained runs whose fine-tuned models
(physics/force.py) have made their predictions. Each of them is measured, and so is the oracle,
which predicts the mean force of the two labelled states nearest to the true state:

  equations   five symbolic regressions on r, m1, m2, each over 1,000 of the 5,000 states of the
              probed sequences that lie nearest to a labelled state
  exponents   of r, m1, m2 by a log-log fit to all those predictions: -2, 1, 1 for Newton's law
  R^2         against the true force, and the mean cosine and R^2 of the vectors for each planet

Beside them is R^2 of the best k m2 / r^2, the force of a model that sees everything but the
planet's mass: that mass moves the star by less than a bin wherever the force is large.

Finished regressions are kept in --out and not repeated unless their run was trained again. Beside
it are the figures: the force vectors of the eight planets and the predictions against the truth.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from evaluating.checkpoints import Checkpoint, open_checkpoints
from evaluating.protocol import kept_on_interrupt, open_results
from evaluating.results import Record, Results
from lssar.errors import UserError
from physics import regression
from physics.force import FORCES, origin, refuse_non_finite
from physics.loader import describe
from physics.model import OrbitModel
from physics.simulate import STATES
from physics.systems import PLANETS, magnitude
from support import plots
from support.command import Parser, positive, run, whole
from support.files import reading
from support.text import table

# Of one regression: PySR takes iterations, Operon population and evaluations.
EFFORT = {"iterations": 100, "population": 1000, "evaluations": 500_000}
# Names of forces that are measured beside the models.
ORACLE = "oracle"
TRUTH = "truth"
BLIND = "blind"
COLOURS = {ORACLE: plots.GREY, TRUTH: plots.INK}
ORDER = (TRUTH, "lssar", "softmax")  # the paper's panels, from left to right
SAMPLES = 40  # arrows per panel
SUBSAMPLES = 5  # regressions per model
SUBSAMPLE = 1000  # states of each
EXPONENTS = tuple(f"exponent_{name}" for name in regression.NAMES)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="none: the oracle and the truth")
    parser.add_argument("--forces", required=True, type=Path, help="of physics/simulate.py")
    parser.add_argument("--planets", required=True, type=Path, help="of physics/simulate.py")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--states", type=whole(10), default=5000, help="nearest to labelled states")
    parser.add_argument(
        "--engine", default="auto", choices=("auto", "pysr", "operon"), help="auto: PySR, or Operon"
    )
    for name, default in EFFORT.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help="of a regression")
    return parser


def find_nearest(known: np.ndarray, asked: np.ndarray, k: int = 1) -> tuple[np.ndarray, ...]:
    """Return the distances from asked points to their k nearest known ones, and their numbers."""
    try:
        from scipy.spatial import cKDTree
    except ImportError as error:
        raise UserError(f"{error}; pip install -r requirements-physics.txt") from None
    return cKDTree(known).query(asked, k=k)


def main(argv: list[str]) -> None:
    options = make_parser().parse_args(argv)
    effort = {name: vars(options)[name] for name in EFFORT}
    magnitudes = Magnitudes(options.forces, options.states)
    vectors = Vectors(options.planets)
    engine = regression.available(options.engine)
    settings = {
        "engine": engine,
        "effort": effort,
        "states": len(magnitudes.chosen),
        "forces": describe(options.forces)["settings"],
        "planets": describe(options.planets)["settings"],
    }
    results = open_results(options.out, "physics", settings, about={})
    oracle = without_run(ORACLE, magnitudes.oracle())
    truth = without_run(TRUTH, magnitudes.truth, vectors.truth)
    models = [oracle, truth, *fine_tuned(options.runs, magnitudes)]
    judges = {"magnitude": magnitudes, "vector": vectors}
    with kept_on_interrupt(options.out):
        for seed in range(SUBSAMPLES):
            name = f"{BLIND}-s{seed}"
            results.runs[name] = {"run": name, "seed": seed}
            if not results.find(run=name):
                rows = subsample(seed, len(magnitudes.truth))
                results.add(Record("R2", name, magnitudes.blind(rows)))
        for model in models:
            for task, identity in model.identities.items():
                results.runs[identity] = model.described | {"run": model.name}
                if not results.find(run=identity):
                    results.add(*judges[task].records(model, identity))
        for model in models:
            discover(results, model, magnitudes.inputs, engine, effort)
    for figure in draw(results, models, magnitudes, vectors):
        print(f"figure: {figure}")
    print(summary(results, models))


@dataclass(frozen=True)
class Model:
    """Holds the forces of a pre-trained run's two fine-tuned models, of the oracle or the truth."""

    name: str  # mechanism, settings and seed
    label: str  # in figures
    mechanism: str
    described: dict  # the pre-trained checkpoint, as a results file describes it
    identities: dict[str, str]  # task -> identity of the model that made these forces
    magnitudes: np.ndarray  # (states,)
    vectors: np.ndarray | None = None  # (planets, times, 2)

    @property
    def colour(self) -> str:
        """Return the colour of its figures."""
        return COLOURS.get(self.mechanism) or plots.style(self.mechanism)["color"]


def without_run(name: str, magnitudes: np.ndarray, vectors: np.ndarray | None = None) -> Model:
    """Return the oracle or the truth in place of a model."""
    return Model(
        name=name,
        label=name,
        mechanism=name,
        described={},
        identities={"magnitude": name},
        magnitudes=magnitudes,
        vectors=vectors,
    )


def fine_tuned(runs: list[str], magnitudes: "Magnitudes") -> list[Model]:
    """Load the forces that each run's two fine-tuned models predicted."""
    checkpoints = open_checkpoints(runs, OrbitModel)
    models = []
    names = [name_of(checkpoint) for checkpoint in checkpoints]
    labels = [checkpoint.config.attention.title for checkpoint in checkpoints]
    for path, checkpoint, name, label in zip(runs, checkpoints, names, labels, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{path}: another run is of {name!r} too; give one of them")
        magnitude_forces, magnitude_identity = load(path, "magnitude", checkpoint)
        vector_forces, vector_identity = load(path, "vector", checkpoint)
        models.append(
            Model(
                name=name,
                label=label if labels.count(label) == 1 else name,
                mechanism=checkpoint.config.attention.name,
                described=checkpoint.describe(),
                identities={"magnitude": magnitude_identity, "vector": vector_identity},
                magnitudes=magnitudes.of(magnitude_forces),
                vectors=vector_forces,
            )
        )
    return models


def name_of(checkpoint: Checkpoint) -> str:
    """Name it for tables: the mechanism, its settings and, where it is known, the seed."""
    settings = checkpoint.config.to_dict()["attention"]
    parts = [settings["name"]]
    parts += [f"{k}{v}" for k, v in settings.items() if k not in ("name", "train_length")]
    if checkpoint.info.seed is not None:
        parts.append(f"s{checkpoint.info.seed}")
    return "-".join(parts)


def load(run: str, task: str, pretrained: Checkpoint) -> tuple[np.ndarray, str]:
    """Load the predictions of the model fine-tuned from a run, and that model's identity."""
    folder = Path(f"{Path(run)}-{task}")
    path = folder / FORCES
    found = origin(folder)
    if not path.exists() or found["checkpoint"] is None:
        raise UserError(f"{path} is missing; make it with: python physics/force.py --help")
    if found["pretrained"] != pretrained.identity:
        raise UserError(
            f"{path} is of a model fine-tuned from other weights than {run} has now; "
            f"delete {folder} and rerun physics/force.py {task} {run}"
        )
    forces = read_array(path)
    refuse_non_finite(forces, path)
    return forces, found["checkpoint"]


def read_array(path: Path) -> np.ndarray:
    """Read an array, or raise in one line."""
    with reading(path):
        return np.load(path, allow_pickle=False)


class Magnitudes:
    """Holds the states where predictions are compared with the truth, and the true forces."""

    def __init__(self, directory: Path, count: int):
        settings = describe(directory)["settings"]
        states = read_array(directory / STATES)
        first = settings["labelled"]
        last = first + settings["probed"]
        self.probed = slice(first, last)
        self.times = states.shape[1]
        shown = np.isfinite(read_array(directory / "labels_train.npy")[:last, 1::2, 0])
        known = states[:first].reshape(-1, 6)
        probed = states[self.probed].reshape(-1, 6)
        self.labelled = np.concatenate((known, states[self.probed][shown[self.probed]]))
        distance, _ = find_nearest(known, probed)
        self.chosen = np.argsort(distance, kind="stable")[:count]
        self.states = probed[self.chosen]
        self.truth = magnitude(self.states)
        self.inputs = np.column_stack((np.hypot(*self.states.T[:2]), self.states[:, 4:]))

    def of(self, forces: np.ndarray) -> np.ndarray:
        """Return a model's predictions at the chosen states, from those for every sequence."""
        return forces[self.probed, : self.times, 0].reshape(-1)[self.chosen].astype(float)

    def oracle(self) -> np.ndarray:
        """Return the mean force of the two nearest labelled states, coordinates standardised."""
        mean = self.labelled.mean(axis=0)
        spread = self.labelled.std(axis=0)
        spread[spread == 0] = 1  # stars of heavy planets all have one mass
        _, near = find_nearest((self.labelled - mean) / spread, (self.states - mean) / spread, k=2)
        return magnitude(self.labelled)[near].mean(axis=1)

    def blind(self, rows: np.ndarray) -> float:
        """Return R^2 of the best force that does not depend on the planet's mass."""
        r, _, star = self.inputs[rows].T
        truth = self.truth[rows]
        shape = star / r**2
        return r_squared(shape * (truth @ shape) / (shape @ shape), truth)

    def records(self, model: Model, identity: str) -> list[Record]:
        """Compare a model's magnitudes with the truth."""
        predicted = model.magnitudes
        found = {
            "R2": r_squared(predicted, self.truth),
            "rank": rank_correlation(predicted, self.truth),
            **fitted_exponents(self.inputs, predicted),
        }
        details = {"positive": float((predicted > 0).mean())}
        return [Record(k, identity, v, details=details) for k, v in found.items()]


def r_squared(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Return 1 - squared error / variance: 0 for the constant mean, below 0 for worse."""
    return float(1 - np.sum((predicted - truth) ** 2) / np.sum((truth - truth.mean(axis=0)) ** 2))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation, which the few largest forces cannot decide alone."""
    ranks = [np.argsort(np.argsort(v, kind="stable"), kind="stable") for v in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def fitted_exponents(inputs: np.ndarray, predicted: np.ndarray) -> dict[str, float | None]:
    """Fit log F = c + sum e_i log x_i by least squares, over the forces that have a logarithm.

    An input that does not vary has no exponent; with fewer than ten such forces all are None.
    """
    positive = predicted > 0
    inputs = inputs[positive]
    predicted = predicted[positive]
    if len(predicted) < 10:
        return dict.fromkeys(EXPONENTS)
    varies = np.ptp(inputs, axis=0) > 0
    columns = np.column_stack((np.ones(len(inputs)), np.log(inputs[:, varies])))
    solution = np.linalg.lstsq(columns, np.log(predicted), rcond=None)[0]
    return dict(zip(np.array(EXPONENTS)[varies].tolist(), solution[1:].tolist(), strict=True))


class Vectors:
    """Holds the eight planets' forces, and the points that no fit or selection has used."""

    def __init__(self, directory: Path):
        self.unit = np.array(describe(directory)["unit"])
        states = read_array(directory / STATES)
        self.position = states[..., :2]
        towards = -self.position / np.linalg.norm(self.position, axis=-1, keepdims=True)
        self.truth = magnitude(states)[..., None] * towards
        trained = np.isfinite(read_array(directory / "labels_train.npy")[:, 1::2, 0])
        selected = np.isfinite(read_array(directory / "labels_val.npy")[:, 1::2, 0])
        # `--selection source` selects on everything.
        self.unseen = ~(trained if selected.all() else trained | selected)

    def records(self, model: Model, identity: str) -> list[Record]:
        """Compare the directions of a model's forces with the truth."""
        planets = {}
        for i, (name, keep) in enumerate(zip(PLANETS, self.unseen, strict=True)):
            mine = model.vectors[i][keep]
            true = self.truth[i][keep]
            cosine = float(cosines(mine, true).mean())
            planets[name] = {"cosine": cosine, "R2": r_squared(mine, true)}
        cosine = float(np.mean([planet["cosine"] for planet in planets.values()]))
        return [Record("cosine", identity, cosine, details={"planets": planets})]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosines of pairs of vectors; 0 where one is zero and has no direction."""
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / np.where(size > 0, size, 1)


def subsample(seed: int, count: int) -> np.ndarray:
    """Draw the states of one regression."""
    return np.random.default_rng(seed).choice(count, min(SUBSAMPLE, count), replace=False)


def discover(results: Results, model: Model, inputs: np.ndarray, engine: str, effort: dict) -> None:
    """Run the regressions that one model still lacks; together they give one constant."""
    identity = model.identities["magnitude"]
    values = model.magnitudes
    known = results.find(quantity="constant", run=identity)
    equations = list(known.details["equations"]) if known else []
    for seed in range(len(equations), SUBSAMPLES):
        rows = subsample(seed, len(values))
        found = regression.discover(regression.ENGINES[engine], inputs[rows], values[rows], effort)
        equations.append(found)
        newtonian = sum(map(regression.newtonian, equations))
        details = {"equations": list(equations), "newtonian": newtonian}
        results.add(Record("constant", identity, regression.constant(equations), details=details))
        print(f"{model.name} {seed}: {found['equation']}  (score {found['score']:.2f})", flush=True)


def summary(results: Results, models: list[Model]) -> str:
    """Return the table of all models."""
    rows = []
    for model in models:
        mine = [r for r in results.records if r.run in model.identities.values()]
        values = {record.quantity: record.value for record in mine}
        laws = results.find(quantity="constant", run=model.identities["magnitude"]).details
        shown = (values.get(q) for q in ("constant", "R2", "rank", *EXPONENTS, "cosine"))
        cells = ["-" if value is None else f"{value:.3f}" for value in shown]
        rows.append([model.label, *cells, f"{laws['newtonian']} of {len(laws['equations'])}"])
    return table(["", "k", "R2", "rank", "r^", "m1^", "m2^", "cosine", "as m1 / r^2"], rows)


def draw(results: Results, models: list[Model], magnitudes: Magnitudes, vectors: Vectors):
    """Draw all figures beside the results, and return the PNG files."""
    with_vectors = [model for model in models if model.vectors is not None]
    shown = [model for name in ORDER for model in with_vectors if model.mechanism == name]
    shown += [model for model in with_vectors if model.mechanism not in ORDER]
    figures = {
        ".png": magnitude_figure(magnitudes.truth, models),
        "-earth.png": vector_figure(vectors, shown, ["Earth"]),
        "-planets.png": vector_figure(vectors, shown, list(PLANETS)),
    }
    return [plots.save(f, results.sibling(end))[0] for end, f in figures.items()]


def vector_figure(vectors: Vectors, models: list[Model], planets: list[str]):
    """Draw one panel per model and planet; with few models, two planets stand in a row."""
    planets_per_row = 2 if len(planets) > 1 and len(models) <= len(ORDER) else 1
    rows = -(-len(planets) // planets_per_row)
    columns = planets_per_row * len(models)
    height = rows * plots.PAGE / columns + 0.4
    figure, axes = plots.figure(rows, columns, width=plots.PAGE, height=height, squeeze=False)
    pairs = itertools.product(planets, models)
    for panel, (planet, model) in zip(axes.flat, pairs, strict=True):
        i = list(PLANETS).index(planet)
        position = vectors.position[i]
        picked = farthest_points(position, SAMPLES)
        reach = 1.45 * np.abs(position).max()
        arrows = model.vectors[i][picked] / vectors.unit[i]
        panel.plot(0, 0, marker="o", color="#E69F00", markersize=4, linestyle="none")
        panel.plot(*position.T, ".", color="#bbbbbb", markersize=1.5)
        panel.quiver(
            *position[picked].T,
            *arrows.T,
            angles="xy",
            scale_units="xy",
            scale=2.4 / reach,  # the largest true force is 42 % of the panel's half-width
            headwidth=4,
            width=0.006,
            color=model.colour,
        )
        panel.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        panel.set_axis_off()
        panel.set_title(f"{planet}: {model.label}", fontsize=6)
    return figure


def farthest_points(points: np.ndarray, count: int) -> np.ndarray:
    """Pick up to `count` points, each the farthest from the earlier ones; return their indices."""
    chosen = [0]
    distance = np.linalg.norm(points - points[0], axis=1)
    while len(chosen) < min(count, len(points)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(points - points[chosen[-1]], axis=1))
    return np.array(chosen)


def magnitude_figure(truth: np.ndarray, models: list[Model]):
    """Draw predicted against true |F| on logarithmic axes, without predictions below zero."""
    shown = [model for model in models if model.name != TRUTH]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plots.figure(
        rows,
        columns,
        width=plots.PAGE,
        height=0.6 + 2 * rows,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    limits = truth.min() / 2, truth.max() * 2
    for panel in axes.flat[len(shown) :]:
        panel.set_axis_off()
    for panel, model in zip(axes.flat, shown, strict=False):
        positive = model.magnitudes > 0
        predicted = model.magnitudes[positive]
        panel.loglog(truth[positive], predicted, ".", color=model.colour, markersize=1.5, alpha=0.4)
        panel.plot(limits, limits, color="#777777", linewidth=0.8, linestyle=":")
        below = "" if positive.all() else f", {1 - positive.mean():.1%} below zero"
        panel.set_title(f"{model.label}{below}", fontsize=7)
        panel.set(xlabel="true |F|", xlim=limits, ylim=limits)
    for panel in axes[:, 0]:
        panel.set_ylabel("predicted |F|")
    return figure


if __name__ == "__main__":
    run(main)
