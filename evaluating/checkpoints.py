"""Trained models as evaluations see them: opened, identified by their content, named, varied."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from data.tokeniser import TOKENISERS, Tokeniser, get_tokeniser
from evaluating.results import AS_TRAINED, Results
from evaluating.variants import (
    CURRENT_LENGTH,
    STRETCHES,
    alpha_name,
    exponent_name,
    window_name,
)
from lssar.backends import forget_used_backends
from lssar.errors import UserError
from lssar.mechanisms import uses_setting
from model import GPT
from modelling.config import ModelConfig
from support.files import sha256_of
from training.checkpoint import WEIGHTS, CheckpointInfo, find, load_model, read_description


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    identity: str  # of config and weights, whatever the path
    config: ModelConfig
    info: CheckpointInfo
    model_type: type[torch.nn.Module] = GPT

    def load(self, device: torch.device) -> torch.nn.Module:
        """Load the model for evaluation."""
        return load_model(self.path, self.model_type, device)[0].eval()

    def tokeniser(self) -> Tokeniser:
        """Return the tokeniser it was trained with; if none is recorded, the one that fits."""
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
    """Read and check every description, of models of one type, before anything is computed."""
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
    seen = []
    with attention.register_forward_pre_hook(lambda module, given: seen.extend(given)):
        model.hidden(tokens)
    x, rope, _, first = seen
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


@dataclass(frozen=True)
class Variant:
    """Changes one setting of a trained model, without retraining.

    In a model with local and global layers, p and alpha change in every layer that re-weights, a
    window narrows every layer that sees farther, and RoPE is stretched in every layer that has it.
    """

    name: str = AS_TRAINED
    key: str | None = None  # p, alpha, window, length, or how RoPE is stretched: pi, ntk, yarn
    value: float | int | str | None = None
    sinks: int = 0  # beside a window

    def needs(self, config: ModelConfig) -> str | None:
        """Return the property that this variant needs and the model lacks; None if it fits."""
        layers = config.all_layers
        wide = [layer for layer in layers if not layer.attention.window]
        rotary = [layer for layer in wide if layer.positions == "rope"]
        if self.key in ("p", "alpha") and not any(x.attention.sharpened for x in layers):
            return "re-weights its attention"
        if self.key == "length" and not uses_setting("length", config.attention):
            return "has an L in its attention"
        if self.key in STRETCHES and not rotary:
            return "has RoPE in a layer without a window"
        if self.key in ("ntk", "yarn") and config.interpolation != 1:
            return "was trained without position interpolation"
        if self.key == "yarn" and any(layer.attention.cosine for layer in rotary):
            return "has scores of q.k (YaRN scales q and k, and a cosine ignores scale)"
        if self.sinks and config.shift:
            return "does not shift its keys (a sink's would be that of another token)"
        if self.sinks and config.documents:
            return "sees one document (here the first tokens are those of another)"
        if self.sinks and config.attention.cosine and config.positions == "rope":
            return "has scores of q.k, or cosines without RoPE (which turns a sink away)"
        return None

    def config(self, trained: ModelConfig, train_length: int, length: int) -> ModelConfig:
        """Return the model's config at this length; `trained` itself where nothing changes."""
        attention = trained.attention
        local = trained.local
        acts_beyond = {
            "p": 0,
            "window": self.value,
            "alpha": attention.train_length,
            "length": attention.train_length,
            **dict.fromkeys(STRETCHES, train_length),
        }
        if length <= acts_beyond.get(self.key, length):
            return trained
        if self.key in STRETCHES:
            stretch = trained.interpolation * length / train_length
            return replace(trained, interpolation=stretch, scaling=self.key)
        changes = {self.key: self.value}
        if self.key == "window":
            changes["sinks"] = self.sinks
        sharpens = self.key in ("p", "alpha")
        if sharpens and local is not None and local.attention.sharpened:
            local = replace(local, attention=replace(local.attention, **changes))
        if attention.sharpened or not sharpens:
            attention = replace(attention, **changes)
        changed = replace(trained, attention=attention, local=local)
        changed.check()
        return changed


def variants(arguments, checkpoints: list[Checkpoint]) -> list[Variant]:
    """List the variants: as trained, then those of the command line, checked on the models."""
    chosen = [Variant()]
    sinks = arguments.sinks
    chosen += [Variant(exponent_name(p), "p", p) for p in arguments.p]
    chosen += [Variant(alpha_name(alpha), "alpha", alpha) for alpha in arguments.alpha]
    chosen += [Variant(window_name(window), "window", window) for window in arguments.window]
    if sinks and not arguments.window:
        raise UserError(f"--sinks {sinks} are kept beside a window; give --window too")
    for window in arguments.window if sinks else ():
        chosen.append(Variant(window_name(window, sinks), "window", window, sinks))
    chosen += [Variant(STRETCHES[key], key) for key in STRETCHES if getattr(arguments, key)]
    if arguments.current_length:
        chosen.append(Variant(CURRENT_LENGTH, "length", "current"))
    for variant in chosen:
        lacking = [variant.needs(checkpoint.config) for checkpoint in checkpoints]
        if all(lacking):
            raise UserError(f"{variant.name}: no checkpoint given {lacking[-1]}; leave it out")
        for checkpoint, needs in zip(checkpoints, lacking, strict=True):
            if not needs:  # raises for an impossible value
                variant.config(checkpoint.config, checkpoint.info.train_length, length=2**40)
    return chosen


@dataclass(frozen=True)
class Case:
    """Holds one checkpoint under one variant at one length, which are measured at a time."""

    checkpoint: Checkpoint
    variant: Variant
    length: int

    @property
    def key(self) -> dict:
        """Return the fields that its records share."""
        return {
            "run": self.checkpoint.identity,
            "variant": self.variant.name,
            "length": self.length,
        }

    @property
    def label(self) -> str:
        """Name the run and the variant."""
        return series_label(self.checkpoint.info.run, self.variant.name)

    @property
    def config(self) -> ModelConfig:
        """Return the config of the model under the variant at this length."""
        trained = self.checkpoint.config
        return self.variant.config(trained, self.checkpoint.info.train_length, self.length)

    def configure(self, model: GPT) -> None:
        """Set the model to this case."""
        model.configure(**vars(self.config))


def unmeasured(results: Results, checkpoints, variants, lengths, world) -> Iterator[tuple]:
    """Yield (case, its configured model) for the cases that the results lack, the short first."""
    for checkpoint in checkpoints:
        results.runs.setdefault(checkpoint.identity, checkpoint.describe())
        suited = [v for v in variants if not v.needs(checkpoint.config)]
        cases = [Case(checkpoint, v, n) for n in lengths for v in suited]
        missing = [case for case in cases if not results.find(**case.key)]
        model = checkpoint.load(world.device) if missing else None
        for case in missing:
            case.configure(model)
            forget_used_backends()  # a record names those of its own measurement
            yield case, model
