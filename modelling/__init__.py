"""Holds what model.py and attention.py lean on: the config, positions, the KV cache, the loss."""
