"""The Triton kernels compiled without a GPU: `python benchmark.py compile`.

For A100 (sm_80) and H100 (sm_90), with what ptxas says of each: registers per thread, bytes
spilled, shared memory. Every configuration that `lssar/triton_op.py` may choose is compiled for
LSSAR with p = 15, the first of each also for softmax. Up to head dim 128 the first is compiled for
LSSA, with spans, with a real p (which is also the adaptive one) and in fp16 too; at 64 for every
other kind of mechanism. In fp32 dq is two kernels, and the first of them is "p=15, sums".
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from lssar.errors import UserError
from lssar.fused import PHI
from lssar.triton_op import CONFIGS, DECODE_CONFIGS, Form, kernel_function
from support import processes
from support.files import write_json
from support.text import table

ARCHITECTURES = (80, 90)
HEAD_DIMS = (64, 128, 256)
_COSINE = {"phi": "softplus", "cosine": True}
VARIANTS = {"p=15": Form(**_COSINE, power=15), "lssa": Form(**_COSINE), "softmax": Form("exp")}
VARIANTS |= {f"{name}, spans": replace(form, spans=True) for name, form in VARIANTS.items()}
VARIANTS["real p"] = Form(**_COSINE, power=0)
OTHERS = {phi: Form(phi) for phi in PHI if phi != "exp"}
OTHERS |= {
    "p=15, sums": Form(**_COSINE, power=15, sums=True),
    "exp, no norm": Form("exp", l1=False),
    "sigmoid, bias": Form("sigmoid", log_n=True, l1=False),
    "softmax, p=15": Form("exp", power=15),
    "sigmoid, p=15": Form("sigmoid", power=15, log_n=True),
    "softmax, recentred": Form("exp", recentre=True),
}
FORMS = VARIANTS | OTHERS
# Of arguments by name, where they are not the tensors' own (pointers), three strides, or i32.
TYPES = dict.fromkeys(("KEYS", "EXACT", "GUIDE", "STATS", "DELTA", "RANGE"), "*fp32")
TYPES |= dict.fromkeys(("FIRST", "LAST"), "*i32")
TYPES |= dict.fromkeys(("first_stride", "last_stride"), "i32")
TYPES |= dict.fromkeys(("scale", "bias", "unit", "p", "alpha", "train_length"), "fp32")


def jobs(head_dim: int, first_only: bool) -> list[dict]:
    """Every compilation of the table but for the architecture, as `resources` takes them."""
    found = []
    for (kernel, dim, width), configs in CONFIGS.items():
        if dim != head_dim or (first_only and width == 4):
            continue
        dtype, first = "bf16" if width == 2 else "fp32", configs[0]
        every = [(dtype, "p=15", config) for config in configs[: 1 if first_only else None]]
        every.append((dtype, "softmax", first))
        if width == 2 and not first_only:
            every += [(dtype, "p=15", config) for config in DECODE_CONFIGS[kernel]]
            if head_dim < 256:
                every += [(dtype, v, first) for v in VARIANTS if v not in ("p=15", "softmax")]
                every += [("fp16", v, first) for v in ("p=15", "softmax")]
            if head_dim == 64:
                every += [(dtype, v, first) for v in OTHERS if v != "p=15, sums"]
        if (kernel, width) == ("dq", 4) and head_dim < 256:
            every.append((dtype, "p=15, sums", first))
        job = {"kernel": kernel, "head_dim": dim}
        found += [job | {"dtype": d, "variant": v, "config": config} for d, v, config in every]
    return found


def resources(job: dict) -> dict:
    """Compile a job for its `sm` to a cubin; its registers, spilled bytes and shared memory."""
    sm, kernel, form = job["sm"], kernel_function(job["kernel"]), FORMS[job["variant"]]
    compiled = compile_for(sm, kernel, job["head_dim"], job["dtype"], form, job["config"])
    options = ("-v", f"-arch=sm_{sm}{'a' if sm >= 90 else ''}", "-o", "cubin")
    report = nvidia_tool("ptxas", compiled.asm["ptx"].encode(), *options).stderr
    registers = re.search(r"Used (\d+) registers", report)[1]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    found = {key: job[key] for key in ("kernel", "sm", "head_dim", "dtype", "variant")}
    found |= zip(("rows", "keys", "warps", "stages"), job["config"], strict=True)
    found |= {"registers": int(registers), "spilled_bytes": max(map(int, spills))}
    return found | {"shared_bytes": compiled.metadata.shared}


def compile_for(architecture: int, kernel, head_dim: int, dtype: str, form: Form, config: tuple):
    """A kernel as the launcher would compile it, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(kernel, head_dim, dtype, form, config)
    options = {"num_warps": config[2], "num_stages": config[3]}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _source(kernel, head_dim, dtype, form, config):
    """Contiguous heads, pointers and strides divisible by 16."""
    from triton.compiler import ASTSource

    constants = {"FORM": form, "SAVE": True, "repeats": 1}
    constants |= dict.fromkeys(("d", "d_v", "BLOCK_D", "BLOCK_V"), head_dim)
    constants |= {"BLOCK_M": config[0], "BLOCK_N": config[1]}
    if not form.spans:
        constants |= {"FIRST": None, "LAST": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes, aligned = {}, {}, [["tt.divisibility", 16]]
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_stride") and name not in TYPES:
            signature[name] = ("i32",) * 3
            attributes |= {(index, place): aligned for place in range(3)}
        else:
            signature[name] = TYPES.get(name, f"*{dtype}" if name.isupper() else "i32")
            if name.isupper() or name in ("q_length", "k_length", "plane"):
                attributes[index,] = aligned
    return ASTSource(kernel, signature, constants, attributes)


def nvidia_tool(name: str, code: bytes, *options: str) -> subprocess.CompletedProcess:
    """What a program that comes with Triton makes of some code."""
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
    """The results of `function` in order, compiled by this many processes."""
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: nothing of another checkout is in it, and the home may be read-only.
        os.environ["TRITON_CACHE_DIR"] = cache
        done = processes.in_processes(function, todo, workers)
        return list(tqdm(done, desc="kernels", total=len(todo), disable=None))


def main(args: Namespace) -> None:
    check()
    if args.head_dim and args.head_dim not in HEAD_DIMS:
        raise UserError(f"--head-dim {args.head_dim}: no configuration of it; give 64, 128 or 256")
    dims = [args.head_dim] if args.head_dim else HEAD_DIMS
    todo = [job | {"sm": sm} for sm in ARCHITECTURES for d in dims for job in jobs(d, args.first)]
    rows = in_processes(resources, todo, args.workers)
    header = [key.replace("_", " ") for key in rows[0]]
    print(table(header, [[*map(str, row.values())] for row in rows]))
    if args.out:
        found = {
            "status": "compiled with ptxas, not run on hardware",
            "command": "python benchmark.py compile --out results/triton_resources.json",
            "triton": importlib.metadata.version("triton"),
            "kernels": rows,
        }
        write_json(args.out, found)
        print(f"written: {args.out}")
