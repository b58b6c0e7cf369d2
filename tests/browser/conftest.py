"""A real browser for tests of pages: Debian's chromium, headless, driven by selenium.

    pytestmark = pytest.mark.browser

    def test_page(browser, console_errors):
        driver = browser(path_or_url, width=390, dark=True)
        assert not console_errors(driver)

`browser` opens a page in the one driver of the session and gives the driver; a `pathlib.Path` is opened as a file. `width` and `height`
are those of the page itself, however small. Without chromium or selenium the tests are skipped, with the reason.
"""

import shutil
from pathlib import Path

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--allow-file-access-from-files",
)  # fmt: skip


@pytest.fixture(scope="session")
def _driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("chromium or chromedriver is missing: apt-get install -y chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=programs[1]))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def browser(_driver):
    """open(page, width=1200, height=900, dark=False, scale=1) -> the driver, with the page loaded."""

    def opened(page, width=1200, height=900, dark=False, scale=1):
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        _driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        _driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        _driver.get_log("browser")  # what an earlier page said is not this one's
        _driver.get(page.resolve().as_uri() if isinstance(page, Path) else str(page))
        return _driver

    return opened


@pytest.fixture
def console_errors():
    """console_errors(driver) -> the messages of level SEVERE (script errors, files that did not load) since the page was opened."""
    return lambda driver: [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def overflow():
    """overflow(driver) -> by how many pixels the page is wider than its window; 0 is right."""
    script = "const d = document.documentElement; return d.scrollWidth - d.clientWidth"
    return lambda driver: driver.execute_script(script)
