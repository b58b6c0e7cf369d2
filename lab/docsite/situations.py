"""What a step costs in the situations of training, by the committed result of `python -m lab.situations`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from lab.situations import SITUATIONS

from .text import table

FILE = Path(__file__).parents[2] / "benchmarks" / "situations-cpu.json"
TENSORS = {"gpt2": "148", "2000 of 4×4": "2,000 of 4×4"}


@functools.cache
def measured() -> dict[str, Any]:
    """The committed figures."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def by_case() -> str:
    """A table with a row for each optimizer and its tensors, as ratios to torch's fused AdamW."""
    rows = []
    for case, found in measured()["found"].items():
        name, _, tensors = case.partition(", ")
        if set(found) == set(SITUATIONS) and "AdamW" in name:
            rows.append([name, TENSORS[tensors], *(f"{found[each]['ratio']:.2f}" for each in SITUATIONS)])
    return table(["", "tensors", *SITUATIONS], rows, right=range(1, 2 + len(SITUATIONS)))


def of_names() -> str:
    """A sentence about the NumPy API."""
    found = measured()["found"]
    ratio, single = found["NumPy AdamW, gpt2"]["comes and goes"]["ratio"], found["NumPy AdamW, 1 of 1000"]["every"]
    return (
        f"In the NumPy API a name that comes and goes costs {ratio:.2f} times the steady step, and `step_all` of one array of "
        f"1,000 elements takes {single['ours'] * 1e6:.0f} µs, where torch's fused step takes "
        f"{single['torch fused AdamW'] * 1e6:.0f}."
    )


def source() -> str:
    """On what it was measured."""
    found = measured()
    return f"a CPU with {found['machine']}, torch {found['torch']}"
