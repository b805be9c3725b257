"""The models of the paper: the two scales, which runs there are, and with which seeds.

The scales, `nano` and `paper`, differ in configs and data only. Their values are in runs.toml.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ALL_FACTORS = (1, 2, 4, 8, 16)
PASSKEY_FACTORS = (1, 1.5, 2, 4, 8)
SWEPT_P = (1, 3, 5, 10, 15, 20)
SWEEP_STEMS = {"softmax": "softmax-reweighted", "lssar": "lssar"}
HEADLINE = ("softmax", "ssmax", "lssa", "lssar-p3", "lssar-p15")


def load_toml(name: str) -> dict:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


DATA = load_toml("runs.toml")


@dataclass(frozen=True)
class Corpus:
    arguments: tuple[str, ...]  # of data/prepare.py
    tokens: float  # as prepared, two bytes each


@dataclass(frozen=True)
class Scale:
    name: str
    config: str  # of the runs that both scales have
    train_length: int
    passkey_train_length: int
    eval_tokens: int  # targets of the loss at every length
    spread: bool  # targets from all over the validation set, or only its beginning
    unit: str
    seeds: tuple[int, ...]  # of repeated runs; the others have only the first
    corpora: dict[str, Corpus]  # by directory
    tokens_per_second: float | None = None  # training speed on a CPU, for the plan

    def length(self, factor: float, passkey: bool = False) -> int:
        return int(factor * (self.passkey_train_length if passkey else self.train_length))


def load_scale(name: str) -> Scale:
    fields = {key: value for key, value in DATA[name].items() if key != "runs"}
    fields["seeds"] = tuple(fields["seeds"])
    corpora = fields["corpora"].items()
    fields["corpora"] = {d: Corpus(tuple(c["arguments"]), c["tokens"]) for d, c in corpora}
    return Scale(name, **fields)


SCALES = {name: load_scale(name) for name in ("nano", "paper")}


@dataclass(frozen=True)
class Run:
    """One model to train."""

    key: str
    config: str  # a file in configs/
    overrides: tuple[str, ...] = ()
    init_from: str | None = None  # key of the run whose weights it starts from
    factors: tuple[int, ...] = ALL_FACTORS  # lengths to evaluate at, in training lengths
    windows: bool = False  # also evaluate with a sliding window
    alphas: tuple[float, ...] = ()  # of adaptive p_i to evaluate with, first seed only


def load_run(key: str, fields: dict) -> Run:
    sections = {name: fields.get(name, {}) for name in ("attention", "model")}
    overrides = (f"--{s}.{k}={v}" for s, values in sections.items() for k, v in values.items())
    other = {k: v for k, v in fields.items() if k not in sections}
    other |= {k: tuple(v) for k, v in other.items() if isinstance(v, list)}
    return Run(key, overrides=tuple(overrides), **other)


def all_runs(scale: str) -> dict[str, Run]:
    runs = {}
    for key, fields in (DATA["main"] | DATA["sweep"]).items():
        runs[key] = {"config": SCALES[scale].config, "attention": {"name": key}} | fields
    return {key: load_run(key, run) for key, run in (runs | DATA[scale]["runs"]).items()}


def run_name(key: str, seed: int) -> str:
    return f"{key}-s{seed}"


def run_seeds(scale: Scale, key: str, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The seeds asked for, or the scale's own: all of them for the runs of the headline and of PI,
    whose differences are small, and the first alone for the others."""
    if wanted is not None:
        return wanted
    several = key in HEADLINE or key.startswith(("pi-", "no-pi-"))
    return scale.seeds if several else scale.seeds[:1]
