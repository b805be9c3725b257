"""Measures time and memory of attention: `benchmark.py attention|spans`.

All cases of a study take turns in one process. A time is the median of its rounds; a ratio is to
F.scaled_dot_product_attention at the same length and number of threads in the same run. Memory is
the peak of a separate process, inputs and gradients included. Cases that would not fit are left
out, with the reason. `paper` is LSSAR as the paper writes it, eager with the literal x**p.
"""

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.study import Study, run_of
from evaluating.checkpoints import layer_inputs, open_checkpoints
from lssar.backends import BACKENDS, Call, attend
from lssar.errors import UserError, did_you_mean
from lssar.mechanisms import MECHANISMS, Mechanism, get_mechanism
from lssar.spans import shifted_keys
from training.distributed import autocast

PAPER = "paper"
PHASES = ("forward", "forward_backward")
FORMS = BACKENDS | {PAPER: BACKENDS["eager"]}
FUSED = {"cuda": "triton", "cpu": "cpu"}
EAGER_MAPS = 10  # float32 matrices of B x H x L x L that eager forms hold at their peak, measured
EAGER_SHARE = 0.7  # of the free memory
WARM_UP_LENGTH = 64
# The keys that rows see, or the form in which heads and rows are given.
FULL = "full rows"
WINDOW = "window of 128"
DOCUMENTS = "documents of 256"
GROUPED = "4 heads of k and v"
COPIED = "4 heads copied out"
ONE_ROW = "one row at the end"
EIGHT = "one row of each of 8 sequences"  # of different lengths, padded on the left
DECODED = (ONE_ROW, EIGHT)
SPANS = {
    "window": (FULL, WINDOW),
    "documents": (FULL, DOCUMENTS),
    "heads": (COPIED, GROUPED),
    "decode": DECODED,
}


@dataclass(frozen=True)
class Case:
    mechanism: Mechanism
    backend: str  # of FORMS
    length: int
    threads: int = 1
    seen: str = FULL  # or another of SPANS

    def __str__(self) -> str:
        return f"{self.label} at {self.length}"

    @property
    def label(self) -> str:
        """Name the mechanism and the backend."""
        return f"{self.mechanism.title}, {self.backend}"

    @property
    def baseline(self) -> "Case":
        """Return PyTorch's softmax under the same conditions."""
        return Case(MECHANISMS["softmax"], "sdpa", self.length, self.threads)

    @property
    def without_span(self) -> "Case":
        """Return the case to compare with, to see the worth of the span."""
        if self.seen in DECODED:
            return replace(self.baseline, seen=self.seen)
        return replace(self, seen=COPIED if self.seen == GROUPED else FULL)

    def cannot(self, options: Namespace) -> str | None:
        """Return the reason why it does not exist here, whatever the length."""
        if self.backend == PAPER and not self.mechanism.sharpened:
            return "the paper's form of it is the eager one"
        call = Call(options.device, measure.DTYPES[options.dtype], 1, options.head_dim)
        backend = FORMS[self.backend]
        return backend.refuses(self.mechanism, call) or backend.missing()


def mechanism_of(name: str, backend: str, p: float) -> Mechanism:
    """Return a mechanism with the exponent p, in the paper's numerics for the paper's form."""
    if not MECHANISMS[name].sharpened:
        return MECHANISMS[name]
    return get_mechanism(name, p=p, numerics="naive" if backend == PAPER else "safe")


def main(options: Namespace) -> None:
    for option, known in {"mechanisms": MECHANISMS, "backends": FORMS, "spans": SPANS}.items():
        for name in vars(options).get(option) or ():
            if name not in known:
                raise UserError(f"--{option}: unknown {name!r}; {did_you_mean(name, known)}")
    complete_options(options)
    autocast(torch.device(options.device), options.dtype)  # guards against a missing AMX
    study = Study(options)
    STUDIES[options.benchmark](study)
    study.report(
        f"{measure.machine(options.device)['name']}, threads {options.threads}, {options.dtype}, "
        f"{options.inputs} inputs, batch {options.batch}, {options.heads} heads of "
        f"{options.head_dim}; ratios to F.scaled_dot_product_attention"
    )


def attention(study: Study) -> None:
    """Measure mechanisms and backends by length."""
    cases = choose(study)
    found = study.measure_memory(make_steps, cases, warm_up)
    for case, peaks in found.items():
        for phase, peak in zip(PHASES, peaks, strict=True):
            add_case(study, case, f"{phase}_MB", peak)
    comparable = [case for case in found if case.baseline in found]
    if not comparable:
        raise UserError(f"not even PyTorch's softmax fits at --lengths {cases[0].length}")
    add_times(study, comparable)


def choose(study: Study) -> list[Case]:
    """Return the cases that exist here and fit, PyTorch's softmax first."""
    options = study.options
    chosen = []
    left_out = {}  # a dict, to list a reason that holds at every length once
    backends = options.backends or FORMS
    free = measure.free_bytes(options.device)
    pairs = [("softmax", "sdpa"), *((m, b) for m in options.mechanisms for b in backends)]
    for length in options.lengths:
        need = EAGER_MAPS * 4 * options.batch * options.heads * length**2
        for name, backend in dict.fromkeys(pairs):
            case = Case(mechanism_of(name, backend, options.p), backend, length, options.threads)
            if reason := case.cannot(options):
                left_out[f"{case.label}: {reason}"] = None
            elif backend in ("eager", PAPER) and need > EAGER_SHARE * free:
                left_out[f"{case}: needs about {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free"] = (
                    None
                )
            else:
                chosen.append(case)
    study.left_out += left_out
    return chosen


def spans(study: Study) -> None:
    """Measure windows, documents, grouped heads and decoding against full rows."""
    options = study.options
    backend = FUSED[options.device]
    mechanisms = [mechanism_of(name, backend, options.p) for name in options.mechanisms]
    seen = dict.fromkeys(s for name in options.spans for s in SPANS[name])
    for n in options.lengths:
        kernel = [Case(m, backend, n, options.threads, seen=s) for m in mechanisms for s in seen]
        softmax = kernel[0].baseline
        others = [replace(softmax, seen=s) for s in DECODED if s in seen]
        whole = [softmax] if FULL in seen or COPIED in seen else []
        add_times(study, [*whole, *others, *kernel])


STUDIES = {"attention": attention, "spans": spans}


def add_case(study: Study, case: Case, quantity: str, value: float, **details) -> None:
    """Add a record of a case."""
    inputs = study.options.inputs
    variant = f"{case.backend}, {inputs}, {case.threads} thread{'s' if case.threads > 1 else ''}"
    if case.seen != FULL:
        variant += f", {case.seen}"
    study.add(
        run_of(case.mechanism),
        quantity,
        value,
        variant=variant,
        length=case.length,
        details=details,
    )


def add_times(study: Study, cases: list[Case]) -> None:
    """Time the cases in turns, and add times and ratios."""
    options = study.options
    steps = {}
    inputs = cache(partial(make_inputs, options))
    for case in cases:
        if reason := case.cannot(options):
            raise UserError(f"{case} cannot be measured here: {reason}")
        made = steps_of(case, inputs(case.length))
        steps |= {(case, phase): step for phase, step in zip(PHASES, made, strict=True)}
    seconds = measure.round_seconds(steps, options.device, options.rounds, options.budget)
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    for (case, phase), time in medians.items():
        times = seconds[case, phase]
        add_case(study, case, f"{phase}_ms", 1000 * time, rounds=[1000 * t for t in times])
        if (case.baseline, phase) in medians:
            add_case(study, case, f"{phase}_ratio", time / medians[case.baseline, phase])
        if case.seen not in (FULL, COPIED):
            add_case(study, case, f"{phase}_share", time / medians[case.without_span, phase])


def warm_up(case: Case, options: Namespace) -> None:
    """Run a case once at a short length."""
    for step in make_steps(replace(case, length=WARM_UP_LENGTH), options):
        step()


def make_steps(case: Case, options: Namespace) -> list[measure.Step]:
    """Return one call of each phase, on new inputs."""
    return steps_of(case, make_inputs(options, case.length))


def steps_of(case: Case, inputs: list[Tensor], own: Callable | None = None) -> list[measure.Step]:
    """Return one call of each phase on q, k, v and the output's gradient.

    `own` is a function of q, k and v to measure in place of `attend`.
    """
    q, k, v, grad = inputs
    mechanism = case.mechanism
    first = None
    if case.seen == WINDOW:
        mechanism = replace(mechanism, window=128)
    elif case.seen == DOCUMENTS:
        first = torch.arange(case.length, device=q.device) // 256 * 256
    elif case.seen in DECODED:
        q, grad = q[:, :, -1:], grad[:, :, -1:]
        if case.seen == EIGHT:
            q, k, v, grad = (x[:1].repeat(8, 1, 1, 1) for x in (q, k, v, grad))
            first = torch.arange(8, device=q.device)[:, None] * case.length // 16
    elif case.seen in (GROUPED, COPIED):
        k, v = k[:, :4], v[:, :4]
    backend = "eager" if case.backend == PAPER else case.backend
    call = own or partial(attend, mechanism=mechanism, backend=backend, first=first)
    if own is None and replace(case, seen=FULL) == case.baseline:
        # PyTorch's function itself, without `attend` around it.
        call = partial(F.scaled_dot_product_attention, is_causal=case.seen == FULL)
        if case.seen == EIGHT:
            visible = torch.arange(case.length, device=q.device) >= first
            call = partial(call, attn_mask=visible[:, None, None])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.set_num_threads(case.threads)
        if case.seen == COPIED:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return call(q, k, v)

    return [
        torch.no_grad()(lambda: function(q, k, v)),
        lambda: torch.autograd.grad(function(*leaves), leaves, grad),
    ]


def complete_options(options: Namespace) -> None:
    """Fill in missing options from this machine and the checkpoint that --inputs names."""
    for name in ("heads", "head_dim", "layer", "text", "threads"):  # not every study offers them
        vars(options).setdefault(name)
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    options.threads = options.threads or torch.get_num_threads()
    options.layers = 1
    options.checkpoint = None
    if options.inputs == "random":
        if options.layer or options.text:
            raise UserError("--layer and --text are for a checkpoint; add --inputs RUN")
        options.heads = options.heads or 12
        options.head_dim = options.head_dim or 64
        return
    if options.heads or options.head_dim:
        raise UserError(f"--heads and --head-dim are those of --inputs {options.inputs}; drop them")
    (checkpoint,) = open_checkpoints([options.inputs])
    config = checkpoint.config
    options.heads = config.heads
    options.head_dim = config.head_dim
    options.layers = config.layers
    options.checkpoint = checkpoint.identity
    options.layer = options.layer or config.layers
    if options.layer > config.layers:
        raise UserError(
            f"--layer {options.layer}: {options.inputs} has layers 1 to {config.layers}"
        )


def make_inputs(options: Namespace, length: int) -> list[Tensor]:
    """Return q, k, v and a gradient of the output, each (B, H, L, d), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.heads, length, options.head_dim)
    drawn = (torch.randn(shape, generator=generator) for _ in range(3))
    q, k, v = drawn if options.inputs == "random" else trained_inputs(options, length)
    grad = torch.randn(shape, generator=generator)
    return [x.to(options.device, measure.DTYPES[options.dtype]) for x in (q, k, v, grad)]


@torch.no_grad()
def trained_inputs(options: Namespace, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of a checkpoint's layer for the first tokens of a text, cut into rows."""
    (checkpoint,) = open_checkpoints([options.inputs])
    path = options.text or Path(argparse.__file__)
    try:
        tokens = checkpoint.tokeniser().encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: cannot be read as text ({error})") from None
    if len(tokens) == 0:
        raise UserError(f"--text {path} is empty")
    tokens = torch.from_numpy(np.resize(tokens, (options.batch, length)).astype("int64"))
    model = checkpoint.load(torch.device("cpu"))
    attention, x, rope, first = layer_inputs(model, tokens, options.layer - 1)
    q, k, v = attention.queries_keys_values(x, rope)
    return q, shifted_keys(k, first) if attention.shift else k, v
