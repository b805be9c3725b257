"""What a run leaves behind and shows: metrics.jsonl, the progress bar, wandb, the loss curve."""

import contextlib
import fcntl
import json
import netrc
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from lssar.errors import UserError
from support.command import revision
from support.files import (
    are_checked,
    checked_line,
    read_line,
    read_text,
    write_json,
    write_text,
    writing,
)
from training.config import Config
from training.distributed import World

METRICS, RUN = "metrics.jsonl", "run.json"


class RunLog:
    """The run directory and the screen. Only rank 0 writes and shows anything."""

    def __init__(self, config: Config, world: World):
        self.config, self.path, self.is_main = config, config.run_directory, world.is_main
        self.world = world
        self.bar = self._metrics = self._wandb = None
        if self.is_main:
            self._lock()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()
        if self._wandb is not None:
            with contextlib.suppress(Exception):
                self._wandb.finish()
        if self._metrics is not None:
            self._metrics.close()
        if self.is_main:
            self._lock_file.close()

    def _lock(self) -> None:
        """Two runs must not write into one directory."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_file = (self.path / ".lock").open("w")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path} is in use by another training; choose another --log.name"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot write the run directory {self.path}: {error.strerror}; "
                "choose another --log.directory"
            ) from None

    def start(self, step: int, summary: list[str]) -> None:
        if not self.is_main:
            return
        self._about = {"revision": revision(), "command": sys.argv, **machine(self.world)}
        write_text(self.path / "config.toml", self.config.to_toml())
        write_json(self.path / RUN, self._about)
        metrics = [m for m in read_metrics(self.path) if m["step"] <= step]
        write_text(self.path / METRICS, "".join(map(checked_line, metrics)))
        # Unbuffered: a failed write must fail where it is made, not again when it is closed.
        with writing(self.path / METRICS):
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
        self._wandb = start_wandb(self.config, self.path)
        for line in summary:
            self.say(line)
        if sys.stderr.isatty():
            total = self.config.train.steps
            self.bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        if self.is_main:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def step(self, step: int, *, seconds_left: float, **values: float | None) -> None:
        """One measurement of training: to the screen, metrics.jsonl and wandb."""
        if not self.is_main:
            return
        self._record(step=step, **values)
        mfu = values["mfu"]
        shown = {
            "loss": f"{values['loss']:.4f}",
            "lr": f"{values['lr']:.2e}",
            "tokens/s": f"{values['tokens_per_s']:,.0f}",
            "mfu": "n/a" if mfu is None else f"{mfu:.1%}",
        }
        if self.bar is not None:
            self.bar.set_postfix(shown, refresh=False)
        else:
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            left = timedelta(seconds=round(seconds_left))
            self.say(f"step {step}/{self.config.train.steps}  {text}  left {left}")

    def validation(self, step: int, loss: float) -> None:
        if self.is_main:
            self._record(step=step, val_loss=loss)
            self.say(f"step {step}/{self.config.train.steps}  validation loss {loss:.4f}")

    def _record(self, **values) -> None:
        line = checked_line(values).encode()
        with writing(self.path / METRICS):
            while line:
                line = line[self._metrics.write(line) :]
        if self._wandb is not None:
            with contextlib.suppress(Exception):  # a lost connection must not stop a run
                self._wandb.log(values, step=values["step"])

    def stopped(self, step: int, by: str) -> None:
        """Also into run.json: torchrun does not pass the exit code on."""
        if self.is_main:
            write_json(self.path / RUN, self._about | {"stopped": f"by {by} after step {step}"})
            self.say(f"stopped by {by} after step {step}; rerun with --resume")

    def finish(self, step: int) -> None:
        if self.is_main:
            curve = self.path / "loss.png"
            plot_losses(read_metrics(self.path), curve, self.config.log.name)
            self.say(f"finished {step} steps: {self.path}, loss curve {curve}")


def machine(world: World) -> dict:
    """What the last bits of a run depend on besides its configuration."""
    return {
        "torch": str(torch.__version__),  # its own type is refused where checkpoints are read
        "processes": world.size,
        "device": device_name(world.device),
        "threads": torch.get_num_threads(),
    }


def other_machine(saved: dict, now: dict) -> str | None:
    """A warning where a resumed run will not be bit for bit the one that nothing interrupted."""
    on_cpu = now["device"] == "cpu"  # a GPU's sums do not depend on the threads
    changed = [k for k in now if saved.get(k) != now[k] and (k != "threads" or on_cpu)]
    if not changed:
        return None
    listed = ", ".join(f"{k} {saved.get(k)} -> {now[k]}" for k in changed)
    remedy = {
        "processes": f"torchrun --nproc_per_node={saved.get('processes')}",
        "threads": f"OMP_NUM_THREADS={saved.get('threads')}",
    }
    return (
        f"not the machine of the checkpoint (saved -> now): {listed}; sums are rounded "
        "in another order, so the weights will differ in the last bits"
    ) + "".join(f"; for the same, start with {remedy[k]}" for k in changed if k in remedy)


def how_stopped(run_directory: Path) -> str | None:
    """What the last start of the run says of its end, if a signal stopped it and it could save."""
    try:
        return json.loads((run_directory / RUN).read_text(encoding="utf-8")).get("stopped")
    except (OSError, ValueError, AttributeError):
        return None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def read_metrics(run_directory: Path) -> list[dict]:
    """The measurements of a run; damaged lines are named and left out.

    What stands behind the last newline was cut short by a kill, and is left out without a word.
    """
    file, measured = run_directory / METRICS, []
    if not file.exists():
        return measured
    try:
        *lines, _ = read_text(file, errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; move it away") from None
    checked = are_checked(lines)
    for number, line in enumerate(lines, start=1):
        try:
            value = read_line(line, checked)
            if type(value["step"]) is not int:
                raise ValueError(f"step {value['step']!r}")
            measured.append(value)
        except (ValueError, KeyError, RecursionError) as error:
            print(f"warning: {file}, line {number} is damaged: {error}", file=sys.stderr)
    return measured


def start_wandb(config: Config, directory: Path):
    """A wandb run when asked for: offline without a key, and never the reason that a run stops."""
    if not config.log.wandb:
        return None
    try:
        import wandb

        return wandb.init(
            project=config.log.wandb_project,
            name=config.log.name,
            dir=directory,
            config=asdict(config),
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
        )
    except Exception as error:  # whatever wandb raises, training goes on without it
        print(f"warning: wandb is off: {error}", file=sys.stderr)
        return None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def plot_losses(metrics: list[dict], file: Path, title: str) -> None:
    """Training and validation loss against the step, as PNG and PDF."""
    from support import plots  # matplotlib takes a second, and only the end of a run needs it

    figure, axes = plots.figure(width=plots.PAGE / 1.5, height=3.0)
    for i, (key, label) in enumerate((("loss", "training"), ("val_loss", "validation"))):
        points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), **plots.line(i, marker=i == 1), label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.legend()
    plots.save(figure, file)
