"""Who may import whom: data flows forward, no two modules import each other."""

import ast
import subprocess
import sys
from pathlib import Path

from checkout import ROOT, tracked

# Each room with the rooms it may import. Commands at the root may import everything but commands.
MODEL = ("model", "attention", "modelling", "lssar")
LEANED_ON = ("training", "data", "support", *MODEL)
MAY_IMPORT = {
    "lssar": (),
    "support": ("lssar.errors",),
    "data": ("lssar", "support"),
    "modelling": ("lssar",),
    "attention": ("modelling", "lssar"),
    "model": ("attention", "modelling", "lssar"),
    "training": ("data", "support", *MODEL),
    "evaluating": LEANED_ON,
    "physics": ("train", "evaluating", *LEANED_ON),  # train.py's loop with a model of orbits
    "far": ("evaluating", *LEANED_ON),
    "benchmarks": ("evaluating", *LEANED_ON),
    "paper": ("physics", "far", "evaluating", *LEANED_ON),
    "examples": ("lssar",),
    "scripts": ("lssar", "support"),
}


def tracked_modules() -> dict[str, Path]:
    """Return every module of the project but the tests by its name."""
    found = {}
    for path in tracked("*.py", ":!tests"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: set[str]) -> set[str]:
    """Return the modules of the project that a file imports, wherever in it the import stands."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & known


def test_rooms_import_only_what_lies_before_them():
    modules = tracked_modules()
    wrong = []
    for name, path in modules.items():
        room = name.partition(".")[0]
        allowed = (room, *MAY_IMPORT.get(room, MAY_IMPORT))
        for other in imported(path, set(modules)):
            fits = any(other == a or other.startswith(f"{a}.") for a in allowed)
            if not fits:
                wrong.append(f"{name} imports {other}")
    assert not wrong, wrong


def test_no_module_imports_itself_through_others():
    modules = tracked_modules()
    edges = {name: imported(path, set(modules)) - {name} for name, path in modules.items()}
    finished = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in finished:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            finished.add(name)

    for name in modules:
        visit(name, ())


def paths_below_results(path: Path) -> list[int]:
    """Return the lines of a file that make a path in results/: Path("results"), X / "results"."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Path", "open"):
            parts = node.args
        for part in parts:
            text = part.value if isinstance(part, ast.Constant) else None
            if isinstance(text, str) and text.partition("/")[0] == "results":
                lines.append(node.lineno)
    return lines


def test_only_the_room_of_the_paper_reads_results():
    assert paths_below_results(ROOT / "paper/quickstart.py")  # a reader is found
    for path in tracked("*.py", ":!tests", ":!paper"):
        assert not paths_below_results(path), path


def test_support_needs_no_torch():
    program = (
        "import pathlib, sys\n"
        "for path in sorted(pathlib.Path('support').glob('*.py')):\n"
        "    __import__(f'support.{path.stem}')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
