"""Does a model of orbits find Newton's law? Simulation, force prediction, symbolic regression."""

TASKS = ("magnitude", "vector")  # what physics/force.py fine-tunes for
