"""Light rooms stay light: helpers and results are used where torch is not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
ROOMS |= {p.stem for p in ROOT.glob("*.py")}


def imported(file: Path) -> set[str]:
    """Every module that the file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "support").glob("*.py")), ids=lambda f: f.name)
def test_support_imports_neither_torch_nor_a_heavier_room(file):
    assert {"lssar", "support", "training", "train"} <= ROOMS
    for module in imported(file):
        top = module.partition(".")[0]
        assert top != "torch", module
        assert top not in ROOMS - {"support"} or module.startswith("lssar.errors."), module


def test_results_are_read_without_torch(tmp_path):
    """As the page reads them: every number of the repository's own results."""
    program = (
        "import sys\n"
        "from evaluating.results import collect\n"
        "found, _ = collect('results/nano/extrapolation')\n"
        "assert found and all(m.name and m.seed is not None for m in found)\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
