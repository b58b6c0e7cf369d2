"""`rlx-optim list`: the optimizers, one line each.

rlx-optim list
rlx-optim list --json
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from ..numpy.classes import create
from ..program import has_reduction
from ..registry import documentation, known, spec_class
from . import say, show_digits, show_table, write_json
from .costs import count_bytes, settings_of
from .memory import slots_of

MATRIX = (1024, 1024)  # what bytes of state are counted for


def kind_of(name: str) -> str:
    """How a rule looks at a tensor."""
    spec = spec_class(name)(**settings_of(name))
    return "matrix" if spec.matrix else "reduces" if has_reduction(spec, MATRIX) else "elementwise"


def entry(name: str) -> dict[str, Any]:
    """What can be said of an optimizer in one line. State is that of a weight matrix at the settings of the benchmarks."""
    kind = spec_class(name)
    bytes_ = sum(slot.bytes for slot in slots_of(create(name, **settings_of(name)), {"w": MATRIX}))
    return {
        "name": name,
        "class": kind.title,
        "summary": kind.summary or documentation(kind).partition("\n")[0],
        "kind": kind_of(name),
        "state_bytes_per_parameter": bytes_ / math.prod(MATRIX),
        "traffic_bytes_per_parameter": count_bytes(kind(**settings_of(name)), MATRIX),
        "aliases": list(kind.aliases),
    }


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the optimizers."""
    entries = [entry(name) for name in known()]
    if as_json:
        write_json(entries)
        return
    counted = ("state_bytes_per_parameter", "traffic_bytes_per_parameter")
    rows = [[e["name"], e["summary"], e["kind"], *(show_digits(e[key]) for key in counted)] for e in entries]
    show_table(("optimizer", "what it is", "rule", "state B/param", "traffic B/param"), rows, [False] * len(rows), spare=(2, 4))
    say("State of a 1024×1024 matrix (SGD with momentum). More on one: rlx-optim info NAME")
