"""Does a model of orbits find Newton's law? Simulation, force prediction, symbolic regression."""

from dataclasses import dataclass

TASKS = ("magnitude", "vector")  # what physics/force.py fine-tunes for


@dataclass(frozen=True)
class Effort:
    """How long a symbolic regression is: PySR's iterations; Operon's population, evaluations."""

    iterations: int = 100
    population: int = 1000
    evaluations: int = 500_000
