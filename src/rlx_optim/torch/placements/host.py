"""State on the host: `offload="cpu"`, for parameters on a CUDA device.

Who steps what stays as it is; where the arrays are is what changes. `Hosted` deals its entries out into `StagedBucket`s: each is
an ordinary placement whose entries (`Chunk`) stand for arrays that are brought to where the arithmetic is. For most rules that is
the host: gradients and parameters come down, the parameters go up again, the state never moves. For matrix rules, and for all
with engine="triton", it is the device: state goes up and comes down again. Where a rule looks at single coordinates, a large
tensor goes in runs of rows. While one bucket is computed, the next are on their way and the last is on its way back (`Link`).

Nothing is under way when a step has ended, and no copy of a parameter outlives it: what the owner does with p between steps
counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from ... import buckets
from ...buckets import SLOTS, aligned
from ...engine import Engine
from ...program import has_reduction, reduces_over_all
from ...rounding import LOW
from ...spec import Spec
from ...splits import WHOLE
from ...stepping import TensorState, observe
from ...storage import Quantized
from .. import bf16
from ..state import HOST
from .local import LOCAL, Batch, LocalTensors, ParamEntry, Placement, Selection

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where to copy, and what


class Room:
    """Memory that buckets use in turn."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.come: Any = None  # when what was brought last is here
        self.gone: Any = None  # when what was taken away last is there

    def views(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these shapes and types, one behind the other."""
        sizes = [aligned(t.numel() * t.element_size()) for t in like]
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return [
            self.memory[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(starts, like, strict=True)
        ]


def count_bytes(like: Sequence[torch.Tensor]) -> int:
    return sum(aligned(t.numel() * t.element_size()) for t in like)


class Link:
    """Copies between a CUDA device and the host, on streams of their own. below: whether the host computes."""

    def __init__(self, device: torch.device, below: bool):
        self.device, self.below = device, below
        self.forth, self.back = self.stream(), self.stream()

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The stream that the device computes on."""
        return torch.cuda.current_stream(self.device)

    def memory(self, size: int) -> torch.Tensor:
        """Bytes where the arithmetic is; page-locked on the host."""
        where: Any = {"device": "cpu", "pin_memory": True} if self.below else {"device": self.device}
        return torch.empty(size, dtype=torch.uint8, **where)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host in page-locked memory, from which copies do not wait."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def copied(self, stream: Any, pairs: Pairs) -> Any:
        """The event that ends these copies."""
        with torch.cuda.stream(stream):
            if pairs:  # a rule may have no state
                torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return event

    def enlarge(self, room: Room, size: int) -> None:
        """Have at least so many bytes in a room."""
        if room.memory.numel() < size:
            with torch.inference_mode(False):  # it is written to in every mode
                room.memory = self.memory(size)

    def begin(self) -> None:
        """What is copied comes after what the device computes now."""
        for stream in (self.forth, self.back):
            stream.wait_stream(self.current())

    def bring(self, room: Room, pairs: Pairs) -> None:
        """To where the arithmetic is, as soon as what was in the room before is gone."""
        if room.gone is not None:
            self.forth.wait_event(room.gone)
        room.come = self.copied(self.forth, pairs)

    def arrive(self, room: Room) -> None:
        """Let the arithmetic wait for what was brought."""
        if self.below:
            room.come.synchronize()
        else:
            self.current().wait_event(room.come)

    def take(self, room: Room, pairs: Pairs) -> None:
        """Back to where it came from, once it is computed."""
        if not self.below:
            self.back.wait_stream(self.current())
        room.gone = self.copied(self.back, pairs)

    def end(self) -> None:
        """What the device computes next comes after the copies."""
        for stream in (self.forth, self.back):
            self.current().wait_stream(stream)

    def rest(self) -> None:
        """What was written to the host is there."""
        if not self.below:
            self.back.synchronize()


#: by the type of device that parameters are offloaded from
LINKS: dict[str, type[Link]] = {"cuda": Link}


class Chunk:
    """An entry in a bucket: a parameter, or a run of its rows."""

    def __init__(self, entry: ParamEntry, records: list[TensorState], half: Any, rows: slice | None):
        self.param, self.whole, self.records, self.rounding, self.rows = entry.param, entry.param, records, half, rows
        self.split, self.columns = (entry.split, entry.columns) if rows is None else (WHOLE, False)
        self.dtype = entry.dtype

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.rows is None else tensor[self.rows]

    @property
    def like(self) -> torch.Tensor:
        """What it is of the parameter; the memory may be moved by its owner from step to step."""
        return self.cut(self.whole.detach())


@dataclasses.dataclass
class StagedBucket:
    """A placement of chunks; of each its entry's place, and what must be copied of its state."""

    placement: Placement
    places: list[int]
    state: list[Pairs] = dataclasses.field(default_factory=list)
    room: Room | None = None  # where that is bound to one
    #: else: what parameters and gradients were brought to last; in which memory, of which chunks, and of which types
    staged: list[torch.Tensor] = dataclasses.field(default_factory=list)
    shape: Any = None


class Hosted(Placement):
    """Seats whose state is on the host, and who computes where."""

    hosted = True

    def __init__(
        self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float, where: torch.device, above: bool
    ):
        """device: of the parameters; where: the arithmetic is; above: that is the device."""
        super().__init__(engine, why, device, dtype, sign)
        self.kept, self.where, self.above, self.waits = HOST.device, where, above, not above
        self.inner = LOCAL.get(engine.name, LocalTensors)
        self.unbroken = False  # whether a rule reduces over all tensors
        self.matrix = False  # whether one is a matrix rule
        self.link = LINKS[device.type](device, not above)
        self.rooms = [Room() for _ in range(SLOTS)]
        self.buckets: list[StagedBucket] = []

    @property
    def words(self) -> str:  # type: ignore[override]
        return ", state on the host, stepped " + (f"on {self.where}" if self.above else "there")

    def view(self, buffer: torch.Tensor) -> Any:  # type: ignore[override]
        return buffer if self.above else self.inner.view(buffer)

    def canonicalize(self, state: dict[str, Any], names: Iterable[str]) -> None:
        """Have state that is sent to and fro in page-locked memory."""
        for name in (*names, LOW) if self.above else ():
            if name in state:
                state[name] = self.link.pinned(state[name])

    def admit(self, entry: ParamEntry, spec: Spec) -> None:
        """Take an entry in, cut into runs of rows where that makes no difference to its rule."""
        self.entries.append(entry)
        shape = tuple(entry.shape)
        self.unbroken, self.matrix = self.unbroken or reduces_over_all(spec, shape), self.matrix or spec.matrix
        if self.unbroken and self.above:
            raise spec.refuse(
                "engine='triton' would bring all state to the device at once, for what is reduced over all tensors; leave it out"
            )
        if spec.matrix or entry.split != WHOLE or not math.prod(shape) or not shape or has_reduction(spec, shape):
            return
        (whole,) = entry.records
        moved = sum(each.nbytes for each in whole.state.values()) if self.above else 2 * entry.param.nbytes
        runs = buckets.runs(shape[0], moved // shape[0], buckets.most(self.above, spec.matrix))
        if len(runs) > 1:
            entry.records = [run_of(whole, rows) for rows in runs]

    def share_counts(self) -> None:
        super().share_counts()
        chunks = [(place, chunk) for place, entry in enumerate(self.entries) for chunk in self.chunks(entry)]
        moved = [list(stored(chunk)) if self.above else [chunk.like] * 2 for _, chunk in chunks]
        sizes, most = list(map(count_bytes, moved)), buckets.most(self.above, self.matrix)
        self.buckets = []
        for places in buckets.dealt(sizes, most, self.unbroken):
            self.buckets.append(self.bucket([chunks[place] for place in places]))
        if self.above:
            for room, size in zip(self.rooms, buckets.rooms(sizes, most, self.unbroken), strict=False):
                self.link.enlarge(room, size)
            for n, bucket in enumerate(self.buckets):
                self.bind(bucket, self.rooms[n % SLOTS])

    def chunks(self, entry: ParamEntry) -> Iterator[Chunk]:
        """Of an entry."""
        if entry.split != WHOLE or len(entry.records) == 1:
            yield Chunk(entry, entry.records, entry.rounding, None)
            return
        first = 0
        for record in entry.records:
            rows, half = slice(first, first := first + record.shape[0]), entry.rounding
            if half is not None:
                place = rows.start * math.prod(record.shape[1:])
                half = dataclasses.replace(half, first=place, low=None if half.low is None else half.low[rows])
            yield Chunk(entry, [record], half, rows)

    def bucket(self, chunks: Sequence[tuple[int, Chunk]]) -> StagedBucket:
        """Of these chunks, each with its entry's place."""
        placement = self.inner(self.engine, self.why, self.where, self.dtype, self.sign)
        placement.recorded = False  # graphs would keep memory of their own
        placement.entries = [cast(Any, chunk) for _, chunk in chunks]
        if not self.above:
            for _, chunk in chunks:
                bf16.tell(placement, chunk)
            placement.arrange()
        return StagedBucket(placement, [place for place, _ in chunks])

    def bind(self, bucket: StagedBucket, room: Room) -> None:
        """Give chunks state in a room on the device, and keep what it is copied from."""
        bucket.room, chunks = room, cast(Any, bucket.placement.entries)
        views = iter(room.views([tensor for chunk in chunks for tensor in stored(chunk)]))
        for chunk in chunks:
            pairs = [(next(views), tensor) for tensor in stored(chunk)]
            bucket.state.append(pairs)
            staged = iter(pairs)
            for record in chunk.records:
                for slot, kept in record.state.items():
                    if isinstance(kept, Quantized):
                        moved = [self.inner.view(next(staged)[0]) for _ in kept.components]
                        record.state[slot] = Quantized(kept.storage, *moved, first=kept.first)
                    else:
                        record.state[slot] = self.inner.view(next(staged)[0])
            if chunk.rounding is not None and chunk.rounding.low is not None:
                chunk.rounding = dataclasses.replace(chunk.rounding, low=next(staged)[0])
            bf16.tell(bucket.placement, chunk)
        bucket.placement.arrange()

    def observe(self, entry: ParamEntry, spec: Spec, estimate: torch.Tensor) -> None:
        def take(record: TensorState, part: torch.Tensor) -> None:
            observe(record, spec, self.engine, self.inner.view(part.reshape(record.shape)))

        if self.above:
            turns = self.turns([self.entries.index(entry)], [estimate])
            self.carry(turns, lambda turn: take(turn.chunks[0].records[0], turn.grads[0]))
            return self.link.rest()
        parts = estimate.to(self.where).reshape(-1).split([record.size for record in entry.records])
        for record, part in zip(entry.records, parts, strict=True):
            take(record, part)

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: float) -> None:
        """Step bucket by bucket."""
        turns = self.turns(batch.chosen, batch.grads)

        def compute(turn: Turn) -> None:
            placement = turn.bucket.placement
            placement.asked = self.asked
            placement.step(Batch(placement, turn.members, turn.grads), specs, fusion_keys, scale)

        self.carry(turns, compute)
        self.parts = [part for turn in turns for part in turn.bucket.placement.parts]

    def turns(self, chosen: Sequence[int], grads: Sequence[torch.Tensor]) -> list[Turn]:
        """The buckets that these entries are in, with what is theirs."""
        given = dict(zip(chosen, grads, strict=True))
        work = [(bucket, [k for k, i in enumerate(bucket.places) if i in given]) for bucket in self.buckets]
        return [Turn(self, bucket, members, given, n) for n, (bucket, members) in enumerate((b, m) for b, m in work if m)]

    def carry(self, turns: Sequence[Turn], compute: Callable[[Turn], None]) -> None:
        """Each is brought as soon as its room is free, computed, and taken back."""
        waiting, busy = list(reversed(turns)), set[Room]()
        self.link.begin()
        try:
            for turn in turns:
                while waiting and waiting[-1].room not in busy:
                    coming = waiting.pop()
                    busy.add(coming.room)
                    coming.bring()
                self.link.arrive(turn.room)
                compute(turn)
                self.link.take(turn.room, turn.back)
                busy.discard(turn.room)
        finally:
            self.link.end()

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        raise AssertionError("a host placement does everything in `step`")


class Turn:
    """A bucket in a step: which of its chunks, their gradients, what is copied to where."""

    def __init__(self, placement: Hosted, bucket: StagedBucket, members: list[int], given: dict[int, torch.Tensor], number: int):
        self.placement, self.bucket, self.members = placement, bucket, members
        self.room = bucket.room or placement.rooms[number % SLOTS]
        self.chunks: Any = [bucket.placement.entries[k] for k in members]
        self.grads = [chunk.cut(given[bucket.places[k]]) for k, chunk in zip(members, self.chunks, strict=True)]
        self.back: Pairs = ()

    def bring(self) -> None:
        if self.placement.above:
            pairs = [pair for k in self.members for pair in self.bucket.state[k]]
            self.back = [(kept, staged) for staged, kept in pairs]
            for chunk in self.chunks:
                chunk.param = chunk.like if chunk.rows else chunk.whole
        else:
            wholes = [chunk.like for chunk in self.chunks]
            sources, bucket = [*wholes, *self.grads], self.bucket
            self.placement.link.enlarge(self.room, count_bytes(sources))
            shape = self.room.memory.data_ptr(), self.members, [t.dtype for t in sources]
            if shape != bucket.shape:
                bucket.staged, bucket.shape = self.room.views(sources), shape
            staged = bucket.staged
            pairs = list(zip(staged, sources, strict=True))
            self.back = list(zip(wholes, staged, strict=False))
            self.grads = staged[len(wholes) :]
            for chunk, param in zip(self.chunks, staged, strict=False):
                chunk.param = param
        self.placement.link.bring(self.room, pairs)


def stored(chunk: Chunk) -> Iterator[torch.Tensor]:
    """All tensors of a chunk's state."""
    for record in chunk.records:
        for kept in record.state.values():
            yield from kept.components.values() if isinstance(kept, Quantized) else (kept,)
    if chunk.rounding is not None and chunk.rounding.low is not None:
        yield chunk.rounding.low


def run_of(whole: TensorState, rows: slice) -> TensorState:
    """A run of rows of a parameter as a record of its own, over the same state."""
    made = TensorState(whole.name, (rows.stop - rows.start, *whole.shape[1:]), whole.group)
    made.t, made.counters = whole.t, dict(whole.counters)
    made.slots = {name: dataclasses.replace(slot, shape=made.shape) for name, slot in whole.slots.items()}
    first = rows.start * math.prod(whole.shape[1:])
    for name, kept in whole.state.items():
        coded = isinstance(kept, Quantized)
        parts = [part[rows] for part in (kept.components.values() if coded else (kept,))]
        made.state[name] = Quantized(kept.storage, *parts, first=kept.first + first) if coded else parts[0]
    return made


@contextlib.contextmanager
def whole(placements: Iterable[Placement]) -> Iterator[None]:
    """A step of these placements, some offloaded: nothing is under way to the host after it, and Ctrl-C is answered after
    it, so that it is taken whole."""
    with _undisturbed():
        try:
            yield
        finally:
            for placement in placements:
                if isinstance(placement, Hosted):
                    placement.link.rest()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[-1])
