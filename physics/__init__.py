"""Finds out whether a model of orbits knows Newton's law: simulation, forces, equations."""

# The tasks of physics/force.py, with how many numbers a model predicts per position.
TASKS = {"magnitude": 1, "vector": 2}
