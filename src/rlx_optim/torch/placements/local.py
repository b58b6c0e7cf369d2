"""Parameters that one engine steps together, in this process's memory, and how that memory reaches the engine.

`LocalCpu` hands the cpu engine the addresses of torch's own memory; what it cannot use as it is (bfloat16, float16, other
strides) goes through a scratch copy and is rounded once on the way back. `LocalTriton` does the same for the triton engine,
which reads every floating type itself. `LocalTensors` hands tensors to the torch engine. All of them step this rank's part of a
parameter that is spread over ranks.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ... import splits
from ...engine import Engine
from ...pointers import PointerTable
from ...recent import Recent
from ...rounding import ParamRounding
from ...spec import Spec
from ...splits import WHOLE, Split
from ...stepping import Grouping, Part, StepPart, TensorState, find_scalars, observe, run_part
from .. import bf16
from ..memory import (
    DEVICE,
    DTYPE,
    GRAD,
    ITEMSIZE,
    LAYOUT,
    POINTER,
    SHAPE,
    Addresses,
    Forms,
    Whereabouts,
    are_finite,
    are_finite_at,
    as_plain,
    is_dtensor,
    is_fake,
    local_part,
    locate_in_storage,
    reach_beyond,
)  # fmt: skip

if TYPE_CHECKING:
    from ..state import Slots

ARITHMETIC = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


class ParamEntry:
    """One parameter in a placement: its records (several where it is split into matrices) and its state as torch keeps it."""

    __slots__ = (
        "buffers", "columns", "counters", "counts", "decided", "dtype", "is_new", "negated", "param", "pointers", "records",
        "rounding", "shape", "split", "state", "values", "whereabouts",
    )  # fmt: skip

    def __init__(self, param: torch.Tensor, state: dict[str, Any], name: str, group: int, split: Split, counters: Iterable[str]):
        self.param, self.shape, self.dtype, self.state, self.split = param, param.shape, param.dtype, state, split
        self.columns = splits.columnwise(tuple(param.shape), split)
        self.is_new = True  # no gradient has come for it yet
        self.negated = False  # it is maximized in a placement that minimizes: its gradients come with the other sign
        self.rounding: ParamRounding | None = None  # how it is rounded, if it is of 16 bits and not rounded to nearest
        self.counters = {counter: state[counter] for counter in counters}
        self.decided: Set[str] = frozenset()  # those that the host moves, wherever the others are
        self.remember_state()
        shapes = splits.shapes_of(tuple(param.shape), split)
        self.records = [TensorState(each, shape, group) for each, shape in zip(splits.names_in(name, split), shapes, strict=True)]

    def remember_state(self) -> None:
        """Remember which objects its state consists of, and where their memory is: engines' tables say so too."""
        self.values = tuple(self.state.values())
        numbers = {id(self.state[name]) for name in ("step", *self.counters)}
        tensors = [value for value in self.values if isinstance(value, torch.Tensor) and not is_fake(value)]
        tensors = [value for value in tensors if value.layout is torch.strided]  # a user may keep others beside ours
        self.counts = [value for value in tensors if id(value) in numbers]
        self.buffers = [value for value in tensors if id(value) not in numbers]
        self.pointers = list(map(POINTER, self.counts))
        self.whereabouts = Whereabouts(list(map(local_part, self.buffers)))


class Selection:
    """Some entries of a placement: their records among all of it, and whether the engine takes their memory as it is."""

    def __init__(self, placement: Placement, chosen: Sequence[int]):
        self.device, self.entries = placement.device, [placement.entries[i] for i in chosen]
        entries: list[Any] = self.entries
        self.exact = all(e.dtype is placement.dtype and e.rounding is None and not e.columns for e in entries)
        self.rows = tuple(row for i in chosen for row in range(placement.first[i], placement.first[i + 1]))
        every = len(self.rows) == len(placement.records)
        self.index: Any = slice(None) if every else np.array(self.rows, np.intp)  # of a table of all
        self.single = len(self.rows) == len(entries)
        self.of = np.repeat(np.arange(len(entries)), [len(entry.records) for entry in entries])  # which entry's each record is
        sizes = [[record.size for record in entry.records[:-1]] for entry in entries]
        self.offsets = np.array([at for each in sizes for at in itertools.accumulate(each, initial=0)], np.int64)  # within it

    @functools.cached_property
    def expected(self) -> Expected:
        """What parameters, gradients and state are to be."""
        return Expected(self.entries, self.device)

    def per_record(self, addresses: np.ndarray, types: list[torch.dtype]) -> tuple[np.ndarray, list[torch.dtype]]:
        """Addresses and types of the records, given those of the entries."""
        if self.single:
            return addresses, types
        itemsizes = np.array([each.itemsize for each in types], np.int64)
        return addresses[self.of] + self.offsets * itemsizes[self.of], [types[i] for i in self.of.tolist()]


class Expected:
    """What the state of some entries was made for, to be compared with the tensors as they are, column by column."""

    def __init__(self, entries: Sequence[ParamEntry], device: torch.device):
        self.params: list[torch.Tensor] = [entry.param for entry in entries]
        self.states = [entry.state for entry in entries]
        self.values = [value for entry in entries for value in entry.values]
        self.counts = [value for entry in entries for value in entry.counts]
        self.buffers = [value for entry in entries for value in entry.buffers]
        self.pointers = [place for entry in entries for place in entry.pointers]
        self.spread = any(map(is_dtensor, self.params))
        self.whereabouts = Whereabouts.join([entry.whereabouts for entry in entries])
        self.plain = not self.spread and not any(map(is_fake, self.params))
        self.types, self.shapes = list(map(type, self.params)), [entry.shape for entry in entries]
        self.dtypes = [entry.dtype for entry in entries]
        self.devices = [device] * len(entries)
        self.sizes = np.array([math.prod(shape) for shape in self.shapes], np.int64)
        self.itemsizes = np.array([dtype.itemsize for dtype in self.dtypes], np.int64)
        self.usual: Forms | None = None  # how parameters and gradients are read where all of them can be read in place
        self.extents: Any = None  # where such begin in their storages, and the bytes of these, where all are within them
        self.newcomers = [i for i, entry in enumerate(entries) if entry.is_new]
        self.negated = [i for i, entry in enumerate(entries) if entry.negated]

    def is_stale(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
        """Whether what the entries hold is no longer the optimizer's state, in the same memory."""
        if not all(map(operator.is_, map(states.get, self.params), self.states)):
            return True
        current = list(itertools.chain.from_iterable(map(dict.values, self.states)))
        if len(current) != len(self.values) or not all(map(operator.is_, current, self.values)):
            return True
        buffers = list(map(local_part, self.buffers)) if self.spread else self.buffers
        return list(map(POINTER, self.counts)) != self.pointers or not self.whereabouts.hold(buffers)

    def locate(self, grads: list[Any]) -> Addresses | None:
        """Where parameters and gradients are; None unless all of them are plain tensors as the state was made for. Those that are
        odd are still to be looked at one by one."""
        params = self.params
        if self.usual is not None and self.usual.are([*params, *grads]):
            found = Addresses(params, grads, (self.dtypes, self.dtypes), set())
            itemsizes = self.itemsizes
            extents = locate_in_storage([*params, *grads])
            if extents == self.extents:
                return found
        elif self.is_fit(grads):
            found = Addresses(params, grads)
            even = found.grad_types == self.dtypes
            itemsizes = self.itemsizes if even else np.array(list(map(ITEMSIZE, grads)), np.int64)
            extents = locate_in_storage([*params, *grads])
            if even and not found.odd:
                self.usual = Forms([*params, *grads])
        else:
            return None
        beyond = reach_beyond(extents, np.tile(self.sizes, 2), np.concatenate([self.itemsizes, itemsizes]))
        if beyond.any():
            found.odd.update((np.flatnonzero(beyond) % len(params)).tolist())
        elif self.usual is not None:
            self.extents = extents
        return found

    def is_fit(self, grads: list[Any]) -> bool:
        """Whether parameters and gradients are plain tensors of the shapes and on the device that the state is for."""
        params = self.params
        return (
            self.plain
            and set(map(type, grads)) <= PLAIN
            and list(map(type, params)) == self.types
            and list(map(SHAPE, params)) == self.shapes == list(map(SHAPE, grads))
            and list(map(DEVICE, params)) == self.devices == list(map(DEVICE, grads))
            and list(map(DTYPE, params)) == self.dtypes
            and set(map(LAYOUT, grads)) == STRIDED
        )


PLAIN, STRIDED = {torch.Tensor, torch.nn.Parameter}, {torch.strided}


class Batch(NamedTuple):
    """What a step asks of one placement: some of its entries, their gradients, and where both are if the step knows it."""

    placement: Placement
    chosen: Sequence[int]
    grads: list[torch.Tensor]
    addresses: Addresses | None = None

    def is_finite(self) -> bool:
        """Whether all gradients are finite. Where their addresses are known, tensors are not asked again."""
        found = self.addresses
        if found is None or found.odd or self.placement.device.type != "cpu":
            return are_finite(self.grads)
        sizes = self.placement.select(self.chosen).expected.sizes
        return are_finite_at(found.grads, sizes, found.grad_types)


#: types of tensors as NumPy has them
KINDS = {torch.float64: "<f8", torch.float32: "<f4", torch.bfloat16: "<u2", torch.int8: "|i1", torch.uint8: "|u1"}
KINDS |= {torch.float16: "<f2", torch.int16: "<i2"}


class Memory:
    """A contiguous tensor's memory as NumPy finds it. `Tensor.numpy` would keep the storage from ever being resized again."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor  # kept alive
        data, shape, kind = (tensor.data_ptr(), False), tuple(tensor.shape), KINDS[tensor.dtype]
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": kind, "version": 3}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as a NumPy array; good as long as nobody replaces it (`Selection.is_stale` looks)."""
    return np.asarray(Memory(tensor)) if tensor.numel() else np.empty(tuple(tensor.shape), KINDS[tensor.dtype])


def pack_pieces(tensor: torch.Tensor, entry: Any) -> torch.Tensor:
    """A tensor with its pieces one behind the other: as it is, unless columns are split."""
    if not entry.columns:
        return tensor
    return torch.cat([part.reshape(-1) for part in tensor.split(list(entry.split), 1)])


def unpack_pieces(tensor: torch.Tensor, entry: Any) -> torch.Tensor:
    """The other way round."""
    if not entry.columns:
        return tensor
    parts = tensor.reshape(-1).split([record.size for record in entry.records])
    return torch.cat([part.view(record.shape) for part, record in zip(parts, entry.records, strict=True)], 1)


def mark_written(params: Iterable[torch.Tensor]) -> None:
    """Tell autograd what was written by address."""
    params = list(params)
    try:
        torch.autograd.graph.increment_version(params)
    except RuntimeError:  # inference tensors have no version
        torch.autograd.graph.increment_version([p for p in params if not p.is_inference()])


class Placement:
    """Parameters that one engine steps together, wherever they are."""

    spread = ""  # in words: how parameters that are spread over ranks are stepped
    together = False  # whether ranks wait for each other in a step of it
    reading: set[int] | None = None  # of `together`: the entries whose rule reads p in this step, if ranks have agreed on it
    rounds = False  # whether its engine takes parameters of 16 bits as they are, and rounds them as they want it
    separates = False  # whether it steps such apart from others
    recorded = True  # whether its engine may keep graphs of its steps, with memory of their own
    hosted = False  # whether state is on the host and parameters are not (`offload`)
    commits = False  # whether gradients are directions, to be committed (`placements.owner`)
    waits = False  # whether a step of it waits for the device: it comes after those that do not
    words = ""  # what is to be said of where state is

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        self.engine, self.why, self.device, self.dtype = engine, why, device, dtype  # dtype: of arithmetic and state
        self.state_device = device  # where state is
        self.sign = sign  # -1 where groups maximize
        self.entries: list[ParamEntry] = []
        self.parts: list[StepPart] = []  # of the step that is taken
        self.numbers: dict[Any, dict[str, Any]] = {}
        self.with_stats = False  # whether the next step is to say what it does
        self.copied = 0  # how many parameters or gradients the step that is taken cannot use where they are

    def share_counts(self) -> None:
        """Put the step counts of all entries into one memory, and each of their other counters, so that counting is one addition
        and one comparison tells whether others have changed a count."""
        self.steps = self.share("step", self.entries)
        self.known = self.steps.tobytes()
        self.share_counters(dict.fromkeys(name for entry in self.entries for name in entry.counters))
        self.arrange()

    @staticmethod
    def share(name: str, entries: Sequence[ParamEntry]) -> np.ndarray:
        """Put a count of these entries, which the host keeps, into one memory; where they are in one they stay there, since other
        processes may share it."""
        with _disable_current_modes():  # a count is a number, under FakeTensorMode too
            found = [entry.state[name] for entry in entries]
            storages, places = {number.untyped_storage().data_ptr() for number in found}, list(map(POINTER, found))
            if len(storages) == 1 and places == [places[0] + 8 * i for i in range(len(places))]:
                shared = found[0].as_strided((len(found),), (1,))
            else:
                shared = torch.tensor(list(map(float, found)), dtype=torch.float64, device="cpu")
                found = list(shared)
            for entry, value in zip(entries, found, strict=True):
                entry.state[name] = value
                entry.counters |= {name: value} if name in entry.counters else {}
                entry.remember_state()
            return shared.numpy()

    def arrange(self) -> None:
        """List the records of the entries, once these are complete."""
        self.empty = {i for i, entry in enumerate(self.entries) if not entry.records[0].size}
        counts = (len(entry.records) for entry in self.entries)
        self.first = list(itertools.accumulate(counts, initial=0))  # of each entry's records
        self.records = [record for entry in self.entries for record in entry.records]
        self.params: list[torch.Tensor] = [entry.param for entry in self.entries]
        self.every = tuple(range(len(self.entries)))
        self.selections = Recent(Grouping.CHOICES * (len(self.entries) + 1))
        self.grouping = self.group()

    def with_gradient(self) -> tuple[tuple[int, ...], list[Any]]:
        """The entries whose parameters have a gradient, and the gradients."""
        grads = list(map(GRAD, self.params))
        if not any(map(operator.is_, grads, itertools.repeat(None))):
            return self.every, grads
        chosen = tuple(i for i, grad in enumerate(grads) if grad is not None)
        return chosen, [grads[i] for i in chosen]

    def group(self) -> Grouping:
        """Who finds what is stepped together."""
        return Grouping(self.engine, self.records, commits=self.commits)

    def select(self, chosen: Sequence[int]) -> Selection:
        """These entries, with what is known of them."""
        found: Selection = self.selections.find(tuple(chosen), lambda: Selection(self, chosen), len(chosen))
        return found

    def share_counters(self, names: Iterable[str]) -> None:
        """Those that the host keeps, each in one memory."""
        having = {name: [entry for entry in self.entries if name in entry.counters] for name in names}
        self.others = [(name, entries, self.share(name, entries)) for name, entries in having.items()]
        self.known_others = [shared.tobytes() for _, _, shared in self.others]

    def has_known_counts(self) -> bool:
        """Whether nobody else has written a count. By value: through `.data` and `.numpy()` no version moves."""
        return self.steps.tobytes() == self.known and [shared.tobytes() for *_, shared in self.others] == self.known_others

    def count(self, chosen: Sequence[int]) -> None:
        """Write down that these entries have stepped."""
        if len(chosen) == len(self.entries):
            self.steps += 1
        else:
            self.steps[list(chosen)] += 1
        if self.empty:
            for i in self.empty.intersection(chosen):
                self.entries[i].records[0].t += 1  # nothing to compute, but the step counts
        self.known = self.steps.tobytes()
        if self.others and (self.spread or any(step.part.counted for step in self.parts)):
            self.write_counters()

    def write_counters(self) -> None:
        for name, who, shared in self.others:
            shared[:] = [entry.records[0].counters[name] for entry in who]
        self.known_others = [shared.tobytes() for *_, shared in self.others]

    def restore_counts(self) -> None:
        """Write down what has been stepped before a step broke off, in the middle of this placement perhaps."""
        for i, entry in enumerate(self.entries):
            self.steps[i] = max((record.t for record in entry.records if record.size), default=self.steps[i])
        self.write_counters()

    def rng_step(self, entry: ParamEntry) -> Any:
        """Which step an entry has just taken."""
        return max(record.t for record in entry.records)  # those of no size here do not count

    @staticmethod
    def pieces(tensor: torch.Tensor, entry: ParamEntry) -> Sequence[torch.Tensor]:
        """What the records are, of a tensor that is packed."""
        if entry.split == WHOLE:
            return [tensor]
        parts = tensor.reshape(-1).split([record.size for record in entry.records])
        return [part.view(record.shape) for part, record in zip(parts, entry.records, strict=True)]

    def observe(self, entry: ParamEntry, spec: Spec, estimate: torch.Tensor) -> None:
        """Take over an estimate of the curvature of a parameter, which is whole."""
        observe(entry.records[0], spec, self.engine, self.view(estimate))

    def step(self, batch: Batch, specs: Sequence[Spec], fusion_keys: tuple[Any, ...], scale: float) -> None:
        """Step the entries of a batch."""
        selection = self.select(batch.chosen)
        self.parts = self.grouping.find(selection.rows, specs, fusion_keys, self.with_stats)
        self.numbers.clear()
        self.run(selection, batch, specs, scale)
        if self.spread:
            if not self.commits:
                self.count_empty(selection, specs)
            mark_written(entry.param for entry in selection.entries)

    def count_empty(self, selection: Selection, specs: Sequence[Spec]) -> None:
        """Move the counters of empty shards on as those of the others."""
        entries = [entry for entry in selection.entries if math.prod(entry.shape)]
        for record in (record for entry in entries for record in entry.records if not record.size):
            current = find_scalars(record, specs[record.group], self.numbers)
            record.counters |= {name: current[name] for name in record.counters if name in current}

    def find_readers(self, specs: Sequence[Spec]) -> set[int]:
        """The entries whose p must travel, since their rule reads it."""
        return set()

    def describe(self, stepped: int) -> str:
        """Say what a step of so many parameters is run by."""
        copies = f", {self.copied} through copies (type, strides or rounding)" if self.copied else ""
        where = f"{self.spread or self.words}, on {self.device}" if self.spread or self.words else f"on {self.device}"
        parts = f"{len(self.parts)} parts of one program or stack each"
        return f"{stepped} of {len(self.entries)} parameters {where} by {self.engine.name} ({self.why}) in {parts}{copies}"

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        """Run the parts on the memory of these entries, if `step` does not do everything by itself."""
        raise NotImplementedError

    def cut_to_part(self, entry: ParamEntry, spec: Spec, slots: Mapping[str, Slots]) -> Mapping[str, Slots]:
        """Make the records of a parameter that is spread those of the part that is here; gives the slots of these, each in the
        format of the whole."""
        shape = tuple(local_part(entry.param).shape)
        for record, each in zip(entry.records, splits.shapes_of(shape, entry.split), strict=True):
            record.shape, record.size = each, math.prod(each)
        local = splits.slots_of(spec, shape, entry.split)
        kinds = {name: each[0].storage for name, each in slots.items()}
        return {name: tuple(dataclasses.replace(slot, storage=kinds[name]) for slot in each) for name, each in local.items()}

    def admit(self, entry: ParamEntry, planned: Any) -> None:
        """Take an entry in, made of what `placements.build` planned."""
        self.entries.append(entry)

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        """A state tensor as the engine wants it."""
        return buffer


class LocalTensors(Placement):
    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: float) -> None:
        params: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        back = []
        for entry, grad in zip(selection.entries, batch.grads, strict=True):
            whole = as_plain(local_part(entry.param))
            if entry.rounding is not None:
                whole = pack_pieces(bf16.copy_in(entry, self.dtype), entry)
                back.append((entry, whole))
            elif entry.split != WHOLE and (entry.columns or not whole.is_contiguous()):
                whole = pack_pieces(whole, entry).contiguous()
                back.append((entry, whole))
            params += self.pieces(whole, entry)
            pieces += self.pieces(pack_pieces(grad, entry), entry)
        at = {row: i for i, row in enumerate(selection.rows)}
        for part, rows, places in self.parts:
            ps, gs = ([side[at[place]] for place in places] for side in (params, pieces))
            run_part(part, self.engine, specs, self.numbers, ps, gs, scale, rows)
        for entry, whole in back:
            bf16.write_back(entry, unpack_pieces(whole, entry), self.rng_step(entry))


class LocalPointers(Placement, abc.ABC):
    """Parameters whose engine reads and writes torch's memory by address."""

    engine: Any
    rounds = True

    def group(self) -> Grouping:
        self.pointers = PointerTable(len(self.records))
        self.pointers.recorded = self.recorded
        return Grouping(self.engine, self.records, self.pointers, self.commits)

    def can_read(self, dtype: torch.dtype) -> bool:
        """Whether the engine reads numbers of this type."""
        return True

    def is_direct(self, tensor: torch.Tensor) -> bool:
        """Whether the engine can use this memory as it is."""
        return self.can_read(tensor.dtype) and tensor.is_contiguous() and not tensor.is_neg()

    @abc.abstractmethod
    def find_direct(self, selection: Selection, entries: list[Any], found: Addresses) -> set[int]:
        """Of which of these entries parameter and gradient can be used as they are, though they are of 16 bits."""

    @abc.abstractmethod
    def is_addressed(self, part: Part) -> bool:
        """Whether addresses are all that the engine needs for this part."""

    def run(self, selection: Selection, batch: Batch, specs: Sequence[Spec], scale: Any) -> None:
        entries, grads = selection.entries, batch.grads
        params: list[torch.Tensor] = [entry.param for entry in entries]
        if self.spread:
            params = list(map(local_part, params))
        found = batch.addresses or Addresses(params, grads)
        back = []
        self.copied = 0
        if found.odd or not selection.exact or not all(map(self.can_read, {*found.param_types, *found.grad_types})):
            params, grads = list(params), list(grads)
            direct = self.find_direct(selection, entries, found)
            for i, entry in enumerate(entries):
                if i in direct:
                    continue
                copies_param = entry.columns or not self.is_direct(params[i]) or entry.rounding is not None
                copies_grad = entry.columns or not self.is_direct(grads[i])
                self.copied += copies_param or copies_grad
                if copies_param:
                    scratch = params[i] = pack_pieces(bf16.copy_in(entry, self.dtype), entry)
                    back.append((entry, scratch))
                if copies_grad:
                    grads[i] = pack_pieces(grads[i], entry).to(self.dtype).contiguous()
            found = Addresses(params, grads, odd=set())
        sides = (found.params, found.param_types), (found.grads, found.grad_types)
        (params_at, param_types), (grads_at, grad_types) = (selection.per_record(*side) for side in sides)
        self.pointers.set(selection.index, params_at, grads_at, param_types, grad_types)
        self.launch(selection, entries, params, grads, specs, scale)
        for entry, scratch in back:
            bf16.write_back(entry, unpack_pieces(scratch, entry), self.rng_step(entry))  # torch counts this version itself

    def launch(
        self, selection: Selection, entries: list[ParamEntry], params: list[torch.Tensor], grads: list[torch.Tensor],
        specs: Sequence[Spec], scale: Any,
    ) -> None:  # fmt: skip
        """Run the parts on memory whose addresses are known."""
        sides: Any = None
        for part, rows, places in self.parts:
            ps: list[Any] = []
            gs: list[Any] = []
            if not self.is_addressed(part):
                sides = sides or [self.arrays(selection, entries, side) for side in (params, grads)]
                ps, gs = ([side[place] for place in places] for side in sides)
            run_part(part, self.engine, specs, self.numbers, ps, gs, scale, rows)
        mark_written(params)

    def arrays(self, selection: Selection, entries: list[ParamEntry], tensors: list[torch.Tensor]) -> dict[int, Any]:
        """The pieces of these tensors as matrix rules want them, by the place of the record."""
        pieces = [self.pieces(tensor.detach(), entry) for entry, tensor in zip(entries, tensors, strict=True)]
        return dict(zip(selection.rows, map(self.view, itertools.chain.from_iterable(pieces)), strict=True))


class LocalCpu(LocalPointers):
    separates = True

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return array_of(buffer)

    def is_addressed(self, part: Part) -> bool:
        return bool(self.engine.compiles(part.bundle))

    def can_read(self, dtype: torch.dtype) -> bool:
        return dtype is self.dtype

    def find_direct(self, selection: Selection, entries: list[Any], found: Addresses) -> set[int]:
        """All of a part, or none of it."""
        at, taken = dict(zip(selection.rows, selection.of.tolist(), strict=True)), set[int]()
        given = list(self.pointers.half_dtypes)
        for step in self.parts:
            kind, counts = step.records[0].kind, collections.Counter(at[row] for row in step.places)
            direct = bool(kind) and self.is_addressed(step.part) and not counts.keys() & found.odd
            # those that sit this step out are in the same tables
            direct = direct and len({(record.kind, record.rounding is None) for record in step.part.records}) == 1
            direct = direct and all(
                found.param_types[i] is found.grad_types[i]
                and not entries[i].columns
                and n == sum(bool(record.size) for record in entries[i].records)
                and (entries[i].rounding is None or all(record.rounding is not None for record in entries[i].records))
                for i, n in counts.items()
            )
            for row in step.places:
                given[row] = kind if direct else ""
            taken |= counts.keys() if direct else set()
        self.pointers.half_dtypes = given
        return taken


class LocalTriton(LocalPointers):
    def launch(self, *given: Any) -> None:
        super().launch(*given)
        for track in self.pointers.tracks:
            track.joined()

    def is_addressed(self, part: Part) -> bool:
        return part.bundle.program is not None and bool(self.engine.sweeps(part.bundle))

    def find_direct(self, selection: Selection, entries: list[Any], found: Addresses) -> set[int]:
        """Which gradients those of others can be is no matter."""
        swept = {record for step in self.parts if self.engine.sweeps(step.part.bundle) for record in step.records}
        return {
            i
            for i, entry in enumerate(entries)
            if entry.rounding is not None
            and i not in found.odd
            and all(record.rounding is not None and record in swept for record in entry.records if record.size)
        }


#: by the name of the engine; all others take tensors
LOCAL: dict[str, type[Placement]] = {"cpu": LocalCpu, "triton": LocalTriton}
