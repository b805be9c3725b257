"""python benchmark.py NAME [options]: measure one thing and print it.

Nothing is written without --out FILE.json; the figure, where there is one, goes beside that file.
`python benchmark.py NAME --help` lists the options of a benchmark.
"""

import importlib
import tomllib
from pathlib import Path

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


FOLDER = Path(__file__).parent / "benchmarks"
BENCHMARKS = tomllib.loads((FOLDER / "benchmarks.toml").read_text(encoding="utf-8"))


def make_parser(name: str) -> Parser:
    chosen = BENCHMARKS[name]
    parser = Parser(chosen["about"].strip(), prog=f"benchmark.py {name}")
    for option, default in (chosen["defaults"] | dict.fromkeys(chosen.get("unset", ()))).items():
        parser.add_argument(f"--{option}", **OPTIONS[option], default=default)
    parser.set_defaults(benchmark=name, **chosen.get("fixed", {}))
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

    module, function = BENCHMARKS[name]["function"].split(".")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    threads = torch.get_num_threads()
    torch.set_num_threads(vars(options).get("threads") or threads)
    try:
        return measure(options)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run(main)
