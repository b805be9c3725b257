"""python benchmark.py NAME [options]: measure one thing and print it.

Nothing is written without --out FILE.json; the figure, where there is one, goes beside that file.
`python benchmark.py NAME --help` lists the options of a benchmark.
"""

import importlib
from pathlib import Path
from typing import NamedTuple

from lssar.errors import UserError, did_you_mean
from support.command import Parser, lengths, number, positive, process_count, run


def names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


OPTIONS = {
    "attention": {"type": names, "help": "mechanisms, separated by commas"},
    "backend": {"help": "sdpa, triton, cpu, rowblock or eager"},
    "backends": {"type": names, "help": "sdpa,triton,cpu,rowblock,eager,paper; default all"},
    "batch": {"type": positive},
    "bf16": {"action": "store_true", "help": "autocast to bfloat16"},
    "budget": {"type": number(), "help": "at most this many seconds per number"},
    "compile": {"action": "store_true"},
    "device": {"choices": ("cpu", "cuda"), "help": "default: a GPU if there is one"},
    "dtype": {"choices": ("fp32", "bf16", "fp16"), "help": "default bf16 on a GPU, else fp32"},
    "first": {"action": "store_true", "help": "only the first configuration of each"},
    "head-dim": {"type": positive, "help": "default 64, or the checkpoint's; compile: 64 and 128"},
    "heads": {"type": positive, "help": "default 12, or the checkpoint's"},
    "inputs": {"metavar": "random|RUN", "help": "random q, k, v, or those of a trained layer"},
    "layer": {"type": positive, "help": "of the checkpoint, from 1; default the last"},
    "length": {"type": positive},
    "lengths": {"type": lengths},
    "mechanisms": {"type": names},
    "megabytes": {"type": number(most=1e6)},
    "nanogpt": {"type": Path, "help": "a nanoGPT checkout to compare with"},
    "out": {"type": Path, "help": "write the numbers to this JSON file"},
    "p": {"type": number(), "help": "the sharpening exponent"},
    "preset": {"help": "a size of model.py"},
    "quick": {"action": "store_true", "help": "a sample of each kind of check"},
    "rounds": {"type": positive},
    "table": {"choices": ("length", "cost"), "help": "cost: see --table cost --help"},
    "text": {"type": Path, "help": "a text file for RUN; default a Python module's source"},
    "threads": {"type": process_count, "help": "CPU threads; default all"},
    "workers": {"type": process_count, "help": "processes"},
}


class Benchmark(NamedTuple):
    function: str  # of a module of benchmarks/, imported only when asked for
    about: str
    options: dict  # name -> default
    fixed: dict | None = None  # settings of others that this one does not offer


CPU_CALL = {"batch": 1, "heads": None, "head_dim": None, "layer": None}
CPU_CALL |= {"device": "cpu", "dtype": "fp32"}
KERNEL = CPU_CALL | {"inputs": "random", "text": None, "budget": float("inf")}
BENCHMARKS = {
    "attention": Benchmark(
        "attention_study.main",
        "Time and memory of every backend and mechanism against the length, beside PyTorch's "
        "softmax.",
        {"table": "length", "lengths": [512, 1024, 2048, 4096], "backends": None, "p": 15}
        | {"mechanisms": ["softmax", "lssa", "lssar"], "batch": 1, "heads": None, "head-dim": None}
        | {"inputs": "random", "layer": None, "text": None, "dtype": None, "device": None}
        | {"threads": None, "rounds": 15, "budget": 8, "out": None},
    ),
    "compile": Benchmark(
        "triton_compile.main",
        "Compile the Triton kernels for A100 and H100 without a GPU and list what ptxas says.",
        {"first": False, "head-dim": None, "workers": 1, "out": None},
    ),
    "cost": Benchmark(
        "model_step.cost",
        "The paper's table of costs: a training step and a forward pass of eager and fused forms. "
        "The defaults are the paper's; on a CPU, give a smaller --batch and --length.",
        {"preset": None, "batch": None, "length": None, "device": None}
        | {"threads": None, "rounds": 10, "budget": 60, "out": None},
    ),
    "gpu-check": Benchmark(
        "gpu_check.main",
        "Does everything work on this device? To be run first on a new GPU: every backend "
        "against float64, the model, training under torchrun, speed. Exits with 1 on a failure.",
        {"device": None, "quick": False, "out": None},
    ),
    "spans": Benchmark(
        "attention_study.main",
        "The fused CPU kernel with windows, packed documents and shared heads beside the same "
        "without them, and decoding beside PyTorch's softmax.",
        {"lengths": [2048], "mechanisms": ["softmax", "lssa", "lssar"], "p": 15, "threads": None}
        | {"rounds": 7, "out": None},
        fixed=KERNEL,
    ),
    "sparsity": Benchmark(
        "attention_study.main",
        "The fused CPU kernel beside PyTorch's softmax from few to all entries that count.",
        {"lengths": [1024, 4096], "threads": None, "rounds": 5, "out": None},
        fixed=KERNEL,
    ),
    "threads": Benchmark(
        "attention_study.main",
        "The fused CPU kernel and PyTorch's softmax: several threads against one.",
        {"lengths": [1024, 4096], "threads": None, "rounds": 9, "out": None},
        fixed=KERNEL,
    ),
    "tokenise": Benchmark(
        "tokenise.main",
        "Tokens per CPU-second: the usual way of llm.c and nanoGPT, ours, ours with splintr.",
        {"megabytes": 30.0, "workers": 2},
    ),
    "train": Benchmark(
        "model_step.train",
        "The cost of a training step: forward, backward, clip and AdamW on random tokens.",
        {"preset": "nano", "attention": ["softmax", "lssar"], "backend": "auto", "batch": 4}
        | {"length": 128, "rounds": 10, "bf16": False, "compile": False, "nanogpt": None}
        | {"out": None},
    ),
    "zero-blocks": Benchmark(
        "attention_study.main",
        "Would skipping zeros pay? The share of LSSAR's weights that are exactly zero, and of "
        "whole tiles: a kernel can skip one only if every row of it looks at none of its keys.",
        {"inputs": "random", "lengths": [1024], "text": None, "out": None},
        fixed=CPU_CALL | {"threads": None},
    ),
}


def make_parser(name: str) -> Parser:
    chosen = BENCHMARKS[name]
    parser = Parser(chosen.about, prog=f"benchmark.py {name}")
    for option, default in chosen.options.items():
        parser.add_argument(f"--{option}", **OPTIONS[option], default=default)
    parser.set_defaults(benchmark=name, **(chosen.fixed or {}))
    return parser


def main(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames: {', '.join(BENCHMARKS)}")
        return None if argv else 2
    name, *rest = argv
    if name not in BENCHMARKS:
        raise UserError(f"unknown benchmark {name!r}; {did_you_mean(name, BENCHMARKS)}")
    if name == "attention":
        table = Parser(add_help=False)
        table.add_argument("--table")
        found, others = table.parse_known_args(rest)
        name, rest = ("cost", others) if found.table == "cost" else (name, rest)
    options = make_parser(name).parse_args(rest)
    import torch  # here, as it takes seconds

    module, function = BENCHMARKS[name].function.split(".")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    threads = torch.get_num_threads()
    torch.set_num_threads(vars(options).get("threads") or threads)
    try:
        return measure(options)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run(main)
