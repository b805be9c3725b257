"""Every launch of a Triton kernel as a GPU would judge it, without one.

`check_launches()` lets `triton_op` run its kernels in the interpreter, and puts the arguments of
each launch to Triton's own specialisation first: their types must be those that `benchmark.py
kernels` compiles, integers must fit in 32 bits, and the grid must fit a GPU.
"""

import functools
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.triton_compile import _source
from lssar import triton_form, triton_op, triton_table

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # by axis of the grid
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Launch:
    kernel: str
    config: tuple[int, int, int, int]
    as_compiled: bool  # aligned and typed exactly as the kernel whose resources are recorded


@functools.cache
def check_launches() -> list[Launch]:
    """Check every launch from now on; the list grows with each."""
    launches: list[Launch] = []
    plain = triton_op._kernel

    def checked(name, form, block_d, q):
        kernel, fixed = plain(name, form, block_d, q)
        bits = 8 * q.element_size()
        configs = [
            triton_table.tiles(name, block_d, bits, not form.centred, card)
            for card in triton_table.TILES
        ]
        return _Checked(name, kernel, list(dict.fromkeys(configs)), launches), fixed

    triton_op._kernel = checked
    of_parts = triton_form.kernel_function
    triton_form.kernel_function = lambda name: _OnHost(name, of_parts(name))
    return launches


@dataclass(frozen=True)
class _OnHost:
    """Run a kernel of `key_parts` and check its grid."""

    name: str
    kernel: object

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            check_grid(self.name, grid)
            host = torch.ops.stand_in.on_host  # the interpreter's own way to the host needs CUDA
            arguments = [host(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            return self.kernel[grid](*arguments, **constants)

        return launch


@dataclass(frozen=True)
class _Checked:
    name: str
    kernel: object
    configs: list[tuple]
    launches: list[Launch]

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            for config in self.configs:
                tiles = {"BLOCK_M": config[0], "BLOCK_N": config[1]}
                check_grid(self.name, grid)
                found = specialised(self.kernel.fn, arguments, constants | tiles)
                self.launches.append(Launch(self.name, config, check(self.name, found, config)))
            host = torch.ops.stand_in.on_host  # the interpreter's own way to the host needs CUDA
            arguments = [host(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            return self.kernel[grid](*arguments, **constants)

        return launch


def check_grid(name: str, programs: tuple[int, ...]) -> None:
    for axis, (count, most) in enumerate(zip(programs, MOST_PROGRAMS, strict=False)):
        assert 1 <= count <= most, f"{name}: {count} programs along axis {axis}, at most {most}"


def specialised(function, arguments, constants) -> dict[str, tuple]:
    """Return (type, key) of each argument by name, as Triton's launcher finds them."""
    kernel, backend = JITFunction(function), CUDABackend(GPUTarget("cuda", 80, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, _ = bind(*arguments, **constants)
    return {n: (*s, v) for (n, v), s in zip(bound.items(), specialisation, strict=True)}


def check(name: str, found: dict[str, tuple], config: tuple) -> bool:
    """Types must fit those that are compiled; whether alignment and ones do too."""
    form, d = found["FORM"][-1], found["d"][-1]
    dtype = TYPES[found["Q"][-1].dtype]
    kernel = triton_op.kernel_function(name)
    source = _source(JITFunction(kernel.fn), d, dtype, form, config)
    same = d == found["d_v"][-1] == found["BLOCK_D"][-1]
    for index, (argument, (kind, key, _)) in enumerate(found.items()):
        wanted = source.signature[argument]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for place, (mine, compiled) in enumerate(
            zip(kinds, wanted if isinstance(wanted, tuple) else (wanted,), strict=True)
        ):
            # An integer that is 1 becomes a constant; it is compiled for heads that are not shared.
            allowed = (compiled, "i32" if argument == "repeats" else "constexpr")
            assert mine in allowed, f"{name}: {argument} is {mine}, not {compiled}"
            path = (index, place) if isinstance(kind, tuple) else (index,)
            marks = key[place] if isinstance(kind, tuple) else key
            aligned = "D" in marks if isinstance(marks, str) else False
            same = same and mine == compiled and (aligned or path not in source.attrs)
    return same
