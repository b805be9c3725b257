"""The paper's table of costs: `python benchmark.py attention --table cost --out results/cost.json`.

A GPT-2 of 124M at batch 4 and length 1024: a training step (forward, backward, clip, AdamW) and a
forward pass to the loss without gradients, in milliseconds and peak megabytes, for the eager forms
that the paper measured and for the fused ones, the paper's numbers beside. bf16 autocast on a GPU
(the eager attention itself computes in float32), fp32 on a CPU, where --batch and --length make it
bearable. One model with one optimiser serves all, as no mechanism here has parameters.
"""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import measure
from benchmarks.measure import Step
from evaluating.checkpoints import mechanism_label
from evaluating.results import Record
from lssar.backends import BACKENDS, Call, choose_backend
from lssar.errors import UserError
from lssar.mechanisms import Mechanism, get_mechanism
from model import GPT, PRESETS, preset
from support import plots
from support.files import read_text
from support.text import table
from training.distributed import autocast

PAPER_TABLE = "tab:comp_analysis"
COLUMNS = ("train_ms", "train_MB", "eval_ms", "eval_MB")
HEADER = ["train ms", "train MB", "eval ms", "eval MB"]


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    mechanism: Mechanism
    backend: str
    in_paper: bool

    def __str__(self) -> str:
        return f"{mechanism_label(self.mechanism)}, {self.backend}"


Measured = dict[Entry, dict[str, float]]  # COLUMNS of each line


def paper_table(label: str) -> dict:
    """One table of the paper, as numbers."""
    path = Path(__file__).parent.parent / "paper/paper.json"
    return json.loads(read_text(path))[label]


def main(options: Namespace) -> int:
    paper = paper_table(PAPER_TABLE)
    setting = paper["setting"]
    for key in ("preset", "batch", "length"):
        vars(options)[key] = getattr(options, key) or setting[key]
    options.device = options.device or measure.best_device()
    preset(options.preset)  # raises for an unknown one
    results = measure.open_results(options)
    entries = table_entries(options, setting["p"])
    memory, left_out = measure_memory(entries, options)
    measured = measure_times(memory, options)
    print(text(measured, left_out, options, paper))
    if results is not None:
        results.about["left_out"] = left_out
        measure.write(results, *as_records(measured, options))
        for path in (options.out, *draw(measured, paper, options.out)):
            print(f"written: {path}")
    return 0


def as_records(measured: Measured, options: Namespace) -> tuple[dict[str, dict], list[Record]]:
    """A run per mechanism, a variant per backend."""
    runs, records = {}, []
    for entry, values in measured.items():
        mechanism = entry.mechanism
        model = {"preset": options.preset, "attention": {"name": mechanism.name}}
        if mechanism.sharpened:
            model["attention"]["p"] = mechanism.p
        runs[mechanism.name] = {"run": mechanism.name, "model": model}
        place = {"variant": entry.backend, "length": options.length}
        tokens, details = options.batch * options.length, {"numerics": mechanism.numerics}
        records += [
            Record(quantity, mechanism.name, value, tokens=tokens, details=details, **place)
            for quantity, value in values.items()
        ]
    return runs, records


def table_entries(options: Namespace, p: float) -> list[Entry]:
    """The paper's three lines, then the fastest backend and the portable one of each mechanism."""
    plain = [get_mechanism("softmax"), get_mechanism("lssa")]
    entries = [Entry(m, "eager", True) for m in plain]
    entries.append(Entry(get_mechanism("lssar", p=p, numerics="naive"), "eager", True))
    shape = PRESETS[options.preset]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    head_dim = shape["width"] // shape["heads"]
    # The choice for a long sequence: a short one may prefer eager, which is in the table already.
    call = Call(options.device, dtype, 2**40, head_dim)
    for mechanism in [*plain, get_mechanism("lssar", p=p)]:
        fastest = choose_backend(mechanism, call)
        entries += [Entry(mechanism, b, False) for b in dict.fromkeys((fastest, "rowblock"))]
    assert all(BACKENDS[e.backend].refuses(e.mechanism, call) is None for e in entries)
    return entries


def measure_memory(entries: list[Entry], options: Namespace) -> tuple[dict, list[str]]:
    memory, left_out = {}, []
    for entry in tqdm(entries, desc="memory", leave=False, disable=None):
        try:
            (evaluation,) = measure.peak_megabytes(
                make_steps, entry, options, ("eval",), device=options.device
            )
            (training,) = measure.peak_megabytes(
                make_steps, entry, options, ("train",), device=options.device
            )
            memory[entry] = {"train": training, "eval": evaluation}
        except (measure.Crashed, torch.OutOfMemoryError) as error:
            left_out.append(f"{entry}: {str(error).splitlines()[0]}")
    if not memory:
        raise UserError(
            f"nothing fits at --batch {options.batch} --length {options.length}; make them smaller"
        )
    return memory, left_out


def measure_times(memory: dict, options: Namespace) -> Measured:
    model_and_step = Workbench(options)
    steps = {
        (entry, phase): model_and_step.step(entry, phase)
        for entry in memory
        for phase in ("train", "eval")
    }
    seconds = measure.median_seconds(
        steps, device=options.device, rounds=options.rounds, budget=options.budget
    )
    return {
        entry: {
            "train_ms": 1000 * seconds[entry, "train"],
            "train_MB": megabytes["train"],
            "eval_ms": 1000 * seconds[entry, "eval"],
            "eval_MB": megabytes["eval"],
        }
        for entry, megabytes in memory.items()
    }


def make_steps(entry: Entry, options: Namespace, phases: tuple[str, ...]) -> list[Step]:
    bench = Workbench(options)
    return [bench.step(entry, phase) for phase in phases]


class Workbench:
    """A model, its optimiser and a batch of random tokens, for any entry of the table."""

    def __init__(self, options: Namespace):
        self.device = options.device
        vocabulary = PRESETS[options.preset]["vocab_size"]
        shape = (options.batch, options.length + 1)
        with torch.random.fork_rng([0] if self.device == "cuda" else []):
            torch.manual_seed(0)
            self.model = GPT(preset(options.preset)).to(self.device)
            tokens = torch.randint(vocabulary, shape, device=self.device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameter_groups(0.1), lr=6e-4, betas=(0.9, 0.95), fused=True
        )
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self, entry: Entry, phase: str) -> Step:
        def loss() -> torch.Tensor:
            self.model.configure(attention=entry.mechanism).use_backend(entry.backend)
            with autocast(torch.device(self.device), "auto"):
                return self.model(self.inputs, self.targets)

        def evaluate() -> None:
            with torch.no_grad():
                loss()

        def train() -> None:
            loss().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)

        return {"train": train, "eval": evaluate}[phase]


def published(entry: Entry, paper: dict) -> dict[str, float] | None:
    if not entry.in_paper:
        return None
    return dict(zip(paper["columns"], paper["rows"][entry.mechanism.name], strict=True))


def text(measured: Measured, left_out: list[str], options: Namespace, paper: dict) -> str:
    """The paper's layout; time and memory also relative to the first line, eager softmax."""
    machine, setting = measure.machine(options.device), paper["setting"]
    first = next(iter(measured))

    def cells(values: dict | None, base: dict) -> list[str]:
        if values is None:
            return [""] * len(COLUMNS)
        return [f"{values[c]:.2f} ({values[c] / base[c]:.2f}x)" for c in COLUMNS]

    lines = [
        [
            str(entry),
            *cells(values, measured[first]),
            *cells(published(entry, paper), published(first, paper)),
        ]
        for entry, values in measured.items()
    ]
    title = (
        f"GPT-2 {options.preset}, batch {options.batch} x {options.length}, "
        f"{machine['name']}, {machine['threads']} threads, "
        f"{'bf16 autocast' if machine['device'] == 'cuda' else 'fp32'}; paper: "
        f"{setting['device']}, batch {setting['batch']} x {setting['length']}, "
        f"{setting['dtype']}; in brackets relative to the first line"
    )
    header = ["", *HEADER, *(f"paper: {name}" for name in HEADER)]
    return "\n".join([title, table(header, lines), *(f"left out: {line}" for line in left_out)])


def draw(measured: Measured, paper: dict, out: Path) -> list[Path]:
    """One bar per line, eager softmax as the unit; a dot where the paper has a number."""
    entries = list(measured)
    figure, panels = plots.figure(1, 4, width=plots.PAGE, height=2.2, sharey=True)
    for axes, column, title in zip(panels, COLUMNS, HEADER, strict=True):
        unit, unit_of_paper = measured[entries[0]], published(entries[0], paper)
        for place, entry in enumerate(entries):
            colour = plots.style(entry.mechanism.name)["color"]
            alpha = 0.55 if entry.backend == "eager" else 1
            axes.barh(place, measured[entry][column] / unit[column], color=colour, alpha=alpha)
        numbers = [(i, published(e, paper)) for i, e in enumerate(entries) if e.in_paper]
        axes.plot(
            [values[column] / unit_of_paper[column] for _, values in numbers],
            [i for i, _ in numbers],
            **{"color": plots.INK, "marker": "X", "linestyle": "none", "markersize": 4},
            label="the paper",
        )
        axes.set(title=f"{title} / eager softmax", xlim=(0, None))
    panels[0].set_yticks(range(len(entries)), map(str, entries))
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right")
    return plots.save(figure, out.with_suffix(".png"))
