"""What the evaluation scripts share: checkpoints and their identity, variants of them, tables.

A variant is a trained model under another evaluation setting, without retraining: another
sharpening exponent, the adaptive p_i, a sliding window, position interpolation. Each changes one
thing, so that what it does can be read off.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from attention import Mechanism
from checkpoint import WEIGHTS, CheckpointInfo, find, load_model, read_description
from data.shards import sha256_of
from data.tokeniser import TOKENISERS, Tokeniser, get_tokeniser
from errors import Parser, UserError, number, positive
from model import GPT, ModelConfig

AS_TRAINED = "as trained"

# Tokens in one forward pass, or one sequence if that is longer. Fixed, because a matrix product
# can round differently in another shape, and results must be the same every time.
BATCH_TOKENS = 16384


# --- checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    identity: str  # of config and weights, whatever the path
    config: ModelConfig
    info: CheckpointInfo

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
        """For the results file."""
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


def labels(described: dict[str, dict]) -> dict[str, str]:
    """A short name for each checkpoint of a results file: the first kind that tells all apart."""
    kinds: tuple[Callable[[dict], str], ...] = (
        lambda c: mechanism_label(ModelConfig.from_dict(c["model"]).attention),
        lambda c: c["run"],
        lambda c: f"{c['run']} @ {c['step']}",
        lambda c: c["path"],
    )
    for kind in kinds:
        names = {identity: kind(c) for identity, c in described.items()}
        if len(set(names.values())) == len(names):
            return names
    return {identity: identity for identity in described}


def mechanism_label(m: Mechanism) -> str:
    return f"{m.label} p={m.p:g}" if m.sharpened else m.label


def series_label(checkpoint_label: str, variant: str) -> str:
    return checkpoint_label if variant == AS_TRAINED else f"{checkpoint_label}, {variant}"


# --- variants ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    name: str = AS_TRAINED
    key: str | None = None  # an attention setting: p, alpha or window
    value: float | int | None = None
    interpolated: bool = False

    def suits(self, config: ModelConfig) -> bool:
        return self.key not in ("p", "alpha") or config.attention.sharpened

    def config(self, trained: ModelConfig, train_length: int, length: int) -> ModelConfig:
        """The model's config at this evaluation length; `trained` itself where nothing changes."""
        if self.interpolated and length > train_length:
            factor = trained.interpolation * length / train_length
            return ModelConfig.from_dict(trained.to_dict() | {"interpolation": factor})
        acts = {
            None: False,
            "p": True,
            "alpha": length > trained.attention.train_length,
            "window": length > (self.value or 0),
        }
        if not acts[self.key]:
            return trained
        settings = trained.to_dict()
        settings["attention"] |= {self.key: self.value}
        return ModelConfig.from_dict(settings)


def add_variant_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("evaluated in addition, without retraining, one at a time")
    group.add_argument("--p", type=numbers, default=[], help="other sharpening exponents: 3,25")
    group.add_argument("--alpha", type=numbers, default=[], help="adaptive p_i: 0.1,0.2")
    group.add_argument("--window", type=lengths, default=[], help="sliding windows: 1024")
    group.add_argument("--position-interpolation", action="store_true")


def variants(arguments: argparse.Namespace, checkpoints: list[Checkpoint]) -> list[Variant]:
    """As trained, then what the command line adds; every value checked on the models at once."""
    chosen = [Variant()]
    for key in ("p", "alpha", "window"):
        chosen += [Variant(f"{key}={v:g}", key, v) for v in getattr(arguments, key)]
    if arguments.position_interpolation:
        chosen.append(Variant("PI", interpolated=True))
    for variant in chosen:
        suited = [c for c in checkpoints if variant.suits(c.config)]
        if not suited:
            raise UserError(
                f"--{variant.key} {variant.value:g}: no checkpoint given re-weights its attention, "
                "so there is no exponent to change; leave it out"
            )
        for c in suited:  # raises for an impossible value
            variant.config(c.config, c.info.train_length, length=2**40)
    return chosen


def configure(model: GPT, config: ModelConfig) -> GPT:
    return model.configure(attention=config.attention, interpolation=config.interpolation)


# --- the command line ----------------------------------------------------------------------------


class EvaluationParser(Parser):
    """The arguments that every evaluation script has."""

    def __init__(self, description: str):
        super().__init__(description)
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))

    def add_run_arguments(self) -> None:
        """What every script needs that runs models over many inputs and records the results."""
        self.add_argument("checkpoints", nargs="+", metavar="CKPT", help="run or checkpoint")
        self.add_argument("--out", required=True, type=Path, help="results/NAME.json")
        self.add_argument(
            "--precision",
            default="auto",
            choices=("auto", "bf16", "fp32"),
            help="auto: bf16 on a GPU, fp32 elsewhere",
        )


def lengths(text: str) -> list[int]:
    """ "1024,2048" -> [1024, 2048], in order, each once."""
    return sorted(set(map(positive, text.split(","))))


def numbers(text: str) -> list[float]:
    """ "0.1,0.2" -> [0.1, 0.2], in order, each once."""
    return sorted(set(map(number(), text.split(","))))


def progress(total: int, label: str, unit: str, enabled: bool = True) -> tqdm:
    """A bar on a terminal, nothing in a log file, where finished rows are printed anyway."""
    hidden = not (enabled and sys.stderr.isatty())
    return tqdm(
        total=total,
        desc=label,
        unit=unit,
        unit_scale=total > 10_000,
        leave=False,
        dynamic_ncols=True,
        disable=hidden,
    )


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[str]:
    """Products in bf16 under autocast, or in full fp32 (no TF32); gives the name of the choice."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            yield "bf16" if bf16 else "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def kept_on_interrupt(path: Path) -> Iterator[None]:
    """On Ctrl-C, say where the finished rows are."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nwhat is finished is in {path}; the same command continues it")
        raise


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned: the first to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
