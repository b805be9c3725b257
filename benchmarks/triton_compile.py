"""Compiles the Triton kernels without a GPU, for every card of `lssar/triton_table.py`.

Of each kernel, ptxas and the disassembled code give the registers per thread, the bytes spilled,
the shared memory, and the cost of a score element (`triton_counts.py`).
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.triton_counts import cost
from lssar import triton_table
from lssar.errors import UserError
from lssar.triton_op import Form, kernel_function
from support import processes

KERNELS = ("forward", "dq", "dkv")
FLASH = "flash softmax"
ESTIMATED = (80, 90)  # architectures whose rates are known
_COSINE = {"phi": "softplus", "cosine": True}
FORMS = {"lssar": Form(**_COSINE, power=15), "lssa": Form(**_COSINE)}
FORMS |= {"softmax": Form("exp", online=True), "lssar, spans": replace(FORMS["lssar"], spans=True)}
# Of arguments by name, where they are not the tensors' own (pointers), three strides, or i32.
TYPES = dict.fromkeys(("KEYS", "STATS", "DELTA", "RANGE", "SUMS", "VALUES", "SIZES"), "*fp32")
TYPES |= dict.fromkeys(("FIRST", "ENDS"), "*i32")
TYPES |= dict.fromkeys(("first_stride", "ends_stride"), "i32")
TYPES |= dict.fromkeys(("scale", "bias", "unit", "p", "alpha", "train_length"), "fp32")


def jobs(first_only: bool = False) -> list[dict]:
    """List the compilations: LSSAR on every card, and other common forms on an A100 and an H100.

    These are LSSA, softmax, windows and documents, fp16 and fp32.
    """
    wanted = [(sm, 64, "bf16", "lssar") for sm in ESTIMATED]
    if not first_only:
        for form in ("lssar", "lssa", FLASH):
            wanted += [(sm, d, "bf16", form) for d in (64, 128) for sm in ESTIMATED]
        wanted += [(sm, d, "bf16", "lssar") for sm in triton_table.TILES for d in (64, 128)]
        for sm in ESTIMATED:
            for d in (64, 128):
                wanted += [(sm, d, "bf16", form) for form in ("softmax", "lssar, spans")]
                wanted += [(sm, d, "fp16", form) for form in ("lssar", "lssa")]
                wanted.append((sm, d, "fp32", "lssar"))
        wanted.append((80, 256, "bf16", "lssar"))
    found = []
    for sm, d, dtype, form in dict.fromkeys(wanted):
        for kernel in KERNELS:
            plain = not form_of(form, dtype).centred
            config = triton_table.tiles(kernel, d, 32 if dtype == "fp32" else 16, plain, sm)
            if form == FLASH:
                from benchmarks.flash_softmax import CONFIGS as PLAIN

                config = PLAIN[kernel, d]
            job = {"kernel": kernel, "sm": sm, "head_dim": d, "dtype": dtype, "form": form}
            found.append(job | {"config": list(config)})
    return found


def form_of(name: str, dtype: str) -> Form:
    """Return a form by its name; in fp16 rows without a mean are summed relative to a maximum."""
    form = FORMS.get(name, FORMS["softmax"])
    return replace(form, online=form.online or (dtype == "fp16" and not form.centred))


def resources(job: dict) -> dict:
    """Compile a job to a cubin; return it with its registers, spills, shared memory and cost."""
    kernel = kernel_function(job["kernel"])
    form = form_of(job["form"], job["dtype"])
    if job["form"] == FLASH:
        from benchmarks import flash_softmax

        kernel = getattr(flash_softmax, kernel.__name__)
    config = tuple(job["config"])
    compiled = compile_for(job["sm"], kernel, job["head_dim"], job["dtype"], form, config)
    ran = nvidia_tool("cuobjdump", compiled.asm["cubin"], "-res-usage")
    usage = ran.stdout + ran.stderr
    sass = nvidia_tool("nvdisasm", compiled.asm["cubin"], "-c").stdout
    found = {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
    }
    rows, keys, warps, _ = config
    counted = job["sm"] if job["dtype"] == "bf16" else None
    return job | found | cost(sass, rows * keys / (32 * warps), counted)


def compile_for(architecture: int, kernel, head_dim: int, dtype: str, form: Form, config: tuple):
    """Compile a kernel as the launcher would, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(kernel, head_dim, dtype, form, config)
    options = {"num_warps": config[2], "num_stages": config[3]}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _source(kernel, head_dim, dtype, form, config):
    """Return the source to compile: contiguous heads, pointers and strides divisible by 16."""
    from triton.compiler import ASTSource

    constants = {"FORM": form, "SAVE": True, "repeats": 1}
    constants |= dict.fromkeys(("d", "d_v", "BLOCK_D", "BLOCK_V"), head_dim)
    constants |= {"BLOCK_M": config[0], "BLOCK_N": config[1]}
    if not form.spans:
        constants |= {"FIRST": None, "ENDS": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {}
    attributes = {}
    aligned = [["tt.divisibility", 16]]
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_stride") and name not in TYPES:
            signature[name] = ("i32",) * 3
            attributes |= {(index, place): aligned for place in range(3)}
        else:
            signature[name] = TYPES.get(name, f"*{dtype}" if name.isupper() else "i32")
            if name.isupper():
                attributes[index,] = aligned
    return ASTSource(kernel, signature, constants, attributes)


def nvidia_tool(name: str, code: bytes, *options: str) -> subprocess.CompletedProcess:
    """Run a program that comes with Triton on some code, and return its output."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "code").write_bytes(code)
        command = [program, *options, "code"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)


def check() -> None:
    """Refuse where nothing would be compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton is not installed; pip install triton")


def in_processes(function: Callable[[dict], dict], todo: list[dict], workers: int) -> list[dict]:
    """Return the results of `function` in order, compiled by this many processes."""
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: nothing of another checkout is in it, and the home may be read-only.
        os.environ["TRITON_CACHE_DIR"] = cache
        done = processes.in_processes(function, todo, workers)
        return list(tqdm(done, desc="kernels", total=len(todo), disable=None))
