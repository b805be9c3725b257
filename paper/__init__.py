"""The paper's experiments: runs and tables as data, the jobs that fill them, figures, the page."""
