"""Holds the paper's experiments: runs and tables as data, their jobs, figures and page."""
