"""Computes attention of a few rows whose keys come in parts: a long cache, or several ranks.

    sums = row_sums(q, k, m, place, total)               # of this part of the keys
    values, sizes = row_values(q, k, v, m, sums, place, total)
    out = combine(values, sizes, q, m)

Parts are the second dimension of `sums` and `sizes` and the first of `values`: what ranks gather is
concatenated there, between the first step and the second and between the second and the third. On a
GPU each rank's keys are split further. `sums` (3, parts, B, H, Lq) holds the sum of phi (for the
row mean), the largest, and the longest key; `sizes` (2, parts, B, H, Lq) the sum of the weights and
what it is relative to; `values` (parts, B, H, Lq, dv) the weighted values, not yet divided by it.
No gradients.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lssar import fused, triton_form, triton_table
from lssar.errors import UserError
from lssar.fused import Settings
from lssar.mechanisms import Mechanism
from lssar.spans import Span

MOST_ROWS = 64  # of the heads that share a head of k and v, together
INTERPRETED_PARTS = 3


class Place(NamedTuple):
    """Says where these keys stand: the place of the first, and the number of all keys."""

    first: int
    total: int


def takes(q: Tensor, k: Tensor) -> bool:
    """Tell whether the rows are few enough."""
    return q.shape[2] * (q.shape[1] // k.shape[1]) <= MOST_ROWS


def row_sums(q: Tensor, k: Tensor, m: Mechanism, place: int, total: int) -> Tensor:
    q, k, settings = _inputs(q, k, m, place, total)
    return sums_of(q, k, None, settings, Place(place, total))


def row_values(
    q: Tensor, k: Tensor, v: Tensor, m: Mechanism, sums: Tensor, place: int, total: int
) -> tuple[Tensor, Tensor]:
    q, k, settings = _inputs(q, k, m, place, total)
    return values_of(q, k, v, None, sums.contiguous(), settings, Place(place, total))


def combine(values: Tensor, sizes: Tensor, q: Tensor, m: Mechanism) -> Tensor:
    _, _, settings = fused.kernel_inputs(q, q, m, None, Span())
    out = q.new_empty((*q.shape[:3], values.shape[-1]))
    form = triton_form.form_of(settings, 1, False, q.dtype)
    combine_into(out, values.contiguous(), sizes.contiguous(), form)
    return out


def _inputs(q: Tensor, k: Tensor, m: Mechanism, place: int, total: int):
    reason = fused.unfused(m)
    if m.scale not in fused.OWN_SCALES or m.norm != "l1" or m.post != "none" or m.window:
        reason = "it takes rows that are normalised, over all keys up to their own"
    if reason:
        raise UserError(f"keys in parts: {reason}; got attention {m.name!r}")
    if not takes(q, k):
        raise UserError(
            f"keys in parts: {q.shape[2]} rows of {q.shape[1] // k.shape[1]} heads that share keys "
            f"are more than {MOST_ROWS}; give fewer rows at a time"
        )
    if place < 0 or place + k.shape[2] > total:
        raise UserError(f"keys in parts: {k.shape[2]} keys from {place} on are not within {total}")
    return fused.kernel_inputs(q, k, m, None, Span())


# --- launches ------------------------------------------------------------------------------------


def attend_few_rows(q, k, v, first: Tensor | None, s: Settings, out: Tensor) -> None:
    """Write the output of a few rows over all of their keys."""
    place = Place(0, k.shape[2])
    form = triton_form.form_of(s, place.total, first is not None, q.dtype)
    sums = sums_of(q, k, first, s, place) if form.centred else q.new_empty((3, 0))
    values, sizes = values_of(q, k, v, first, sums, s, place)
    combine_into(out, values, sizes, form)


def sums_of(q, k, first: Tensor | None, s: Settings, place: Place) -> Tensor:
    form = triton_form.form_of(s, place.total, first is not None, q.dtype)
    tiles, parts, chunk = _split(q, k)
    sums = q.new_empty((3, parts, *q.shape[:3]), dtype=torch.float32)
    scale, bias = triton_form.scale_and_bias(form, s, q.shape[3])
    tensors = [q, k, first, sums]
    strides = [q.stride()[:3], k.stride()[:3], _first_stride(first)]
    numbers = [*_sizes(q, k, place), chunk, q.shape[:3].numel(), scale, bias]
    _launch("sums", (parts, len(k) * k.shape[1]), [*tensors, *strides, *numbers], form, q, tiles)
    return sums


def values_of(q, k, v, first: Tensor | None, sums: Tensor, s: Settings, place: Place):
    form = triton_form.form_of(s, place.total, first is not None, q.dtype)
    tiles, parts, chunk = _split(q, k, v)
    values = q.new_empty((parts, *q.shape[:3], v.shape[3]), dtype=torch.float32)
    sizes = q.new_empty((2, parts, *q.shape[:3]), dtype=torch.float32)
    scale, bias = triton_form.scale_and_bias(form, s, q.shape[3])
    unit = triton_form.sum_unit(form, q, place.total)
    tensors = [q, k, v, first, sums, values, sizes]
    strides = [q.stride()[:3], k.stride()[:3], v.stride()[:3], _first_stride(first)]
    numbers = [*_sizes(q, k, place), chunk, q.shape[:3].numel(), sums.shape[1], scale, bias, unit]
    numbers += [s.p, s.alpha, float(s.train_length)]
    widths = {"d_v": v.shape[3], "BLOCK_V": triton_form.padded(v.shape[3])}
    grid = (parts, len(k) * k.shape[1])
    _launch("values", grid, [*tensors, *strides, *numbers], form, q, tiles | widths)
    return values, sizes


def combine_into(out: Tensor, values: Tensor, sizes: Tensor, form) -> None:
    rows = out.shape[:3].numel()
    arguments = [values, sizes, out, out.stride()[:3], out.shape[1], out.shape[2], rows]
    widths = {"d_v": out.shape[3], "BLOCK_V": triton_form.padded(out.shape[3])}
    _launch("combine", (rows,), [*arguments, len(values)], form, out, widths)


def _first_stride(first: Tensor | None) -> int:
    return 0 if first is None or len(first) == 1 else first.stride(0)


def _sizes(q: Tensor, k: Tensor, place: Place) -> list[int]:
    heads = q.shape[1]
    return [heads, heads // k.shape[1], q.shape[2], k.shape[2], place.first, place.total]


def _split(q: Tensor, k: Tensor, v: Tensor | None = None) -> tuple[dict, int, int]:
    """Return the tiles, the number of parts that keys are split into, and the keys of a part."""
    d = q.shape[3]
    d_v = d if v is None else v.shape[3]
    block = triton_form.padded(d)
    keys, warps, stages = triton_table.DECODE[max(64, block, triton_form.padded(d_v))]
    if q.dtype == torch.float32:
        keys = keys // 2
    rows = triton_form.padded(q.shape[2] * (q.shape[1] // k.shape[1]))
    tiles = {"d": d, "BLOCK_D": block, "BLOCK_M": rows, "BLOCK_N": keys}
    wanted = INTERPRETED_PARTS
    if not triton_form.interpreting():
        tiles |= {"num_warps": warps, "num_stages": stages}
        programs = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
        wanted = math.ceil(programs / (len(k) * k.shape[1]))
    tiles_of_keys = math.ceil(k.shape[2] / keys)
    chunk = keys * math.ceil(tiles_of_keys / min(wanted, tiles_of_keys))
    return tiles, math.ceil(k.shape[2] / chunk), chunk


def _launch(name: str, grid: tuple, arguments: list, form, q: Tensor, constants: dict) -> None:
    kernel = triton_form.kernel_function(name)
    triton_form.launch(name, kernel, grid, arguments, q, FORM=form, **constants)
