"""What the kernels read: which tensor a block belongs to, where arrays are, which numbers a tensor has.

Tables are made once per bundle and rule. Parameters and gradients may move from step to step: their rows are then sent anew.
Nothing here waits for the device.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import storage
from .. import padding
from . import replay
from .kernels import BLOCK, DEEP, HALF, HIGH, PLAIN, POSITIVE, SIGNED, STRIPS, TURNS, WIDE

#: how parameters are rounded, as kernels know it
ROUNDING = {"nearest": 0, "stochastic": 1, "exact": 2}
#: how arrays are kept, likewise
CODES = {storage.EXACT: PLAIN, storage.SIGNED: SIGNED, storage.POSITIVE: POSITIVE, storage.HALF: HALF}
ARENA = 1 << 22  # bytes of page-locked memory for tables that captured graphs read at every replay


class Sender:
    """Copies small tables to the device without waiting, also while a CUDA graph is captured."""

    def __init__(self, device: torch.device):
        self.device, self.arena, self.used = device, None, 0

    def prepare(self) -> None:
        """Page-locked memory cannot be had during a capture: have it before."""
        if self.arena is None and self.device.type == "cuda":
            self.arena = torch.empty(ARENA, dtype=torch.uint8, device="cpu", pin_memory=True)

    def capturing(self) -> bool:
        """Whether a graph is being captured, other than our own (`replay.Passes`), which reads the standing tables."""
        return self.device.type == "cuda" and not replay.recording() and torch.cuda.is_current_stream_capturing()

    @torch.inference_mode(False)  # a table that is made in inference mode could be written to in no other
    def send(self, host: np.ndarray, to: torch.Tensor | None = None) -> torch.Tensor:
        """A table on the device; the given one, with new entries."""
        table = torch.from_numpy(host)
        if self.device.type != "cuda":
            return table.clone() if to is None else to.copy_(table)
        if not self.capturing():
            pinned = table.pin_memory()
            return pinned.to(self.device, non_blocking=True) if to is None else to.copy_(pinned, non_blocking=True)
        size = -(-host.nbytes // 16) * 16
        if self.arena is None or self.used + size > ARENA:
            raise RuntimeError(
                "a CUDA graph is being captured and the memory for its tables is "
                + ("not there yet: take one step with capturable=True before" if self.arena is None else "used up")
            )
        room = self.arena[self.used : self.used + host.nbytes].view(table.dtype).view(table.shape)
        self.used += size
        room.copy_(table)
        return room.to(self.device, non_blocking=True)


class Dealt:
    """Programs dealt out to tensors, so many to each: which tensor each has, and which of its parts."""

    def __init__(self, counts: Sequence[int], device: torch.device):
        first = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int64, device="cpu")
        every = torch.arange(len(counts), device="cpu")
        repeated = torch.repeat_interleave(every, torch.tensor(counts, dtype=torch.int64, device="cpu"))
        self.n, self.first = sum(counts), first.to(device)
        self.tensor = repeated.to(torch.int32).to(device)
        self.index = (torch.arange(self.n, device="cpu") - first[repeated]).to(torch.int32).to(device)


class Blocks(Dealt):
    """Flat blocks of some tensors."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        super().__init__([-(-n // BLOCK) for n in sizes], device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)


class Rows(Dealt):
    """Blocks of neighbours that share a scale (`storage`), STRIPS of them TURNS times to a program; the last of a row may be
    shorter."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], firsts: Sequence[int], device: torch.device):
        columns = [shape[-1] for shape in shapes]
        across = [-(-n // storage.BLOCK) for n in columns]
        rows = [int(np.prod(shape[:-1], dtype=np.int64)) * a for shape, a in zip(shapes, across, strict=True)]
        super().__init__([-(-n // (STRIPS * TURNS)) for n in rows], device)
        self.even = math.gcd(storage.BLOCK, *columns)
        self.rows, self.columns, self.across, self.firsts = (
            torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, columns, across, firsts)
        )


class Grid:
    """Tiles of some matrices, and where their rows' and columns' sums go: one line per tile across (down)."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device):
        down = [-(-r // (HIGH * DEEP)) for r, _ in shapes]
        across = [-(-c // WIDE) for _, c in shapes]
        places = [(t, i, j) for t, (d, a) in enumerate(zip(down, across, strict=True)) for i in range(d) for j in range(a)]
        self.n = len(places)
        table = torch.tensor(places, dtype=torch.int32, device=device)
        self.tensor, self.down, self.across = (column.contiguous() for column in table.unbind(1))

        def long(values: Any) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        rows, columns = [r for r, _ in shapes], [c for _, c in shapes]
        self.height, self.width = long(rows), long(columns)
        row_lines = [r * a for r, a in zip(rows, across, strict=True)]
        column_lines = [c * d for c, d in zip(columns, down, strict=True)]
        self.lengths = sum(row_lines), sum(column_lines)
        self.first = long([0, *itertools.accumulate(d * a for d, a in zip(down, across, strict=True))])
        self.row_first, self.column_first = (long([0, *itertools.accumulate(each)][:-1]) for each in (row_lines, column_lines))
        self.across_count, self.down_count = long(across), long(down)


class Pointers:
    """One array per tensor of a bundle, known by address.

    base: what is added to every address; it goes with the launch, so arrays that lie elsewhere every time need no new table.
    drop: the axes of the parameter that the arrays lack. gradient: these are the bundle's gradients, still to be scaled. storage,
    scale: of codes, what they are, and where their scales are. rounding, low: of parameters that may be of 16 bits, how they are
    rounded (a number of `kernels`), and where their low halves are.
    """

    __slots__ = ("address", "base", "drop", "dtypes", "gradient", "held", "low", "rounding", "scale", "storage")

    def __init__(
        self, address: Any, dtypes: Any, drop: tuple[int, ...] = (), held: Any = None, base: int = 0, gradient: bool = False,
        storage: str = "", scale: Any = None,
    ):  # fmt: skip
        self.address, self.dtypes, self.drop, self.held = address, dtypes, drop, held
        self.base, self.gradient, self.storage, self.scale = base, gradient, storage, scale
        self.rounding, self.low = 0, None


@functools.lru_cache(maxsize=1024)
def _steps(n: int, step: int, dtype: torch.dtype) -> tuple[np.ndarray, tuple[torch.dtype, ...]]:
    return np.arange(n, dtype=np.int64) * step, (dtype,) * n


def pointers_of(stack: torch.Tensor) -> Pointers:
    """A contiguous stack, tensor by tensor."""
    n = stack.shape[0]
    address, dtypes = _steps(n, stack.numel() // n * stack.element_size(), stack.dtype)
    return Pointers(address, dtypes, base=stack.data_ptr())


class LaunchArgs(NamedTuple):
    """The arrays of a launch: those that are read, those only written, scales of codes, and the low half of a parameter.

    stores: (result, array) pairs. half: which array is a parameter that may be of 16 bits, how it is rounded, and which has its
    low half. codes: how each array is kept, where one is kept in fewer bits; scales: which array has its scales.
    """

    arrays: list[Pointers]
    reads: int
    stores: tuple[tuple[int, int], ...]
    half: tuple[int, int, int]
    codes: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()

    @classmethod
    def of(cls, arrays: list[Pointers], reads: int, stores: tuple[tuple[int, int], ...]) -> LaunchArgs:
        """Of those that are read, then those only written."""
        scaled = [array for array in arrays if array.scale is not None]
        every = [*arrays, *[array.scale for array in scaled]]
        half = (-1, 0, 0)
        p = next((j for j, array in enumerate(arrays) if array.rounding), -1)
        if p >= 0:
            half = (p, arrays[p].rounding, len(every))
            every += [] if arrays[p].low is None else [arrays[p].low]
        if not any(array.storage for array in arrays):
            return cls(every, reads, stores, half)
        more = len(every) - len(arrays)
        codes = tuple([CODES[array.storage] for array in arrays]) + (PLAIN,) * more
        scales = tuple([len(arrays) + scaled.index(array) if array in scaled else 0 for array in arrays]) + (0,) * more
        return cls(every, reads, stores, half, codes, scales)

    @property
    def ticks(self) -> bool:
        """Whether the last of the numbers is the step."""
        return bool(self.codes) or self.half[1] == ROUNDING["stochastic"]


class LaunchPlan:
    """What is kept for a bundle."""

    def __init__(self, bundle: Any, device: torch.device):
        self.shapes, self.device = bundle.shapes, device
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in bundle.shapes]
        self.made: dict[Any, Any] = {}
        self.scratch: dict[Any, Pointers] = {}
        self.numbers: dict[Any, tuple[np.ndarray, torch.Tensor]] = {}
        self.passes: dict[Any, tuple[list[Any], Table]] = {}
        self.shares: dict[str, tuple[Any, ...]] = {}
        self.where: dict[str, Pointers] = {}  # the bundle's arrays
        self.version: Any = None  # of the pointer table, when these were set
        self.roundings = bundle.roundings
        self.firsts = bundle.firsts if bundle.storages else []  # where tensors begin, if their state is coded
        self.exact = (
            bundle.program is not None or not bundle.spec.mixed_shapes()
        )  # whether a matrix rule may read what it wrote, and not only as codes
        self.mapped: dict[Any, list[Pointers]] = {}  # the arrays of a matrix rule's maps
        self.recorded = getattr(bundle.pointers, "recorded", True)  # whether graphs may be kept

    def find_own(self, name: str, pointers: Any, index: list[int]) -> tuple[np.ndarray, Any]:
        """The bundle's share of a call's arrays: the same objects as long as nothing has moved."""
        version, dtypes, address, own = self.shares.get(name, (None, None, None, None))
        if version != pointers.version:
            side, types = (pointers.params, pointers.param_types) if name == "p" else (pointers.grads, pointers.grad_types)
            own = own if types is dtypes else tuple([types[i] for i in index])
            address = side[index]
            self.shares[name] = (pointers.version, types, address, own)
        return address, own

    def round(self, params: Pointers) -> None:
        """Say of parameters how they are rounded, and where their low halves are: at the parameter itself where it has none."""
        params.rounding = ROUNDING[next(half.rounding for half in self.roundings if half is not None)]
        if params.rounding == ROUNDING["exact"]:
            low = params.low = self.cached("low", lambda: Pointers(None, None))
            kept = self.cached("kept", lambda: np.array([half.low.data_ptr() if half else 0 for half in self.roundings]))
            if self.made.get("low of") is not params.dtypes:
                self.made["low of"] = params.dtypes
                self.others = np.array([dtype is not torch.bfloat16 for dtype in params.dtypes])
                low.dtypes = tuple([torch.int16 if dtype is torch.bfloat16 else dtype for dtype in params.dtypes])
            low.address = np.where(self.others, params.address, kept) if self.others.any() else kept

    def keys(self, sender: Sender, indices: tuple[int, ...] | None) -> torch.Tensor:
        """By what parameters are rounded by chance: key and first place of each."""

        def make() -> torch.Tensor:
            rows = [(0, 0) if half is None else (half.key, half.first or 0) for half in self.roundings]
            return sender.send(np.array(rows if indices is None else [rows[i] for i in indices], np.int64))

        return self.cached(("keys of chance", indices), make)

    def starts(self) -> list[int]:
        """Where the arrays of all tensors are, one behind the other, each aligned, and where they end."""
        return self.cached("starts", lambda: [0, *itertools.accumulate(-(-n // 16) * 16 for n in self.sizes)])

    def room(self, dtype: torch.dtype) -> tuple[torch.Tensor, Pointers]:
        """Flat memory for an array of every tensor."""
        *starts, end = self.starts()
        address, dtypes = self.cached(
            ("room", dtype), lambda: (np.array(starts, np.int64) * dtype.itemsize, (dtype,) * len(starts))
        )
        room = torch.empty(end, dtype=dtype, device=self.device)
        return room, Pointers(address, dtypes, base=room.data_ptr())

    def stacks(self) -> list[tuple[bool, tuple[int, int], torch.Tensor]]:
        """The stacks of `padding`: whether of small matrices, their sides, and of each matrix in one where it is in a `room` and
        how it is read there: start, and along the smaller side and the larger the strides and the lengths."""

        def row(i: int) -> list[int]:
            (rows, columns), start = self.shapes[i], self.starts()[i]
            return [start, 1, columns, columns, rows] if rows > columns else [start, columns, 1, rows, columns]

        def make() -> Any:
            found = dict(sorted(padding.stacks(self.shapes).items(), reverse=True))  # small ones first
            return [(*how, torch.tensor([row(i) for i in chosen], device=self.device)) for how, chosen in found.items()]

        return self.cached("stacks", make)

    def cached(self, key: Any, make: Any) -> Any:
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = make()
        return found

    def lengths(self, drop: tuple[int, ...]) -> list[int]:
        """How many elements the arrays have that lack these axes."""
        if not drop:
            return self.sizes
        return [shape[0] if drop == (-1,) else shape[1] for shape in self.shapes]

    def blocks(self, drop: tuple[int, ...], indices: tuple[int, ...] | None) -> Blocks:
        lengths = self.lengths(drop)
        return self.cached(
            ("blocks", drop, indices),
            lambda: Blocks(lengths if indices is None else [lengths[i] for i in indices], self.device),
        )

    def grid(self, indices: tuple[int, ...] | None) -> Grid:
        return self.cached(
            ("grid", indices),
            lambda: Grid(self.shapes if indices is None else [self.shapes[i] for i in indices], self.device),
        )

    def strips(self, indices: tuple[int, ...] | None) -> Rows:
        chosen = range(len(self.shapes)) if indices is None else indices
        return self.cached(
            ("strips", indices),
            lambda: Rows([self.shapes[i] for i in chosen], [self.firsts[i] for i in chosen], self.device),
        )

    def divisor(self, lengths: Sequence[int]) -> torch.Tensor:
        key = ("divisor", tuple(lengths))
        return self.cached(key, lambda: torch.tensor(lengths, dtype=torch.float64, device=self.device))

    def strip(self, name: str, drop: tuple[int, ...], dtype: torch.dtype) -> Pointers:
        """Scratch for a number per row or column of every tensor: kept, so that it stays where it is."""
        key = (name, drop, dtype)
        if key not in self.scratch:
            starts = [0, *itertools.accumulate(-(-n // 16) * 16 for n in self.lengths(drop))]  # 16 elements: every start aligned
            room = torch.zeros(starts[-1], dtype=dtype, device=self.device)
            address = np.array(starts[:-1], np.int64) * room.element_size() + room.data_ptr()
            offsets = torch.tensor(starts[:-1], dtype=torch.int64, device=self.device)
            self.scratch[key] = Pointers(address, (dtype,) * len(address), drop, held=(room, offsets))
        return self.scratch[key]


class Table:
    """One rule over one bundle: tensors grouped by how they are stored, and the addresses of all groups on the device."""

    def __init__(self, arrays: list[Pointers], count: int):
        kinds = [*zip(*(a.dtypes for a in arrays), strict=True)]
        groups: dict[Any, list[int]] = {}
        for i, kind in enumerate(kinds):
            groups.setdefault(kind, []).append(i)
        alone = len(groups) == 1
        self.groups = [(kind, None if alone else tuple(indices)) for kind, indices in groups.items()]
        self.shapes = [(len(arrays), len(indices)) for indices in groups.values()]
        self.size = len(arrays) * count
        self.host: Any = None
        self.seen: list[np.ndarray] = []
        self.aligned: tuple[bool, ...] = ()
        self.room: torch.Tensor | None = None
        self.tables: list[tuple[torch.Tensor, bool]] | None = None

    def fill(self, arrays: list[Pointers], out: np.ndarray, room: torch.Tensor | None = None) -> None:
        """Write down where the arrays are, for whoever sends it. room: where it is sent to from now on."""
        current = [array.address for array in arrays]
        host = np.stack(current)
        aligned = self._written(host, out)
        if aligned != self.aligned or room is not None:
            self.aligned, self.tables = aligned, None
        self.room = self.room if room is None else room
        self.host, self.seen = host, current

    def _written(self, host: np.ndarray, out: np.ndarray) -> tuple[bool, ...]:
        """Of each group, whether all its addresses are aligned to 16 bytes."""
        start, aligned = 0, []
        for (_, indices), (rows, columns) in zip(self.groups, self.shapes, strict=True):
            own = out[start : start + rows * columns]
            start += rows * columns
            own.reshape(rows, columns)[...] = host if indices is None else host[:, indices]
            aligned.append(not int(np.bitwise_or.reduce(own)) & 15)
        return tuple(aligned)

    def _views(self, room: torch.Tensor, aligned: tuple[bool, ...]) -> list[tuple[torch.Tensor, bool]]:
        parts = room.split([rows * columns for rows, columns in self.shapes])
        return [(part.view(shape), even) for part, shape, even in zip(parts, self.shapes, aligned, strict=True)]

    def addresses(self, arrays: list[Pointers], sender: Sender) -> list[tuple[torch.Tensor, bool]]:
        """For each group its addresses on the device, sent anew if something moved, and whether all are aligned to 16 bytes."""
        if sender.capturing():  # the graph's own
            out = np.empty(self.size, np.int64)
            aligned = self._written(np.stack([array.address for array in arrays]), out)
            return self._views(sender.send(out), aligned)
        current = [array.address for array in arrays]
        if len(current) != len(self.seen) or not all(map(operator.is_, current, self.seen)):
            if self.host is None or not np.array_equal(np.stack(current), self.host):
                out = np.empty(self.size, np.int64)
                self.fill(arrays, out)
                self.room = sender.send(out, self.room)
            self.seen = current
        if self.tables is None:
            self.tables = self._views(self.room, self.aligned)
        return self.tables
