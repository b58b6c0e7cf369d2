"""What fits with `offload`, by the memory command; what a step costs, by the committed result of `rlx-optim bench --offload`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rlx_optim.cli import memory

from .text import table

ROOT = Path(__file__).parents[2]
MODELS = {"llama-1.1b": "1.1 B", "llama-7b": "7 B", "llama-13b": "13 B"}
CARDS = (24, 48, 80)  # GB
#: weights, rounding, formats of state
KINDS = (
    ("float32", "", ("float32", "bfloat16", "int8")),
    ("bfloat16", "stochastic", ("float32", "bfloat16", "int8")),
    ("bfloat16", "exact", ("float32", "bfloat16", "int8")),
)


@functools.cache
def homes(model: str, weights: str, rounding: str, kept: str, offload: bool) -> dict[str, float]:
    """GB on the device and on the host."""
    settings = {"state_dtype": kept} | ({"rounding": rounding} if rounding else {})
    found = memory.place_bytes(memory.make_named("adamw", settings), memory.shapes_of(model), memory.WEIGHTS[weights], offload)
    return {place: sum(sizes.values()) / 1e9 for place, sizes in found.items()}


def cell(model: str, *kind: Any) -> str:
    found = homes(model, *kind)
    card = next((f"**{size}**" for size in CARDS if found["device"] <= size), "–")
    beside = f" + {found['host']:.1f}" if found["host"] else ""
    return f"{card}: {found['device']:.1f}{beside}"


def fits() -> str:
    """A line a combination: the smallest card that holds it, and GB on the device and on the host."""
    rows = []
    for weights, rounding, formats in KINDS:
        for kept in formats:
            for offload in (False, True):
                kind = (weights, rounding, kept, offload)
                said = [weights, f'`"{rounding}"`' if rounding else "", kept, '`"cpu"`' if offload else ""]
                rows.append([*said, *(cell(model, *kind) for model in MODELS)])
    return table(["weights", "`rounding`", "`state_dtype`", "`offload`", *MODELS.values()], rows)


def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(max((ROOT / "benchmarks").glob("offload-*.json")).read_text())
    return found


def speed() -> str:
    """A line a row of the bench."""
    rows = []
    for row in measured()["rows"]:
        times = [
            "–" if row.get(what) is None else f"{1e3 * row[what]:,.0f}"
            for what in ("step", "copies", "host", "torch_fused", "torchao")
        ]
        over = f"{row['over_limit']:.2f}×"
        rows.append(
            [row["optimizer"], row["kind"], *times, over, f"{row['device_peak'] / 1e6:,.0f}", f"{row['state'] / 1e9:.2f}"]
        )
    head = [
        "",
        "weights, state",
        "step",
        "copies alone",
        "host alone",
        "torch fused on copies",
        "torchao",
        "over the larger",
        "device, MB",
        "host, GB",
    ]
    return table(head, rows, right=range(2, 9))


def source() -> str:
    found, speeds = measured(), {what: f"{measured()[what] / 1e9:.0f}" for what in ("down", "up", "both")}
    m = found["machine"]
    return (
        f"{m.get('gpu', '')}, {m['cpu']} with {m['cores']} cores, {m['date'][:10]}; copies of 1.07 GB, page-locked: "
        f"{speeds['down']} GB/s down, {speeds['up']} up, {speeds['both']} each way at once"
    )


def point() -> str:
    """One point of `fits`, measured."""
    m = measured()
    row = next(row for row in m["rows"] if row["optimizer"] == "adamw" and row["kind"] == "float32")
    counted = homes(m["model"], "float32", "", "float32", True)["device"]
    taken = (8 * m["parameters"] + row["device_peak"]) / 1e9
    return f"{taken:.2f} GB where the table counts {counted:.2f}"
