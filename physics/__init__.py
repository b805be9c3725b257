"""Finds out whether a model of orbits knows Newton's law: simulation, forces, equations."""
