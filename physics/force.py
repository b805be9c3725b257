"""python physics/force.py magnitude|vector RUN [--section.key=value ...]

Fine-tunes a pre-trained model of orbits to predict the force on a planet from the planet's path: a
new linear head, all weights trained, the mean squared error over the labelled points.

  magnitude   |F| in random systems of one planet      corpora/.../forces
  vector      (Fx, Fy) over the largest, eight planets  corpora/.../planets

It trains as train.py does, with `--config` (default: configs/physics-109m-TASK.toml) and the
attention of RUN, in runs/NAME-TASK. The checkpoint with the lowest loss on the set's validation
labels then predicts runs/NAME-TASK/forces.npy: (sequences, times, outputs), in the physical unit,
at the planet's points 1, 3, 5, ...; forces.json says which weights they came from.

Rerun the same command to continue; a finished one does nothing. After RUN was trained again, delete
runs/NAME-TASK.
"""

import sys
from argparse import Namespace
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

from evaluating.checkpoints import open_checkpoints
from lssar.errors import UserError
from physics import train
from physics.config import OrbitConfig
from physics.loader import all_inputs, describe
from physics.model import OrbitModel
from physics.simulate import save
from support.command import Parser, run
from support.files import lookup, make_folder, write_json
from training import distributed
from training.batch_plan import batch_plan
from training.checkpoint import Store
from training.config import load_config, read_config

TASKS = {"magnitude": 1, "vector": 2}  # numbers that a model predicts per position
FORCES = "forces.npy"
ORIGIN = "forces.json"
BATCH = 64  # sequences; fixed, so that predictions do not depend on where they are made


def parse_arguments(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return the options, and `--section.key=value` arguments that change the config."""
    parser = Parser(__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("run", help="a pre-trained run or checkpoint")
    parser.add_argument("--config", help="a file of configs/")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    options, overrides = parser.parse_known_args(argv)
    options.config = options.config or f"configs/physics-109m-{options.task}.toml"
    read_config(options.config, overrides, OrbitConfig)  # raises for a name that does not exist
    return options, overrides


def main(argv: list[str]) -> int:
    options, overrides = parse_arguments(argv)
    (pretrained,) = open_checkpoints([options.run], OrbitModel)
    name = f"{pretrained.info.run}-{options.task}"
    attention = pretrained.config.to_dict()["attention"]
    same = [f"--attention.{key}={value}" for key, value in attention.items()]
    overrides = [*same, f"--train.init_from={options.run}", f"--log.name={name}", *overrides]
    config = load_config(options.config, overrides, kind=OrbitConfig)
    if config.orbits.outputs != TASKS[options.task]:
        raise UserError(
            f"{options.config} has no outputs of the task {options.task!r}; see --config"
        )
    folder = config.run_directory
    if Store(folder).candidates() and origin(folder)["pretrained"] != pretrained.identity:
        raise UserError(
            f"{folder} was fine-tuned from other weights than {options.run} has now; "
            "delete it and rerun, or choose another --log.name"
        )
    make_folder(folder)
    write_origin(folder, pretrained.identity)
    code = train.main([options.config, *overrides, "--resume", "--device", options.device])
    if code == 0:
        identity = predict(config, distributed.start(options.device).device)
        write_origin(folder, pretrained.identity, identity)
    return code


def origin(folder: Path) -> dict[str, str | None]:
    """Return the identity of the pre-trained model, and of the fine-tuned one that predicted."""
    return {key: lookup(folder / ORIGIN, key) for key in ("pretrained", "checkpoint")}


def write_origin(folder: Path, pretrained: str, checkpoint: str | None = None) -> None:
    """Name the weights in forces.json; without `checkpoint`, its predictions do not count."""
    write_json(folder / ORIGIN, {"pretrained": pretrained, "checkpoint": checkpoint})


@torch.inference_mode()
def predict(config: OrbitConfig, device: torch.device) -> str:
    """Write the best checkpoint's forces of every training sequence, and return its identity."""
    out = config.run_directory / FORCES
    (best,) = open_checkpoints([str(Store(config.run_directory).best())], OrbitModel)
    model = best.load(device)
    records = config.make_batches(batch_plan(config)).train_set
    parts = [
        model(inputs.to(device))[:, 1::2].float().cpu().numpy()
        for inputs in all_inputs(records, BATCH)
    ]
    # The force that a label of one stands for, in the whole set or in each sequence.
    unit = np.reshape(describe(records.directory)["unit"], (-1, 1, 1)).astype(np.float32)
    forces = np.concatenate(parts) * unit
    refuse_non_finite(forces, best.path)
    save(out, forces)
    print(f"{out}: predictions of {best.path.name}")
    return best.identity


def refuse_non_finite(forces: np.ndarray, source: Path) -> None:
    """Raise if a predicted force is NaN or infinite."""
    if not np.isfinite(forces).all():
        raise UserError(f"{source} predicts forces that are not finite; fine-tune it again")


if __name__ == "__main__":
    run(main)
