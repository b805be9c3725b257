"""What a score element costs on a GPU, read off the compiled code: `python benchmark.py counts`.

The Triton kernels are compiled for A100 and H100 and disassembled. What their loops over whole
tiles do is counted by kind and divided by the elements of a tile. Each kind has a rate, and the
slowest gives the clocks that an element takes. The ratio to those of `flash_softmax.py` is an
estimate: nothing runs.
"""

import importlib.metadata
import itertools
import math
import re
import tomllib
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks.study import Study
from benchmarks.triton_compile import FORMS, check, compile_for, in_processes, nvidia_tool
from evaluating.results import Record
from lssar.mechanisms import MECHANISMS
from lssar.triton_op import CONFIGS, kernel_function
from support import plots
from support.text import table

FLASH = "flash softmax"
KERNELS, BOTH = ("forward", "dq", "dkv"), "forward+backward"
HEAD_DIMS = (64, 128)
# Of triton_compile's forms, whose each is.
COUNTED = {"lssar": "p=15", "lssa": "lssa", "sigmoid-logn": "sigmoid, bias", "softmax": "softmax"}
LABELS = {name: MECHANISMS[name].title for name in COUNTED}
ASSUMED = tomllib.loads(Path(__file__).with_name("gpu_rates.toml").read_text(encoding="utf-8"))
DEVICES = {80: "A100", 90: "H100"}
RATES = {sm: ASSUMED["rates"][str(sm)] for sm in DEVICES}
PIPE_OF = {name: pipe for pipe, names in ASSUMED["pipes"].items() for name in names.split()}


def loops(sass: str) -> list[list[str]]:
    """The names of the instructions of every innermost loop that multiplies matrices."""
    labels, names, found = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s*/\*\w+\*/\s+(?:@!?\w+\s+)?([\w.]+)(.*)", line):
            names.append(instruction[1])
            target = re.search(r"\.L_\w+", instruction[2])
            if names[-1].startswith("BRA") and target and target[0] in labels:  # backwards
                loop = range(labels[target[0]], len(names))
                if any(names[i].startswith(("HMMA", "HGMMA")) for i in loop):
                    found.append(loop)
    outer = {a for a in found for b in found if a != b and b[0] in a and b[-1] in a}
    return [[names[i] for i in loop] for loop in found if loop not in outer]


def work(loop: list[str]) -> Counter:
    """What one thread does in one turn of a loop."""
    done = Counter(issue=len(loop))
    for name in loop:
        root, *parts = name.split(".")
        if re.match("U(?!TMA)", root):  # once for a whole warp
            continue
        if (pipe := PIPE_OF.get(root)) is None:
            raise RuntimeError(f"the pipe of {name} is not known; add it to gpu_rates.toml")
        if pipe == "tensor":  # HGMMA.64x32x16 of four warps together, HMMA.16816 of each
            together, old = root == "HGMMA", {"16816": "16x8x16", "1688": "16x8x8"}
            flop = 2 * math.prod(map(int, old.get(parts[0], parts[0]).split("x")))
            done["tensor"] += flop / (128 if together else 32)
        elif pipe == "l1":
            width = next((int(part) // 8 for part in parts if part in ("64", "128")), 4)
            if root in ("LDSM", "STSM"):  # up to four matrices of 8 x 8 numbers of 16 bits
                width = 4 * int(parts[-1]) if parts[-1].isdecimal() else 4
            done["l1"] += width
            done["l2"] += width * (root in ("LDG", "LDGSTS") and width == 16)
        elif pipe != "issue":
            done[pipe] += 1
    return done


def count(job: dict) -> dict:
    """The job with its work per score element, by kind, and the clocks that takes."""
    sm, (rows, keys, warps, _), kernel = job["sm"], job["config"], kernel_function(job["kernel"])
    if job["mechanism"] == FLASH:
        from benchmarks import flash_softmax

        kernel = getattr(flash_softmax, kernel.__name__)
    form = FORMS[COUNTED.get(job["mechanism"], "softmax")]
    compiled = compile_for(sm, kernel, job["head_dim"], "bf16", form, job["config"])
    sass = nvidia_tool("nvdisasm", compiled.asm["cubin"], "-c").stdout
    passes: dict[float, list[Counter]] = {}
    for done in map(work, loops(sass)):
        passes.setdefault(done["tensor"], []).append(done)
    if not passes or any(len(twins) != 2 for twins in passes.values()):
        raise RuntimeError(f"{job}: not two loops per pass, over whole tiles and the diagonal's")
    whole = [min(twins, key=lambda done: done["issue"]) for twins in passes.values()]
    elements = rows * keys / (32 * warps)  # of a thread
    work_of = {kind: sum(done[kind] for done in whole) / elements for kind in RATES[sm]}
    clocks = {kind: work_of[kind] / rate for kind, rate in RATES[sm].items()}
    slowest = max(clocks, key=clocks.__getitem__)
    found = {"work": work_of, "slowest": slowest, "clocks": clocks[slowest]}
    return job | found | {"serial": sum(clocks.values()) - clocks["issue"]}


def jobs() -> list[dict]:
    from benchmarks.flash_softmax import CONFIGS as PLAIN

    return [
        {"mechanism": name, "head_dim": d, "sm": sm, "kernel": kernel}
        | {"config": PLAIN[kernel, d] if name == FLASH else CONFIGS[kernel, d, 2][0]}
        for name, d, sm, kernel in itertools.product((FLASH, *COUNTED), HEAD_DIMS, RATES, KERNELS)
    ]


def records(counted: list[dict]) -> list[Record]:
    """The clocks of every kernel and of all three, and their ratios to flash softmax's."""
    rows = {(r["mechanism"], r["head_dim"], r["sm"], r["kernel"]): r for r in counted}
    for *key, _ in list(rows):
        parts = [rows[*key, kernel] for kernel in KERNELS]
        rows[*key, BOTH] = {k: sum(part[k] for part in parts) for k in ("clocks", "serial")}
    found = []
    for (name, d, sm, kernel), row in rows.items():
        place = {"run": LABELS.get(name, FLASH), "variant": f"{kernel}, D={d}, {DEVICES[sm]}"}
        details = {key: row[key] for key in ("config", "slowest", "work") if key in row}
        found.append(Record("clocks_per_element", value=row["clocks"], **place, details=details))
        flash = rows[FLASH, d, sm, kernel]
        serial = {"without_overlap": row["serial"] / flash["serial"]}
        ratio = row["clocks"] / flash["clocks"]
        found.append(Record("ratio", value=ratio, **place, details=serial))
    return found


def ratios(found: list[Record], run: str, device: str) -> dict[str, float]:
    """{"forward, D=64": ratio, ...}"""
    own = [r for r in found if (r.quantity, r.run) == ("ratio", run) and r.variant.endswith(device)]
    return {r.variant.removesuffix(f", {device}"): r.value for r in own}


def draw(found: list[Record], out: Path) -> list[Path]:
    figure, panels = plots.figure(1, len(DEVICES), width=plots.PAGE, height=2.9, sharey=True)
    for axes, device in zip(panels, DEVICES.values(), strict=True):
        for name, label in LABELS.items():
            places, values = zip(*ratios(found, label, device).items(), strict=True)
            style = plots.style(name) | {"linestyle": "none"}
            axes.plot(values, places, **style, label=label)
        axes.axvline(1, color=plots.INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"estimated time / flash softmax's, {device}")
    panels[0].invert_yaxis()
    plots.legend_below(figure, panels[0], columns=len(COUNTED))
    return plots.save(figure, out.with_suffix(".png"))


def main(args: Namespace) -> None:
    check()
    about = {
        "status": "an estimate from compiled code, not run on hardware",
        "assumptions": ASSUMED["assumptions"],
        "rates": {DEVICES[sm]: rates for sm, rates in RATES.items()},
        "triton": importlib.metadata.version("triton"),
    }
    study = Study(args, {"dtype": "bf16"}, about)
    study.records = found = records(in_processes(count, jobs(), args.workers))
    study.runs = {r.run: {"run": r.run} for r in found}
    columns = [(device, kernel) for device in DEVICES.values() for kernel in (*KERNELS, BOTH)]
    rows = []
    for d, label in itertools.product(HEAD_DIMS, LABELS.values()):
        values = [ratios(found, label, device)[f"{kernel}, D={d}"] for device, kernel in columns]
        rows.append([f"{label}, D={d}", *(f"{value:.1f}" for value in values)])
    numbers = table(["", *(f"{device} {kernel}" for device, kernel in columns)], rows)
    study.report(f"{about['status']}; time / flash softmax's", numbers, partial(draw, found))
