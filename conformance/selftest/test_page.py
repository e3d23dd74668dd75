"""The conformance page in a real browser: without a network, in light and dark, in print, by keyboard, on a phone.

    python -m pytest conformance/selftest/test_page.py

Needs chromium and chromedriver: apt install chromium chromium-driver.

Each check is a function that returns its objections. Each is also run on a broken page, and must object.
"""

import base64
import json
import re
import shutil

import pytest

from conformance.report import curves, page
from conformance.selftest.test_report import SITES, SPEC, checked, evidence, part, realistic

clause = pytest.mark.clause
PHONE, DESK, PAPER = 390, 1280, 1017  # CSS pixels; PAPER is A4 landscape inside page.css's margins
OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync
--no-first-run --disable-dev-shm-usage"""


def tools() -> tuple[str, str]:
    """chromium and chromedriver. A missing one is a failure, not a skip."""
    commands = [shutil.which(name) for name in ("chromium", "chromedriver")]
    try:
        import selenium  # noqa: F401
    except ImportError:
        commands.append(None)
    if None in commands:
        pytest.fail("no browser to test the page in: apt install chromium chromium-driver; pip install selenium", pytrace=False)
    return commands[0], commands[1]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    chromium, chromedriver = tools()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in [*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL", performance="ALL"))
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


class Shown:
    """A page in the browser, loaded from a file."""

    def __init__(self, driver, path, html: str):
        self.driver, self.path = driver, path
        path.write_text(html)
        self.look()
        for log in ("browser", "performance"):
            driver.get_log(log)  # discards messages of the previous page
        driver.get(path.as_uri())

    def look(self, width: int = DESK, media: str = "", scheme: str = "light") -> None:
        features = [dict(name="prefers-color-scheme", value=scheme)]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(media=media, features=features))
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, script: str):
        return self.driver.execute_script(script)

    def press(self, key: str) -> None:
        self.driver.switch_to.active_element.send_keys(key)


@pytest.fixture(scope="module")
def html() -> str:
    return page.render(realistic())


@pytest.fixture
def show(driver, tmp_path):
    return lambda html: Shown(driver, tmp_path / "index.html", html)


# ---- checks ---------------------------------------------------------------------------------------------------------


def asks_the_network(shown: Shown) -> list[str]:
    """Requests for other files than the page, and errors on the console."""
    messages = [json.loads(entry["message"])["message"] for entry in shown.driver.get_log("performance")]
    urls = [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert shown.path.as_uri() in urls, "the log of requests is empty"
    errors = [entry["message"] for entry in shown.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    return [url for url in urls if url != shown.path.as_uri()] + errors


CONTRAST = """
const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], under) => [r, g, b].map((value, i) => value * a + under[i] * (1 - a));
const luminance = (rgb) => rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const background = (node) => {
  const colour = rgba(getComputedStyle(node).backgroundColor);
  if (!node.parentElement) return over(colour, [255, 255, 255]);
  return (colour[3] ?? 1) === 1 ? colour.slice(0, 3) : over(colour, background(node.parentElement));
};
const ratio = (node, property) => {
  const under = background(node), drawn = over(rgba(getComputedStyle(node)[property]), under);
  const [a, b] = [luminance(drawn), luminance(under)].sort((a, b) => b - a);
  return (a + 0.05) / (b + 0.05);
};
const objections = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let texts = 0;
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || node.closest("script, style, title")) continue;
  texts += 1;
  const found = ratio(node, node.closest("svg") ? "fill" : "color");
  if (found < 4.5) objections.push(`${found.toFixed(2)} < 4.5: ${text.slice(0, 40)}`);
}
for (const node of document.querySelectorAll(".curve > path, .limit > path")) {
  const found = ratio(node, "stroke");
  if (found < 3) objections.push(`${found.toFixed(2)} < 3: a line of ${node.parentElement.getAttribute("class")}`);
}
return [texts, objections];
"""


def is_hard_to_see(shown: Shown) -> list[str]:
    """Text (HTML and SVG) and lines with less contrast than WCAG AA, in light, dark and print."""
    faint = []
    for media, scheme in (("screen", "light"), ("screen", "dark"), ("print", "dark")):
        shown.look(media=media, scheme=scheme)
        texts, objections = shown.js(CONTRAST)
        assert texts > 50
        faint += [f"{media}, {scheme}: {text}" for text in objections]
    return faint


def is_lost_in_print(shown: Shown) -> list[str]:
    """Hidden cells, tables that are cut off, and ink on the whole sheet."""
    shown.look(PAPER, "print", "dark")
    lost = shown.js("""
        const hidden = [...document.querySelectorAll("th, td, summary, figure")].filter((cell) => !cell.checkVisibility());
        const cut = [...document.querySelectorAll(".frame")].filter((it) => it.scrollWidth > it.clientWidth + 1);
        return [...hidden.map((it) => "hidden: " + it.textContent), ...cut.map((it) => "cut off: " + it.ariaLabel)];
    """)
    paper = shown.js("return getComputedStyle(document.documentElement).backgroundColor")
    return lost + ([] if paper == "rgb(255, 255, 255)" else [f"paper is {paper}"])


INTERACTIVE = "a[href], button, summary, input, select, [tabindex]"


def is_out_of_reach(shown: Shown) -> list[str]:
    """Elements that Tab does not reach, reaches out of reading order, or does not mark as focused."""
    from selenium.webdriver.common.keys import Keys

    wanted = shown.js(f"""
        const all = [...document.querySelectorAll("{INTERACTIVE}")].filter((it) => it.checkVisibility() && !it.hidden);
        all.forEach((it, number) => {{ it.dataset.number = number; }});
        return all.map((it) => it.outerHTML.slice(0, 60));
    """)
    reached, objections = [], []
    for _ in range(len(wanted) + 3):
        shown.press(Keys.TAB)
        number, outline = shown.js("""
            const it = document.activeElement, style = getComputedStyle(it);
            return [it.dataset.number ?? null, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
        """)
        if number is None or int(number) in reached:
            break
        reached.append(int(number))
        objections += [] if outline else [f"focus cannot be seen: {wanted[int(number)]}"]
    objections += [f"not reached: {name}" for number, name in enumerate(wanted) if number not in reached]
    return objections + (["not in the order in which it is read"] if reached != sorted(reached) else [])


def does_not_open(shown: Shown) -> list[str]:
    """Groups of clauses that Enter and Space do not open and close, or that have no name."""
    from selenium.webdriver.common.keys import Keys

    count, objections = shown.js("return document.querySelectorAll('.group button').length"), []
    state = """
        const group = document.querySelectorAll("tbody.group")[{0}], button = document.querySelectorAll(".group button")[{0}];
        return [button.getAttribute("aria-expanded"), String(group.nextElementSibling.querySelector("td").checkVisibility())];
    """
    for number in range(count):
        shown.js(f"document.querySelectorAll('.group button')[{number}].focus()")
        states = [shown.js(state.format(number))]
        for key in (Keys.ENTER, Keys.SPACE):
            shown.press(key)
            states.append(shown.js(state.format(number)))
        if states not in ([["true"] * 2, ["false"] * 2, ["true"] * 2], [["false"] * 2, ["true"] * 2, ["false"] * 2]):
            objections.append(f"group {number}: {states}")
    return objections + ([] if count else ["no groups"])


def is_too_wide(shown: Shown) -> list[str]:
    """Widths at which the page scrolls sideways when everything is open."""
    too_wide = []
    for width in (PHONE, DESK):
        shown.look(width)
        scroll_width = shown.js("""
            document.querySelectorAll("details").forEach((it) => { it.open = true; });
            document.querySelectorAll("tbody[hidden]").forEach((it) => { it.hidden = false; });
            return document.documentElement.scrollWidth;
        """)
        too_wide += [f"{scroll_width} > {width}"] if scroll_width > width else []
    return too_wide


def is_mute(shown: Shown) -> list[str]:
    """Content that a screen reader misses: tables without caption, headings without scope, states shown only by a sign."""
    return shown.js("""
        const found = [];
        const each = (selector, bad, why) =>
          document.querySelectorAll(selector).forEach((it) => bad(it) && found.push(why + it.outerHTML.slice(0, 80)));
        each("table", (it) => !it.caption || !it.caption.textContent.trim(), "no caption: ");
        each("th", (it) => !["row", "col", "rowgroup"].includes(it.scope), "no scope: ");
        each("svg", (it) => !it.ariaHidden && !(it.getAttribute("role") === "img" && it.ariaLabel), "no label: ");
        each(".state", (it) => !/[a-z]{3}/.test(it.textContent), "no words: ");
        each(".frame", (it) => !it.ariaLabel || it.getAttribute("role") !== "region", "no label: ");
        each("html", (it) => it.lang !== "en" || !document.title, "no language: ");
        const levels = [...document.querySelectorAll("h1, h2, h3")].map((it) => Number(it.tagName[1]));
        if (levels.some((level, i) => level > (levels[i - 1] ?? 0) + 1)) found.push("a level of headings is left out");
        return found;
    """)


def needs_javascript(shown: Shown) -> list[str]:
    """Hidden cells of the matrix, and controls that do nothing without JavaScript."""
    return shown.js("""
        const hidden = [...document.querySelectorAll(".matrix th, .matrix td")].filter((it) => !it.checkVisibility());
        const idle = [...document.querySelectorAll("button")].filter((it) => it.checkVisibility());
        return [...hidden, ...idle].map((it) => it.textContent);
    """)


# ---- the page passes all checks; each check rejects a broken page ---------------------------------------------------

CHECKS = [asks_the_network, is_hard_to_see, is_lost_in_print, is_out_of_reach, does_not_open, is_too_wide, is_mute]


def style(rule: str) -> tuple[str, str]:
    return "</style>", f"{rule}</style>"


CSP = '<meta http-equiv="Content-Security-Policy"'
BROKEN = {
    "image": (asks_the_network, (CSP, '<meta name="x"'), ("<main>", '<main><img alt="" src="http://127.0.0.1:9/x.png">')),
    "image, refused": (asks_the_network, ("<main>", '<main><img alt="" src="http://127.0.0.1:9/x.png">')),
    "style sheet": (asks_the_network, (CSP, '<meta name="x"'), ("<style>", "<style>@import 'http://127.0.0.1:9/x.css';")),
    "script error": (asks_the_network, ("<script>", "<script>missing();")),
    "pale text": (is_hard_to_see, style("footer p { color: #bbb }")),
    "pale text in the dark": (is_hard_to_see, style("@media (prefers-color-scheme: dark) { .lead { color: #555 } }")),
    "pale text of a drawing": (is_hard_to_see, style("svg text { fill: #ccc !important }")),
    "pale background": (
        is_hard_to_see,
        style("@media (prefers-color-scheme: dark) { .clauses > tr > * { background: #999 } }"),
    ),
    "pale line": (is_hard_to_see, style(".curve > path { stroke: #ddd !important }")),
    "no print style": (is_lost_in_print, ("@media print", "@media speech")),
    "closed in print": (is_lost_in_print, ("details::details-content", "details::nothing")),
    "groups closed in print": (is_lost_in_print, ("display: revert !important", "color: inherit")),
    "cut off in print": (is_lost_in_print, style(".matrix { min-width: 2000px !important }")),
    "dates that do not break": (is_lost_in_print, style("small { white-space: nowrap }")),
    "dark paper": (is_lost_in_print, style("html { background: #000 !important }")),
    "no outline": (is_out_of_reach, style("button:focus-visible { outline: none }")),
    "left out": (is_out_of_reach, ("<summary>", '<summary tabindex="-1">')),
    "in another order": (is_out_of_reach, ('<a href="#curves"', '<a tabindex="5" href="#curves"')),
    "a heading that is no button": (does_not_open, ('document.createElement("button")', 'document.createElement("span")')),
    "does not say that it is open": (
        does_not_open,
        ('setAttribute("aria-expanded", yes)', 'setAttribute("aria-expanded", true)'),
    ),
    "does not open": (does_not_open, ("clauses.hidden = !yes", "clauses.hidden = true")),
    "wide": (is_too_wide, ("<footer>", '<footer><div style="width: 1400px">wide</div>')),
    "wide on a phone": (is_too_wide, style(".frame { overflow: visible }")),
    "no caption": (is_mute, ("<caption>", "<caption hidden></caption><caption>")),
    "no scope": (is_mute, ('<th scope="row">', "<th>")),
    "only a sign": (is_mute, (" 1 pass</span>", "</span>")),
    "an unlabelled drawing": (is_mute, ('role="img" aria-label=', "data-label=")),
    "hidden without JavaScript": (needs_javascript, ('class="clauses"', 'class="clauses" hidden')),
}


def without_script(html: str) -> str:
    return re.sub(r"<script>.*</script>", "", html, flags=re.DOTALL)


@clause("V8")
@pytest.mark.parametrize("check_page", CHECKS, ids=lambda check: check.__name__)
def test_page_is_readable(show, html, check_page):
    assert check_page(show(html)) == []


@clause("V8")
def test_page_is_readable_without_javascript(show, html):
    assert needs_javascript(show(without_script(html))) == []


@clause("V8")
@pytest.mark.rejects("V8")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_noticed(show, html, name):
    check_page, *changes = BROKEN[name]
    broken = without_script(html) if check_page is needs_javascript else html
    for old, new in changes:
        assert old in broken, f"{old} is not in the page: this way of breaking it is out of date"
        broken = broken.replace(old, new)
    assert check_page(show(broken)) != []


@clause("V8")
def test_page_without_a_report_is_readable(show):
    html = page.render(evidence(sites=SITES, spec=SPEC))
    assert "There is no report yet." in html
    shown = show(html)
    assert [check_page(shown) for check_page in (asks_the_network, is_too_wide, is_mute, is_out_of_reach)] == [[], [], [], []]


@clause("V8")
def test_page_can_be_printed(show, html):
    shown = show(html)
    pdf = base64.b64decode(shown.driver.execute_cdp_cmd("Page.printToPDF", dict(preferCSSPageSize=True))["data"])
    assert pdf[:5] == b"%PDF-"
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 5


@clause("V8")
def test_a_link_to_a_clause_opens_its_group(show, html):
    shown = show(html)
    shown.js("location.hash = '#L2'")
    shown.driver.get(f"{shown.path.as_uri()}#L2")
    assert shown.js("return document.getElementById('L2').checkVisibility()")


@clause("V8")
def test_a_missing_browser_is_a_failure(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match="apt install chromium chromium-driver"):
        tools()


# ---- content of the page --------------------------------------------------------------------------------------------


def drawn(losses: list[list[str]]) -> str:
    """The page of a report with these curves."""
    curves = [dict(site="ash", launcher="srun", precision="fp64", losses=one) for one in losses]
    return page.render(evidence(("2031-05-04", [part(checks=[checked(deviation=0.0, limit=1e-10)], curves=curves)])))


@clause("V7")
def test_every_curve_is_drawn(html):
    seen = realistic()
    count = sum(len(one["curves"]) for one in seen.current)
    assert count > 20
    assert [html.count(f'class="curve {kind}">') for kind in ("loss", "deviation")] == [count, count]
    panels = {(curve["precision"], curve["world_size"]) for one in seen.current for curve in one["curves"]}
    assert html.count('class="golden">') == len(panels)


@clause("V7")
def test_curves_that_are_broken_are_drawn_and_named():
    whole = [loss.hex() for loss in evidence().golden]
    html = drawn([whole, ["nan"] * 42, ["inf", *whole[1:]], ["0x1p+0"], []])
    assert [html.count(f'class="curve {kind}">') for kind in ("loss", "deviation")] == [4, 4]  # the empty curve is not drawn
    assert "5 curves, 5 distinct. Worst deviation: not a number" in html
    assert "2 curves of another length than the golden trace" in html
    assert not re.search(r' [dxy]="[^"]*(nan|inf)', html)


@clause("V7")
def test_what_is_exact_stands_on_a_line_of_its_own():
    golden = evidence().golden
    html = drawn([[(golden[0] * 1.5).hex(), *(loss.hex() for loss in golden[1:])]])
    marks = html[html.index('class="curve deviation">') :]
    heights = [float(height) for height in re.findall(r'<use [^>]* y="([\d.]+)"', marks[: marks.index("</svg>")])]
    assert len(heights) == 42
    assert heights[0] < curves.DEVIATIONS[1]
    assert set(heights[1:]) == {curves.EXACT}


@clause("V7")
def test_what_a_report_says_cannot_change_the_page():
    hostile = "<script>alert(1)</script> \"'&\\1"
    checks = [checked(outcome="expected-failure", reason=hostile, link="javascript:alert(1)", launcher=hostile, name=hostile)]
    checks.append(checked(clauses="S1", deviation=1e-16, limit=1e-10, name=hostile, launcher=hostile))
    curves = [dict(site="ash", launcher=hostile, precision=hostile, losses=["0x1p+0"])]
    sites = [dict(name="ash", verified=dict(status=hostile, evidence=hostile, unverified=[hostile]))]
    parts = [part(checks=checks, curves=curves, device=hostile, versions=dict(torch=hostile))]
    html = page.render(evidence(("2031-05-04", parts), sites=sites, spec=SPEC + f"## S: {hostile}\n\n- **S1** {hostile}\n"))
    assert "<script>alert" not in html
    assert 'href="javascript' not in html


@clause("V7")
def test_cells_tell_state_rung_date_and_reason():
    expected_failure = checked(outcome="expected-failure", reason="the launcher miscounts", link="https://example.org/1")
    html = page.render(evidence(("2031-05-04", [part("cluster", checks=[expected_failure])])))
    text = re.sub(r"<[^>]+>", " ", html[html.index("<table") : html.index("</table>")])
    assert re.search(r"L2\s+Losses are the golden ones.\s+!\s+expected failure\s+cluster\s+2031-05-04", text)
    assert "[cluster rung, srun, world size 2]: the launcher miscounts" in text
    assert '<a href="https://example.org/1">source</a>' in html
    assert "simulated, never on the machine itself, <time>2031-05-01</time>" in html
