"""Packs the keys that each query sees into a mask that only our attention can read.

transformers asks for a mask once per forward and kind of layer (full, sliding, chunked), and hands
it to every layer. Ours has four dimensions, as one that is already prepared, and integers: in a
model that reads the mask itself, it cannot pass for one. Its last dimension has the keys that
exist, as a static cache has room for more.

    int8 (B, 1, Lq, keys): every key up to a query's own
    int8 (B, 2, Lq, keys): something else than a span; refused by the layer that uses it
    int32 (B, 1, Lq, keys): the first key that each query sees, the same in the whole row
    int32 (B, 3, 1, keys): the order of the keys, and of the queries, in which what a query sees
        is a span, and the first key that each sees; the last two begin with Lq entries
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from lssar.hf.refusals import refuse
from lssar.mechanisms import Mechanism
from lssar.spans import Arrangement, arrange
from lssar.tracing import can_look_at

# Added to every entry: a model that combines the mask with one of its own (& | *) loses it.
MARKS = {torch.int8: 1 << 6, torch.int32: 1 << 30}
CHANGED = "a mask that the model has combined with one of its own, such as a choice of keys"
NO_SPAN = 2  # the second dimension of a mask that is none of the other forms
NOT_A_SPAN = "a mask in which a token sees other keys than a span up to itself"
ENTRIES = 2**24  # of a mask function that are looked at together


def visibility(
    mechanism: Mechanism,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config=None,
    **_,
) -> Tensor:
    """Return the mask for all layers of one kind, from what transformers knows of the call."""
    if any(setting.startswith("indexer_") for setting in getattr(config, "__dict__", ())):
        refuse(mechanism, config, "a choice of keys (indexer)")  # made from the mask itself
    if isinstance(q_offset, Tensor) and can_look_at(q_offset):
        q_offset = int(q_offset)
    fixed = isinstance(q_offset, Tensor)  # a static cache in a graph, or on a GPU
    end = kv_length if isinstance(q_offset, Tensor) else q_offset + q_length - kv_offset
    places = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    plain = mask_function is causal_mask_function
    if attention_mask is None and plain and not fixed:
        return _full(batch_size, q_length, end, device)
    tokens = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    if attention_mask is not None:
        missing = kv_offset + end - attention_mask.shape[1]
        if not fixed and missing > 0:
            what = f"a mask of shape {tuple(attention_mask.shape)} for {kv_offset + end} keys"
            refuse(mechanism, config, f"{what}; it must cover all")
        if missing > 0:
            attention_mask = F.pad(attention_mask, (0, missing))
        tokens = attention_mask[:, kv_offset : kv_offset + end].bool()
    if fixed:
        tokens = tokens & (torch.arange(end, device=device) <= places[-1])
    counts = None
    if not plain:
        more = not fixed and end < kv_length  # room in a static cache, or another model's keys
        counts = _counts(mask_function, tokens, places, kv_offset, more)
        if counts is None:
            return _full(batch_size, q_length, end, device, NO_SPAN)
    if counts is None or fixed or attention_mask is not None or can_look_at(tokens):
        arrangement = arrange(tokens, q_length, places, counts)
    else:  # all are tokens, though nobody can look
        arrangement = Arrangement(end, places + 1 - counts)
    return mask_of(arrangement, batch_size, q_length, device)


def _counts(mask_function, tokens: Tensor, places, offset: int, more: bool) -> Tensor | None:
    """Count the tokens each query sees by a mask function of transformers, (B, queries).

    Return None if it sees others than a span up to itself, as may be where there are more keys."""
    if more:  # a causal mask hides the next key from the last query
        tokens = F.pad(tokens, (0, 1), value=True)
    batch, keys = tokens.shape
    key = torch.arange(keys, device=tokens.device)
    sequence = torch.arange(batch, device=tokens.device)
    head = key[:1]
    rank = tokens.cumsum(1)  # of each token in its sequence, from 1
    look = can_look_at(tokens)
    blocks: Sequence[Tensor] = (places,)  # all in one, as a graph has no loop of unknown length
    if not torch.compiler.is_compiling():
        blocks = places.split(max(1, ENTRIES // (batch * keys)))
    found = []
    for place in blocks:
        visible = mask_function(
            sequence[:, None, None, None],
            head[None, :, None, None],
            (place + offset)[None, None, :, None],
            (key + offset)[None, None, None, :],
        )
        asking, own = tokens[:, place, None], rank[:, place, None]
        visible = visible.expand(batch, 1, place.shape[0], keys)[:, 0] & tokens[:, None] & asking
        seen = visible.sum(-1)
        above = rank[:, None] > own - seen[..., None]
        span = above & (rank[:, None] <= own) & tokens[:, None] & asking
        if look and not torch.equal(visible, span):
            return None
        if not look and not tokens.is_meta:
            torch._assert_async((visible == span).all(), f"attention cannot take {NOT_A_SPAN}")
        found.append(seen)
    return torch.cat(found, dim=1)


def _full(batch: int, queries: int, keys: int, device: torch.device | str, forms=1) -> Tensor:
    mark = torch.full((), MARKS[torch.int8], dtype=torch.int8, device=device)
    return mark.expand(batch, forms, queries, keys)


def mask_of(a: Arrangement, batch: int, queries: int, device: torch.device | str) -> Tensor:
    """Return an arrangement as a mask."""
    if a.first is None:
        return _full(batch, queries, a.end, device)
    if a.keys is None or a.queries is None:
        forms = a.first[:, None, :, None]
    else:
        rest = (0, a.end - queries)
        forms = torch.stack((a.keys, F.pad(a.queries, rest), F.pad(a.first, rest)), 1)[:, :, None]
    return (forms.to(torch.int32) + MARKS[torch.int32]).expand(-1, -1, -1, a.end)


def arrangement_of(mask: Tensor, queries: int) -> Arrangement | str:
    """Return the arrangement in a mask, or say what it is instead."""
    if mask.dim() != 4 or mask.dtype not in MARKS:
        return f"a mask of shape {tuple(mask.shape)}; give the padding mask (batch, keys)"
    if 0 not in mask.stride() and not mask.is_meta:  # no longer a view, or of three rows
        whole = (mask >= MARKS[mask.dtype]).all()
        if not can_look_at(mask):
            torch._assert_async(whole, f"attention cannot take {CHANGED}")
        elif not whole:
            return CHANGED
    end = mask.shape[3]
    if mask.dtype == torch.int8:
        return NOT_A_SPAN if mask.shape[1] == NO_SPAN else Arrangement(end)
    if mask.shape[1] == 1:
        return Arrangement(end, mask[:, 0, :, 0] - MARKS[torch.int32])
    keys, asked, first = (mask[:, :, 0].long() - MARKS[torch.int32]).unbind(1)
    return Arrangement(end, first[:, :queries], keys, asked[:, :queries])
