"""Checkpoints that a kill at any instant cannot spoil, and that are safe to share.

    runs/NAME/checkpoints/step-00001000/model.safetensors   weights
                                        model.json          model config, step, tokeniser, losses
                                        trainer.pt          optimiser and RNG of every rank
    runs/NAME/checkpoints/latest, best                      the name of one of the above

A checkpoint is written under a temporary name, fsync'd, and renamed; only then does `latest` point
to it. Weights are safetensors and JSON; the trainer's state is read with weights_only, so nothing
here can run code. model.json has the sha256 of the other files and of itself: damage is noticed
before anything is computed with it. So are weights that are not finite.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lssar.errors import UserError
from model import GPT, MEANING, ModelConfig
from support.files import open_regular, read_text, seal, sha256_of, sync, unseal, write_text

WEIGHTS, DESCRIPTION, TRAINER = "model.safetensors", "model.json", "trainer.pt"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself, besides the model's config."""

    run: str
    step: int
    train_length: int
    tokeniser: str | None = None
    val_loss: float | None = None
    seed: int | None = None

    def __post_init__(self):
        seed = 0 if self.seed is None else self.seed
        whole = all(type(n) is int for n in (self.step, self.train_length, seed))
        text = isinstance(self.run, str) and isinstance(self.tokeniser, str | None)
        if not (whole and text and isinstance(self.val_loss, float | int | None)):
            raise UserError(f"a field is of a wrong type: {asdict(self)}")
        if self.step < 0 or self.train_length < 1:
            raise UserError(f"impossible: step {self.step}, train_length {self.train_length}")


# --- models: what evaluation and users need ------------------------------------------------------


def save_model(directory: Path, model: GPT, info: CheckpointInfo) -> None:
    """Write weights and description, which vouches for every file there, into a directory."""
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(weights, directory / WEIGHTS)
    description = {
        "meaning": MEANING,
        "model": model.config.to_dict(),
        "info": asdict(info),
        "files": {f.name: sha256_of(f) for f in sorted(directory.iterdir()) if f.suffix != ".json"},
    }
    text = json.dumps(seal(description), indent=1) + "\n"
    (directory / DESCRIPTION).write_text(text, encoding="utf-8")


def load_model(path: str | Path, device="cpu") -> tuple[GPT, CheckpointInfo]:
    """The model of a run directory (its latest checkpoint) or of one checkpoint directory."""
    directory = find(path)
    config, info, recorded = _description(directory)
    _refuse_damage(directory / WEIGHTS, recorded)
    weights = _read_weights(directory / WEIGHTS)
    largest = max((t.numel() for t in weights.values()), default=0)
    sizes = (config.width, config.vocab_rows, config.channels, config.positions, config.outputs)
    if config.layers > len(weights) or max(sizes) > largest:  # before such a model is made
        raise UserError(
            f"{directory / WEIGHTS} is too small for the model in {DESCRIPTION}; the two files do "
            "not belong together"
        )
    with torch.device("meta"):
        model = GPT(config)
    expected = {name: t.shape for name, t in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        have, want = weights.get(name), expected.get(name)
        if have is None or want is None or have.shape != want or not have.is_floating_point():
            raise UserError(
                f"{directory / WEIGHTS}: {name} is {_shape(have)}, the model in {DESCRIPTION} has "
                f"{_shape(want)}; the two files do not belong together"
            )
        if not have.float().isfinite().all():
            raise UserError(
                f"{directory / WEIGHTS}: {name} has weights that are not finite (NaN or infinity); "
                "use another checkpoint"
            )
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.to(device), info


def _shape(tensor_or_shape) -> str:
    if tensor_or_shape is None:
        return "absent"
    kind = f" of {tensor_or_shape.dtype}" if isinstance(tensor_or_shape, torch.Tensor) else ""
    return f"{tuple(getattr(tensor_or_shape, 'shape', tensor_or_shape))}{kind}"


def find(path: str | Path) -> Path:
    """The checkpoint directory that `path` means: itself, or a run's latest complete one."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return path
    if (path / "checkpoints").is_dir():
        candidates = Store(path).candidates()
        if candidates:
            return candidates[0]
        raise UserError(f"{path} is a run without a complete checkpoint; train it further")
    if not path.exists():
        raise UserError(f"no checkpoint at {path}: no such file or directory")
    raise UserError(f"{path} is not a checkpoint: give a run directory or one that holds {WEIGHTS}")


def read_description(directory: Path) -> tuple[ModelConfig, CheckpointInfo]:
    return _description(directory)[:2]


def _description(directory: Path) -> tuple[ModelConfig, CheckpointInfo, dict[str, str]]:
    """The model's config, what the checkpoint says of itself, and its files' sha256."""
    file = directory / DESCRIPTION
    try:
        description = unseal(json.loads(read_text(file)))
        if (found := description.get("meaning")) != MEANING:
            raise UserError(
                f"its weights have meaning {found!r:.20}, this code computes {MEANING} "
                "(model.MEANING): use the revision that made it, or train again"
            )
        info = CheckpointInfo(**description["info"])
        recorded = dict(description.get("files", {}))
        return ModelConfig.from_dict(description["model"]), info, recorded
    except FileNotFoundError:
        raise UserError(
            f"{directory} is not a whole checkpoint: {DESCRIPTION} is missing"
        ) from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None


def _refuse_damage(file: Path, recorded: dict[str, str]) -> None:
    if file.name in recorded and sha256_of(file) != recorded[file.name]:
        raise UserError(
            f"{file} is damaged: its sha256 is not the one in {DESCRIPTION}; use another checkpoint"
        )


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None


# --- runs: what training needs -------------------------------------------------------------------


class Store:
    """The checkpoints of one run."""

    def __init__(self, run_directory: str | Path):
        self.directory = Path(run_directory) / "checkpoints"

    def candidates(self) -> list[Path]:
        """Complete checkpoints, the one `latest` names first, then from the newest back."""
        found = sorted(self.directory.glob("step-*[0-9]"), reverse=True)
        latest = self._pointer("latest")
        return sorted((p for p in found if (p / WEIGHTS).is_file()), key=lambda p: p != latest)

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss."""
        return self._pointer("best")

    def _pointer(self, name: str) -> Path | None:
        try:
            target = read_text(self.directory / name, limit=1000).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.directory / Path(target).name if target else None

    def save(self, model: GPT, info: CheckpointInfo, trainer: dict, *, keep: int, best: bool):
        """Write one checkpoint whole, point `latest` (and `best`) at it, drop the old ones."""
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self.directory / f"step-{info.step:08d}"
        temporary = self.directory / f".{final.name}.tmp"
        self.remove_leftovers()
        try:
            temporary.mkdir()
            _write_trainer(temporary / TRAINER, trainer)
            save_model(temporary, model, info)
            for file in temporary.iterdir():
                sync(file)
            sync(temporary)
            if final.exists():
                self._remove(final)  # of the same step, which resume passed over
            temporary.rename(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"cannot write checkpoint {final}: {getattr(error, 'strerror', None) or error}; "
                "free the disk or choose another --log.directory; the previous checkpoint is intact"
            ) from None
        sync(self.directory)
        write_text(self.directory / "latest", final.name + "\n")
        if best:
            write_text(self.directory / "best", final.name + "\n")
        for old in self.candidates()[keep:]:
            if old != self._pointer("best"):
                self._remove(old)
        return final

    def _remove(self, checkpoint: Path) -> None:
        """Under a temporary name first: a kill in the middle must not leave half a checkpoint."""
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


def _write_trainer(file: Path, trainer: dict) -> None:
    try:
        with file.open("wb") as opened:
            torch.save(trainer, opened)
    except RuntimeError as error:  # torch's own words for a full disk hide the reason
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def read_trainer(directory: Path) -> dict:
    """Optimiser, step and RNG states; reading cannot run code."""
    _refuse_damage(directory / TRAINER, _description(directory)[2])
    try:
        with open_regular(directory / TRAINER) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{directory / TRAINER} is missing or damaged ({first})") from None


# --- new runs that start from another ------------------------------------------------------------


def take_weights(model: GPT, path: str) -> None:
    """Those of another run or checkpoint."""
    mine, theirs = model.state_dict(), load_model(path)[0].state_dict()
    if model.config.outputs:  # a regression head begins anew
        theirs |= {name: t for name, t in mine.items() if name.startswith("head.")}
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape:
            raise UserError(
                f"train.init_from = {path!r} has another architecture (at {name}); "
                "give both the same [model] and a mechanism with the same parameters"
            )
    model.load_state_dict(theirs)


def take_optimiser(optimiser: torch.optim.Optimizer, path: str) -> None:
    """The moments of another run or checkpoint; rates and decay stay those of the new run."""
    state, new = read_trainer(find(path))["optimiser"], optimiser.state_dict()
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    groups = ([len(group["params"]) for group in s["param_groups"]] for s in (state, new))
    moments = [state["state"].get(i, {}).get("exp_avg") for i in range(len(parameters))]
    shapes = [None if m is None else m.shape for m in moments]
    if len({*map(tuple, groups)}) > 1 or shapes != [p.shape for p in parameters]:
        raise UserError(
            f"train.init_optimiser: the optimiser state of {path} is not that of this model's "
            "parameters; leave it out to take the weights alone"
        )
    optimiser.load_state_dict({**new, "state": state["state"]})
