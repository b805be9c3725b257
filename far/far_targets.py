"""Chooses the tokens that an audit scores, by distance to the earlier occurrence, and scores them.

The choice depends on the tokens alone, not on a model.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data.far_tasks import ask
from data.tokeniser import Tokeniser
from evaluating.protocol import BATCH_TOKENS, progress
from lssar.errors import UserError
from model import GPT

# The k of k-grams. In the standard library's bytes, 17 % follow a 4-gram that last occurred 129 to
# 2,048 bytes before, and in 76 % of these cases the same byte follows. At k = 8 it is 12.5 % and
# 85 %. At k = 12 it is a quarter fewer, and no more than 87 %.
GRAM = {"bytes": 8, "gpt2": 3}
MOST = 4096  # targets; each costs a forward pass over the near context alone
UNSEEN = 0  # the distance where the k-gram has not occurred before
# Rows of the array that `score_targets` returns.
LOSSES = 0
RIGHT = 1


@dataclass(frozen=True)
class FarTargets:
    """Holds the tokens to predict, and how far back each occurred before."""

    tokens: np.ndarray  # (segments, length + 1)
    segment: np.ndarray  # (targets,): number of the segment
    place: np.ndarray  # (targets,): place in the segment
    distance: np.ndarray  # (targets,): distance to the earlier occurrence, or UNSEEN

    @property
    def wanted(self) -> np.ndarray:
        """Return the target tokens."""
        return self.tokens[self.segment, self.place]

    @property
    def same(self) -> np.ndarray:
        """Tell for each target whether the same token followed the earlier occurrence."""
        return self.tokens[self.segment, self.place - self.distance] == self.wanted

    @property
    def sha256(self) -> str:
        """Return a hash of the tokens and of the choice."""
        arrays = (self.tokens, self.segment, self.place)
        return hashlib.sha256(b"".join(a.astype("<i8").tobytes() for a in arrays)).hexdigest()

    def near(self, length: int) -> np.ndarray:
        """Return the last tokens before each target, (targets, length)."""
        places = self.place[:, None] + np.arange(-length, 0)
        return self.tokens[self.segment[:, None], places]


def last_occurrences(tokens: np.ndarray, gram: int) -> np.ndarray:
    """Return for each token how far back the same k-gram last occurred; 0 where it did not."""
    grams = np.lib.stride_tricks.sliding_window_view(tokens[:-1], gram)
    ids = np.unique(grams, axis=0, return_inverse=True)[1].ravel()
    order = np.argsort(ids, kind="stable")  # places of the same k-gram stand in a row, in order
    again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    distance = np.zeros(len(tokens), dtype=np.int64)
    distance[gram + order[again + 1]] = order[again + 1] - order[again]
    return distance


def text_targets(tokens: np.ndarray, near: int, gram: int) -> FarTargets:
    """Choose tokens beyond the near context whose k-gram last occurred beyond it, or never."""
    distance = np.stack([last_occurrences(row, gram) for row in tokens])
    distance[:, :near] = -1
    far = _sampled(np.argwhere(distance > near))
    if not len(far):
        raise UserError(
            f"none of the {distance[:, near:].size} tokens follows a {gram}-gram that last "
            f"occurred more than {near} tokens before it; use other --data"
        )
    unseen = _sampled(np.argwhere(distance == UNSEEN))
    segment, place = np.concatenate((far, unseen)).T
    return FarTargets(tokens, segment, place, distance[segment, place])


def task_targets(
    task: str, tokeniser: Tokeniser, length: int, count: int, beyond: int, seed: int
) -> FarTargets:
    """Choose the answers in `count` sequences that stand farther than `beyond` from their key."""
    asked = [ask(task, tokeniser, length, number, seed) for number in range(count)]
    chosen = []
    for number, one in enumerate(asked):
        for place, distance in one.answers:
            if distance > beyond:
                chosen.append((number, place, distance))
    segment, place, distance = _sampled(np.array(chosen).reshape(-1, 3)).T
    tokens = np.stack([one.tokens for one in asked]).astype(np.int64)
    return FarTargets(tokens, segment, place, distance)


def _sampled(rows: np.ndarray) -> np.ndarray:
    """Return all rows, or MOST of them at random."""
    if len(rows) > MOST:
        rows = rows[np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST])]
    return rows


def score_targets(model: GPT, targets: FarTargets, device, label: str, near: int = 0) -> np.ndarray:
    """Return (2, targets): LOSSES, and RIGHT where the target is the likeliest token.

    The model sees the segment up to the target; with `near`, a fresh context of so many tokens.
    """
    if near:
        inputs = targets.near(near)  # one row for each target
        rows = np.arange(len(inputs))
        places = np.full_like(rows, near - 1)
        label = f"{label}, near context"
    else:
        inputs = targets.tokens[:, :-1]
        rows = targets.segment
        places = targets.place - 1
    found = np.zeros((2, len(rows)))
    size = max(1, BATCH_TOKENS // inputs.shape[1])
    with progress(len(inputs), label, "sequence") as bar, torch.no_grad():
        for first in range(0, len(inputs), size):
            batch = torch.from_numpy(inputs[first : first + size]).to(device)
            here = np.flatnonzero(rows // size == first // size)
            if len(here):
                logits = model.logits(model.hidden(batch)[rows[here] - first, places[here]])
                answers = torch.from_numpy(targets.wanted[here]).to(device)
                losses = F.cross_entropy(logits, answers, reduction="none")
                right = (logits.argmax(-1) == answers).float()
                found[:, here] = torch.stack((losses, right)).cpu().double().numpy()
            bar.update(len(batch))
    return found
