"""Writes a run's directory and screen: metrics.jsonl, the bar, wandb, the loss curve."""

import contextlib
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
from support import files
from support.command import revision
from training.config import Config
from training.distributed import World

METRICS, RUN = "metrics.jsonl", "run.json"


class RunLog(contextlib.ExitStack):
    """Writes the run directory and the screen. Only rank 0 writes and shows anything."""

    def __init__(self, config: Config, world: World):
        super().__init__()
        self.config = config
        self.path = config.run_directory
        self.world = world
        self.bar = tqdm(disable=True)
        if world.is_main:
            if not self.path.exists():
                self.callback(_remove_if_empty, self.path)
            remedy = "choose another --log.name or --log.directory"
            self.enter_context(files.locked(self.path, remedy))

    def start(self, step: int, summary: list[str]) -> None:
        """Write the config, the revision and the machine; show the summary and the first step."""
        if not self.world.is_main:
            return
        self._about = {"revision": revision(), "command": sys.argv, **machine(self.world)}
        files.write_text(self.path / "config.toml", self.config.to_toml())
        files.write_json(self.path / RUN, self._about)
        metrics = [m for m in read_metrics(self.path) if m["step"] <= step]
        files.write_text(self.path / METRICS, "".join(map(_line, metrics)))
        with files.writing(self.path / METRICS):
            # Unbuffered: a failed write must fail where it is made, not again at the close.
            self._metrics = self.enter_context((self.path / METRICS).open("ab", buffering=0))
        self._wandb = start_wandb(self.config, self.path)
        if self._wandb is not None:
            self.callback(_quietly, self._wandb.finish)
        for line in summary:
            self.say(line)
        if step:
            self.say(f"resumed from step {step} of {self.config.train.steps}")
        shown = {"unit": "step", "dynamic_ncols": True, "disable": None}  # None: on a terminal only
        self.bar = self.enter_context(tqdm(total=self.config.train.steps, initial=step, **shown))

    def say(self, text: str) -> None:
        """Show a line above the progress bar."""
        if self.world.is_main:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def backends(self, used: list[str]) -> None:
        """Say which backends compute the attention, and keep them in run.json."""
        self.say(f"attention  computed by backend {', '.join(used)}")
        if self.world.is_main:
            self._about["attention"] = used
            files.write_json(self.path / RUN, self._about)

    def step(self, step: int, *, seconds_left: float, **values: float | None) -> None:
        """Record a measurement of training: on the screen, in metrics.jsonl and in wandb."""
        self._record(step=step, **values)
        mfu = values["mfu"]
        shown = {
            "loss": f"{values['loss']:.4f}",
            "lr": f"{values['lr']:.2e}",
            "tokens/s": f"{values['tokens_per_s']:,.0f}",
            "mfu": "n/a" if mfu is None else f"{mfu:.1%}",
        }
        if self.bar.disable:
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            left = timedelta(seconds=round(seconds_left))
            self.say(f"step {step}/{self.config.train.steps}  {text}  left {left}")
        else:
            self.bar.set_postfix(shown, refresh=False)

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Record the loss in nats per token, and in bits per byte, which compares tokenisers."""
        bits = {} if bits_per_byte is None else {"val_bits_per_byte": bits_per_byte}
        self._record(step=step, val_loss=loss, **bits)
        shown = "".join(f", {value:.4f} bits per byte" for value in bits.values())
        self.say(f"step {step}/{self.config.train.steps}  validation loss {loss:.4f}{shown}")

    def _record(self, **values) -> None:
        if not self.world.is_main:
            return
        with files.writing(self.path / METRICS):
            files.write_all(self._metrics, _line(values).encode())
        if self._wandb is not None:
            _quietly(self._wandb.log, values, step=values["step"])

    def sync(self) -> None:
        """Wait until the metrics are on the disk, before a checkpoint that implies them."""
        if self.world.is_main:
            with files.writing(self.path / METRICS):
                os.fsync(self._metrics.fileno())

    def stopped(self, step: int, by: str) -> None:
        """Say that the run was stopped, also in run.json: torchrun does not pass exit codes on."""
        if self.world.is_main:
            how = f"by {by} after step {step}"
            files.write_json(self.path / RUN, self._about | {"stopped": how})
            self.say(f"stopped {how}; rerun with --resume")

    def finish(self, step: int) -> None:
        """Draw the loss curve, and say that the run has finished."""
        if self.world.is_main:
            curve = self.path / "loss.png"
            plot_losses(read_metrics(self.path), curve, self.config.log.name)
            self.say(f"finished {step} steps: {self.path}, loss curve {curve}")


def _line(values: dict) -> str:
    return json.dumps(files.finite(values), ensure_ascii=False) + "\n"


def _remove_if_empty(folder: Path) -> None:
    """Leave no folder behind a start that failed before anything was written."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def machine(world: World) -> dict:
    """Return the properties of the machine that the last bits of a run depend on."""
    on_gpu = world.device.type == "cuda"
    return {
        "torch": str(torch.__version__),  # weights_only refuses its own type
        "processes": world.size,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else world.device.type,
        "threads": torch.get_num_threads(),
    }


def other_machine(saved: dict, now: dict) -> str | None:
    """Return a warning where a resumed run will differ from an uninterrupted one."""
    on_cpu = now["device"] == "cpu"  # a GPU's sums do not depend on the threads
    changed = [k for k in now if saved.get(k) != now[k] and (k != "threads" or on_cpu)]
    if not changed:
        return None
    listed = ", ".join(f"{k} {saved.get(k)} -> {now[k]}" for k in changed)
    warning = (
        f"not the machine of the checkpoint (saved -> now): {listed}; "
        "sums are rounded in another order, so the weights will differ in the last bits"
    )
    options = {"processes": "torchrun --nproc_per_node=", "threads": "OMP_NUM_THREADS="}
    remedies = [f"{options[k]}{saved.get(k)}" for k in changed if k in options]
    if remedies:
        warning += f"; to reproduce exactly, use {' and '.join(remedies)}"
    return warning


def read_metrics(run_directory: Path) -> list[dict]:
    """Read the measurements of a run, without damaged lines, which a warning names."""
    file = run_directory / METRICS
    try:  # a kill may cut the last line short
        *lines, _ = files.read_text(file, errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; move it away") from None
    measured = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if type(value["step"]) is not int:
                raise ValueError(f"step {value['step']!r}")
            measured.append(value)
        except files.DAMAGE as error:
            print(f"warning: {file}, line {number} is damaged: {error}", file=sys.stderr)
    return measured


def start_wandb(config: Config, directory: Path):
    """Start a wandb run if the config asks for one: offline without a key."""
    if not config.log.wandb:
        return None
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        has_key |= any("wandb" in host for host in netrc.netrc().hosts)
    try:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        names = {"project": config.log.wandb_project, "name": config.log.name}
        return wandb.init(**names, dir=directory, config=asdict(config), mode=mode)
    except Exception as error:  # whatever wandb raises, training continues without it
        print(f"warning: wandb is off: {error}", file=sys.stderr)
        return None


def _quietly(call, *arguments, **options) -> None:
    """Call wandb: a lost connection must not stop a run."""
    with contextlib.suppress(Exception):
        call(*arguments, **options)


def plot_losses(metrics: list[dict], file: Path, title: str) -> None:
    """Draw training and validation loss against the step, as PNG and PDF."""
    from support import plots  # matplotlib takes a second, and only the end of a run needs it

    figure, axes = plots.figure(width=plots.PAGE / 1.5, height=3.0)
    looks = {"loss": ("training", plots.GREY, ""), "val_loss": ("validation", plots.INK, "o")}
    for key, (label, colour, marker) in looks.items():  # colours are for mechanisms
        points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    if axes.lines:  # none where no loss was finite
        axes.legend()
    plots.save(figure, file)
