"""Peak memory, from the committed result of `tools/peak.py`."""

from __future__ import annotations

import json
from pathlib import Path

from .text import table

ROOT = Path(__file__).parents[2]


def by_format() -> str:
    """A line an optimizer and format: its state, and the peak of a step."""
    found = json.loads(max((ROOT / "benchmarks").glob("memory-*.json")).read_text())
    rows = [[row["optimizer"], row["state_dtype"], f"{row['state']:,.0f}", f"{row['peak']:,.0f}"] for row in found["rows"]]
    return table(["optimizer", "`state_dtype`", "state", "peak"], rows, right=(2, 3))
