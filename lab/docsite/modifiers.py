"""Which rule takes which modifier, from the classes themselves."""

from __future__ import annotations

from typing import Any

from rlx_optim import list_optimizers, modifiers
from rlx_optim.registry import required, spec_class

from .text import table

CELLS: dict[str, dict[str, Any]] = {
    "cautious=True": {"cautious": True},
    "decay='cautious'": {"decay": "cautious"},
    "decay='hyperball'": {"decay": "hyperball"},
}
SCALES: dict[Any, str] = {modifiers.by_share: "1/max(share, 1e-3)", modifiers.by_count: "n/(kept + 1)", None: "in its own place"}


def cell(name: str, modifier: str) -> str:
    """What a rule makes of a modifier: how it is scaled, yes, or why it is refused."""
    kind = spec_class(name)
    try:
        spec = kind(**required(kind), **CELLS[modifier])
    except ValueError as refused:
        return "refused: " + str(refused).partition(" is not for this rule: ")[2]
    return SCALES[spec.caution] if spec.cautious else "yes"


def by_rule() -> str:
    rows = [
        [f"[{spec_class(name).title}](optimizers/{name}.md)", *(cell(name, each) for each in CELLS)] for name in list_optimizers()
    ]
    return table(["", *(f"`{each}`" for each in CELLS)], rows)
