"""python physics/force.py magnitude|vector RUN [--section.key=value ...]

Fine-tunes a pre-trained model of orbits to predict the force on a planet from the planet's path: a
new linear head, all weights trained, the mean squared error over the labelled points.

  magnitude   |F| in random systems of one planet      corpora/.../forces
  vector      (Fx, Fy) over the largest, eight planets  corpora/.../planets

Training is train.py's with `--config` (default: configs/physics-109m-TASK.toml) and the attention
of RUN, in runs/NAME-TASK. The checkpoint with the lowest loss on the set's validation labels is
kept; its predictions go into runs/NAME-TASK/forces.npy: (sequences, times, outputs), in the
physical unit, at the planet's points 1, 3, 5, ... The same command continues, or does nothing.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

import distributed
import train
from checkpoint import Store, find, load_model, read_description
from config import Config, load_config
from data.records import Records, describe, open_data
from errors import Parser, UserError, run
from physics.simulate import write_whole

TASKS = ("magnitude", "vector")
FORCES = "forces.npy"
BATCH = 64  # sequences; fixed, so that predictions do not depend on where they are made


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("run", help="a pre-trained run or checkpoint")
    parser.add_argument("--config", help="a file of configs/")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    options, overrides = parser.parse_known_args(argv)
    file = options.config or f"configs/physics-109m-{options.task}.toml"
    overrides = [*inherited(options.task, options.run), *overrides]
    config = load_config(file, overrides)
    if config.model_config().outputs != TASKS.index(options.task) + 1:
        raise UserError(f"{file} has not the outputs of the task {options.task!r}; see --config")
    code = train.main([file, *overrides, "--resume", "--device", options.device])
    if code == 0:
        predict(config, distributed.start(options.device).device)
    return code


def inherited(task: str, path: str) -> list[str]:
    """Overrides that make the fine-tuned model the pre-trained one: its attention, its weights."""
    directory = find(path)
    model, info = read_description(directory)
    attention = [f"--attention.{k}={v}" for k, v in model.to_dict()["attention"].items()]
    return [*attention, f"--train.init_from={path}", f"--log.name={info.run}-{task}"]


@torch.inference_mode()
def predict(config: Config, device: torch.device) -> Path:
    """Predictions of the selected checkpoint for every training sequence, to the run's folder."""
    out = config.run_directory / FORCES
    best = Store(config.run_directory).best()
    model = load_model(best, device)[0].eval()
    records = open_data(config.data.directory, "train", **config.data_ends())
    parts = []
    for first in range(0, records.count, BATCH):
        rows = np.arange(first, min(first + BATCH, records.count))
        inputs, _ = records.split(records.read(rows * records.stride))
        parts.append(model(inputs.to(device))[:, 1::2].float().cpu().numpy())
    forces = np.concatenate(parts) * unit_of(records)
    write_whole(out, lambda file: np.save(file, forces))
    print(f"{out}: predictions of {best.name}")
    return out


def unit_of(records: Records) -> np.ndarray:
    """What a label of one means: of the set, or of each sequence; as (sequences or 1, 1, 1)."""
    return np.reshape(describe(records.directory)["unit"], (-1, 1, 1)).astype(np.float32)


if __name__ == "__main__":
    run(main)
