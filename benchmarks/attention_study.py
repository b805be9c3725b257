"""Time and memory of attention: `python benchmark.py attention|sparsity|threads|zero-blocks`.

All cases of a study take turns in one process. A time is the median of its rounds, a ratio is to
F.scaled_dot_product_attention at the same length and with as many threads in the same run, and a
speed-up is the median over the rounds of the time of one thread by that of several. Memory is the
peak of a separate process, inputs and gradients included. What would not fit is left out, with
the reason. `paper` is LSSAR as the paper writes it, eager with the literal x**p.
"""

import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks import measure, study_report
from benchmarks.attention_inputs import ALIKE, RANDOM, fill_shape, make_inputs
from benchmarks.measure import DTYPES, Step
from evaluating.checkpoints import mechanism_label
from evaluating.results import Record
from lssar.backends import BACKENDS, Call, attend
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism
from lssar.reference import attention_weights

PAPER = "paper"
PHASES = ("forward", "forward_backward")
# Matrices of B x H x L x L that the eager forms hold at their peak, measured; in float32.
EAGER_MAPS = 10
EAGER_SHARE = 0.7  # of the free memory
WARM_UP_LENGTH = 64
SPARSITIES = (
    *((RANDOM, p) for p in (1, 1.5, 2, 3, 5, 8, 15, 40)),
    *((spread, p) for spread in (ALIKE, 1e-2, 3e-2, 1e-1) for p in (2, 15)),
)
BLOCKS = ((1, 1), (64, 64), (64, 32), (32, 32), (16, 16))  # rows x keys of a tile


@dataclass(frozen=True)
class Case:
    mechanism: Mechanism
    backend: str  # of BACKENDS, or PAPER
    length: int
    threads: int = 1
    spread: float | None = RANDOM  # of the keys

    @property
    def backend_name(self) -> str:
        return "eager" if self.backend == PAPER else self.backend

    @property
    def baseline(self) -> "Case":
        """PyTorch's softmax under the same conditions."""
        return Case(MECHANISMS["softmax"], "sdpa", self.length, self.threads)

    def function(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if replace(self, spread=RANDOM) == self.baseline:  # PyTorch's own call, nothing around it
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda q, k, v: attend(q, k, v, self.mechanism, backend=self.backend_name)

    def cannot(self, options: Namespace) -> str | None:
        """Why it does not exist here, whatever the length."""
        if self.backend == PAPER and not self.mechanism.sharpened:
            return "the paper's form of it is the eager one"
        backend = BACKENDS[self.backend_name]
        call = Call(options.device, DTYPES[options.dtype], 1, options.head_dim)
        return backend.refuses(self.mechanism, call) or backend.missing()

    def does_not_fit(self, options: Namespace) -> str | None:
        """Why the memory is too small for the matrices that an eager form holds."""
        need = EAGER_MAPS * 4 * options.batch * options.heads * self.length**2
        free = measure.free_bytes(options.device)
        if self.backend_name == "eager" and need > EAGER_SHARE * free:
            return f"needs about {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free"
        return None


def mechanism_of(name: str, backend: str, p: float) -> Mechanism:
    if not MECHANISMS[name].sharpened:
        return MECHANISMS[name]
    return get_mechanism(name, p=p, numerics="naive" if backend == PAPER else "safe")


@dataclass
class Study:
    """What one command measures, as records."""

    options: Namespace
    runs: dict[str, dict] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, quantity: str, m: Mechanism, value: float, **more) -> None:
        run, settings = mechanism_label(m), {"p": m.p} if m.sharpened else {}
        self.runs.setdefault(run, {"run": run, "attention": {"name": m.name, **settings}})
        self.records.append(Record(quantity, run, value, **more))

    def add_case(self, quantity: str, case: Case, value: float, **details) -> None:
        inputs = self.options.inputs if case.spread is RANDOM else f"keys within {case.spread:g}"
        threads = f"{case.threads} thread{'s' if case.threads > 1 else ''}"
        variant = f"{case.backend}, {inputs}, {threads}"
        self.add(
            quantity, case.mechanism, value, variant=variant, length=case.length, details=details
        )

    def leave_out(self, case: Case, reason: str, where: str = "") -> None:
        line = f"{mechanism_label(case.mechanism)}, {case.backend}{where}: {reason}"
        if line not in self.left_out:
            self.left_out.append(line)

    def add_memory(self, cases: list[Case]) -> list[Case]:
        """The peak of each case in a process of its own; the cases that did not fail."""
        alive = []
        for case in tqdm(cases, desc="memory", leave=False, disable=None):
            warm_up = replace(case, length=WARM_UP_LENGTH)
            try:
                peaks = measure.peak_megabytes(
                    make_steps,
                    *(case, self.options),
                    device=self.options.device,
                    warm_up=(warm_up, self.options),
                )
            except (measure.Crashed, torch.OutOfMemoryError) as error:
                self.leave_out(case, str(error).splitlines()[0], f" at {case.length}")
                continue
            alive.append(case)
            for phase, peak in zip(PHASES, peaks, strict=True):
                self.add_case(f"{phase}_MB", case, peak)
        comparable = [case for case in alive if case.baseline in alive]
        if not comparable:
            raise UserError(f"not even PyTorch's softmax fits at --lengths {cases[0].length}")
        return comparable

    def add_times(self, cases: list[Case]) -> None:
        steps, made, options = {}, {}, self.options
        for case in cases:
            key = case.length, case.spread
            made[key] = made.get(key) or make_inputs(options, *key)
            steps |= {
                (case, phase): step
                for phase, step in zip(PHASES, steps_of(case, made[key]), strict=True)
            }
        seconds = measure.round_seconds(
            steps, device=options.device, rounds=options.rounds, budget=options.budget
        )
        for (case, phase), times in seconds.items():
            time, base = map(statistics.median, (times, seconds[case.baseline, phase]))
            rounds = [1000 * t for t in times]
            self.add_case(f"{phase}_ms", case, 1000 * time, rounds=rounds)
            self.add_case(f"{phase}_ratio", case, time / base)
            alone = seconds.get((replace(case, threads=1), phase))
            if case.threads > 1 and alone:
                speed_ups = [one / several for one, several in zip(alone, times, strict=False)]
                self.add_case(f"{phase}_speed_up", case, statistics.median(speed_ups))


def main(options: Namespace) -> None:
    options.device = options.device or measure.best_device()
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    options.threads = options.threads or torch.get_num_threads()
    fill_shape(options)
    study, results = Study(options), measure.open_results(options)
    STUDIES[options.benchmark](study)
    machine = measure.machine(options.device)
    print(
        f"{machine['name']}, threads {options.threads}, {options.dtype}, {options.inputs} inputs, "
        f"batch {options.batch}, {options.heads} heads of {options.head_dim}; "
        "ratios to F.scaled_dot_product_attention"
    )
    print(study_report.text(study.records, study.left_out))
    if results:
        results.about["left_out"] = study.left_out
        measure.write(results, study.runs, study.records)
        figures = study_report.draw(options.benchmark, study.records, options.out)
        print("\n".join(f"written: {path}" for path in (options.out, *figures)))


def attention(study: Study) -> None:
    """Every mechanism on every backend at every length."""
    study.add_times(study.add_memory(choose(study)))


def choose(study: Study) -> list[Case]:
    """What exists here and fits, PyTorch's softmax first."""
    options, chosen = study.options, []
    backends = options.backends or [*BACKENDS, PAPER]
    for kind, names, known in (
        ("--mechanisms", options.mechanisms, MECHANISMS),
        ("--backends", backends, [*BACKENDS, PAPER]),
    ):
        if unknown := next((n for n in names if n not in known), None):
            raise UserError(f"{kind}: unknown {unknown!r}; {did_you_mean(unknown, known)}")
    pairs = [("softmax", "sdpa"), *((m, b) for m in options.mechanisms for b in backends)]
    for length in options.lengths:
        for name, backend in dict.fromkeys(pairs):
            case = Case(mechanism_of(name, backend, options.p), backend, length, options.threads)
            if reason := case.cannot(options):
                study.leave_out(case, reason)
            elif reason := case.does_not_fit(options):
                study.leave_out(case, reason, f" at {length}")
            else:
                chosen.append(case)
    return chosen


def sparsity(study: Study) -> None:
    """The CPU kernel from few to all entries that count."""
    for length in study.options.lengths:
        cases = [
            kernel(study.options, length, p, spread=spread, threads=study.options.threads)
            for spread, p in SPARSITIES
        ]
        study.add_times([cases[0].baseline, *cases])
        for case in cases:
            q, k, *_ = make_inputs(study.options, length, case.spread)
            study.add_case("counted_share", case, counted_share(q, k, case.mechanism))


def threads(study: Study) -> None:
    """The CPU kernel and PyTorch's softmax with several threads and with one."""
    several = study.options.threads
    if several < 2:
        raise UserError(f"--threads {several}: several are compared with one; give at least 2")
    for length in study.options.lengths:
        cases = [kernel(study.options, length, 15, threads=n) for n in (1, several)]
        study.add_times([*(case.baseline for case in cases), *cases])


def kernel(options: Namespace, length: int, p: float, **more) -> Case:
    case = Case(get_mechanism("lssar", p=p), "cpu", length, **more)
    if reason := case.cannot(options):
        raise UserError(f"the CPU kernel cannot be measured here: {reason}")
    return case


def zero_blocks(study: Study) -> None:
    """The share of LSSAR's weights that are exactly zero, and of whole tiles of them."""
    options, lssar = study.options, MECHANISMS["lssar"]
    least = 2 * max(map(max, BLOCKS))
    for length in options.lengths:
        if length < least:
            raise UserError(
                f"--lengths {length}: no tile of {least // 2} x {least // 2} is "
                f"wholly below the diagonal; give at least {least}"
            )
        for layer in range(1, options.layers + 1):
            q, k, *_ = make_inputs(Namespace(**vars(options) | {"layer": layer}), length)
            key = {"variant": f"layer {layer}, {options.inputs}", "length": length}
            for (rows, keys), share in zip(BLOCKS, zero_shares(q, k), strict=True):
                study.add(f"zero_share_{rows}x{keys}", lssar, share, **key)


STUDIES = {
    "attention": attention,
    "sparsity": sparsity,
    "threads": threads,
    "zero-blocks": zero_blocks,
}


def make_steps(case: Case, options: Namespace) -> list[Step]:
    return steps_of(case, make_inputs(options, case.length, case.spread))


def steps_of(case: Case, inputs: list[Tensor]) -> list[Step]:
    """One call of each phase on q, k, v and the output's gradient."""
    *qkv, grad = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    function = case.function()

    def forward() -> Tensor:
        torch.set_num_threads(case.threads)
        with torch.no_grad():
            return function(*qkv)

    def forward_and_backward() -> tuple[Tensor, ...]:
        torch.set_num_threads(case.threads)
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return [forward, forward_and_backward]


@torch.no_grad()
def counted_share(q: Tensor, k: Tensor, mechanism: Mechanism) -> float:
    """The share of a head's visible entries whose z^(p-1) is at least 2^-24 / N_i.

    The CPU kernel leaves out the others. Their share grows with p; where all keys but one are
    nearly alike most entries count.
    """
    p = mechanism.p
    weights = attention_weights(q[:, :1].double(), k[:, :1].double(), mechanism)
    sharp = (weights / weights.amax(-1, keepdim=True)) ** ((p - 1) / p)
    seen = torch.arange(1, weights.shape[-1] + 1)[:, None]
    counts = (weights > 0) & (sharp >= 2**-24 / seen)
    return (counts.sum() / seen.sum()).item()


@torch.no_grad()
def zero_shares(q: Tensor, k: Tensor) -> list[float]:
    """Of the tiles of each of BLOCKS that lie wholly on visible keys, the share of zeros only."""
    zero, total = Counter(), Counter()
    for head in range(q.shape[1]):
        weights = attention_weights(q[:, head : head + 1], k[:, head : head + 1], "lssar")[0, 0]
        for rows, keys in BLOCKS:
            cut = weights[: len(weights) // rows * rows, : len(weights) // keys * keys]
            tiles = cut.unflatten(0, (-1, rows)).unflatten(-1, (-1, keys))  # (M, rows, N, keys)
            first_row = torch.arange(tiles.shape[0])[:, None] * rows
            last_key = torch.arange(tiles.shape[2]) * keys + keys - 1
            visible = first_row >= last_key
            zero[rows, keys] += ((tiles == 0).all(3).all(1) & visible).sum().item()
            total[rows, keys] += visible.sum().item()
    return [zero[block] / total[block] for block in BLOCKS]
