"""From tensor states to bundles to a step: what every front end shares.

A front end keeps a `TensorState` per parameter and a list of specs, one per group. It checks its input, then bundles the states
and runs the parts; what the arrays are (NumPy, torch) is between it and the engine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .engine import Bundle, Engine, Mixing, TakingRows
from .program import Program, trace
from .recent import Recent
from .rounding import ParamRounding
from .spec import Shape, Slot, Spec
from .stats import KINDS, Row, make_rows
from .storage import Quantized


class TensorState:
    """What is kept for one parameter."""

    __slots__ = (
        "alone", "counters", "estimating", "group", "kind", "name", "rounding", "shape", "size", "slots", "state", "stepped", "t",
        "version",
    )  # fmt: skip

    def __init__(self, name: str, shape: Shape, group: int):
        self.name, self.shape, self.group = name, shape, group
        self.size = math.prod(shape)
        self.t = 0
        self.version = -1  # of a front end's settings: what its state was made for
        self.stepped = -1  # the iteration of its last step
        self.counters: dict[str, float] = {}
        self.slots: dict[str, Slot] = {}
        self.state: dict[str, Any] = {}
        self.rounding: ParamRounding | None = None  # of 16 bits, and not rounded to nearest
        self.kind = ""  # its type of 16 bits, where engines step such apart from others
        self.alone: Any = None  # what a front end keeps to step this tensor by itself
        self.estimating: Bundle | None = None  # what takes estimates of its curvature

    def init_state(self, spec: Spec, allocate: Callable[[Slot], Any]) -> None:
        """Make the state a spec asks for: at first, or when a structural change needs more. What is there stays."""
        self.slots = spec.stored_slots(self.shape)
        made = {name: allocate(slot) for name, slot in self.slots.items() if name not in self.state}
        for name, buffer in made.items():
            if self.slots[name].storage and not isinstance(buffer, Quantized):
                raise spec.refuse(f"state_dtype={spec.state_dtype!r}: this engine keeps {name!r} of {self.name!r} as it is alone")
        self.state |= made
        self.counters = {**spec.counters(), **self.counters}

    def scalar_key(self) -> tuple[Any, ...]:
        """Records that share this share every number of a step."""
        return (self.group, self.t, *self.counters.values()) if self.counters else (self.group, self.t)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("alone", "estimating", "version")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.alone, self.estimating, self.version = None, None, -1


class Part:
    """One bundle, and what its last step did."""

    __slots__ = ("bundle", "commits", "counted", "records", "report")

    def __init__(self, bundle: Bundle, records: list[TensorState], commits: bool = False):
        self.bundle, self.records = bundle, records
        self.commits = commits  # it takes directions in place of gradients; the numbers are the records' counters
        self.report: Mapping[str, Any] = {}  # what its last step did, where that was asked
        self.counted = False  # whether its last step moved a counter

    def keep_report(self, found: Mapping[str, Any]) -> None:
        """Keep what a step did, of what it gave, where that was asked."""
        if self.bundle.with_stats:
            self.report = {kind: found[kind] for kind in KINDS if kind in found}


class StepPart(NamedTuple):
    """A part of one step. rows: which tensors of the part's bundle step, None for all; places: where their arrays are among those
    of the step."""

    part: Part
    rows: np.ndarray | None
    places: Sequence[int]

    @property
    def records(self) -> list[TensorState]:
        """Those that step."""
        records = self.part.records
        return records if self.rows is None else [records[row] for row in self.rows]


class Grouping:
    """Finds which tensors of an engine are stepped together, for any choice of them.

    A tensor that sits a step out makes the lists of that step shorter. Plans are kept for the choices met last, and parts for the
    stacks met last, so that tensors which come and go cost a look-up; an engine that takes rows has one bundle for all choices.
    """

    CHOICES = 16  # times all records: how many a grouping remembers

    def __init__(self, engine: Engine, records: list[TensorState], pointers: Any = None, commits: bool = False):
        """commits: only the commit of a rule is run, of a direction that comes in the gradient's place."""
        self.engine, self.records, self.pointers, self.commits = engine, records, pointers, commits
        most = self.CHOICES * (len(records) + 1)
        self.plans, self.parts = Recent(most), Recent(most)

    def find(
        self, chosen: tuple[int, ...], specs: Sequence[Spec], fusion_keys: tuple[Any, ...], with_stats: bool = False
    ) -> list[StepPart]:
        """Return the parts of a step of these records, given by their places. fusion_keys: of each spec.
        with_stats: whether the step says what it does."""
        key = self.key(chosen, specs, fusion_keys, with_stats)
        found: list[StepPart] = self.plans.find(key, lambda: self._plan(chosen, specs, fusion_keys, with_stats), len(chosen))
        return found

    def key(self, chosen: tuple[int, ...], specs: Sequence[Spec], fusion_keys: tuple[Any, ...], with_stats: bool) -> Any:
        """What a plan is known by. Stacks of a matrix rule share their numbers, so it says who has stepped equally often."""
        seen: dict[Any, int] = {}
        matrix = not self.commits and any(spec.matrix for spec in specs)
        counts = tuple(seen.setdefault(self.records[i].scalar_key(), len(seen)) for i in chosen) if matrix else ()
        return chosen, fusion_keys, with_stats, counts

    def _plan(self, chosen: Sequence[int], specs: Sequence[Spec], fusion_keys: Any, with_stats: bool) -> list[StepPart]:
        alike = group_records(((i, self.records[i]) for i in chosen), specs, self.engine, with_stats, self.commits)
        found = []
        for key, places in alike.items():
            spec = specs[self.records[places[0]].group]
            if not self.commits:
                check_axes([self.records[i] for i in places], spec)
            stacked = spec.matrix and not self.commits
            limit = self.engine.stack_size(self.records[places[0]].shape) if stacked else len(places)
            for lo in range(0, len(places), limit):
                found.append(self._part(key, tuple(places[lo : lo + limit]), specs, fusion_keys, with_stats))
        if len(found) > 1:
            check_together([(part.bundle.spec, part.bundle.program, part.bundle.names) for part, *_ in found])
        return found

    def _part(self, key: Any, places: tuple[int, ...], specs: Sequence[Spec], fusion_keys: Any, with_stats: bool) -> StepPart:
        def make(places: Sequence[int]) -> Part:
            return make_part([(i, self.records[i]) for i in places], specs, self.pointers, with_stats, self.commits)

        swept = self.commits or not specs[self.records[places[0]].group].matrix
        if isinstance(self.engine, TakingRows) and swept and self.pointers is not None:
            known = key, fusion_keys, with_stats
            part = self.parts.find(known, lambda: make(self._find_shared(key, specs, with_stats)), len(self.records))
            if self.engine.takes_rows(part.bundle):
                everyone: list[int] = part.bundle.index
                places = tuple(sorted(places))  # as chunks are, and what is reduced over each tensor
                rows = None if len(everyone) == len(places) else np.searchsorted(everyone, places)
                return StepPart(part, rows, places)
        part = self.parts.find((places, fusion_keys, with_stats), lambda: make(places), len(places))
        return StepPart(part, None, places)

    def _find_shared(self, key: Any, specs: Sequence[Spec], with_stats: bool) -> list[int]:
        """The places of all records that step together with those of a key."""
        return group_records(enumerate(self.records), specs, self.engine, with_stats, self.commits)[key]


def group_records(
    records: Iterable[tuple[int, TensorState]], specs: Sequence[Spec], engine: Engine, with_stats: bool, commits: bool = False
) -> dict[Any, list[int]]:
    """The places of records that may be in one bundle: an elementwise rule takes all that share a structure, a matrix rule stacks
    of one shape and count, or of many shapes where it and the engine can. Empty tensors are left out."""
    alike: dict[Any, list[int]] = {}
    for place, record in records:
        if record.size:
            spec = specs[record.group]
            if commits:
                key: Any = (type(spec), spec.fusion_key(), record.kind)
            else:
                key = (_slots(spec, record), _stack_key(spec, record, engine, with_stats))
            alike.setdefault(key, []).append(place)
    return alike


def _stack_key(spec: Spec, record: TensorState, engine: Engine, with_stats: bool) -> Any:
    """What tensors of one bundle share: the structure of their rule; of a matrix rule the numbers, and the shape unless both take
    many."""
    if not spec.matrix:
        return type(spec), spec.fusion_key()
    mixed = spec.mixed_shapes() and not with_stats and spec.state_dtype == "float32"
    mixed = mixed and isinstance(engine, Mixing) and engine.mixes(record.shape)
    return "mixed" if mixed else record.shape, *record.scalar_key()


def make_parts(
    records: Iterable[tuple[int, TensorState]], specs: Sequence[Spec], engine: Engine, pointers: Any = None,
    with_stats: bool = False,
) -> list[Part]:  # fmt: skip
    """Bundle (place in the call, record) pairs, for one step or a few. with_stats: steps report (`Part.report`)."""
    pairs = dict(records)
    parts = []
    for places in group_records(pairs.items(), specs, engine, with_stats).values():
        first = pairs[places[0]]
        spec = specs[first.group]
        check_axes([pairs[i] for i in places], spec)
        limit = engine.stack_size(first.shape) if spec.matrix else len(places)
        for lo in range(0, len(places), limit):
            parts.append(make_part([(i, pairs[i]) for i in places[lo : lo + limit]], specs, pointers, with_stats))
    if len(parts) > 1:
        check_together([(part.bundle.spec, part.bundle.program, part.bundle.names) for part in parts])
    return parts


def _slots(spec: Spec, record: TensorState) -> Any:
    """What is kept of a tensor, and in what; where all must be stepped together, in whatever."""
    plain = spec.state_dtype == "float32" and not record.kind
    if plain or (not spec.matrix and trace(spec, record.slots).reduction_over_all is not None):
        return tuple(record.slots)
    return ("" if spec.matrix else record.kind, *((name, slot.storage) for name, slot in record.slots.items()))


def check_axes(records: Sequence[TensorState], spec: Spec) -> None:
    """Refuse tensors that have not the axes which an elementwise rule reduces."""
    if not spec.matrix:
        trace(spec, records[0].slots).check(type(spec).__name__, [r.name for r in records], [r.shape for r in records])


def check_together(bundles: Sequence[tuple[Spec, Program | None, Sequence[str]]]) -> None:
    """Refuse to step apart what is reduced over all tensors of an optimizer."""
    kinds: dict[type[Spec], str] = {}
    for spec, program, names in bundles:
        if program is not None and program.reduction_over_all is not None and kinds.setdefault(type(spec), names[0]) != names[0]:
            raise spec.refuse(
                f"{program.reduction_over_all} is over all tensors, but {kinds[type(spec)]!r} and {names[0]!r} are not "
                "stepped together: they differ in a structural hyperparameter, in their slots, dtype or device; give them "
                "optimizers of their own"
            )


def make_part(
    members: Sequence[tuple[int, TensorState]], specs: Sequence[Spec], pointers: Any, with_stats: bool, commits: bool = False
) -> Part:
    """A part of these (place, record) pairs. commits: of the commit alone."""
    places, records = [place for place, _ in members], [record for _, record in members]
    spec, slots = specs[records[0].group], records[0].slots
    buffers: dict[str, Sequence[Any]] = {"p": [], "g": []} | {s: [r.state[s] for r in records] for s in slots}
    names, shapes = [r.name for r in records], [r.shape for r in records]
    program: Program | None = None
    if commits:
        program = trace(spec, slots, "commit", dict.fromkeys(spec.committed, 0.0))
    elif not spec.matrix:
        program = trace(spec, slots, "stats" if with_stats else "step")
    bundle = Bundle(spec, names, shapes, slots, buffers, program, pointers=pointers, index=places, with_stats=with_stats)
    bundle.roundings = [r.rounding for r in records] if any(r.rounding for r in records) else ()
    return Part(bundle, records, commits)


def find_scalars(record: TensorState, spec: Spec, numbers: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a record's next step, from `numbers` if a record of its cohort has them already."""
    key = record.scalar_key()
    found = numbers.get(key)
    if found is None:
        found = spec.numbers(record.t + 1, record.counters)
        found = numbers[key] = {**record.counters, **found} if spec.matrix else found
    return found


STEPPED = operator.attrgetter("group", "t")


def group_by_scalars(records: Sequence[TensorState]) -> list[list[int]]:
    """The places of records that share every number of a step."""
    keys = list(map(TensorState.scalar_key if records[0].counters else STEPPED, records))
    if keys.count(keys[0]) == len(keys):  # nearly always
        return [list(range(len(keys)))]
    found: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return list(found.values())


def run_part(
    part: Part, engine: Engine, specs: Sequence[Spec], numbers: dict[Any, dict[str, Any]], params: Any, grads: Any, scale: float,
    rows: np.ndarray | None = None, move: bool = True,
) -> Mapping[str, Any]:  # fmt: skip
    """Step the tensors of one part, count the step, and give what the engine gave. rows: which of them; None: all. move=False
    leaves a matrix rule's direction where p would be."""
    bundle = part.bundle
    records = part.records if rows is None else [part.records[row] for row in rows]
    scalar_groups = group_by_scalars(records)
    firsts = [records[places[0]] for places in scalar_groups]
    bundle.spec, bundle.rows = specs[firsts[0].group], rows
    each = [first.counters if part.commits else find_scalars(first, specs[first.group], numbers) for first in firsts]
    if bundle.roundings:
        each = [{**given, "_rng_step": first.t + 1} for given, first in zip(each, firsts, strict=True)]
    bundle.t = firsts[0].t + 1
    given = each[0] if len(each) == 1 else _merge_scalars(scalar_groups, each, len(records))
    found: Mapping[str, Any]
    if bundle.runner is not None and bundle.pointers is not None:  # which knows where the arrays are
        found = bundle.runner(given, scale)
    else:
        found = run_bundle(bundle, engine, given, scale, move, p=params, g=grads)
    part.keep_report(found)
    moved = [
        count_step([records[i] for i in places] if len(scalar_groups) > 1 else records, found if bundle.program is None else own)
        for places, own in zip(scalar_groups, each, strict=True)
    ]
    part.counted = any(moved)
    return found


def run_bundle(
    bundle: Bundle, engine: Engine, numbers: Mapping[str, Any], scale: Any, move: bool = True, **arrays: Sequence[Any]
) -> Mapping[str, Any]:
    """Run a bundle on a caller's arrays, which are not kept."""
    bundle.numbers, bundle.scale = dict(numbers), scale
    bundle.buffers |= arrays
    try:
        return engine.run(bundle, move) if bundle.runner is None else bundle.runner(bundle.numbers, scale)
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


def list_stats(parts: Iterable[StepPart], names: Mapping[TensorState, str]) -> list[Row]:
    """What the last step of these parts did, tensor by tensor."""
    found = []
    for step in parts:
        records = step.records
        found += make_rows(step.part.report, [names[r] for r in records], [r.size for r in records])
    return found


def count_step(records: Sequence[TensorState], given: Mapping[str, Any]) -> bool:
    """Count a step of a cohort, records that share its numbers; whether a counter of theirs moved."""
    counters = records[0].counters
    changed = (
        {name: given[name] for name, value in counters.items() if name in given and given[name] != value} if counters else {}
    )
    for record in records:
        record.t += 1
    if changed:
        for record in records:
            record.counters |= changed
    return bool(changed)


def _merge_scalars(scalar_groups: Sequence[Sequence[int]], each: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """One number for each of n tensors, where cohorts differ."""
    columns = {}
    for key, value in each[0].items():
        if value is None or all(numbers[key] == value for numbers in each):
            columns[key] = value
        else:
            column = columns[key] = np.empty(n)
            for places, numbers in zip(scalar_groups, each, strict=True):
                column[places] = numbers[key]
    return columns
