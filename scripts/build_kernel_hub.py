"""python scripts/build_kernel_hub.py OUT

A folder that Hugging Face's `kernels` loads, with the whole library in each of its variants:

    build/torch-cuda    Triton, compiled on first use
    build/torch-cpu     C++, compiled on first use by the system's compiler
    build/torch-stable-abi213-cpu-x86_64-linux    C++, compiled now, for AVX-512 and for AVX2

The last is made on Linux on x86-64 only, and wants a glibc that is as new as this machine's.

    lssar = kernels.get_local_kernel(Path(OUT))
    out = lssar.attend(q, k, v, "lssar")

To publish it: hf upload NAME/lssar OUT --repo-type kernel
"""

import hashlib
import json
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(ROOT)

from support.command import Parser, answer_early, run


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

import torch

from lssar import cpu
from lssar.errors import UserError
from support.files import new_folder, write_text

VERSION = 1  # of the kernel; `kernels` asks for one: get_kernel(..., version=1)
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}  # torch's name for a processor, gcc's
CARD = """---
library_name: kernels
license: mit
---

# lssar

Softplus attention with re-weighting (LSSA, LSSAR) and the mechanisms it is compared with: exact,
fused, forward and backward. The Triton kernels have not run on a GPU yet.

```python
from kernels import get_kernel

lssar = get_kernel("NAME/lssar", version={version}, trust_remote_code=True)
out = lssar.attend(q, k, v, "lssar")  # (batch, heads, length, head_dim), causal
```
"""


def main(argv: list[str]) -> None:
    out = make_parser().parse_args(argv).out
    with new_folder(out) as folder:
        variants = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            release = "".join(torch.__version__.split(".")[:2])
            compiled = f"torch-stable-abi{release}-cpu-x86_64-linux"
            variants[compiled] = "cpu"
            compile_kernels(folder / "build" / compiled)
        for name, backend in variants.items():
            write_variant(folder / "build" / name, backend)
        write_text(folder / "README.md", CARD.format(version=VERSION))
        shutil.copy(ROOT / "LICENSE", folder)
    print(f"{', '.join(variants)} are in {out / 'build'}")


def compile_kernels(folder: Path) -> None:
    """The shared libraries that `lssar/cpu.py` looks for before it compiles one itself."""
    folder.mkdir(parents=True)
    for level, architecture in LEVELS.items():
        compiler, target = cpu._compiler(), str(cpu.prebuilt(folder, level))
        flags = [*cpu.FLAGS, *cpu.CONSTANTS, f"-march={architecture}", "-fopenmp"]
        done = cpu._ask([*compiler, *flags, str(cpu.SOURCE), "-o", target])
        if done.returncode:
            raise UserError(f"{compiler[0]} cannot build the kernel: {done.stderr.strip()[:200]}")


def write_variant(folder: Path, backend: str) -> None:
    """The library with relative imports: `kernels` gives the package a name of its own."""
    folder.mkdir(exist_ok=True, parents=True)
    for file in sorted((ROOT / "lssar").glob("*")):
        if file.suffix == ".py" and not file.stem.startswith(("hf", "lm_eval")):
            text = file.read_text(encoding="utf-8")
            text = re.sub(r"^( *)from lssar\b(\.?)", r"\1from .", text, flags=re.MULTILINE)
            write_text(folder / file.name, text)
        elif file.suffix in (".cpp", ".h", ".typed"):
            shutil.copy(file, folder)
    contents = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    name = f"_lssar_{backend}_{hashlib.sha256(contents).hexdigest()[:12]}"
    metadata = {"name": "lssar", "id": name, "version": VERSION, "license": "MIT"}
    metadata |= {"python-depends": [], "backend": {"type": backend}}
    write_text(folder / "metadata.json", json.dumps(metadata, indent=1))


if __name__ == "__main__":
    run(main)
