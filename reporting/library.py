"""A folder of results, read: what can be shown, by kind, and what cannot, with the reason."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from errors import UserError
from files import unseal
from reporting.records import (
    Claim,
    Malformed,
    Run,
    Table,
    read_claims,
    read_runs,
    read_table,
    take,
)

MAX_JSON, MAX_PNG = 16 << 20, 4 << 20  # bytes; more than any result has, less than a page can bear
DATA = "data"  # folder of the site with the copied JSON


@dataclass(frozen=True)
class Figure:
    path: str
    png: bytes
    width: int
    height: int


@dataclass
class Scale:
    """What was found of one scale."""

    name: str
    tables: list[Table] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by file


class Library:
    def __init__(self, root: Path, paper: Path):
        """Read everything below `root`. `paper` is the file of the paper's numbers."""
        self.scales: dict[str, Scale] = {}
        self.others: dict[str, str] = {}  # path -> kind, of results with no table of their own
        self.copies: dict[str, str] = {}  # path in the site -> text of the file
        self.figures: dict[str, Figure] = {}
        self.problems: list[tuple[str, str]] = []  # (path, why it is not shown)
        self._known: dict[str, str] = {}  # path below root -> link
        for path in walk(root):
            relative = path.relative_to(root).as_posix()
            if path.suffix == ".json":
                self._read(relative, path, self._add)
            elif path.suffix == ".png":
                self._read(relative, path, self._add_figure)
        self.paper_link, self.paper = None, {}
        if paper.exists():
            self._read(paper.name, paper, self._add_paper)

    def _read(self, relative: str, path: Path, add: Callable[[str, bytes], None]) -> None:
        try:
            if path.is_symlink() or not path.is_file():
                raise Malformed("it is a link or a device, not a file")
            limit = MAX_JSON if path.suffix == ".json" else MAX_PNG
            if path.stat().st_size > limit:
                raise Malformed(f"it is larger than {limit >> 20} MB")
            add(relative, path.read_bytes())
        except OSError as error:
            self.problems.append((relative, error.strerror or str(error)))
        except UnicodeDecodeError:
            self.problems.append((relative, "it is not UTF-8 text"))
        except json.JSONDecodeError as error:
            self.problems.append((relative, f"it is not JSON: {error.msg} at line {error.lineno}"))
        except RecursionError:
            self.problems.append((relative, "it is nested too deeply"))
        except ValueError as error:
            self.problems.append((relative, str(error)))

    def _add(self, relative: str, content: bytes) -> None:
        found = parse(content)
        kind = take(found, "kind", str, "")
        parts = PurePosixPath(relative).parts
        scale = take(found, "scale", str, parts[0] if len(parts) > 1 else "results")
        if kind == "table":
            self._scale(scale).tables.append(read_table(found, relative, scale))
        elif kind == "claims":
            self._scale(scale).claims += read_claims(found)
        elif kind == "runs":
            self._scale(scale).runs[relative] = read_runs(found)
        else:
            self.others[relative] = kind
        link = f"{DATA}/results/{relative}"
        self.copies[link] = content.decode("utf-8")
        self._known[relative] = quote(link)

    def _scale(self, name: str) -> Scale:
        return self.scales.setdefault(name, Scale(name))

    def _add_figure(self, relative: str, content: bytes) -> None:
        width, height = png_size(content)
        self.figures[relative] = Figure(relative, content, width, height)

    def _add_paper(self, name: str, content: bytes) -> None:
        self.paper = parse(content)
        self.paper_link = f"{DATA}/{name}"
        self.copies[self.paper_link] = content.decode("utf-8")

    def paper_unit(self, label: str) -> str | None:
        entry = self.paper.get(label)
        unit = entry.get("unit") if isinstance(entry, dict) else None
        return unit if isinstance(unit, str) else None

    # --- what a file is called by the others -----------------------------------------------------

    def find(self, named: str, among: dict) -> str | None:
        """The path below root of a file that a result names, as from the repository's root."""
        parts = PurePosixPath(named).parts
        return next(
            (p for i in range(len(parts)) if (p := "/".join(parts[i:])) in among),
            None,
        )

    def link(self, named: str) -> str | None:
        """Where the page finds this JSON; None for what is not below root, whatever it is."""
        found = self.find(named, self._known)
        return None if found is None else self._known[found]

    def figures_of(self, path: str, named: tuple[str, ...] = ()) -> list[Figure]:
        """Figures that a result names, and the one beside it with its own stem."""
        beside = str(PurePosixPath(path).with_suffix(".png"))
        found = [self.find(name, self.figures) for name in (*named, beside)]
        return [self.figures[p] for p in dict.fromkeys(found) if p is not None]


def walk(root: Path) -> Iterator[Path]:
    """Every file below root that is not hidden, in the order of the names."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the folder of results, usually results/")
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def parse(content: bytes) -> dict:
    found = json.loads(content.decode("utf-8"), parse_constant=lambda _: None)
    if not isinstance(found, dict):
        raise Malformed("it is JSON, but not an object")
    return unseal(found)


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height of a whole PNG file."""
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR" or len(content) < 33:
        raise Malformed("it is not a PNG picture")
    if b"IEND" not in content[-12:]:
        raise Malformed("it ends in the middle of the picture")
    return struct.unpack(">II", content[16:24])
