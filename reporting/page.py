"""The report as one HTML page: claims first, then every table of every scale, runs, the rest."""

import base64
import hashlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from string import Template

from reporting.chart import can_be_drawn, chart, headline_rows
from reporting.library import Figure, Library, Scale
from reporting.markup import Html, each, join, tag
from reporting.records import Claim, Table
from reporting.runs import runs_table
from reporting.tables import NOTHING, chip, gap_name, plain, result_table, sortable, td
from reporting.verdicts import BAD, GOOD, NOISE, OPEN, PAPER_SCALE, judge

HERE = Path(__file__).parent
SCALES = {
    PAPER_SCALE: ("Paper scale", "The paper's models, data and schedules: numbers are compared."),
    "nano": (
        "Nano scale",
        "Small models, trained in minutes on a CPU on another data set. Their losses cannot be "
        "held against the paper's, so what is compared is the direction against a baseline.",
    ),
}
HEADLINE = "tab:softmaxfreeatt"  # the table that the figure at the top shows
CLAIM_KINDS = {"holds": GOOD, "does not hold": BAD, "cannot be seen at this scale": NOISE}
NONE_YET = "There are no tables in this folder of results yet."


def page(library: Library) -> str:
    scales = ordered(library)
    sections = [
        ("claims", "Claims", claims(library, scales)),
        ("verdicts", "Verdicts", rules(scales)),
        *((anchor("scale", s.name), title_of(s), tables_and_runs(library, s)) for s in scales),
        ("more", "More results", others(library)),
        ("unread", "Could not be read", problems(library)),
    ]
    sections = [found for found in sections if found[2]]
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        style=style,
        style_hash=source_hash(style),
        script=script,
        script_hash=source_hash(script),
        nav=join(*(tag("a", title, href=f"#{name}") for name, title, _ in sections)),
        summary=join(*(summary(s) for s in scales)) or tag("p", NONE_YET),
        body=join(headline(library, scales), *(section(*found) for found in sections)),
    )


def source_hash(source: str) -> str:
    """What the page's policy allows to run: exactly this text, and nothing that a result says."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def ordered(library: Library) -> list[Scale]:
    """Scales from the paper's down, tables in the order of the paper's; no two titles alike."""
    first, labels = list(SCALES), list(library.paper)

    def place(name: str, known: list[str]) -> tuple[int, str]:
        return known.index(name) if name in known else len(known), name

    for scale in library.scales.values():
        titles = Counter(table.title for table in scale.tables)
        scale.tables[:] = [
            replace(t, title=f"{t.title} ({t.name})") if titles[t.title] > 1 else t
            for t in sorted(scale.tables, key=lambda t: (place(t.label, labels), t.path))
        ]
    return sorted(library.scales.values(), key=lambda scale: place(scale.name, first))


def title_of(scale: Scale) -> str:
    return SCALES[scale.name][0] if scale.name in SCALES else f"Scale {scale.name}"


def anchor(kind: str, name: str) -> str:
    """An id of letters and digits; a name that has others keeps its own by a checksum."""
    plain_name = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    if plain_name != name:
        plain_name += "-" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{kind}-{plain_name}"


def section(name: str, title: str, body: Html) -> Html:
    return tag("section", tag("h2", title), body, id=name)


# --- the top -------------------------------------------------------------------------------------


def summary(scale: Scale) -> Html:
    claims = Counter(c.verdict for c in scale.claims)
    runs = Counter(r.status.partition(":")[0] for found in scale.runs.values() for r in found)
    states = {"done": GOOD, "failed": BAD}
    cards = [
        card("claims", [(CLAIM_KINDS.get(v, OPEN), v, n) for v, n in sorted(claims.items())]),
        card("comparisons with the paper", tally(scale.tables)),
        card("training runs", [(states.get(s, OPEN), s, n) for s, n in sorted(runs.items())]),
    ]
    return tag(
        "div", tag("h2", title_of(scale)), tag("div", *cards, class_="cards"), class_="scale"
    )


def tally(tables: list[Table]) -> list[tuple[str, str, int]]:
    """(kind, verdict, count) over all cells that could be judged."""
    found = Counter()
    for table in tables:
        for row in table.rows:
            for column in range(len(table.columns)):
                verdict = judge(table, row, column)
                if verdict.kind != OPEN:
                    found[verdict.kind, verdict.text.partition(" by ")[0]] += 1
    order = [GOOD, NOISE, BAD]
    kinds = sorted(found, key=lambda key: (order.index(key[0]), key[1]))
    return [(*key, found[key]) for key in kinds]


def card(title: str, counts: list[tuple[str, str, int]]) -> Html | None:
    if not counts:
        return None
    order = [GOOD, NOISE, BAD, OPEN]
    counts = sorted(counts, key=lambda count: order.index(count[0]))
    total = tag("p", tag("b", f"{sum(n for *_, n in counts):,}"), f" {title}", class_="total")
    chips = each("li", [count_chip(*count) for count in counts])
    return tag("div", total, tag("ul", chips), class_="card")


def count_chip(kind: str, label: str, count: int) -> Html:
    return chip(kind, join(label, " ", tag("b", f"{count:,}")))


def headline(library: Library, scales: list[Scale]) -> Html | None:
    tables = [t for scale in scales for t in scale.tables if can_be_drawn(t)]
    if not tables:
        return None
    table = next((t for t in tables if t.label == HEADLINE), tables[0])
    rows = headline_rows(table)
    seeds = sorted({cell.n for row in rows for cell in row.measured if cell})
    count = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed"
    count += "s" if len(seeds) == 1 and seeds[0] > 1 else ""
    spread = ", bars one standard deviation" if seeds[-1] > 1 else ""
    dashed = (
        "Dashed: controls that the paper does not have. " if any(r.control for r in rows) else ""
    )
    own_axes = "Each panel has its own axis: compare shapes, not heights. "
    axes = "" if table.scale == PAPER_SCALE else own_axes
    caption = tag(
        "figcaption",
        tag("b", f"{table.title.rstrip('.')}. "),
        f"The paper's numbers and the same rows measured at {table.scale} scale, mean of "
        f"{count}{spread}. {dashed}{axes}",
        tag("a", "All rows", href=f"#{anchor('table', table.path)}"),
        " · ",
        tag("a", "JSON", href=library.link(table.path)),
    )
    unit = library.paper_unit(table.label) or table.unit
    drawing = chart(table, unit, common_axis=table.scale == PAPER_SCALE)
    return tag("figure", drawing, caption, class_="headline", id="headline")


def claims(library: Library, scales: list[Scale]) -> Html | None:
    found = [s for s in scales if s.claims]
    return join(
        *(
            join(
                tag("h3", title_of(s)) if len(found) > 1 else None,
                claims_table(library, s),
            )
            for s in found
        )
    )


def claims_table(library: Library, scale: Scale) -> Html:
    rows = [
        [
            tag("th", c.claim, scope="row", data_sort=c.claim),
            td(chip(CLAIM_KINDS.get(c.verdict, OPEN), c.verdict), c.verdict),
            td(c.paper or NOTHING, c.paper),
            td(c.measured or NOTHING, c.measured),
            td(evidence(library, scale, c)),
        ]
        for c in scale.claims
    ]
    head = ["Claim", "Verdict", "In the paper", f"At {scale.name} scale", "Evidence"]
    return sortable(f"Claims, {title_of(scale)}", head, rows, "claims", unsorted=["Evidence"])


def evidence(library: Library, scale: Scale, claim: Claim) -> Html:
    """Where on the page, and in which file."""
    tables = {library.link(t.path): t for t in scale.tables}
    items = []
    for source in claim.sources:
        href, name = library.link(source), PurePosixPath(source).stem
        if href in tables and href is not None:
            shown = tag("a", name, href=f"#{anchor('table', tables[href].path)}")
            items.append(join(shown, " (", tag("a", "JSON", href=href), ")"))
        else:
            items.append(tag("a", name, href=href) if href else tag("span", name))
    return tag("ul", each("li", items), class_="plain") if items else NOTHING


def rules(scales: list[Scale]) -> Html | None:
    """The rules of `verdicts.py` in words, for the scales that are shown."""
    if not any(s.tables for s in scales):
        return None
    absolute = [title_of(s) for s in scales if s.name == PAPER_SCALE]
    directional = [title_of(s) for s in scales if s.name != PAPER_SCALE]
    return tag(
        "ul",
        tag(
            "li",
            tag("b", f"{absolute[0]}. "),
            chip(GOOD, "reproduced"),
            " where measured and paper differ by no more than the table's tolerance, else ",
            chip(BAD, "differs"),
            " with the difference.",
        )
        if absolute
        else None,
        tag(
            "li",
            tag("b", f"{', '.join(directional)}. "),
            "A row's gap to the baseline row of the same column, measured and in the paper: ",
            chip(GOOD, "same direction"),
            ", ",
            chip(BAD, "opposite direction"),
            ", or ",
            chip(NOISE, "within noise"),
            " where either gap is smaller than its noise. Measured gaps have a noise of two "
            "standard errors over seeds; a single seed, as all of the paper's numbers are, has the "
            "noise that the table states.",
        )
        if directional
        else None,
        tag(
            "li",
            "Measured numbers are mean ± standard deviation over n seeds. The number links to its "
            "table's JSON, the figures in brackets to each seed's.",
        ),
        class_="rules",
    )


# --- a scale -------------------------------------------------------------------------------------


def tables_and_runs(library: Library, scale: Scale) -> Html:
    about = SCALES[scale.name][1] if scale.name in SCALES else None
    return join(
        tag("p", about) if about else None,
        contents(scale) if len(scale.tables) > 1 else None,
        *(table_section(library, table) for table in scale.tables),
        *(runs_section(library, scale, path) for path in sorted(scale.runs)),
    )


def contents(scale: Scale) -> Html:
    items = []
    for table in scale.tables:
        open_rows = sum(row.status != "done" for row in table.rows)
        counts = [count_chip(*count) for count in tally([table])]
        counts += [count_chip(OPEN, "rows not complete", open_rows)] if open_rows else []
        name = tag("a", table.title, href=f"#{anchor('table', table.path)}")
        items.append(join(name, tag("span", *counts, class_="counts")))
    items += [tag("a", "Runs", href=f"#{anchor('runs', path)}") for path in sorted(scale.runs)]
    return tag("ul", each("li", items), class_="contents")


def table_section(library: Library, table: Table) -> Html:
    return tag(
        "section",
        tag("h3", table.title),
        tag("p", about_table(library, table), class_="about"),
        result_table(library, table) if table.rows else tag("p", "Nothing measured yet."),
        tag("ul", each("li", table.notes), class_="notes") if table.notes else None,
        figures(library.figures_of(table.path, table.figures), table.title),
        tag("p", "Reproduce: ", tag("code", table.command), class_="command")
        if table.command
        else None,
        id=anchor("table", table.path),
    )


def about_table(library: Library, table: Table) -> Html:
    facts = [tag("code", table.label)]
    if table.unit:
        better = f", {table.better} is better" if table.better else ""
        facts.append(f"{table.unit}{better}")
    if len(table.columns) > 1 and (table.baseline or table.scale == PAPER_SCALE):
        facts.append(f"Δ: {gap_name(table)}")
    printed = [v for row in table.rows for v in row.paper if v is not None]
    if table.rows and not printed:
        facts.append("the paper prints no number of this")
    elif printed and table.scale != PAPER_SCALE:
        facts.append(f"noise of one seed {noises(table)}")
    elif printed and table.tolerance is not None:
        facts.append(f"tolerance ±{plain(table.tolerance)}")
    facts.append(tag("a", "JSON", href=library.link(table.path)))
    return join(*(join(" · " if i else "", fact) for i, fact in enumerate(facts)))


def noises(table: Table) -> str:
    """One number, or the range over the columns."""
    found = sorted({f"{table.noise_of(i):.2g}" for i in range(len(table.columns))}, key=float)
    return " to ".join(dict.fromkeys([found[0], found[-1]]))


def figures(found: list[Figure], title: str) -> Html | None:
    return tag("div", *(figure(f, title) for f in found), class_="figures") if found else None


def figure(found: Figure, title: str) -> Html:
    # Figures are drawn at twice the pixels of a page and more.
    image = tag(
        "img",
        src=f"data:image/png;base64,{base64.b64encode(found.png).decode()}",
        alt=f"Figure: {title}",
        width=found.width // 2,
        height=found.height // 2,
    )
    return tag("figure", image, tag("figcaption", title))


def runs_section(library: Library, scale: Scale, path: str) -> Html:
    table = runs_table(scale.runs[path], library.link(path), f"Runs, {title_of(scale)}")
    return tag("section", tag("h3", "Runs"), table, id=anchor("runs", path))


# --- the rest ------------------------------------------------------------------------------------


def cited(library: Library) -> set[str | None]:
    """Links of the files that stand behind a number of a table."""
    return {
        library.link(source)
        for scale in library.scales.values()
        for table in scale.tables
        for row in table.rows
        for cell in row.measured
        if cell is not None
        for source in cell.sources
    }


def others(library: Library) -> Html | None:
    """Results without a table of their own: the file, and the figure beside it."""
    shown = cited(library)
    items = []
    for path, kind in library.others.items():
        if (href := library.link(path)) in shown:
            continue
        name = join(tag("a", path, href=href), f" · {kind}" if kind else "")
        items.append(join(name, figures(library.figures_of(path), path.removesuffix(".json"))))
    return tag("ul", each("li", items), class_="others") if items else None


def problems(library: Library) -> Html | None:
    lost = sorted(
        {
            (table.path, f"it names a source that is not there: {source}")
            for scale in library.scales.values()
            for table in scale.tables
            for row in table.rows
            for cell in row.measured
            if cell is not None
            for source in cell.sources
            if library.link(source) is None
        }
    )
    items = [join(tag("code", path), f": {why}") for path, why in [*library.problems, *lost]]
    return tag("ul", each("li", items), class_="problems") if items else None
