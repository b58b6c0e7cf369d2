"""Every Python block of README and docs runs. A block marked `continues` goes on where the one before it ended; one marked
`integration=NAME` needs that package."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = page.name == "README.md"  # its blocks build on each other
    namespace: dict = {}
    for number, (mark, code) in enumerate(BLOCK.findall(page.read_text()), 1):
        package = re.search(r"integration=(\w+)", mark)
        if package and importlib.util.find_spec(package[1]) is None:
            continue  # run by make test-integrations
        if not (whole or "continues" in mark):
            namespace = {}
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def test_there_is_something_to_run():
    counts = {page.name: len(BLOCK.findall(page.read_text())) for page in PAGES}
    assert counts["README.md"] >= 5
    assert counts["engines.md"] >= 2
    assert counts["protocol.md"] >= 3


def test_links_point_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_shows_the_two_commands_and_every_optimizer():
    import rlx_optim

    text = (ROOT / "README.md").read_text()
    assert "make race" in text
    assert "make test" in text
    assert all(f"`{name}`" in text for name in rlx_optim.list_optimizers())
    assert len(text.splitlines()) < 250
