"""The paper: its numbers, its experiments, tables, claims and the page."""

import json
from pathlib import Path


def paper_numbers() -> dict:
    """{label of a table: what the paper prints there}."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
