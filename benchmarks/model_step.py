"""Measures the time and memory of a model.

    python benchmark.py train
    python benchmark.py attention --table cost

A training step is forward, backward, clip and AdamW on random tokens. All contestants take turns in
one process and times are medians; memory is the peak of a separate process above what it had before
the model was made. `train` gives each mechanism a model of its own, and nanoGPT its own optimiser
settings. `cost` is the paper's table with its numbers beside ours: a training step and a forward
pass to the loss without gradients, in the eager forms that the paper measured and the fused ones,
under bf16 autocast on a GPU (eager attention itself computes in float32), in fp32 on a CPU. One
model serves all of its lines, as no mechanism in it has parameters.
"""

import json
import runpy
import statistics
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import measure
from benchmarks.attention_study import Case
from benchmarks.study import Study, run_of
from lssar.backends import Call, choose_backend
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from model import GPT, PRESETS, preset
from support import plots
from support.files import read_text
from support.text import table
from training.distributed import autocast
from training.optimiser import parameter_groups

NANOGPT = "nanoGPT"
PAPER = Path(__file__).parent.parent / "paper/paper.json"
PHASES = ("eval", "train")  # in the order of the memory they need
COLUMNS = ("train_ms", "train_MB", "eval_ms", "eval_MB")  # as in the paper's table
HEADER = [name.replace("_", " ") for name in COLUMNS]


class Workbench:
    """Holds a model, its optimiser and a batch of random tokens."""

    def __init__(self, options: Namespace, attention: str = "softmax", precision: str = "auto"):
        self.device = torch.device(options.device)
        self.precision = precision
        with torch.random.fork_rng([0] if options.device == "cuda" else []):
            torch.manual_seed(0)
            if attention == NANOGPT:
                self.model = nanogpt(options).to(self.device)
                make_optimiser = self.model.configure_optimizers
                self.optimiser = make_optimiser(0.1, 6e-4, (0.9, 0.95), options.device)
            else:
                self.model = GPT(preset(options.preset, attention)).to(self.device)
                groups = parameter_groups(self.model, 0.1)
                self.optimiser = torch.optim.AdamW(groups, 6e-4, (0.9, 0.95), fused=True)
            shape = options.batch, options.length + 1
            tokens = torch.randint(preset(options.preset).vocab_size, shape, device=self.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self) -> torch.Tensor:
        with autocast(self.device, self.precision):
            found = self.model(self.inputs, self.targets)
        return found[1] if isinstance(found, tuple) else found  # nanoGPT: logits and loss

    def train(self) -> None:
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    eval = torch.no_grad()(loss)

    def run(self, line: Case, phase: str) -> None:
        self.model.configure(attention=line.mechanism).use_backend(line.backend)
        getattr(self, phase)()


def train(options: Namespace) -> None:
    names = ([NANOGPT] if options.nanogpt else []) + options.attention
    steps = {name: make_steps(name, options)[0] for name in names}
    study = Study(options)
    seconds = measure.round_seconds(steps, options.device, options.rounds)
    memory = study.measure_memory(make_steps, names)
    for name in names:
        time, first = (statistics.median(seconds[n]) for n in (name, names[0]))
        add = partial(study.add, {"run": name}, variant=options.preset, length=options.length)
        add("step_ms", 1000 * time, details={"rounds": [1000 * t for t in seconds[name]]})
        add("tokens_per_s", options.batch * options.length / time)
        add("step_ratio", time / first)
        for peak in memory.get(name, []):
            add("step_MB", peak)
    size = f"{options.preset}, batch {options.batch} x {options.length} tokens"
    where = f"{options.device}, {torch.get_num_threads()} threads"
    study.report(f"{size}, {where}, median of {options.rounds}; ratios to {names[0]}")
    if options.profile:
        for name in names:
            print(f"\n{name}: {operator_shares(steps[name])}")


def operator_shares(step: measure.Step) -> str:
    """Return the operators that take 1 % of a step or more, with their shares of its time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return ", ".join(f"{key} {time / total:.0%}" for key, time in largest if time > total / 100)


def make_steps(name: str, options: Namespace) -> list[measure.Step]:
    bench = Workbench(options, name, "bf16" if options.bf16 else "fp32")
    if name != NANOGPT:
        bench.model.use_backend(options.backend)
    if options.compile:
        bench.model.compile()
    return [bench.train]


def nanogpt(options: Namespace) -> torch.nn.Module:
    """Return the model of a nanoGPT checkout at the preset's shape."""
    file = options.nanogpt / "model.py"
    if not file.is_file():
        raise UserError(f"--nanogpt {options.nanogpt}: no model.py there; give a nanoGPT checkout")
    module = SimpleNamespace(**runpy.run_path(str(file)))
    shape = PRESETS[options.preset]
    sizes = {"n_layer": shape["layers"], "n_head": shape["heads"], "n_embd": shape["width"]}
    sizes |= {"vocab_size": shape["vocab_rows"], "block_size": options.length}
    return module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=True))


def cost(options: Namespace) -> None:
    paper = json.loads(read_text(PAPER))["tab:comp_analysis"]
    setting = paper["setting"]
    for key in ("preset", "batch", "length"):
        vars(options)[key] = getattr(options, key) or setting[key]
    lines = table_lines(options, setting["p"])
    study = Study(options)
    measured = measure_lines(study, lines)
    rows = paper["rows"]
    published = {line: rows[line.mechanism.name] for line in measured if line.backend == "eager"}
    machine = measure.machine(options.device)
    products = "bf16 autocast" if options.device == "cuda" else "fp32"
    ours = f"GPT-2 {options.preset}, batch {options.batch} x {options.length}, {machine['name']}"
    ours += f", {machine['threads']} threads, {products}"
    theirs = "{device}, batch {batch} x {length}, {dtype}".format(**setting)
    header = f"{ours}; paper: {theirs}; in brackets relative to the first line"
    study.report(header, cost_table(measured, published), partial(draw, measured, published))


def table_lines(options: Namespace, p: float) -> list[Case]:
    """List the paper's three lines, then each mechanism's fastest and portable backend."""
    plain = [get_mechanism("softmax"), get_mechanism("lssa")]
    literal = get_mechanism("lssar", p=p, numerics="naive")
    lines = [Case(mechanism, "eager", options.length) for mechanism in (*plain, literal)]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    # The choice for a long sequence: a short one may prefer eager, which is in the table already.
    call = Call(options.device, dtype, 2**40, preset(options.preset).head_dim)
    for mechanism in (*plain, get_mechanism("lssar", p=p)):
        backends = dict.fromkeys((choose_backend(mechanism, call), "rowblock"))
        lines += [Case(mechanism, backend, options.length) for backend in backends]
    return lines


def measure_lines(study: Study, lines: list[Case]) -> dict[Case, list[float]]:
    """Return COLUMNS of every line that fits."""
    options = study.options
    memory = study.measure_memory(line_steps, lines)
    size = {"length": options.length, "tokens": options.batch * options.length}
    if not memory:
        given = f"--batch {options.batch} --length {options.length}"
        raise UserError(f"nothing fits at {given}; make them smaller")
    bench = Workbench(options)
    measured = {}
    steps = {(line, phase): partial(bench.run, line, phase) for line in memory for phase in PHASES}
    seconds = measure.round_seconds(steps, options.device, options.rounds, options.budget)
    for line, (eval_peak, train_peak) in memory.items():
        eval_ms, train_ms = (1000 * statistics.median(seconds[line, phase]) for phase in PHASES)
        measured[line] = [train_ms, train_peak, eval_ms, eval_peak]
        m = line.mechanism
        model = {"preset": options.preset, "attention": run_of(m)["attention"]}
        run = {"run": m.name, "model": model}
        more = {"variant": line.backend, **size, "details": {"numerics": m.numerics}}
        for quantity, value in zip(COLUMNS, measured[line], strict=True):
            study.add(run, quantity, value, **more)
    return measured


def line_steps(line: Case, options: Namespace) -> list[measure.Step]:
    bench = Workbench(options)
    return [partial(bench.run, line, phase) for phase in PHASES]


def cost_table(measured: dict, published: dict) -> str:
    """Return the table as the paper lays it out; numbers also relative to eager softmax."""
    first = next(iter(measured))

    def cells(values: dict, line: Case) -> list[str]:
        if line not in values:
            return [""] * len(COLUMNS)
        pairs = zip(values[line], values[first], strict=True)
        return [f"{value:.2f} ({value / unit:.2f}x)" for value, unit in pairs]

    rows = [[line.label, *cells(measured, line), *cells(published, line)] for line in measured]
    return table(["", *HEADER, *(f"paper: {name}" for name in HEADER)], rows)


def draw(measured: dict, published: dict, out: Path) -> list[Path]:
    """Draw a bar for each line, in units of eager softmax; a cross is the paper's number."""
    lines = list(measured)
    figure, panels = plots.figure(1, 4, width=plots.PAGE, height=2.2, sharey=True)
    for i, (axes, title) in enumerate(zip(panels, HEADER, strict=True)):
        for place, line in enumerate(lines):
            value = measured[line][i] / measured[lines[0]][i]
            colour = plots.style(line.mechanism.name)["color"]
            axes.barh(place, value, color=colour, alpha=0.55 if line in published else 1)
        crosses = [values[i] / published[lines[0]][i] for values in published.values()]
        look = {"color": plots.INK, "marker": "X", "linestyle": "none", "markersize": 4}
        axes.plot(crosses, [lines.index(line) for line in published], **look, label="the paper")
        axes.set(title=f"{title} / eager softmax", xlim=(0, None))
    panels[0].set_yticks(range(len(lines)), [line.label for line in lines])
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right")
    return plots.save(figure, out.with_suffix(".png"))
