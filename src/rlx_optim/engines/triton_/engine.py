"""The triton engine: elementwise rules, norms, rows and columns in a launch a pass; matrices in half-precision products.

A bundle's arrays are known by address (`Pointers`), so a step of a whole model costs the host a few launches.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import storage
from ...language import Reduction, Rule
from ...program import Pass, Values
from . import ahead, kernels, products, replay
from .kernels import (
    BLOCK,
    COLUMN,
    COLUMNS,
    DEEP,
    FREE,
    FULL,
    FUSED,
    HIGH,
    ROW,
    ROWS,
    STRIPS,
    TENSOR,
    TURNS,
    WARPS,
    WIDE,
)  # fmt: skip
from .lazy_stack import LazyStack, RaggedStack
from .matrices import TritonArrays
from .tables import LaunchArgs, LaunchPlan, Pointers, Sender, Table
from .words import TYPES, bound

SCALE, TICK = -1, -2  # among the numbers of a program, by number: the scale of gradients, the step


class PreparedPass(NamedTuple):
    """A pass, and what its launch is told beside its numbers, whose places among the values are in `numbers`."""

    args: LaunchArgs
    numbers: list[int]
    stored: dict[int, Pointers]
    results: dict[int, int]
    tiled: bool


def apart(steps: Any, found: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """The steps of a program with their places: functions of numbers that the host has, then all others."""
    known = {n for n, value in found.items() if not isinstance(value, Pointers)}
    early, late = [], []
    for position, step in enumerate(steps):
        if isinstance(step, Pass) or not known.issuperset(step.takes):
            late.append((position, step))
        else:
            early.append((position, step))
            known.update(step.gives)
    return early, late


class Triton(TritonArrays):
    """CUDA devices with Triton installed."""

    name = "triton"

    def __init__(self, device: Any = "cuda", dtype: torch.dtype = torch.float32):
        super().__init__(device, dtype)
        self.sender = Sender(self.device)

    def describe(self, spec: Any) -> str:
        rest = f"; {products.NOTE}" if spec.matrix else ""
        return f"triton: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, one launch a pass{rest}"

    # bundles -----------------------------------------------------------------------------------------------------------
    def sweeps(self, bundle: Any) -> bool:
        """Rows and columns of tensors that are not matrices are left to the torch engine, and state in fewer bits that passes
        cannot code as they go."""
        if bundle.plan is not None:
            return True
        if not bundle.coded_in_passes:
            return False
        drops = [slot.drop for slot in bundle.slots.values()]
        lines = any(drops if bundle.program is None else bundle.program.drops.values())
        return not lines or all(len(shape) == 2 for shape in bundle.shapes)

    def set_pointers(self, bundle: Any) -> dict[str, Pointers]:
        """Where the arrays of a bundle are: always the same objects, which say it anew where parameters or gradients moved."""
        plan, pointers, arrays = bundle.plan, bundle.pointers, bundle.plan.where
        if not arrays:
            for name, each in bundle.buffers.items():
                slot = bundle.slots.get(name)
                if slot is None:
                    arrays[name] = Pointers(None, None, (), gradient=name == "g")
                elif slot.drop is not None:  # a number a tensor is no array
                    arrays[name] = Pointers(*self._standing(each), slot.drop)
                if name in bundle.storages:
                    arrays[name].storage, arrays[name].scale = self._scales(each)
        if pointers is None:
            for name in arrays.keys() & {"p", "g"}:  # an estimate moves no p
                arrays[name].address, arrays[name].dtypes = self._standing(bundle.buffers[name])
        elif plan.version != pointers.version:
            plan.version = pointers.version
            for name in ("p", "g"):
                arrays[name].address, arrays[name].dtypes = plan.find_own(name, pointers, bundle.index)
        if bundle.roundings and "p" in arrays:
            plan.round(arrays["p"])
        return arrays

    def values(self, bundle: Any, numbers: Mapping[str, Any] | None = None) -> Values:
        """numbers: in place of the bundle's own, with the scale of gradients as _scale."""
        if bundle.plan is None:
            return super().values(bundle)
        plan, n = bundle.plan, len(bundle.shapes)
        arrays: dict[str, Any] = {**self.set_pointers(bundle)}
        numbers = {**bundle.numbers, "_scale": bundle.scale} if numbers is None else numbers
        numbers = {**numbers, "_plan": plan, "_flag": getattr(bundle.pointers, "flag", None)}
        # what mixes is padded, also where all are of one shape: the others in a step do not change the bits of a matrix
        mixes = bundle.program is None and bundle.spec.mixed_shapes()
        mixed = mixes and not bundle.with_stats and bundle.spec.state_dtype == "float32"
        mixed = mixed and all(map(self.mixes, set(bundle.shapes)))
        if mixed:
            ahead.packing(self.device)
            ahead.shrinking(self.device)
            if any(not small for small, _, _ in plan.stacks()):
                ahead.multiplying(self.device)
        elif mixes and len(bundle.shapes[0]) > 1 and self.dtype is torch.float32:
            self._compile_ahead((n, *bundle.shapes[0]))
        for name, where in arrays.items():
            slot = bundle.slots.get(name)
            if mixed:
                arrays[name] = RaggedStack(bundle.buffers[name], where, None, plan)
            elif slot is None or not slot.drop:
                scale, shape = numbers["_scale"] if name == "g" else 1.0, bundle.shapes[0] if slot is None else slot.shape
                roundings = bundle.roundings if name == "p" and where.low is not None else ()
                arrays[name] = LazyStack(bundle.buffers[name], shape, where, self.dtype, scale, slot is None, roundings)
                if where.storage:
                    arrays[name].opener = functools.partial(self._opened, plan, name, arrays[name])
            else:
                each = bundle.buffers[name]
                arrays[name] = each[0][None] if n == 1 else torch.stack(list(each))
        return Values(arrays, **numbers, t=numbers.get("_t", bundle.t), names=bundle.names, seed=bundle.spec.values().get("seed"))

    @classmethod
    def _scales(cls, each: Any) -> tuple[str, Pointers | None]:
        """What codes are, and where their scales are."""
        scales = [coded.scale for coded in each]
        return each[0].storage, None if scales[0] is None else Pointers(*cls._standing(scales))

    @staticmethod
    def _standing(each: Any) -> tuple[np.ndarray, tuple[torch.dtype, ...]]:
        each = [array.codes if isinstance(array, storage.Quantized) else array for array in each]
        return np.array([array.data_ptr() for array in each], np.int64), tuple([array.dtype for array in each])

    def run(self, bundle: Any, move: bool = True) -> Mapping[str, Any]:
        if not self.sweeps(bundle):
            return super().run(bundle, move)
        if bundle.plan is None:
            bundle.plan = LaunchPlan(bundle, self.device)
        with torch.no_grad():
            if bundle.program is not None:
                return self._execute(bundle)
            numbers = {**bundle.numbers, "_scale": bundle.scale}
            if not move or not self._replayable(bundle, numbers):
                return self._matrices(bundle, numbers, move)
            return self._replayed(bundle, numbers)

    # programs ----------------------------------------------------------------------------------------------------------
    def _execute(self, bundle: Any) -> dict[str, Any]:
        program, plan = bundle.program, bundle.plan
        where, found = self.set_pointers(bundle), {}
        for name, n in program.inputs.items():
            if name in where or name in bundle.numbers:
                found[n] = where[name] if name in where else bundle.numbers[name]
        early, late = plan.cached("order", lambda: apart(program.steps, found))
        for _, step in early:  # numbers that follow from numbers: on the host, where those are
            self.run_function(step, found)
        numbers = {n: value for n, value in found.items() if not isinstance(value, Pointers)} | {SCALE: bundle.scale}
        if "_rng_step" in bundle.numbers:
            numbers[TICK] = found[TICK] = bundle.numbers["_rng_step"]
        short = len(late) > 1 or sum(plan.sizes) <= replay.SHORT
        if short and self._standing_still(bundle) and not any(map(torch.is_tensor, numbers.values())):
            replayed = plan.cached("replay", lambda: replay.Passes(self.device, len(bundle.shapes), bundle.pointers))
            return replayed(
                plan.version, numbers, lambda current: self._late(bundle, late, {**found, **current}, current[SCALE]),
                lambda: self._tables(plan, late),
            )  # fmt: skip
        return self._late(bundle, late, found, bundle.scale)

    def _standing_still(self, bundle: Any) -> bool:
        """Whether all that differs from step to step are addresses in the pointer table, and numbers of the host."""
        watched = bundle.pointers is not None and bundle.plan.recorded and getattr(bundle.pointers, "flag", None) is None
        return watched and not bundle.with_stats and self.device.type == "cuda" and not self.sender.capturing()

    def _tables(self, plan: LaunchPlan, steps: Any) -> list[tuple[Table, list[Pointers]]]:
        """The tables of addresses that passes read, and the arrays of each."""
        arrays = {position: plan.made["pass", position].args.arrays for position, step in steps if isinstance(step, Pass)}
        return [(self._pass(plan, position, each, len(plan.shapes)), each) for position, each in arrays.items()]

    def _late(self, bundle: Any, steps: Any, found: dict[int, Any], scale: Any) -> dict[str, Any]:
        """The passes, and what follows from their sums."""
        program, plan, where, flag = bundle.program, bundle.plan, bundle.plan.where, getattr(bundle.pointers, "flag", None)
        for name, n in program.inputs.items():
            if n not in found and name in bundle.buffers:
                found[n] = torch.stack(list(bundle.buffers[name])).double()
        for position, step in steps:
            if isinstance(step, Pass):
                self._apply(plan, position, step, where, found, scale, flag)
            else:
                self.run_function(step, found)
        for name, n in program.buffers.items():
            if n not in program.drops:
                current, before = super()._to_float64(found[n]).expand(len(bundle.shapes)), found[program.inputs[name]]
                current = current if flag is None else torch.where(flag.reshape(()) == 0, current, before)
                torch._foreach_copy_(list(bundle.buffers[name]), list(current.to(self.dtype)))
        return {name: found[n] for name, n in program.given.items()}

    def _apply(
        self, plan: LaunchPlan, position: int, step: Pass, where: Any, found: dict[int, Any], scale: Any, flag: Any
    ) -> None:
        """A pass: the arrays that it reads, then the ones that it only writes."""
        ready = plan.cached(("pass", position), lambda: self._ready(plan, step, where, found))
        found |= ready.stored
        numbers = [found[n] for n in ready.numbers]
        launch = self._tiles if ready.tiled else self._sweep
        launch(plan, position, step, ready, numbers, found, scale, flag)

    def _ready(self, plan: LaunchPlan, step: Pass, where: Any, found: dict[int, Any]) -> PreparedPass:
        arrays = [found[n] for n in step.takes if isinstance(found[n], Pointers)]
        numbers = [n for n in step.takes if not isinstance(found[n], Pointers)]  # a matrix's one number is no array here
        if [n for n in step.takes if isinstance(found[n], Pointers)] + numbers != list(step.takes):
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
        args = LaunchArgs.of(arrays, reads, tuple(stores))
        return PreparedPass(args, [*numbers, TICK] if args.ticks else numbers, stored, results, tiled and not args.codes)

    def _sums(self, step: Pass, results: Mapping[int, int], lines: bool) -> tuple[Any, ...]:
        """(result, over what, squared, largest) of each reduction."""
        scope = {None: TENSOR, -1: ROWS, -2: COLUMNS}
        return tuple([(results[n], scope[how.axis] if lines else TENSOR, how.squared, how.largest) for _, n, how in step.reduces])

    def _sweep(
        self, plan: LaunchPlan, key: Any, step: Pass, ready: PreparedPass, numbers: Any, found: Any, scale: Any, flag: Any
    ) -> None:
        sums, kinds = self._sums(step, ready.results, lines=False), [how for _, _, how in step.reduces]
        given = self._launch(plan, key, step.rule, ready.args, numbers, step.domain, sums, kinds, len(step.gives), scale, flag)
        found |= dict(zip([result for result, _, _ in step.reduces], given, strict=True))

    def _launch(
        self, plan: LaunchPlan, key: Any, rule: Rule, args: LaunchArgs, numbers: Any, drop: Any, sums: Any, kinds: Any,
        results: int, scale: Any, flag: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Sweep, by strips where some arrays are codes, and fold the sums that the pass leaves: one number per tensor each, or
        one for all."""
        n, arrays, half = len(plan.shapes), args.arrays, args.half
        this = self._pass(plan, key, arrays, n)
        table, shared = self._numbers(plan, key, [*numbers, scale], n)
        gradient = next((j for j, array in enumerate(arrays) if array.gradient), -1)
        bases = tuple([array.base for array in arrays])
        even = not any(base % 16 for base in bases)
        made = torch.empty((len(sums), n), dtype=torch.float64, device=self.device) if sums else None
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(arrays, self.sender), strict=True):
            pointers_in = address if table is None else table if indices is None else table[self._index(plan, indices)]
            blocks = plan.strips(indices) if args.codes else plan.blocks(drop, indices)
            partial = torch.empty((blocks.n, len(sums)), dtype=self.dtype, device=self.device) if sums else address
            keys = plan.keys(self.sender, indices) if half[1] == 1 else address
            behind = (pointers_in, shared, keys, partial, address if flag is None else flag, address.shape[1], bound(rule))
            types, rest = (
                tuple([TYPES[t] for t in kind]),
                (len(numbers), gradient, half, args.reads, args.stores, sums, results == 1),
            )
            last = (flag is not None, table is None, TYPES[self.dtype])
            if args.codes:
                kernels.strips[(blocks.n,)](
                    address, bases, blocks.rows, blocks.columns, blocks.across, blocks.firsts, blocks.tensor, blocks.index,
                    *behind, types, args.codes, args.scales, *rest, aligned and even, blocks.even, *last, STRIPS, TURNS,
                    storage.BLOCK, storage.TINY, num_warps=WARPS if any(args.scales) else FREE, enable_fp_fusion=FUSED,
                )  # fmt: skip
            else:
                kernels.sweep[(blocks.n,)](
                    address, bases, blocks.sizes, blocks.tensor, blocks.index, *behind, types, *rest, aligned and even, *last,
                    BLOCK, num_warps=4, enable_fp_fusion=FUSED,
                )  # fmt: skip
            if sums:
                self._fold(plan, partial, blocks.first, plan.lengths(drop), kinds, indices, made)
        return [] if made is None else [self._of_all(row, how, plan.lengths(drop)) for row, how in zip(made, kinds, strict=True)]

    def _of_all(self, row: torch.Tensor, how: Reduction, lengths: list[int]) -> torch.Tensor:
        if not how.everything:
            return row
        return self.finish_reduction(row.max() if how.largest else row.sum(), how, sum(lengths))

    def _tiles(
        self, plan: LaunchPlan, key: Any, step: Pass, ready: PreparedPass, numbers: Any, found: Any, scale: Any, flag: Any
    ) -> None:
        n, arrays, args = len(plan.shapes), ready.args.arrays, ready.args
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
            flag_at = address if flag is None else flag
            grid = plan.grid(indices)
            pointers_in = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((grid.n, len(whole)), dtype=self.dtype, device=self.device) if whole else address
            lines = {
                result: torch.empty(grid.lengths[0 if how.axis == -1 else 1], dtype=self.dtype, device=self.device)
                for result, (_, how) in strips.items()
            }
            keys = plan.keys(self.sender, indices) if args.half[1] == 1 else address
            kernels.tiles[(grid.n,)](
                address, bases, grid.height, grid.width, grid.tensor, grid.down, grid.across, grid.row_first, grid.column_first,
                pointers_in, shared, keys, partial, tuple([lines.get(result, address) for result, _, _ in step.reduces]), flag_at,
                address.shape[1], bound(step.rule), tuple([TYPES[t] for t in kind]), layout, len(numbers), gradient, args.half,
                args.reads, args.stores, sums, len(whole), len(step.gives) == 1, aligned and even, flag is not None,
                table is None, TYPES[self.dtype], HIGH, WIDE, DEEP, num_warps=4, enable_fp_fusion=FUSED,
            )  # fmt: skip
            if whole:
                self._fold(plan, partial, grid.first, plan.sizes, [how for _, how in whole], indices, made)
            for result, (strip, how) in strips.items():
                lengths = plan.lengths((-1,) if strip.drop == (-2,) else (-2,))
                self._fold_lines(plan, grid, lines[result], strip, indices, lengths, how)
        found |= {result: strip for result, (strip, _) in strips.items()}
        if made is not None:
            found |= {result: self._of_all(row, how, plan.sizes) for (result, how), row in zip(whole, made, strict=True)}

    def _fold(self, plan: LaunchPlan, partial: Any, first: Any, lengths: Any, kinds: Any, indices: Any, found: Any) -> None:
        n = len(first) - 1
        out = found if indices is None else torch.empty((len(kinds), n), dtype=torch.float64, device=self.device)
        divisor = plan.divisor(lengths if indices is None else [lengths[i] for i in indices])
        finish = tuple([(how.largest, how.mean and not how.everything, how.root and not how.everything) for how in kinds])
        kernels.fold[(n,)](partial, first, divisor, out, len(kinds), n, finish, 1024)
        if indices is not None:
            found[:, self._index(plan, indices)] = out

    def _fold_lines(
        self, plan: LaunchPlan, grid: Any, lines: Any, strip: Pointers, indices: Any, lengths: Any, how: Reduction
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

    def _index(self, plan: LaunchPlan, indices: tuple[int, ...]) -> torch.Tensor:
        return plan.cached(("index", indices), lambda: torch.tensor(indices, device=self.device))

    @staticmethod
    def _pass(plan: LaunchPlan, key: Any, arrays: list[Pointers], n: int) -> Table:
        types = [array.dtypes for array in arrays]
        known = plan.passes.get(key)
        if known is None or len(known[0]) != len(types) or not all(map(operator.is_, known[0], types)):
            known = plan.passes[key] = (types, Table(arrays, n))
        return known[1]

    # numbers -----------------------------------------------------------------------------------------------------------
    def _numbers(self, plan: LaunchPlan, key: Any, values: list[Any], n: int) -> tuple[torch.Tensor | None, tuple[float, ...]]:
        """A table on the device with a row per tensor; or, where all tensors share every number, just the numbers, which go with
        the launch (as float32: enough only for float32 arithmetic). Reductions are on the device already and stay there."""
        on_device = any(map(torch.is_tensor, values))
        if on_device and all(map(torch.is_tensor, values)):
            return torch.stack([value.double().expand(n) for value in values], 1), (0.0,)
        if not on_device and self.dtype is torch.float32 and not any(isinstance(value, np.ndarray) for value in values):
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
        if on_device:
            table = table.clone()
            for j, value in enumerate(values):
                if torch.is_tensor(value):
                    table[:, j] = value
        return table, (0.0,)

    def _to_float64(self, value: Any) -> Any:
        return value if torch.is_tensor(value) or not np.ndim(value) else self.sender.send(np.asarray(value, np.float64))
