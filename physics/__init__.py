"""Does a model of orbits find Newton's law: simulation, force prediction, symbolic regression."""
