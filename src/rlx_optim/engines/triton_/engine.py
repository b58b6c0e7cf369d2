"""The triton engine: elementwise rules, norms, rows and columns in a launch a pass; matrices in half-precision products.

A bundle's arrays are known by address (`Placed`), so a step of a whole model costs the host a few launches. Matrix rules see
their tensors as a `Pile`, which is only stacked when somebody needs the stack.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import random, storage
from ...language import REDUCTIONS, Reduction, Rule, signature, signature_of_numbers
from ...linalg import Coefficients
from ...program import Pass, Values, reordered
from ..torch_ import Torch
from . import kernels, noise, precise, products, replay
from .kernels import (
    BLOCK,
    COLUMN,
    COLUMNS,
    DEEP,
    FULL,
    HALF,
    HIGH,
    PLAIN,
    POSITIVE,
    ROW,
    ROWS,
    SIGNED,
    STRIPS,
    TENSOR,
    WARPS,
    WIDE,
)  # fmt: skip
from .pile import Pile, Ragged, dense, same
from .soon import Soon
from .tables import Placed, Plan, Sender, Table, placed
from .words import TYPES, bound

CODES = {storage.EXACT: PLAIN, storage.SIGNED: SIGNED, storage.POSITIVE: POSITIVE, storage.HALF: HALF}
SCALE, TICK = -1, -2  # among the numbers of a program, by number: the scale of gradients, the step


class Ready(NamedTuple):
    """What a launch of a pass is told, but for its numbers: their places among the values are in `numbers`."""

    arrays: list[Placed]
    reads: int
    numbers: list[int]
    stores: tuple[tuple[int, int], ...]
    stored: dict[int, Placed]
    results: dict[int, int]
    tiled: bool
    half: tuple[int, int, int]  # the parameter, how it is rounded, and its low half, which comes last
    codes: tuple[int, ...] = ()  # how each array is kept, where one is kept in fewer bits; their scales come behind them
    scales: tuple[int, ...] = ()  # which array has its scales


def apart(steps: Any, found: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """The steps of a program with their places: functions of numbers that the host has, then all others."""
    known = {n for n, value in found.items() if not isinstance(value, Placed)}
    early, late = [], []
    for position, step in enumerate(steps):
        if isinstance(step, Pass) or not known.issuperset(step.takes):
            late.append((position, step))
        else:
            early.append((position, step))
            known.update(step.gives)
    return early, late


def left(u):
    p = u
    return p


class Triton(Torch):
    """CUDA devices with Triton installed."""

    name = "triton"

    def __init__(self, device: Any = "cuda", dtype: torch.dtype = torch.float32):
        super().__init__(device, dtype)
        self.sender = Sender(self.device)
        self.now: Any = {}  # what the matrix update that runs began with

    def live(self, spec: Any) -> str:
        rest = f"; {products.NOTE}" if spec.matrix else ""
        return f"triton: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, one launch a pass{rest}"

    # bundles -----------------------------------------------------------------------------------------------------------
    def sweeps(self, bundle: Any) -> bool:
        """Rows and columns of tensors that are not matrices are left to the torch engine, and state in fewer bits that a pass
        cannot code as it goes."""
        if bundle.plan is not None:
            return True
        if bundle.storages and (bundle.program is None or not bundle.coded_in_passes):
            return False
        drops = [slot.drop for slot in bundle.slots.values()]
        lines = any(drops if bundle.program is None else bundle.program.drops.values())
        return not lines or all(len(shape) == 2 for shape in bundle.shapes)

    def placed(self, bundle: Any) -> dict[str, Placed]:
        """Where the arrays of a bundle are: always the same objects, which say it anew where parameters or gradients moved."""
        plan, watch, arrays = bundle.plan, bundle.watch, bundle.plan.where
        if not arrays:
            for name, each in bundle.buffers.items():
                slot = bundle.slots.get(name)
                if slot is None:
                    arrays[name] = Placed(None, None, (), gradient=name == "g")
                elif slot.drop is not None:  # a number a tensor is no array
                    arrays[name] = Placed(*self._standing(each), slot.drop)
                if name in bundle.storages:
                    arrays[name].storage, arrays[name].scale = self._scales(each)
        if watch is None:
            for name in arrays.keys() & {"p", "g"}:  # an estimate moves no p
                arrays[name].address, arrays[name].dtypes = self._standing(bundle.buffers[name])
        elif plan.version != watch.version:
            plan.version = watch.version
            for name in ("p", "g"):
                arrays[name].address, arrays[name].dtypes = plan.mine(name, watch, bundle.index)
        if bundle.halves and "p" in arrays:
            plan.round(arrays["p"])
        return arrays

    def values(self, bundle: Any, numbers: Mapping[str, Any] | None = None) -> Values:
        """numbers: in place of the bundle's own, with the scale of gradients as _scale."""
        if bundle.plan is None:  # state in fewer bits has no address to be used at
            return super().values(bundle)
        plan, n = bundle.plan, len(bundle.shapes)
        arrays: dict[str, Any] = {**self.placed(bundle)}
        numbers = {**bundle.numbers, "_scale": bundle.scale} if numbers is None else numbers
        numbers = {**numbers, "_plan": plan, "_flag": getattr(bundle.watch, "flag", None)}
        for name, where in arrays.items():
            slot = bundle.slots.get(name)
            if len(set(bundle.shapes)) > 1:
                arrays[name] = Ragged(bundle.buffers[name], where, None, plan)
            elif slot is None or not slot.drop:
                scale, shape = numbers["_scale"] if name == "g" else 1.0, bundle.shapes[0] if slot is None else slot.shape
                halves = bundle.halves if name == "p" and where.low is not None else ()
                arrays[name] = Pile(bundle.buffers[name], shape, where, self.dtype, scale, slot is None, halves)
            else:
                each = bundle.buffers[name]
                arrays[name] = each[0][None] if n == 1 else torch.stack(list(each))
        return Values(arrays, **numbers, t=bundle.t, names=bundle.names, seed=bundle.spec.values().get("seed"))

    @classmethod
    def _scales(cls, each: Any) -> tuple[str, Placed | None]:
        """What codes are, and where their scales are."""
        scales = [coded.scale for coded in each]
        return each[0].storage, None if scales[0] is None else Placed(*cls._standing(scales))

    @staticmethod
    def _standing(each: Any) -> tuple[np.ndarray, tuple[torch.dtype, ...]]:
        each = [array.codes if isinstance(array, storage.Coded) else array for array in each]
        return np.array([array.data_ptr() for array in each], np.int64), tuple([array.dtype for array in each])

    def run(self, bundle: Any, move: bool = True) -> Mapping[str, Any]:
        if not self.sweeps(bundle):
            return super().run(bundle, move)
        if bundle.plan is None:
            bundle.plan = Plan(bundle, self.device)
        with torch.no_grad():
            if bundle.program is not None:
                return self._execute(bundle)
            numbers = {**bundle.numbers, "_scale": bundle.scale}
            if not move or not self._replayable(bundle, numbers):
                return self._matrices(bundle, numbers, move)
            return self._replayed(bundle, numbers)

    def _replayed(self, bundle: Any, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        plan = bundle.plan
        self.placed(bundle)
        read = [value for value in bundle.spec.values().values() if type(value) is not float]

        def run(now: Mapping[str, Any]) -> dict[str, Any]:
            self._matrices(bundle, now)
            return {}  # the values would keep gradients

        replayed = plan.cached("replay", lambda: replay.Passes(self.device, len(bundle.shapes)))
        return replayed((plan.version, read), numbers, run, lambda: (self._maps(plan), read))

    def _matrices(self, bundle: Any, numbers: Mapping[str, Any], move: bool = True) -> Values:
        """A step of a matrix rule."""
        self.now = start = self.values(bundle, numbers)
        bundle.plan.cached("soon", Soon).begin()
        x = self.updated(bundle, start, move)
        for name in bundle.written():
            if not same(x[name], start[name]):  # what is not by address has been computed apart
                apart = dense(x[name]).reshape(-1, *bundle.buffers[name][0].shape)
                torch._foreach_copy_(list(bundle.buffers[name]), list(apart))
        return x

    def _replayable(self, bundle: Any, numbers: Mapping[str, Any]) -> bool:
        """Whether a step of a matrix rule is worth a graph of its own, whose memory stays."""
        small = sum(bundle.plan.sizes) <= replay.MOST
        can = small and bundle.spec.replays() and not bundle.spec.counters() and self._standing_still(bundle)
        return can and not any(map(torch.is_tensor, numbers.values()))

    def _maps(self, plan: Plan) -> tuple[Any, ...]:
        """`_tables` of the maps of a matrix rule."""
        found = []
        for key, arrays in plan.mapped.items():
            table = self._pass(plan, key, arrays, len(plan.shapes))
            found.append((table, *[aligned for _, aligned in table.addresses(arrays, self.sender)]))
        return tuple(found)

    def moved(self, spec: Any, x: Values, move: bool = True) -> Values:
        if move:
            return super().moved(spec, x)
        return self.map(left, x) if isinstance(x.u, Ragged) else x.set(p=dense(x.u))

    # programs ----------------------------------------------------------------------------------------------------------
    def _execute(self, bundle: Any) -> dict[str, Any]:
        program, plan = bundle.program, bundle.plan
        where, found = self.placed(bundle), {}
        for name, n in program.inputs.items():
            if name in where or name in bundle.numbers:
                found[n] = where[name] if name in where else bundle.numbers[name]
        early, late = plan.cached("order", lambda: apart(program.steps, found))
        for _, step in early:  # numbers that follow from numbers: on the host, where those are
            self.number(step, found)
        numbers = {n: value for n, value in found.items() if not isinstance(value, Placed)} | {SCALE: bundle.scale}
        if "_tick" in bundle.numbers:
            numbers[TICK] = found[TICK] = bundle.numbers["_tick"]
        if len(late) > 1 and self._standing_still(bundle) and not any(map(torch.is_tensor, numbers.values())):
            replayed = plan.cached("replay", lambda: replay.Passes(self.device, len(bundle.shapes)))
            return replayed(
                plan.version, numbers, lambda now: self._late(bundle, late, {**found, **now}, now[SCALE]),
                lambda: self._tables(plan, late),
            )  # fmt: skip
        return self._late(bundle, late, found, bundle.scale)

    def _standing_still(self, bundle: Any) -> bool:
        """Whether all that differs from step to step are addresses that a watch knows, and numbers of the host."""
        watched = bundle.watch is not None and getattr(bundle.watch, "flag", None) is None
        return watched and not bundle.asked and self.device.type == "cuda" and not self.sender.capturing()

    def _tables(self, plan: Plan, steps: Any) -> tuple[Any, ...]:
        """Bring the tables of addresses up to date; gives what launches depend on beside what stands in them."""
        found = []
        for position in [position for position, step in steps if isinstance(step, Pass)]:
            arrays = plan.made["pass", position].arrays
            table = self._pass(plan, position, arrays, len(plan.shapes))
            found.append((table, *[aligned for _, aligned in table.addresses(arrays, self.sender)]))
        return tuple(found)

    def _late(self, bundle: Any, steps: Any, found: dict[int, Any], scale: Any) -> dict[str, Any]:
        """The passes, and what follows from their sums."""
        program, plan, where, flag = bundle.program, bundle.plan, bundle.plan.where, getattr(bundle.watch, "flag", None)
        for name, n in program.inputs.items():
            if n not in found and name in bundle.buffers:
                found[n] = torch.stack(list(bundle.buffers[name])).double()
        for position, step in steps:
            if isinstance(step, Pass):
                self._apply(plan, position, step, where, found, scale, flag)
            else:
                self.number(step, found)
        for name, n in program.buffers.items():
            if n not in program.drops:
                now, before = super()._there(found[n]).expand(len(bundle.shapes)), found[program.inputs[name]]
                now = now if flag is None else torch.where(flag.reshape(()) == 0, now, before)
                torch._foreach_copy_(list(bundle.buffers[name]), list(now.to(self.dtype)))
        return {name: found[n] for name, n in program.given.items()}

    def _apply(self, plan: Plan, position: int, step: Pass, where: Any, found: dict[int, Any], scale: Any, flag: Any) -> None:
        """A pass: the arrays that it reads, then the ones that it only writes."""
        ready = plan.cached(("pass", position), lambda: self._ready(plan, step, where, found))
        found |= ready.stored
        numbers = [found[n] for n in ready.numbers]
        if ready.codes:
            return self._strips(plan, position, step, ready, numbers, found, scale, flag)
        launch = self._tiles if ready.tiled else self._sweep
        launch(plan, position, step, ready, numbers, found, scale, flag)

    def _ready(self, plan: Plan, step: Pass, where: Any, found: dict[int, Any]) -> Ready:
        arrays = [found[n] for n in step.takes if isinstance(found[n], Placed)]
        numbers = [n for n in step.takes if not isinstance(found[n], Placed)]  # a matrix's one number is no array here
        if [n for n in step.takes if isinstance(found[n], Placed)] + numbers != list(step.takes):
            raise AssertionError("arrays come before numbers")
        reads, held = len(arrays), {id(value): j for j, value in enumerate(arrays)}
        results = {n: k for k, n in enumerate(step.gives)}
        stores, stored = [], {}
        for n, place in step.stores:
            target = where[place] if isinstance(place, str) else plan.strip(n, step.domain, self.dtype)
            if id(target) not in held:
                held[id(target)] = len(arrays)
                arrays.append(target)
            stores.append((results[n], held[id(target)]))
            stored[n] = target
        lines = any(how.axis is not None for _, _, how in step.reduces)
        tiled = len({array.drop for array in arrays}) > 1 or (not step.domain and lines)
        scaled = [array for array in arrays if array.scale is not None]
        every, half = self._halved([*arrays, *[array.scale for array in scaled]])
        if not any(array.storage for array in arrays):
            numbers = [*numbers, TICK] if half[1] == 1 else numbers
            return Ready(every, reads, numbers, tuple(stores), stored, results, tiled, half)
        more = len(every) - len(arrays)
        codes = tuple([CODES[array.storage] for array in arrays]) + (PLAIN,) * more
        places = tuple([len(arrays) + scaled.index(array) if array in scaled else 0 for array in arrays]) + (0,) * more
        return Ready(every, reads, [*numbers, TICK], tuple(stores), stored, results, False, half, codes, places)

    @staticmethod
    def _halved(arrays: list[Placed]) -> tuple[list[Placed], tuple[int, int, int]]:
        """The arrays of a launch with the low half of its parameter behind them, and `HALF` of the kernels."""
        p = next((j for j, array in enumerate(arrays) if array.rounding), -1)
        if p < 0:
            return arrays, (-1, 0, 0)
        low = arrays[p].low
        return arrays if low is None else [*arrays, low], (p, arrays[p].rounding, len(arrays))

    def _sums(self, step: Pass, results: Mapping[int, int], lines: bool) -> tuple[Any, ...]:
        """(result, over what, squared, largest) of each reduction."""
        scope = {None: TENSOR, -1: ROWS, -2: COLUMNS}
        return tuple([(results[n], scope[how.axis] if lines else TENSOR, how.squared, how.largest) for _, n, how in step.reduces])

    def _sweep(self, plan: Plan, key: Any, step: Pass, ready: Ready, numbers: Any, found: Any, scale: Any, flag: Any) -> None:
        sums = self._sums(step, ready.results, lines=False)
        kinds = [how for _, _, how in step.reduces]
        given = self._launch(
            plan, key, step.rule, ready.arrays, ready.reads, numbers, step.domain, ready.stores, sums, kinds, len(step.gives),
            scale, flag, ready.half,
        )  # fmt: skip
        found |= dict(zip([result for result, _, _ in step.reduces], given, strict=True))

    def _launch(
        self, plan: Plan, key: Any, rule: Rule, arrays: Any, reads: int, numbers: Any, drop: Any, stores: Any, sums: Any,
        kinds: Any, results: int, scale: Any, flag: Any, half: tuple[int, int, int],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Sweep, and fold the sums that the pass leaves: one number per tensor each, or one for all."""
        n = len(plan.shapes)
        this = self._pass(plan, key, arrays, n)
        table, shared = self._numbers(plan, key, [*numbers, scale], n)
        gradient = next((j for j, array in enumerate(arrays) if array.gradient), -1)
        bases = tuple([array.base for array in arrays])
        even = not any(base % 16 for base in bases)
        made = torch.empty((len(sums), n), dtype=torch.float64, device=self.device) if sums else None
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(arrays, self.sender), strict=True):
            told = address if flag is None else flag
            blocks = plan.blocks(drop, indices)
            mine = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((blocks.n, len(sums)), dtype=self.dtype, device=self.device) if sums else address
            keys = plan.keys(self.sender, indices) if half[1] == 1 else address
            kernels.sweep[(blocks.n,)](
                address, bases, blocks.sizes, blocks.tensor, blocks.index, mine, shared, keys, partial, told, address.shape[1],
                bound(rule), tuple([TYPES[t] for t in kind]), len(numbers), gradient, half, reads, stores, sums, results == 1,
                aligned and even, flag is not None, table is None, TYPES[self.dtype], BLOCK, num_warps=4,
            )  # fmt: skip
            if sums:
                self._fold(plan, partial, blocks.first, plan.lengths(drop), kinds, indices, made)
        return [] if made is None else [self._of_all(row, how, plan.lengths(drop)) for row, how in zip(made, kinds, strict=True)]

    def _strips(
        self, plan: Plan, key: Any, step: Pass, ready: Ready, numbers: Any, found: Any, scale: Any, flag: Any
    ) -> None:  # fmt: skip
        """As `_sweep`, where some arrays are codes: decoded and encoded in the same launch."""
        sums, kinds, n = self._sums(step, ready.results, lines=False), [how for _, _, how in step.reduces], len(plan.shapes)
        this = self._pass(plan, key, ready.arrays, n)
        table, shared = self._numbers(plan, key, [*numbers, scale], n)
        gradient = next((j for j, array in enumerate(ready.arrays) if array.gradient), -1)
        made = torch.empty((len(sums), n), dtype=torch.float64, device=self.device) if sums else None
        bases = tuple([array.base for array in ready.arrays])
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(ready.arrays, self.sender), strict=True):
            rows = plan.strips(indices)
            mine = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((rows.n, len(sums)), dtype=self.dtype, device=self.device) if sums else address
            keys = plan.keys(self.sender, indices) if ready.half[1] == 1 else address
            kernels.strips[(rows.n,)](
                address, bases, rows.rows, rows.columns, rows.across, rows.tensor, rows.index, mine, shared, keys, partial,
                address if flag is None else flag, address.shape[1], bound(step.rule), tuple([TYPES[t] for t in kind]),
                ready.codes, ready.scales, len(numbers), gradient, ready.half, ready.reads, ready.stores, sums,
                len(step.gives) == 1, aligned, rows.even, flag is not None, table is None, TYPES[self.dtype], STRIPS,
                storage.BLOCK, storage.TINY, num_warps=WARPS,
            )  # fmt: skip
            if sums:
                self._fold(plan, partial, rows.first, plan.sizes, kinds, indices, made)
        for (result, _, how), row in zip(step.reduces, made if sums else (), strict=True):
            found[result] = self._of_all(row, how, plan.sizes)

    def _of_all(self, row: torch.Tensor, how: Reduction, lengths: list[int]) -> torch.Tensor:
        if not how.everything:
            return row
        return self.rooted(row.max() if how.largest else row.sum(), how, sum(lengths))

    def _tiles(self, plan: Plan, key: Any, step: Pass, ready: Ready, numbers: Any, found: Any, scale: Any, flag: Any) -> None:
        n, arrays = len(plan.shapes), ready.arrays
        this = self._pass(plan, key, arrays, n)
        sums = self._sums(step, ready.results, lines=True)
        whole = [(result, how) for result, _, how in step.reduces if how.axis is None]
        table, shared = self._numbers(plan, key, [*numbers, scale], n)
        gradient = next((j for j, array in enumerate(arrays) if array.gradient), -1)
        bases = tuple([array.base for array in arrays])
        even = not any(base % 16 for base in bases)
        layout = tuple([{(): FULL, (-1,): ROW, (-2,): COLUMN}[array.drop] for array in arrays])
        even = even and plan.cached("even", lambda: all(c % 8 == 0 for _, c in plan.shapes))
        strips = {
            result: (plan.strip(result, (how.axis,), self.dtype), how) for result, _, how in step.reduces if how.axis is not None
        }
        made = torch.empty((len(whole), n), dtype=torch.float64, device=self.device) if whole else None
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(arrays, self.sender), strict=True):
            told = address if flag is None else flag
            grid = plan.grid(indices)
            mine = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((grid.n, len(whole)), dtype=self.dtype, device=self.device) if whole else address
            lines = {
                result: torch.empty(grid.lengths[0 if how.axis == -1 else 1], dtype=self.dtype, device=self.device)
                for result, (_, how) in strips.items()
            }
            keys = plan.keys(self.sender, indices) if ready.half[1] == 1 else address
            kernels.tiles[(grid.n,)](
                address, bases, grid.height, grid.width, grid.tensor, grid.down, grid.across, grid.row_first, grid.column_first,
                mine, shared, keys, partial, tuple([lines.get(result, address) for result, _, _ in step.reduces]), told,
                address.shape[1], bound(step.rule), tuple([TYPES[t] for t in kind]), layout, len(numbers), gradient, ready.half,
                ready.reads, ready.stores, sums, len(whole), len(step.gives) == 1, aligned and even, flag is not None,
                table is None, TYPES[self.dtype], HIGH, WIDE, DEEP, num_warps=4,
            )  # fmt: skip
            if whole:
                self._fold(plan, partial, grid.first, plan.sizes, [how for _, how in whole], indices, made)
            for result, (strip, how) in strips.items():
                lengths = plan.lengths((-1,) if strip.drop == (-2,) else (-2,))
                self._fold_lines(plan, grid, lines[result], strip, indices, lengths, how)
        found |= {result: strip for result, (strip, _) in strips.items()}
        if made is not None:
            found |= {result: self._of_all(row, how, plan.sizes) for (result, how), row in zip(whole, made, strict=True)}

    def _fold(self, plan: Plan, partial: Any, first: Any, lengths: Any, kinds: Any, indices: Any, found: Any) -> None:
        n = len(first) - 1
        out = found if indices is None else torch.empty((len(kinds), n), dtype=torch.float64, device=self.device)
        divisor = plan.divisor(lengths if indices is None else [lengths[i] for i in indices])
        finish = tuple([(how.largest, how.mean and not how.everything, how.root and not how.everything) for how in kinds])
        kernels.fold[(n,)](partial, first, divisor, out, len(kinds), n, finish, 1024)
        if indices is not None:
            found[:, self._index(plan, indices)] = out

    def _fold_lines(
        self, plan: Plan, grid: Any, lines: Any, strip: Placed, indices: Any, lengths: Any, how: Reduction
    ) -> None:  # fmt: skip
        room, offsets = strip.held
        blocks = plan.blocks(strip.drop, indices)
        by_row = strip.drop == (-1,)
        first, count = (grid.row_first, grid.across_count) if by_row else (grid.column_first, grid.down_count)
        divisor = plan.divisor(lengths if indices is None else [lengths[i] for i in indices])
        places = offsets if indices is None else offsets[self._index(plan, indices)]
        kernels.fold_lines[(blocks.n,)](
            lines, first, count, blocks.sizes, places, divisor, room, blocks.tensor, blocks.index,
            (how.largest, how.mean, how.root), TYPES[self.dtype], BLOCK, num_warps=4,
        )  # fmt: skip

    def _index(self, plan: Plan, indices: tuple[int, ...]) -> torch.Tensor:
        return plan.cached(("index", indices), lambda: torch.tensor(indices, device=self.device))

    @staticmethod
    def _pass(plan: Plan, key: Any, arrays: list[Placed], n: int) -> Table:
        types = [array.dtypes for array in arrays]
        known = plan.passes.get(key)
        if known is None or len(known[0]) != len(types) or not all(map(operator.is_, known[0], types)):
            known = plan.passes[key] = (types, Table(arrays, n))
        return known[1]

    # numbers -----------------------------------------------------------------------------------------------------------
    def _numbers(self, plan: Plan, key: Any, values: list[Any], n: int) -> tuple[torch.Tensor | None, tuple[float, ...]]:
        """A table on the device with a row per tensor; or, where all tensors share every number, just the numbers, which go with
        the launch (as float32: enough only for float32 arithmetic). Reductions are on the device already and stay there."""
        there = any(map(torch.is_tensor, values))
        if there and all(map(torch.is_tensor, values)):
            return torch.stack([value.double().expand(n) for value in values], 1), (0.0,)
        if not there and self.dtype is torch.float32 and not any(isinstance(value, np.ndarray) for value in values):
            return None, tuple(map(float, values))
        host = np.zeros((n, len(values)))
        for j, value in enumerate(values):
            if not torch.is_tensor(value):
                host[:, j] = value
        known = plan.numbers.get(key)
        if known is None or self.sender.capturing() or not np.array_equal(known[0], host):
            known = (host, self.sender.send(host))
            if not self.sender.capturing():
                plan.numbers[key] = known
        table = known[1]
        if there:
            table = table.clone()
            for j, value in enumerate(values):
                if torch.is_tensor(value):
                    table[:, j] = value
        return table, (0.0,)

    def _there(self, value: Any) -> Any:
        return value if torch.is_tensor(value) or not np.ndim(value) else self.sender.send(np.asarray(value, np.float64))

    # matrices ------------------------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        """A rule on tensors of one shape. What is given back under the name of a pile is written where the pile's tensors are.
        Reductions, and rows or columns beside whole tensors or alone, are torch's."""
        plan = x.get("_plan")
        if plan is None:
            return super().map(rule, x, **reduce)
        takes, gives = signature(rule)
        ragged = any(isinstance(x[name], Ragged) for name in takes)
        piles = [] if ragged else [x[name] for name in takes if self._is_stack(x[name], plan)]
        sizes = {math.prod(pile.shape[1:]) for pile in piles}
        if not ragged and (reduce or sizes != {math.prod(plan.shapes[0])}):
            given = super().map(rule, Values({name: dense(x[name]) for name in takes}), **reduce)
            return x.set(**{name: given[name] for name in gives})
        n = len(plan.shapes)
        arrays, names, numbers, keep = [], [], [], []
        for name in takes:
            value = x[name]
            if isinstance(value, (Pile, Ragged)):
                arrays.append(value.placed)
            elif self._is_stack(value, plan):
                keep.append(value := value.contiguous())
                arrays.append(placed(value))
            else:
                numbers.append(value.reshape(-1) if torch.is_tensor(value) else value)
                continue
            names.append(name)
        out: dict[str, Any] = {}
        apart: dict[str, Placed] = {}
        for name in gives:
            if isinstance(x.get(name), (Pile, Ragged)) and x[name].each:  # a buffer of the bundle
                continue
            if ragged:
                out[name], apart[name] = plan.room(self.dtype)
            else:
                out[name] = torch.empty((n, *piles[0].shape[1:]), dtype=self.dtype, device=self.device)
                apart[name] = placed(out[name])
        only = {name: x[name].placed for name in gives if name not in out and name not in names} | apart  # are not read
        reads, every = len(arrays), [*arrays, *only.values()]
        where = {name: j for j, name in enumerate([*names, *only])}
        stores = tuple([(k, where[name]) for k, name in enumerate(gives)])
        sums = (
            tuple([(k, TENSOR, True, False) for k, name in enumerate(gives) if name in out]) if "u" in out and not ragged else ()
        )
        kinds, key, ordered = [REDUCTIONS["norm"]] * len(sums), (rule, tuple(names)), self._arrays_first(rule, names)
        every, half = self._halved(every)
        numbers = [*numbers, x["_tick"]] if half[1] == 1 else numbers
        plan.mapped[key] = every
        found = self._launch(
            plan, key, ordered, every, reads, numbers, (), stores, sums, kinds, len(gives), x["_scale"], x["_flag"], half
        )  # fmt: skip
        norms = dict(zip(out, found, strict=True)) if sums else {}
        for name in gives:
            if name not in out:
                x[name].written()
        if ragged:
            return x.set(**{name: Ragged((), apart[name], value, plan) for name, value in out.items()})
        return x.set(**{name: Pile.of(value, apart[name], norms.get(name), plan) for name, value in out.items()})

    def each(self, function: Rule, x: Values) -> Values:
        """Numbers beside piles are flat, one per tensor, as those of a captured step are."""
        if x.get("_plan") is None:
            return super().each(function, x)
        takes, gives = signature_of_numbers(function)
        flat = {name: x[name].reshape(-1) if torch.is_tensor(x[name]) and x[name].ndim else x[name] for name in takes}
        found = super().each(function, Values(flat))
        return x.set(**{name: found[name] for name in gives})

    @staticmethod
    def _is_stack(value: Any, plan: Any) -> bool:
        """An array of the bundle's tensors; one number per tensor, whatever its axes, is none."""
        return isinstance(value, Pile) or (torch.is_tensor(value) and value.ndim > 1 and value.numel() > len(plan.shapes))

    @staticmethod
    def _arrays_first(rule: Rule, arrays: list[str]) -> Rule:
        takes, _ = signature(rule)
        return rule if list(takes[: len(arrays)]) == arrays else reordered(rule, tuple(arrays))

    def by_shape(self, function: Any, X: Any) -> Any:
        """On the device, where shapes differ: so may be what it is multiplied with."""
        if not isinstance(X, Ragged):
            return super().by_shape(function, X)
        found = X.plan.cached(function, lambda: self.sender.send(np.array([function(*shape) for shape in X.plan.shapes])))
        return found

    def _padded(self, X: Ragged, steps: int, coefficients: Coefficients, eps: float) -> Ragged:
        """Matrices of many shapes, in few stacks."""
        room, where = X.plan.room(self.dtype)
        for sides, table in X.plan.stacks():
            stack = torch.empty((len(table), *sides), dtype=self.dtype, device=self.device)
            n = math.prod(sides)
            grid = (-(-n // 1024), len(table))
            products.repack[grid](X.room, table, stack, n, sides[1], False, 1024)
            done = super().orthogonalize(stack, steps, coefficients, eps)
            products.repack[grid](room, table, done, n, sides[1], True, 1024)
        return Ragged((), where, room, X.plan)

    def orthogonalize(self, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
        if isinstance(X, Ragged):
            return self._padded(X, steps, coefficients, eps)
        norm, plan = (X.norm, X.plan) if isinstance(X, Pile) else (None, None)
        whole = dense(X)
        X = whole.reshape(*whole.shape[:2], -1)
        if not products.pays(X):
            return super().orthogonalize(whole, steps, coefficients, eps)
        norm = torch.linalg.vector_norm(X.flatten(1), dim=-1, dtype=torch.float64) if norm is None else norm
        alone = plan is not None and "replay" not in plan.made and replay.pays(X) and not self.sender.capturing()
        if not alone:  # or in a graph already
            return products.orthogonalize(X, norm, steps, coefficients, eps).reshape(whole.shape)
        kept = plan.cached(("replay", X.shape, steps, coefficients), lambda: replay.Replay(X, steps, coefficients))
        return kept(X, norm, eps).reshape(whole.shape)

    def product(self, A: Any, B: Any) -> torch.Tensor:
        A, B = dense(A), dense(B)
        with products.tf32() if products.pays(A) and products.pays(B) else contextlib.nullcontext():
            return A @ B

    def precise(self, A: Any, B: Any, bounded: bool = False) -> torch.Tensor:
        A, B = dense(A), dense(B)
        return precise.product(A, B, bounded) if precise.pays(A, B) else super().precise(A, B)

    def square(self, X: Any, bounded: bool = False) -> torch.Tensor:
        X = dense(X)
        return precise.square(X, bounded) if precise.pays(X) and X.shape[1] % precise.SIDE == 0 else super().square(X)

    def average_gram(self, L: Any, X: Any, axis: int, beta: float, alpha: float) -> tuple[Any, Any]:
        """Where the matrices are."""
        n, flag = L.shape[-1], self.now["_flag"]
        alike = X.ndim == 3 and precise.pays(L) and n % precise.SIDE == 0 and set(L.placed.dtypes) == {torch.float32}
        if not alike:
            return super().average_gram(L, X, axis, beta, alpha)
        table = self._pass(self.now["_plan"], ("gram", axis), [L.placed], L.shape[0])
        ((address, _),) = table.addresses([L.placed], self.sender)
        precise.average_gram(address, dense(X), axis == 2, beta, alpha, None if flag is None else flag.reshape(()) == 0)
        L.written()
        return L, L

    def soon(self, predicate: Any, yes: Any, no: Any, *operands: Any) -> Any:
        if self.device.type != "cuda" or self.sender.capturing():
            return super().soon(predicate, yes, no, *operands)
        return self.now["_plan"].cached("soon", Soon).decide(predicate, yes, no, operands)

    def random(self, kind: str, x: Values, shape: Any) -> torch.Tensor:
        """The same words as everywhere, in one launch."""
        plan = x.get("_plan")
        if plan is None or self.dtype is not torch.float32:
            return super().random(kind, x, shape)
        keys = plan.cached("keys", lambda: self.sender.send(np.array([random.key(x.seed, name) for name in x.names], np.int64)))
        return noise.draw(kind, keys, x.t, shape)

    def wide(self, X: Any) -> torch.Tensor:
        return super().wide(dense(X))

    def norm(self, X: Any, order: float = 2) -> torch.Tensor:
        return super().norm(dense(X), order)

    def lines(self, X: Any, axis: int) -> torch.Tensor:
        return super().lines(dense(X), axis)

    def scaled(self, X: Any, factors: Any) -> torch.Tensor:
        """What half precision gave is scaled where it is."""
        X = dense(X)
        return X.mul_(factors) if X.dtype is torch.float16 else X * factors

    def where(self, condition: Any, yes: Any, no: Any) -> torch.Tensor:
        return super().where(condition, dense(yes), dense(no))

    def moveaxis(self, X: Any, source: int, target: int) -> torch.Tensor:
        return super().moveaxis(dense(X), source, target)

    def take(self, X: Any, index: torch.Tensor, axis: int) -> torch.Tensor:
        return super().take(dense(X), index, axis)
