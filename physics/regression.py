"""Finds an equation for y in r, m1, m2 by symbolic regression: with PySR, or else with Operon.

Both give a Pareto front: the best equation of every complexity. As with PySR's model_selection
"score", the chosen equation is the one at which the logarithm of the loss falls most per node,

    score_i = log(loss_{i-1} / loss_i) / (complexity_i - complexity_{i-1}),

among those better than every simpler one. (Operon's own choice, minimum description length, fits
long equations to noise.) The loss is the paper's, mean(max(1e-8, |e|) - 1e-8). The search is run
with the seeds 0, 1, 2, and the best score is kept.
"""

import contextlib
import importlib
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import sympy

from lssar.errors import UserError

NAMES = ("r", "m1", "m2")
SEEDS = (0, 1, 2)
LEAST_LOSS = 1e-15  # smaller losses are rounding noise
SETTINGS = tomllib.loads(Path(__file__).with_name("engines.toml").read_text(encoding="utf-8"))


class Candidate(NamedTuple):
    """Holds an equation of a Pareto front."""

    equation: str  # in NAMES
    complexity: int
    loss: float


Engine = Callable[[np.ndarray, np.ndarray, int, dict[str, int]], list[Candidate]]


def discover(engine: Engine, x: np.ndarray, y: np.ndarray, effort: dict[str, int]) -> dict:
    """Return the best-scored equation over the seeds; x (samples, 3) is NAMES, y (samples,)."""
    constant = Candidate(repr(float(np.median(y))), 1, loss_of(np.median(y), y))
    found = {seed: choose([constant, *engine(x, y, seed, effort)]) for seed in SEEDS}
    scores = {seed: score for seed, (_, score) in found.items()}
    seed = max(SEEDS, key=scores.get)  # the first of equal ones
    chosen, score = found[seed]
    equation = readable(chosen.equation)
    return {
        "equation": equation,
        "complexity": chosen.complexity,
        "loss": chosen.loss,
        "score": score,
        "seed": seed,
        "exponents": exponents(equation, x),
    }


def choose(candidates: list[Candidate]) -> tuple[Candidate, float]:
    """Return the candidate with the highest score, and its score; the simplest one scores 0."""
    finite = [c for c in candidates if np.isfinite(c.loss)]
    if not finite:
        raise UserError("symbolic regression found no equation with a finite loss")
    simplest, *others = sorted(finite, key=lambda c: (c.complexity, c.loss))
    front = [(simplest, 0.0)]
    for c in others:
        before = front[-1][0]
        if c.loss < before.loss and c.complexity > before.complexity:
            fall = np.log(max(before.loss, LEAST_LOSS) / max(c.loss, LEAST_LOSS))
            front.append((c, float(fall / (c.complexity - before.complexity))))
    return max(front, key=lambda pair: pair[1])


def loss_of(predicted: np.ndarray, y: np.ndarray) -> float:
    """Return the paper's loss: the mean absolute error, without errors below 1e-8."""
    return float(np.mean(np.maximum(1e-8, np.abs(predicted - y)) - 1e-8))


def parse(equation: str) -> sympy.Expr:
    """Parse an equation in NAMES."""
    return sympy.sympify(equation, {name: sympy.Symbol(name) for name in NAMES})


def evaluate(equation: str, x: np.ndarray) -> np.ndarray:
    """Evaluate the equation at x (samples, 3); NaN where it has no value."""
    function = sympy.lambdify(sympy.symbols(NAMES), parse(equation))
    with np.errstate(all="ignore"):
        return np.broadcast_to(np.asarray(function(*x.T), dtype=float), len(x))


def readable(equation: str) -> str:
    """Multiply out the constants of the equation and round them to six digits."""
    expression = parse(equation)
    with contextlib.suppress(ArithmeticError, ValueError, TypeError):
        expression = sympy.powsimp(sympy.expand_mul(expression))
    rounded = {number: sympy.Float(number, 6) for number in expression.atoms(sympy.Float)}
    return str(expression.xreplace(rounded))


def form(equation: str) -> str:
    """Drop the equation's added constant; Operon fits one to every equation."""
    return str(parse(equation).as_independent(*sympy.symbols(NAMES), as_Add=True)[1])


def exponents(equation: str, x: np.ndarray) -> dict[str, float | None]:
    """Return the median of d log|form| / d log x_i over the data: -2, 1, 1 for Newton's law."""
    text = form(equation)
    step = 1 + 1e-4
    found = {}
    for i, name in enumerate(NAMES):
        factor = np.where(np.arange(3) == i, step, 1)
        above = evaluate(text, x * factor)
        below = evaluate(text, x * np.where(np.arange(3) == i, step**-1, 1))
        with np.errstate(all="ignore"):
            slopes = np.log(np.abs(above / below)) / (2 * np.log(step))
        kept = slopes[np.isfinite(slopes)]
        found[name] = float(np.median(kept)) if len(kept) else None
    return found


def newtonian(equation: dict) -> bool:
    """Say whether it goes as m1 / r^2 (within 0.1), whatever its m2 and its added constant."""
    r = equation["exponents"]["r"]
    m1 = equation["exponents"]["m1"]
    return None not in (r, m1) and abs(r + 2) < 0.1 and abs(m1 - 1) < 0.1


def constant(equations: list[dict]) -> float | None:
    """Return k = F r^2 / m1 for Earth and Sun, the median over the Newtonian equations."""
    forms = (form(equation["equation"]) for equation in equations if newtonian(equation))
    found = [float(evaluate(text, np.array([[1.0, 3e-6, 1.0]]))[0]) / 3e-6 for text in forms]
    return median(found) if found else None


def operon(x: np.ndarray, y: np.ndarray, seed: int, effort: dict[str, int]) -> list[Candidate]:
    """Return Operon's Pareto front."""
    from pyoperon.sklearn import SymbolicRegressor

    # Masses of 1e-9 and forces of 1e-5 are brought to the order of one, and back in the equation.
    size = np.median(np.abs(x), axis=0)
    unit = float(np.std(y)) or 1.0
    search = SymbolicRegressor(
        **SETTINGS["operon"],
        population_size=effort["population"],
        max_evaluations=effort["evaluations"],
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about constant models, which are candidates too
        search.fit(x / size, y / unit)
        candidates = []
        for found in {tree["model"]: tree for tree in search.pareto_front_}.values():
            text = search.get_model_string(found["tree"], 9)
            for i, name in enumerate(NAMES):
                text = text.replace(f"X{i + 1}", f"({name} / {size[i]:.17g})")
            loss = loss_of(unit * search.evaluate_model(found["tree"], x / size), y)
            candidates.append(Candidate(f"{unit:.17g} * ({text})", found["length"], loss))
    return candidates


def pysr(x: np.ndarray, y: np.ndarray, seed: int, effort: dict[str, int]) -> list[Candidate]:
    """Return PySR's Pareto front."""
    from pysr import PySRRegressor

    search = PySRRegressor(
        **SETTINGS["pysr"],
        niterations=effort["iterations"],
        random_state=seed,
        extra_sympy_mappings={"inv": lambda value: 1 / value},
    )
    search.fit(x, y, variable_names=list(NAMES))
    rows = search.equations_.itertuples()
    return [Candidate(str(r.sympy_format), int(r.complexity), float(r.loss)) for r in rows]


ENGINES: dict[str, Engine] = {"pysr": pysr, "operon": operon}


def available(name: str = "auto") -> str:
    """Name the engine to use: the given one, or PySR when it can be imported, or Operon."""
    for engine in ENGINES if name == "auto" else [name]:
        try:
            importlib.import_module("pyoperon" if engine == "operon" else engine)
            return engine
        except Exception as error:  # without Julia, PySR's import fails in many ways
            if name != "auto":
                raise UserError(f"--engine {name}: cannot be imported ({error})") from None
    raise UserError("install pysr or pyoperon: pip install -r requirements-physics.txt")
