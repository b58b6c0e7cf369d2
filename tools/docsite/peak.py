"""State in fewer bits: peak memory, from the committed result of `tools/peak.py`, and speed, from one of `rlx-optim bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlx_optim.cli.results import label_of
from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]
FORMATS = ("float32", "bfloat16", "int8")


def newest(files: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(max((ROOT / "benchmarks").glob(files)).read_text())
    return found


def by_format() -> str:
    """A line an optimizer and format: its state, and the peak of a step, in MB; `tools/peak.py` writes MiB."""
    rows = [
        [row["optimizer"], row["state_dtype"], *(f"{row[what] * 2**20 / 1e6:,.0f}" for what in ("state", "peak"))]
        for row in newest("memory-*.json")["rows"]
    ]
    return table(["optimizer", "`state_dtype`", "state, MB", "peak, MB"], rows, right=(2, 3))


def by_rule() -> str:
    """A line an optimizer: milliseconds in each format, and how fast its bytes went, of a copy's speed."""
    found = newest("coded-*.json")
    cells = {(row["optimizer"], row["implementation"]): row for row in found["rows"]}
    rows = []
    for name in dict.fromkeys(row["optimizer"] for row in found["rows"]):
        each = [cells[name, label_of(form)] for form in FORMATS]
        rows.append([spec_class(name).title, *(f"{row['ms_per_step']:.2f} ({row['copy_fraction']:.0%})" for row in each)])
    return table(["ms (of a copy's speed)", *(f"`{form}`" for form in FORMATS)], rows, right=(1, 2, 3))
