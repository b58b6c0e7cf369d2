"""State on the host: `offload="cpu"`, for parameters on a CUDA device.

Who steps what stays as it is; where the arrays are is what changes. `Hosted` deals its entries out into `StagedBucket`s: each is
an ordinary placement whose entries (`Chunk`) stand for arrays that are brought to where the arithmetic is. For most rules that is
the host: gradients and parameters come down, the parameters go up again, the state never moves. For matrix rules, and for all
with engine="triton", it is the device: state goes up and comes down again. Where a rule looks at single coordinates, a large
tensor goes in runs of rows. While one bucket is computed, the next are on their way and the last is on its way back.

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
from .local import LOCAL, Batch, LocalTensors, ParamEntry, Placement

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where to copy, and what


class StagingBuffer:
    """Memory where the arithmetic is, which buckets use in turn."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.in_done: Any = None  # the event after which what was copied in last is here
        self.out_done: Any = None  # and the one after which what was copied out last is there

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


class CopyStreams:
    """Copies between a CUDA device and the host, on streams of their own. on_host: whether the host computes."""

    def __init__(self, device: torch.device, on_host: bool):
        self.device, self.on_host = device, on_host
        self.streams = self.inward, self.outward = self.stream(), self.stream()

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The stream that the device computes on."""
        return torch.cuda.current_stream(self.device)

    def memory(self, size: int) -> torch.Tensor:
        """Bytes where the arithmetic is; page-locked on the host."""
        where: Any = {"device": "cpu", "pin_memory": True} if self.on_host else {"device": self.device}
        return torch.empty(size, dtype=torch.uint8, **where)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host in page-locked memory, from which copies do not wait."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def copy(self, stream: Any, pairs: Pairs) -> Any:
        """Begin these copies; gives the event that ends them."""
        with torch.cuda.stream(stream):
            if pairs:  # a rule may have no state
                torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs], non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return event

    def enlarge(self, buffer: StagingBuffer, size: int) -> None:
        """Have at least so many bytes in a buffer."""
        if buffer.memory.numel() < size:
            with torch.inference_mode(False):  # it is written to in every mode
                buffer.memory = self.memory(size)

    def copy_in(self, buffer: StagingBuffer, pairs: Pairs) -> None:
        """Copy to where the arithmetic is, as soon as what was in the buffer before is out."""
        if buffer.out_done is not None:
            self.inward.wait_event(buffer.out_done)
        buffer.in_done = self.copy(self.inward, pairs)

    def wait_for(self, buffer: StagingBuffer) -> None:
        """Let the arithmetic wait for what was copied in."""
        if self.on_host:
            buffer.in_done.synchronize()
        else:
            self.current().wait_event(buffer.in_done)

    def copy_out(self, buffer: StagingBuffer, pairs: Pairs) -> None:
        """Copy back to where it came from, once it is computed."""
        if not self.on_host:
            self.outward.wait_stream(self.current())
        buffer.out_done = self.copy(self.outward, pairs)

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Copies come after what the device computes now, and what it computes next after the copies."""
        for stream in self.streams:
            stream.wait_stream(self.current())
        try:
            yield
        finally:
            for stream in self.streams:
                self.current().wait_stream(stream)

    def drain(self) -> None:
        """Wait until what was written to the host is there."""
        if not self.on_host:
            self.outward.synchronize()


#: by the type of device that parameters are offloaded from
COPY_STREAMS: dict[str, type[CopyStreams]] = {"cuda": CopyStreams}


class Chunk:
    """An entry in a bucket: a parameter, or a run of its rows."""

    def __init__(self, entry: ParamEntry, records: list[TensorState], half: Any, rows: slice | None):
        self.param, self.whole, self.records, self.rounding, self.rows = entry.param, entry.param, records, half, rows
        self.split, self.columns = (entry.split, entry.columns) if rows is None else (WHOLE, False)
        self.dtype = entry.dtype

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.rows is None else tensor[self.rows]

    @property
    def param_part(self) -> torch.Tensor:
        """What it is of the parameter; the memory may be moved by its owner from step to step."""
        return self.cut(self.whole.detach())


@dataclasses.dataclass
class StagedBucket:
    """A placement of chunks; of each its entry's place, and what must be copied of its state."""

    placement: Placement
    places: list[int]
    state: list[Pairs] = dataclasses.field(default_factory=list)
    buffer: StagingBuffer | None = None  # where that is bound to one
    #: else: what parameters and gradients were copied to last; in which memory, of which chunks, and of which types
    staged: list[torch.Tensor] = dataclasses.field(default_factory=list)
    shape: Any = None


@dataclasses.dataclass
class BucketStep:
    """A bucket in a step: which of its chunks, their gradients, and what is copied back."""

    bucket: StagedBucket
    buffer: StagingBuffer
    members: list[int]
    chunks: list[Any]
    grads: list[torch.Tensor]
    back: Pairs = ()


class Hosted(Placement):
    """Entries whose state is on the host, and who computes where."""

    hosted = True

    def __init__(
        self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float, where: Any, on_device: bool
    ):
        """device: of the parameters; where: the arithmetic is; on_device: that is the device."""
        super().__init__(engine, why, device, dtype, sign)
        self.state_device, self.where, self.on_device, self.waits = HOST.device, where, on_device, not on_device
        self.inner = LOCAL.get(engine.name, LocalTensors)
        self.reduces_all = False  # whether a rule reduces over all tensors
        self.matrix = False  # whether one is a matrix rule
        self.copies = COPY_STREAMS[device.type](device, not on_device)
        self.buffers = [StagingBuffer() for _ in range(SLOTS)]
        self.buckets: list[StagedBucket] = []

    @property
    def words(self) -> str:  # type: ignore[override]
        return ", state on the host, stepped " + (f"on {self.where}" if self.on_device else "there")

    def view(self, buffer: torch.Tensor) -> Any:  # type: ignore[override]
        return buffer if self.on_device else self.inner.view(buffer)

    def canonicalize(self, state: dict[str, Any], names: Iterable[str]) -> None:
        """Have state that is sent to and fro in page-locked memory."""
        for name in state.keys() & {*names, LOW} if self.on_device else ():
            state[name] = self.copies.pin(state[name])

    def admit(self, entry: ParamEntry, planned: Any) -> None:
        """Take an entry in, cut into runs of rows where that makes no difference to its rule."""
        self.entries.append(entry)
        shape, spec = tuple(entry.shape), planned.spec
        self.reduces_all, self.matrix = self.reduces_all or reduces_over_all(spec, shape), self.matrix or spec.matrix
        if self.reduces_all and self.on_device:
            raise spec.refuse(
                "engine='triton' would bring all state to the device at once, for what is reduced over all tensors; leave it out"
            )
        if spec.matrix or entry.split != WHOLE or not math.prod(shape) or not shape or has_reduction(spec, shape):
            return
        (whole,) = entry.records
        moved = sum(each.nbytes for each in whole.state.values()) if self.on_device else 2 * entry.param.nbytes
        runs = buckets.runs(shape[0], moved // shape[0], buckets.most(self.on_device, spec.matrix))
        if len(runs) > 1:
            entry.records = [cut_record(whole, rows) for rows in runs]

    def share_counts(self) -> None:
        super().share_counts()
        chunks = [(place, chunk) for place, entry in enumerate(self.entries) for chunk in self.cut_chunks(entry)]
        moved = [list(list_stored(chunk)) if self.on_device else [chunk.param_part] * 2 for _, chunk in chunks]
        sizes, most = list(map(count_bytes, moved)), buckets.most(self.on_device, self.matrix)
        dealt = buckets.dealt(sizes, most, self.reduces_all)
        self.buckets = [self.make_bucket([chunks[k] for k in members]) for members in dealt]
        if self.on_device:
            for buffer, size in zip(self.buffers, buckets.rooms(sizes, most, self.reduces_all), strict=False):
                self.copies.enlarge(buffer, size)
            for n, bucket in enumerate(self.buckets):
                self.bind(bucket, self.buffers[n % SLOTS])

    def cut_chunks(self, entry: ParamEntry) -> Iterator[Chunk]:
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

    def make_bucket(self, chunks: Sequence[tuple[int, Chunk]]) -> StagedBucket:
        """Of these chunks, each with its entry's place."""
        placement = self.inner(self.engine, self.why, self.where, self.dtype, self.sign)
        placement.recorded = False  # graphs would keep memory of their own
        placement.entries = [cast(Any, chunk) for _, chunk in chunks]
        if not self.on_device:
            for _, chunk in chunks:
                bf16.set_rounding(placement, chunk)
            placement.arrange()
        return StagedBucket(placement, [place for place, _ in chunks])

    def bind(self, bucket: StagedBucket, buffer: StagingBuffer) -> None:
        """Give chunks state in a buffer on the device, and keep what it is copied from."""
        bucket.buffer, chunks = buffer, cast(Any, bucket.placement.entries)
        views = iter(buffer.views([tensor for chunk in chunks for tensor in list_stored(chunk)]))
        for chunk in chunks:
            pairs = [(next(views), tensor) for tensor in list_stored(chunk)]
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
            bf16.set_rounding(bucket.placement, chunk)
        bucket.placement.arrange()

    def observe(self, entry: ParamEntry, spec: Spec, estimate: torch.Tensor) -> None:
        def take(records: Sequence[TensorState], parts: Iterable[torch.Tensor]) -> None:
            for record, part in zip(records, parts, strict=True):
                observe(record, spec, self.engine, self.inner.view(part.reshape(record.shape)))

        if not self.on_device:
            return take(entry.records, estimate.to(self.where).reshape(-1).split([record.size for record in entry.records]))
        self.run_buckets([self.entries.index(entry)], [estimate], lambda work: take(work.chunks[0].records, work.grads))
        self.copies.drain()

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: float) -> None:
        """Step bucket by bucket."""
        self.parts = []

        def compute(work: BucketStep) -> None:
            placement = work.bucket.placement
            placement.with_stats = self.with_stats
            placement.step(Batch(placement, work.members, work.grads), specs, fusion_keys, scale)
            self.parts += placement.parts

        self.run_buckets(batch.chosen, batch.grads, compute)

    def run_buckets(self, chosen: Sequence[int], grads: Sequence[torch.Tensor], compute: Callable[[BucketStep], None]) -> None:
        """Compute the buckets that these entries are in. Each is copied in as soon as its buffer is free, computed, and copied
        out."""
        given, todo = dict(zip(chosen, grads, strict=True)), list[BucketStep]()
        for bucket in self.buckets:
            if members := [k for k, i in enumerate(bucket.places) if i in given]:
                chunks: list[Any] = [bucket.placement.entries[k] for k in members]
                parts = [chunk.cut(given[bucket.places[k]]) for k, chunk in zip(members, chunks, strict=True)]
                todo.append(BucketStep(bucket, bucket.buffer or self.buffers[len(todo) % SLOTS], members, chunks, parts))
        waiting, busy = list(reversed(todo)), set[StagingBuffer]()
        with self.copies.ordered():
            for work in todo:
                while waiting and waiting[-1].buffer not in busy:
                    busy.add(waiting[-1].buffer)
                    self.copy_in(waiting.pop())
                self.copies.wait_for(work.buffer)
                compute(work)
                self.copies.copy_out(work.buffer, work.back)
                busy.discard(work.buffer)

    def copy_in(self, work: BucketStep) -> None:
        """Copy what a bucket is stepped with to where the arithmetic is: its state, or parameters and gradients."""
        bucket, pairs = work.bucket, list[tuple[torch.Tensor, torch.Tensor]]()
        if self.on_device:
            pairs = [pair for k in work.members for pair in bucket.state[k]]
            work.back = [(kept, staged) for staged, kept in pairs]
            for chunk in work.chunks:
                chunk.param = chunk.param_part if chunk.rows else chunk.whole
        else:
            wholes = [chunk.param_part for chunk in work.chunks]
            sources = [*wholes, *work.grads]
            self.copies.enlarge(work.buffer, count_bytes(sources))
            shape = work.buffer.memory.data_ptr(), work.members, [t.dtype for t in sources]
            if shape != bucket.shape:
                bucket.staged, bucket.shape = work.buffer.views(sources), shape
            pairs = list(zip(bucket.staged, sources, strict=True))
            work.back = list(zip(wholes, bucket.staged, strict=False))
            work.grads = bucket.staged[len(wholes) :]
            for chunk, param in zip(work.chunks, bucket.staged, strict=False):
                chunk.param = param
        self.copies.copy_in(work.buffer, pairs)


def list_stored(chunk: Chunk) -> Iterator[torch.Tensor]:
    """All tensors of a chunk's state."""
    for record in chunk.records:
        for kept in record.state.values():
            yield from kept.components.values() if isinstance(kept, Quantized) else (kept,)
    if chunk.rounding is not None and chunk.rounding.low is not None:
        yield chunk.rounding.low


def cut_record(whole: TensorState, rows: slice) -> TensorState:
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
def finish_copies(placements: Iterable[Placement]) -> Iterator[None]:
    """A step of these placements, some offloaded: nothing is under way to the host after it, and Ctrl-C is answered after
    it, so that it is taken whole."""
    before: Any = signal.getsignal(signal.SIGINT)
    answers = threading.current_thread() is threading.main_thread() and callable(before)
    caught: list[Any] = []
    if answers:
        signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        try:
            yield
        finally:
            for placement in placements:
                if isinstance(placement, Hosted):
                    placement.copies.drain()
    finally:
        if answers:
            signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[-1])
