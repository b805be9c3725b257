"""The Triton kernels compiled without a GPU: `python benchmark.py compile`.

For A100 (sm_80) and H100 (sm_90), with what ptxas says of each: registers per thread, bytes
spilled, shared memory. Every configuration that `lssar/triton_op.py` may choose is compiled, at
head dim 64 in bf16 and fp16, with p = 15 and with a real p (which is also the adaptive one); the
first of each also for LSSA, and at head dim 128 for all of these.
"""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import subprocess
import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.measure import check_writable
from lssar.errors import UserError
from lssar.triton_op import CONFIGS, DECODE_CONFIGS, kernel_function
from support.files import write_json

ARCHITECTURES = (80, 90)
HEAD_DIMS = (64, 128)
# Which powers: P of the kernel (0: real or adaptive), and whether rows are re-weighted at all.
VARIANTS = {"p=15": (15, True), "real p": (0, True), "lssa": (1, False)}
POWERS = ("p=15", "real p")
FLOAT_STATE = ("INV_K", "EXACT", "GUIDE", "STATS", "DELTA", "RANGE")
SCALARS = ("log_d", "p", "alpha", "train_length")


def jobs(head_dim: int, first_only: bool) -> list[dict]:
    """Every compilation of the table but for the architecture, as arguments of `resources`."""
    found = []
    for (kernel, dim, width), configs in CONFIGS.items():
        if dim != head_dim or (first_only and width == 4):
            continue
        types = ("bf16", "fp16") if width == 2 else ("fp32",)
        job = {"kernel": kernel, "head_dim": dim, "dtype": types[0], "variant": "p=15"}
        if first_only:
            found.append({**job, "config": configs[0]})
            continue
        found += [{**job, "config": c} for c in configs]
        wide = configs if dim == 64 else configs[:1]
        found += [{**job, "variant": "real p", "config": c} for c in wide]
        found.append({**job, "variant": "lssa", "config": configs[0]})
        if width == 2:
            decode = DECODE_CONFIGS[kernel]
            found += [{**job, "variant": v, "config": c} for v in POWERS for c in decode]
            found += [
                {**job, "dtype": "fp16", "variant": v, "config": c} for v in POWERS for c in wide
            ]
    return found


def resources(
    kernel: str,
    head_dim: int,
    dtype: str,
    variant: str,
    config: tuple[int, int, int, int],
    architecture: int,
) -> dict:
    """Compile one kernel to a cubin; its registers, spilled bytes and shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    rows, keys, warps, stages = config
    source = _source(kernel_function(kernel), head_dim, dtype, variant, config)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _ptxas(compiled.asm["ptx"], architecture)
    return {
        "kernel": kernel,
        "sm": architecture,
        "head_dim": head_dim,
        "dtype": dtype,
        "variant": variant,
        "rows": rows,
        "keys": keys,
        "warps": warps,
        "stages": stages,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
    }


def _resources(job: dict) -> dict:
    return resources(**job)


def _source(kernel, head_dim, dtype, variant, config):
    """What the launcher would compile: contiguous heads, pointers and strides divisible by 16."""
    from triton.compiler import ASTSource

    power, reweight = VARIANTS[variant]
    constants = {"P": power, "REWEIGHT": reweight, "SAVE": True, "d": head_dim}
    constants |= {"BLOCK_D": head_dim, "BLOCK_M": config[0], "BLOCK_N": config[1]}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    aligned = [["tt.divisibility", 16]]
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in SCALARS:
            signature[name] = "fp32"
        elif name.endswith("_stride"):
            signature[name] = ("i32",) * 3
            attributes |= {(index, place): aligned for place in range(3)}
        elif name.isupper():
            signature[name] = "*fp32" if name in FLOAT_STATE else f"*{dtype}"
            attributes[index,] = aligned
        else:
            signature[name] = "i32"
            if name in ("q_length", "k_length", "plane"):
                attributes[index,] = aligned
    return ASTSource(kernel, signature, constants, attributes)


def _ptxas(ptx: str, architecture: int) -> tuple[int, int]:
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    name = f"sm_{architecture}a" if architecture >= 90 else f"sm_{architecture}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas, "-v", f"-arch={name}", path, "-o", Path(folder) / "kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return int(registers[1]), max(int(spills[1]), int(spills[2]))


COLUMNS = "{:8} {:>3} {:>4} {:5} {:7} {:>9} {:>6} {:>7} {:>10} {:>8} {:>7}"


def _print(row: dict) -> None:
    tile = f"{row['rows']}x{row['keys']}"
    columns = ("kernel", "sm", "head_dim", "dtype", "variant")
    counts = ("warps", "stages", "registers", "spilled_bytes", "shared_bytes")
    print(COLUMNS.format(*(row[c] for c in columns), tile, *(row[c] for c in counts)), flush=True)


def main(args: Namespace) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
    if args.out:
        check_writable(args.out)
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton is not installed; pip install triton")

    if args.head_dim and args.head_dim not in HEAD_DIMS:
        raise UserError(f"--head-dim {args.head_dim}: no configuration of it; give 64 or 128")

    head = ("kernel", "sm", "D", "type", "power", "tile", "warps", "stages")
    print(COLUMNS.format(*head, "registers", "spilled", "shared"))
    todo = [
        {**job, "architecture": architecture}
        for architecture in ARCHITECTURES
        for head_dim in ((args.head_dim,) if args.head_dim else HEAD_DIMS)
        for job in jobs(head_dim, args.first)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: nothing of another checkout is in it, and the home may be read-only.
        os.environ["TRITON_CACHE_DIR"] = cache
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            for row in pool.imap(_resources, todo):
                rows.append(row)
                _print(row)
    if args.out:
        table = {
            "status": "compiled with ptxas, not run on hardware",
            "command": "python benchmark.py compile --out results/triton_resources.json",
            "triton": importlib.metadata.version("triton"),
            "kernels": rows,
        }
        write_json(args.out, table)
        print(f"written: {args.out}")
