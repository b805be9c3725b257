"""Measuring trained models. The arguments that its commands share are here: they need no torch."""

from pathlib import Path

from support.command import Parser, lengths, numbers, positive


class EvaluationParser(Parser):
    """The arguments that evaluation commands share."""

    def __init__(self, description: str, *, many=True, precision=True, variants=False):
        """`many`: it evaluates several checkpoints and records the results."""
        super().__init__(description)
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
        if many:
            self.add_argument("checkpoints", nargs="+", metavar="CKPT", help="run or checkpoint")
            self.add_argument("--out", required=True, type=Path, help="results/NAME.json")
        if precision:
            choices, meaning = ("auto", "bf16", "fp32"), "auto: bf16 on a GPU that has it"
            self.add_argument("--precision", default="auto", choices=choices, help=meaning)
        if not variants:
            return
        group = self.add_argument_group("evaluated in addition, without retraining, one at a time")
        group.add_argument("--p", type=numbers, default=[], help="other sharpening exponents: 3,25")
        group.add_argument("--alpha", type=numbers, default=[], help="adaptive p_i: 0.1,0.2")
        group.add_argument("--window", type=lengths, default=[], help="sliding windows: 1024")
        group.add_argument("--sinks", type=positive, help="first tokens kept beside a window: 4")
        group.add_argument("--position-interpolation", dest="pi", action="store_true")
        for scaling in ("ntk", "yarn"):
            group.add_argument(f"--{scaling}", action="store_true", help="RoPE to the length")
        meaning = "L of sigmoid and relu-length: the length of the evaluation"
        group.add_argument("--current-length", action="store_true", help=meaning)
