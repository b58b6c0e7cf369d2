"""The generated pages of the documentation, without mkdocs: complete for every optimizer, their links lead somewhere, their examples run."""

import pkgutil
import re
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import formula_lines

import rlx_optim
from lab import readme, site_hook
from lab.docsite import arguments, bench, formulas, optimizers, plots
from lab.docsite.text import prose
from rlx_optim.registry import spec_class

ROOT = Path(__file__).parent.parent

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
    told, kind = optimizers.describe_rule(name), spec_class(name)
    assert all(len(field["meaning"]) > 3 for field in told["hyperparameters"].values())
    given = {"lr": 0.1} if name == "sgd" else {}
    variants = [given, *({**given, **more} for more in VARIANTS.get(name, []))]
    slots = {re.sub(r"\d+$", "1", slot) for v in variants for shape in SHAPES for slot in kind(**v).slots(shape)}
    counters = {counter for v in variants for counter in kind(**v).counters()}
    assert told["state"].keys() == slots | counters
    assert all(len(text) > 3 for text in told["state"].values())


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
    said = set(re.findall(r"^#+ .* \{ #(\w+) \}$", text, re.MULTILINE))
    return said | {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_links_lead_somewhere():
    pages = {str(path.relative_to(ROOT / "docs")): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    texts = {page: site_hook.filled(text) for page, text in pages.items()} | site_hook.texts()
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


def test_the_reference_has_every_argument_of_every_front_end():
    for front_end, (_, _, beside) in arguments.FRONT_ENDS.items():
        text = site_hook.TABLES[f"arguments {front_end}"]()
        for kind in map(spec_class, NAMES):
            name = arguments.name_in(front_end, kind)
            section = text.partition(f"{{ #{name} }}")[2].partition("\n### ")[0]
            listed = re.findall(r"^\| `(\w+)` \| <code>[^\n|]+</code> \| [^\n]+ \| [^\n]{10,} \|$", section, re.MULTILINE)
            assert listed == [each.name for each in arguments.signatures(front_end)[name]]
            fields = kind.optax.settings if beside is arguments.documentation.OPTAX else kind.fields
            assert set(fields) <= set(listed) | set(kind.optax.without), name


def test_what_the_reference_names_is_where_it_says():
    """mkdocs, which needs longer, looks it up in the sources."""
    torch_or_jax = {"rlx_optim.torch": "torch", "rlx_optim.optax": "optax"}
    named = [name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)]
    assert len(named) > 10
    for name in named:
        if needed := next((each for start, each in torch_or_jax.items() if name.startswith(start)), None):
            pytest.importorskip(needed)
        assert pkgutil.resolve_name(name) is not None


def test_no_figure_is_left_out():
    assert all("None" not in site_hook.TABLES[table]() for table in ("benchmark source", "copy", "choices"))


def test_index_has_all():
    assert re.findall(r"\]\((\w+)\.md\)", optimizers.index()) == NAMES


# ---- tables -----------------------------------------------------------------------------------------------------------------
def test_tables_come_from_the_committed_results():
    run = [run for run in bench.runs() if run["model"] == "one:1k"][-1]
    ours, peer = (next(r for r in run["rows"] if r["implementation"] == who)["ms_per_step"] for who in ("ours", "torch fused"))
    row = next(line for line in bench.by_size().splitlines() if "one tensor of 1,000 " in line)
    assert f"{1000 * ours:.3g} µs" in row
    assert f"{peer / ours:.1f}×" in row
    assert all(site_hook.TABLES[name]().strip() for name in site_hook.TABLES)


def test_the_home_page_says_which_version_it_is_of():
    home = site_hook.filled((ROOT / "docs" / "index.md").read_text())
    assert f"version {rlx_optim.__version__}" in home
    assert f"## {rlx_optim.__version__} - " in site_hook.texts()["changelog.md"]


def test_code_in_tables_has_no_escapes():
    pages = {path.name: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    shown = {name: site_hook.filled(text) for name, text in (pages | optimizers.pages()).items()}
    assert {name for name, text in shown.items() if re.search(r"`[^`\n]*\\\|[^`\n]*` ", text)} == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("taken as p − lr·weight_decay·p in one", "taken as `p − lr·weight_decay·p` in one"),
        ("eigenvalues diag(Qᵀ·L·Q), v", "eigenvalues `diag(Qᵀ·L·Q)`, v"),
        ("p ← (1 − lr·weight_decay)·p − lr·u, and", "`p ← (1 − lr·weight_decay)·p − lr·u`, and"),
        ("a dimension (or none) and 0.001·(n − 500)", "a dimension (or none) and `0.001·(n − 500)`"),
    ],
)
def test_a_formula_in_prose_is_code_as_a_whole(text, shown):
    assert prose(text, ()) == shown


def test_marks_of_pages_are_known():
    marks = {mark for path in (ROOT / "docs").rglob("*.md") for mark in site_hook.MARK.findall(path.read_text())}
    assert marks == set(site_hook.TABLES)


@pytest.mark.parametrize("file", readme.FILES, ids=lambda file: file.name)
def test_tables_are_current(file):
    text = file.read_text()
    assert readme.renewed(text) == text, "run python -m lab.readme"


# ---- the index page -----------------------------------------------------------------------------------------------------------
def test_links_of_the_index_page_lead_into_the_repository():
    pytest.importorskip("hatchling")
    sys.path.insert(0, str(ROOT))
    import hatch_build

    text = hatch_build.absolute((ROOT / "README.md").read_text())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links)
    inside = [link.removeprefix(place) for link in links for place in hatch_build.PLACES.values() if link.startswith(place)]
    assert inside
    assert all((ROOT / path.partition("#")[0]).exists() for path in inside)


def test_the_release_agrees_with_itself():
    version = rlx_optim.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    date = re.search(rf"^## {version} - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f'\ndate-released: "{date[1]}"\n' in citation
    files = {path.name for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert files == {"ci.yml", "build.yml", "docs.yml", "release.yml"}
