"""The race report and the landscape page in a real browser."""

import math

import pytest

from lab import landscape
from rlx_optim import cli, race
from rlx_optim.cli import get_machine
from rlx_optim.race import digits, rates, report, running

pytestmark = pytest.mark.browser
NAMES = ["sgd", "adamw", "adafactor", "muon"]


def a_race(**changes):
    """A short race with a grid; SGD diverges at the highest rate of it, and in one of its runs."""
    raced = running.Race(digits.MLP, NAMES, 30, 2, "reference", tune=True)
    running.run(raced, lambda name: None, lambda loss: None)
    lost = digits.MLP.train("sgd", {**rates.SETTINGS["digits-mlp"]["sgd"], "lr": 1e38}, 30, 1, "reference", lambda loss: None)
    assert lost.diverged_at is not None
    raced.entries[0].runs[1] = lost
    raced.entries[0].grid[-1] = running.Trial(raced.entries[0].grid[-1].lr, None, None, 3)
    return report.results(raced, "rlx-optim race --tune", get_machine())


@pytest.fixture(scope="module")
def results():
    return a_race()


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("race") / "report.html"
    path.write_text(report.html(results), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    path = tmp_path_factory.mktemp("landscape") / "page.html"
    found = landscape.results(NAMES, 20, "reference", lambda name: None, "rlx-optim landscape", get_machine())
    path.write_text(landscape.html(found), encoding="utf-8")
    return path


def curves(driver, plot):
    """Name -> points, of every curve that is drawn in a plot."""
    found = driver.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' path.series')].map(p => [p.dataset.name, p.getAttribute('d')])",
        plot,
    )
    return {name: path.count("L") + path.count("M") for name, path in found}


def click(driver, selector):
    driver.execute_script("document.querySelector(arguments[0]).click()", selector)


def text(driver, selector):
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def background(driver):
    return driver.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_the_report_loads_without_errors_and_draws_every_curve(page, browser, console_errors):
    driver = browser(page)
    assert console_errors(driver) == []
    for plot in ("#by-step", "#by-time"):
        drawn = curves(driver, plot)
        assert list(drawn) == NAMES
        assert min(points for name, points in drawn.items() if name != "sgd") >= 20
    assert list(curves(driver, "#sensitivity")) == NAMES
    assert driver.execute_script("return document.querySelectorAll('#sensitivity circle').length") == 5 * len(NAMES) - 1
    assert driver.execute_script("return document.querySelectorAll('#table tbody tr').length") == len(NAMES)


def test_curves_fill_their_plot(page, browser):
    """Axes are scaled to what they show: a curve spans most of the plot in both directions."""
    driver = browser(page)
    box = driver.execute_script(
        "const b = [...document.querySelectorAll('#by-step path.series')].map(p => p.getBBox()), h = document.querySelector('#by-step svg').getBoundingClientRect();"
        "return [Math.max(...b.map(r => r.width)) / h.width, (Math.max(...b.map(r => r.y + r.height)) - Math.min(...b.map(r => r.y))) / h.height]"
    )
    assert box[0] > 0.75
    assert box[1] > 0.6


def test_the_legend_toggles_a_curve_everywhere(page, browser):
    driver = browser(page)
    click(driver, '#legend button[data-of="muon"]')
    rest = [name for name in NAMES if name != "muon"]
    for plot in ("#by-step", "#by-time", "#sensitivity"):
        assert list(curves(driver, plot)) == rest
    assert driver.execute_script("return document.querySelector('[data-of=muon]').getAttribute('aria-pressed')") == "false"
    assert "muon" not in text(driver, "#metric")
    click(driver, '#legend button[data-of="muon"]')
    assert list(curves(driver, "#by-step")) == NAMES
    click(driver, "#none")
    assert curves(driver, "#by-step") == {}
    assert "nothing to show" in text(driver, "#by-step")
    click(driver, "#all")
    assert list(curves(driver, "#by-time")) == NAMES


def test_axes_and_smoothing_can_be_changed(page, browser, console_errors):
    driver = browser(page)
    path = "return document.querySelector('#by-time path.series[data-name=adamw]').getAttribute('d')"
    seen = {driver.execute_script(path)}
    for selector in ("#ylog", "#xlog"):
        click(driver, selector)
        seen.add(driver.execute_script(path))
    driver.execute_script("const s = document.getElementById('smooth'); s.value = 0; s.dispatchEvent(new Event('input'))")
    seen.add(driver.execute_script(path))
    assert len(seen) == 4
    assert console_errors(driver) == []


def test_hovering_shows_values(page, browser, results):
    driver = browser(page)
    driver.execute_script("const s = document.getElementById('smooth'); s.value = 0; s.dispatchEvent(new Event('input'))")
    driver.execute_script(
        "const p = document.getElementById('by-step'), r = p.getBoundingClientRect();"
        "p.dispatchEvent(new PointerEvent('pointermove', {clientX: r.right - 10, clientY: r.top + 50, bubbles: true}))"
    )
    told = text(driver, "#by-step .tip")
    assert "step 30" in told
    last = results["optimizers"]["adamw"]["curve"]["loss"][-1]
    assert f"adamw{float(f'{last:.3g}'):g}" in told
    place = "const r = document.querySelector('#by-step {}').getBoundingClientRect(); return [r.top, r.bottom, r.width]"
    plot, tip = driver.execute_script(place.format("> svg")), driver.execute_script(place.format(".tip"))
    assert tip[0] >= plot[1] - 1 or tip[1] <= plot[0] + 1  # beside the curves, not over them
    assert driver.execute_script(place.format(".tip svg"))[2] == 20


def test_axes_are_named(page, browser):
    driver = browser(page)
    for plot, name in {
        "#by-step": "training loss",
        "#by-time": "training loss",
        "#sensitivity": "training loss at the end",
    }.items():
        assert text(driver, f"{plot} .ylabel") == name


def test_the_table_is_sorted_by_the_title_that_is_clicked(page, browser, results):
    driver = browser(page)
    rows = "return [...document.querySelectorAll('#table tbody tr')].map(r => r.dataset.row)"
    sorts = "return [...document.querySelectorAll('#table th')].map(t => t.getAttribute('aria-sort'))"
    entries = results["optimizers"]
    assert driver.execute_script(sorts) == ["none", "none", "descending", *["none"] * 6]  # by what ranks
    assert driver.execute_script(rows)[0] == max(NAMES, key=lambda n: entries[n]["accuracy"]["mean"])
    by_state = sorted(NAMES, key=lambda n: entries[n]["state_bytes"])
    title = driver.find_element("css selector", "#table th:nth-last-child(2) button")  # before the engine
    title.send_keys("\ue007")  # Enter
    assert [entries[n]["state_bytes"] for n in driver.execute_script(rows)] == [entries[n]["state_bytes"] for n in by_state]
    assert driver.execute_script(sorts)[-2] == "ascending"
    title.click()
    assert entries[driver.execute_script(rows)[0]]["state_bytes"] == entries[by_state[-1]]["state_bytes"]
    assert driver.execute_script(sorts) == [*["none"] * 7, "descending", "none"]


def test_pointing_at_the_legend_lifts_a_curve(page, browser):
    driver = browser(page)
    opacity = "return getComputedStyle(document.querySelector('#by-time path.series[data-name={}]')).opacity"
    driver.execute_script("document.querySelector('[data-of=adamw]').dispatchEvent(new PointerEvent('pointerenter'))")
    driver.execute_script("redraw(); document.querySelectorAll('.series').forEach(s => s.style.transition = 'none')")
    assert (driver.execute_script(opacity.format("adamw")), driver.execute_script(opacity.format("muon"))) == ("1", "0.14")
    driver.execute_script("document.querySelector('[data-of=adamw]').dispatchEvent(new PointerEvent('pointerleave'))")
    assert driver.execute_script(opacity.format("muon")) == "1"


def test_divergence_is_shown(page, browser):
    driver = browser(page)
    assert "sgd in 1 of 2" in text(driver, ".notice")
    assert driver.execute_script("return document.querySelectorAll('#by-step path.mark[data-name=sgd]').length") == 1
    assert driver.execute_script("return document.querySelectorAll('#sensitivity path.mark[data-name=sgd]').length") == 1


def test_what_a_reader_needs_to_repeat_it(page, browser, results):
    driver = browser(page)
    assert text(driver, "#command") == results["command"]
    facts = text(driver, "#facts")
    assert all(f"{name} {version}" in facts for name, version in results["machine"]["versions"].items())
    assert results["machine"]["cpu"] in facts
    assert "reference: NumPy in float64" in facts  # the engine in words


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("which", ["page", "walks"])
def test_at_phone_width_nothing_overflows(which, dark, browser, overflow, console_errors, request):
    driver = browser(request.getfixturevalue(which), width=390, height=844, dark=dark)
    assert driver.execute_script("return innerWidth") == 390
    assert overflow(driver) == 0
    assert console_errors(driver) == []
    small = driver.execute_script(
        "return Math.min(...[...document.querySelectorAll('.plot, .map')].filter(p => p.children.length).map(p => p.clientWidth))"
    )
    assert small > 300


@pytest.mark.parametrize("which", ["page", "walks"])
def test_dark_mode(which, browser, request):
    path = request.getfixturevalue(which)
    light, dark = background(browser(path)), background(browser(path, dark=True))
    assert light != dark
    assert sum(map(int, dark[4:-1].split(","))) < 120 < 600 < sum(map(int, light[4:-1].split(",")))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_colour_can_be_told_from_the_card(page, browser, dark):
    """Contrast of at least 3:1, what WCAG asks of graphics; 4.5:1 for text."""
    driver = browser(page, dark=dark)
    colours = driver.execute_script(
        "const p = document.createElement('i'); document.body.append(p);"
        "const of = name => { p.style.color = `var(${name})`; return getComputedStyle(p).color.match(/[\\d.]+/g).slice(0, 3).map(Number) };"
        "return Object.fromEntries(['--card', '--ink', '--muted', ...Array.from({length: 7}, (_, i) => `--c${i}`)].map(n => [n, of(n)]))"
    )

    def luminance(rgb):
        r, g, b = ((v / 255 / 12.92) if v / 255 <= 0.03928 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    card = luminance(colours.pop("--card"))
    for name, rgb in colours.items():
        lighter, darker = sorted([card, luminance(rgb)], reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= (3 if name.startswith("--c") else 4.5), name


def test_an_interrupted_race_with_nothing_done(tmp_path, browser, console_errors):
    raced = running.Race(digits.MLP, NAMES, 30, 2, "reference", tune=False, interrupted=True)
    path = tmp_path / "report.html"
    path.write_text(report.html(report.results(raced, "rlx-optim race", get_machine())), encoding="utf-8")
    driver = browser(path)
    assert console_errors(driver) == []
    assert "interrupted" in text(driver, ".notice")


def test_a_race_in_which_everyone_diverged(tmp_path, browser, console_errors):
    lost = race.Run(0, [2.3, math.nan], [0.1, 0.2], {}, 1.0, 8, diverged_at=1)
    raced = running.Race(digits.MLP, ["sgd"], 30, 1, "reference", tune=False, entries=[running.Entry("sgd", {"lr": 9.0}, [lost])])
    path = tmp_path / "report.html"
    path.write_text(report.html(report.results(raced, "rlx-optim race", get_machine())), encoding="utf-8")
    driver = browser(path)
    assert console_errors(driver) == []
    assert "diverged" in text(driver, "#table")
    assert "--tune" in text(driver, "#sensitivity-note")


def test_a_full_report_is_small_and_asks_for_nothing(tmp_path, browser):
    assert cli.main(["race", "--steps", "3", "--engine", "reference", "--seeds", "1", "--out", str(tmp_path / "r")]) == 0
    path = tmp_path / "r" / "report.html"
    assert path.stat().st_size < 3_000_000
    driver = browser(path)
    assert (
        driver.execute_script("return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length")
        == 0
    )


def test_the_landscape(walks, browser, console_errors):
    driver = browser(walks)
    assert console_errors(driver) == []
    first = [name for name in NAMES if name in landscape.FIRST]
    assert driver.execute_script("return document.querySelectorAll('.map path.series').length") == 3 * len(first)
    click(driver, "#all")
    assert driver.execute_script("return document.querySelectorAll('.map path.series').length") == 3 * len(NAMES)
    click(driver, '#legend button[data-of="sgd"]')
    assert driver.execute_script("return document.querySelectorAll('.map path[data-name=sgd]').length") == 0
    shades = driver.execute_script(
        "return [...document.querySelectorAll('canvas')].map(c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((_, i) => i % 4 === 0)).size)"
    )
    assert min(shades) > 5  # contours, not a blank
    long = "return document.querySelector('.map path.series').getAttribute('d').length"
    whole = driver.execute_script(long)
    driver.execute_script("const s = document.getElementById('step'); s.value = 3; s.oninput()")
    assert driver.execute_script(long) < whole
    assert text(driver, "#count") == "3 / 20"
