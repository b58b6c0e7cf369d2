"""Renew the tables of README.md from the committed results.

    python tools/readme.py          # or: make tables

Each stands between <!-- table: NAME --> and <!-- /table -->; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from docsite import bench, parity

README = Path(__file__).parents[1] / "README.md"
TABLES = {"benchmarks": bench.by_optimizer, "parity": parity.by_optimizer}
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def renewed(text: str) -> str:
    return PLACE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
