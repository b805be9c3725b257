"""The paper: its numbers, its experiments, tables, claims and the page."""
