"""A built report page, read by Python's own HTML parser."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import report_results as made

import report


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
        """Text of the cells of every table row."""
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


def one_run(tmp_path, key: str = "exp") -> Path:
    """Results of one run; that of "exp" is in one table, without a baseline to draw it against."""
    made.losses(tmp_path / "results/nano", key, 0, {("as trained", 128): 1.5})
    return tmp_path / "results"


def hrefs(page: Page) -> list[str]:
    return [e["href"] for e in page.all("a") if "href" in e]


def problems(page: Page) -> str:
    return next((e["text"] for e in page.all("section", id="unread")), "")


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></textarea><svg onload=alert(1)>",
    "$style ${script} %s {0}",
    "\ud800 lone \x00 nul \u202e reversed",
    "x" * 5000,
)


def hostile_results(root: Path, text: str) -> Path:
    """Every string of every record is the hostile one, and so are names of files and folders."""
    strings = dict.fromkeys(("variant", "task", "command", "revision"), text)
    records = [made.record("loss", 1.5, length=128), made.record("loss", 1.5, **strings)]
    records.append(made.record(text, 1.5, details={text: [text]}))
    law = made.record("constant", 1.0, details={"equations": [{"equation": text}]})
    made.results(root / "nano/extrapolation/a.json", "softmax-s0", 0, records, attention=text)
    made.results(root / "nano/extrapolation/b.json", text, 0, records, kind=text, attention=text)
    made.results(root / "nano/physics.json", "lssar", 0, [law], kind="physics")
    run = made.run(0, status=text, commit=text, torch=text, config={text: {text: [text]}})
    made.write(root / "nano/runs.json", {"kind": "runs", "scale": text, "runs": {text: run}})
    name = re.sub(r"[/\x00\ud800]", "_", text)[:80]
    made.write(root / name / f"{name}.json", {"kind": "passkey"})
    (root / f"{name}.json").write_text("{")
    return root


def assert_shown_as_text(folder: Path, text: str, plain: Page) -> None:
    """A page of hostile results has no tag, attribute or link that a page of plain ones lacks."""
    page = build(hostile_results(folder / "results", text), folder / "site")
    tags = {e["tag"] for e in page.elements}
    assert tags <= {e["tag"] for e in plain.elements}
    assert len(page.all("script")) == len(page.all("style")) == len(page.all("title")) == 1
    allowed = {name for e in plain.elements for name in e}
    assert {name for e in page.elements for name in e} <= allowed, "a new attribute"
    readable = text.replace("\ud800", "?").replace("\x00", "�")
    assert any(e["text"] == readable for e in page.all("th", scope="row")), "the run"
    law = f"LSSAR p=15, by symbolic regression: {readable}."
    assert any(e["text"] == law for e in page.all("li")), "the law"
    for href in hrefs(page):
        target = folder / "site" / unquote(href.partition("#")[0])
        assert href.startswith(("#", "https://arxiv.org/")) or target.is_file()
