"""Which tensor goes to which rule, and the report that says why."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def sized(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def report(rows: Sequence[tuple[str, tuple[int, ...], str, str]]) -> str:
    """A table: parameter, shape, rule, why."""
    return table([("parameter", "shape", "rule", "why"), *((name, sized(shape), rule, why) for name, shape, rule, why in rows)])
