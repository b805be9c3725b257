"""Separates packed sequences: position_ids that start again in a row of a batch.

Packed sequences do not see each other. transformers separates them where there is no mask and no
cache: a cache has no place for several sequences in one row.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from lssar.errors import UserError
from lssar.hf.refusals import family_of

PACKED_AND_CACHED = (
    "position_ids that start again are packed sequences, which cannot be cached; "
    "give use_cache=False and no past_key_values"
)
PACKED_AND_MASKED = (
    "position_ids that start again are packed sequences, which a compiled graph or a GPU tells "
    "apart only without attention_mask; leave it out"
)


def packed_apart(model: PreTrainedModel, positions: Tensor, options: dict) -> dict:
    """Return options that make transformers separate packed sequences: no cache, no mask."""
    mask, cache = options.get("attention_mask"), options.get("past_key_values")
    # As can_look_at, which torch.compile might compile alone where it gave this frame up.
    if torch.compiler.is_compiling() or positions.device.type != "cpu":
        _assert_not_packed(model, positions, options)
        return options
    sequences = find_packed_sequence_indices(positions)
    if sequences is None:
        return options
    if mask is not None:
        if not _covers(mask, positions) or not _start_again(positions, mask):
            return options
        tokens = mask.bool()
        together = sequences[:, 1:] == sequences[:, :-1]
        if (together & tokens[:, 1:] & ~tokens[:, :-1]).any():
            raise UserError(
                "position_ids of packed sequences go on from padding to a token; "
                "give position 0 to padding"
            )
    if cache is not None:
        raise UserError(PACKED_AND_CACHED)
    return options | {"attention_mask": None, "use_cache": False}


def _assert_not_packed(model: PreTrainedModel, positions: Tensor, options: dict) -> None:
    """Let the device check what the host cannot look at, where packed sequences cannot be told."""
    mask, cache = options.get("attention_mask"), options.get("past_key_values")
    if mask is not None:
        if _covers(mask, positions):
            _assert_on_device(~_start_again(positions, mask), PACKED_AND_MASKED)
        return
    wanted = options.get("use_cache")
    if wanted is None:
        wanted = getattr(model.config, "use_cache", False)
    if torch.compiler.is_compiling() and cache is None and wanted:
        raise UserError(
            f"position_ids for {family_of(model.config)} in a compiled graph may be of packed "
            "sequences, which cannot be cached; give use_cache=False, or attention_mask"
        )
    if cache is not None or wanted:
        _assert_on_device((positions.diff(dim=1) == 1).all(), PACKED_AND_CACHED)


def _assert_on_device(condition: Tensor, message: str) -> None:
    if not condition.is_meta:
        torch._assert_async(condition, message)


def _covers(mask: Any, positions: Tensor) -> TypeGuard[Tensor]:
    """Tell whether a mask says of each position whether it is a token."""
    return isinstance(mask, Tensor) and mask.shape == positions.shape


def _start_again(positions: Tensor, mask: Tensor) -> Tensor:
    """Tell whether the tokens of some row, without the padding, are several sequences."""
    order = mask.bool().to(torch.uint8).argsort(dim=1, stable=True)  # padding first
    place = positions.expand_as(mask).gather(1, order)
    token = mask.bool().gather(1, order)
    return ((place.diff(dim=1) != 1) & token[:, 1:] & token[:, :-1]).any()
