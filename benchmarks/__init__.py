"""The benchmarks behind `python benchmark.py NAME`."""
