"""Measures trained models; the evaluation commands at the root lean on this room."""
