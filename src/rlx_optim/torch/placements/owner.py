"""Matrices that one rank each computes.

A stage of a step is one generator, `Owner._stage`: gradients (and p, where the rule reads it) travel to the owners, the ordinary
rule runs there on whole matrices, directions come back, and every rank commits them to its shards. `Owner.step` advances all
stages in turn, so that the tensors of one travel while another is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ...engine import Engine
from ...partition import staged
from ...pointers import PointerTable
from ...program import NotSent
from ...reading import reads_p
from ...recent import Recent
from ...spec import Shape, Spec
from ...splits import WHOLE
from ...stepping import Grouping, Part, TensorState, make_parts, run_part
from .. import bf16
from ..memory import is_dtensor, local_part
from .comm import DTensorLayout, RemoteError
from .exchange import Transfer, collect, spread
from .homes import Home, Owned, Shards
from .local import LOCAL, Batch, LocalTensors, ParamEntry, Placement, Selection, packed, unpacked

DONE, FAILED, BLIND = range(3)  # what became of an update: BLIND is one that reads p and was not sent it
Arriving = Callable[[], Any]  # waits for what travels, and gives it


@dataclasses.dataclass
class Stage:
    """Some matrices of a step: their places in it; of those computed on this rank, where their arrays are, and their parts."""

    members: list[int]
    pointers: PointerTable
    parts: list[Part]


@dataclasses.dataclass
class OwnerStep:
    """What one step of an `Owner` is of, and what came of it. reading: the places of those whose rule reads p. left: what became
    of those that were not stepped, and why, where it is known on this rank."""

    chosen: list[int]
    entries: list[ParamEntry]
    homes: list[Home]
    grads: list[torch.Tensor]
    specs: Sequence[Spec]
    fusion_keys: tuple[Any, ...]
    scale: float
    reading: set[int]
    left: dict[int, tuple[int, Exception | None]] = dataclasses.field(default_factory=dict)

    def spec_of(self, i: int) -> Spec:
        """The spec of a place."""
        return self.specs[self.entries[i].records[0].group]

    def length(self, i: int) -> int:
        """How many numbers travel with a direction: what became of it, those it is committed with, counters."""
        entry = self.entries[i]
        return 1 + count_sets(entry) * len(self.spec_of(i).committed) + len(entry.records[0].counters)


class Owner(Placement):
    """Matrices that one rank each computes, or (`homes` that are Shards) that every rank computes after a full gather."""

    together = True

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        super().__init__(engine, why, device, dtype, sign)
        self.homes: list[Home] = []
        self.shapes: list[set[Shape]] = []  # of each entry's pieces
        self.readers: set[int] = set()  # entries whose rule has read p where it was not expected to
        self.plans = Recent(Grouping.CHOICES)
        self.shards = LOCAL.get(engine.name, LocalTensors)(engine, why, device, dtype, 1.0)  # what directions are committed to
        self.shards.commits = True

    def view(self, buffer: torch.Tensor) -> Any:  # type: ignore[override]
        return self.shards.view(buffer)

    def arrange(self) -> None:
        super().arrange()
        self.shards.entries = [commit_entry(entry) for entry in self.entries]
        self.shards.spread = self.spread if any(map(is_dtensor, self.params)) else ""
        for entry in self.shards.entries if self.shards.rounds else ():
            bf16.deal_out(self.shards, entry)
        self.shards.arrange()

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        raise AssertionError("an owner does everything in `step`")

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: float) -> None:
        """Everybody goes to the end of it, also where an owner's update raises: nobody is left waiting."""
        chosen = list(batch.chosen)
        given = dict(zip(chosen, batch.grads, strict=True))
        reading, self.reading = self.reading, None
        reading = self.find_readers(specs) if reading is None else reading
        left = self._step_stages(chosen, given, specs, fusion_keys, scale, reading)
        if blind := [i for i in chosen if left.get(i, (DONE,))[0] == BLIND]:
            self.readers.update(blind)
            left = {i: why for i, why in left.items() if i not in blind}
            left |= self._step_stages(blind, given, specs, fusion_keys, scale, reading | self.readers)
        if left:
            self.count([i for i in chosen if i not in left])
            raise self._failure(left)

    def _step_stages(
        self,
        chosen: list[int],
        given: Mapping[int, torch.Tensor],
        specs: Sequence[Spec],
        fusion_keys: Any,
        scale: float,
        reading: set[int],
    ) -> dict[int, tuple[int, Exception | None]]:
        """Advance all stages of a step together: all gradients begin to travel; then each stage is computed, and its directions
        begin to travel; then each is committed. Gives the entries that were not stepped."""
        entries, homes, grads = [self.entries[i] for i in chosen], [self.homes[i] for i in chosen], [given[i] for i in chosen]
        places = {k for k, i in enumerate(chosen) if i in reading}
        step = OwnerStep(chosen, entries, homes, grads, specs, fusion_keys, scale, places)
        key = self.grouping.key(self.select(chosen).rows, specs, fusion_keys, False)
        stages: list[Stage] = self.plans.find(key, lambda: self._plan(step))
        running = [self._stage(stage, step) for stage in stages]
        for _ in ("gather", "compute, scatter", "commit"):
            for task in running:
                next(task, None)
        return step.left

    def _stage(self, stage: Stage, step: OwnerStep) -> Iterator[None]:
        """One stage of a step, from gradients to shards. It yields while tensors travel."""
        arriving = self._gather(stage, step)
        yield
        grads, params = arriving()
        directions, numbers, problems = self._compute(stage, step, grads, params)
        arriving = self._scatter(stage, step, directions, numbers)
        yield
        parts, numbers = arriving()
        self._commit(stage, step, parts, numbers, problems)

    def _plan(self, step: OwnerStep) -> list[Stage]:
        """The stages of a step of these entries."""
        owned = [home for home in step.homes if isinstance(home, Owned)]
        if len(owned) < len(step.homes):  # gathered whole, one after the other
            stages = [list(range(len(step.homes)))]
        else:
            shapes = [tuple(entry.shape) for entry in step.entries]
            work = [step.spec_of(i).work(shape) for i, shape in enumerate(shapes)]
            stages = staged(work, [home.owner for home in owned], shapes, owned[0].comm.size)
        found = []
        for members in stages:
            computed = [i for i in members if not isinstance(home := step.homes[i], Owned) or home.is_owner]
            records = [record for i in computed for record in step.entries[i].records]
            pointers = PointerTable(len(records))
            found.append(Stage(members, pointers, make_parts(enumerate(records), step.specs, self.engine, pointers)))
        return found

    def find_readers(self, specs: Sequence[Spec]) -> set[int]:
        """The entries whose p must travel, since their rule reads it: of what is stacked in many shapes all or none."""
        groups = [entry.records[0].group for entry in self.entries]
        found = {
            i
            for i, group in enumerate(groups)
            if i in self.readers or any(reads_p(specs[group], shape) for shape in self.shapes[i])
        }
        mixed = {groups[i] for i in found if specs[groups[i]].mixed_shapes()}
        return found | {i for i, group in enumerate(groups) if group in mixed}

    def _gather(self, stage: Stage, step: OwnerStep) -> Arriving:
        """Send the gradients of a stage to their owners, and p of those whose rule reads it. Gives the whole gradients of what is
        computed on this rank, by place, and the whole parameters."""
        wholes: tuple[dict[int, torch.Tensor], ...] = {}, {}
        travelling = []
        for side, i in [*((0, i) for i in stage.members), *((1, i) for i in stage.members if i in step.reading)]:
            entry, home, part = step.entries[i], step.homes[i], bf16.held(step.entries[i]) if side else step.grads[i]
            if isinstance(home, Shards):
                layout = home.layout
                wholes[side][i] = layout.wrapped(part.contiguous(), layout.shape, layout.placements).full_tensor()
            elif home.layout is not None:
                travelling.append(((side, i), Transfer(tuple(entry.shape), part.dtype, home.dim, home.owner), part, home.comm))
            elif home.is_owner:
                wholes[side][i] = part
        if not travelling:
            return lambda: wholes
        places, items, parts, comms = zip(*travelling, strict=True)
        arriving = collect(comms[0], items, parts, self.device)

        def finish() -> Any:
            for k, whole in arriving().items():
                side, i = places[k]
                wholes[side][i] = whole
            return tuple(dict(sorted(each.items())) for each in wholes)

        return finish

    def _compute(
        self, stage: Stage, step: OwnerStep, grads: Mapping[int, torch.Tensor], params: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], dict[int, list[float]], dict[int, Exception]]:
        """The directions of what is computed on this rank; with each what became of it, the numbers that it is to be committed
        with, then the counters; and what was raised."""
        directions: dict[int, torch.Tensor] = {}
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        first: dict[int, int] = {}  # of each place's records, among all
        for i, whole in grads.items():
            entry, grad = step.entries[i], packed(whole.to(self.dtype).contiguous(), step.entries[i])
            directions[i] = torch.empty_like(grad)
            if i in params:  # where the direction will be
                directions[i].copy_(packed(params[i], entry))
            first[i] = len(sides[0])
            for side, tensor in zip(sides, (directions[i], grad), strict=True):
                side += self.pieces(tensor, entry)
        types = [self.dtype] * len(sides[0])
        stage.pointers.set(slice(None), [t.data_ptr() for t in sides[0]], [t.data_ptr() for t in sides[1]], types, types)
        views = [[self.view(piece) for piece in side] for side in sides]
        whose = [i for i in first for _ in step.entries[i].records]
        self.numbers, committed, raised = {}, dict[int, list[float]](), dict[int, Exception]()
        for part in stage.parts:
            index: list[int] = part.bundle.index
            part.bundle.without_p = any(whose[k] not in params for k in index)
            ps, gs = ([side[k] for k in index] for side in views)
            try:
                found = run_part(part, self.engine, step.specs, self.numbers, ps, gs, step.scale, move=False)
            except Exception as problem:  # which all ranks hear of with the directions
                raised |= {whose[k]: problem for k in index}
                continue
            columns = [np.broadcast_to(on_host(found.get(name)), len(index)).tolist() for name in part.bundle.spec.committed]
            committed |= dict(zip(index, map(list, zip(*columns, strict=True)), strict=True))
        numbers = {}
        for i, k in first.items():
            entry = step.entries[i]
            if i in raised:
                begun = any(k + j in committed for j in range(len(entry.records)))  # another of its pieces has been stepped
                verdict = BLIND if isinstance(raised[i], NotSent) and not begun else FAILED
                numbers[i] = [verdict, *[0.0] * (step.length(i) - 1)]
                continue
            nothing = [0.0] * len(step.spec_of(i).committed)  # of an empty matrix
            beside = [x for j in range(count_sets(entry)) for x in committed.get(k + j, nothing)]
            numbers[i] = [DONE, *beside, *entry.records[0].counters.values()]
        return {i: unpacked(each, step.entries[i]) for i, each in directions.items()}, numbers, raised

    def _scatter(
        self, stage: Stage, step: OwnerStep, directions: Mapping[int, torch.Tensor], numbers: Mapping[int, list[float]]
    ) -> Arriving:
        """Send directions to where they are committed. Gives this rank's part of each, by place, and the numbers of each."""
        members, homes = stage.members, [step.homes[i] for i in stage.members]
        owned = [home for home in homes if isinstance(home, Owned)]
        if not owned:
            layouts = {i: home.layout for i, home in zip(members, homes, strict=True) if isinstance(home, Shards)}
            return lambda: (
                {i: layout.part(directions[i], layout.placements).contiguous() for i, layout in layouts.items()},
                numbers,
            )
        lengths = [step.length(i) for i in members]
        items = [
            Transfer(tuple(step.entries[i].shape), self.dtype, at.dim, at.owner) for i, at in zip(members, owned, strict=True)
        ]
        items += [Transfer((n,), torch.float64, None, home.owner) for n, home in zip(lengths, owned, strict=True)]
        computed = [k for k, home in enumerate(owned) if home.is_owner]
        flat = torch.tensor([x for k in computed for x in numbers[members[k]]], dtype=torch.float64, device=self.device)
        wholes = {k: directions[members[k]] for k in computed}
        tails = flat.split([lengths[k] for k in computed])
        wholes |= {len(members) + k: tail for k, tail in zip(computed, tails, strict=True)}
        arriving = spread(owned[0].comm, items, wholes, self.device)

        def finish() -> Any:
            arrived = arriving()
            tails = iter(torch.cat(arrived[len(members) :]).tolist())
            beside = {i: list(itertools.islice(tails, n)) for i, n in zip(members, lengths, strict=True)}
            return dict(zip(members, arrived, strict=False)), beside

        return finish

    def _commit(
        self,
        stage: Stage,
        step: OwnerStep,
        parts: Mapping[int, torch.Tensor],
        numbers: Mapping[int, list[float]],
        problems: Mapping[int, Exception],
    ) -> None:
        """Move this rank's shards along their directions, and count the step of matrices that others have computed."""
        done = [i for i in stage.members if numbers[i][0] == DONE]
        step.left |= {step.chosen[i]: (int(numbers[i][0]), problems.get(i)) for i in stage.members if numbers[i][0] != DONE}
        for i in done:
            entry, home, names, given = step.entries[i], step.homes[i], step.spec_of(i).committed, numbers[i][1:]
            last = count_sets(entry) * len(names)
            if isinstance(home, Owned) and not home.is_owner:
                for each in entry.records:
                    each.t += bool(each.size)
                    each.counters = dict(zip(each.counters, given[last:], strict=True))
            for record, lo in zip(self.shards.entries[step.chosen[i]].records, range(0, last, len(names)), strict=True):
                record.counters, record.t = dict(zip(names, given[lo:], strict=False)), entry.records[0].t - 1
        if not done:
            return
        batch = Batch(self.shards, [step.chosen[i] for i in done], [parts[i] for i in done])
        self.shards.step(batch, step.specs, step.fusion_keys, 1.0)

    def _failure(self, left: Mapping[int, tuple[int, Exception | None]]) -> Exception:
        """What is raised of updates that failed, on all ranks. Their records count what their state counts."""
        for i in left:
            for record in self.entries[i].records:
                record.t = int(self.steps[i])
        names = ", ".join(repr(self.entries[i].records[0].name) for i in left)
        problem = next((problem for _, problem in left.values() if problem is not None), None)
        if problem is None:
            return RemoteError(f"the update of {names} failed on another rank, its owner, which says why; it was not stepped")
        problem.add_note(f"{names} was not stepped, on no rank; the matrices beside it were")
        return problem


def count_sets(entry: ParamEntry) -> int:
    """How many times numbers are committed with: once for equal pieces."""
    return len(entry.records) if isinstance(entry.split, tuple) else 1


def on_host(value: Any) -> Any:
    """A number that is committed with, or one per tensor, on the host."""
    return 0.0 if value is None else value.tolist() if torch.is_tensor(value) else value


def commit_entry(entry: ParamEntry) -> ParamEntry:
    """The part of a parameter that is on this rank, to commit directions to. Unequal pieces have numbers of their own."""
    first, shape = entry.records[0], tuple(local_part(entry.param).shape)
    found = ParamEntry(entry.param, {"step": entry.state["step"]}, first.name, first.group, WHOLE, ())
    found.columns, found.rounding = entry.columns, entry.rounding
    shapes = [shape]
    if isinstance(entry.split, tuple):
        axis = int(entry.columns)
        found.split = local_lengths(entry.param, entry.split, axis)
        shapes = [(*shape[:axis], n, *shape[axis + 1 :]) for n in found.split]
    found.records = [TensorState(first.name, each, first.group) for each in shapes]
    return found


def local_lengths(param: torch.Tensor, split: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """How much of each piece is on this rank."""
    first, last = DTensorLayout(param).extent(axis) if isinstance(param, DTensor) else (0, param.shape[axis])
    ends = list(itertools.accumulate(split))
    return tuple(max(0, min(last, end) - max(first, end - n)) for n, end in zip(split, ends, strict=True))
