"""Trained models as evaluations see them: opened, identified by their content, named."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.tokeniser import TOKENISERS, Tokeniser, get_tokeniser
from lssar.errors import UserError
from lssar.mechanisms import Mechanism
from model import GPT, ModelConfig
from support.files import sha256_of
from training.checkpoint import WEIGHTS, CheckpointInfo, find, load_model, read_description


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    identity: str  # of config and weights, whatever the path
    config: ModelConfig
    info: CheckpointInfo

    @property
    def task_length(self) -> int:
        """Default max_length of downstream tasks: 2,048, as in the paper, if trained at 1,024."""
        return 2 * self.info.train_length

    def load(self, device: torch.device) -> GPT:
        return load_model(self.path, device)[0].eval()

    def tokeniser(self) -> Tokeniser:
        """The one it was trained with; without a record of it, the one that fits."""
        fitting = [n for n, t in TOKENISERS.items() if t.vocab_size == self.config.vocab_size]
        name = self.info.tokeniser or next(iter(fitting), None)
        if name is None or TOKENISERS.get(name) is None or name not in fitting:
            known = ", ".join(f"{n} {t.vocab_size}" for n, t in TOKENISERS.items())
            raise UserError(
                f"{self.path} has a vocabulary of {self.config.vocab_size} and the tokeniser "
                f"{name!r}; text needs one of: {known}"
            )
        return get_tokeniser(name)

    def describe(self) -> dict:
        """For the `runs` of a results file."""
        return {"path": str(self.path), **vars(self.info), "model": self.config.to_dict()}


def open_checkpoints(paths: Iterable[str]) -> list[Checkpoint]:
    """Read and check every description before anything is computed."""
    checkpoints: list[Checkpoint] = []
    for given in paths:
        directory = find(given)
        config, info = read_description(directory)
        digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
        digest.update(sha256_of(directory / WEIGHTS).encode())
        checkpoint = Checkpoint(directory, digest.hexdigest()[:16], config, info)
        if twin := next((c for c in checkpoints if c.identity == checkpoint.identity), None):
            raise UserError(f"{given} is the same model as {twin.path}; give it once")
        checkpoints.append(checkpoint)
    return checkpoints


def labels(runs: dict[str, dict]) -> dict[str, str]:
    """A short name for each of the `runs` of a results file: the first that tells all apart."""
    kinds: tuple[Callable[[dict], str], ...] = (
        lambda c: mechanism_label(ModelConfig.from_dict(c["model"]).attention),
        lambda c: c["run"],
        lambda c: f"{c['run']} @ {c['step']}",
        lambda c: c["path"],
    )
    for kind in kinds:
        names = {identity: kind(c) for identity, c in runs.items()}
        if len(set(names.values())) == len(names):
            return names
    return {identity: identity for identity in runs}


def mechanism_label(m: Mechanism) -> str:
    return f"{m.label} p={m.p:g}" if m.sharpened else m.label
