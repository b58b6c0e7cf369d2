"""Renew the tables of README.md and benchmarks/h200.md from the committed results.

    python -m lab.readme          # or: make tables

Each stands between <!-- table: NAME --> and <!-- /table -->; a test compares.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from lab.docsite import bench, parity

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FILES = (README, ROOT / "benchmarks" / "h200.md")
#: the others' speed is in the documentation
SHOWN = (
    "sgd", "adam", "adamw", "nadamw", "radam", "qhadamw", "lamb", "adafactor", "lion",
    "soap", "kronpsgd", "muon", "sophia", "mars",
)  # fmt: skip
TABLES = {
    "benchmarks": functools.partial(bench.by_optimizer, among=SHOWN),
    "parity": parity.by_optimizer,
    "gpt2": functools.partial(bench.on_a_gpu, "gpt2-124m"),
    "llama": functools.partial(bench.on_a_gpu, "llama-1.1b"),
    "many": functools.partial(bench.on_a_gpu, "many-tiny"),
}
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def renewed(text: str) -> str:
    return PLACE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


if __name__ == "__main__":
    for file in FILES:
        file.write_text(renewed(file.read_text()))
