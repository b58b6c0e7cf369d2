"""What a step of a rule reads and writes, at the settings at which the command line counts and measures it."""

from __future__ import annotations

import math
from typing import Any

from .. import storage
from ..program import trace
from ..registry import required, spec_class
from ..rounding import EXACT
from ..spec import Shape, Spec

#: settings of ours that are not the defaults
OURS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-3, "momentum": 0.9},
    "kronpsgd": {"preconditioner_update_probability": 0.1},  # an update every 10 steps, as in SOAP
}


def settings_of(name: str) -> dict[str, Any]:
    """Settings at which ours is measured: the defaults, where nothing is required."""
    return {**required(spec_class(name)), **OURS.get(name, {})}


def count_bytes(spec: Spec, shape: Shape, rounding: str | None = None) -> float | None:
    """Bytes that a step reads and writes for each parameter, by its program; matrix rules are bound by something else. rounding:
    of weights in bfloat16."""
    if spec.matrix:
        return None
    slots = spec.stored_slots(shape)
    program, size = trace(spec, slots), max(math.prod(shape), 1)
    less = {
        name: 4 - storage.count_bytes(slot) / size for name, slot in slots.items() if slot.storage
    }  # than float32 has, each time
    less |= {} if rounding is None else {"g": 2.0, "p": 0.0 if rounding == EXACT else 2.0}  # with its low half p is as long
    moved = [program.place(n) for step in program.passes for n in step.arrays]
    moved += [place for step in program.passes for _, place in step.stores if isinstance(place, str)]
    return 4 * program.traffic() - sum(less.get(name or "", 0.0) for name in moved)
