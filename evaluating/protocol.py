"""What the evaluation commands share: arguments, precision, progress, opening the results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evaluating.results import Results
from support.command import Parser, lengths, numbers, positive

# Tokens in one forward pass, or one sequence if that is longer. Fixed, because a matrix product
# can round differently in another shape, and results must be the same every time.
BATCH_TOKENS = 16384


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
            choices, meaning = ("auto", "bf16", "fp32"), "auto: bf16 on a GPU, fp32 elsewhere"
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


def progress(total: int, label: str, unit: str, enabled: bool = True):
    """A bar on a terminal, nothing in a log file, where finished numbers are printed anyway."""
    from tqdm import tqdm

    shown = enabled and sys.stderr.isatty()
    large = {"unit_scale": total > 10_000, "leave": False, "dynamic_ncols": True}
    return tqdm(total=total, desc=label, unit=unit, disable=not shown, **large)


@contextmanager
def arithmetic(precision: str, device) -> Iterator[str]:
    """Products in bf16 under autocast, or in full fp32 (no TF32); gives the name of the choice."""
    import torch

    from training import distributed

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with distributed.autocast(device, precision):
            yield "bf16" if torch.is_autocast_enabled(device.type) else "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


def open_results(path: Path, kind: str, settings: dict, about: dict, say: bool = True) -> Results:
    """Begin or continue a results file whose records name torch's version and threads."""
    import torch

    made_with = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    results = Results(path, kind, settings, about, made_with=made_with)
    if results.records and say:
        print(f"continuing {path}: {len(results.records)} finished numbers are kept")
    return results


@contextmanager
def measuring(arguments, kind: str, settings: dict, about: dict, world) -> Iterator[Results]:
    """The results file of a command, to be filled in the precision that it was asked for."""
    with arithmetic(arguments.precision, world.device) as precision:
        settings = settings | {"precision": precision}
        results = open_results(arguments.out, kind, settings, about, world.is_main)
        world.barrier()  # everyone has read the file before the first writes to it
        with kept_on_interrupt(results.path):
            yield results


@contextmanager
def kept_on_interrupt(path: Path) -> Iterator[None]:
    """On Ctrl-C, say where the finished numbers are."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nwhat is finished is in {path}; the same command continues it")
        raise
