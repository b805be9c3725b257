"""Counts what a score element costs on a GPU, from the compiled code.

The work of the loops over whole tiles is counted by kind and divided by the elements of a tile.
Each kind has a rate (`gpu_rates.toml`), which makes clocks of it. The kinds overlap: if fully, the
slowest kind is what counts, and if never, their sum (serial). In between lies (sum clocks^n)^(1/n),
with the n of the architecture at which flash softmax meets its published speed.
"""

import math
import re
import tomllib
from collections import Counter
from pathlib import Path

ASSUMED = tomllib.loads(Path(__file__).with_name("gpu_rates.toml").read_text(encoding="utf-8"))
RATES = {int(sm): rates for sm, rates in ASSUMED["rates"].items()}
OLD_SHAPES = {"16816": "16x8x16", "1688": "16x8x8"}  # of HMMA
PIPE_OF = {name: pipe for pipe, names in ASSUMED["pipes"].items() for name in names.split()}


def loops(sass: str) -> list[list[str]]:
    """List the instructions of every innermost loop that multiplies matrices."""
    labels = {}
    names = []
    found = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s*/\*\w+\*/\s+(?:@!?\w+\s+)?([\w.]+)(.*)", line):
            names.append(instruction[1])
            target = re.search(r"\.L_\w+", instruction[2])
            if names[-1].startswith("BRA") and target and target[0] in labels:  # backwards
                loop = range(labels[target[0]], len(names))
                if any(names[i].startswith(("HMMA", "HGMMA", "UTCHMMA")) for i in loop):
                    found.append(loop)
    innermost = [loop for loop in found if not any(_holds(loop, other) for other in found)]
    return [[names[i] for i in loop] for loop in innermost]


def _holds(outer: range, inner: range) -> bool:
    """Tell whether a loop holds another one."""
    return outer != inner and inner[0] in outer and inner[-1] in outer


def work(loop: list[str]) -> Counter:
    """Count the work of one thread in one turn of a loop."""
    done = Counter(issue=len(loop))
    for name in loop:
        root, *parts = name.split(".")
        if re.match("U(?!TMA)", root):  # once for a whole warp
            continue
        if (pipe := PIPE_OF.get(root)) is None:
            raise RuntimeError(f"the pipe of {name} is not known; add it to gpu_rates.toml")
        if pipe == "tensor":  # HGMMA.64x32x16 of four warps together, HMMA.16816 of each
            shape = OLD_SHAPES.get(parts[0], parts[0])
            flop = 2 * math.prod(map(int, shape.split("x")))
            threads = 128 if root == "HGMMA" else 32
            done["tensor"] += flop / threads
        elif pipe == "l1":
            width = next((int(part) // 8 for part in parts if part in ("64", "128")), 4)
            if root in ("LDSM", "STSM"):  # up to four matrices of 8 x 8 numbers of 16 bits
                width = 4 * int(parts[-1]) if parts[-1].isdecimal() else 4
            done["l1"] += width
            done["l2"] += width * (root in ("LDG", "LDGSTS") and width == 16)
        elif pipe != "issue":
            done[pipe] += 1
    return done


def cost(sass: str, elements: float, sm: int | None) -> dict:
    """Count spills inside of the loops, and the clocks of each kind of work per score element.

    `elements` is the number of elements of a tile that one thread has. Where the architecture has
    no rates, only the spills are counted.
    """
    found = loops(sass)
    spills = sum(name.startswith(("STL", "LDL")) for loop in found for name in loop)
    if sm not in RATES:
        return {"spills_in_loops": spills}
    # The loop over whole tiles has a twin with masks, and the same products.
    passes: dict[float, list[Counter]] = {}
    for done in map(work, found):
        passes.setdefault(done["tensor"], []).append(done)
    if not passes or any(len(twins) != 2 for twins in passes.values()):
        raise RuntimeError("not two loops per pass, over whole tiles and the border's")
    whole = [min(twins, key=lambda done: done["issue"]) for twins in passes.values()]
    per_score = {kind: sum(done[kind] for done in whole) / elements for kind in RATES[sm]}
    clocks = {kind: per_score[kind] / rate for kind, rate in RATES[sm].items()}
    return {"spills_in_loops": spills, "work": per_score, "clocks": clocks}


def together(clocks: dict[str, float], n: float) -> float:
    """Return the clocks of an element: kinds overlap fully (n infinite), never (1) or partly."""
    parts = [value for kind, value in clocks.items() if kind != "issue"]
    if n == math.inf:
        return max(clocks.values())
    return sum(part**n for part in parts) ** (1 / n)


def calibrated(passes: list[dict[str, float]], head_dim: int, sm: int) -> float:
    """Return the n at which these passes of flash softmax together have their published speed."""
    published = ASSUMED["published"][str(sm)]
    peak = published["peak"] / published["teraflops"]
    wanted = peak * 2 * head_dim * published["products"] / RATES[sm]["tensor"]  # clocks
    low, high = 1.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(together(clocks, middle) for clocks in passes) > wanted:
            low = middle
        else:
            high = middle
    return low
