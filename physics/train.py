"""torchrun --standalone --nproc_per_node=8 physics/train.py configs/physics-109m.toml

Pre-trains a model of orbits. Everything else is as in train.py: its options, --resume, exit codes.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import train
from physics.config import OrbitConfig
from support.command import run


def main(argv: list[str]) -> int:
    return train.main(argv, kind=OrbitConfig)


if __name__ == "__main__":
    run(main)
