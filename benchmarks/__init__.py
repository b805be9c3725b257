"""Holds the benchmarks behind `python benchmark.py NAME`."""
