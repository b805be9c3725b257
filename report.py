"""python report.py results/ --out site/
python report.py results/ --write README.md docs/far_context.md
python report.py results/x.json

Turns a folder of results into one page: what was found, every claim with its verdict, every table
with the paper's value beside the measured one, figures, runs. SITE/index.html needs no server and
no network; its figures are stored beside it, and its numbers link to the results files. Files that
cannot be read are named on the page. The same results give the same bytes.

With --write, the marked tables in these files are filled with the results (paper/documents.py).
Given one results file, prints its numbers as a table.
"""

from pathlib import Path

from lssar.errors import UserError
from paper.experiments import SCALES
from support.command import Parser, run

INDEX = "index.html"
FIGURES = "figures"  # folder of the page's figures
OURS = '<meta name="generator" content="report.py">'


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder of results, or one results file")
    parser.add_argument("--out", type=Path, help="folder of the page")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FILE", help="files with tables")
    args = parser.parse_args(argv)
    if args.results.is_file():
        print(file_table(args.results))
    elif not args.results.is_dir():
        raise UserError(f"{args.results} is not there; give the folder of results, or a file of it")
    elif args.write:
        from paper.documents import write_tables

        for path in args.write:
            print(f"{path}: {write_tables(path, args.results)} tables")
    elif args.out is None:
        raise UserError("--out SITE is missing: the folder of the page, for example --out site/")
    else:
        check_out(args.out, args.results)
        write_site(args.results, args.out)


def file_table(path: Path) -> str:
    """The records of one file: one line per run, variant and task, one column per length."""
    from evaluating.results import read_results
    from support.text import short_number, table

    results = read_results(path)
    if results.kind == "extrapolation":
        from evaluating.extrapolation_report import short_table

        return short_table(results)
    parts = []
    for quantity in dict.fromkeys(r.quantity for r in results.records):
        cells: dict[tuple, dict[int | None, str]] = {}
        for r in results.select(quantity=quantity):
            name = ", ".join(filter(None, (results.runs[r.run]["run"], r.variant, r.task)))
            value = "overflow" if r.value is None else f"{r.value:.4g}"
            cells.setdefault((r.run, name), {})[r.length] = value
        lengths = sorted({n for row in cells.values() for n in row}, key=lambda n: n or 0)
        header = [quantity, *(short_number(n) if n else "" for n in lengths)]
        rows = [[name, *(row.get(n, "") for n in lengths)] for (_, name), row in cells.items()]
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def check_out(out: Path, results: Path) -> None:
    """Accept a new or empty folder or an earlier page, nothing else."""
    if out.resolve().is_relative_to(results.resolve()):
        raise UserError(f"--out {out} is inside {results}, where it would be read as a result")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    index, folder = out / INDEX, out / FIGURES
    ours = index.is_file() and OURS in index.read_text(encoding="utf-8", errors="replace")
    # An interrupted first run leaves nothing but figures.
    figures = {path for scale in SCALES for path in folder.glob(f"{scale}-*.svg")}
    unfinished = {*out.rglob("*")} <= {folder, *figures} and not folder.is_file()
    if not (ours or unfinished):
        raise UserError(f"--out {out} holds other things than a report; give a new folder")


def write_site(results: Path, out: Path) -> None:
    """Write the figures first and the page last, so that it never shows a missing figure."""
    from paper.page import Page
    from support.files import write_text, writing

    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        page = Page(results, out, FIGURES)
        write_text(out / INDEX, page.html())
        for path in (out / FIGURES).glob("*.svg"):
            if f"{FIGURES}/{path.name}" not in page.figures:
                path.unlink()
    unread = f", could not be read: {len(page.problems)}" if page.problems else ""
    print(f"{out / INDEX}: {len(page.figures)} tables with figures{unread}")


if __name__ == "__main__":
    run(main)
