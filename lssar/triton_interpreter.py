"""Gives Triton's interpreter tl.dot and bf16 as a GPU computes them, by `install()`.

The interpreter hands tiles to BLAS, which sums a b and b' a' in different orders; it multiplies
bf16 as the 16-bit integers that hold it, and cuts digits off where a GPU rounds. Tensor cores
multiply exactly, sum a few products at a time and add them to the float32 accumulator, in the same
order for a b and b' a'; float32 operands are split into parts that they can multiply. Some round
the sum, others cut its digits off: with LSSAR_TRUNCATE=1 in the environment these do.
"""

import os
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

STEP = 8  # products that are summed before the accumulator is rounded
TF32_BITS = 11  # significant ones


def install() -> None:
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.InterpreterBuilder.create_inline_asm = copy_places


def copy_places(builder, code, constraints, values, types, pure, pack):
    """Return places as they are, which is all that assembly is used for (`tiles.afresh`)."""
    if not code.startswith("mov.b32 $0, $1;"):
        raise NotImplementedError(f"assembly {code!r}")
    return SimpleNamespace(get_result=lambda _: values[0])


def _dot(builder, a, b, accumulator, input_precision, max_num_imprecise_acc):
    x, y = _numbers(a), _numbers(b)
    if a.dtype.scalar != tl.float32:
        return TensorHandle(_multiply_add(x, y, accumulator.data), accumulator.dtype.scalar)
    if input_precision.name != "TF32x3":
        raise NotImplementedError(f"float32 tiles as {input_precision.name}")
    (x, x_rest), (y, y_rest) = _tf32_parts(x), _tf32_parts(y)
    total = _multiply_add(x_rest, y, np.float32(0))
    total = _multiply_add(x, y, _multiply_add(x, y_rest, total))
    return TensorHandle(total + accumulator.data, accumulator.dtype.scalar)


def _multiply_add(x: np.ndarray, y: np.ndarray, total) -> np.ndarray:
    x, y = x.astype(np.float64), y.astype(np.float64)
    for start in range(0, x.shape[1], STEP):
        part = slice(start, start + STEP)
        total = _narrowed(x[:, part] @ y[part] + total)
    return total


def _narrowed(sums: np.ndarray) -> np.ndarray:
    """Return float64 sums as float32, rounded or truncated."""
    rounded = sums.astype(np.float32)
    if os.environ.get("LSSAR_TRUNCATE") != "1":
        return rounded
    return np.where(np.abs(rounded) > np.abs(sums), np.nextafter(rounded, np.float32(0)), rounded)


def _tf32_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    top = _rounded(x)
    return top, _rounded(x - top)


def _rounded(x: np.ndarray) -> np.ndarray:
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(fraction, TF32_BITS)), exponent - TF32_BITS)


def _numbers(tile: TensorHandle) -> np.ndarray:
    if tile.dtype.scalar == tl.bfloat16:
        return (tile.data.astype(np.uint32) << 16).view(np.float32)
    return tile.data


def _cast(builder, source, target):
    if target.scalar == tl.bfloat16:
        rounded = torch.from_numpy(source.data.astype(np.float32)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    return TensorHandle(_numbers(source).astype(interpreter._get_np_dtype(target)), target.scalar)
