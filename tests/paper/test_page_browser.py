"""The page of results in a real browser: policy, widths, sorting, colours, links.

Needs chromium and chromedriver (`bash scripts/browser.sh` on Debian); skipped without them.
"""

import time
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, Browser
from test_tables import CURVES, write_headline

from paper.page import write_page

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver: `bash scripts/browser.sh` installs them",
)
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNFOLD = "for (const d of document.querySelectorAll('details')) d.open = true"
TABLE = "#nano-headline table"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def make_page(root: Path, curves: dict = CURVES) -> Path:
    write_headline(root / "results/nano", curves)
    write_page(root / "results", root / "site")
    return root / "site/index.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return make_page(tmp_path_factory.mktemp("page"))


def wait_for(browser: Browser, condition: str) -> None:
    for _ in range(200):
        if browser.run(condition):
            return
        time.sleep(0.05)
    raise AssertionError(condition)


def test_the_page_asks_for_its_own_figures_alone_and_logs_nothing(browser, page):
    browser.open(page.as_uri())
    browser.run(UNFOLD)
    browser.run("for (const image of document.images) image.loading = 'eager'")
    wait_for(browser, "return [...document.images].every((image) => image.complete)")
    assert browser.run("return document.images.length") > 0
    assert browser.run("return [...document.images].filter((i) => !i.naturalWidth).length") == 0
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked[0] == page.as_uri()
    assert all(url.startswith(page.parent.as_uri()) for url in asked)
    assert browser.log("browser") == []


def test_the_page_never_scrolls_sideways_but_its_tables_do(browser, page):
    for width in (320, 390, 768, 1280):
        browser.open(page.as_uri(), width=width, height=800)
        assert browser.run(OVERFLOW) == 0, width
        browser.run(UNFOLD)
        assert browser.run(OVERFLOW) == 0, f"{width}, unfolded"
        cut = """return [...document.querySelectorAll('.claim')]
            .filter((card) => card.scrollWidth > card.clientWidth + 1).map((c) => c.innerText)"""
        assert browser.run(cut) == [], width


def test_a_header_sorts_its_column_by_click_and_by_keyboard(browser, page):
    browser.open(page.as_uri() + "#nano-headline")
    values = f"""return [...document.querySelectorAll('{TABLE} tbody tr')]
        .map((row) => row.cells[5].dataset.sort).filter(Boolean).map(Number)"""
    before = browser.run(values)
    assert before != sorted(before)
    header = f"{TABLE} thead th:nth-child(6)"
    browser.click(f"{header} button")
    assert browser.run(values) == sorted(before)
    browser.run(f"document.querySelector('{header} button').focus()")
    browser.press("\ue007")  # Enter
    assert browser.run(values) == sorted(before, reverse=True)
    direction = f"return document.querySelector('{header}').getAttribute('aria-sort')"
    assert browser.run(direction) == "descending"
    browser.press("\ue007")
    assert browser.run(values) == before


def test_dark_follows_the_system_and_the_button_overrules_it(browser, page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser.open(page.as_uri(), dark=False)
    light = browser.run(colour)
    browser.open(page.as_uri(), dark=True)
    dark = browser.run(colour)
    assert light != dark
    browser.click("#theme")
    assert browser.run(colour) == light
    browser.open(page.as_uri(), dark=True)
    assert browser.run(colour) == light, "the choice is kept"
    browser.run("localStorage.clear()")


def test_a_link_to_a_folded_table_opens_it(browser, page):
    browser.open(page.as_uri())
    assert not browser.run("return document.getElementById('nano-headline').open")
    browser.run("document.querySelector('.claim a[href=\"#nano-headline\"]').click()")
    wait_for(browser, "return document.getElementById('nano-headline').open")


def test_injected_code_does_not_run(browser, page, tmp_path):
    """The page's own policy holds should an escape ever be forgotten."""
    attack = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    text = page.read_text(encoding="utf-8").replace("<main>", f"<main>{attack}")
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    browser.open((tmp_path / "index.html").as_uri())
    assert browser.run("return window.ran ?? null") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.log("browser"))
