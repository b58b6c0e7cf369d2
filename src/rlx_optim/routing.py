"""Which tensor goes to which rule, and the report that says why."""

from __future__ import annotations

from collections.abc import Sequence


def report(rows: Sequence[tuple[str, tuple[int, ...], str, str]]) -> str:
    """A table: parameter, shape, rule, why."""
    table = [("parameter", "shape", "rule", "why")]
    table += [(name, "×".join(map(str, shape)) or "scalar", rule, why) for name, shape, rule, why in rows]
    widths = [max(len(row[k]) for row in table) for k in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in table
    )
