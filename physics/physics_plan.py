"""python physics/physics_plan.py nano|109m --data DIR --points 1000 --sequences 10000000 [--gpus 8]

What scripts/table_physics.sh will do: orbits, runs, tokens, hours and disk. Starts nothing.
"""

import itertools
import sys
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.command import Parser, answer_early, positive, process_count, run, seed_number

# Of one CPU core; None where GPUs are planned with.
TOKENS_PER_SECOND = {"nano": 9_000, "109m": None}


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("size", choices=tuple(TOKENS_PER_SECOND))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--points", type=positive, required=True)
    parser.add_argument("--sequences", type=positive, required=True)
    parser.add_argument("--gpus", type=process_count, default=8)
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0])
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

from data.shards import DESCRIPTION
from paper.jobs import Job, is_done
from paper.plan import config_cost, disk_line, is_trained, training_lines
from physics import TASKS
from physics.simulate import SETS
from physics.systems import CHANNELS
from training.config import Config, load_config


def main(argv: list[str]) -> None:
    options = make_parser().parse_args(argv)
    speed = TOKENS_PER_SECOND[options.size]
    processes = options.gpus if speed is None else 1
    costs = {}
    for config in configs(options.size, options.seeds, processes):
        done = is_done(Job(config.log.name, (), partial(is_trained, config)))
        costs[config.log.name] = None if done else config_cost(config, speed)
    missing = [name for name in SETS if not (options.data / name / DESCRIPTION).exists()]
    shards = options.sequences * options.points * CHANNELS * 2 if "orbits" in missing else 0
    lines = [
        "tables      symbolic_regression, force_earth, force_all_planets",
        f"simulation  {', '.join(missing) or 'nothing'} to be made in {options.data}",
        *training_lines(costs, speed, processes, alone=[n for n in costs if n.endswith(TASKS)]),
        "evaluation  symbolic regression on the CPU; its time and the simulation's are not counted",
        disk_line(costs, shards),
    ]
    print("\n".join(lines))


def configs(size: str, seeds: list[int], processes: int) -> list[Config]:
    """Pre-training on all devices, then each model fine-tuned on one for both tasks."""
    before, after = [], []
    for seed, attention in itertools.product(seeds, ("softmax", "lssar")):
        config = f"configs/physics-{size}-{attention}.toml"
        name = f"physics-{size}-{attention}{f'-s{seed}' if seed else ''}"
        before.append(load_config(config, [f"--log.name={name}"], processes))
        for task in TASKS:
            config = f"configs/physics-{size}-{task}.toml"
            changes = [f"--attention.name={attention}", f"--log.name={name}-{task}"]
            after.append(load_config(config, changes))
    return before + after


if __name__ == "__main__":
    run(main)
