"""A lane: the parameters that one engine steps together, and how their memory reaches it.

`CpuBucket` hands the cpu engine the addresses of torch's own memory; what it cannot use as it is (bfloat16, float16, other
strides) goes through a scratch copy and is rounded once on the way back. `TritonBucket` does the same for the triton engine,
which reads every floating type itself. `TorchBucket` hands tensors to the torch engine.
"""

from __future__ import annotations

import abc
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import splits
from ..engine import Engine
from ..rounding import Half
from ..spec import Spec
from ..splits import WHOLE, Split
from ..stepping import Part, TensorState, bundle_up, observe, run_part
from . import halves
from .headers import described

ARITHMETIC = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


class ParamEntry:
    """One parameter in a lane: its records (several where it is split into matrices) and its state as torch keeps it."""

    __slots__ = (
        "columns", "counters", "decided", "dtype", "fresh", "half", "held", "memory", "param", "records", "shape", "split",
        "state", "turned",
    )  # fmt: skip

    def __init__(self, param: torch.Tensor, state: dict[str, Any], name: str, group: int, split: Split, counters: Iterable[str]):
        self.param, self.shape, self.dtype, self.state, self.split = param, param.shape, param.dtype, state, split
        self.columns = splits.columnwise(tuple(param.shape), split)
        self.fresh = True  # no gradient has come for it yet
        self.turned = False  # it is maximized in a lane that minimizes: its gradients come with the other sign
        self.half: Half | None = None  # how it is rounded, if it is of 16 bits and not rounded to nearest
        self.counters = {counter: state[counter] for counter in counters}
        self.decided: Set[str] = frozenset()  # those that the host moves, wherever the others are
        self.hold()
        shapes = splits.shapes_of(tuple(param.shape), split)
        self.records = [TensorState(each, shape, group) for each, shape in zip(splits.names_in(name, split), shapes, strict=True)]

    def hold(self) -> None:
        """Remember the state as it is: the objects, and where their memory is, which the lane's tables say too."""
        self.held = tuple(self.state.values())
        self.memory = list(map(described, self.held))

    def holds(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
        """Whether what it holds is still the optimizer's state, in the same memory."""
        now = states.get(self.param) or {}
        same = len(now) == len(self.held) and all(map(operator.is_, now.values(), self.held))
        return same and list(map(described, self.held)) == self.memory

    def places(self) -> torch.Tensor:
        """The index in the whole parameter of each element that is here."""
        return halves.places(self.param)


#: types of tensors as NumPy has them
KINDS = {torch.float64: "<f8", torch.float32: "<f4", torch.bfloat16: "<u2", torch.int8: "|i1", torch.uint8: "|u1"}
KINDS |= {torch.float16: "<f2", torch.int16: "<i2"}


class Memory:
    """A contiguous tensor's memory as NumPy finds it. `Tensor.numpy` would keep the storage from ever being resized again."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor  # kept alive
        kind = KINDS[tensor.dtype]
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": kind,
            "version": 3,
        }


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as a NumPy array; good as long as nobody replaces it (`ParamEntry.holds` looks)."""
    return np.asarray(Memory(tensor)) if tensor.numel() else np.empty(tuple(tensor.shape), KINDS[tensor.dtype])


def packed(tensor: torch.Tensor, seat: Any) -> torch.Tensor:
    """A tensor with its pieces one behind the other: as it is, unless columns are split."""
    if not seat.columns:
        return tensor
    return torch.cat([part.reshape(-1) for part in tensor.split(list(seat.split), 1)])


def unpacked(tensor: torch.Tensor, seat: Any) -> torch.Tensor:
    """The other way round."""
    if not seat.columns:
        return tensor
    parts = tensor.reshape(-1).split([record.size for record in seat.records])
    return torch.cat([part.view(record.shape) for part, record in zip(parts, seat.records, strict=True)], 1)


def written(params: Iterable[torch.Tensor]) -> None:
    """Tell autograd what was written by address."""
    params = list(params)
    try:
        torch.autograd.graph.increment_version(params)
    except RuntimeError:  # inference tensors have no version
        torch.autograd.graph.increment_version([p for p in params if not p.is_inference()])


class PointerTable:
    """Where the arrays of a step are and how they are stored, in the form the compiled engines read."""

    def __init__(self, n: int):
        self.n, self.version = n, 0
        self.params, self.grads = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.param_types: tuple[torch.dtype, ...] = ()
        self.grad_types: tuple[torch.dtype, ...] = ()
        self.halves: list[str] = []  # of each: the type of 16 bits that parameter and gradient are, where the cpu engine takes it
        self.flag: torch.Tensor | None = None  # on the device: not 0 where nothing must be written
        self.pool: Any = None  # where an engine's graphs of these arrays have their memory
        self.tracks: list[Any] = []  # streams that some of them run on, each with its own
        self.recorded = True  # whether it may keep such


class Bucket(abc.ABC):
    """Seats that share an engine."""

    spread = ""  # in words: how parameters that are spread over ranks are stepped
    rounds = False  # whether its engine takes parameters of 16 bits as they are, and rounds them as they want it
    separates = False  # whether it steps such apart from others
    recorded = True  # whether its engine may keep graphs of its steps, with memory of their own
    hosted = False  # whether state is on the host and parameters are not (`offload`)
    waits = False  # whether a step of it waits for the device: it comes after those that do not
    words = ""  # what is to be said of where state is

    def __init__(self, engine: Engine, why: str, device: torch.device, dtype: torch.dtype, sign: float):
        self.engine, self.why, self.device, self.dtype = engine, why, device, dtype  # dtype: of arithmetic and state
        self.kept = device  # where state is
        self.sign = sign  # -1 where groups maximize
        self.seats: list[ParamEntry] = []
        self.present: tuple[int, ...] = ()
        self.structures: Any = None
        self.parts: list[Part] = []
        self.numbers: dict[Any, dict[str, Any]] = {}
        self.asked = self.telling = False  # whether the next step is to say what it does, and whether the parts do

    def share_counts(self) -> None:
        """Put the step counts of all seats into one memory, and each of their other counters, so that counting is one addition
        and one comparison tells whether others have changed a count."""
        with _disable_current_modes():  # a count is a number, under FakeTensorMode too
            counts = torch.tensor([float(seat.state["step"]) for seat in self.seats], dtype=torch.float64, device="cpu")
            for seat, count in zip(self.seats, counts, strict=True):
                seat.state["step"] = count
                seat.hold()
            self.counts, self.steps = counts, counts.numpy()
            self.share_counters(dict.fromkeys(name for seat in self.seats for name in seat.counters))
        self.empty = {i for i, seat in enumerate(self.seats) if not seat.records[0].size}
        self.known = self.steps.tobytes()

    def share_counters(self, names: Iterable[str]) -> None:
        """Those that the host keeps, each in one memory."""
        self.others: list[tuple[str, list[ParamEntry], np.ndarray]] = []
        for name in names:
            who = [seat for seat in self.seats if name in seat.counters]
            shared = torch.tensor([float(seat.state[name]) for seat in who], dtype=torch.float64, device="cpu")
            for seat, value in zip(who, shared, strict=True):
                seat.state[name] = seat.counters[name] = value
                seat.hold()
            self.others.append((name, who, shared.numpy()))
        self.known_others = [shared.tobytes() for _, _, shared in self.others]

    def counts_stand(self) -> bool:
        """Whether nobody else has written a count. By value: through `.data` and `.numpy()` no version moves."""
        return self.steps.tobytes() == self.known and [shared.tobytes() for *_, shared in self.others] == self.known_others

    def count(self, chosen: Sequence[int]) -> None:
        """Write down that these seats have stepped."""
        if len(chosen) == len(self.seats):
            self.steps += 1
        else:
            self.steps[chosen] += 1
        if self.empty:
            for i in self.empty.intersection(chosen):
                self.seats[i].records[0].t += 1  # nothing to compute, but the step counts
        self.known = self.steps.tobytes()
        if self.others and (self.spread or any(part.counted for part in self.parts)):
            self.write_counters()

    def write_counters(self) -> None:
        for name, who, shared in self.others:
            shared[:] = [seat.records[0].counters[name] for seat in who]
        self.known_others = [shared.tobytes() for *_, shared in self.others]

    def settle_counts(self) -> None:
        """Write down what has been stepped before a step broke off, in the middle of this lane perhaps."""
        for i, seat in enumerate(self.seats):
            self.steps[i] = max((record.t for record in seat.records if record.size), default=self.steps[i])
        self.write_counters()

    def tick(self, seat: ParamEntry) -> Any:
        """Which step a seat has just taken."""
        return max(record.t for record in seat.records)  # those of no size here do not count

    @staticmethod
    def pieces(tensor: torch.Tensor, seat: ParamEntry) -> Sequence[torch.Tensor]:
        """What the records are, of a tensor that is packed."""
        if seat.split == WHOLE:
            return [tensor]
        parts = tensor.reshape(-1).split([record.size for record in seat.records])
        return [part.view(record.shape) for part, record in zip(parts, seat.records, strict=True)]

    def observe(self, seat: ParamEntry, spec: Spec, estimate: torch.Tensor) -> None:
        """Take over an estimate of the curvature of a parameter, which is whole."""
        observe(seat.records[0], spec, self.engine, self.view(estimate))

    def step(self, chosen: list[int], specs: Sequence[Spec], structures: Any, grads: list[torch.Tensor], scale: float) -> None:
        """Step the chosen seats, whose gradients these are."""
        key = tuple(chosen)
        if not self.prepared(key, structures):
            self.present, self.structures, self.telling = key, None, self.asked  # what is interrupted here is begun anew
            records = [record for i in chosen for record in self.seats[i].records]
            self.parts = bundle_up(enumerate(records), specs, self.engine, self.fresh_watch(len(records)), self.asked)
            self.structures = structures
        self.numbers.clear()
        self.run([self.seats[i] for i in chosen], specs, grads, scale)

    def prepared(self, chosen: tuple[int, ...], structures: Any) -> bool:
        """Whether the parts are for such a step."""
        return chosen == self.present and structures == self.structures and self.asked == self.telling

    def fresh_watch(self, n: int) -> Any:
        return None

    @abc.abstractmethod
    def run(self, seats: list[ParamEntry], specs: Sequence[Spec], grads: list[torch.Tensor], scale: float) -> None:
        """Run the parts on these seats' memory."""

    def admit(self, seat: ParamEntry, spec: Spec) -> None:
        """Take a seat in."""
        self.seats.append(seat)

    @staticmethod
    @abc.abstractmethod
    def view(buffer: torch.Tensor) -> Any:
        """A state tensor as the engine wants it."""


class TorchBucket(Bucket):
    def run(self, seats: list[ParamEntry], specs: Sequence[Spec], grads: list[torch.Tensor], scale: float) -> None:
        params: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        back = []
        for seat, grad in zip(seats, grads, strict=True):
            whole = seat.param.detach()
            if seat.half is not None:
                whole = packed(halves.opened(seat, self.dtype), seat)
                back.append((seat, whole))
            elif seat.split != WHOLE and (seat.columns or not whole.is_contiguous()):
                whole = packed(whole, seat).contiguous()
                back.append((seat, whole))
            params += self.pieces(whole, seat)
            pieces += self.pieces(packed(grad, seat), seat)
        for part in self.parts:
            index = part.bundle.index
            run_part(part, self.engine, specs, self.numbers, [params[i] for i in index], [pieces[i] for i in index], scale)
        for seat, whole in back:
            halves.closed(seat, unpacked(whole, seat), self.tick(seat))

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return buffer


class PointerBucket(Bucket):
    """Lanes whose engine reads and writes torch's memory by address."""

    scratched = False  # whether something had to be copied
    _told: tuple[list[Part], list[bool]] = [], []  # for these parts: whether addresses are all that the engine needs

    def fresh_watch(self, n: int) -> PointerTable:
        self.watch = PointerTable(n)
        self.watch.recorded = self.recorded
        return self.watch

    @property
    def stepped_whole(self) -> bool:
        """Whether its last step was of all its seats, on their memory as it is."""
        return not self.spread and len(self.present) == len(self.seats) == self.watch.n and not self.scratched

    def theirs(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether these are the gradients of all its parameters, not copies of some."""
        return all(seat.param.grad is grad for seat, grad in zip(self.seats, grads, strict=True))

    @abc.abstractmethod
    def as_is(self, tensor: torch.Tensor) -> bool:
        """Whether the engine can use this memory as it is."""

    @abc.abstractmethod
    def direct(self, seats: list[ParamEntry], grads: list[torch.Tensor]) -> set[int]:
        """Of which of these seats parameter and gradient can be used as they are, though they are of 16 bits."""

    def by_address(self, part: Part) -> bool:
        """Whether addresses are all that the engine needs for this part."""
        return not part.bundle.spec.matrix

    def told(self) -> list[bool]:
        """Of which parts this is so."""
        if self._told[0] is not self.parts:
            self._told = self.parts, list(map(self.by_address, self.parts))
        return self._told[1]

    @property
    def all_by_address(self) -> bool:
        return all(self.told())

    @abc.abstractmethod
    def arrays(self, seats: list[ParamEntry], tensors: list[torch.Tensor]) -> list[Any]:
        """The pieces of these tensors as matrix rules want them."""

    def run(self, seats: list[ParamEntry], specs: Sequence[Spec], grads: list[torch.Tensor], scale: Any) -> None:
        params, back = [], []
        self.scratched, direct = False, self.direct(seats, grads)
        for i, seat in enumerate(seats):
            param: torch.Tensor = seat.param
            if i in direct:
                params.append(param)
                continue
            if seat.columns or not self.as_is(param) or seat.half is not None:
                scratch = packed(halves.opened(seat, self.dtype), seat)
                back.append((seat, scratch))
                param, self.scratched = scratch, True
            params.append(param)
            if seat.columns or not self.as_is(grads[i]):
                grads[i] = packed(grads[i], seat).to(self.dtype).contiguous()
                self.scratched = True
        self.tell(seats, params, grads)
        self.launch(seats, params, grads, specs, scale)
        for seat, scratch in back:
            halves.closed(seat, unpacked(scratch, seat), self.tick(seat))  # torch counts this version itself

    def launch(
        self, seats: list[ParamEntry], params: list[torch.Tensor], grads: list[torch.Tensor], specs: Sequence[Spec], scale: Any
    ) -> None:
        """Run the parts on memory that has been told."""
        told = self.told()
        sides = [] if all(told) else [self.arrays(seats, side) for side in (params, grads)]
        for part, known in zip(self.parts, told, strict=True):
            ps, gs = ([], []) if known else ([side[i] for i in part.bundle.index] for side in sides)
            run_part(part, self.engine, specs, self.numbers, ps, gs, scale)
        written(params)

    def tell(self, seats: list[ParamEntry], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Write down where this step's arrays are."""
        if len(seats) == self.watch.n:
            places: Any = [p.data_ptr() for p in params], [g.data_ptr() for g in grads]
            kinds: Any = [p.dtype for p in params], [g.dtype for g in grads]
        else:
            places, kinds = ([], []), ([], [])
            for seat, p, g in zip(seats, params, grads, strict=True):
                for side, types, tensor in zip(places, kinds, (p, g), strict=True):
                    sizes = [tensor.element_size() * record.size for record in seat.records]
                    side += itertools.accumulate(sizes[:-1], initial=tensor.data_ptr())
                    types += [tensor.dtype] * len(sizes)
        self.watch.params[:], self.watch.grads[:] = places
        self.watch.param_types, self.watch.grad_types = map(tuple, kinds)
        self.watch.version += 1


class CpuBucket(PointerBucket):
    engine: Any
    rounds = separates = True
    _alike: tuple[Any, list[list[int]]] = (), []  # of these parts and seats: places of those that one compiled pass steps

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return array_of(buffer)

    def by_address(self, part: Part) -> bool:
        return bool(self.engine.compiles(part.bundle))

    def as_is(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self.dtype and tensor.is_contiguous() and not tensor.is_neg()

    def direct(self, seats: list[ParamEntry], grads: list[torch.Tensor]) -> set[int]:
        """All of a part, or none of it."""
        found: set[int] = set()
        for places in self.alike(seats):
            if all(self.plain(seats[i].param, grads[i]) for i in places):
                found.update(places)
        taken = [(record.kind, i in found) for i, seat in enumerate(seats) for record in seat.records] if found else []
        self.watch.halves = [kind if direct else "" for kind, direct in taken]
        return found

    @staticmethod
    def plain(param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether both are of one type, and can be used as they are."""
        return grad.dtype is param.dtype and all(t.is_contiguous() and not t.is_neg() for t in (param, grad))

    def alike(self, seats: list[ParamEntry]) -> list[list[int]]:
        """Places of seats of 16 bits, part by part, where passes are compiled and each part has all of its parameters."""
        if self._alike[0] is not self.parts:
            where = {record: i for i, seat in enumerate(seats) for record in seat.records}
            found = []
            for part, known in zip(self.parts, self.told(), strict=True):
                places = sorted({where[record] for record in part.records})
                mine = {record for record in part.records if record.kind}
                own = known and all(record in mine for i in places for record in seats[i].records if record.size)
                rounded = all(seats[i].half is None or record.half is not None for i in places for record in seats[i].records)
                if mine and own and rounded and not any(seats[i].columns for i in places):
                    found.append(places)
            self._alike = self.parts, found
        return self._alike[1]

    def arrays(self, seats: list[ParamEntry], tensors: list[torch.Tensor]) -> list[Any]:
        return [array_of(p) for seat, tensor in zip(seats, tensors, strict=True) for p in self.pieces(tensor.detach(), seat)]


class TritonBucket(PointerBucket):
    engine: Any
    rounds = True
    _swept: tuple[list[Part], set[TensorState]] = [], set()  # of these parts: what the engine steps by address, matrices too

    def launch(self, *given: Any) -> None:
        super().launch(*given)
        for track in self.watch.tracks:
            track.joined()

    def by_address(self, part: Part) -> bool:
        return not part.bundle.spec.matrix and self.engine.sweeps(part.bundle)

    @staticmethod
    def view(buffer: torch.Tensor) -> Any:
        return buffer

    def as_is(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and not tensor.is_neg()

    def direct(self, seats: list[ParamEntry], grads: list[torch.Tensor]) -> set[int]:
        """Which gradients those of others can be is no matter."""
        if self._swept[0] is not self.parts:
            swept = [part for part in self.parts if self.engine.sweeps(part.bundle)]
            self._swept = self.parts, {record for part in swept for record in part.records}
        return {
            i
            for i, (seat, grad) in enumerate(zip(seats, grads, strict=True))
            if seat.half is not None
            and all(record.half is not None and record in self._swept[1] for record in seat.records if record.size)
            and self.as_is(seat.param)
            and self.as_is(grad)
        }

    def arrays(self, seats: list[ParamEntry], tensors: list[torch.Tensor]) -> list[Any]:
        return [p for seat, tensor in zip(seats, tensors, strict=True) for p in self.pieces(tensor.detach(), seat)]


#: by the name of the engine; all others take tensors
BUCKETS: dict[str, type[Bucket]] = {"cpu": CpuBucket, "triton": TritonBucket}
