"""Light rooms stay light, no file has the name of another, hosted tests are the README's."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROOMS = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
ROOMS |= {p.stem for p in ROOT.glob("*.py")}
TEXT = {"capture_output": True, "text": True, "check": True}


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


def test_no_file_name_stands_for_two_things():
    files = subprocess.run(["git", "ls-files", "*.py", "*.h", "*.cpp"], cwd=ROOT, **TEXT).stdout
    names = [
        Path(f).name for f in files.split() if Path(f).name not in ("__init__.py", "conftest.py")
    ]
    assert len(names) > 200
    assert [name for name in names if names.count(name) > 1] == []


def test_the_hosted_tests_are_the_two_commands_of_the_readme():
    found = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    (job,) = found["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in commands:
        assert re.search(rf"^{re.escape(command)}\b", readme, re.MULTILINE), command
    assert commands == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    matrix = job["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
