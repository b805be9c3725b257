"""Finds out whether a model of orbits knows Newton's law: simulation, forces, equations."""

TASKS = ("magnitude", "vector")  # of physics/force.py; a task's place + 1 is its number of outputs
