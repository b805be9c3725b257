"""python benchmark.py attention --table cost --out results/cost.json: the paper's table of costs.

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

import plots
from attention import BACKENDS, Call, Mechanism, choose_backend, get_mechanism
from benchmarks import measure
from benchmarks.measure import Step
from errors import Parser, UserError, number, positive, process_count
from evaluation import mechanism_label, table
from files import finite, write_json
from model import GPT, PRESETS, preset

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


def paper_table(label: str) -> dict:
    """One table of the paper, as numbers."""
    path = Path(__file__).parent.parent / "paper.json"
    return json.loads(path.read_text(encoding="utf-8"))[label]


def main(argv: list[str]) -> int:
    paper = paper_table(PAPER_TABLE)
    setting = paper["setting"]
    parser = Parser(__doc__)
    parser.add_argument("--preset", default=setting["preset"], choices=tuple(PRESETS))
    parser.add_argument("--batch", type=positive, default=setting["batch"])
    parser.add_argument("--length", type=positive, default=setting["length"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=measure.best_device())
    parser.add_argument("--threads", type=process_count, help="of the CPU; default all")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--budget", type=number(), default=60, help="most seconds for one number")
    parser.add_argument("--out", type=Path, default=Path("results/cost.json"))
    options = parser.parse_args(argv)
    measure.check_writable(options.out)
    with measure.threads(options.threads):
        entries = table_entries(options, setting["p"])
        memory, skipped = measure_memory(entries, options)
        rows = measure_times(memory, options, paper)
        machine = measure.machine(options.device)
    result = finite(
        {
            "kind": "cost",
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "machine": machine,
            "rows": rows,
            "paper": paper,
            "skipped": skipped,
        }
    )
    print(text(result))
    write_json(options.out, result)
    for path in (options.out, *draw(result, options.out)):
        print(f"written: {path}")
    return 0


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


def measure_memory(entries: list[Entry], options: Namespace) -> tuple[dict, list[dict]]:
    memory, skipped = {}, []
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
            skipped.append({"name": str(entry), "reason": str(error).splitlines()[0]})
    if not memory:
        raise UserError(
            f"nothing fits at --batch {options.batch} --length {options.length}; make them smaller"
        )
    return memory, skipped


def measure_times(memory: dict, options: Namespace, paper: dict) -> list[dict]:
    model_and_step = Workbench(options)
    steps = {
        (entry, phase): model_and_step.step(entry, phase)
        for entry in memory
        for phase in ("train", "eval")
    }
    seconds = measure.median_seconds(
        steps, device=options.device, rounds=options.rounds, budget=options.budget
    )
    rows = []
    for entry, megabytes in memory.items():
        values = {
            "train_ms": 1000 * seconds[entry, "train"],
            "train_MB": megabytes["train"],
            "eval_ms": 1000 * seconds[entry, "eval"],
            "eval_MB": megabytes["eval"],
        }
        published = paper["rows"][entry.mechanism.name] if entry.in_paper else None
        rows.append(
            {
                "name": str(entry),
                "mechanism": entry.mechanism.name,
                "backend": entry.backend,
                **values,
                "paper": published and dict(zip(paper["columns"], published, strict=True)),
            }
        )
    return rows


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
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
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


def text(result: dict) -> str:
    """The paper's layout; time and memory also relative to the first line, eager softmax."""
    settings, machine, paper = result["settings"], result["machine"], result["paper"]["setting"]
    first = result["rows"][0]
    header = ["", *HEADER, *(f"paper: {name}" for name in HEADER)]
    lines, published_first = [], first["paper"]
    for row in result["rows"]:
        cells = [f"{row[c]:.2f} ({row[c] / first[c]:.2f}x)" for c in COLUMNS]
        published = row["paper"]
        cells += [
            f"{published[c]:.2f} ({published[c] / published_first[c]:.2f}x)" if published else ""
            for c in COLUMNS
        ]
        lines.append([row["name"], *cells])
    title = (
        f"GPT-2 {settings['preset']}, batch {settings['batch']} x {settings['length']}, "
        f"{machine['name']}, {machine['threads']} threads, "
        f"{'bf16 autocast' if machine['device'] == 'cuda' else 'fp32'}; paper: "
        f"{paper['device']}, batch {paper['batch']} x {paper['length']}, {paper['dtype']}; "
        "in brackets relative to the first line"
    )
    notes = [f"left out: {s['name']}: {s['reason']}" for s in result["skipped"]]
    return "\n".join([title, table(header, lines), *notes])


def draw(result: dict, out: Path) -> list[Path]:
    """A bar a line of the table, eager softmax as the unit; a dot where the paper has a number."""
    rows, first = result["rows"], result["rows"][0]
    figure, panels = plots.figure(1, 4, width=plots.PAGE, height=2.2, sharey=True)
    for axes, column, title in zip(panels, COLUMNS, HEADER, strict=True):
        colours = [plots.COLOURS[0 if row["backend"] == "eager" else 1] for row in rows]
        axes.barh(range(len(rows)), [row[column] / first[column] for row in rows], color=colours)
        published = [(i, row["paper"]) for i, row in enumerate(rows) if row["paper"]]
        axes.plot(
            [paper[column] / published[0][1][column] for _, paper in published],
            [i for i, _ in published],
            **plots.line(6) | {"linestyle": "none", "markersize": 4},
            label="the paper",
        )
        axes.set(title=f"{title} / eager softmax", xlim=(0, None))
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right")
    return plots.save(figure, out.with_suffix(".png"))
