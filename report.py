"""python report.py results/ --out site/

One page of everything in a folder of results: the claims, every table with the paper's value, the
measured one, their difference and a verdict, figures, runs. SITE/index.html needs no network and
no server; the JSON that its numbers link to is copied to SITE/data. What cannot be read is named
on the page. The same results give the same bytes.
"""

if __name__ == "__main__":
    from errors import quiet_imports

    quiet_imports()

from pathlib import Path

from errors import Parser, UserError, run
from files import write_text, writing
from reporting.library import DATA, Library
from reporting.page import page

PAPER = Path(__file__).parent / "paper.json"
INDEX = "index.html"
OURS = '<meta name="generator" content="report.py">'


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder of results, read with all below it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    args = parser.parse_args(argv)
    check_out(args.out, args.results)
    library = Library(args.results, PAPER)
    write_site(args.out, page(library), library.copies)
    tables = sum(len(scale.tables) for scale in library.scales.values())
    unread = f", could not be read: {len(library.problems)}" if library.problems else ""
    print(f"{args.out / INDEX}: {tables} tables, {len(library.copies)} JSON files{unread}")


def check_out(out: Path, results: Path) -> None:
    """Write into a new or empty folder or over an earlier page, never into anything else."""
    if out.resolve().is_relative_to(results.resolve()):
        raise UserError(f"--out {out} is inside {results}, where it would be read as a result")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not is_ours(out / INDEX):
        raise UserError(f"--out {out} holds other things than a report; give a new folder")


def is_ours(index: Path) -> bool:
    return index.is_file() and OURS in index.read_text(encoding="utf-8", errors="replace")


def write_site(out: Path, text: str, copies: dict[str, str]) -> None:
    """The data first and the page last, so that a page never links to what is not there yet."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in copies.items():
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_if_new(target, content)
        write_if_new(out / INDEX, text)
        remove_stale(out, copies)


def write_if_new(target: Path, text: str) -> None:
    if not target.is_file() or target.read_bytes() != text.encode():
        write_text(target, text)


def remove_stale(out: Path, copies: dict[str, str]) -> None:
    """Copies of results that are gone; deepest first, so that emptied folders go with them."""
    for path in sorted((out / DATA).rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.suffix == ".json" and path.relative_to(out).as_posix() not in copies:
            path.unlink()


if __name__ == "__main__":
    run(main)
