"""Holds the config, positions, KV cache and loss that model.py and attention.py lean on."""
