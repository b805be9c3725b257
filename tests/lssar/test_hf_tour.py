"""examples/tour.ipynb: runs from top to bottom, and is kept with small outputs."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")
pytest.importorskip("nbclient", reason="pip install -r requirements-ecosystem.txt")

import nbclient
import nbformat

FILE = Path(__file__).parents[2] / "examples/tour.ipynb"


def test_the_notebook_is_kept_as_it_was_run():
    notebook = nbformat.read(FILE, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert FILE.stat().st_size < 200_000
    assert "site-packages" not in FILE.read_text(encoding="utf-8")  # a warning with a path


def test_the_notebook_runs():
    notebook = nbformat.read(FILE, as_version=4)
    resources = {"metadata": {"path": str(FILE.parent)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
    first = next(cell for cell in notebook.cells if "largest difference" in cell.source)
    assert float(first.outputs[0].text.rpartition(" ")[2]) < 1e-5
