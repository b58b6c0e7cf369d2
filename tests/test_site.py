"""The generated pages of the documentation, without mkdocs: complete for all fourteen, their links lead somewhere, their examples run."""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import formula_lines

import rlx_optim
from rlx_optim.named import spec_class

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402
import site_hook  # noqa: E402
from docsite import bench, formulas, optimizers, plots  # noqa: E402

NAMES = rlx_optim.list_optimizers()
SECTIONS = ("Formulas", "Use it", "Hyperparameters", "State", "Conventions, and other libraries", "When, and what it costs")
SHAPES = [(4, 6), (4,), (), (3, 4, 5)]


# ---- pages ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_page_is_complete(name):
    page, kind = optimizers.page(name), spec_class(name)
    for title in SECTIONS:
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        assert len(section.strip()) > 60, title
    shown = re.findall(r"\\\(\\displaystyle (.*?)\\\)", page)
    assert shown == [one for formula, _ in formula_lines(name) for one in formulas.latex(formula, kind.fields)]
    assert len(shown) >= 3
    assert all(one.count("{") == one.count("}") for one in shown)
    assert all(f"| `{field}` |" in page for field in kind.fields)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_documented(name):
    told, kind = optimizers.described(name), spec_class(name)
    assert all(len(field["meaning"]) > 3 for field in told["hyperparameters"].values())
    given = {"lr": 0.1} if name == "sgd" else {}
    variants = [given, *({**given, **more} for more in VARIANTS.get(name, []))]
    slots = {re.sub(r"\d+$", "1", slot) for v in variants for shape in SHAPES for slot in kind(**v).slots(shape)}
    counters = {counter for v in variants for counter in kind(**v).counters()}
    assert optimizers.documented(name).keys() == slots | counters


VARIANTS = {
    "sgd": [{"momentum": 0.9}],
    "adam": [{"amsgrad": True}],
    "adamw": [{"amsgrad": True}],
    "nadamw": [{"convention": "torch"}],
    "adafactor": [{"beta1": 0.9}],
    "scion": [{"momentum": 0.1}],
}


def anchors(text):
    """The ids that Markdown gives headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_links_lead_somewhere():
    texts = {str(path.relative_to(ROOT / "docs")): path.read_text() for path in (ROOT / "docs").rglob("*.md")} | site_hook.texts()
    figures = plots.FIGURES
    for page, text in site_hook.texts().items():
        for link in re.findall(r"\]\(([^):]+)\)", text):
            target, _, anchor = link.partition("#")
            path = str((Path("/") / page).parent.joinpath(target).resolve().relative_to("/")) if target else page
            assert path in texts or path in figures, f"{page}: {link}"
            assert not anchor or path in figures or anchor in anchors(texts[path]), f"{page}: {link}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", ["NumPy", "PyTorch", "JAX"])
def test_examples_run(name, framework):
    pytest.importorskip({"NumPy": "numpy", "PyTorch": "torch", "JAX": "jax"}[framework])
    block = optimizers.page(name).partition(f'=== "{framework}"')[2].partition("```python\n")[2].partition("    ```")[0]
    code = textwrap.dedent("    " + block.lstrip())
    assert "rlx_optim" in code
    exec(compile(code, f"{name}, {framework}", "exec"), {})


def test_index_has_all_fourteen():
    assert re.findall(r"\]\((\w+)\.md\)", optimizers.index()) == NAMES


# ---- tables -----------------------------------------------------------------------------------------------------------------
def test_tables_come_from_the_committed_results():
    run = [run for run in bench.runs() if run["model"] == "one:1k"][-1]
    ours, peer = (next(r for r in run["rows"] if r["implementation"] == who)["ms_per_step"] for who in ("ours", "torch fused"))
    row = next(line for line in bench.by_size().splitlines() if "one tensor of 1,000 " in line)
    assert f"{1000 * ours:.3g} µs" in row
    assert f"{peer / ours:.1f}×" in row
    assert all(site_hook.TABLES[name]().strip() for name in site_hook.TABLES)


def test_marks_of_pages_are_known():
    marks = {mark for path in (ROOT / "docs").rglob("*.md") for mark in site_hook.MARK.findall(path.read_text())}
    assert marks == set(site_hook.TABLES)


@pytest.mark.parametrize("file", readme.FILES, ids=lambda file: file.name)
def test_tables_are_current(file):
    text = file.read_text()
    assert readme.renewed(text) == text, "run python tools/readme.py"
