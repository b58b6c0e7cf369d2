"""What mkdocs is told while it builds: the generated files, the tables in hand-written pages, and which optional pages exist.

mkdocs.yml names this file under `hooks`; it can also be imported without mkdocs, for its tables.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs imports this file by itself

import rlx_optim
from lab.docsite import (
    arguments,
    bench,
    conformance,
    evidence,
    katex,
    modifiers,
    offload,
    optimizers,
    parity,
    peak,
    plots,
    precision,
    races,
    situations,
)

ROOT = Path(__file__).parents[1]
#: pages of the site that stand elsewhere in the repository, where they exist; their tables are in place
ELSEWHERE = {"h200.md": ROOT / "benchmarks" / "h200.md", "changelog.md": ROOT / "CHANGELOG.md"}
RACED = ("digits-mlp", "char-gpt")
#: <!-- table: NAME --> in a page becomes this
TABLES = {
    "version": lambda: rlx_optim.__version__,
    "benchmarks": bench.by_optimizer,
    "benchmarks by size": bench.by_size,
    "benchmark source": lambda: bench.source("two-blocks"),
    "copy": bench.copies,
    "situations": situations.by_case,
    "situations named": situations.of_names,
    "situations source": situations.source,
    "choices": bench.choices,
    "choices source": bench.device_source,
    "training run": bench.training_run,
    "jax": bench.in_jax,
    "evidence source": evidence.source,
    "evidence marks": evidence.marks,
    "evidence results": evidence.results,
    "evidence costs": evidence.costs,
    "evidence rates": evidence.rates,
    "evidence starts": evidence.starts,
    "evidence decays": evidence.decays,
    "evidence storage": evidence.storage,
    "evidence steps": evidence.steps,
    "evidence frequencies": evidence.frequencies,
    "evidence fits": evidence.fits,
    "evidence figures": evidence.figures,
    **{f"evidence {name}": functools.partial(evidence.sentence, name) for name in rlx_optim.list_optimizers()},
    **{f"race {model}": functools.partial(races.by_optimizer, model) for model in RACED},
    **{f"race figure {model}": functools.partial(races.figure, model) for model in RACED},
    **{f"race source {model}": functools.partial(races.source, model) for model in RACED},
    "numbers small": precision.small,
    "numbers bfloat16": precision.bfloat16,
    "numbers products": precision.products,
    "numbers outside": precision.outside,
    "numbers spikes": precision.spikes,
    "numbers source": precision.source,
    **{f"arguments {front_end}": functools.partial(arguments.reference, front_end) for front_end in arguments.FRONT_ENDS},
    "modifiers": modifiers.by_rule,
    "peak memory": peak.by_format,
    "coded by rule": peak.by_rule,
    "coded adamw": peak.beside_torch,
    "rounded": peak.by_rounding,
    "rounded source": peak.of_rounding,
    "offload fits": offload.fits,
    "offload speed": offload.speed,
    "offload source": offload.source,
    "offload point": offload.point,
    "parity engines": lambda: parity.by_optimizer("engine"),
    "parity peers": lambda: parity.by_optimizer("peer"),
    "parity remarks": parity.remarks,
    "parity source": parity.source,
    "conformance libraries": conformance.by_library,
    "conformance checks": conformance.by_check,
    "conformance optimizers": conformance.by_optimizer,
    "conformance unchecked": conformance.unchecked,
    "conformance source": conformance.source,
}
MARK = re.compile(r"<!-- table: ([\w -]+?) -->")


def filled(text: str) -> str:
    """A page with its tables in place."""
    return MARK.sub(lambda match: TABLES[match[1]](), text)


def texts() -> dict[str, str]:
    """Every generated page: its path under docs/ and its text."""
    there = {page: path.read_text() for page, path in ELSEWHERE.items() if path.exists()}
    return optimizers.pages() | {page: re.sub(r"<!-- /?table.*?-->", "", text) for page, text in there.items()}


# ---- called by mkdocs -----------------------------------------------------------------------------------------------------
def on_config(config: Any) -> Any:
    """Leave out of the navigation what is not in this checkout."""
    docs, there = Path(config.docs_dir), texts()

    def pruned(item: Any) -> Any:
        if isinstance(item, list):
            return [kept for kept in map(pruned, item) if kept]
        if isinstance(item, dict):
            return {title: kept for title, below in item.items() if (kept := pruned(below))}
        return item if item in there or (docs / item).exists() else None

    config.nav = pruned(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in texts().items():
        files.append(File.generated(config, path, content=text))
    for path, source in {**plots.files(), **katex.files()}.items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tables go in; what only tests/test_docs.py needs to know of a code block goes out."""
    return re.sub(r"^```python(?: (title=\S+))?.*$", r"```python \1", filled(markdown), flags=re.MULTILINE)
