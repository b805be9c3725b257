"""Trained models as evaluations see them: opened, identified by their content, named, varied."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.tokeniser import TOKENISERS, Tokeniser, get_tokeniser
from evaluating.results import AS_TRAINED, Results
from lssar.errors import UserError
from lssar.mechanisms import Mechanism, has_meaning
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
        if name not in fitting:
            known = ", ".join(f"{n} {t.vocab_size}" for n, t in TOKENISERS.items())
            has = f"a vocabulary of {self.config.vocab_size} and the tokeniser {name!r}"
            raise UserError(f"{self.path} has {has}; text needs one of: {known}")
        return get_tokeniser(name)

    def describe(self) -> dict:
        """For the `runs` of a results file."""
        return {"path": str(self.path), **vars(self.info), "model": self.config.to_dict()}


def open_checkpoints(paths: Iterable[str]) -> list[Checkpoint]:
    """Read and check every description before anything is computed."""
    checkpoints: dict[str, Checkpoint] = {}
    for given in paths:
        directory = find(given)
        config, info = read_description(directory)
        content = json.dumps(config.to_dict(), sort_keys=True) + sha256_of(directory / WEIGHTS)
        identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        if identity in checkpoints:
            twin = checkpoints[identity].path
            raise UserError(f"{given} is the same model as {twin}; give it once")
        checkpoints[identity] = Checkpoint(directory, identity, config, info)
    return list(checkpoints.values())


def labels(runs: dict[str, dict]) -> dict[str, str]:
    """A short name for each of the `runs` of a results file: the first that tells all apart."""
    for form in ("{mechanism}", "{run}", "{run} @ {step}", "{path}", "{identity}"):
        names = {}
        for identity, run in runs.items():
            mechanism = mechanism_label(ModelConfig.from_dict(run["model"]).attention)
            names[identity] = form.format_map(run | {"mechanism": mechanism, "identity": identity})
        if len(set(names.values())) == len(names):
            break
    return names


def mechanism_label(m: Mechanism) -> str:
    return f"{m.label} p={m.p:g}" if m.sharpened else m.label


def series_label(run: str, variant: str) -> str:
    return run if variant == AS_TRAINED else f"{run}, {variant}"


@dataclass(frozen=True)
class Variant:
    """A trained model under another setting, without retraining; each changes one thing."""

    name: str = AS_TRAINED
    key: str | None = None  # p, alpha, window, length or interpolation
    value: float | int | str | None = None

    def suits(self, config: ModelConfig) -> bool:
        everywhere = self.key in (None, "interpolation")
        return everywhere or has_meaning(self.key, config.attention)

    def config(self, trained: ModelConfig, train_length: int, length: int) -> ModelConfig:
        """The model's config at this evaluation length; `trained` itself where nothing changes."""
        acts_beyond = {"p": 0, "alpha": trained.attention.train_length, "window": self.value}
        acts_beyond |= {"interpolation": train_length, "length": trained.attention.train_length}
        if length <= acts_beyond.get(self.key, length):
            return trained
        settings = trained.to_dict()
        if self.key == "interpolation":
            settings["interpolation"] = trained.interpolation * length / train_length
        else:
            settings["attention"] |= {self.key: self.value}
        return ModelConfig.from_dict(settings)


def variants(arguments, checkpoints: list[Checkpoint]) -> list[Variant]:
    """As trained, then what the command line adds; every value is checked on the models."""
    chosen = [Variant()]
    for key in ("p", "alpha", "window"):
        chosen += [Variant(f"{key}={v:g}", key, v) for v in getattr(arguments, key)]
    if arguments.position_interpolation:
        chosen.append(Variant("PI", "interpolation"))
    if arguments.current_length:
        chosen.append(Variant("L=current", "length", "current"))
    for variant in chosen:
        suited = [c for c in checkpoints if variant.suits(c.config)]
        if not suited:
            if variant.key == "length":
                given, rule = "--current-length", "has an L in its attention"
            else:
                given, rule = f"--{variant.key} {variant.value:g}", "re-weights its attention"
            raise UserError(f"{given}: no checkpoint given {rule}; leave it out")
        for c in suited:  # raises for an impossible value
            variant.config(c.config, c.info.train_length, length=2**40)
    return chosen


@dataclass(frozen=True)
class Case:
    """One checkpoint under one variant at one length: what is measured at a time."""

    checkpoint: Checkpoint
    variant: Variant
    length: int

    @property
    def key(self) -> dict:
        """The fields that its records share."""
        names = {"run": self.checkpoint.identity, "variant": self.variant.name}
        return names | {"length": self.length}

    @property
    def label(self) -> str:
        return series_label(self.checkpoint.info.run, self.variant.name)

    @property
    def config(self) -> ModelConfig:
        c = self.checkpoint
        return self.variant.config(c.config, c.info.train_length, self.length)

    def configure(self, model: GPT) -> None:
        model.configure(attention=self.config.attention, interpolation=self.config.interpolation)


def unmeasured(results: Results, checkpoints, variants, lengths, device) -> Iterator[tuple]:
    """(case, model) of what the results lack; shorter lengths first."""
    for checkpoint in checkpoints:
        results.runs.setdefault(checkpoint.identity, checkpoint.describe())
        suited = [v for v in variants if v.suits(checkpoint.config)]
        cases = [Case(checkpoint, v, n) for n in lengths for v in suited]
        missing = [case for case in cases if not results.find(**case.key)]
        model = checkpoint.load(device) if missing else None
        for case in missing:
            yield case, model
