"""The report page in a real browser: console, network, sorting, phone, dark, links.

Needs chromium and chromedriver (`bash scripts/browser.sh` on Debian); skipped without them.
"""

import functools
import http.server
import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import report_results as made
from browser import CHROMIUM, DRIVER, Browser
from report_page import HOSTILE, hostile_results

import report

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver: `bash scripts/browser.sh` installs them",
)
ENTER = "\ue007"
NANO = "#nano-scale "  # the paper's scale has tables of the same names


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    results = made.paper(made.nano(root / "results"))
    (results / "nano/broken.json").write_text("{")
    report.main([str(results), "--out", str(root / "site")])
    return root / "site"


@pytest.fixture(scope="module")
def served(site):
    """The folder that holds site/ and results/, as in a checkout."""
    handler = functools.partial(Quiet, directory=str(site.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/site/index.html"
        server.shutdown()


def address(site: Path) -> str:
    return (site / "index.html").as_uri()


def column(browser: Browser, region: str, index: int) -> list[str]:
    script = """
      const rows = document.querySelectorAll(`${arguments[0]} tbody tr`);
      return [...rows].map((row) => row.cells[arguments[1]].dataset.sort ?? null);"""
    return browser.run(script, f'{NANO}[aria-label="{region}"]', index)


def natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def sort_state(browser: Browser, region: str) -> list[str]:
    script = """
      const heads = document.querySelectorAll(`${arguments[0]} thead th`);
      return [...heads].map((head) => head.getAttribute("aria-sort"));"""
    return browser.run(script, f'{NANO}[aria-label="{region}"]')


@pytest.mark.parametrize("where", ["file", "server"])
def test_nothing_is_requested_but_the_page_and_the_console_stays_empty(
    browser, site, served, where
):
    url = address(site) if where == "file" else served
    browser.open(url)
    assert browser.run("return document.querySelectorAll('thead button').length") > 20
    base = url.removesuffix("site/index.html")
    asked = [request for request in browser.requests() if not request.startswith("data:")]
    assert asked[0] == url
    assert all(request.startswith(f"{base}site/figures/") for request in asked[1:])
    browser.run(UNFOLD)
    browser.run("for (const i of document.images) i.loading = 'eager'")
    broken = "return [...document.images].filter((i) => i.complete && !i.naturalWidth).length"
    wait_for(browser, "return [...document.images].every((i) => i.complete)")
    assert browser.run("return document.images.length") > 6
    assert browser.run(broken) == 0, "the page's own policy lets its figures in"
    assert browser.log("browser") == []


def wait_for(browser: Browser, condition: str) -> None:
    for _ in range(200):
        if browser.run(condition):
            return
        time.sleep(0.05)
    raise AssertionError(condition)


UNFOLD = "for (const d of document.querySelectorAll('details')) d.open = true"
REGION = "LSSAR and its baselines, several seeds, validation loss by evaluation length"


def test_folded_figures_are_not_loaded_before_they_are_seen(browser, site):
    browser.open(address(site))
    drawn = [r for r in browser.requests() if r.endswith(".svg")]
    assert len(drawn) <= 2, "the headline of each scale"


def test_a_link_to_a_folded_table_opens_it(browser, site):
    browser.open(address(site) + "#nano-modified_scores")
    assert browser.run("return document.getElementById('nano-modified_scores').open")
    assert not browser.run("return document.getElementById('nano-headline').open")
    browser.run("document.querySelector('.claim a[href=\"#nano-headline\"]').click()")
    wait_for(browser, "return document.getElementById('nano-headline').open")


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_no_part_of_a_claim_is_cut_off(browser, site, width):
    browser.open(address(site), width=width, height=800)
    browser.run(UNFOLD)
    script = """
      const cards = [...document.querySelectorAll(".claim, .card, .findings li")];
      return cards.filter((c) => c.scrollWidth > c.clientWidth + 1
        || c.getBoundingClientRect().right > innerWidth).map((c) => c.innerText);"""
    assert browser.run(script) == []


def test_a_click_sorts_up_then_down_then_back(browser, site):
    browser.open(address(site) + "#nano-softmax_free")
    region = "Softmax-free attention, validation loss by evaluation length"
    before, names = column(browser, region, 5), column(browser, region, 0)
    numbers = sorted(float(value) for value in before if value is not None)
    empty = before.count(None)
    assert empty > 5, "runs that are missing"
    assert before[: len(numbers)] != list(map(str, numbers))
    button = f'{NANO}[aria-label="{region}"] thead th:nth-child(6) button'

    browser.click(button)
    assert [float(v) for v in column(browser, region, 5)[:-empty]] == numbers
    assert set(column(browser, region, 5)[-empty:]) == {None}
    assert sort_state(browser, region) == [*["none"] * 5, "ascending", "none"]

    browser.click(button)
    assert [float(v) for v in column(browser, region, 5)[:-empty]] == numbers[::-1]
    assert set(column(browser, region, 5)[-empty:]) == {None}, "what has no number stays last"
    assert sort_state(browser, region)[5] == "descending"

    browser.click(button)
    assert column(browser, region, 0) == names
    assert set(sort_state(browser, region)) == {"none"}


def test_sorting_works_by_keyboard_and_one_column_at_a_time(browser, site):
    browser.open(address(site) + "#nano-runs")
    region = "Runs"
    browser.run(f"document.querySelector('{NANO}[aria-label=\"{region}\"] thead button').focus()")
    browser.press(ENTER)
    assert sort_state(browser, region)[0] == "ascending"
    names = column(browser, region, 0)
    assert names == sorted(names, key=natural)
    assert names.index("lssar-p3-s0") < names.index("lssar-p15-s0")
    browser.press("\ue004")  # Tab
    browser.press(ENTER)
    assert sort_state(browser, region)[:2] == ["none", "ascending"]
    assert column(browser, region, 1)[-1] == "unfinished"


OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1280])
def test_the_page_never_scrolls_sideways_its_tables_do(browser, site, width):
    browser.open(address(site), width=width, height=800)
    assert browser.run("return innerWidth") == width
    assert browser.run(OVERFLOW) == 0
    browser.run(UNFOLD)
    assert browser.run(OVERFLOW) == 0
    if width < 600:
        box = f"document.querySelector('{NANO}[aria-label=\"{REGION}\"]')"
        assert browser.run(f"return {box}.scrollWidth - {box}.clientWidth") > 100


def test_a_table_can_be_scrolled_by_keyboard(browser, site):
    browser.open(address(site), width=360, height=800)
    boxes = browser.run("return [...document.querySelectorAll('.scroll')].map((b) => b.tabIndex)")
    assert boxes
    assert set(boxes) == {0}


COLOURS = """
  const style = (e) => getComputedStyle(document.querySelector(e));
  return [style("body").backgroundColor, style("body").color, style("img.drawn").filter];"""


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG defines it."""
    parts = [int(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_dark_follows_the_system_and_the_button_overrules_it(browser, site):
    browser.open(address(site), dark=False)
    light = browser.run(COLOURS)
    browser.open(address(site), dark=True)
    dark = browser.run(COLOURS)
    assert luminance(light[0]) > 0.9
    assert luminance(dark[0]) < 0.02
    assert light[2] != dark[2]
    assert browser.run("return document.getElementById('theme').ariaPressed") == "true"
    browser.click("#theme")
    assert browser.run(COLOURS) == light
    assert browser.run("return document.getElementById('theme').ariaPressed") == "false"
    browser.open(address(site), dark=True)
    assert browser.run(COLOURS) == light, "the choice is kept"
    browser.click("#theme")
    assert browser.run(COLOURS) == dark
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read_in_both_colours(browser, site, dark):
    browser.open(address(site), dark=dark)
    script = """
      const back = (e) => {
        for (; e; e = e.parentElement) {
          const c = getComputedStyle(e).backgroundColor;
          if (!c.endsWith(", 0)")) return c;
        }
      };
      const found = new Map();
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || e.closest("script, [hidden]")) continue;
        const pair = [getComputedStyle(e).color, back(e)];
        found.set(pair.join(), [...pair, e.outerHTML.slice(0, 80)]);
      }
      return [...found.values()];"""
    pairs = browser.run(script)
    assert len(pairs) > 8
    for ink, paper, where in pairs:
        assert contrast(ink, paper) >= 4.5, (ink, paper, where)


def test_every_link_resolves_where_site_and_results_are_served(browser, site, served):
    browser.open(served)
    links = browser.run("return [...new Set([...document.links].map((a) => a.href))]")
    assert len(links) > 30
    root = served.removesuffix("site/index.html")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for link in links:
        target, _, fragment = link.partition("#")
        if target.endswith("README.md") or target.startswith("https://arxiv.org/"):
            continue  # the test's results do not lie in a checkout
        assert target.startswith((f"{root}site/", f"{root}results/"))
        with opener.open(target, timeout=10) as answer:
            assert answer.status == 200
        if fragment:
            assert browser.run("return !!document.getElementById(arguments[0])", fragment), link


def test_hostile_results_are_text_and_run_nothing(browser, tmp_path):
    for i, text in enumerate(HOSTILE):
        results = hostile_results(tmp_path / f"{i}/results", text)
        report.main([str(results), "--out", str(tmp_path / f"{i}/site")])
        browser.open(address(tmp_path / f"{i}/site"), width=360, height=800)
        browser.run(UNFOLD)
        assert browser.run("return document.scripts.length") == 1
        assert browser.run(OVERFLOW) == 0
        assert browser.log("browser") == []
        shown = "return document.body.innerText.includes(arguments[0])"
        assert not text.isprintable() or browser.run(shown, text)


def test_injected_code_would_not_run(browser, site, tmp_path):
    """The page's own policy, should an escape ever be forgotten."""
    text = (site / "index.html").read_text(encoding="utf-8")
    attack = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    (tmp_path / "index.html").write_text(text.replace("<main>", f"<main>{attack}"), "utf-8")
    browser.open(address(tmp_path))
    assert browser.run("return window.ran ?? null") is None
    assert browser.run("return document.querySelectorAll('thead button').length") > 20
    assert any("Content Security Policy" in entry["message"] for entry in browser.log("browser"))


def test_without_scripts_everything_is_still_there(browser, site):
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(address(site))
        document = browser.devtools("DOM.getDocument", depth=1)["root"]["nodeId"]
        html = browser.devtools("DOM.getOuterHTML", nodeId=document)["outerHTML"]
    finally:
        browser.devtools("Emulation.setScriptExecutionDisabled", value=False)
    assert "does not hold" in html
    assert html.count("<thead><tr><th scope") == html.count("<table") > 3
