"""The triton engine: elementwise rules, norms, rows and columns in a launch a pass; matrices in half-precision products.

A bundle's arrays are known by address (`Placed`), so a step of a whole model costs the host a few launches. Matrix rules see
their tensors as a `Pile`, which is only stacked when somebody needs the stack.
"""

# mypy: ignore-errors

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from ...engine import Rule, Values, signature
from ..torch_ import Torch
from . import kernels, products
from .kernels import BLOCK, COLUMN, COLUMNS, DEEP, FULL, HIGH, ROW, ROWS, SQUARES, SUM, WIDE
from .pile import Pile, dense
from .tables import Pass, Placed, Plan, Sender, placed
from .words import TYPES, bound

#: reductions by domain: what `map` may be asked for -> kind of sum, whether divided by the count, whether rooted
WHOLE = {"norm": (SQUARES, False, True), "rms": (SQUARES, True, True)}
LINES = {"row_mean": (ROWS, (-1,)), "column_mean": (COLUMNS, (-2,))}
ALONG_ROWS = {"row_mean": (SUM, True, False), "row_sum": (SUM, False, False)}


class Triton(Torch):
    """CUDA devices with Triton installed."""

    name = "triton"

    def __init__(self, device: Any = "cuda", dtype: torch.dtype = torch.float32):
        super().__init__(device, dtype)
        self.sender = Sender(self.device)

    def live(self, spec: Any) -> str:
        rest = f"; {products.NOTE}" if spec.matrix else ""
        return f"triton: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, one launch a pass{rest}"

    # bundles -----------------------------------------------------------------------------------------------------------
    def sweeps(self, bundle: Any) -> bool:
        """Rows and columns of tensors that are not matrices are left to the torch engine."""
        lines = any(slot.drop for slot in bundle.slots.values())
        return not lines or all(len(shape) == 2 for shape in bundle.shapes)

    def values(self, bundle: Any) -> Values:
        plan, watch = bundle.plan, bundle.watch
        if plan is None:
            return super().values(bundle)
        n = len(bundle.shapes)
        arrays = {}
        for name, each in bundle.buffers.items():
            slot = bundle.slots.get(name)
            if slot is None and watch is not None:
                address, dtypes = plan.mine(name, watch, bundle.index)
            else:
                address, dtypes = plan.cached(name, lambda each=each: self._standing(each))
            arrays[name] = Placed(address, dtypes, slot.drop if slot else (), gradient=name == "g")
        numbers = {**bundle.numbers, "scale": bundle.scale, "plan": plan, "flag": getattr(watch, "flag", None)}
        if not bundle.spec.matrix:
            return Values(arrays, **numbers)
        for name, where in arrays.items():
            slot = bundle.slots.get(name)
            if slot is None or not slot.factor:
                scale = bundle.scale if name == "g" else 1.0
                arrays[name] = Pile(bundle.buffers[name], bundle.shapes[0], where, self.dtype, scale)
            else:
                each = bundle.buffers[name]
                arrays[name] = each[0][None] if n == 1 else torch.stack(list(each))
        return Values(arrays, **numbers, t=bundle.t, names=bundle.names, seed=bundle.spec.values().get("seed"))

    @staticmethod
    def _standing(each: Any) -> tuple[np.ndarray, tuple[torch.dtype, ...]]:
        return np.array([array.data_ptr() for array in each], np.int64), tuple([array.dtype for array in each])

    def run(self, bundle: Any, update: Any) -> Values:
        if not self.sweeps(bundle):
            return super().run(bundle, update)
        if bundle.plan is None:
            bundle.plan = Plan(bundle, self.device)
        with torch.no_grad():
            x = update(self, self.values(bundle))
            for name in bundle.written():
                if isinstance(x[name], torch.Tensor):  # what is not by address has been computed apart
                    torch._foreach_copy_(list(bundle.buffers[name]), list(x[name].reshape(-1, *bundle.buffers[name][0].shape)))
        return x

    # maps --------------------------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        plan = x.get("plan")
        if plan is None:
            return super().map(rule, x, **reduce)
        takes, gives = signature(rule)
        values = [x[name] for name in takes]
        piles = [v for v in values if isinstance(v, Pile) or (torch.is_tensor(v) and v.ndim > 1)]
        if piles:
            return self._map_piles(plan, rule, x, takes, gives, piles)
        names = [name for name, value in zip(takes, values, strict=True) if isinstance(value, Placed)]
        numbers = values[len(names) :]
        assert all(isinstance(value, Placed) for value in values[: len(names)]), f"{rule.__name__}: arrays come before numbers"
        arrays = values[: len(names)]
        drops = {array.drop for array in arrays}
        if len(drops) > 1 or (drops == {()} and any(kind in LINES for kind in reduce.values())):
            return self._tiles(plan, rule, x, names, arrays, numbers, gives, reduce)
        return self._sweep(plan, rule, x, names, arrays, numbers, gives, reduce)

    def _sweep(self, plan: Plan, rule: Rule, x: Values, names: Any, arrays: Any, numbers: Any, gives: Any, reduce: Any) -> Values:
        (drop,) = {array.drop for array in arrays}
        kinds = ALONG_ROWS if drop == (-1,) else WHOLE
        fresh = [name for name in gives if name not in reduce and name not in names]
        made = {name: plan.strip(name, drop, self.dtype) for name in fresh}
        stores = tuple((k, [*names, *fresh].index(name)) for k, name in enumerate(gives) if name not in reduce)
        sums = tuple((k, kinds[reduce[name]][0]) for k, name in enumerate(gives) if name in reduce)
        wanted = [kinds[reduce[name]] for name in gives if name in reduce]
        found = self._launch(
            plan, rule, x, [*arrays, *made.values()], len(arrays), numbers, drop, stores, sums, wanted, len(gives)
        )
        reduced = dict(zip([name for name in gives if name in reduce], found, strict=True))
        return x.set(**made, **reduced) if made or reduced else x

    def _launch(
        self, plan: Plan, rule: Rule, x: Values, arrays: Any, reads: int, numbers: Any, drop: Any, stores: Any, sums: Any,
        wanted: Any, results: int,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Sweep, and fold the sums that the pass leaves: one number per tensor each."""
        n = len(plan.shapes)
        this = self._pass(plan, rule, arrays, n)
        table, shared = self._numbers(plan, rule, [*numbers, x.scale], n)
        gradient = next((j for j, array in enumerate(arrays) if array.gradient), -1)
        bases = tuple([array.base for array in arrays])
        even = not any(base % 16 for base in bases)
        found = torch.empty((len(sums), n), dtype=torch.float64, device=self.device) if sums else None
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(arrays, self.sender), strict=True):
            flag = address if x.flag is None else x.flag
            blocks = plan.blocks(drop, indices)
            mine = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((blocks.n, len(sums)), dtype=self.dtype, device=self.device) if sums else address
            kernels.sweep[(blocks.n,)](
                address, bases, blocks.sizes, blocks.tensor, blocks.index, mine, shared, partial, flag, address.shape[1],
                bound(rule), tuple([TYPES[t] for t in kind]), len(numbers), gradient, reads, stores, sums, results == 1,
                aligned and even, x.flag is not None, table is None, TYPES[self.dtype], BLOCK, num_warps=4,
            )  # fmt: skip
            if sums:
                self._fold(plan, partial, blocks.first, plan.lengths(drop), wanted, indices, found)
        return [] if found is None else list(found)

    def _tiles(self, plan: Plan, rule: Rule, x: Values, names: Any, arrays: Any, numbers: Any, gives: Any, reduce: Any) -> Values:
        n = len(plan.shapes)
        this = self._pass(plan, rule, arrays, n)
        stores = tuple((k, names.index(name)) for k, name in enumerate(gives) if name not in reduce)
        asked = [(k, reduce[name], name) for k, name in enumerate(gives) if name in reduce]
        sums = tuple((k, WHOLE[kind][0] if kind in WHOLE else LINES[kind][0]) for k, kind, _ in asked)
        whole = [name for _, kind, name in asked if kind in WHOLE]
        wanted = [WHOLE[kind] for _, kind, _ in asked if kind in WHOLE]
        table, shared = self._numbers(plan, rule, [*numbers, x.scale], n)
        gradient = next((j for j, array in enumerate(arrays) if array.gradient), -1)
        bases = tuple([array.base for array in arrays])
        even = not any(base % 16 for base in bases)
        layout = tuple([{(): FULL, (-1,): ROW, (-2,): COLUMN}[array.drop] for array in arrays])
        even = even and plan.cached("even", lambda: all(c % 8 == 0 for _, c in plan.shapes))
        strips = {name: plan.strip(name, LINES[kind][1], self.dtype) for _, kind, name in asked if kind in LINES}
        found = torch.empty((len(whole), n), dtype=torch.float64, device=self.device) if whole else None
        for (kind, indices), (address, aligned) in zip(this.groups, this.addresses(arrays, self.sender), strict=True):
            flag = address if x.flag is None else x.flag
            grid = plan.grid(indices)
            mine = address if table is None else table if indices is None else table[self._index(plan, indices)]
            partial = torch.empty((grid.n, len(whole)), dtype=self.dtype, device=self.device) if whole else address
            lines = [torch.empty(length, dtype=self.dtype, device=self.device) if strips else address for length in grid.lengths]
            kernels.tiles[(grid.n,)](
                address, bases, grid.height, grid.width, grid.tensor, grid.down, grid.across, grid.row_first, grid.column_first,
                mine, shared, partial, *lines, flag, address.shape[1],
                bound(rule), tuple([TYPES[t] for t in kind]), layout, len(numbers), gradient, stores, sums, len(whole),
                len(gives) == 1, aligned and even, x.flag is not None, table is None, TYPES[self.dtype], HIGH, WIDE, DEEP,
                num_warps=4,
            )  # fmt: skip
            if whole:
                self._fold(plan, partial, grid.first, plan.sizes, wanted, indices, found)
            for strip in strips.values():
                self._fold_lines(plan, grid, lines, strip, indices, plan.lengths((-1,) if strip.drop == (-2,) else (-2,)))
        return x.set(**strips, **({} if found is None else dict(zip(whole, found, strict=True))))

    def _fold(self, plan: Plan, partial: Any, first: Any, lengths: Any, wanted: Any, indices: Any, found: Any) -> None:
        n = len(first) - 1
        out = found if indices is None else torch.empty((len(wanted), n), dtype=torch.float64, device=self.device)
        divisor = plan.divisor(lengths if indices is None else [lengths[i] for i in indices])
        mean, root = (sum(flags[which] << k for k, flags in enumerate(wanted)) for which in (1, 2))
        kernels.fold[(n, len(wanted))](partial, first, divisor, out, len(wanted), n, root, mean, 1024)
        if indices is not None:
            found[:, self._index(plan, indices)] = out

    def _fold_lines(self, plan: Plan, grid: Any, lines: Any, strip: Placed, indices: Any, lengths: Any) -> None:
        room, offsets = strip.held
        blocks = plan.blocks(strip.drop, indices)
        by_row = strip.drop == (-1,)
        first, count = (grid.row_first, grid.across_count) if by_row else (grid.column_first, grid.down_count)
        divisor = plan.divisor(lengths if indices is None else [lengths[i] for i in indices])
        places = offsets if indices is None else offsets[self._index(plan, indices)]
        kernels.fold_lines[(blocks.n,)](
            lines[0 if by_row else 1], first, count, blocks.sizes, places, divisor, room, blocks.tensor, blocks.index,
            TYPES[self.dtype], BLOCK, num_warps=4,
        )  # fmt: skip

    def _index(self, plan: Plan, indices: tuple[int, ...]) -> torch.Tensor:
        return plan.cached(("index", indices), lambda: torch.tensor(indices, device=self.device))

    @staticmethod
    def _pass(plan: Plan, rule: Rule, arrays: list[Placed], n: int) -> Pass:
        types = [array.dtypes for array in arrays]
        known = plan.passes.get(rule)
        if known is None or len(known[0]) != len(types) or not all(map(operator.is_, known[0], types)):
            known = plan.passes[rule] = (types, Pass(arrays, n))
        return known[1]

    # numbers -----------------------------------------------------------------------------------------------------------
    def _numbers(self, plan: Plan, rule: Rule, values: list[Any], n: int) -> tuple[torch.Tensor | None, tuple[float, ...]]:
        """A table on the device with a row per tensor; or, where all tensors share every number, just the numbers, which go with
        the launch (as float32: enough only for float32 arithmetic). Reductions are on the device already and stay there."""
        there = any(map(torch.is_tensor, values))
        if not there and self.dtype is torch.float32 and not any(isinstance(value, np.ndarray) for value in values):
            return None, tuple(map(float, values))
        host = np.zeros((n, len(values)))
        for j, value in enumerate(values):
            if not torch.is_tensor(value):
                host[:, j] = value
        known = plan.numbers.get(rule)
        if known is None or self.sender.capturing() or not np.array_equal(known[0], host):
            known = (host, self.sender.send(host))
            if not self.sender.capturing():
                plan.numbers[rule] = known
        table = known[1]
        if there:
            table = table.clone()
            for j, value in enumerate(values):
                if torch.is_tensor(value):
                    table[:, j] = value
        return table, (0.0,)

    def each(self, function: Rule, x: Values) -> Values:
        """Numbers that are on the device stay there, and nothing waits for them."""
        takes, gives = signature(function)
        given = [
            x[n] if torch.is_tensor(x[n]) or not np.ndim(x[n]) else self.sender.send(np.asarray(x[n], np.float64)) for n in takes
        ]
        result = self.bound(function)(*given)
        return x.set(**dict(zip(gives, result if len(gives) > 1 else (result,), strict=True)))

    # matrices ------------------------------------------------------------------------------------------------------------
    def _map_piles(self, plan: Plan, rule: Rule, x: Values, takes: Any, gives: Any, piles: Any) -> Values:
        """A rule on tensors of one shape. What is given back under the name of a pile is written where the pile's tensors are."""
        n = len(plan.shapes)
        arrays, names, numbers, keep = [], [], [], []
        for name in takes:
            value = x[name]
            if isinstance(value, Pile):
                arrays.append(value.placed)
            elif torch.is_tensor(value) and value.ndim > 1:
                keep.append(value := value.contiguous())
                arrays.append(placed(value))
            else:
                numbers.append(value.reshape(-1) if torch.is_tensor(value) else value)
                continue
            names.append(name)
        out: dict[str, Any] = {}
        for name in gives:
            if not isinstance(x.get(name), Pile):
                out[name] = torch.empty((n, *piles[0].shape[1:]), dtype=self.dtype, device=self.device)
        apart = {name: placed(value) for name, value in out.items()}
        reads, every = len(arrays), [*arrays, *apart.values()]
        where = {name: names.index(name) for name in gives if name not in out} | {name: reads + k for k, name in enumerate(out)}
        stores = tuple([(k, where[name]) for k, name in enumerate(gives)])
        sums = tuple([(k, SQUARES) for k, name in enumerate(gives) if name in out]) if "u" in out else ()
        wanted = [WHOLE["norm"]] * len(sums)
        found = self._launch(plan, rule, x, every, reads, numbers, (), stores, sums, wanted, len(gives))
        norms = dict(zip(out, found, strict=True)) if sums else {}
        for name in gives:
            if name not in out:
                x[name].written()
        return x.set(**{name: Pile.of(value, apart[name], norms.get(name)) for name, value in out.items()})

    def orthogonalize(self, X: Any, steps: int, coefficients: tuple[float, float, float], eps: float) -> Any:
        norm = X.norm if isinstance(X, Pile) else None
        X = dense(X)
        if not products.pays(X):
            return super().orthogonalize(X, steps, coefficients, eps)
        norm = torch.linalg.vector_norm(X.flatten(1), dim=-1, dtype=torch.float64) if norm is None else norm
        return products.orthogonalize(X, norm, steps, coefficients, eps)

    def wide(self, X: Any) -> torch.Tensor:
        return super().wide(dense(X))

    def norm(self, X: Any, order: float = 2) -> torch.Tensor:
        return super().norm(dense(X), order)

    def where(self, condition: Any, yes: Any, no: Any) -> torch.Tensor:
        return super().where(condition, dense(yes), dense(no))

    def moveaxis(self, X: Any, source: int, target: int) -> torch.Tensor:
        return super().moveaxis(dense(X), source, target)

    def take(self, X: Any, index: torch.Tensor, axis: int) -> torch.Tensor:
        return super().take(dense(X), index, axis)
