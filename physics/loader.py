"""Makes batches of simulated orbits: records of one length, perhaps with labels.

A record has `points` positions of `channels` tokens. A model reads all positions but the last and
predicts each one's successor or label. Records lie in ordinary shards; beside them

    records.json        {"points": 1000, "channels": 2, "outputs": 0, "settings": {...}}
    labels_train.npy    if outputs > 0: float32 (records, points - 1, outputs), NaN for "none"
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.loader import Batches, Sequences, TrainLoader, validation_batches
from data.shards import TokenSet, open_split
from lssar.errors import UserError
from support.files import json_record, open_regular, reading

DESCRIPTION = "records.json"
SIMULATE = "python physics/simulate.py --help"


def describe(directory: Path, command: str = SIMULATE) -> dict:
    """Read the `records.json` of a set of records."""
    path = directory / DESCRIPTION
    if not path.exists():
        raise UserError(
            f"{directory} has no {DESCRIPTION}: it is not (yet) a set of records; "
            f"make one with: {command}"
        )
    with json_record(path, "; simulate it again") as about:
        for key in ("points", "channels", "outputs"):
            if type(about[key]) is not int:
                raise ValueError(f"{key} {about[key]!r}")
    return about


class Records(Sequences):
    """Holds a split of independent sequences of one length."""

    tokeniser = None

    def __init__(self, tokens: TokenSet, points: int, channels: int, labels: np.ndarray | None):
        self.tokens = tokens
        self.directory = tokens.directory
        self.labels = labels
        self.files = tokens.files | {DESCRIPTION: None}
        if labels is not None:
            self.files[Path(labels.filename).name] = None
        self.shape = (points, channels)
        self.length = points - 1  # positions that a model reads
        self.stride = points * channels
        self.count = tokens.total_tokens // self.stride
        self.total_tokens = self.count * self.length
        if tokens.total_tokens % self.stride:
            raise UserError(
                f"{self.directory} is damaged: {tokens.total_tokens} tokens are not records of "
                f"{self.stride}; simulate it again"
            )
        if labels is None:
            return
        if labels.shape[:2] != (self.count, self.length):
            raise UserError(
                f"{self.directory} is damaged: labels of shape {labels.shape} for {self.count} "
                f"records of {points} points; simulate it again"
            )
        if np.isinf(labels).any():
            raise UserError(f"{self.directory} has infinite labels; simulate it again")

    def count_labels(self, offsets: np.ndarray) -> np.ndarray:
        """Count the labels of each of these records."""
        return (~np.isnan(self.labels[offsets // self.stride])).sum(axis=(1, 2))

    def read(self, offsets: np.ndarray, pin: bool = False) -> Tensor:
        """Read tokens; with labels, both in one float32 tensor, which is exact for tokens."""
        batch = super().read(offsets, pin)
        if self.labels is None:
            return batch
        labels = torch.from_numpy(self.labels[offsets // self.stride])
        both = torch.cat((batch[:, :-1].float(), labels), dim=-1)
        return both.pin_memory() if pin else both

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (records, points - 1, channels) and targets of the same leading shape."""
        if self.labels is None:
            return super().split(batch)
        channels = self.shape[1]
        return batch[..., :channels].long(), batch[..., channels:].contiguous()


def open_records(
    directory: str | Path,
    split: str,
    *,
    vocab_size: int,
    channels: int,
    outputs: int,
    command: str = SIMULATE,
) -> Records:
    """Open a split for a model with these inputs and outputs; `command` makes the folder."""
    directory = Path(directory)
    about = describe(directory, command)
    for key, wanted in {"channels": channels, "outputs": outputs}.items():
        if about[key] != wanted:
            raise UserError(
                f"{directory} has {about[key]} {key} per position, the model {wanted}; "
                f"set orbits.{key} = {about[key]} or choose other data"
            )
    tokens = open_split(directory, split, vocab_size=vocab_size)
    labels = None
    if outputs:
        path = directory / f"labels_{split}.npy"
        with reading(path), open_regular(path):
            labels = np.load(path, mmap_mode="r", allow_pickle=False)
    return Records(tokens, about["points"], channels, labels)


class RecordLoader(TrainLoader):
    """Yields this rank's micro-batches of records, with labels weighed alike."""

    def divisors(self, step: int) -> list[float]:
        """Return one divisor per micro-batch, so that every label of the step counts the same."""
        if self.source.labels is None:
            return super().divisors(step)
        labels = self.source.count_labels(self.offsets(step))
        mine = labels.reshape(self.accumulation, self.world_size, -1)[:, self.rank].sum(axis=1)
        # A micro-batch without labels has the loss 0, whatever it is divided by.
        return (max(1, labels.sum()) / (self.world_size * np.maximum(mine, 1))).tolist()


class OrbitBatches(Batches):
    """Holds both sets of a run on orbits, and makes their batches."""

    loader_type = RecordLoader

    def open_set(self, split: str) -> Records:
        """Open the train or val split."""
        m = self.config.model_config()
        return open_records(
            self.config.data.directory,
            split,
            vocab_size=m.vocab_size,
            channels=m.channels,
            outputs=m.outputs,
            command=self.config.data_command(),
        )

    def sequences(self, tokens: Records, length: int) -> Records:
        """Return the records, which must have this length."""
        if length != tokens.length:
            raise UserError(
                f"{tokens.directory} has records of {tokens.length + 1} points, to be read at "
                f"train.length = {tokens.length}, not {length}"
            )
        return tokens

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the validation batches; refuse records without labels."""
        records = self.val_set
        count = self.validation_tokens // records.length
        offsets = np.arange(min(count, records.count)) * records.stride
        if records.labels is not None and not records.count_labels(offsets).any():
            raise UserError(
                f"the first {count} validation records of {records.directory} have no label; "
                "raise eval.tokens"
            )
        return super().validation()


def all_inputs(records: Records, batch: int) -> Iterator[Tensor]:
    """Yield the inputs of every record, in order."""
    batches = validation_batches(records, total_tokens=records.total_tokens, batch=batch)
    return (inputs for inputs, _ in batches)
