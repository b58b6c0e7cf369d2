"""Every Python block of README and docs runs. A block marked `continues` goes on where the one before it ended; one marked
`integration=NAME` needs that package. Generated pages are in test_site.py; files of packages (`title=`) are in test_own.py too."""

import importlib.util
import linecache
import re
from pathlib import Path

import pytest

from lab import site_hook
from rlx_optim import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))  # what a page registers is gone after it
    whole = page.name == "README.md"  # its blocks build on each other
    namespace: dict = {}
    for number, (mark, code) in enumerate(BLOCK.findall(page.read_text()), 1):
        package = re.search(r"integration=(\w+)", mark)
        if package and importlib.util.find_spec(package[1]) is None:
            continue  # run by make test-integrations
        if not (whole or "continues" in mark):
            namespace = {}
        file = f"{page.name}, block {number}"
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # rules are read as text
        exec(compile(code, file, "exec"), namespace)


def test_there_is_something_to_run():
    counts = {str(page.relative_to(ROOT)): len(BLOCK.findall(page.read_text())) for page in PAGES}
    assert counts["README.md"] >= 5
    for page in ("quickstart", "named", "engines", "own"):
        assert counts[f"docs/{page}.md"] >= 5
    assert counts["docs/protocol.md"] >= 3
    assert all(counts[f"docs/migrate/{page}.md"] for page in ("torch", "optax", "pytorch_optimizer", "rust"))


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_code_fits_the_page(page):
    """At 1280 pixels a page shows about so many columns; what is longer would be folded."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 88]


def test_links_point_somewhere():
    generated = {ROOT / "docs" / page for page in [*site_hook.texts(), *site_hook.plots.FIGURES]}
    for page in PAGES:
        for target, _ in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists() or path in generated, f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages | site_hook.texts().keys() <= named


def test_readme_shows_the_two_commands_and_every_optimizer():
    import rlx_optim

    text = (ROOT / "README.md").read_text()
    assert "make race" in text
    assert "make test" in text
    assert all(f"`{name}`" in text for name in rlx_optim.list_optimizers())
    assert len(text.splitlines()) < 250
