"""python benchmark.py NAME [options]

Measures one thing and prints it.

Nothing is written without --out FILE.json; the figure, where there is one, goes beside that file.
`python benchmark.py NAME --help` lists the options of a benchmark.
"""

import pkgutil
import tomllib
from pathlib import Path

from lssar.errors import UserError, did_you_mean
from support.command import Parser, lengths, number, positive, process_count, run
from support.files import Claim, make_folder

TABLE = tomllib.loads((Path(__file__).parent / "benchmarks/benchmarks.toml").read_text("utf-8"))
OPTIONS = TABLE["options"]
BENCHMARKS = TABLE["benchmarks"]


def names(text: str) -> list[str]:
    """Return the names in "a,b,c", each of them once."""
    return list(dict.fromkeys(text.split(",")))


TYPES = {
    "count": positive,
    "lengths": lengths,
    "names": names,
    "number": number(),
    "path": Path,
    "processes": process_count,
}


def make_parser(name: str) -> Parser:
    """Return the parser of a benchmark's options, as benchmarks.toml describes them."""
    chosen = BENCHMARKS[name]
    parser = Parser(chosen["about"].strip(), prog=f"benchmark.py {name}")
    defaults = chosen["defaults"] | dict.fromkeys(chosen.get("unset", ()))  # unset: None
    for option, default in defaults.items():
        about = {k: TYPES[v] if k == "type" else v for k, v in OPTIONS[option].items()}
        parser.add_argument(f"--{option}", **about, default=default)
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
        if found.table == "cost":
            name = "cost"
            rest = others
    options = make_parser(name).parse_args(rest)
    if out := vars(options).get("out"):  # refuse a file that cannot be written before measuring
        make_folder(out.parent)
        Claim(out)  # dropped at once: the study claims it again
    import torch  # here, as it takes seconds

    if not vars(options).get("device"):
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    measure = pkgutil.resolve_name(f"benchmarks.{BENCHMARKS[name]['function']}")
    threads = torch.get_num_threads()
    torch.set_num_threads(vars(options).get("threads") or threads)
    try:
        return measure(options)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run(main)
