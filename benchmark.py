"""python benchmark.py NAME [options]: measure one thing and print it."""

import importlib

from errors import UserError, did_you_mean, run

# Name -> module whose `main(argv)` is the benchmark; imported only when asked for.
BENCHMARKS = {
    "attention": "benchmarks.attention",
    "gpu-check": "benchmarks.gpu_check",
    "sparsity": "benchmarks.sparsity",
    "threads": "benchmarks.threads",
    "tokenise": "benchmarks.tokenise",
    "train": "benchmarks.train",
    "zero-blocks": "benchmarks.zero_blocks",
}


def main(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames: {', '.join(BENCHMARKS)}")
        return None if argv else 2
    if argv[0] not in BENCHMARKS:
        raise UserError(f"unknown benchmark {argv[0]!r}; {did_you_mean(argv[0], BENCHMARKS)}")
    return importlib.import_module(BENCHMARKS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    run(main)
