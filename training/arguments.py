"""Parses the arguments of train.py and physics/train.py."""

from argparse import Namespace

from lssar.errors import UserError
from support.command import Parser, positive
from training.gpus import GPUS


class TrainingParser(Parser):
    """Parses a config's path, options, and `--section.key=value` that change the config."""

    def __init__(self, description: str):
        super().__init__(description)
        self.add_argument("config", help="a file of configs/")
        for flag in ("--resume", "--accept-data", "--dry-run", "--status"):
            self.add_argument(flag, action="store_true")
        self.add_argument("--world-size", type=positive, default=1, help="for --dry-run")
        self.add_argument("--gpu", choices=tuple(GPUS), help="for --dry-run")
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))

    def parse(self, argv: list[str]) -> tuple[Namespace, list[str]]:
        """Return the options, and the arguments that change the config."""
        options, overrides = self.parse_known_args(argv)
        if options.gpu and not (options.dry_run and options.device in ("auto", "cuda")):
            raise UserError(f"--gpu {options.gpu} only works with --dry-run on CUDA; leave it out")
        return options, overrides
