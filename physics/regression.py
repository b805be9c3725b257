"""Symbolic regression of y on r, m1, m2: PySR where it runs, Operon otherwise, one way to choose.

Both give a Pareto front: the best equation of every complexity. As with PySR's model_selection
"score", the one chosen is where the logarithm of the loss falls most per node,

    score_i = log(loss_{i-1} / loss_i) / (complexity_i - complexity_{i-1}),

among those better than every simpler one. (Operon's own choice, minimum description length, fits
long equations to noise.) The loss is the paper's, mean(max(1e-8, |e|) - 1e-8). Of the restarts
with seeds 0, 1, 2 the best score is kept.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import sympy

from lssar.errors import UserError
from physics import Effort

NAMES = ("r", "m1", "m2")
MAX_SIZE = 20
SEEDS = (0, 1, 2)
LEAST_LOSS = 1e-15  # below it rounding is all that is compared


@dataclass(frozen=True)
class Candidate:
    equation: str  # in NAMES
    complexity: int
    loss: float


@dataclass(frozen=True)
class Equation(Candidate):
    score: float
    seed: int
    exponents: dict[str, float | None]  # median of d log|form| / d log x over the data


Engine = Callable[[np.ndarray, np.ndarray, int, Effort], list[Candidate]]


def discover(engine: Engine, x: np.ndarray, y: np.ndarray, effort: Effort) -> Equation:
    """The best-scored equation over the seeds; x (samples, 3) as NAMES say, y (samples,)."""
    constant = Candidate(repr(float(np.median(y))), 1, loss_of(np.median(y), y))
    found = {seed: choose([constant, *engine(x, y, seed, effort)]) for seed in SEEDS}
    seed = max(SEEDS, key=lambda seed: found[seed][1])  # the first of equal ones
    chosen, score = found[seed]
    equation = readable(chosen.equation)
    return Equation(equation, chosen.complexity, chosen.loss, score, seed, exponents(equation, x))


def choose(candidates: list[Candidate]) -> tuple[Candidate, float]:
    """The candidate with the highest score, and its score; the simplest one scores 0."""
    finite = (c for c in candidates if np.isfinite(c.loss))
    simplest, *others = sorted(finite, key=lambda c: (c.complexity, c.loss)) or [None]
    if simplest is None:
        raise UserError("symbolic regression found no equation with a finite loss")
    front = [(simplest, 0.0)]
    for c in others:
        before = front[-1][0]
        if c.loss < before.loss and c.complexity > before.complexity:
            fall = np.log(max(before.loss, LEAST_LOSS) / max(c.loss, LEAST_LOSS))
            front.append((c, float(fall / (c.complexity - before.complexity))))
    return max(front, key=lambda pair: pair[1])


def loss_of(predicted: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.maximum(1e-8, np.abs(predicted - y)) - 1e-8))


def evaluate(equation: str, x: np.ndarray) -> np.ndarray:
    """The equation's value at x (samples, 3); NaN where it has none."""
    function = sympy.lambdify(sympy.symbols(NAMES), _parse(equation))
    with np.errstate(all="ignore"):
        return np.broadcast_to(np.asarray(function(*x.T), dtype=float), len(x))


def _parse(equation: str) -> sympy.Expr:
    return sympy.sympify(equation, {name: sympy.Symbol(name) for name in NAMES})


def form(equation: str) -> str:
    """The equation without an added constant, which Operon fits to every one."""
    return str(_parse(equation).as_independent(*sympy.symbols(NAMES), as_Add=True)[1])


def exponents(equation: str, x: np.ndarray) -> dict[str, float | None]:
    """Median local exponent of each variable in its form: -2, 1, 1 for Newton's law."""
    text, step, found = form(equation), 1 + 1e-4, {}
    for i, name in enumerate(NAMES):
        factors = (np.where(np.arange(3) == i, step**sign, 1) for sign in (1, -1))
        above, below = (evaluate(text, x * factor) for factor in factors)
        with np.errstate(all="ignore"):
            slopes = np.log(np.abs(above / below)) / (2 * np.log(step))
        kept = slopes[np.isfinite(slopes)]
        found[name] = float(np.median(kept)) if len(kept) else None
    return found


def newtonian(equation: dict) -> bool:
    """Whether an equation goes as m1 / r^2 (within 0.1), whatever it makes of m2 or adds."""
    r, m1 = (equation["exponents"][name] for name in ("r", "m1"))
    return None not in (r, m1) and abs(r + 2) < 0.1 and abs(m1 - 1) < 0.1


def constant(equations: list[dict]) -> float | None:
    """k = F r^2 / m1 at the masses of Earth and Sun, the median over Newtonian equations."""
    forms = (form(equation["equation"]) for equation in equations if newtonian(equation))
    found = [float(evaluate(text, np.array([[1.0, 3e-6, 1.0]]))[0]) / 3e-6 for text in forms]
    return median(found) if found else None


def operon(x: np.ndarray, y: np.ndarray, seed: int, effort: Effort) -> list[Candidate]:
    """NSGA-II on mean absolute error and length; division stands for PySR's inverse."""
    from pyoperon.sklearn import SymbolicRegressor

    # Masses of 1e-9 and forces of 1e-5 are brought to the order of one, and back in the equation.
    size, unit = np.median(np.abs(x), axis=0), float(np.std(y)) or 1.0
    search = SymbolicRegressor(
        allowed_symbols="add,mul,div,sin,cos,exp,constant,variable",
        objectives=["mae", "length"],
        max_length=MAX_SIZE,
        population_size=effort.population,
        generations=10_000,
        max_evaluations=effort.evaluations,
        optimizer_iterations=3,
        random_state=seed,
        n_threads=1,
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


def readable(equation: str, digits: int = 6) -> str:
    """The equation with its constants multiplied out and rounded."""
    expression = _parse(equation)
    with contextlib.suppress(ArithmeticError, ValueError, TypeError):
        expression = sympy.powsimp(sympy.expand_mul(expression))
    rounded = {number: sympy.Float(number, digits) for number in expression.atoms(sympy.Float)}
    return str(expression.xreplace(rounded))


def pysr(x: np.ndarray, y: np.ndarray, seed: int, effort: Effort) -> list[Candidate]:
    """The paper's settings."""
    from pysr import PySRRegressor

    search = PySRRegressor(
        niterations=effort.iterations,
        binary_operators=["+", "*"],
        unary_operators=["sin", "cos", "exp", "inv(x) = 1/x"],
        extra_sympy_mappings={"inv": lambda value: 1 / value},
        elementwise_loss="loss(prediction, target) = max(1e-8, abs(prediction - target)) - 1e-8",
        maxsize=MAX_SIZE,
        random_state=seed,
        parallelism="serial",
        deterministic=True,
        temp_equation_file=True,
        progress=False,
        verbosity=0,
    )
    search.fit(x, y, variable_names=list(NAMES))
    rows = search.equations_.itertuples()
    return [Candidate(str(r.sympy_format), int(r.complexity), float(r.loss)) for r in rows]


ENGINES: dict[str, Engine] = {"pysr": pysr, "operon": operon}


def available(name: str = "auto") -> str:
    """The engine to use: the named one, or PySR when it can be imported, or Operon."""
    for engine, module in (("pysr", "pysr"), ("operon", "pyoperon")):
        if name not in ("auto", engine):
            continue
        try:
            importlib.import_module(module)
            return engine
        except Exception as error:  # without Julia, PySR's import fails in many ways
            if name != "auto":
                raise UserError(f"--engine {name}: cannot be imported ({error})") from None
    raise UserError("neither pysr nor pyoperon is here: pip install -r requirements-physics.txt")
