"""python benchmark.py attention --lengths 512,1024,2048,4096 --out results/attention.json

Time and memory of every backend and mechanism against the length, beside PyTorch's flash softmax.
All contestants take turns in one process; a time is a median, a ratio is to
F.scaled_dot_product_attention at the same length in the same run. `paper` is LSSAR as the paper
writes it, eager with the literal x**p. Memory is the peak of a process of its own, inputs and
gradients included. What would not fit is left out, with the reason. Writes JSON and a figure.

    --inputs random|RUN   q, k, v drawn at random, or those of a trained layer for a text
    --table cost          the paper's table of costs for a whole model; `--table cost --help`
"""

import argparse
import inspect
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from attention import BACKENDS, MECHANISMS, Call, Mechanism, attend, get_mechanism
from benchmarks import attention_report, cost, measure
from benchmarks.measure import DTYPES, Step
from errors import Parser, UserError, did_you_mean, number, positive, process_count
from evaluation import Checkpoint, lengths, open_checkpoints
from files import finite, read_text, write_json
from model import rope_tables

PAPER = "paper"
PHASES = ("forward", "forward+backward")
# Matrices of B x H x L x L that the eager forms hold at their peak, measured; in float32.
EAGER_MAPS = 10
EAGER_SHARE = 0.7  # of the free memory
WARM_UP_LENGTH = 64


@dataclass(frozen=True)
class Contestant:
    mechanism: str
    backend: str  # of attention.BACKENDS, or PAPER

    def __str__(self) -> str:
        return f"{self.mechanism} {self.backend}"

    def value(self, p: float) -> Mechanism:
        sharpened = MECHANISMS[self.mechanism].sharpened
        settings = {"p": p} if sharpened else {}
        if sharpened and self.backend == PAPER:
            settings["numerics"] = "naive"
        return get_mechanism(self.mechanism, **settings)

    @property
    def backend_name(self) -> str:
        return "eager" if self.backend == PAPER else self.backend

    @property
    def holds_maps(self) -> bool:
        return self.backend_name == "eager"

    def function(self, p: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if self == BASELINE:  # PyTorch's own call and nothing around it
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mechanism = self.value(p)
        return lambda q, k, v: attend(q, k, v, mechanism, backend=self.backend_name)

    def cannot(self, device: str, dtype: torch.dtype, head_dim: int, p: float) -> str | None:
        """Why this pair does not exist here, whatever the length."""
        mechanism = self.value(p)
        if self.backend == PAPER and not mechanism.sharpened:
            return "the paper's form of it is the eager one"
        call = Call(device, dtype, 1, head_dim)
        backend = BACKENDS[self.backend_name]
        return backend.refuses(mechanism, call) or backend.missing()


BASELINE = Contestant("softmax", "sdpa")


def main(argv: list[str]) -> int:
    first, rest = _table_parser().parse_known_args(argv)
    if first.table == "cost":
        return cost.main(rest)
    options = make_parser().parse_args(argv)
    measure.check_writable(options.out)
    with measure.threads(options.threads):
        compare(options)
    return 0


def compare(options: Namespace) -> None:
    """Measure all contestants, print, write and draw."""
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    checkpoint = _checkpoint(options)
    contestants, skipped = choose(options)
    entries = [(c, n) for n in options.lengths for c in contestants]
    entries, unfit = _that_fit(entries, options)
    memory, failed = measure_memory(entries, options)
    rows = measure_times(list(memory), memory, options)
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(options).items()}
    if checkpoint is not None:
        settings |= {"checkpoint": checkpoint.identity}
    result = finite(
        {
            "kind": "attention",
            "settings": settings,
            "machine": measure.machine(options.device),
            "rows": rows,
            "slopes": attention_report.slopes(rows),
            "skipped": skipped + unfit + failed,
        }
    )
    print(attention_report.text(result))
    write_json(options.out, result)
    for path in (options.out, *attention_report.draw(result, options.out)):
        print(f"written: {path}")


# --- options -------------------------------------------------------------------------------------


def _table_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--table", choices=("length", "cost"), default="length")
    return parser


def _names(allowed) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}: {did_you_mean(name, allowed)}")
        return list(dict.fromkeys(text.split(",")))

    return parse


def make_parser() -> Parser:
    parser = Parser(__doc__, parents=[_table_parser()])
    add = parser.add_argument
    add("--lengths", type=lengths, default=[512, 1024, 2048, 4096])
    add("--mechanisms", type=_names(MECHANISMS), default=["softmax", "lssa", "lssar"])
    backends = [*BACKENDS, PAPER]
    add("--backends", type=_names(backends), default=backends, help=", ".join(backends))
    add("--batch", type=positive, default=1)
    add("--heads", type=positive, help="12, or the checkpoint's")
    add("--head-dim", type=positive, help="64, or the checkpoint's")
    add("--p", type=number(), default=15, help="the sharpening exponent")
    add("--inputs", default="random", metavar="random|RUN")
    add("--layer", type=positive, help="of the checkpoint, from 1; default the last")
    add("--text", type=Path, help="a file for the checkpoint; default a Python library's source")
    add("--dtype", choices=tuple(DTYPES), help="default bf16 on a GPU, fp32 elsewhere")
    add("--device", choices=("cpu", "cuda"), default=measure.best_device())
    add("--threads", type=process_count, help="of the CPU; default all")
    add("--rounds", type=positive, default=15)
    add("--budget", type=number(), default=8, help="seconds after which a contestant is done")
    add("--out", type=Path, default=Path("results/attention.json"))
    return parser


def _checkpoint(options: Namespace) -> Checkpoint | None:
    """Fills in the shape of the inputs."""
    if options.inputs == "random":
        if options.layer or options.text:
            raise UserError("--layer and --text say where in a checkpoint; add --inputs RUN")
        options.heads, options.head_dim = options.heads or 12, options.head_dim or 64
        return None
    if options.heads or options.head_dim:
        raise UserError(f"--heads and --head-dim are those of --inputs {options.inputs}; drop them")
    (checkpoint,) = open_checkpoints([options.inputs])
    config = checkpoint.config
    options.heads, options.head_dim = config.heads, config.head_dim
    options.layer = options.layer or config.layers
    if options.layer > config.layers:
        raise UserError(
            f"--layer {options.layer}: {options.inputs} has layers 1 to {config.layers}"
        )
    return checkpoint


def choose(options: Namespace) -> tuple[list[Contestant], list[dict]]:
    """The pairs that exist on this device, PyTorch's softmax first, and those that do not."""
    chosen, skipped = [BASELINE], []
    for mechanism in options.mechanisms:
        for backend in options.backends:
            contestant = Contestant(mechanism, backend)
            reason = contestant.cannot(
                options.device, DTYPES[options.dtype], options.head_dim, options.p
            )
            if reason is not None:
                skipped.append(asdict(contestant) | {"length": None, "reason": reason})
            elif contestant != BASELINE:
                chosen.append(contestant)
    return chosen, skipped


def _that_fit(entries, options: Namespace) -> tuple[list, list[dict]]:
    """Leave out the eager forms where their matrices would fill the memory."""
    free, fitting, skipped = measure.free_bytes(options.device), [], []
    for contestant, length in entries:
        need = EAGER_MAPS * 4 * options.batch * options.heads * length**2
        if contestant.holds_maps and need > EAGER_SHARE * free:
            reason = f"needs about {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free"
            skipped.append(asdict(contestant) | {"length": length, "reason": reason})
        else:
            fitting.append((contestant, length))
    return fitting, skipped


# --- measurements --------------------------------------------------------------------------------


def measure_memory(entries, options: Namespace) -> tuple[dict, list[dict]]:
    """{(contestant, length): peak megabytes of each phase}, and those that failed."""
    memory, failed = {}, []
    for contestant, length in tqdm(entries, desc="memory", leave=False, disable=None):
        try:
            memory[contestant, length] = measure.peak_megabytes(
                make_steps,
                *(contestant, length, options),
                device=options.device,
                warm_up=(contestant, WARM_UP_LENGTH, options),
            )
        except (measure.Crashed, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            failed.append(asdict(contestant) | {"length": length, "reason": reason})
    if (BASELINE, options.lengths[0]) not in memory:
        raise UserError(f"not even PyTorch's softmax fits at --lengths {options.lengths[0]}")
    return memory, failed


def measure_times(entries, memory: dict, options: Namespace) -> list[dict]:
    inputs = {n: make_inputs(options, n) for n in dict.fromkeys(n for _, n in entries)}
    steps = {}
    for contestant, length in entries:
        made = steps_of(contestant, inputs[length], options.p)
        steps |= {(contestant, length, phase): s for phase, s in zip(PHASES, made, strict=True)}
    seconds = measure.median_seconds(
        steps, device=options.device, rounds=options.rounds, budget=options.budget
    )
    rows = []
    for contestant, length in entries:
        row = asdict(contestant) | {"length": length}
        for phase, megabytes in zip(PHASES, memory[contestant, length], strict=True):
            time, baseline = (seconds[c, length, phase] for c in (contestant, BASELINE))
            row[phase] = {"ms": 1000 * time, "ratio": time / baseline, "MB": megabytes}
        rows.append(row)
    return rows


def make_steps(contestant: Contestant, length: int, options: Namespace) -> list[Step]:
    return steps_of(contestant, make_inputs(options, length), options.p)


def steps_of(contestant: Contestant, inputs: tuple[Tensor, ...], p: float) -> list[Step]:
    """One call of each phase on q, k, v and the output's gradient."""
    *qkv, grad = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    function = contestant.function(p)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*qkv)

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return [forward, forward_and_backward]


# --- inputs --------------------------------------------------------------------------------------


def make_inputs(options: Namespace, length: int) -> tuple[Tensor, ...]:
    """q, k, v and a gradient of the output, each (B, H, L, d), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.heads, length, options.head_dim)
    if options.inputs == "random":
        qkv = [torch.randn(shape, generator=generator) for _ in range(3)]
    else:
        qkv = trained_inputs(options, length)
    grad = torch.randn(shape, generator=generator)
    return tuple(x.to(options.device, DTYPES[options.dtype]) for x in (*qkv, grad))


@torch.no_grad()
def trained_inputs(options: Namespace, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a checkpoint's layer for the first tokens of a text, the next ones a sequence."""
    (checkpoint,) = open_checkpoints([options.inputs])
    model = checkpoint.load(torch.device("cpu"))
    path = options.text or Path(inspect.getsourcefile(argparse))
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: cannot be read as text ({error})") from None
    tokens = torch.from_numpy(checkpoint.tokeniser().encode(text).astype("int64"))
    needed = options.batch * length
    if len(tokens) == 0:
        raise UserError(f"--text {path} is empty")
    tokens = tokens.repeat(math.ceil(needed / len(tokens)))[:needed].view(options.batch, length)
    config, last = model.config, model.blocks[options.layer - 1]
    rope = rope_tables(0, length, config.head_dim, config.interpolation, "cpu")
    x = model.embedding(tokens)
    for block in model.blocks[: options.layer - 1]:
        x = block(x, rope, None)
    return last.attention.queries_keys_values(last.norm_attention(x), rope)
