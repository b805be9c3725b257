"""python paper/physics_plan.py nano|single|109m --data DIR --points 1000 --sequences 10000000

What scripts/table_physics.sh will do: orbits, runs, tokens, hours, memory and disk; `--gpus 8` of
the kind `--gpu a100`. Starts nothing.
"""

import itertools
import sys
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.command import Parser, answer_early, positive, process_count, run, seed_number
from training.hours import DEVICES, planned_device

# Tokens per second in training, of one CPU core; None where GPUs are planned with.
TOKENS_PER_SECOND = {"nano": 9_000, "single": None, "109m": None}
SIMULATED = 1e6  # points per second of one core; a cautious estimate, as are the next
REGRESSION = {"nano": 0.1, "single": 1.0, "109m": 1.0}  # core-hours per seed


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("size", choices=tuple(TOKENS_PER_SECOND))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--points", type=positive, required=True)
    parser.add_argument("--sequences", type=positive, required=True)
    parser.add_argument("--gpus", type=process_count, default=8)
    parser.add_argument("--gpu", choices=tuple(DEVICES))
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0])
    return parser


if __name__ == "__main__":  # --help and mistakes need no torch, which takes seconds to import
    answer_early(make_parser().parse_args)

from data.shards import DESCRIPTION
from paper.costs import Speed, room_lines, training_lines
from paper.jobs import Job, is_done
from paper.plan import is_trained
from physics import TASKS
from physics.simulate import SETS
from physics.systems import CHANNELS
from training.config import Config, load_config


def main(argv: list[str]) -> None:
    options = make_parser().parse_args(argv)
    rate, costs = TOKENS_PER_SECOND[options.size], {}
    usual = "4090" if options.size == "single" else "a100"
    device = planned_device(options.gpu, usual) if rate is None else None
    speed, processes = Speed(device, rate), options.gpus if device else 1
    for config in configs(options.size, options.seeds, processes):
        name = config.log.name
        done = is_done(Job(name, (), partial(is_trained, config)))
        count = 1 if name.endswith(TASKS) else processes
        costs[name] = None if done else speed.cost(config, count)
    missing = [name for name in SETS if not (options.data / name / DESCRIPTION).exists()]
    points = options.sequences * options.points if "orbits" in missing else 0
    simulating = points / SIMULATED / 3600
    searching = REGRESSION[options.size] * len(options.seeds)
    left = [cost for cost in costs.values() if cost]
    elapsed = sum(c.hours / c.processes for c in left) + simulating + searching
    where = f"{processes} GPUs" if processes > 1 else "one GPU" if device else "one core"
    lines = [
        "tables      symbolic_regression, force_earth, force_all_planets",
        f"simulation  {', '.join(missing) or 'nothing'} to be made in {options.data}: "
        f"{simulating:,.1f} hours of one core",
        *training_lines(costs),
        f"evaluation  symbolic regression: {searching:,.1f} hours of one core",
        speed.total(sum(c.hours for c in left), elapsed, f"{where}, with the CPU's part"),
        *room_lines(costs, points * CHANNELS * 2, device),
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
