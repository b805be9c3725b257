"""Holds what train.py leans on: configs, checkpoints, processes, the log, estimates."""
