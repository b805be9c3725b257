"""Lists every key of a run's configuration, by section: its type, default and meaning."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

# Rules that a type may add.
RULES = {
    "must be above 0": lambda x: x > 0,
    "must be 0 or more": lambda x: x >= 0,
    "must be in [0, 1)": lambda x: 0 <= x < 1,
    "must not have a zero byte": lambda text: "\0" not in text,
    "must name a folder; . is the current one": lambda text: text and "\0" not in text,
}
Count = Annotated[int, "must be above 0"]
CountOrZero = Annotated[int, "must be 0 or more"]
Positive = Annotated[float, "must be above 0"]
NotNegative = Annotated[float, "must be 0 or more"]
Beta = Annotated[float, "must be in [0, 1)"]
PathText = Annotated[str, "must not have a zero byte"]
FolderText = Annotated[str, "must name a folder; . is the current one"]


@dataclass(frozen=True)
class ModelSection:
    preset: str = "124m"
    layers: int | None = None  # None: the preset's value, here and below
    heads: int | None = None
    width: int | None = None
    tokeniser: str | None = None  # whose vocabulary: "bytes" or "gpt2"
    vocab_size: int | None = None
    vocab_rows: int | None = None
    interpolation: float = 1.0  # position interpolation, target length / training length
    positions: str | None = None  # rope, none, alibi or fox: see modelling/config.py
    pattern: list[str] | None = None  # ["local:32", "global"], repeated over the layers
    shift: bool | None = None  # global layers keep a value under the previous token's key


@dataclass(frozen=True)
class AttentionSection:
    name: str = "softmax"
    p: float | None = None  # None: the mechanism's own value, here and below
    alpha: float | None = None
    train_length: int | None = None  # None: train.length
    length: str | None = None
    numerics: str | None = None
    window: int | None = None
    backend: str = "auto"  # one of lssar.backends.BACKENDS: how it is computed, not what


@dataclass(frozen=True)
class LocalSection:  # of local layers, in place of [attention] and model.positions
    name: str | None = None  # None: as the global layers, here and below
    p: float | None = None
    positions: str | None = None


@dataclass(frozen=True)
class DataSection:
    directory: FolderText = "corpora/fineweb10B"
    prepare: str = "data/prepare.py fineweb"  # the command that makes it, without --out
    shuffle: bool = True  # sequences in a seeded order, each once per epoch
    document_mask: bool = False  # a token sees its own document only


@dataclass(frozen=True)
class TrainSection:
    length: Count = 1024
    long_length: CountOrZero = 0  # of the sequences of every long_interval-th step; 0: none differ
    long_interval: Count = 4
    steps: Count = 18865
    batch_tokens: Count = 524288  # of one optimiser step, over all processes
    # Sequences per process and forward pass; "auto": the largest power of two that fits the memory.
    micro_batch: Count | Literal["auto"] = 4
    optimiser: Literal["adamw", "muon"] = "adamw"  # Muon: see training/optimiser.py
    lr: Positive = 6e-4
    warmup: CountOrZero = 700
    schedule: Literal["cosine", "constant"] = "cosine"  # to zero
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0  # of the gradient's norm; 0 for none
    seed: CountOrZero = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # bf16 on GPUs that have it, else fp32
    compile: bool = False
    init_from: PathText = ""  # a run or checkpoint whose weights to start from
    init_optimiser: bool = False  # and whose optimiser state: a new schedule for an old run
    max_skipped_steps: CountOrZero = 3  # non-finite steps in a row; more stop at the next report

    @property
    def least_micro_batch(self) -> int:
        """Return the smallest micro-batch whose tokens are whole sequences of either length."""
        return math.lcm(self.length, self.long_length or 1) // self.length

    def per_token(self, cost: Callable[[int], float]) -> float:
        """Return the average cost of a token, given its cost in sequences of a length."""
        short = cost(self.length)
        longer = cost(self.long_length) - short if self.long_length else 0
        return short + longer / self.long_interval


@dataclass(frozen=True)
class EvalSection:
    interval: Count = 250
    tokens: Count = 10485760  # the first ones of the validation set
    batch: CountOrZero = 0  # sequences at once; 0: the micro-batch
    sample_interval: CountOrZero = 0  # steps between samples of text; 0: none
    sample_prompt: str = "\n"
    sample_tokens: CountOrZero = 64


@dataclass(frozen=True)
class CheckpointSection:
    interval: Count = 1000
    keep: Count = 2  # besides the best


@dataclass(frozen=True)
class LogSection:
    name: str = ""  # of the run; empty: the config file's name
    directory: FolderText = "runs"
    interval: Count = 10
    wandb: bool = False
    wandb_project: str = "lssar"
