"""The documentation site, built and opened in chromium: every page loads cleanly, on a desk and on a phone, in light and in dark."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The address of the built site, and its pages."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(f"/{path.parent.relative_to(folder)}/".replace("/./", "/") for path in folder.rglob("index.html"))
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()


def problems(driver, base, console_errors, overflow):
    """Everything that is wrong with the page that is open."""
    found = [f"console: {message}" for message in console_errors(driver)]
    found += [f"{by} px too wide"] if (by := overflow(driver)) > 0 else []
    unrendered = "return [...document.querySelectorAll('.arithmatex')].filter(e => !e.querySelector('.katex-html')).map(e => e.textContent)"
    found += [f"formula: {text}" for text in driver.execute_script(unrendered)]
    # a picture for the other colour scheme is hidden, and need not be there
    broken = "return [...document.images].filter(i => i.offsetParent && !(i.complete && i.naturalWidth)).map(i => i.src)"
    found += [f"picture: {source}" for source in driver.execute_script(broken)]
    fetched = driver.execute_script("return performance.getEntriesByType('resource').map(r => r.name)")
    return found + [f"fetched: {name}" for name in fetched if not name.startswith((base, "data:", "blob:"))]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk, light", "phone, dark"])
def test_every_page(site, browser, console_errors, overflow, width, dark):
    base, pages = site
    assert len(pages) > 30
    wrong = {}
    for page in pages:
        driver = browser(base + page, width=width, dark=dark)
        if said := problems(driver, base, console_errors, overflow):
            wrong[page] = said
    assert not wrong


def test_wide_things_can_be_read(site, browser):
    """Tables fit a desk; on a phone tables in text keep their lines, and words in plots their size."""
    base, pages = site
    wide = (
        "return [...document.querySelectorAll('.md-typeset__scrollwrap')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    for page in pages:
        if any(name in page for name in ("migrate", "checkpoint", "races", "conformance", "jax", "evidence", "api")):
            assert browser(base + page, width=1280).execute_script(wide) == 0, page
    code = browser(base + "/cli/", width=390).execute_script(
        "return [...document.querySelectorAll('pre > code')].filter(e => e.textContent.includes('┏')).map(e => getComputedStyle(e).whiteSpace)"
    )
    assert code
    assert set(code) == {"pre"}
    plot = browser(base + "/races/", width=390).execute_script(
        "return [...document.images].filter(i => i.offsetParent && i.src.includes('plots/')).map(i => i.offsetWidth)"
    )
    assert plot
    assert min(plot) > 600


def brightness(driver):
    colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.partition("(")[2].rstrip(")").split(",")[:3]))


def test_dark_follows_the_system_and_the_button(site, browser):
    base, _ = site
    assert brightness(browser(f"{base}/optimizers/adamw/")) > 600
    driver = browser(f"{base}/optimizers/adamw/", dark=True)
    assert brightness(driver) < 200
    visible = driver.execute_script("return [...document.images].filter(i => i.offsetParent).map(i => i.src)")
    assert any("adamw-dark.svg" in source for source in visible)
    assert not any("adamw-light.svg" in source for source in visible)
    driver.find_element("css selector", "label.md-header__button[title]:not([hidden])").click()  # from the system's to light
    assert brightness(driver) > 600


def test_formulas_are_drawn(site, browser):
    base, _ = site
    driver = browser(f"{base}/optimizers/soap/")
    drawn = driver.execute_script(
        "return [...document.querySelectorAll('.formula .katex-html')].map(e => e.getBoundingClientRect().width)"
    )
    assert len(drawn) >= 9
    assert all(width > 20 for width in drawn)


def test_search_finds_an_optimizer(site, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    base, _ = site
    driver = browser(base)
    driver.find_element("css selector", "input.md-search__input").send_keys("muon")
    results = "a.md-search-result__link[href*='optimizers/muon']"
    WebDriverWait(driver, 20).until(lambda d: d.find_elements("css selector", results))
