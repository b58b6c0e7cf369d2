"""Lanes for parameters that are spread over ranks.

`local(kind)` steps what is in this rank's memory as the lane `kind` would. `ReducedBucket` does so with `Reducing`. `OwnerBucket`
brings gradients (and p, where the rule reads it) to the owners of matrices, runs the ordinary rule there on whole matrices,
brings the updates back and moves the shards; in stages, so that matrices travel while others are computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ...engine import Bundle, Engine, Mixing
from ...partition import staged
from ...pointers import PointerTable
from ...program import NotSent, commit_measures, gathers, measures
from ...reading import reads_p
from ...recent import Recent
from ...spec import Shape, Slot, Spec
from ...splits import WHOLE, Split, shapes_of, slots_of
from ...splits import part as part_of
from ...stepping import Grouping, TensorState, bundle_up, run_part, scalars
from ...stepping import Part as Bundled
from ...storage import COMPONENTS, Quantized
from .. import halves
from ..lanes import BUCKETS, Batch, Bucket, ParamEntry, Selection, TorchBucket, packed, unpacked, written
from ..state import Slots, canonicalize, dtype_of, in_pieces, kept_slots, names_of, shape_in_state, split_in
from .council import Council
from .exchange import Item, collect, spread
from .homes import Home, Owned, Shards
from .layout import Layout, here
from .reducing import Reducing
from .together import Elsewhere, Together, splitting

DONE, FAILED, BLIND = range(3)  # what became of an update: BLIND is one that reads p and was not sent it


class Part:
    """A seat as a lane for plain tensors wants it: the parameter's part that is here."""

    def __init__(self, seat: Any):
        self.param, self.records, self.split, self.columns = here(seat.param), seat.records, seat.split, seat.columns
        self.half, self.places, self.dtype = seat.half, seat.places, seat.dtype


class Local(Bucket):
    """Mixed into a lane for plain tensors; gradients come as their local parts."""

    @staticmethod
    def seen(selection: Selection) -> list[Any]:
        return [Part(seat) for seat in selection.entries]

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        super().run(selection, batch, specs, scale)  # type: ignore[safe-super]
        seats: list[Any] = selection.entries
        for record in (record for seat in seats for record in seat.records if not record.size):
            now = scalars(record, specs[record.group], self.numbers)  # an empty shard's counts go on like the others'
            record.counters |= {name: now[name] for name in record.counters if name in now}
        written(seat.param for seat in seats)


@functools.cache
def local(kind: type[Bucket]) -> type[Bucket]:
    return type(f"Local{kind.__name__}", (Local, kind), {})


class ReducedBucket(local(TorchBucket)):  # type: ignore[misc]
    """Rules that measure whole tensors. Empty shards take part: their ranks must be in every all-reduce."""

    def group(self) -> Grouping:
        return Grouping(self.engine, self.records, [Layout(seat.param) for seat in self.seats])


# ---- owners ---------------------------------------------------------------------------------------------------------------
class Updates:
    """An engine that leaves directions where parameters would be; `found` has, by place, the numbers they are committed with."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.found: dict[int, list[float]] = {}

    def stack(self, shape: Shape) -> int:
        return self.engine.stack(shape)

    def mixes(self, shape: Shape) -> bool:
        return isinstance(self.engine, Mixing) and self.engine.mixes(shape)

    def run(self, bundle: Bundle) -> Mapping[str, Any]:
        x = self.engine.run(bundle, move=False)
        columns = [np.broadcast_to(_number(x.get(name)), len(bundle.index)).tolist() for name in bundle.spec.committed]
        self.found |= dict(zip(bundle.index, map(list, zip(*columns, strict=True)), strict=True))
        return x


def sets(seat: ParamEntry) -> int:
    """How many times numbers are committed with: once for equal pieces."""
    return len(seat.records) if isinstance(seat.split, tuple) else 1


def _number(value: Any) -> Any:
    """A number that is committed with, or one per tensor, on the host."""
    return 0.0 if value is None else value.tolist() if torch.is_tensor(value) else value


class Move(Spec):
    """The commit of a matrix rule, on a shard: g is the direction, the record's counters are its numbers."""

    whose: ClassVar[Spec]

    def slots(self, shape: Shape) -> dict[str, Slot]:
        return {}

    def structure(self) -> tuple[Any, ...]:
        return (type(self.whose), self.whose.likeness())

    def scalars(self, t: int, counters: Mapping[str, float]) -> dict[str, Any]:
        return dict.fromkeys(self.whose.committed, 0.0) | dict(counters)

    def update(self, E: Any, x: Any) -> Any:
        return x.set(u=x.g)

    def commit(self, E: Any, x: Any) -> Any:
        return self.whose.commit(E, x)


@functools.cache
def move(spec: Spec) -> Spec:
    return type("Move", (Move,), {"whose": spec})(rounding=spec.rounding)


class Landing:
    """Where the update of a seat lands."""

    def __init__(self, seat: ParamEntry):
        first, shape = seat.records[0], tuple(here(seat.param).shape)
        self.param, self.columns = seat.param, seat.columns
        self.half, self.places, self.dtype = seat.half, seat.places, seat.dtype
        self.split: Split = WHOLE
        self.records = [TensorState(first.name, shape, first.group)]
        if isinstance(seat.split, tuple):  # unequal pieces are committed with numbers of their own
            axis = int(seat.columns)
            self.split = here_of = lengths(seat.param, seat.split, axis)
            shapes = [(*shape[:axis], n, *shape[axis + 1 :]) for n in here_of]
            self.records = [TensorState(first.name, each, first.group) for each in shapes]


def lengths(param: torch.Tensor, split: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """How much of each piece is here."""
    first, last = Layout(param).extent(axis) if isinstance(param, DTensor) else (0, param.shape[axis])
    ends = list(itertools.accumulate(split))
    return tuple(max(0, min(last, end) - max(first, end - n)) for n, end in zip(split, ends, strict=True))


class Turn(NamedTuple):
    """A stage of a step: which seats, where their arrays are, and what is computed here."""

    stage: list[int]
    watch: PointerTable
    parts: list[Bundled]


class OwnerBucket(Bucket):
    """Matrices that one rank each computes, or (`homes` that are Shards) that every rank computes after a full gather."""

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        super().__init__(engine, why, device, dtype, sign)
        self.homes: list[Home] = []
        self.shapes: list[set[Shape]] = []  # of each seat's pieces
        self.readers: set[int] = set()  # seats whose rule has read p where it was not expected to
        self.plans = Recent(Grouping.CHOICES)
        self.landing = local(BUCKETS.get(engine.name, TorchBucket))(engine, why, device, dtype, 1.0)

    def view(self, buffer: torch.Tensor) -> Any:  # type: ignore[override]
        return self.landing.view(buffer)

    def step(self, batch: Batch, specs: Sequence[Spec], structures: tuple[Any, ...], scale: float) -> None:
        """Everybody goes to the end of it, also where an owner's update raises: nobody is left waiting."""
        chosen = list(batch.chosen)
        given = dict(zip(chosen, batch.grads, strict=True))
        left = self._stepped(chosen, specs, structures, given, scale)
        if blind := [i for i in chosen if left.get(i, (DONE,))[0] == BLIND]:
            self.readers.update(blind)
            left = {i: why for i, why in left.items() if i not in blind} | self._stepped(blind, specs, structures, given, scale)
        if left:
            self.count([i for i in chosen if i not in left])
            raise self._failure(left)

    def _stepped(
        self, chosen: list[int], specs: Sequence[Spec], structures: Any, given: Mapping[int, torch.Tensor], scale: float
    ) -> dict[int, tuple[int, Exception | None]]:
        """All gradients begin to travel; then each stage's are awaited and computed, and its updates sent on their way. Gives the
        seats that were not stepped: what became of them, and why, where it is known here."""
        seats, homes, grads = [self.seats[i] for i in chosen], [self.homes[i] for i in chosen], [given[i] for i in chosen]
        rows = self.select(chosen).rows
        key = self.grouping.key(rows, specs, structures, False)
        turns: list[Turn] = self.plans.find(
            key, lambda: [self._turn(stage, seats, homes, specs) for stage in self._staged(seats, homes, specs)]
        )
        reading = self._reading(chosen, specs)
        coming = [self._gathered(turn.stage, seats, homes, grads, reading) for turn in turns]
        leaving, problems = [], dict[int, Exception]()
        for turn, came in zip(turns, coming, strict=True):
            updates, numbers, raised = self._updated(turn, seats, *came(), specs, scale)
            leaving.append(self._delivered(turn.stage, seats, homes, specs, updates, numbers))
            problems |= raised
        landed = {i: its for arrive in leaving for i, its in arrive().items()}
        done = [i for i in range(len(seats)) if landed[i][1][0] == DONE]
        self._land([chosen[i] for i in done], specs, [landed[i][0] for i in done], [landed[i][1][1:] for i in done])
        return {chosen[i]: (int(landed[i][1][0]), problems.get(i)) for i in landed if landed[i][1][0] != DONE}

    def _reading(self, chosen: list[int], specs: Sequence[Spec]) -> set[int]:
        """The places among these seats of those whose rule reads p: of what is stacked in many shapes all or none."""
        groups = [self.seats[i].records[0].group for i in chosen]
        found = {
            k
            for k, (i, group) in enumerate(zip(chosen, groups, strict=True))
            if i in self.readers or any(reads_p(specs[group], shape) for shape in self.shapes[i])
        }
        mixed = {groups[k] for k in found if specs[groups[k]].ragged()}
        return found | {k for k, group in enumerate(groups) if group in mixed}

    def _failure(self, left: Mapping[int, tuple[int, Exception | None]]) -> Exception:
        """What is raised of updates that failed, on all ranks. Their records count what their state counts."""
        for i in left:
            for record in self.seats[i].records:
                record.t = int(self.steps[i])
        names = ", ".join(repr(self.seats[i].records[0].name) for i in left)
        problem = next((problem for _, problem in left.values() if problem is not None), None)
        if problem is None:
            return Elsewhere(f"the update of {names} failed on another rank, its owner, which says why; it was not stepped")
        problem.add_note(f"{names} was not stepped, on no rank; the matrices beside it were")
        return problem

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        raise AssertionError("an owner lane does everything in `step`")

    @staticmethod
    def _staged(seats: list[ParamEntry], homes: list[Home], specs: Sequence[Spec]) -> list[list[int]]:
        owned = [home for home in homes if isinstance(home, Owned)]
        if len(owned) < len(homes):  # gathered whole, one after the other
            return [list(range(len(homes)))]
        shapes = [tuple(seat.shape) for seat in seats]
        work = [specs[seat.records[0].group].work(shape) for seat, shape in zip(seats, shapes, strict=True)]
        return staged(work, [home.owner for home in owned], shapes, owned[0].circle.size)

    def _turn(self, stage: list[int], seats: list[ParamEntry], homes: list[Home], specs: Sequence[Spec]) -> Turn:
        here = [i for i in stage if not isinstance(home := homes[i], Owned) or home.mine]
        records = [record for i in here for record in seats[i].records]
        watch = PointerTable(len(records))
        return Turn(stage, watch, bundle_up(enumerate(records), specs, self.engine, watch))

    def _gathered(
        self, stage: list[int], seats: list[ParamEntry], homes: list[Home], grads: list[torch.Tensor], reading: set[int]
    ) -> Callable[[], tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
        """The whole gradients of what is computed here, by place; and p, of those whose rule reads it."""
        wholes: tuple[dict[int, torch.Tensor], ...] = {}, {}
        travelling = []
        for side, i in [*((0, i) for i in stage), *((1, i) for i in stage if i in reading)]:
            seat, home, part = seats[i], homes[i], halves.held(seats[i]) if side else grads[i]
            if isinstance(home, Shards):
                layout = home.layout
                wholes[side][i] = layout.wrapped(part.contiguous(), layout.shape, layout.placements).full_tensor()
            elif home.layout is not None:
                travelling.append(((side, i), Item(tuple(seat.shape), part.dtype, home.dim, home.owner), part, home.circle))
            elif home.mine:
                wholes[side][i] = part
        if not travelling:
            return lambda: wholes  # type: ignore[return-value]
        places, items, parts, circles = zip(*travelling, strict=True)
        coming = collect(circles[0], items, parts, self.device)

        def came() -> Any:
            for k, whole in coming().items():
                side, i = places[k]
                wholes[side][i] = whole
            return tuple(dict(sorted(each.items())) for each in wholes)

        return came

    def _updated(
        self,
        turn: Turn,
        seats: list[ParamEntry],
        wholes: Mapping[int, torch.Tensor],
        params: Mapping[int, torch.Tensor],
        specs: Sequence[Spec],
        scale: float,
    ) -> tuple[dict[int, torch.Tensor], dict[int, list[float]], dict[int, Exception]]:
        """The directions of what is computed here; with each what became of it, the numbers that it is to be committed with, then
        the counters; and what was raised."""
        updates: dict[int, torch.Tensor] = {}
        sides: tuple[list[Any], list[Any]] = ([], [])
        first: dict[int, int] = {}
        for i, whole in wholes.items():
            grad = packed(whole.to(self.dtype).contiguous(), seats[i])
            updates[i] = torch.empty_like(grad)
            if i in params:  # where the direction will be
                updates[i].copy_(packed(params[i], seats[i]))
            first[i] = len(sides[0])
            for side, tensor in zip(sides, (updates[i], grad), strict=True):
                side += self.pieces(tensor, seats[i])
        self._tell(turn.watch, *sides)
        sides = tuple([self.view(piece) for piece in side] for side in sides)  # type: ignore[assignment]
        engine, self.numbers, raised = Updates(self.engine), {}, dict[int, Exception]()
        whose = [i for i in first for _ in seats[i].records]
        for part in turn.parts:
            part.bundle.blind = any(whose[k] not in params for k in part.bundle.index)
            ps, gs = ([side[k] for k in part.bundle.index] for side in sides)
            try:
                run_part(part, engine, specs, self.numbers, ps, gs, scale)  # type: ignore[arg-type]
            except Exception as problem:  # which all are told with the updates
                raised |= {whose[k]: problem for k in part.bundle.index}
        numbers = {}
        updates = {i: unpacked(update, seats[i]) for i, update in updates.items()}
        for i, k in first.items():
            if i in raised:
                begun = any(k + j in engine.found for j in range(len(seats[i].records)))  # another of its pieces has been stepped
                verdict = BLIND if isinstance(raised[i], NotSent) and not begun else FAILED
                numbers[i] = [verdict, *[0.0] * (self._length(seats[i], specs) - 1)]
                continue
            nothing = [0.0] * len(specs[seats[i].records[0].group].committed)  # of an empty matrix
            committed = [x for j in range(sets(seats[i])) for x in engine.found.get(k + j, nothing)]
            numbers[i] = [DONE, *committed, *seats[i].records[0].counters.values()]
        return updates, numbers, raised

    @staticmethod
    def _length(seat: ParamEntry, specs: Sequence[Spec]) -> int:
        """How many numbers travel with an update."""
        record = seat.records[0]
        return 1 + sets(seat) * len(specs[record.group].committed) + len(record.counters)

    def _tell(self, watch: PointerTable, updates: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Write down where this step's arrays are, for engines that go by address."""
        types = [self.dtype] * len(grads)
        watch.set(slice(None), [t.data_ptr() for t in updates], [t.data_ptr() for t in grads], types, types)

    def _delivered(
        self,
        stage: list[int],
        seats: list[ParamEntry],
        homes: list[Home],
        specs: Sequence[Spec],
        updates: Mapping[int, torch.Tensor],
        numbers: Mapping[int, list[float]],
    ) -> Callable[[], dict[int, tuple[torch.Tensor, list[float]]]]:
        """This rank's part of every update of a stage, and its numbers."""
        if not isinstance(home := homes[stage[0]], Owned):
            layouts = {i: home.layout for i in stage if isinstance(home := homes[i], Shards)}
            return lambda: {i: (at.part(updates[i], at.placements).contiguous(), numbers[i]) for i, at in layouts.items()}
        owned = [home for i in stage if isinstance(home := homes[i], Owned)]
        lengths = [self._length(seats[i], specs) for i in stage]
        items = [Item(tuple(seats[i].shape), self.dtype, home.dim, home.owner) for i, home in zip(stage, owned, strict=True)]
        items += [Item((n,), torch.float64, None, home.owner) for n, home in zip(lengths, owned, strict=True)]
        mine = [k for k, home in enumerate(owned) if home.mine]
        flat = torch.tensor([x for k in mine for x in numbers[stage[k]]], dtype=torch.float64, device=self.device)
        wholes = {k: updates[stage[k]] for k in mine}
        wholes |= {len(stage) + k: tail for k, tail in zip(mine, flat.split([lengths[k] for k in mine]), strict=True)}
        coming = spread(home.circle, items, wholes, self.device)

        def arrived() -> dict[int, tuple[torch.Tensor, list[float]]]:
            came = coming()
            tails = iter(torch.cat(came[len(stage) :]).tolist())
            return {i: (part, list(itertools.islice(tails, n))) for i, part, n in zip(stage, came, lengths, strict=False)}

        return arrived

    def _land(self, chosen: list[int], specs: Sequence[Spec], parts: list[torch.Tensor], told: list[list[float]]) -> None:
        """Move the shards, and count the step where others have taken it."""
        if len(self.landing.seats) != len(self.seats):
            self.landing.seats = [Landing(seat) for seat in self.seats]  # type: ignore[misc]
            for landing in self.landing.seats if self.landing.rounds else ():
                halves.deal_out(self.landing, landing)
            self.landing.arrange()
        for i, numbers in zip(chosen, told, strict=True):
            seat, home = self.seats[i], self.homes[i]
            record, names = seat.records[0], specs[seat.records[0].group].committed
            last = sets(seat) * len(names)
            if isinstance(home, Owned) and not home.mine:
                for each in seat.records:
                    each.t += bool(each.size)
                    each.counters = dict(zip(each.counters, numbers[last:], strict=True))
            for landed, first in zip(self.landing.seats[i].records, range(0, last, len(names)), strict=True):
                landed.counters, landed.t = dict(zip(names, numbers[first:], strict=False)), record.t - 1
        moves = [move(spec) for spec in specs]
        self.landing.step(Batch(self.landing, chosen, parts), moves, tuple(spec.likeness() for spec in moves), 1.0)


# ---- seats ----------------------------------------------------------------------------------------------------------------
def seat(lane: Bucket, spec: Spec, param: torch.Tensor, name: str, group: int, state: Any, home: Home) -> ParamEntry:
    """A seat with the views of its state that a lane needs."""
    owned = isinstance(lane, OwnerBucket)
    split = (split_in(state) or WHOLE) if spec.matrix else WHOLE
    canonicalize(state, spec)
    made = ParamEntry(param, state, name, group, split, spec.counters())
    if not owned:
        shapes = shapes_of(tuple(here(param).shape), split)
        whole = made.records[0].size
        made.records = [TensorState(record.name, shape, group) for record, shape in zip(made.records, shapes, strict=True)]
        if isinstance(lane, ReducedBucket):
            made.records[0].size = whole  # an empty shard is stepped, too
    held = not isinstance(home, Owned) or home.mine
    slots = kept_slots(spec, param, split, home)
    mine = slots if owned else in_part(slots, slots_of(spec, tuple(here(param).shape), split))
    for i, record in enumerate(made.records):
        record.slots = {slot: each[i] for slot, each in mine.items()}
        record.t = int(state["step"])
        record.counters = {counter: float(state[counter]) for counter in spec.counters()}
    first = 0 if owned or isinstance(home, Owned) else home.first()
    for slot, key in names_of(spec, slots).items() if held else ():
        views = []
        for end in COMPONENTS[slots[slot][0].storage]:
            kept, dtype = state[key + end], dtype_of(slots[slot], param, end)
            buffer, shape = here(kept), shape_in_state(part_of(slots[slot], end), param, split)
            if not home.fits(kept, shape) or buffer.dtype is not dtype or not buffer.is_contiguous():
                raise RuntimeError(
                    f"{key + end!r} of {name} must be as this optimizer made it: a contiguous {dtype} of shape {shape}, spread "
                    f"like the parameter; it is {kept.dtype} of shape {tuple(kept.shape)}"
                )
            views.append([lane.view(each) for each in in_pieces(buffer, part_of(mine[slot], end))])
        for record, *its in zip(made.records, *views, strict=True):
            kind = record.slots[slot].storage
            record.state[slot] = Quantized(kind, *its, first=first) if kind else its[0]
    return made


def in_part(slots: Mapping[str, Slots], local: Mapping[str, Slots]) -> dict[str, Slots]:
    """The slots of what is here of a parameter, kept as those of the whole are."""
    return {name: tuple(replace(slot, storage=slots[name][0].storage) for slot in each) for name, each in local.items()}


def add(
    lanes: dict[Any, Bucket],
    key: tuple[torch.device, torch.dtype, bool],
    make: type[Bucket],
    engine: tuple[Engine, str],
    spec: Spec,
    param: torch.Tensor,
    name: str,
    group: int,
    state: Any,
    home: Home,
) -> Bucket:
    """Give a parameter a seat in the lane that suits its home, made if need be. Gives the lane."""
    device, dtype, maximize = key
    kind, what = kind_of(make, spec, home)
    if kind is OwnerBucket and commit_measures(spec):
        whose, instead = "decay='hyperball'", "use decay='decoupled' or 'cautious' there"
        if type(spec).commit is not Spec.commit:
            whose, instead = "its commit", "let `update` take it from p and u, and the commit from numbers"
        raise spec.refuse(f"{whose} needs the norm of a whole matrix, and {name!r} is shared out over ranks ({what}); {instead}")
    place = (*key, kind, home.circle.name if isinstance(home, Owned) else None)
    if place not in lanes:
        if kind is ReducedBucket:
            reducing: Any = Reducing(device, dtype)
            engine = reducing, "sums over ranks are taken by the torch engine"
        lanes[place] = kind(*engine, device, dtype, -1.0 if maximize else 1.0)
        lanes[place].spread = what
    lane = lanes[place]
    lane.seats.append(seat(lane, spec, param, name, group, state, home))
    if isinstance(lane, OwnerBucket):
        lane.homes.append(home)
        lane.shapes.append({record.shape for record in lane.seats[-1].records if record.size})
    return lane


def kind_of(make: type[Bucket], spec: Spec, home: Home) -> tuple[type[Bucket], str]:
    """The lane for a home, and what it does in words."""
    if isinstance(home, Owned):
        return OwnerBucket, f"each matrix on its owner, one of {home.circle.size} ranks"
    if not home.layout.shards and not gathers(spec, home.layout.shape):
        return local(make), "replicated: every rank steps it"
    if spec.matrix:
        return OwnerBucket, "gathered whole: its placement is not one plain shard"
    measured = measures(spec, home.layout.shape)
    return (ReducedBucket, "on shards, sums all-reduced") if measured else (local(make), "on shards")


def council(lanes: Sequence[Bucket], watched: bool) -> Council | None:
    """The council of ranks whose lanes work together, or (`watched`) must decide together; None where each goes its own way."""
    working = [lane for lane in lanes if isinstance(lane, (OwnerBucket, ReducedBucket))]
    deciding = [lane for lane in lanes if isinstance(lane, Local)] if watched else []
    together = splitting(each.param for lane in (*working, *deciding) for each in lane.seats)
    owned = [home.circle for lane in working if isinstance(lane, OwnerBucket) for home in lane.homes if isinstance(home, Owned)]
    together = Together([*together.circles, *owned])
    return Council(together, working, (*working, *deciding)[0].device) if together.circles else None
