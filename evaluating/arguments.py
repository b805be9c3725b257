"""Holds the arguments that evaluation commands share. They need no torch."""

from pathlib import Path

from support.command import Parser, lengths, numbers, positive


class EvaluationParser(Parser):
    """Parses the arguments of an evaluation command."""

    def __init__(self, description: str, *, many=True, precision=True, variants=False):
        """Add the arguments; `many`: of a command that records results of several checkpoints."""
        super().__init__(description)
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
        if many:
            self.add_argument("checkpoints", nargs="+", metavar="CKPT", help="run or checkpoint")
            self.add_argument("--out", required=True, type=Path, help="results/NAME.json")
        if precision:
            self.add_argument(
                "--precision",
                default="auto",
                choices=("auto", "bf16", "fp32"),
                help="auto: bf16 on a GPU that has it",
            )
        if not variants:
            return
        group = self.add_argument_group("evaluated in addition, without retraining, one at a time")
        group.add_argument("--p", type=numbers, default=[], help="other sharpening exponents: 3,25")
        group.add_argument("--alpha", type=numbers, default=[], help="adaptive p_i: 0.1,0.2")
        group.add_argument("--window", type=lengths, default=[], help="sliding windows: 1024")
        group.add_argument("--sinks", type=positive, help="first tokens kept beside a window: 4")
        group.add_argument(
            "--position-interpolation",
            dest="pi",
            action="store_true",
            help="stretch RoPE to the length",
        )
        group.add_argument("--ntk", action="store_true", help="stretch RoPE to the length")
        group.add_argument("--yarn", action="store_true", help="stretch RoPE to the length")
        group.add_argument(
            "--current-length",
            action="store_true",
            help="the L of sigmoid and relu-length becomes the length of the evaluation",
        )
