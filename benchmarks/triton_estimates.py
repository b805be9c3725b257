"""Estimates how fast the compiled Triton kernels may be: `python benchmark.py kernels`.

Nothing runs. Every entry of `lssar/triton_table.py` is compiled; for an A100 and an H100 the time
relative to a plain flash softmax (`flash_softmax.py`) is estimated from the instructions.
"""

import importlib.metadata
import math
from argparse import Namespace

from benchmarks.triton_compile import (
    ESTIMATED,
    FLASH,
    KERNELS,
    check,
    in_processes,
    jobs,
    resources,
)
from benchmarks.triton_counts import ASSUMED, calibrated, together
from support.files import write_json
from support.text import table

DEVICES = {80: "A100", 90: "H100"}
SHOWN = ("lssar", "lssa")
PASSES = {"forward": KERNELS[:1], "forward+backward": KERNELS}


def estimates(rows: list[dict]) -> list[dict]:
    """Estimate time relative to flash softmax, for each form, card, head dimension and pass."""
    clocks = {
        (r["form"], r["sm"], r["head_dim"], r["kernel"]): r["clocks"]
        for r in rows
        if r["dtype"] == "bf16" and r["sm"] in ESTIMATED and "clocks" in r
    }
    found = []
    for sm in ESTIMATED:
        point = ASSUMED["published"][str(sm)]
        d = point["head_dim"]
        n = calibrated([clocks[FLASH, sm, d, k] for k in PASSES[point["passes"]]], d, sm)
        for d in (64, 128):
            for form in SHOWN:
                for name, kernels in PASSES.items():
                    row = {"form": form, "device": DEVICES[sm], "head_dim": d, "passes": name}
                    for how, overlap in {"slowest": math.inf, "calibrated": n, "serial": 1}.items():
                        ours = sum(together(clocks[form, sm, d, k], overlap) for k in kernels)
                        flash = sum(together(clocks[FLASH, sm, d, k], overlap) for k in kernels)
                        row[how] = ours / flash
                    found.append(row)
    return found


def markdown_table(found: list[dict]) -> str:
    """Write slowest pipe / calibrated / serial, as docs/kernels.md has them."""
    columns = [(device, d) for device in DEVICES.values() for d in (64, 128)]
    lines = ["| | " + " | ".join(f"{device}, D = {d}" for device, d in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for form in SHOWN:
        for passes in PASSES:
            cells = []
            for device, d in columns:
                place = {"form": form, "device": device, "head_dim": d, "passes": passes}
                (row,) = (r for r in found if place.items() <= r.items())
                values = (row[how] for how in ("slowest", "calibrated", "serial"))
                cells.append(" / ".join(f"{value:.2f}" for value in values))
            lines.append(f"| {form.upper()}, {passes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args: Namespace) -> None:
    check()
    rows = in_processes(resources, jobs(args.first), args.workers)
    shown = ("kernel", "sm", "head_dim", "dtype", "form", "config", "registers", "shared_bytes")
    shown += ("spilled_bytes", "spills_in_loops")
    header = [key.replace("_", " ") for key in shown]
    print(table(header, [[str(row[key]) for key in shown] for row in rows]))
    found = {
        "status": "an estimate from compiled code, not run on hardware",
        "command": "python benchmark.py kernels --out results/triton_kernels.json",
        "triton": importlib.metadata.version("triton"),
        "assumptions": ASSUMED["assumptions"],
        "kernels": rows,
    }
    if not args.first:
        found["estimates"] = estimates(rows)
        print("\ntime / flash softmax's in Triton: slowest pipe / calibrated / serial")
        print(markdown_table(found["estimates"]))
    if args.out:
        write_json(args.out, found)
        print(f"written: {args.out}")
