"""Tables in README and docs that the records write: `python report.py results/ --write FILE`.

    <!-- results nano far: softmax, lssar-p15; 1, 16, context_gain -->
    <!-- end -->

Between the two lines stand the named rows and columns of a table (paper/tables.toml), with the
seeds, the command and the commits they are of. A column is a length in training lengths, a quantity
or a task, as in paper/claims.toml; or a quantity at a length: `accuracy_by_distance@8`.
"""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from lssar.errors import UserError, did_you_mean
from paper.claims import places
from paper.evidence import Entry, Evidence, Sheet
from paper.experiments import SCALES
from paper.statistic import signed
from support.files import read_text, reading, write_text, writing

BLOCK = re.compile(r"(<!-- results (\S+) (\S+): (.+?); (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_tables(path: Path, results: Path) -> int:
    """Fill the tables of a file; returns how many it has."""
    with reading(path):
        given = read_text(path)
    text, count = filled(given, results)
    if not count:
        mark = "<!-- results nano headline: softmax; 1, 16 -->"
        raise UserError(f"{path} has no table to fill; put {mark!r} and '<!-- end -->' into it")
    with writing(path):
        write_text(path, text)
    return count


def filled(text: str, results: Path) -> tuple[str, int]:
    evidence = cache(lambda scale: Evidence(scale, results / scale))

    def block(match: re.Match) -> str:
        begin, scale, name, rows, columns, end = match.groups()
        if match[0].count("<!-- results ") > 1:  # else what stands between would be lost
            raise UserError(f"the table that {begin.strip()} begins has no '<!-- end -->'")
        known(scale, SCALES, "scale")
        known(name, evidence(scale).tables, "table")
        sheet = evidence(scale).sheet(evidence(scale).tables[name])
        return f"{begin}\n{markdown(sheet, rows.split(', '), columns.split(', '))}\n\n{end}"

    return BLOCK.subn(block, text)


def known(name: str, names, what: str) -> None:
    if name not in names:
        raise UserError(f"unknown {what} {name!r} of a table; {did_you_mean(name, names)}")


def markdown(sheet: Sheet, rows: list[str], columns: list[str]) -> str:
    lines, named = {line.row.key: line for line in sheet.lines}, defaultdict(list)
    for i, (column, _) in enumerate(sheet.columns):
        names = {f"{column.quantity}@{column.factor:g}"} if column.factor is not None else set()
        for name in names | places(column):
            named[name].append(i)
    for name in rows:
        known(name, [row.key for row in sheet.table.rows], f"row of {sheet.table.name}")
    for name in columns:
        known(name, named, f"column of {sheet.table.name}")
        if len(named[name]) > 1:
            several = f"{len(named[name])} columns of {sheet.table.name} are called {name!r}"
            raise UserError(f"{several}; say at which length: QUANTITY@LENGTH")
    chosen = [named[name][0] for name in columns]
    table = [["", *(sheet.columns[i][1] for i in chosen), "seeds"], ["---"] * (len(chosen) + 2)]
    for key in rows:  # a control without a number has no line
        entries = [lines[key].entries[i] for i in chosen] if key in lines else []
        cells = [shown(entry) for entry in entries] or [""] * len(chosen)
        seeds = min((entry.cell.n for entry in entries if entry.cell.n), default="not measured")
        table.append([sheet.table.row(key).title, *cells, str(seeds)])
    cells = [(sheet.table.row(key), sheet.columns[i][0]) for key in rows for i in chosen]
    records = [m.record for cell in cells for m in sheet.measured(*cell).values()]
    commits = sorted({record.revision[:7] or "no commit" for record in records})
    source = f"`python reproduce.py {sheet.table.name}` at {', '.join(commits) or 'no commit yet'}"
    losses = any(column.quantity == "loss" for _, column in cells)
    unit = f"{sheet.unit[:1].upper()}{sheet.unit[1:]}, mean" if losses else "Mean"
    caption = f"*{unit} ± standard deviation over seeds ({source}).*"
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in table), "", caption])


def shown(entry: Entry) -> str:
    """The mean, with its sign where it is a difference, and the spread."""
    gain = "gain" in entry.column.quantity and entry.cell.mean is not None
    text = signed(entry.cell.mean, entry.decimals).lstrip("±") if gain else entry.text
    text += " %" if entry.column.percent and text else ""
    return f"{text} {entry.spread}".strip()
