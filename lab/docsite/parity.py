"""Tables of parity, from the committed results of `rlx-optim parity --out benchmarks/parity.json`: one a machine."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rlx_optim import list_optimizers
from rlx_optim.registry import spec_class

from .text import table

ROOT = Path(__file__).parents[2]


@functools.cache
def results() -> list[dict[str, Any]]:
    """The committed results of `rlx-optim parity`."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("parity*.json"), reverse=True)]


def compared() -> list[dict[str, Any]]:
    return [row for each in results() for row in each["rows"]]


def difference(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["error"] is None:
        return str(row["status"])
    shown = "0" if row["error"] == 0 else f"{row['error']:.1e}".replace("e-0", "e-")
    return shown if row["status"] in ("equal", "measured") else f"{shown} ({row['status']})"


def by_optimizer(*kinds: str) -> str:
    """A line an optimizer, a column an engine or a library."""
    kinds = kinds or ("engine", "peer")
    rows = [row for row in compared() if row["kind"] in kinds]
    columns = [c for kind in kinds for c in dict.fromkeys((kind, row["column"]) for row in rows if row["kind"] == kind)]
    cells = {(row["optimizer"], row["kind"], row["column"]): row for row in rows}
    names = [name for name in list_optimizers() if any(row["optimizer"] == name for row in rows)]
    head = ["optimizer", *(f"`{c}`" if kind == "engine" else {"torch": "torch.optim"}.get(c, c) for kind, c in columns)]
    body = [[spec_class(name).title, *(difference(cells.get((name, kind, c))) for kind, c in columns)] for name in names]
    return table(head, body, right=tuple(range(1, len(head))))


def remarks() -> str:
    """What must be known of a comparison, as a list."""
    return "\n".join(f"- `{row['against']}`: {row['remark']}" for row in compared() if row["remark"])


def source() -> str:
    made = []
    for each in results():
        machine = each["machine"]
        used = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        where = f"on an {machine['gpu']}, " if machine.get("gpu") else ""
        made.append(f"made on {machine['date'][:10]} by `{each['command']}` {where}with {used}")
    return "; ".join(made)
