"""A built report page, read by Python's own HTML parser."""

from html.parser import HTMLParser
from pathlib import Path

import report_results as made

import report

GOOD_ROW = made.row("softmax", [3.1], [made.cell(1.5)])


class Page(HTMLParser):
    """A page as a list of (tag, attributes, text inside), read by Python's own parser."""

    VOID = ("meta", "link", "img", "br", "hr")

    def __init__(self, site: Path):
        super().__init__()
        self.elements, self._open = [], []
        self.source = (site / "index.html").read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **wanted):
        found = [e for e in self.elements if e["tag"] == tag]
        return [e for e in found if all(e.get(k) == v for k, v in wanted.items())]

    def rows(self):
        """Text of the cells of every table row, by the row's own header."""
        names, rows = [e["text"] for e in self.all("th", scope="row")], []
        for element in self.elements:
            if element["tag"] == "tr":
                rows.append([])
            elif element["tag"] in ("td", "th") and rows:
                rows[-1].append(element["text"])
        assert len(names) <= len(rows)
        return rows


def build(results: Path, out: Path) -> Page:
    report.main([str(results), "--out", str(out)])
    return Page(out)


def one_table(tmp_path, **fields) -> Path:
    row = made.row("softmax", [3.1], [made.cell(1.5)])
    made.write(tmp_path / "results/nano/t.json", made.table("t", ["1K"], [row], **fields))
    return tmp_path / "results"


def hrefs(page: Page) -> list[str]:
    return [e["href"] for e in page.all("a") if "href" in e]


def problems(page: Page) -> str:
    return next((e["text"] for e in page.all("section", id="unread")), "")
