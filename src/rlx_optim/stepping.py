"""From tensor states to bundles to a step: what every front end shares.

A front end keeps a `TensorState` per parameter and a list of specs, one per group. It checks its input, then bundles the states
and runs the parts; what the arrays are (NumPy, torch) is between it and the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .engine import Bundle, Engine, Mixing
from .program import Program, trace
from .rounding import Half
from .spec import Shape, Slot, Spec
from .stats import KINDS, Row, rows_of
from .storage import Coded


class TensorState:
    """What is kept for one parameter."""

    __slots__ = (
        "counters",
        "estimating",
        "group",
        "half",
        "kind",
        "name",
        "part",
        "shape",
        "size",
        "slots",
        "state",
        "stepped",
        "t",
    )

    def __init__(self, name: str, shape: Shape, group: int):
        self.name, self.shape, self.group = name, shape, group
        self.size = math.prod(shape)
        self.t = 0
        self.stepped = -1  # the iteration of its last step
        self.counters: dict[str, float] = {}
        self.slots: dict[str, Slot] = {}
        self.state: dict[str, Any] = {}
        self.half: Half | None = None  # of 16 bits, and not rounded to nearest
        self.kind = ""  # its type of 16 bits, where engines step such apart from others
        self.part: Part | None = None  # this tensor alone
        self.estimating: Bundle | None = None  # what takes estimates of its curvature

    def furnish(self, spec: Spec, allocate: Callable[[Slot], Any]) -> None:
        """Make the state a spec asks for: at first, or when a structural change needs more. What is there stays."""
        self.slots = spec.stored_slots(self.shape)
        made = {name: allocate(slot) for name, slot in self.slots.items() if name not in self.state}
        for name, buffer in made.items():
            if self.slots[name].storage and not isinstance(buffer, Coded):
                raise spec.refuse(f"state_dtype={spec.state_dtype!r}: this engine keeps {name!r} of {self.name!r} as it is alone")
        self.state |= made
        self.counters = {**spec.counters(), **self.counters}

    def cohort(self) -> tuple[Any, ...]:
        """Records that share this share every number of a step."""
        return (self.group, self.t, *self.counters.values()) if self.counters else (self.group, self.t)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("part", "estimating")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.part = self.estimating = None


class Part:
    """One bundle and, in it, the cohorts whose numbers are taken once."""

    __slots__ = ("bundle", "cohorts", "counted", "flat", "index", "owner", "records", "told", "version")

    def __init__(self, bundle: Bundle, records: list[TensorState], cohorts: list[list[TensorState]]):
        self.bundle, self.records, self.cohorts = bundle, records, cohorts
        place = {id(record): i for i, record in enumerate(records)}
        self.index = [np.array([place[id(record)] for record in cohort]) for cohort in cohorts]
        self.owner: Any = None  # the front end's own
        self.version = 0
        self.told: Mapping[str, Any] = {}  # what its last step did, where that was asked
        self.counted = False  # whether its last step moved a counter
        self.flat = False  # the caller's arrays are, and say their shape beside them

    def tell(self, found: Mapping[str, Any]) -> None:
        """Keep what a step did, of what it gave, where that was asked."""
        if self.bundle.asked:
            self.told = {kind: found[kind] for kind in KINDS if kind in found}


def bundle_up(
    records: Iterable[tuple[int, TensorState]], specs: Sequence[Spec], engine: Engine, watch: Any = None, asked: bool = False
) -> list[Part]:
    """Bundle (place in the call, record) pairs: an elementwise rule takes all that share a structure, a matrix rule stacks of one
    shape and count, or of many shapes where it and the engine can. Empty tensors are left out. asked: their steps say what they
    did (`Part.told`)."""
    alike: dict[Any, list[tuple[int, TensorState]]] = {}
    for place, record in records:
        if record.size:
            spec = specs[record.group]
            mixed = spec.ragged() and not asked and isinstance(engine, Mixing) and engine.mixes(record.shape)
            mixed = mixed and spec.state_dtype == "float32"
            key: Any = ("mixed" if mixed else record.shape, *record.cohort()) if spec.matrix else spec.likeness()
            alike.setdefault((_slots(spec, record), key), []).append((place, record))
    parts = []
    for members in alike.values():
        first = members[0][1]
        limit = engine.stack(first.shape) if specs[first.group].matrix else len(members)
        for lo in range(0, len(members), limit):
            parts.append(_part(members[lo : lo + limit], specs[first.group], watch, asked))
    if len(parts) > 1:
        check_together([(part.bundle.spec, part.bundle.program, part.bundle.names) for part in parts])
    return parts


def _slots(spec: Spec, record: TensorState) -> Any:
    """What is kept of a tensor, and in what; where all must be stepped together, in whatever."""
    plain = spec.state_dtype == "float32" and not record.kind
    if plain or (not spec.matrix and trace(spec, record.slots).gathers is not None):
        return tuple(record.slots)
    return ("" if spec.matrix else record.kind, *((name, slot.storage) for name, slot in record.slots.items()))


def check_together(bundles: Sequence[tuple[Spec, Program | None, Sequence[str]]]) -> None:
    """Refuse to step apart what is reduced over all tensors of an optimizer."""
    kinds: dict[type[Spec], str] = {}
    for spec, program, names in bundles:
        if program is not None and program.gathers is not None and kinds.setdefault(type(spec), names[0]) != names[0]:
            raise spec.refuse(
                f"{program.gathers} is over all tensors, but {kinds[type(spec)]!r} and {names[0]!r} are not stepped together: "
                "they differ in a structural hyperparameter, in their slots, dtype or device; give them optimizers of their own"
            )


def _part(members: list[tuple[int, TensorState]], spec: Spec, watch: Any, asked: bool) -> Part:
    records = [record for _, record in members]
    cohorts: dict[Any, list[TensorState]] = {}
    for record in records:
        cohorts.setdefault(record.cohort(), []).append(record)
    slots = records[0].slots
    buffers: dict[str, Sequence[Any]] = {"p": [], "g": []} | {s: [r.state[s] for r in records] for s in slots}
    names, shapes = [r.name for r in records], [r.shape for r in records]
    program = None if spec.matrix else trace(spec, slots, "told" if asked else "step")
    if program is not None:
        program.check(type(spec).__name__, [r.name for r in records], [r.shape for r in records])
    bundle = Bundle(spec, names, shapes, slots, buffers, program, watch=watch, index=[place for place, _ in members], asked=asked)
    bundle.halves = [r.half for r in records] if any(r.half for r in records) else ()
    return Part(bundle, records, list(cohorts.values()))


def scalars(record: TensorState, spec: Spec, numbers: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a record's next step, from `numbers` if a record of its cohort has them already."""
    key = record.cohort()
    found = numbers.get(key)
    if found is None:
        found = spec.numbers(record.t + 1, record.counters)
        found = numbers[key] = {**record.counters, **found} if spec.matrix else found
    return found


def run_part(
    part: Part, engine: Engine, specs: Sequence[Spec], numbers: dict[Any, dict[str, Any]], params: Any, grads: Any, scale: float
) -> None:
    """Step the parameters of one part, and count the step."""
    bundle, cohorts = part.bundle, part.cohorts
    first = cohorts[0][0]
    spec = bundle.spec = specs[first.group]
    now = scalars(first, spec, numbers)
    if bundle.halves:
        now = {**now, "_tick": first.t + 1}
    if bundle.runner is not None and bundle.watch is not None and len(cohorts) == 1:  # the watch knows where the arrays are
        part.tell(bundle.runner(now, scale))
        part.counted = count(cohorts[0], now)
        return
    each = [now, *[scalars(cohort[0], specs[cohort[0].group], numbers) for cohort in cohorts[1:]]]
    if bundle.halves:
        each = [{**now, "_tick": cohort[0].t + 1} for now, cohort in zip(each, cohorts, strict=True)]
    bundle.t = first.t + 1
    counts = run_bundle(bundle, engine, now if len(each) == 1 else _columns(part, each), scale, p=params, g=grads)
    part.tell(counts)
    moved = [count(cohort, counts if spec.matrix else now) for cohort, now in zip(cohorts, each, strict=True)]
    part.counted = any(moved)


def run_bundle(
    bundle: Bundle, engine: Engine, numbers: Mapping[str, Any], scale: Any, **arrays: Sequence[Any]
) -> Mapping[str, Any]:
    """Run a bundle on a caller's arrays, which are not kept."""
    bundle.numbers, bundle.scale = dict(numbers), scale
    bundle.buffers |= arrays
    try:
        return engine.run(bundle) if bundle.runner is None else bundle.runner(bundle.numbers, scale)
    finally:
        bundle.buffers |= dict.fromkeys(arrays, ())


def observe(record: TensorState, spec: Spec, engine: Engine, estimate: Any) -> None:
    """Take over an estimate of a parameter's curvature: one more program on its state."""
    if record.size:
        program, bundle = trace(spec, record.slots, "observe"), record.estimating
        if bundle is None or bundle.program is not program or bundle.buffers["h"][0] is not record.state["h"]:
            buffers: dict[str, Sequence[Any]] = {"g": [], "h": [record.state["h"]]}
            bundle = record.estimating = Bundle(spec, [record.name], [record.shape], record.slots, buffers, program)
        run_bundle(bundle, engine, spec.numbers(record.t + 1, record.counters), 1.0, g=[estimate])
    record.counters["estimates"] += 1


def rows(parts: Iterable[Part], names: Mapping[TensorState, str]) -> list[Row]:
    """What the last step of these parts did, tensor by tensor."""
    return [row for part in parts for row in rows_of(part.told, [names[r] for r in part.records], [r.size for r in part.records])]


def count(records: Sequence[TensorState], now: Mapping[str, Any]) -> bool:
    """Count a step of a cohort, records that share its numbers; whether a counter of theirs moved."""
    mine = records[0].counters
    changed = {name: now[name] for name, value in mine.items() if name in now and now[name] != value} if mine else {}
    for record in records:
        record.t += 1
    if changed:
        for record in records:
            record.counters |= changed
    return bool(changed)


def _columns(part: Part, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One number per tensor of the bundle, where its cohorts differ."""
    columns = {}
    for key, value in each[0].items():
        if value is None or all(numbers[key] == value for numbers in each):
            columns[key] = value
        else:
            column = columns[key] = np.empty(len(part.records))
            for where, numbers in zip(part.index, each, strict=True):
                column[where] = numbers[key]
    return columns
