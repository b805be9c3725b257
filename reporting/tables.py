"""Tables of the page: a result with its paper value, gap and verdict, each number with its link."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reporting.library import Library
from reporting.markup import Html, join, tag
from reporting.records import Cell, Row, Table
from reporting.verdicts import BAD, GOOD, NOISE, OPEN, PAPER_SCALE, Verdict, judge, signed

MARKS = {GOOD: "✓", BAD: "✗", NOISE: "≈", OPEN: ""}
NOTHING = Html("–")


def chip(kind: str, label: str) -> Html:
    """A verdict: colour, sign and words, so that none of them is needed alone."""
    mark = MARKS[kind] and tag("span", MARKS[kind], " ", aria_hidden="true")
    return tag("span", mark, label, class_=f"chip {kind}")


def link(shown, href: str | None, **attributes) -> Html:
    """A number and the file it comes from; without a file, the number alone."""
    return tag("a" if href else "span", shown, href=href, class_="num", **attributes)


def td(content, sort=None, **attributes) -> Html:
    """`sort` is what the column is sorted by; a cell without it goes last."""
    return tag("td", content, data_sort=sort, **attributes)


def sortable(
    label: str,
    head: Iterable[str],
    rows: Iterable[Sequence[Html]],
    kind: str = "",
    unsorted: Sequence[str] = (),
) -> Html:
    """A table in a box of its own that scrolls, by keyboard too; the page itself never does."""
    header = join(
        *(
            tag("th", title, scope="col", aria_sort=None if title in unsorted else "none")
            for title in head
        )
    )
    table = tag(
        "table",
        tag("thead", tag("tr", header)),
        tag("tbody", *(tag("tr", *row) for row in rows)),
        class_=f"sortable {kind}".strip(),
    )
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def plain(value: float | None) -> Html | str:
    """A number as its file prints it, with thousands."""
    if value is None:
        return NOTHING
    return f"{value:,}" if abs(value) < 1e15 else f"{value:.4g}"


def decimals_of(table: Table, column: int) -> int:
    """As the paper prints this column; where it does not, enough for the numbers' size."""
    printed = [repr(v) for row in table.rows if (v := row.paper[column]) is not None]
    measured = [c.mean for row in table.rows if (c := row.measured[column]) and c.mean is not None]
    if printed:
        found = max((len(p.partition(".")[2]) for p in printed if "e" not in p), default=0)
        return min(max(found, 0 if all(m == int(m) for m in measured) else 1), 4)
    largest = max(map(abs, measured), default=0)
    return 0 if all(m == int(m) for m in measured) else 4 if largest < 10 else 2


@dataclass(frozen=True)
class Parts:
    """What one cell of a result says."""

    measured: Html
    seeds: Html | None
    mean: float | None
    paper: Html
    paper_value: float | None
    difference: Html | None
    verdict: Verdict


def parts(library: Library, table: Table, row: Row, column: int, decimals: int) -> Parts:
    verdict = judge(table, row, column)
    cell, own = row.measured[column], library.link(table.path)
    sources = [(s, library.link(s)) for s in cell.sources] if cell else []
    only = sources[0][1] if len(sources) == 1 else None
    origin = (library.paper_link if table.label in library.paper else None) or own
    paper = row.paper[column]
    return Parts(
        measured=measured_number(cell, only or own, decimals),
        seeds=seeds_of(cell, sources),
        mean=cell and cell.mean,
        paper=NOTHING if paper is None else link(plain(paper), origin),
        paper_value=paper,
        difference=difference(verdict, own, decimals),
        verdict=verdict,
    )


def measured_number(cell: Cell | None, href: str | None, decimals: int) -> Html:
    if cell is None:
        return NOTHING
    shown = "not finite" if cell.mean is None else fixed(cell.mean, decimals)
    spread = f" ± {fixed(cell.sd, decimals)}" if cell.sd is not None and cell.n > 1 else None
    return join(
        tag("b", link(shown, href, title=cell.mean)),
        tag("span", spread, class_="sd") if spread else None,
    )


def seeds_of(cell: Cell | None, sources: list[tuple[str, str | None]]) -> Html | None:
    """How many seeds, and a link to each one's file."""
    if cell is None:
        return None
    links = [
        link(str(i + 1), href, title=seed_title(cell, i, source), aria_label=f"seed {i + 1}")
        for i, (source, href) in enumerate(sources)
        if len(sources) > 1
    ]
    listed = join(" [", *spaced(links), "]") if links else None
    return tag("span", f"n={cell.n}", listed, class_="seeds")


def seed_title(cell: Cell, index: int, source: str) -> str:
    return f"{cell.values[index]} · {source}" if index < len(cell.values) else source


def spaced(items: list[Html]) -> list:
    return [part for i, item in enumerate(items) for part in (" " if i else "", item)]


def fixed(value: float, decimals: int) -> str:
    if abs(value) >= 1e9:
        return f"{value:.4g}"
    return f"{value:,.{decimals}f}".replace("-", "−")


def difference(verdict: Verdict, own: str | None, decimals: int) -> Html | None:
    if verdict.difference is None:
        return None
    shown = link(signed(verdict.difference, decimals), own)
    if verdict.paper_difference is None:
        return shown
    theirs = tag("span", f" (paper {signed(verdict.paper_difference, decimals)})", class_="theirs")
    return join(shown, theirs)


def row_title(row: Row) -> Html:
    failed = row.status.startswith("failed")
    partly = row.status == "missing" and any(row.measured)
    shown = "some seeds missing" if partly else row.status
    status = chip(BAD if failed else OPEN, shown) if row.status != "done" else None
    control = chip(OPEN, "control") if row.control else None
    name = tag("span", row.title, class_="name")
    return tag("th", name, control, status, scope="row", data_sort=row.title)


def shown_verdict(row: Row, found: Parts) -> Html | None:
    """Nothing where the row's name has said it: not run, or not a row of the paper."""
    verdict = found.verdict
    if verdict.kind != OPEN:
        return chip(verdict.kind, verdict.text)
    if (found.mean is None and row.status != "done") or all(v is None for v in row.paper):
        return None
    return tag("span", verdict.text, class_="small")


def gap_name(table: Table) -> str:
    if table.scale == PAPER_SCALE:
        return "Measured − paper"
    baseline = table.baseline_row()
    return f"Gap to {baseline.title}" if baseline else "Gap"


def result_table(library: Library, table: Table) -> Html:
    """One column has its parts side by side; several have them stacked, a cell each."""
    decimals = [decimals_of(table, i) for i in range(len(table.columns))]
    found = [
        [parts(library, table, row, i, d) for i, d in enumerate(decimals)] for row in table.rows
    ]
    titles = [column.title for column in table.columns]
    if len(titles) == 1:
        head = ["Run", "Paper", f"Measured: {titles[0]}", gap_name(table), "Verdict"]
        rows = [side_by_side(row, cells[0]) for row, cells in zip(table.rows, found, strict=True)]
    else:
        head = ["Run", *titles]
        rows = [stacked(row, cells) for row, cells in zip(table.rows, found, strict=True)]
    return sortable(table.title, head, rows, "results" if len(titles) == 1 else "results stacked")


def side_by_side(row: Row, cell: Parts) -> list[Html]:
    return [
        row_title(row),
        td(cell.paper, cell.paper_value),
        td(join(cell.measured, " ", cell.seeds), cell.mean),
        td(cell.difference or NOTHING, cell.verdict.difference),
        td(shown_verdict(row, cell) or NOTHING, cell.verdict.text),
    ]


def stacked(row: Row, cells: list[Parts]) -> list[Html]:
    return [row_title(row), *(td(stack(row, cell), cell.mean) for cell in cells)]


def stack(row: Row, cell: Parts) -> Html:
    lines = [
        cell.measured,
        join("paper ", cell.paper) if cell.paper_value is not None else None,
        join("Δ ", cell.difference) if cell.difference else None,
    ]
    if cell.seeds:
        lines[1] = join(lines[1], " · " if lines[1] else None, cell.seeds)
    verdict = shown_verdict(row, cell)
    return join(
        *(tag("div", line, class_="small" if i else None) for i, line in enumerate(lines) if line),
        tag("div", verdict) if verdict else None,
    )
