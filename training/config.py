"""Run configurations: TOML files, checked into frozen dataclasses.

    config = load_config("configs/gpt2-124m-lssar.toml", ["--train.steps=1000"])

A file may name another as its `base` and changes what it lists. An unknown key, a wrong type or an
impossible batch is an error that names the file, the key, the value and what would be right.
"""

import contextlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import Mechanism, get_mechanism
from support.files import read_text

CONFIGS = Path(__file__).parents[1] / "configs"
LARGEST_FILE = 2**16  # characters; ours have a thousand
LARGEST = 2**40  # no size, count or seed needs more, and arithmetic with them stays quick and exact


def _rule(holds: Callable, otherwise: str) -> Callable:
    """Returns what is wrong with a value, or None."""
    return lambda value: None if holds(value) else otherwise


def _one_of(*options: str) -> Callable:
    return lambda value: None if value in options else f"unknown; {did_you_mean(value, options)}"


_above_0 = _rule(lambda x: 0 < x < math.inf, "must be above 0")
_from_0 = _rule(lambda x: 0 <= x < math.inf, "must be 0 or more")

Count, CountOrZero = Annotated[int, _above_0], Annotated[int, _from_0]
Positive, NotNegative = Annotated[float, _above_0], Annotated[float, _from_0]
Beta = Annotated[float, _rule(lambda x: 0 <= x < 1, "must be in [0, 1)")]
PathText = Annotated[str, _rule(lambda text: "\0" not in text, "no path has a zero byte")]
Schedule = Annotated[str, _one_of("cosine", "constant")]
Precision = Annotated[str, _one_of("auto", "bf16", "fp32")]


@dataclass(frozen=True)
class ModelSection:
    preset: str = "124m"
    layers: int | None = None  # None: the preset's value, here and below
    heads: int | None = None
    width: int | None = None
    vocab_size: int | None = None
    vocab_rows: int | None = None
    interpolation: float = 1.0  # position interpolation, target length / training length
    channels: int | None = None  # these three: see model.ModelConfig; None: a text model's
    positions: int | None = None
    outputs: int | None = None


@dataclass(frozen=True)
class AttentionSection:
    name: str = "softmax"
    p: float | None = None  # None: the mechanism's own value, here and below
    alpha: float | None = None
    train_length: int | None = None  # None: train.length
    length: str | None = None
    numerics: str | None = None
    window: int | None = None
    backend: str = "auto"  # of lssar.backends.BACKENDS: how it is computed, not what


@dataclass(frozen=True)
class DataSection:
    directory: PathText = "corpora/fineweb10B"
    shuffle: bool = True  # windows in a seeded order that visits each once an epoch


@dataclass(frozen=True)
class TrainSection:
    length: Count = 1024
    steps: Count = 18865
    batch_tokens: Count = 524288  # of one optimiser step, over all processes
    micro_batch: Count = 4  # sequences per process and forward pass
    lr: Positive = 6e-4
    warmup: CountOrZero = 700
    schedule: Schedule = "cosine"  # to zero; or "constant"
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0  # of the gradient's norm; 0 for none
    seed: CountOrZero = 0
    precision: Precision = "auto"  # bf16 autocast on GPUs, fp32 elsewhere
    compile: bool = False
    init_from: PathText = ""  # a run or checkpoint whose weights to start from
    init_optimiser: bool = False  # and whose optimiser state: a new schedule for an old run
    max_skipped_steps: CountOrZero = 3  # non-finite steps in a row before the run stops


@dataclass(frozen=True)
class EvalSection:
    interval: Count = 250
    tokens: Count = 10485760  # the first ones of the validation set
    batch: CountOrZero = 0  # sequences at once; 0: train.micro_batch
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
    directory: PathText = "runs"
    interval: Count = 10
    wandb: bool = False
    wandb_project: str = "lssar"


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step is cut: sequences = world_size * accumulation * micro_batch."""

    sequences: int
    world_size: int
    accumulation: int
    micro_batch: int


@dataclass(frozen=True)
class Config:
    model: ModelSection = ModelSection()
    attention: AttentionSection = AttentionSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @property
    def run_directory(self) -> Path:
        return Path(self.log.directory) / self.log.name

    def mechanism(self) -> Mechanism:
        settings = asdict(self.attention)
        del settings["backend"]
        if settings["train_length"] is None:
            settings["train_length"] = self.train.length
        return get_mechanism(settings.pop("name"), **settings)

    def model_config(self):
        """The `model.ModelConfig`; torch is imported only here, a mistyped key does without it."""
        from model import preset

        changes = {k: v for k, v in asdict(self.model).items() if v is not None}
        return preset(changes.pop("preset"), self.mechanism(), **changes)

    def data_ends(self) -> dict[str, int]:
        """What the data must be for this model: the arguments of `data.records.open_data`."""
        m = self.model_config()
        return {"vocab_size": m.vocab_size, "channels": m.channels, "outputs": m.outputs}

    def batch_plan(self, world_size: int = 1) -> BatchPlan:
        """The accumulation that makes exactly train.batch_tokens, or an error with the numbers."""
        t = self.train
        if t.batch_tokens % t.length:
            raise UserError(
                f"train.batch_tokens = {t.batch_tokens} is no multiple of length = {t.length}; "
                f"nearest: {max(1, round(t.batch_tokens / t.length)) * t.length}"
            )
        sequences = t.batch_tokens // t.length
        if sequences % world_size:
            raise UserError(
                f"{sequences} sequences a step (batch_tokens {t.batch_tokens} / length {t.length}) "
                f"cannot be shared by {world_size} processes; nearest number that can: "
                f"{_nearest_divisor(sequences, world_size)}"
            )
        share = sequences // world_size
        if share % t.micro_batch:
            raise UserError(
                f"train.micro_batch = {t.micro_batch} does not divide the {share} sequences a "
                f"process takes ({t.batch_tokens} tokens / {t.length} / {world_size} processes); "
                f"nearest that does: {_nearest_divisor(share, t.micro_batch)}"
            )
        return BatchPlan(sequences, world_size, share // t.micro_batch, t.micro_batch)

    def to_toml(self) -> str:
        """The whole resolved configuration; reads back as an equal one."""
        lines = []
        for section, values in asdict(self).items():
            lines.append(f"[{section}]")
            # JSON's strings, numbers and booleans are TOML's too, but for a DEL that TOML escapes.
            lines += [
                f"{k} = {json.dumps(v, ensure_ascii=False)}".replace("\x7f", "\\u007f")
                for k, v in values.items()
                if v is not None
            ]
            lines.append("")
        return "\n".join(lines)

    def differences(self, other: "Config") -> list[str]:
        """`section.key: mine -> other's` for everything that a resumed run may not change."""
        free = {
            *("eval", "checkpoint", "log", "data.directory", "attention.backend"),
            *("train.micro_batch", "train.compile", "train.max_skipped_steps"),
            *("train.init_from", "train.init_optimiser"),
        }
        if self.train.schedule == "constant":  # the steps so far are the same, however many follow
            free.add("train.steps")
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{section}.{key}: {value!r} -> {theirs[section][key]!r}"
            for section, values in mine.items()
            for key, value in values.items()
            if value != theirs[section][key] and free.isdisjoint((section, f"{section}.{key}"))
        ]


_SECTIONS = typing.get_type_hints(Config)


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: abs(d - wanted))


def load_config(path: str | Path, overrides: list[str] = (), world_size: int = 1) -> Config:
    """Read `path` and its bases, apply `--section.key=value` overrides, check everything."""
    config, origin = read_config(path, overrides)
    _check(config, origin, _find(Path(path)), world_size)
    return config


def read_config(path: str | Path, overrides: list[str] = ()) -> tuple[Config, dict]:
    """The config with each value checked by itself, and where each value is from."""
    path = _find(Path(path))
    values, origin = _read(path, seen=())
    for text in overrides:
        section, key, value = _parse_override(text)
        values.setdefault(section, {})[key] = value
        origin[section, key] = "command line"
    config = _build(values, origin, path)
    if not config.log.name:
        config = replace(config, log=replace(config.log, name=path.stem))
    return config, origin


def parse_config(text: str, where: str) -> Config:
    """A configuration from the text that `to_toml` wrote; `where` names it in errors."""
    try:
        values = tomllib.loads(text)
        origin = {(section, key): where for section, content in values.items() for key in content}
    except (*_NOT_TOML, TypeError) as error:
        raise UserError(f"{where}: cannot be read as TOML: {error}") from None
    return _build(values, origin, Path(where))


def _find(path: Path) -> Path:
    """The file itself, or the one in configs/ with that name, with or without .toml."""
    with contextlib.suppress(OSError):  # a name that no file can have; reading it says so
        if path.exists() and not path.is_dir():
            return path
        named = path if path.suffix == ".toml" else Path(f"{path}.toml")
        places = (named, CONFIGS / named, CONFIGS.parent / named)
        return next((place for place in places if place.is_file()), path)
    return path


# Errors of tomllib, of the text's encoding and of numbers with thousands of digits are ValueErrors;
# those of circular links and of deep nesting are RuntimeErrors.
_NOT_TOML = (ValueError, RuntimeError)


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict, dict]:
    """A file's values over those of its bases, and which file each came from."""
    try:
        resolved = path.resolve()
        values = tomllib.loads(read_text(path, limit=LARGEST_FILE))
    except FileNotFoundError:
        beside = () if path.parent == Path() else path.parent.glob("*.toml")
        known = {p.name for p in beside} or {p.name for p in CONFIGS.glob("*.toml")}
        raise UserError(f"no config file {path}; {did_you_mean(path.name, known)}") from None
    except (OSError, *_NOT_TOML) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as TOML: {reason}") from None
    if resolved in seen:
        raise UserError(f"{path}: its base leads back to itself; remove one `base` key")
    base, origin, merged = values.pop("base", None), {}, {}
    if isinstance(base, str):
        merged, origin = _read(path.parent / base, (*seen, resolved))
    elif base is not None:
        raise UserError(f"{path}: base = {_shown(base)} must be the path of another .toml file")
    for section, content in values.items():
        if not isinstance(content, dict):
            raise UserError(
                f"{path}: {section} = {_shown(content)} stands outside a section; "
                f"put it under one of [{'], ['.join(_SECTIONS)}]"
            )
        merged.setdefault(section, {}).update(content)
        origin.update({(section, key): str(path) for key in content})
    return merged, origin


def _shown(value) -> str:
    """A value for a message, however long or deeply nested."""
    try:
        text = repr(value)
    except _NOT_TOML:
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse_override(text: str) -> tuple[str, str, object]:
    name, equals, value = text.partition("=")
    section, dot, key = name.removeprefix("--").partition(".")
    if not (text.startswith("--") and equals and dot and section and key):
        raise UserError(f"cannot read the argument {text!r}; overrides are --section.key=value")
    # A run may be called 2024-01-31 or 1e3: text is taken as typed, unless it is quoted.
    hint = typing.get_type_hints(_SECTIONS.get(section, object)).get(key)
    try:
        (parsed,) = tomllib.loads(f"v = {value}").values()
    except _NOT_TOML:
        return section, key, value  # a bare word is a string
    if hint in (str, str | None) and not isinstance(parsed, str):
        parsed = value
    return section, key, parsed


def _build(values: dict, origin: dict, path: Path) -> Config:
    sections = {}
    for section, content in values.items():
        if section not in _SECTIONS:
            where = next((o for (s, _), o in origin.items() if s == section), path)
            raise UserError(
                f"{where}: unknown section [{section:.50}]; {did_you_mean(section, _SECTIONS)}"
            )
        hints = typing.get_type_hints(_SECTIONS[section], include_extras=True)
        typed = {}
        for key, value in content.items():
            where = f"{origin[section, key]}: {section}.{key:.50}"
            if key not in hints:
                known = did_you_mean(key, hints)
                raise UserError(f"{where} = {_shown(value)}: unknown key; {known}")
            typed[key] = _typed(value, hints[key], where)
        sections[section] = _SECTIONS[section](**typed)
    return Config(**sections)


def _typed(value, hint, where: str):
    """The value as its key's type, within its key's range."""
    hint, rules = getattr(hint, "__origin__", hint), getattr(hint, "__metadata__", ())
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wrong = None
    if type(value) is int and abs(value) > LARGEST:
        wrong = f"is beyond {LARGEST}"
    elif type(value) is str and any("\ud800" <= c <= "\udfff" for c in value):
        wrong = "is not text; write it in UTF-8"  # how Python passes on other bytes
    elif float in kinds and type(value) is int:
        value = float(value)
    elif kinds[0] is str and type(value) in (int, float, bool):
        value = str(value)
    elif type(value) not in kinds:
        names = " or ".join(k.__name__ for k in kinds if k is not types.NoneType)
        wrong = f"is of type {type(value).__name__}, must be {names}"
    complaints = [wrong] if wrong else [rule(value) for rule in rules]
    for complaint in filter(None, complaints):
        raise UserError(f"{where} = {_shown(value)}: {complaint}")
    return value


def _check(config: Config, origin: dict, path: Path, world_size: int) -> None:
    """Refuse values that are right by themselves and impossible together."""
    from lssar.backends import BACKENDS
    from model import PRESETS

    m, t, e, name = config.model, config.train, config.eval, config.log.name
    backends = ("auto", *BACKENDS)
    places = m.positions or t.length
    nearest = max(1, e.tokens // t.length) * t.length
    has_moments = t.init_from and not m.outputs  # a regression head starts from scratch
    rules = {
        "model.preset": (m.preset in PRESETS, f"unknown; {did_you_mean(m.preset, PRESETS)}"),
        "attention.backend": (
            config.attention.backend in backends,
            f"unknown; {did_you_mean(config.attention.backend, backends)}",
        ),
        "train.length": (t.length <= places, f"is above model.positions = {places}"),
        "train.warmup": (t.warmup <= t.steps, f"is longer than train.steps = {t.steps}"),
        "train.init_optimiser": (
            has_moments or not t.init_optimiser,
            "needs train.init_from, and a model without model.outputs",
        ),
        "eval.tokens": (e.tokens % t.length == 0, f"no multiple of length; nearest: {nearest}"),
        "log.name": (
            Path(name).name == name and name != ".." and name.isprintable(),
            "must be a plain name: no slashes, no control characters",
        ),
    }
    for name, (holds, rule) in rules.items():
        section, key = name.split(".")
        if not holds:
            where, value = origin.get((section, key), path), getattr(getattr(config, section), key)
            raise UserError(f"{where}: {name} = {value!r}: {rule}")
    checks = {
        "attention": config.mechanism,
        "model": config.model_config,
        "train": lambda: config.batch_plan(world_size),
    }
    for section, check in checks.items():
        try:
            check()
        except UserError as error:
            where = dict.fromkeys(o for (s, _), o in origin.items() if s == section)
            raise UserError(f"{', '.join(where) or path}: {error}") from None
