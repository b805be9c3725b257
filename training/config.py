"""Reads run configurations: TOML files, checked into frozen dataclasses.

    config = load_config("configs/gpt2-124m-lssar.toml", ["--train.steps=1000"])

A file may name another as its `base` and list only what differs. An unknown key, a wrong type or
an impossible batch is an error that names the file, the key, the value and what would be right.
"""

import contextlib
import functools
import json
import math
import shlex
import tomllib
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NoReturn

from torch import nn

from data.loader import Batches
from lssar.backends import BACKENDS
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import Mechanism, get_mechanism
from model import GPT
from modelling.config import Layer, ModelConfig, preset
from support.files import read_text
from training.batch_plan import BatchPlan, batch_plan
from training.sections import (
    RULES,
    AttentionSection,
    CheckpointSection,
    DataSection,
    EvalSection,
    LocalSection,
    LogSection,
    ModelSection,
    TrainSection,
)

CONFIGS = Path(__file__).parents[1] / "configs"
LARGEST = 2**40  # no size, count or seed needs more, and arithmetic with them stays quick and exact
# What a resumed run may change: the beginnings of `section.key`.
FREE = ("eval.", "checkpoint.", "log.", "data.directory", "data.prepare", "attention.backend")
FREE += ("train.micro_batch", "train.compile", "train.max_skipped_steps", "train.init_")


@dataclass(frozen=True)
class Config:
    """Describes one run: GPT-2 on text. physics/config.py has one for a model of orbits."""

    model_type = GPT

    model: ModelSection = field(default_factory=ModelSection)
    attention: AttentionSection = field(default_factory=AttentionSection)
    local: LocalSection = field(default_factory=LocalSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def run_directory(self) -> Path:
        return Path(self.log.directory) / self.log.name

    @property
    def micro_batch(self) -> int:
        """Return the sequences per process and forward pass; 1 while it is still "auto"."""
        return 1 if self.train.micro_batch == "auto" else self.train.micro_batch

    def with_micro_batch(self, sequences: int) -> "Config":
        return replace(self, train=replace(self.train, micro_batch=sequences))

    def mechanism(self, **local) -> Mechanism:
        """Return the mechanism of [attention], changed by the settings of [local] if given."""
        settings = {} if "name" in local else _given(self.attention)
        settings.pop("backend", None)
        return get_mechanism(**{"train_length": self.train.length, **settings, **local})

    def model_config(self) -> ModelConfig:
        """Return the checked model of [model], [attention] and [local]."""
        changes = _given(self.model)
        changes["documents"] = self.data.document_mask
        local = _given(self.local)
        if local:
            positions = local.pop("positions", changes.get("positions", "rope"))
            changes["local"] = Layer(self.mechanism(**local), positions)
        return preset(changes.pop("preset"), self.mechanism(), **changes)

    def make_model(self) -> nn.Module:
        """Make the model, with new weights."""
        return self.model_type(self.model_config())

    def make_batches(self, plan: BatchPlan, rank: int = 0, device="cpu") -> Batches:
        """Open the data; refuse data that do not fit this run."""
        return Batches(self, plan, rank, device)

    def fresh_parameters(self) -> tuple[str, ...]:
        """Return the prefixes of the parameters that train.init_from does not provide."""
        return ()

    def data_command(self) -> str:
        """Return the command that makes the data."""
        command = self.data.prepare
        if not command:
            tokeniser = "bytes" if self.model_config().vocab_size == 257 else "gpt2"
            command = f"data/prepare.py text FILES --tokeniser {tokeniser}"
        return f"python {command} --out {shlex.quote(self.data.directory)}"

    def cut_warmup(self) -> tuple["Config", str | None]:
        """Cut a warm-up that is longer than the run to a tenth of it; returns a notice if so."""
        t = self.train
        if t.warmup <= t.steps:
            return self, None
        shorter = replace(t, warmup=t.steps // 10)
        notice = f"train.warmup = {t.warmup} is longer than train.steps = {t.steps}"
        return replace(self, train=shorter), f"{notice}; cut to {shorter.warmup}"

    def to_toml(self) -> str:
        """Return the whole resolved configuration, which reads back as an equal one."""
        lines = []
        for section, values in asdict(self).items():
            given = {k: json.dumps(v, ensure_ascii=False) for k, v in values.items()}
            lines += [f"[{section}]", *(f"{k} = {v}" for k, v in given.items() if v != "null"), ""]
        # JSON's strings, numbers and booleans are TOML's too, except that TOML escapes a DEL.
        return "\n".join(lines).replace("\x7f", "\\u007f")

    def flat(self) -> dict[str, object]:
        """Return the values by `section.key`."""
        return {f"{s}.{k}": v for s, values in asdict(self).items() for k, v in values.items()}

    def differences(self, other: "Config") -> list[str]:
        """List `section.key: mine -> other's` for everything a resumed run may not change."""
        # At a constant rate the steps so far are the same, however many follow.
        free = (*FREE, "train.steps") if self.train.schedule == "constant" else FREE
        mine = self.flat()
        theirs = other.flat()
        changed = [n for n in mine if mine[n] != theirs[n] and not n.startswith(free)]
        return [f"{name}: {mine[name]!r} -> {theirs[name]!r}" for name in changed]


@functools.cache
def _sections(kind: type[Config]) -> dict[str, type]:
    """Return the sections of a kind of config by their names."""
    return typing.get_type_hints(kind)


@functools.cache
def _keys(kind: type[Config]) -> dict[str, tuple]:
    """Return for every `section.key` its types, its rule, and the words that it also takes."""
    return {
        f"{section}.{key}": _parts(hint)
        for section, found in _sections(kind).items()
        for key, hint in typing.get_type_hints(found, include_extras=True).items()
    }


def _parts(hint) -> tuple:
    """Split a union or an annotated type into its parts."""
    if typing.get_origin(hint) is list or not typing.get_args(hint):
        return (hint,)
    return tuple(part for inner in typing.get_args(hint) for part in _parts(inner))


def _given(section) -> dict:
    return {key: value for key, value in asdict(section).items() if value is not None}


def load_config(
    path: str | Path,
    overrides: list[str] = (),
    world_size: int = 1,
    kind: type[Config] = Config,
) -> Config:
    """Read `path` and its bases, apply `--section.key=value` overrides, check everything."""
    config, origin = read_config(path, overrides, kind)
    _check(config, origin, _find(Path(path)), world_size)
    return config


def read_config(
    path: str | Path, overrides: list[str] = (), kind: type[Config] = Config
) -> tuple[Config, dict[str, str]]:
    """Return the config with only names and types checked, and where each key is from."""
    path = _find(Path(path))
    found = _read(path, kind)
    for text in overrides:
        found |= _parse_override(text, kind)
    _, directory_from = found.get("data.directory", ("", ""))
    _, command_from = found.get("data.prepare", ("", ""))
    # An override of data.directory voids the config's data.prepare: that makes another folder.
    if directory_from != command_from:
        found["data.prepare"] = ("", directory_from)
    config = _build(found, kind)
    if not config.log.name:
        config = replace(config, log=replace(config.log, name=path.stem))
    return config, {name: where for name, (_, where) in found.items()}


def parse_config(text: str, where: str, kind: type[Config] = Config) -> Config:
    """Read the text that `to_toml` wrote; `where` names it in errors."""
    try:
        values = tomllib.loads(text)
    except (*_NOT_TOML, TypeError, AttributeError) as error:
        raise UserError(f"{where}: cannot be read as TOML: {error}") from None
    return _build(_flatten(values, where, kind), kind)


def _find(path: Path) -> Path:
    """Return the file itself, or the one in configs/ with that name, with or without .toml."""
    named = path if path.suffix == ".toml" else Path(f"{path}.toml")
    with contextlib.suppress(OSError):  # a name that no file can have; reading it says so
        for place in (path, named, CONFIGS / named, CONFIGS.parent / named):
            if place.exists() and not place.is_dir():
                return place
    return path


# Errors of tomllib, of the text's encoding and of numbers with thousands of digits are ValueErrors;
# circular links and deep nesting raise RuntimeErrors.
_NOT_TOML = (ValueError, RuntimeError)

Found = dict[str, tuple[object, str]]  # `section.key`: a value, and the file it is from


def _read(path: Path, kind: type[Config], seen: tuple[Path, ...] = ()) -> Found:
    """Read a file's values, on top of its bases' values."""
    try:
        resolved = path.resolve()
        values = tomllib.loads(read_text(path, limit=2**16))  # ours have a thousand characters
    except FileNotFoundError:
        beside = () if path.parent == Path() else path.parent.glob("*.toml")
        known = {p.name for p in beside} or {p.name for p in CONFIGS.glob("*.toml")}
        raise UserError(f"no config file {path}; {did_you_mean(path.name, known)}") from None
    except (OSError, *_NOT_TOML) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as TOML: {reason}") from None
    if resolved in seen:
        raise UserError(f"{path}: its base leads back to itself; remove one `base` key")
    base = values.pop("base", None)
    if not isinstance(base, str | None):
        raise UserError(f"{path}: base = {_shown(base)} must be the path of another .toml file")
    inherited = {} if base is None else _read(path.parent / base, kind, (*seen, resolved))
    return inherited | _flatten(values, str(path), kind)


def _flatten(values: dict, where: str, kind: type[Config]) -> Found:
    """Return the values of sections by `section.key`, each with where it is from."""
    sections = _sections(kind)
    found = {}
    for section, content in values.items():
        if not isinstance(content, dict):
            raise UserError(
                f"{where}: {section} = {_shown(content)} is outside any section; "
                f"put it under one of [{'], ['.join(sections)}]"
            )
        if section not in sections:
            guess = did_you_mean(section, sections)
            raise UserError(f"{where}: unknown section [{section:.50}]; {guess}")
        found |= {f"{section}.{key}": (value, where) for key, value in content.items()}
    return found


def _shown(value) -> str:
    """Show a value in a message, however long or deeply nested."""
    try:
        text = repr(value)
    except _NOT_TOML:
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse_override(text: str, kind: type[Config]) -> Found:
    name, equals, value = text.partition("=")
    section, dot, key = name.removeprefix("--").partition(".")
    if not (text.startswith("--") and equals and dot and section and key):
        raise UserError(f"cannot read the argument {text!r}; overrides are --section.key=value")
    parsed = value  # a bare word is a string
    with contextlib.suppress(*_NOT_TOML):
        (parsed,) = tomllib.loads(f"v = {value}").values()
    # A run may be called 2024-01-31 or 1e3: a string is taken as typed, or without its quotes.
    types = _keys(kind).get(f"{section}.{key}", ())
    if str in types and type(parsed) not in types:
        parsed = value
    return _flatten({section: {key: parsed}}, "command line", kind)


def _build(found: Found, kind: type[Config]) -> Config:
    """Make a config of values by `section.key`, without checking whether they go together."""
    sections = _sections(kind)
    values = {section: {} for section in sections}
    for name, (value, where) in found.items():
        section, _, key = name.partition(".")
        where = f"{where}: {name:.60} = {_shown(value)}"
        if name not in _keys(kind):
            known = [field.name for field in fields(sections[section])]
            raise UserError(f"{where}: unknown key; {did_you_mean(key, known)}")
        values[section][key] = _typed(value, _keys(kind)[name], where)
    return kind(**{section: sections[section](**given) for section, given in values.items()})


def _typed(value, kinds: tuple, where: str):
    """Return the value with the type of its key, or raise."""
    words = [kind for kind in kinds if isinstance(kind, str) and kind not in RULES]
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    found = list[str] if strings else type(value)
    if value in words:
        return value
    if len(words) == len(kinds):
        guess = did_you_mean(_shown(value).strip("'"), words)
        raise UserError(f"{where}: unknown; {guess}")
    if found is int and abs(value) > LARGEST:
        raise UserError(f"{where}: is beyond {LARGEST}")
    if found is float and math.isinf(value):
        raise UserError(f"{where}: is too large for a number; write a finite one")
    if found is float and math.isnan(value):
        raise UserError(f"{where}: is not a number; write a finite one")
    if found is str and any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(f"{where}: is not text; write it in UTF-8")
    if found is int and float in kinds:
        value = float(value)
    elif found in (int, float, bool) and found not in kinds and str in kinds:
        value = str(value)
    elif found not in kinds:
        wanted = kinds[0].__name__ if isinstance(kinds[0], type) else kinds[0]
        wanted = " or ".join([str(wanted), *map(repr, words)])
        raise UserError(f"{where}: is of type {found.__name__}, must be {wanted}")
    for rule in RULES.keys() & kinds:
        if not RULES[rule](value):
            raise UserError(f"{where}: {rule}")
    return value


def _check(config: Config, origin: dict[str, str], path: Path, world_size: int) -> None:
    """Refuse values that have the right type but are impossible."""

    def refuse(name: str, rule: str) -> NoReturn:
        where = _places([name], origin, path)
        raise UserError(f"{where}: {name} = {config.flat()[name]!r}: {rule}")

    t = config.train
    backend = config.attention.backend
    if backend not in ("auto", *BACKENDS):
        refuse("attention.backend", f"unknown; {did_you_mean(backend, ('auto', *BACKENDS))}")
    least = t.least_micro_batch
    if t.long_length and (t.micro_batch == "auto" or t.micro_batch % least):
        refuse("train.micro_batch", f"must be a multiple of {least} for long_length")
    if t.init_optimiser and not t.init_from:
        refuse("train.init_optimiser", "needs train.init_from")
    if t.init_optimiser and config.fresh_parameters():
        # Its new parameters have no moments in the other run.
        refuse("train.init_optimiser", "needs a model with the parameters of train.init_from")
    if config.eval.tokens % t.length:
        nearest = max(1, config.eval.tokens // t.length) * t.length
        refuse("eval.tokens", f"not a multiple of length; nearest: {nearest}")
    run = config.log.name
    if Path(run).name != run or run == ".." or not run.isprintable():
        refuse("log.name", "must be a plain name: no slashes, no control characters")
    checks = {
        "attention": config.mechanism,
        "model": config.model_config,
        "train": functools.partial(batch_plan, config, world_size),
    }
    for section, check in checks.items():
        try:
            check()
        except UserError as error:
            names = [name for name in origin if name.startswith(f"{section}.")]
            raise UserError(f"{_places(names, origin, path)}: {error}") from None


def _places(names: list[str], origin: dict[str, str], path: Path) -> str:
    """Name the config that was run, and the files or the command line that set these keys."""
    files = dict.fromkeys(origin[name] for name in names if name in origin)
    others = [file for file in files if file != str(path)]
    return f"{path} ({', '.join(others)})" if others else str(path)
