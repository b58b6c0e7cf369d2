"""What a step did: norms and shares, reduced in the passes that read the arrays anyway, and only where they were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# mypy: disable-error-code="no-untyped-def"
NORMS = ("grad_norm", "param_norm", "update_norm")
KINDS = (*NORMS, "masked", "orthogonality")


# ---- in a program -----------------------------------------------------------------------------------------------------------
def arriving(g):
    grad_norm = g
    return grad_norm


def leaving(p, change):
    param_norm = p
    update_norm = change
    return param_norm, update_norm


def share(kept_count: Any, lost_count: Any) -> Any:
    masked = lost_count / (kept_count + lost_count)
    return masked


def measure_gradient(E: Any, x: Any) -> Any:
    """Where a program first reads g."""
    return E.map(arriving, x, grad_norm="norm")


def measure_change(E: Any, x: Any) -> Any:
    """Where it has the change of p."""
    x = E.map(leaving, x, param_norm="norm", update_norm="norm")
    return E.each(share, x) if "kept_count" in x else x


def list_wanted(x: Mapping[str, Any]) -> list[str]:
    return [name for name in (*NORMS, "masked") if name in x]


# ---- of a stack, which is there as a whole ------------------------------------------------------------------------------------
def measure_stack(E: Any, start: Any, x: Any, change: Any) -> dict[str, Any]:
    """The same of matrix rules; and how far the direction is from orthogonal, ‖XXᵀ − 1‖/√rows for rows ≤ columns."""
    found = {name: E.norm(X).reshape(-1) for name, X in zip(NORMS, (start.g, start.p, change), strict=True)}
    if "kept_count" in x:
        found["masked"] = share(x.kept_count, x.lost_count).reshape(-1)
    if len(x.u.shape) > 2:
        X = x.u.reshape(*x.u.shape[:2], -1)
        X = X.mT if X.shape[1] > X.shape[2] else X
        A = X @ X.mT
        rows = A.shape[-1]
        found["orthogonality"] = E.norm(A - E.xp.eye(rows, dtype=A.dtype, device=A.device)).reshape(-1) / rows**0.5
    return found


# ---- what is given ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Stats:
    """all: of everything that was stepped; each: by parameter. Every number is an array of no dimension, in torch a tensor.

    grad_norm, param_norm (before the step), update_norm (of what was taken from p), update_rms (the effective learning rate);
    with cautious=True masked, the share of coordinates that did not move; of matrix rules orthogonality.
    """

    all: dict[str, Any]
    each: dict[str, dict[str, Any]]


Row = tuple[str, int, dict[str, Any]]  # a parameter, how many coordinates, its numbers


def make_rows(found: Mapping[str, Any], names: Sequence[str], sizes: Sequence[int]) -> list[Row]:
    """The numbers of a bundle, tensor by tensor."""
    each = enumerate(zip(names, sizes, strict=True))
    return [(name, size, {kind: values[i] for kind, values in found.items()}) for i, (name, size) in each]


def summarize_stats(rows: Iterable[Row]) -> Stats:
    """Of the pieces of a parameter together, and of all."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    every = [row for own_rows in by_name.values() for row in own_rows]
    return Stats(_together(every), {name: _together(own_rows) for name, own_rows in by_name.items()})


def _together(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    out: dict[str, Any] = {kind: sum(row[kind] ** 2 for _, _, row in rows) ** 0.5 for kind in NORMS}
    out["update_rms"] = out["update_norm"] / sum(size for _, size, _ in rows) ** 0.5
    for kind in ("masked", "orthogonality"):
        if some := [(size, row[kind]) for _, size, row in rows if kind in row]:
            out[kind] = sum(size * value for size, value in some) / sum(size for size, _ in some)
    return out
