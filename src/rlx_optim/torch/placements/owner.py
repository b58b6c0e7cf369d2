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
from ..state import Slots
from .comm import DTensorLayout, RemoteError
from .exchange import Transfer, gather_wholes, scatter_parts
from .homes import Home, Owned, Shards
from .local import LOCAL, Batch, LocalTensors, ParamEntry, Placement, pack_pieces, unpack_pieces

DONE, FAILED, BLIND = range(3)  # what became of an update: BLIND is one that reads p and was not sent it
Arriving = Callable[[], Any]  # waits for what travels, and gives it
Tensors = Mapping[int, torch.Tensor]  # by the place of their entry


@dataclasses.dataclass
class Stage:
    """Some entries of a step; of those computed on this rank, where their arrays are, and their parts."""

    members: list[int]
    pointers: PointerTable
    parts: list[Part]


@dataclasses.dataclass
class OwnerStep:
    """What one step of an `Owner` is of, and what came of it. reading: the entries whose rule reads p. left: what became of those
    that were not stepped, and why, where it is known on this rank."""

    grads: Tensors
    specs: Sequence[Spec]
    fusion_keys: tuple[Any, ...]
    scale: float
    reading: set[int]
    left: dict[int, tuple[int, Exception | None]] = dataclasses.field(default_factory=dict)

    def spec_of(self, entry: ParamEntry) -> Spec:
        """The spec that an entry is stepped by."""
        return self.specs[entry.records[0].group]

    def count_numbers(self, entry: ParamEntry) -> int:
        """How many numbers travel with a direction: what became of it, those it is committed with, counters."""
        return 1 + count_sets(entry) * len(self.spec_of(entry).committed) + len(entry.records[0].counters)


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

    def cut_to_part(self, entry: ParamEntry, spec: Spec, slots: Mapping[str, Slots]) -> Mapping[str, Slots]:
        return slots  # matrices are whole here

    def admit(self, entry: ParamEntry, planned: Any) -> None:
        self.entries.append(entry)
        self.homes.append(planned.home)
        self.shapes.append({record.shape for record in entry.records if record.size})

    def view(self, buffer: torch.Tensor) -> Any:  # type: ignore[override]
        return self.shards.view(buffer)

    def arrange(self) -> None:
        super().arrange()
        self.shards.entries = [commit_entry(entry) for entry in self.entries]
        self.shards.spread = self.spread if any(map(is_dtensor, self.params)) else ""
        for entry in self.shards.entries if self.shards.rounds else ():
            bf16.split_rounding(self.shards, entry)
        self.shards.arrange()

    def find_readers(self, specs: Sequence[Spec]) -> set[int]:
        """The entries whose p must travel, since their rule reads it: of what is stacked in many shapes all or none."""
        groups = [entry.records[0].group for entry in self.entries]
        found = set(self.readers)
        found |= {i for i, group in enumerate(groups) if any(reads_p(specs[group], shape) for shape in self.shapes[i])}
        mixed = {groups[i] for i in found if specs[groups[i]].mixed_shapes()}
        return found | {i for i, group in enumerate(groups) if group in mixed}

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: float) -> None:
        """Everybody goes to the end of it, also where an owner's update raises: nobody is left waiting."""
        grads = dict(zip(batch.chosen, batch.grads, strict=True))
        reading, self.reading = self.reading, None
        step = OwnerStep(grads, specs, fusion_keys, scale, self.find_readers(specs) if reading is None else reading)
        self._run_stages(step)
        if blind := [i for i, (verdict, _) in step.left.items() if verdict == BLIND]:
            self.readers.update(blind)
            again = dataclasses.replace(
                step, grads={i: grads[i] for i in sorted(blind)}, reading=step.reading | self.readers, left={}
            )
            self._run_stages(again)
            step.left = {i: why for i, why in step.left.items() if i not in blind} | again.left
        if step.left:
            self.count([i for i in batch.chosen if i not in step.left])
            raise self._failure(step.left)

    def _run_stages(self, step: OwnerStep) -> None:
        """Advance all stages of a step together: all gradients begin to travel; then each stage is computed, and its directions
        begin to travel; then each is committed."""
        key = self.grouping.key(self.select(list(step.grads)).rows, step.specs, step.fusion_keys, False)
        running = [self._stage(stage, step) for stage in self.plans.find(key, lambda: self._plan(step))]
        for _ in ("gather", "compute, scatter", "commit"):
            for task in running:
                next(task, None)

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
        chosen = list(step.grads)
        owned = [home for i in chosen if isinstance(home := self.homes[i], Owned)]
        stages = [chosen]
        if len(owned) == len(chosen):  # others are gathered whole, one after the other
            entries = [self.entries[i] for i in chosen]
            shapes = [tuple(entry.shape) for entry in entries]
            work = [step.spec_of(entry).work(shape) for entry, shape in zip(entries, shapes, strict=True)]
            places = staged(work, [home.owner for home in owned], shapes, owned[0].comm.size)
            stages = [[chosen[k] for k in each] for each in places]
        found = []
        for members in stages:
            records = [record for i in members if self.homes[i].computes for record in self.entries[i].records]
            pointers = PointerTable(len(records))
            found.append(Stage(members, pointers, make_parts(enumerate(records), step.specs, self.engine, pointers)))
        return found

    def _gather(self, stage: Stage, step: OwnerStep) -> Arriving:
        """Send the gradients of a stage to their owners, and p of those whose rule reads it. Gives the whole gradients of what is
        computed on this rank, by entry, and the whole parameters."""
        wholes: tuple[dict[int, torch.Tensor], ...] = {}, {}
        travelling = []
        for side, i in [*((0, i) for i in stage.members), *((1, i) for i in stage.members if i in step.reading)]:
            entry, home = self.entries[i], self.homes[i]
            part = bf16.read_whole(entry) if side else step.grads[i]
            if isinstance(home, Shards):
                layout = home.layout
                wholes[side][i] = layout.wrap(part.contiguous(), layout.shape, layout.placements).full_tensor()
            elif home.layout is not None:
                travelling.append(((side, i), Transfer(tuple(entry.shape), part.dtype, home.dim, home.owner), part, home.comm))
            elif home.computes:
                wholes[side][i] = part
        if not travelling:
            return lambda: wholes
        places, items, parts, comms = zip(*travelling, strict=True)
        arriving = gather_wholes(comms[0], items, parts, self.device)

        def finish() -> Any:
            for k, whole in arriving().items():
                side, i = places[k]
                wholes[side][i] = whole
            return tuple(dict(sorted(each.items())) for each in wholes)

        return finish

    def _compute(
        self, stage: Stage, step: OwnerStep, grads: Tensors, params: Tensors
    ) -> tuple[Tensors, dict[int, list[float]], dict[int, Exception]]:
        """The directions of what is computed on this rank; with each what became of it, the numbers that it is to be committed
        with, then the counters; and what was raised."""
        directions: dict[int, torch.Tensor] = {}
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        first: dict[int, int] = {}  # of each entry's records, among all
        for i, whole in grads.items():
            entry, grad = self.entries[i], pack_pieces(whole.to(self.dtype).contiguous(), self.entries[i])
            directions[i] = torch.empty_like(grad)
            if i in params:  # where the direction will be
                directions[i].copy_(pack_pieces(params[i], entry))
            first[i] = len(sides[0])
            for side, tensor in zip(sides, (directions[i], grad), strict=True):
                side += self.pieces(tensor, entry)
        types = [self.dtype] * len(sides[0])
        stage.pointers.set(slice(None), [t.data_ptr() for t in sides[0]], [t.data_ptr() for t in sides[1]], types, types)
        views = [[self.view(piece) for piece in side] for side in sides]
        whose = [i for i in first for _ in self.entries[i].records]
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
            entry = self.entries[i]
            if i in raised:
                begun = any(k + j in committed for j in range(len(entry.records)))  # another of its pieces has been stepped
                verdict = BLIND if isinstance(raised[i], NotSent) and not begun else FAILED
                numbers[i] = [verdict, *[0.0] * (step.count_numbers(entry) - 1)]
                continue
            nothing = [0.0] * len(step.spec_of(entry).committed)  # of an empty matrix
            beside = [x for j in range(count_sets(entry)) for x in committed.get(k + j, nothing)]
            numbers[i] = [DONE, *beside, *entry.records[0].counters.values()]
        return {i: unpack_pieces(each, self.entries[i]) for i, each in directions.items()}, numbers, raised

    def _scatter(self, stage: Stage, step: OwnerStep, directions: Tensors, numbers: Mapping[int, list[float]]) -> Arriving:
        """Send directions to where they are committed. Gives this rank's part of each, by entry, and the numbers of each."""
        members, homes = stage.members, [self.homes[i] for i in stage.members]
        owned = [home for home in homes if isinstance(home, Owned)]
        if not owned:
            layouts = {i: home.layout for i, home in zip(members, homes, strict=True) if isinstance(home, Shards)}
            return lambda: (
                {i: layout.cut(directions[i], layout.placements).contiguous() for i, layout in layouts.items()},
                numbers,
            )
        entries = [self.entries[i] for i in members]
        lengths = [step.count_numbers(entry) for entry in entries]
        items = [Transfer(tuple(e.shape), self.dtype, home.dim, home.owner) for e, home in zip(entries, owned, strict=True)]
        items += [Transfer((n,), torch.float64, None, home.owner) for n, home in zip(lengths, owned, strict=True)]
        computed = [k for k, home in enumerate(owned) if home.computes]
        flat = torch.tensor([x for k in computed for x in numbers[members[k]]], dtype=torch.float64, device=self.device)
        wholes = {k: directions[members[k]] for k in computed}
        tails = flat.split([lengths[k] for k in computed])
        wholes |= {len(members) + k: tail for k, tail in zip(computed, tails, strict=True)}
        arriving = scatter_parts(owned[0].comm, items, wholes, self.device)

        def finish() -> Any:
            arrived = arriving()
            tails = iter(torch.cat(arrived[len(members) :]).tolist())
            beside = {i: list(itertools.islice(tails, n)) for i, n in zip(members, lengths, strict=True)}
            return dict(zip(members, arrived, strict=False)), beside

        return finish

    def _commit(
        self, stage: Stage, step: OwnerStep, parts: Tensors, numbers: Mapping[int, list[float]], problems: Mapping[int, Exception]
    ) -> None:
        """Move this rank's shards along their directions, and count the step of matrices that others have computed."""
        done = [i for i in stage.members if numbers[i][0] == DONE]
        step.left |= {i: (int(numbers[i][0]), problems.get(i)) for i in stage.members if numbers[i][0] != DONE}
        for i in done:
            entry, home, names, given = self.entries[i], self.homes[i], step.spec_of(self.entries[i]).committed, numbers[i][1:]
            last = count_sets(entry) * len(names)
            if not home.computes:
                for each in entry.records:
                    each.t += bool(each.size)
                    each.counters = dict(zip(each.counters, given[last:], strict=True))
            for record, lo in zip(self.shards.entries[i].records, range(0, last, len(names)), strict=True):
                record.counters, record.t = dict(zip(names, given[lo:], strict=False)), entry.records[0].t - 1
        if done:
            self.shards.step(Batch(self.shards, done, [parts[i] for i in done]), step.specs, step.fusion_keys, 1.0)

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
