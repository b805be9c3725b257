"""python physics/discover.py RUN [RUN ...] --forces DIR --planets DIR --out results/physics.json

Which law do the predicted forces follow? RUNs are pre-trained runs whose fine-tuned models
(physics/force.py) have made their predictions. For each of them, and for the oracle (the mean of
the two nearest labelled states, by the true state):

  equations   five symbolic regressions on r, m1, m2, each over 1,000 of the 5,000 states of the
              probed sequences that lie nearest to a labelled state
  exponents   of r, m1, m2 by a log-log fit to all those predictions: -2, 1, 1 for Newton's law
  R^2         against the true force, and the mean cosine and R^2 of the vectors for each planet

A finished regression is in --out and is not done again, unless its run was trained again. Beside
it: a table for the report (`--table`), where runs of one mechanism, of several seeds, share a row,
and as figures, the force vectors of the eight planets and the predictions against r.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

import numpy as np
from scipy.spatial import cKDTree

from data.records import describe
from data.shards import reading
from errors import Parser, UserError, positive, run, whole
from evaluation import Checkpoint, kept_on_interrupt, mechanism_label, open_checkpoints, table
from files import finite, read_text, write_json
from physics import figures, regression
from physics.force import FORCES, origin, refuse_non_finite
from physics.simulate import STATES, magnitude
from physics.systems import PLANETS
from physics.table import mean_cosine, write_table

ORACLE, TRUTH = "oracle", "truth"
SUBSAMPLES, SUBSAMPLE = 5, 1000


def main(argv: list[str]) -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="none: the oracle and the truth")
    parser.add_argument("--forces", required=True, type=Path, help="of physics/simulate.py")
    parser.add_argument("--planets", required=True, type=Path, help="of physics/simulate.py")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--table", type=Path, help="results/SCALE/symbolic_regression.json")
    parser.add_argument("--states", type=whole(10), default=5000, help="nearest to labelled states")
    parser.add_argument("--engine", default="auto", choices=("auto", *regression.ENGINES))
    effort = regression.Effort()
    for key, value in asdict(effort).items():
        parser.add_argument(f"--{key}", type=positive, default=value, help="of a regression")
    options = parser.parse_args(argv)
    if options.out.suffix != ".json":
        raise UserError(f"--out {options.out}: give a name that ends in .json")
    effort = regression.Effort(options.iterations, options.population, options.evaluations)

    magnitudes = Magnitudes(options.forces, options.states)
    vectors = Vectors(options.planets)
    engine = regression.available(options.engine)
    settings = {
        "engine": engine,
        "effort": asdict(effort),
        "states": len(magnitudes.chosen),
        "forces": describe(options.forces)["settings"],
        "planets": describe(options.planets)["settings"],
    }
    results = open_results(options.out, settings)
    predicted = {ORACLE: magnitudes.oracle(), TRUTH: magnitudes.truth}
    directions = {TRUTH: vectors.truth}
    for path, checkpoint in zip(options.runs, open_checkpoints(options.runs), strict=True):
        name = checkpoint.info.run
        if name in predicted:
            raise UserError(f"{path}: another model is called {name!r} too; rename the run")
        forces, source = load(path, "magnitude", checkpoint)
        predicted[name] = magnitudes.of(forces)
        directions[name], _ = load(path, "vector", checkpoint)
        entry = results["models"].get(name, {})
        if entry.get("checkpoint") != source:
            entry = {"checkpoint": source}  # its equations were found for other weights
        results["models"][name] = entry | named(checkpoint)
        results["models"][name]["planets"] = vectors.scores(directions[name])
    for name, values in predicted.items():
        entry = results["models"].setdefault(name, {"row": name, "title": name})
        entry["magnitude"] = magnitudes.scores(values)
        entry.setdefault("equations", [])
    titles = Counter(entry["title"] for entry in results["models"].values())
    for name, entry in results["models"].items():
        entry["label"] = entry["title"] if titles[entry["title"]] == 1 else name
    with kept_on_interrupt(options.out):
        for name, values in predicted.items():
            discover(results, name, magnitudes, values, engine, effort, options.out)
    save(options.out, results)
    pictures = figures.draw(options.out, results, magnitudes, predicted, vectors, directions)
    if options.table:
        write_table(options.table, results, options.out, pictures)
    print(summary(results))


def named(checkpoint: Checkpoint) -> dict[str, str]:
    """A run's row of the table, the mechanism with its settings, and how figures call that."""
    settings = checkpoint.config.to_dict()["attention"]
    changed = [f"{k}={v}" for k, v in settings.items() if k not in ("name", "train_length")]
    title = mechanism_label(checkpoint.config.attention)
    return {"row": " ".join([settings["name"], *changed]), "title": title}


def load(run: str, task: str, pretrained: Checkpoint) -> tuple[np.ndarray, str]:
    """The predictions of the model fine-tuned from a run, and that model's identity."""
    folder = Path(f"{Path(run)}-{task}")
    path, found = folder / FORCES, origin(folder)
    if not path.exists() or found["checkpoint"] is None:
        raise UserError(f"{path} is missing; make it with: python physics/force.py --help")
    if found["pretrained"] != pretrained.identity:
        raise UserError(
            f"{path} is of a model fine-tuned from other weights than {run} has now; delete "
            f"{folder} and run physics/force.py {task} {run} again"
        )
    with reading(path):
        forces = np.load(path, allow_pickle=False)
    refuse_non_finite(forces, path)
    return forces, found["checkpoint"]


# --- magnitudes ----------------------------------------------------------------------------------


class Magnitudes:
    """The states that predictions are taken at, and what is true there."""

    def __init__(self, directory: Path, count: int):
        settings = describe(directory)["settings"]
        with reading(directory / STATES):
            states = np.load(directory / STATES, allow_pickle=False)
        first, last = settings["labelled"], settings["labelled"] + settings["probed"]
        self.probed, self.times = slice(first, last), states.shape[1]
        labels = np.load(directory / "labels_train.npy", allow_pickle=False)[:last, 1::2, 0]
        shown = np.isfinite(labels)
        self.labelled = np.concatenate(
            (states[:first].reshape(-1, 6), states[:last][shown][first * self.times :])
        )
        probed = states[self.probed].reshape(-1, 6)
        distance, _ = cKDTree(states[:first].reshape(-1, 6)).query(probed)
        self.chosen = np.argsort(distance, kind="stable")[:count]
        self.states = probed[self.chosen]
        self.truth = magnitude(self.states)
        r = np.hypot(self.states[:, 0], self.states[:, 1])
        self.inputs = np.stack((r, self.states[:, 4], self.states[:, 5]), axis=1)

    def of(self, forces: np.ndarray) -> np.ndarray:
        """A model's predictions at the chosen states, from those for every sequence."""
        return forces[self.probed, : self.times, 0].reshape(-1)[self.chosen].astype(float)

    def oracle(self) -> np.ndarray:
        """Mean force of the two nearest labelled states, every coordinate standardised."""
        mean, spread = self.labelled.mean(axis=0), self.labelled.std(axis=0)
        _, near = cKDTree((self.labelled - mean) / spread).query((self.states - mean) / spread, k=2)
        return magnitude(self.labelled)[near].mean(axis=1)

    def scores(self, predicted: np.ndarray) -> dict:
        positive = predicted > 0
        return {
            "R2": r_squared(predicted, self.truth),
            "rank": rank_correlation(predicted, self.truth),
            "exponents": fitted_exponents(self.inputs[positive], predicted[positive]),
            "positive": float(positive.mean()),
        }


def r_squared(predicted: np.ndarray, truth: np.ndarray) -> float:
    """1 - squared error / variance; 0 is the constant mean, below it worse than that."""
    return float(1 - np.sum((predicted - truth) ** 2) / np.sum((truth - truth.mean(axis=0)) ** 2))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: what the few largest forces cannot decide alone."""
    ranks = [np.argsort(np.argsort(v, kind="stable"), kind="stable") for v in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def fitted_exponents(inputs: np.ndarray, predicted: np.ndarray) -> dict[str, float | None]:
    """Least squares of log F = c + sum e_i log x_i."""
    if len(predicted) < 10:
        return dict.fromkeys(regression.NAMES)
    columns = np.column_stack((np.ones(len(inputs)), np.log(inputs)))
    solution = np.linalg.lstsq(columns, np.log(predicted), rcond=None)[0]
    return dict(zip(regression.NAMES, solution[1:].tolist(), strict=True))


# --- vectors -------------------------------------------------------------------------------------


class Vectors:
    """The eight planets' forces, and which of their points nothing was fitted or selected on."""

    def __init__(self, directory: Path):
        self.unit = np.array(describe(directory)["unit"])
        states = np.load(directory / STATES, allow_pickle=False)
        self.position = states[..., :2]
        towards = -self.position / np.linalg.norm(self.position, axis=-1, keepdims=True)
        self.truth = magnitude(states)[..., None] * towards
        seen = [
            np.load(directory / f"labels_{split}.npy")[:, 1::2, 0] for split in ("train", "val")
        ]
        trained, selected = (np.isfinite(labels) for labels in seen)
        if selected.all():  # the source's way selects on everything
            selected = trained
        self.unseen = ~(trained | selected)

    def scores(self, forces: np.ndarray) -> dict[str, dict[str, float]]:
        return {
            name: {
                "cosine": float(cosines(forces[i][keep], self.truth[i][keep]).mean()),
                "R2": r_squared(forces[i][keep], self.truth[i][keep]),
            }
            for i, (name, keep) in enumerate(zip(PLANETS, self.unseen, strict=True))
        }


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """0 where one of the two is zero, which has no direction."""
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / np.where(size > 0, size, 1)


# --- results -------------------------------------------------------------------------------------


def open_results(path: Path, settings: dict) -> dict:
    if path.exists():
        with reading(path):
            text = read_text(path, errors="replace")
        try:
            found = json.loads(text)
            same = found["kind"] == "physics" and found["settings"] == settings
            same &= all({"row", "title"} <= entry.keys() for entry in found["models"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            same = False
        if not same:
            raise UserError(f"{path} was made with other settings; give another --out or delete it")
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    return {"kind": "physics", "settings": settings, "models": {}}


def discover(results, name, magnitudes, values, engine, effort, out: Path) -> None:
    """The regressions of one model that are not done yet."""
    entry = results["models"][name]
    for seed in range(len(entry["equations"]), SUBSAMPLES):
        size = min(SUBSAMPLE, len(values))
        rows = np.random.default_rng(seed).choice(len(values), size, replace=False)
        search = regression.ENGINES[engine]
        found = regression.discover(search, magnitudes.inputs[rows], values[rows], effort)
        entry["equations"].append(found.to_dict())
        save(out, results)
        print(f"{name} {seed}: {found.equation}  (score {found.score:.2f})", flush=True)


def save(path: Path, results: dict) -> None:
    write_json(path, finite(results))


def summary(results: dict) -> str:
    def shown(value) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows = []
    for entry in results["models"].values():
        m = entry["magnitude"]
        powers = [shown(m["exponents"][key]) for key in regression.NAMES]
        rows.append(
            [entry["label"], shown(m["R2"]), shown(m["rank"]), *powers, shown(mean_cosine(entry))]
        )
    return table(["", "R2", "rank", "r^", "m1^", "m2^", "cosine"], rows)


if __name__ == "__main__":
    run(main)
