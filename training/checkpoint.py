"""Checkpoints that a kill at any instant cannot corrupt, and that are safe to share.

    runs/NAME/checkpoints/step-00001000/model.safetensors   weights
                                        model.json          model config, step, tokeniser, losses
                                        trainer.pt          optimiser and RNG of every rank
    runs/NAME/checkpoints/latest, best                      the name of one of the above

A checkpoint is written under a temporary name, fsync'd, and renamed; only then does `latest` point
to it. The trainer's state is read with weights_only, so reading a checkpoint cannot run code.
model.json has the sha256 of every file: damaged files are refused, and so are non-finite weights.
"""

import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lssar.errors import UserError
from model import GPT, MEANING, ModelConfig
from support import files
from training.config import Config, parse_config

WEIGHTS, DESCRIPTION, TRAINER = "model.safetensors", "model.json", "trainer.pt"


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint."""

    step: int = 0  # optimiser steps done
    skipped: int = 0  # non-finite steps in a row
    val_loss: float | None = None  # if the model was validated at this step
    best: float = math.inf  # lowest val_loss of a saved checkpoint


@dataclass(frozen=True)
class CheckpointInfo:
    """What model.json says besides the model's config."""

    run: str
    step: int
    train_length: int
    tokeniser: str | None = None
    val_loss: float | int | None = None
    seed: int | None = None

    def __post_init__(self):
        files.refuse_wrong_types(vars(self), {field.name: field.type for field in fields(self)})
        if self.step < 0 or self.train_length < 1:
            raise UserError(f"impossible: step {self.step}, train_length {self.train_length}")


def save_model(directory: Path, model: GPT, info: CheckpointInfo) -> None:
    """Write the weights, and a description with the sha256 of every file in the directory."""
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS)
    there = [file for file in sorted(directory.iterdir()) if file.suffix != ".json"]
    description = {"meaning": MEANING, "model": model.config.to_dict(), "info": asdict(info)}
    description["files"] = {file.name: files.sha256_of(file) for file in there}
    text = json.dumps(files.seal(description), indent=1) + "\n"
    (directory / DESCRIPTION).write_text(text, encoding="utf-8")
    # safetensors writes a file that its owner alone can read.
    shutil.copymode(directory / DESCRIPTION, directory / WEIGHTS)


def load_model(path: str | Path, device="cpu") -> tuple[GPT, CheckpointInfo]:
    """The model of a run directory (its latest checkpoint) or of one checkpoint directory."""
    file = find(path) / WEIGHTS
    config, info = read_description(file.parent, WEIGHTS)
    try:
        weights = load_file(file)
        with torch.device("meta"):
            model = GPT(config)
        model.load_state_dict(weights, assign=True)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{file} and {DESCRIPTION} do not belong together: {reason:.300}") from None
    for name, weight in weights.items():
        if not (weight.is_floating_point() and weight.float().isfinite().all()):
            found = f"{name} has weights that are not finite"
            raise UserError(f"{file}: {found}; use another checkpoint")
    return model.to(device), info


def find(path: str | Path) -> Path:
    """The checkpoint directory that `path` means: itself, or a run's latest complete one."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return path
    if candidates := Store(path).candidates():
        return candidates[0]
    if (path / "checkpoints").is_dir():
        raise UserError(f"{path} is a run without a complete checkpoint; train it further")
    if not path.exists():
        raise UserError(f"no checkpoint at {path}: no such file or directory")
    raise UserError(f"{path} is not a checkpoint: give a run directory or one that holds {WEIGHTS}")


def read_description(directory: Path, intact: str = "") -> tuple[ModelConfig, CheckpointInfo]:
    """What model.json says; refuses if the file `intact` is not the one that it describes."""
    file = directory / DESCRIPTION
    try:
        description = files.unseal(json.loads(files.read_text(file)))
        if (found := description.get("meaning")) != MEANING:
            other = f"the weights have meaning {found!r:.20}, this code computes {MEANING}"
            raise UserError(f"{other}; use the revision that made them, or train again")
        info = CheckpointInfo(**description["info"])
        recorded = dict(description.get("files", {}))
        config = ModelConfig.from_dict(description["model"])
    except FileNotFoundError:
        raise UserError(f"{directory} is incomplete: {DESCRIPTION} is missing") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None
    if intact in recorded and files.sha256_of(directory / intact) != recorded[intact]:
        damaged = f"{directory / intact} is damaged (sha256 unlike {DESCRIPTION})"
        raise UserError(f"{damaged}; use another checkpoint")
    return config, info


class Store:
    """The checkpoints of one run."""

    def __init__(self, run_directory: str | Path):
        self.directory = Path(run_directory) / "checkpoints"

    def candidates(self) -> list[Path]:
        """Complete checkpoints: the one that `latest` names, then the others, newest first."""
        found = sorted(self.directory.glob("step-*[0-9]"), reverse=True)
        latest = self._pointer("latest")
        return sorted((p for p in found if (p / WEIGHTS).is_file()), key=lambda p: p != latest)

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss."""
        return self._pointer("best")

    def _pointer(self, name: str) -> Path | None:
        try:
            target = files.read_text(self.directory / name, limit=1000).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.directory / Path(target).name if target else None

    def save(self, model: GPT, info: CheckpointInfo, trainer: dict, *, keep: int, best: bool):
        """Write one checkpoint, point `latest` (and `best`) at it, remove old ones."""
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self.directory / f"step-{info.step:08d}"
        temporary = self.directory / f".{final.name}.tmp"
        self.remove_leftovers()
        try:
            temporary.mkdir()
            with (temporary / TRAINER).open("wb") as file:
                torch.save(trainer, file)
            save_model(temporary, model, info)
            for path in (*temporary.iterdir(), temporary):
                files.sync(path)
            if final.exists():
                self._remove(final)  # damaged: resuming has skipped it
            temporary.rename(final)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # torch.save hides the OSError of a full disk behind a RuntimeError.
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            if isinstance(reason, RuntimeError):
                raise
            failed = f"cannot write checkpoint {final}: {getattr(reason, 'strerror', '') or reason}"
            remedy = "free the disk or choose another --log.directory"
            raise UserError(f"{failed}; {remedy}; the previous checkpoint is intact") from None
        files.sync(self.directory)
        files.write_text(self.directory / "latest", final.name + "\n")
        if best:
            files.write_text(self.directory / "best", final.name + "\n")
        for old in self.candidates()[keep:]:
            if old != self._pointer("best"):
                self._remove(old)
        return final

    def _remove(self, checkpoint: Path) -> None:
        """Under a temporary name: a kill in the middle must not leave half a checkpoint."""
        doomed = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Temporary files of a run that was killed while writing."""
        for leftover in self.directory.glob(".*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def read_trainer(directory: Path) -> dict:
    """Optimiser, step and RNG states; reading cannot run code."""
    file = directory / TRAINER
    read_description(directory, TRAINER)
    try:
        with files.open_regular(file) as opened:
            return torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{file} is missing or damaged ({files.first_line(error)})") from None


def take_weights(model: GPT, path: str) -> None:
    """Start from the weights of another run or checkpoint."""
    theirs = load_model(path)[0].state_dict()
    if model.config.outputs:  # a regression head starts from scratch
        theirs |= {k: t for k, t in model.state_dict().items() if k.startswith("head.")}
    try:
        model.load_state_dict(theirs)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        other = f"train.init_from = {path!r} has another architecture ({reason:.300})"
        rule = "give both the same [model] and a mechanism with the same parameters"
        raise UserError(f"{other}; {rule}") from None


def take_optimiser(optimiser: torch.optim.Optimizer, path: str) -> None:
    """Start from the moments of another run or checkpoint, with the new rates and decay."""
    moments = read_trainer(find(path))["optimiser"]["state"]
    shapes = [moments[i]["exp_avg"].shape for i in sorted(moments)]
    if shapes != [p.shape for group in optimiser.param_groups for p in group["params"]]:
        other = f"the state of {path} is not that of this model's parameters and optimiser"
        raise UserError(f"train.init_optimiser: {other}; leave it out to take the weights alone")
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})


def initial_state(config: Config, store: Store, resume: bool) -> tuple:
    """(model, progress, trainer's state or None): a new model, perhaps with another run's weights,
    or the latest checkpoint that can be read."""
    candidates = store.candidates()
    if candidates and not resume:
        has = f"{config.run_directory} already holds {candidates[0].name}"
        raise UserError(f"{has}; rerun with --resume, or choose another --log.name")
    for path in candidates:
        try:
            model, _ = load_model(path)
            state = read_trainer(path)
            state["config"] = saved = parse_config(state["config"], str(path))
            progress = Progress(**state["progress"])
            if missing := {"data", "machine"} - state.keys():
                raise UserError(f"{TRAINER} lacks {', '.join(sorted(missing))}")
        except (UserError, KeyError, TypeError) as error:
            print(f"warning: passing over {path}: {error}", file=sys.stderr)
            continue
        if changed := saved.differences(config):
            hint = "undo the change or choose another --log.name"
            if saved.train.steps != config.train.steps and saved.train.schedule != "constant":
                start = f"--train.init_from={config.run_directory} --train.init_optimiser=true"
                hint += f" (for a cosine over other steps, start a new run with {start})"
            why = "; ".join([*changed, hint])
            raise UserError(f"--resume contradicts {path} (saved -> now): {why}")
        if config.train.steps < progress.step:
            given = f"train.steps = {config.train.steps}"
            raise UserError(f"{given}, but {path} has done {progress.step}; give at least that")
        return model, progress, state
    if candidates:
        raise UserError(f"no checkpoint of {config.run_directory} can be read, see the warnings")
    model = GPT(config.model_config())
    if config.train.init_from:
        take_weights(model, config.train.init_from)
    return model, Progress(), None
