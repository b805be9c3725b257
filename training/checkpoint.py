"""Writes and reads checkpoints that no kill can corrupt, and that are safe to share.

    runs/NAME/checkpoints/step-00001000/model.safetensors   weights
                                        model.json          model config, step, tokeniser, losses
                                        trainer.pt          optimiser and RNG of every rank
    runs/NAME/checkpoints/latest, best                      the name of one of the above

A checkpoint is written under a temporary name, fsync'd, and renamed; only then do `best` and
`latest` point to it. The trainer's state is read with weights_only, so reading a checkpoint cannot
run code. model.json has the sha256 of every file: damaged files are refused, and so are non-finite
weights.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from lssar.errors import UserError
from model import GPT
from modelling.config import WEIGHTS_VERSION, ModelConfig
from support import files
from training.config import Config, parse_config
from training.optimiser import Optimiser

WEIGHTS, DESCRIPTION, TRAINER = "model.safetensors", "model.json", "trainer.pt"


@dataclass
class Progress:
    """Says how far a run is; saved with every checkpoint."""

    step: int = 0  # optimiser steps done
    skipped: int = 0  # non-finite steps in a row
    val_loss: float | None = None  # if the model was validated at this step
    best: float = math.inf  # lowest val_loss of a saved checkpoint


@dataclass(frozen=True)
class CheckpointInfo:
    """Describes a checkpoint in model.json, beside the model's config."""

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


def save_model(directory: Path, model: nn.Module, info: CheckpointInfo) -> None:
    """Write the weights, and a description with the sha256 of every file in the directory."""
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS)
    there = [file for file in sorted(directory.iterdir()) if file.suffix != ".json"]
    description = {
        "meaning": WEIGHTS_VERSION,
        "model": model.config.to_dict(),
        "info": asdict(info),
        "files": {file.name: files.sha256_of(file) for file in there},
    }
    text = json.dumps(description, indent=1) + "\n"
    (directory / DESCRIPTION).write_text(text, encoding="utf-8")
    # safetensors writes a file that its owner alone can read.
    shutil.copymode(directory / DESCRIPTION, directory / WEIGHTS)


def load_model(
    path: str | Path, model_type: type[nn.Module] = GPT, device="cpu"
) -> tuple[nn.Module, CheckpointInfo]:
    """Load the model of a run directory (its latest checkpoint) or of one checkpoint directory."""
    file = find(path) / WEIGHTS
    config, info = read_description(file.parent, model_type)
    refuse_changed(file)
    try:
        weights = load_file(file)
        with torch.device("meta"):
            model = model_type(config)
        model.load_state_dict(weights, assign=True)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{file} and {DESCRIPTION} do not belong together: {reason:.300}") from None
    for name, weight in weights.items():
        if not (weight.is_floating_point() and weight.float().isfinite().all()):
            raise UserError(
                f"{file}: {name} has weights that are not finite; use another checkpoint"
            )
    return model.to(device), info


def find(path: str | Path) -> Path:
    """Return the checkpoint directory that `path` means: itself, or a run's latest complete one."""
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


@contextlib.contextmanager
def _description(directory: Path) -> Iterator[dict]:
    """Yield the contents of model.json. If a check in the block fails, the file is damaged."""
    file = directory / DESCRIPTION
    try:
        found = json.loads(files.read_text(file))
        files.refuse_wrong_types(found, {})
        version = found.get("meaning")
        if version != WEIGHTS_VERSION:
            raise UserError(
                f"the weights are of version {version!r:.20}, this code computes "
                f"{WEIGHTS_VERSION}; use the revision that made them, or train again"
            )
        yield found
    except FileNotFoundError:
        raise UserError(f"{directory} is incomplete: {DESCRIPTION} is missing") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None


def read_info(directory: Path) -> CheckpointInfo:
    """Read the run and the step of a checkpoint, whatever the type of its model."""
    with _description(directory) as found:
        return CheckpointInfo(**found["info"])


def read_description(
    directory: Path, model_type: type[nn.Module] = GPT
) -> tuple[ModelConfig, CheckpointInfo]:
    """Read model.json, which must describe a model of this type."""
    with _description(directory) as found:
        return model_type.config_type.from_dict(found["model"]), CheckpointInfo(**found["info"])


def refuse_changed(file: Path) -> None:
    """Refuse a file of a checkpoint whose sha256 is not the one in model.json."""
    with _description(file.parent) as found:
        recorded = dict(found.get("files", {}))
    if file.name in recorded and files.sha256_of(file) != recorded[file.name]:
        raise UserError(f"{file} is damaged (sha256 unlike {DESCRIPTION}); use another checkpoint")


class Store:
    """Keeps the checkpoints of one run."""

    def __init__(self, run_directory: str | Path):
        self.directory = Path(run_directory) / "checkpoints"

    def candidates(self) -> list[Path]:
        """List complete checkpoints: the one that `latest` names, then the others, newest first."""
        found = sorted(self.directory.glob("step-*[0-9]"), reverse=True)
        latest = self._pointer("latest")
        return sorted((p for p in found if (p / WEIGHTS).is_file()), key=lambda p: p != latest)

    def best(self) -> Path | None:
        """Return the checkpoint with the lowest validation loss."""
        return self._pointer("best")

    def _pointer(self, name: str) -> Path | None:
        try:
            target = files.read_text(self.directory / name, limit=1000).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.directory / Path(target).name if target else None

    def save(self, model: nn.Module, info: CheckpointInfo, trainer: dict, *, keep: int, best: bool):
        """Write one checkpoint, point `latest` (and `best`) at it, remove old ones."""
        final = self.directory / f"step-{info.step:08d}"
        try:
            self._write(final, model, info, trainer)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch.save hides the OSError of a full disk behind a RuntimeError.
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            if isinstance(reason, RuntimeError):
                raise
            raise UserError(
                f"cannot write checkpoint {final}: {getattr(reason, 'strerror', '') or reason}; "
                "free the disk or choose another --log.directory; "
                "earlier checkpoints are intact"
            ) from None
        with files.writing(self.directory):
            self.point_at(final, best=best)
            self.rotate(keep)
        return final

    def _write(self, final: Path, model: nn.Module, info: CheckpointInfo, trainer: dict) -> None:
        """Make the checkpoint under a temporary name, then rename it."""
        temporary = self.directory / f".{final.name}.tmp"
        self.directory.mkdir(parents=True, exist_ok=True)
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
            files.sync(self.directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def point_at(self, checkpoint: Path, *, best: bool) -> None:
        """Point `best`, if this one is the best, and then `latest` to the checkpoint.

        In this order, a kill between the two leaves `best` at a whole checkpoint. The resumed run
        starts from the older `latest`, and comes to the same checkpoint again.
        """
        if best:
            files.write_text(self.directory / "best", checkpoint.name + "\n")
        files.write_text(self.directory / "latest", checkpoint.name + "\n")

    def repair(self, checkpoint: Path, progress: Progress, keep: int) -> None:
        """Finish the steps after this checkpoint that a kill interrupted: `best`, the rotation."""
        if checkpoint != max(self.candidates()):
            return  # newer ones were not finished, or are damaged
        with files.writing(self.directory):
            if progress.val_loss is not None and progress.val_loss == progress.best:
                self.point_at(checkpoint, best=True)
            self.rotate(keep)

    def rotate(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep` and the best."""
        best = self.best()
        for old in self.candidates()[keep:]:
            if old != best:
                self._remove(old)

    def _remove(self, checkpoint: Path) -> None:
        """Remove under a temporary name: a kill must not leave half a checkpoint."""
        doomed = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a run that was killed while writing."""
        for leftover in self.directory.glob(".*.tmp"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def read_trainer(directory: Path) -> dict:
    """Read and check the trainer's state; reading cannot run code."""
    file = directory / TRAINER
    refuse_changed(file)
    try:
        with files.open_regular(file) as opened:
            state = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{file} is missing or damaged ({files.first_line(error)})") from None
    try:
        _check_trainer(state)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{file} holds the wrong things ({files.first_line(error)})") from None
    return state


def _check_trainer(state: dict) -> None:
    """Raise KeyError, TypeError or ValueError for a state that no run saved."""
    kinds = {"config": str, "progress": dict, "rng": list, "data": dict, "machine": dict}
    files.refuse_wrong_types(state, kinds | {"optimiser": dict})
    progress = Progress(**state["progress"])
    number = int | float
    files.refuse_wrong_types(vars(progress), {"step": int, "skipped": int, "best": number})
    if progress.val_loss is not None:
        files.refuse_wrong_types(vars(progress), {"val_loss": number})
    if progress.step < 0 or progress.skipped < 0:
        raise ValueError(f"step {progress.step}, skipped {progress.skipped}")
    for states in state["rng"]:
        files.refuse_wrong_types(states, {"cpu": torch.Tensor})
        torch.Generator().set_state(states["cpu"])
    files.refuse_wrong_types(state["machine"], dict.fromkeys(state["machine"], str | int))
    files.refuse_wrong_types(state["data"], {"files": dict, "manifest": str | None})
    for file in state["data"]["files"].values():
        files.refuse_wrong_types(file, {"bytes": int, "mtime_ns": int, "content": str})
    moments = state["optimiser"]["state"]
    files.refuse_wrong_types(state["optimiser"], {"state": dict, "param_groups": list})
    for number, moment in moments.items():
        if type(number) is not int:
            raise TypeError(f"optimiser state of parameter {number!r:.50}")
        files.refuse_wrong_types(moment, dict.fromkeys(moment, torch.Tensor))


def load_weights(model: nn.Module, path: str, fresh: tuple[str, ...] = ()) -> None:
    """Load the weights of another run or checkpoint, but none whose names begin with `fresh`."""
    theirs = load_model(path, type(model))[0].state_dict()
    theirs |= {name: t for name, t in model.state_dict().items() if name.startswith(fresh)}
    try:
        model.load_state_dict(theirs)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(
            f"train.init_from = {path!r} has another architecture ({reason:.300}); "
            "give both the same [model] and a mechanism with the same parameters"
        ) from None


def are_moments_of(moments: dict, optimiser: torch.optim.Optimizer) -> bool:
    """Tell whether a saved state has the optimiser's moments of each of its parameters."""
    expected = {}
    for group in optimiser.param_groups:
        names = ("exp_avg",) if "momentum" in group else ("exp_avg", "exp_avg_sq")
        for p in group["params"]:
            expected[len(expected)] = {"step": torch.Size()} | dict.fromkeys(names, p.shape)
    found = {i: {name: part.shape for name, part in m.items()} for i, m in moments.items()}
    return found == expected


def load_moments(optimiser: torch.optim.Optimizer, path: str) -> None:
    """Load the moments of another run or checkpoint; rates and decay stay the new ones."""
    moments = read_trainer(find(path))["optimiser"]["state"]
    if not are_moments_of(moments, optimiser):
        raise UserError(
            f"train.init_optimiser: the state of {path} is not that of this model's parameters "
            "and optimiser; leave it out to take the weights alone"
        )
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})


def refuse_existing(config: Config, store: Store) -> None:
    """Refuse to start a new run in a directory that holds checkpoints."""
    if saved := store.candidates():
        raise UserError(
            f"{config.run_directory} already holds {saved[0].name}; "
            "continue it with --resume, or start another with --log.name=NAME"
        )


def load_latest(config: Config, store: Store) -> tuple | None:
    """Return (model, progress, trainer's state) of the latest checkpoint that can be read.

    None if the run has not saved anything.
    """
    candidates = store.candidates()
    for path in candidates:
        try:
            model, _ = load_model(path, config.model_type)
            state = read_trainer(path)
            saved = parse_config(state["config"], str(path), type(config))
            if not are_moments_of(state["optimiser"]["state"], Optimiser(model, saved.train)):
                raise UserError(f"{path / TRAINER} holds the moments of another model")
        except UserError as error:
            print(f"warning: passing over {path}: {error}", file=sys.stderr)
            continue
        progress = Progress(**state["progress"])
        _refuse_changes(saved, config, progress, path)
        return model, progress, state | {"config": saved, "path": path}
    if candidates:
        raise UserError(f"no checkpoint of {config.run_directory} can be read, see the warnings")
    return None


def _refuse_changes(saved: Config, config: Config, progress: Progress, path: Path) -> None:
    """Refuse a config that contradicts the checkpoint it is to continue."""
    if changed := saved.differences(config):
        hint = "undo the change or choose another --log.name"
        if saved.train.steps != config.train.steps and saved.train.schedule != "constant":
            start = f"--train.init_from={config.run_directory} --train.init_optimiser=true"
            hint += f" (for a cosine over other steps, start a new run with {start})"
        listed = "; ".join([*changed, hint])
        raise UserError(f"--resume contradicts {path} (saved -> now): {listed}")
    if config.train.steps < progress.step:
        raise UserError(
            f"train.steps = {config.train.steps}, but {path} has done {progress.step}; "
            "give at least that"
        )
