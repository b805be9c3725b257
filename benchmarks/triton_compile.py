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
# Per variant: P of the kernel (0: real or adaptive), and whether rows are re-weighted at all.
VARIANTS = {"p=15": (15, True), "real p": (0, True), "lssa": (1, False)}
POWERS = ("p=15", "real p")
FLOAT_STATE = ("INV_K", "EXACT", "GUIDE", "STATS", "DELTA", "RANGE")
SCALARS = ("log_d", "p", "alpha", "train_length")
FIELDS = ("kernel", "sm", "head_dim", "dtype", "variant", "rows", "keys", "warps", "stages")
FIELDS += ("registers", "spilled_bytes", "shared_bytes")
LINE = (
    "{kernel:8} {sm:>3} {head_dim:>4} {dtype:5} {variant:7} {tile:>9} {warps:>6} {stages:>7} "
    "{registers:>10} {spilled_bytes:>8} {shared_bytes:>7}"
)
HEADER = {"head_dim": "D", "dtype": "type", "variant": "power", "tile": "tile"}
HEADER |= {"spilled_bytes": "spilled", "shared_bytes": "shared"}


def jobs(head_dim: int, first_only: bool) -> list[dict]:
    """Every compilation of the table but for the architecture, as arguments of `resources`."""
    found = []
    for (kernel, dim, width), configs in CONFIGS.items():
        if dim != head_dim or (first_only and width == 4):
            continue
        dtype = "bf16" if width == 2 else "fp32"
        some = configs if dim == 64 else configs[:1]
        chosen = [("p=15", dtype, configs), ("real p", dtype, some), ("lssa", dtype, configs[:1])]
        if width == 2:
            chosen += [(power, dtype, DECODE_CONFIGS[kernel]) for power in POWERS]
            chosen += [(power, "fp16", some) for power in POWERS]
        if first_only:
            chosen = [("p=15", dtype, configs[:1])]
        job = {"kernel": kernel, "head_dim": dim}
        for variant, dtype, these in chosen:
            found += [job | {"dtype": dtype, "variant": variant, "config": c} for c in these]
    return found


def resources(
    *, kernel: str, head_dim: int, dtype: str, variant: str, config: tuple, architecture: int
) -> dict:
    """Compile one kernel to a cubin; its registers, spilled bytes and shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    rows, keys, warps, stages = config
    source = _source(kernel_function(kernel), head_dim, dtype, variant, rows, keys)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    measured = *_ptxas(compiled.asm["ptx"], architecture), compiled.metadata.shared
    values = kernel, architecture, head_dim, dtype, variant, *config, *measured
    return dict(zip(FIELDS, values, strict=True))


def _source(kernel, head_dim: int, dtype: str, variant: str, rows: int, keys: int):
    """What the launcher would compile: contiguous heads, pointers and strides divisible by 16."""
    from triton.compiler import ASTSource

    power, reweight = VARIANTS[variant]
    constants = {"P": power, "REWEIGHT": reweight, "SAVE": True, "d": head_dim}
    constants |= {"BLOCK_D": head_dim, "BLOCK_M": rows, "BLOCK_N": keys}
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
    """Registers per thread and bytes spilled."""
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


def main(options: Namespace) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
    if options.out:
        check_writable(options.out)
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton is not installed; pip install triton")
    if options.head_dim not in (None, *HEAD_DIMS):
        raise UserError(f"--head-dim {options.head_dim}: no configuration of it; give 64 or 128")
    head_dims = (options.head_dim,) if options.head_dim else HEAD_DIMS
    found = [job for head_dim in head_dims for job in jobs(head_dim, options.first)]
    todo = [job | {"architecture": sm} for sm in ARCHITECTURES for job in found]
    print(LINE.format(**dict(zip(FIELDS, FIELDS, strict=True)) | HEADER))
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: nothing of another checkout is in it, and the home may be read-only.
        os.environ["TRITON_CACHE_DIR"] = cache
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            for pending in [pool.apply_async(resources, kwds=job) for job in todo]:
                rows.append(row := pending.get())
                print(LINE.format(**row, tile=f"{row['rows']}x{row['keys']}"), flush=True)
    if options.out:
        table = {"status": "compiled with ptxas, not run on hardware"}
        table["command"] = "python benchmark.py compile --out results/triton_resources.json"
        table |= {"triton": importlib.metadata.version("triton"), "kernels": rows}
        write_json(options.out, table)
        print(f"written: {options.out}")
