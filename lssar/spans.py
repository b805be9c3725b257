"""Makes visible spans: row i sees the keys first_i .. i, its count is N_i = i - first_i + 1.

    first = documents(tokens, end_of_text)        # packed documents, each of them seen alone
    out = attend(q, k, v, "lssar", first=first)

`first` is an integer tensor (B, Lq) or (Lq,): for every query, the place of the first key it sees.
A sliding window, packed documents and left padding are all such spans, and the maximum of two of
them is both at once. A query before its own first key sees nothing, and its output is zero.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lssar.errors import UserError
from lssar.mechanisms import Mechanism
from lssar.tracing import can_look_at

__all__ = ["bounded", "document_starts", "documents", "padding", "window"]


def window(size: int, queries: int, keys: int | None = None, device=None) -> Tensor:
    """Return the first of the last `size` keys of each of the last `queries` places: (queries,).

    first = window(256, queries=1024)
    """
    keys = queries if keys is None else keys
    return (torch.arange(keys - queries, keys, device=device) - size + 1).clamp(min=0)


def documents(tokens: Tensor, end_of_text: int) -> Tensor:
    """Return the start of each token's own document, (B, L); an end-of-text token begins one.

    first = documents(tokens, end_of_text)
    """
    return document_starts(tokens == end_of_text)


def document_starts(starts: Tensor) -> Tensor:
    """Return the start of each token's own document, (B, L); `starts` is True where one begins.

    first = document_starts(tokens == end_of_text)
    """
    places = torch.arange(starts.shape[-1], device=starts.device)
    return (places * starts).cummax(-1).values


def bounded(bounds: Tensor, length: int) -> Tensor:
    """Return the start of each place's own sequence, (length,), from the bounds 0, ..., length.

    first = bounded(torch.tensor([0, 300, 1024]), length=1024)  # two sequences in a row
    """
    places = torch.arange(length, device=bounds.device)
    return bounds.long()[torch.searchsorted(bounds, places, right=True) - 1]


def padding(mask: Tensor, queries: int) -> Tensor:
    """Return the first token of left-padded sequences, (B, queries); the mask is True at tokens.

    first = padding(mask, queries=1024)
    """
    left_padded = _is_left_padded(mask)
    if not can_look_at(mask):
        torch._assert_async(left_padded, NOT_LEFT_PADDED)
    elif not left_padded:
        raise UserError(NOT_LEFT_PADDED)
    return (~mask).sum(-1, keepdim=True).expand(-1, queries)


NOT_LEFT_PADDED = "padding between or after the tokens is not a span; use attend_padded"


def _is_left_padded(mask: Tensor) -> Tensor:
    return (mask[:, 1:] >= mask[:, :-1]).all()


@dataclass(frozen=True)
class Span:
    """Says which keys the rows of a call see: from `first` on, at most `window`, and the sinks."""

    first: Tensor | None = None  # (B, Lq) or (1, Lq)
    window: int | None = None
    sinks: int = 0  # and this many of the first keys besides

    @property
    def full(self) -> bool:
        return self.first is None and self.window is None

    def firsts(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return both as one tensor (B, Lq) or (1, Lq); None where nothing is hidden."""
        first = self.first
        if self.window is not None:
            last = window(self.window, q.shape[2], k.shape[2], q.device)
            first = last[None] if first is None else torch.maximum(first, last)
        return first

    def counts(self, q: Tensor, k: Tensor) -> Tensor:
        """Return how many keys each row sees, (1 or B, 1, Lq, 1); 1 where it sees none."""
        keys = k.shape[2]
        first = self.firsts(q, k)
        counts = torch.arange(keys - q.shape[2] + 1, keys + 1, device=q.device)[None]
        if first is not None:
            counts = (counts - first + first.clamp(max=self.sinks)).clamp(min=1)
        return counts[:, None, :, None]


def span_of(first: Tensor | None, m: Mechanism, q: Tensor, k: Tensor) -> Span:
    """Validate `first`, and ignore windows that cover all keys."""
    window = None if m.window is None or m.window >= k.shape[2] else m.window
    if first is None:
        return Span(None, window, m.sinks if window else 0)
    if m.sinks:
        raise UserError(f"sinks = {m.sinks} are the first keys of all; leave first out")
    batch, queries = q.shape[0], q.shape[2]
    shapes = ((queries,), (1, queries), (batch, queries))
    if first.is_floating_point() or first.dtype == torch.bool or first.shape not in shapes:
        raise UserError(
            f"first must be an integer tensor (B, Lq) or (Lq,), here ({batch}, {queries}); "
            f"got {first.dtype} {tuple(first.shape)}; lssar.spans.padding makes one of a mask"
        )
    if queries == k.shape[2] and _looks_like_a_mask(first):
        raise UserError(
            "first has the zeros and ones of a padding mask; lssar.spans.padding makes first of "
            "left padding, attend_padded takes any mask"
        )
    if first.device != q.device:
        raise UserError(f"first is on {first.device}, q on {q.device}; move one of them")
    return Span(first.reshape(-1, queries).to(torch.int64).clamp(0, k.shape[2]), window)


def _looks_like_a_mask(first: Tensor) -> bool:
    """Tell whether this is the mask of tokens before padding: ones, then zeros.

    As places, they would hide the first key from the early queries and show it to the late ones.
    Other masks can be meant as places.
    """
    if not can_look_at(first):
        return False
    return bool((first.diff(dim=-1) < 0).any() and (first >= 0).all() and (first <= 1).all())


def zero_unseen_values(v: Tensor, first: Tensor) -> Tensor:
    """Return v (B, H, Lk, d) with zeros before the first key that any row sees.

    Values that no query sees may be NaN, and a weight of zero times NaN is NaN.
    """
    unseen = torch.arange(v.shape[2], device=v.device) < first.amin(1, keepdim=True)
    return v.masked_fill(unseen[:, None, :, None], 0)


def shifted_keys(k: Tensor, first: Tensor | None = None) -> Tensor:
    """Return k (B, H, Lk, d) with the previous token's key in each place.

    A query then finds the value that followed what it looks for: an induction head in one layer.
    The first token of a sequence keeps its own key; `first` (B, Lq) or (Lq,) says where sequences
    start (documents or padding, not a window).
    """
    before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
    if first is None:
        return before
    first = torch.atleast_2d(first).long().clamp(0, k.shape[2])
    starts = torch.zeros(len(first), k.shape[2] + 1, dtype=torch.bool, device=k.device)
    starts = starts.scatter(1, first, True)[:, None, :-1, None]
    return torch.where(starts, k, before)


class Arrangement(NamedTuple):
    """Holds an order of keys and queries in which each query sees a span."""

    end: int  # of the keys; from here on they do not exist yet
    first: Tensor | None = None  # (B, Lq), of the queries in this order; None: all see all
    keys: Tensor | None = None  # (B, end), the order of the keys; None: as they are
    queries: Tensor | None = None  # (B, Lq)


def arrange(
    mask: Tensor, queries: int, places: Tensor | None = None, counts: Tensor | None = None
) -> Arrangement:
    """Return the order that moves padding to the front; the mask (B, n) is True at tokens.

    Where the mask can be looked at, nothing is moved if its padding is at the front already.
    `places` (queries,) says where the queries are among the n keys: they are the last ones unless
    told otherwise, and nothing after them is a token. `counts` (B, queries) is the number of tokens
    that each query sees, itself included and without a gap: all up to its own unless told.
    """
    keys = mask.shape[1]
    look = can_look_at(mask)
    if places is None:
        places = torch.arange(keys - queries, keys, device=mask.device)
    if look and mask.all() and (counts is None or bool((counts == places + 1).all())):
        return Arrangement(keys)
    asking = mask[:, places]
    seen = mask.cumsum(1)[:, places] if counts is None else counts
    end = torch.arange(keys - queries + 1, keys + 1, device=mask.device)
    if look and _is_left_padded(mask):
        return Arrangement(keys, torch.where(asking, end - seen, keys))
    order = mask.to(torch.uint8).argsort(dim=1, stable=True)
    asked = asking.to(torch.uint8).argsort(dim=1, stable=True)
    first = torch.where(asking.gather(1, asked), end - seen.gather(1, asked), keys)
    return Arrangement(keys, first, order, asked)


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """Return x (B, H, L, d) with the places of each sequence in this order (B, L)."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def token_positions(mask: Tensor, length: int) -> Tensor:
    """Return the place of the last `length` tokens in their own sequences, (B, length), from 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - length :]
