"""The triton engine: one launch for all tensors of a bundle, at memory speed.

One generic kernel sweeps over blocks of 1024 elements; which tensor a block belongs to, where the tensor's arrays are and what
its numbers are stand in tables on the device, so tensors of different groups and step counts share a launch and no number is a
constant of the compiler. The rule is bound to Triton's vocabulary and inlined. Norms are summed per block and then per tensor
in a fixed order, on the device. Rules that need rows and columns, and matrix rules, run on the torch engine this one extends.
"""

# mypy: ignore-errors

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..engine import Rule, Tensors, Values, signature
from .torch_ import Torch

BLOCK = 1024  # elements of a block, 4 warps: the best of those measured on an H200
TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- the vocabulary: wrappers, because the compiler does not take tl's own functions as globals of a rule ------------------
@triton.jit
def t_sqrt(x):
    return tl.sqrt(x)


@triton.jit
def t_rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def t_where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def t_sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def t_minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def t_maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


WORDS = {"sqrt": t_sqrt, "rsqrt": t_rsqrt, "where": t_where, "sign": t_sign, "minimum": t_minimum, "maximum": t_maximum, "tl": tl}
_bound: dict[Rule, Any] = {}


def bound(rule: Rule) -> Any:
    """The rule as a Triton function."""
    if rule not in _bound:
        copy = types.FunctionType(rule.__code__, {**rule.__globals__, **WORDS}, rule.__name__)
        copy.__module__, copy.__qualname__ = rule.__module__, f"{rule.__qualname__}@triton"
        _bound[rule] = triton.jit(copy)
    return _bound[rule]


@triton.jit
def one_block(
    where, s, scale, live, out, rule: tl.constexpr, MASKED: tl.constexpr, ELEMENTS: tl.constexpr, GRADIENT: tl.constexpr,
    STORES: tl.constexpr, NORMS: tl.constexpr, SINGLE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Load, apply the rule, store; sums of squares go to `out`. Unmasked where full, so that accesses stay 16 bytes wide."""
    x = ()
    for j in tl.static_range(len(ELEMENTS)):
        if MASKED:
            value = tl.load(where[j], mask=live, other=0.0).to(F)
        else:
            value = tl.load(where[j]).to(F)
        if j == GRADIENT:
            value = value * scale
        x = x + (value,)
    y = rule(*x, *s)
    if SINGLE:
        y = (y,)
    for k in tl.static_range(len(STORES)):
        result = y[STORES[k][0]].to(ELEMENTS[STORES[k][1]])
        if MASKED:
            tl.store(where[STORES[k][1]], result, mask=live)
        else:
            tl.store(where[STORES[k][1]], result)
    for k in tl.static_range(len(NORMS)):
        value = y[NORMS[k]]
        if MASKED:
            value = tl.where(live, value, 0.0)
        tl.store(out + k, tl.sum(value * value))


@triton.jit
def sweep(
    ADDRESS, SIZES, TENSOR, INDEX, NUMBERS, PARTIAL, T,
    rule: tl.constexpr, ELEMENTS: tl.constexpr, NUMS: tl.constexpr, GRADIENT: tl.constexpr, STORES: tl.constexpr,
    NORMS: tl.constexpr, SINGLE: tl.constexpr, ALIGNED: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block. ADDRESS[array, tensor]; STORES: (result, array) pairs; NORMS: results whose squares are summed."""
    ARRAYS: tl.constexpr = len(ELEMENTS)
    b = tl.program_id(0)
    t = tl.load(TENSOR + b)
    start = tl.load(INDEX + b).to(tl.int64) * BLOCK
    n = tl.load(SIZES + t)
    at = tl.arange(0, BLOCK)
    live = at < (n - start)
    where = ()
    for j in tl.static_range(ARRAYS):
        base = tl.load(ADDRESS + j * T + t)
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        pointer = base.to(tl.pointer_type(ELEMENTS[j])) + start + at
        where = where + (pointer,)
    s = ()
    for j in tl.static_range(NUMS):
        s = s + (tl.load(NUMBERS + t * (NUMS + 1) + j).to(F),)
    scale = tl.load(NUMBERS + t * (NUMS + 1) + NUMS).to(F)
    out = PARTIAL + b * len(NORMS)
    if n - start >= BLOCK:
        one_block(where, s, scale, live, out, rule, False, ELEMENTS, GRADIENT, STORES, NORMS, SINGLE, F)
    else:
        one_block(where, s, scale, live, out, rule, True, ELEMENTS, GRADIENT, STORES, NORMS, SINGLE, F)


@triton.jit
def fold(PARTIAL, FIRST, OUT, S: tl.constexpr, WIDTH: tl.constexpr):
    """Sum a tensor's partial sums in order and take the root: program (tensor, norm)."""
    t, k = tl.program_id(0), tl.program_id(1)
    lo, hi = tl.load(FIRST + t), tl.load(FIRST + t + 1)
    total = tl.zeros((WIDTH,), tl.float64)
    while lo < hi:
        at = lo + tl.arange(0, WIDTH)
        total += tl.load(PARTIAL + at * S + k, mask=at < hi, other=0.0).to(tl.float64)
        lo += WIDTH
    tl.store(OUT + k * tl.num_programs(0) + t, tl.sqrt(tl.sum(total)))


# ---- tables -------------------------------------------------------------------------------------------------------------
class Tables:
    """What the kernel reads about tensors of one storage type: sizes, blocks, addresses."""

    def __init__(self, indices: list[int], sizes: list[int], device: torch.device):
        self.indices, self.device = indices, device
        blocks = [-(-sizes[i] // BLOCK) for i in indices]
        first = [0, *itertools.accumulate(blocks)]
        self.blocks = first[-1]
        counts = torch.tensor(blocks, device=device)
        self.tensor = torch.repeat_interleave(torch.arange(len(indices), dtype=torch.int32, device=device), counts)
        starts = torch.repeat_interleave(torch.tensor(first[:-1], device=device), counts)
        self.index = (torch.arange(self.blocks, device=device) - starts).to(torch.int32)
        self.first = torch.tensor(first, dtype=torch.int64, device=device)
        self.sizes = torch.tensor([sizes[i] for i in indices], dtype=torch.int64, device=device)
        self.known: dict[Any, tuple[list[list[int]], torch.Tensor, bool]] = {}

    def addresses(self, key: Any, arrays: list[Any], moving: list[int]) -> tuple[torch.Tensor, bool]:
        """The address table of these arrays, sent anew only if one of the `moving` ones (parameters, gradients) has moved; and
        whether all are aligned to 16 bytes."""
        places = [[arrays[j][i].data_ptr() for i in self.indices] for j in moving]
        known = self.known.get(key)
        if known is None or known[0] != places:
            every = [array[i].data_ptr() for array in arrays for i in self.indices]
            table = torch.tensor(every, dtype=torch.int64, pin_memory=self.device.type == "cuda").to(
                self.device, non_blocking=True
            )
            known = self.known[key] = (places, table, all(place % 16 == 0 for place in every))
        return known[1], known[2]


class Plan:
    """What is kept for a bundle: tables for each combination of storage types."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device):
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self.device = device
        self.roots = torch.tensor(self.sizes, dtype=torch.float64, device=device).sqrt()
        self.tables: dict[Any, list[Tables]] = {}

    def split(self, arrays: list[Any], moving: list[int]) -> list[Tables]:
        """Tables per combination of storage types; only parameters and gradients come in several."""
        kinds = [*zip(*([tensor.dtype for tensor in arrays[j]] for j in moving), strict=True)] or [()] * len(self.sizes)
        key = tuple(kinds) if len(set(kinds)) > 1 else kinds[0]
        if key not in self.tables:
            groups: dict[Any, list[int]] = {}
            for i, kind in enumerate(kinds):
                groups.setdefault(kind, []).append(i)
            self.tables[key] = [Tables(indices, self.sizes, self.device) for indices in groups.values()]
        return self.tables[key]


class Triton(Torch):
    """CUDA devices with Triton installed."""

    name = "triton"

    def live(self, spec: Any) -> str:
        rest = "; matrices through torch" if spec.matrix else ""
        return f"triton: {self.device}, {str(self.dtype).removeprefix('torch.')} arithmetic, one launch a pass{rest}"

    def values(self, bundle: Any) -> Values:
        if bundle.spec.matrix:
            return super().values(bundle)
        if bundle.plan is None:
            bundle.plan = Plan(bundle.shapes, self.device)
        arrays = {}
        for name, each in bundle.buffers.items():
            arrays[name] = Tensors(each, bundle.slots[name].drop if name in bundle.slots else ())
        return Values(arrays, **bundle.numbers, scale=bundle.scale, plan=bundle.plan)

    def run(self, bundle: Any, update: Any) -> Values:
        if bundle.spec.matrix:
            return super().run(bundle, update)
        with torch.no_grad():
            before = self.values(bundle)
            x = update(self, before)
            for name in bundle.written():
                if x[name] is not before[name]:  # made by the torch engine; a sweep writes in place
                    for buffer, value in zip(bundle.buffers[name], x[name], strict=True):
                        self.store(buffer, value)
        return x

    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        plan = x.get("plan")
        if plan is None:
            return super().map(rule, x, **reduce)
        takes, gives = signature(rule)
        by_row = any("_" in kind for kind in reduce.values()) or any(isinstance(x[n], Tensors) and x[n].drop for n in takes)
        stored = all(name in takes or name in reduce for name in gives)
        if by_row or not stored or not all(t.is_contiguous() for n in ("p", "g") if n in takes for t in x[n]):  # state always is
            return super().map(rule, self._widened(x, takes), **reduce)
        return self._sweep(plan, rule, x, reduce)

    def _widened(self, x: Values, names: tuple[str, ...]) -> Values:
        """For the torch engine: arrays in this engine's arithmetic, the gradient scaled."""
        wide = {}
        for name in names:
            if isinstance(x[name], Tensors):
                each = [t.to(self.dtype) * x.scale if name == "g" and x.scale != 1.0 else t.to(self.dtype) for t in x[name]]
                wide[name] = Tensors(each, x[name].drop)
        return x.set(**wide)

    def _sweep(self, plan: Plan, rule: Rule, x: Values, reduce: dict[str, str]) -> Values:
        takes, gives = signature(rule)
        names = [name for name in takes if isinstance(x[name], Tensors)]
        numbers = [name for name in takes if not isinstance(x[name], Tensors)]
        assert (*names, *numbers) == takes, f"{rule.__name__}: arrays come before numbers"
        arrays, moving = [x[name] for name in names], [j for j, name in enumerate(names) if name in ("p", "g")]
        stores = tuple((k, names.index(name)) for k, name in enumerate(gives) if name not in reduce)
        norms = tuple(k for k, name in enumerate(gives) if name in reduce)
        table = self._numbers([*(x[name] for name in numbers), x.scale], len(plan.sizes))
        found = torch.empty((len(norms), len(plan.sizes)), dtype=torch.float64, device=self.device) if norms else None
        for tables in plan.split(arrays, moving):
            n = len(tables.indices)
            address, aligned = tables.addresses(rule, arrays, moving)
            mine = table if n == len(plan.sizes) else table[tables.indices].contiguous()
            partial = torch.empty((tables.blocks, len(norms)), dtype=self.dtype, device=self.device) if norms else table
            elements = tuple(TYPES[array[tables.indices[0]].dtype] for array in arrays)
            sweep[(tables.blocks,)](
                address, tables.sizes, tables.tensor, tables.index, mine, partial, n,
                bound(rule), elements, len(numbers), names.index("g") if "g" in names else -1, stores, norms,
                len(gives) == 1, aligned, TYPES[self.dtype], BLOCK, num_warps=4,
            )  # fmt: skip
            if norms:
                out = torch.empty((len(norms), n), dtype=torch.float64, device=self.device)
                fold[(n, len(norms))](partial, tables.first, out, len(norms), 1024)
                found[:, tables.indices] = out
        result = {}
        for row, k in enumerate(norms):
            result[gives[k]] = found[row] / plan.roots if reduce[gives[k]] == "rms" else found[row]
        return x.set(**result)

    def _numbers(self, values: list[Any], n: int) -> torch.Tensor:
        """A table on the device with a row of numbers per tensor. Reductions are there already and stay there."""
        host = np.empty((n, len(values)))
        for j, value in enumerate(values):
            if not torch.is_tensor(value):
                host[:, j] = value
        table = torch.from_numpy(host)
        if self.device.type == "cuda":
            table = table.pin_memory()
        table = table.to(self.device, non_blocking=True)
        for j, value in enumerate(values):
            if torch.is_tensor(value):
                table[:, j] = value
        return table
