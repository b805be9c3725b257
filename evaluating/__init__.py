"""Measures trained models: what the evaluation commands at the root lean on."""
