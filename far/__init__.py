"""Tests whether a model uses context beyond its training length: docs/far_context.md."""
