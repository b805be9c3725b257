"""Opens trained models for evaluation, identifies them by their content, and names them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.tokeniser import TOKENISERS, Tokeniser, get_tokeniser
from evaluating.results import AS_TRAINED
from lssar.errors import UserError
from model import GPT
from modelling.config import ModelConfig
from support.files import sha256_of
from training.checkpoint import WEIGHTS, CheckpointInfo, find, load_model, read_description


@dataclass(frozen=True)
class Checkpoint:
    """Holds the description of a trained model; `load` reads its weights."""

    path: Path
    identity: str  # hash of config and weights, whatever the path
    config: ModelConfig
    info: CheckpointInfo
    model_type: type[torch.nn.Module] = GPT

    def load(self, device: torch.device) -> torch.nn.Module:
        """Load the model for evaluation."""
        return load_model(self.path, self.model_type, device)[0].eval()

    def tokeniser(self) -> Tokeniser:
        """Return the tokeniser that it was trained with; if none is recorded, one that fits."""
        fitting = [n for n, t in TOKENISERS.items() if t.vocab_size == self.config.vocab_size]
        name = self.info.tokeniser or next(iter(fitting), None)
        if name not in fitting:
            known = ", ".join(f"{n} {t.vocab_size}" for n, t in TOKENISERS.items())
            raise UserError(
                f"{self.path} has a vocabulary of {self.config.vocab_size} and the tokeniser "
                f"{name!r}; text needs one of: {known}"
            )
        return get_tokeniser(name)

    def describe(self) -> dict:
        """Describe it for the `runs` of a results file."""
        return {"path": str(self.path), **vars(self.info), "model": self.config.to_dict()}


def open_checkpoints(paths: Iterable[str], model_type=GPT) -> list[Checkpoint]:
    """Read and check the descriptions of all models before anything is computed."""
    checkpoints: dict[str, Checkpoint] = {}
    for given in paths:
        directory = find(given)
        config, info = read_description(directory, model_type)
        content = json.dumps(config.to_dict(), sort_keys=True) + sha256_of(directory / WEIGHTS)
        identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        if identity in checkpoints:
            twin = checkpoints[identity].path
            raise UserError(f"{given} is the same model as {twin}; give it once")
        checkpoints[identity] = Checkpoint(directory, identity, config, info, model_type)
    return list(checkpoints.values())


def layer_inputs(model: GPT, tokens: Tensor, layer: int) -> tuple:
    """Return the attention module of `layer`, and its inputs for tokens (B, L): x, rope, first."""
    attention = model.blocks[layer].attention
    inputs = []

    def remember(module: torch.nn.Module, given: tuple) -> None:
        inputs.extend(given)

    with attention.register_forward_pre_hook(remember):
        model.hidden(tokens)
    x, rope, _, first = inputs
    return attention, x, rope, first


def labels(runs: dict[str, dict]) -> dict[str, str]:
    """Name each of the `runs` of a results file, by the shortest form that tells them apart."""
    models = {i: model_label(ModelConfig.from_dict(run["model"])) for i, run in runs.items()}
    for form in ("{mechanism}", "{run}", "{run} @ {step}", "{path}", "{identity}"):
        names = {i: form.format(**run, mechanism=models[i], identity=i) for i, run in runs.items()}
        if len(set(names.values())) == len(names):
            break
    return names


def model_label(config: ModelConfig) -> str:
    """Name the mechanism, and every setting in which the layers differ from the paper's."""
    label = config.attention.title
    label += {"none": ", NoPE", "alibi": ", ALiBi", "fox": ", FoX"}.get(config.positions, "")
    if config.shift:
        label += ", shifted"
    windows = [entry for entry in dict.fromkeys(config.pattern) if entry != "global"]
    if windows:
        label += f" + {', '.join(windows)}"
        if config.local is not None and config.local.attention != config.attention:
            label += f" {config.local.attention.title}"
    return label


def series_label(run: str, variant: str) -> str:
    """Name a run under a variant."""
    return run if variant == AS_TRAINED else f"{run}, {variant}"
