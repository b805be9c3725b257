"""Sets of records: independent sequences of one length, perhaps with labels.

A record has `points` positions of `channels` tokens. Records lie in ordinary shards; beside them

    records.json        {"points": 1000, "channels": 2, "outputs": 0, "settings": {...}}
    labels_train.npy    where outputs > 0: float32 (records, points - 1, outputs), NaN for "none"

A model reads all positions of a record but the last and predicts each one's successor or label.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.shards import DESCRIPTION, TokenSet, describe, open_split
from lssar.errors import UserError
from support.files import open_regular, reading


class Records:
    def __init__(self, tokens: TokenSet, points: int, channels: int, labels: np.ndarray | None):
        self.tokens, self.points, self.channels, self.labels = tokens, points, channels, labels
        self.directory, self.tokeniser = tokens.directory, None
        self.files = tokens.files | {DESCRIPTION: None}
        if labels is not None:
            self.files[Path(labels.filename).name] = None
        self.stride = points * channels
        self.count, rest = divmod(tokens.total_tokens, self.stride)
        if rest or (labels is not None and labels.shape[:2] != (self.count, points - 1)):
            wrong = f"{tokens.total_tokens} tokens are not records of {self.stride} with labels"
            raise UserError(f"{self.directory} is damaged: {wrong}; simulate it again")
        if labels is not None and np.isinf(labels).any():
            raise UserError(f"{self.directory} has infinite labels; simulate it again")
        self.total_tokens = self.count * (points - 1)  # positions that a model reads

    def of_length(self, length: int) -> "Records":
        if length != (only := self.points - 1):
            has = f"{self.directory} has records of {self.points} points"
            raise UserError(f"{has}, to be read at train.length = {only}, not {length}")
        return self

    def labels_of(self, offsets: np.ndarray) -> np.ndarray:
        """How many labels each of these records has."""
        return (~np.isnan(self.labels[offsets // self.stride])).sum(axis=(1, 2))

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """(records, points, channels) int64; with labels, both in one float32 tensor of shape
        (records, points - 1, channels + outputs), which is exact for tokens."""
        shape = (len(offsets), self.points, self.channels)
        batch = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
        self.tokens.fill(batch.numpy(), offsets)
        if self.labels is None:
            return batch
        labels = torch.from_numpy(self.labels[offsets // self.stride])
        both = torch.cat((batch[:, :-1].float(), labels), dim=-1)
        return both.pin_memory() if pin else both

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (records, points - 1, channels) and their targets, of the same leading shape."""
        if self.labels is None:
            return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        return batch[..., : self.channels].long(), batch[..., self.channels :].contiguous()


def open_data(
    directory: str | Path, split: str, *, vocab_size: int, channels: int, outputs: int
) -> TokenSet | Records:
    """What a model with these inputs and outputs reads: a stream of tokens, or records."""
    directory = Path(directory)
    if channels == 1 and not outputs:
        return open_split(directory, split, vocab_size=vocab_size)
    about = describe(directory)
    for key, wanted in {"channels": channels, "outputs": outputs}.items():
        if about[key] != wanted:
            has = f"{directory} has {about[key]} {key} per position, the model {wanted}"
            raise UserError(f"{has}; set model.{key} = {about[key]} or choose other data")
    tokens, labels = open_split(directory, split, vocab_size=vocab_size), None
    if outputs:
        path = directory / f"labels_{split}.npy"
        with reading(path), open_regular(path):
            labels = np.load(path, mmap_mode="r", allow_pickle=False)
    return Records(tokens, about["points"], channels, labels)
