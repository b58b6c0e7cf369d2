"""State in fewer bits: peak memory, from the committed result of `lab/peak.py`, and speed, from one of `rlx-optim bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.results import label_of
from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]
FORMATS = ("float32", "bfloat16", "int8")
ROUNDINGS = ("nearest", "stochastic", "exact")


def newest(files: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(max((ROOT / "benchmarks").glob(files)).read_text())
    return found


def by_format() -> str:
    """A line an optimizer and format: its state, and the peak of a step, in MB; `lab/peak.py` writes MiB."""
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


def by_rounding() -> str:
    """A line a format of state: milliseconds of AdamW with bfloat16 weights in each rounding, torch's beside them."""
    cells = {row["implementation"]: row for row in newest("halves-*.json")["rows"]}
    rows = [
        [f"`{form}`", *(f"{cells[label_of(form, how)]['ms_per_step']:.2f}" for how in ROUNDINGS)] for form in FORMATS
    ]  # fmt: skip
    return table(["state", *(f'`"{how}"`' for how in ROUNDINGS)], rows, right=(1, 2, 3))


def source(found: dict[str, Any], weights: str, more: str = "") -> str:
    """What was measured where, and by what."""
    m, command = found["machine"], f"rlx-optim bench --device cuda --model {found['model']}{more} --state-dtype bfloat16,int8"
    step = f"A step of AdamW on {found['parameters'] / 1e9:.1f} G {weights} parameters with such gradients"
    return f"{step}, {m['gpu']}, {m['date'][:10]}, ms (`{command}`)"


def of_rounding() -> str:
    found = newest("halves-*.json")
    fused = next(row for row in found["rows"] if row["implementation"] == "torch fused")
    beside = f"torch's fused AdamW, whose state is bfloat16 too, took {fused['ms_per_step']:.2f}."
    return f"{source(found, 'bfloat16', ' --weights bfloat16')}; {beside}"


def beside_torch() -> str:
    """AdamW on float32 weights, by the format of its state, torch's beside it; in a line."""
    found = newest("adamw-*.json")
    cells = {row["implementation"]: f"{row['ms_per_step']:.2f}" for row in found["rows"]}
    formats = ", ".join(f"{cells[label_of(form)]} in `{form}`" for form in FORMATS)
    return f"{source(found, 'float32')}: torch fused {cells['torch fused']}; ours, by the format of its state, {formats}."
