"""The cpu engine itself: bundles become address tables, `map` becomes one compiled pass over them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import storage, threads
from ...engine import Bundle, count_reduced, without
from ...language import Reduction, Rule, signature
from ...pointers import address
from ...program import Drop, Each, Pass, Values
from ...recent import Recent
from ...rounding import EXACT, NEAREST
from ...spec import Shape, Spec
from .finite import are_finite
from .kernels import CHUNK, Layout, compile_kernel
from .matrices import CpuArrays
from .runtime import WORTHWHILE, Call

GRAIN = 16384  # elements of a chunk: fixed, so that sums do not depend on the number of threads
CHOICES = 8  # selections of a plan's tensors whose chunks are kept


class Kernel:
    """A compiled rule with its tables, ready to run on a set of tensors of given domain shapes, or on some of them."""

    def __init__(self, rule: Rule, layout: Layout, shapes: Sequence[Shape], own: Sequence[Any] = (), grain: int = GRAIN):
        """own: the last numbers of each tensor, which never change. grain: elements of a chunk."""
        self.layout = layout
        self.kernel = compile_kernel(rule, layout)
        self.chunks = np.array(chunk_table(shapes, layout, grain), np.int64).reshape(-1, len(CHUNK))
        stored = [how for how in layout.gives if not isinstance(how, Reduction)]
        self.moved = len([how for how in layout.takes if how in ("full", "scaled")]) + len(stored)  # arrays
        columns = len(layout.over_columns)
        self.addresses = np.zeros((len(shapes), layout.width), np.int64)
        self.numbers = np.ones((len(shapes), layout.takes.count("number") + layout.extra_numbers))
        self.given = self.numbers.shape[1] - len(own)  # how many of them a step gives
        for j, value in enumerate(own, self.given):
            self.numbers[:, j] = value
        self.partial = np.zeros((len(self.chunks), len(layout.over_tensors)))
        self.scratch = np.empty(int((self.chunks[:, 4]).sum()) * columns if columns else 0)
        self.tables = [address(a) for a in (self.addresses, self.numbers)]
        self.results = [address(a) for a in (self.partial, self.scratch)]
        self.every = Chunks(self, self.chunks)
        self.row = (ctypes.c_double * self.given).from_buffer(self.numbers.data) if len(shapes) == 1 else None

    def choose(self, rows: np.ndarray) -> Chunks:
        """The chunks of these tensors."""
        wanted = np.zeros(len(self.addresses), bool)
        wanted[rows] = True
        return Chunks(self, self.chunks[wanted[self.chunks[:, 0]]])

    def set_numbers(self, values: list[Any], rows: np.ndarray | None = None) -> None:
        """Fill the table of numbers: each value a float, or an array with one per tensor."""
        for j, value in enumerate(values):
            self.numbers[slice(None) if rows is None else rows, j] = value

    def run(self, chunks: Chunks | None = None) -> None:
        chunks = chunks or self.every
        chunks.call.run(chunks.elements, chunks.elements * self.moved)

    def over_tensors(self, chunks: Chunks) -> list[np.ndarray]:
        """Per reduction one number per tensor, not finished: chunks added up (or the largest taken) in a fixed order."""
        how, partial = [each for _, each in self.layout.over_tensors], self.partial[: len(chunks.table)]
        return [(np.maximum if each.largest else np.add).reduceat(partial[:, k], chunks.starts) for k, each in enumerate(how)]

    def fold_columns(self, out: list[list[np.ndarray]], chunks: Chunks) -> None:
        """Finish the reductions of columns: the chunks of each matrix together, in order."""
        for k, ((_, how), arrays) in enumerate(zip(self.layout.over_columns, out, strict=True)):
            join = np.maximum if how.largest else np.add
            total = self.scratch[:0]
            for tensor, first, last, rows, columns, offset in chunks.table.tolist():
                sums = self.scratch[offset + k * columns : offset + (k + 1) * columns]
                total = sums if first % rows == 0 else join(total, sums, out=total)
                if last % rows == 0:
                    begin = first // rows * columns
                    done = total / rows if how.mean else total
                    arrays[tensor].reshape(-1)[begin : begin + columns] = np.sqrt(done) if how.root else done


class Chunks:
    """The chunks of the tensors that a kernel runs on."""

    def __init__(self, kernel: Kernel, table: np.ndarray):
        self.table = table
        work = (table[:, 2] - table[:, 1]) * (table[:, 4] if kernel.layout.by_row else 1)
        self.elements = int(work.sum())
        self.starts = np.flatnonzero(np.diff(table[:, 0], prepend=-1))  # the first chunk of each tensor
        together = max(1, GRAIN * len(table) // max(1, self.elements))  # small ones that a thread takes at once
        self.call = Call(kernel.kernel, *kernel.tables, address(table), len(table), *kernel.results, together)


def chunk_table(shapes: Sequence[Shape], layout: Layout, grain: int = GRAIN) -> list[tuple[int, ...]]:
    """Return chunks of about `grain` elements, tensor by tensor. A chunk of rows stays within one matrix."""
    table: list[tuple[int, ...]] = []
    scratch, columns_out = 0, len(layout.over_columns)
    for tensor, shape in enumerate(shapes):
        if not layout.by_row:
            size = math.prod(shape)
            table += [(tensor, lo, min(lo + grain, size), 1, 1, 0) for lo in range(0, size, grain)]
            continue
        columns = shape[-1]
        rows = shape[-2] if len(shape) > 1 else 1
        # a chunk that sums columns has a row of scratch of its own: keep those few
        height = max(1, grain // columns, min(rows, 64) if columns_out else 1)
        for matrix in range(math.prod(shape[:-2])):
            for lo in range(0, rows, height):
                table.append((tensor, matrix * rows + lo, matrix * rows + min(lo + height, rows), rows, columns, scratch))
                scratch += columns * columns_out
    return table


class CompiledPass:
    """A pass of a bundle's program: its kernel, and where the kernel's addresses and numbers come from."""

    def __init__(self, plan: CompiledProgram, step: Pass, engine: Cpu):
        self.step, self.shapes = step, plan.shapes
        program, places = plan.program, dict(step.stores)

        def kind(n: int) -> str:
            if n not in program.drops:
                return "number"
            missing = set(program.drops[n]) - set(step.domain)
            if not missing:
                return "scaled" if n == program.inputs.get("g") else "full"
            if len(missing) == 2:
                return "matrix"
            return "column" if missing == {-2} and -1 not in step.domain else "row"

        held: dict[str | int, int] = {}  # the argument that a buffer is
        for j, n in enumerate(step.takes):
            if n in plan.buffer:
                held[plan.buffer[n]] = j
        reduced = {n: (result, how) for result, n, how in step.reduces}
        gives: list[Any] = [reduced[n][1] if n in reduced else held.get(places[n], "store") for n in step.gives]
        coded = tuple(plan.storages.get(plan.buffer.get(n, ""), storage.EXACT) for n in step.takes)
        p = program.inputs.get("p")
        layout = Layout(
            tuple(map(kind, step.takes)), tuple(gives), engine.stored.name, engine.precision, coded if any(coded) else (),
            plan.half, step.takes.index(p) if plan.half and p in step.takes else -1, plan.rounding if plan.half else NEAREST,
        )  # fmt: skip
        self.ticks = layout.extra_numbers > 1
        own: list[Any] = []  # numbers that never change: the first place of a tensor's state; key and first of its parameter
        if self.ticks:
            halves = [half for half in plan.bundle.roundings if half is not None] if layout.stochastic else []
            first = plan.bundle.firsts if storage.HALF in layout.coded else 0.0
            own = [first, *zip(*((half.key, half.first) for half in halves), strict=True)]
        self.kernel = Kernel(step.rule, layout, [without(shape, step.domain) for shape in plan.shapes], own)
        self.sources = [plan.addresses[plan.buffer.get(n, n)] for n in step.takes if n in program.drops]
        self.columns: list[list[np.ndarray]] = []
        for k in layout.own_arrays:
            n = step.gives[k]
            place: Any = reduced[n][0] if n in reduced else places[n]
            if place not in plan.addresses:
                plan.allocate_scratch(place, program.drops[place], engine.stored)
            self.sources.append(plan.addresses[place])
            if n in reduced and reduced[n][1].axis == -2:
                self.columns.append(plan.scratch[place])
        self.sources += [plan.addresses[f"{plan.buffer[step.takes[j]]}_scale"] for j in layout.scaled]
        if layout.has_low_half:
            self.sources.append(plan.addresses["p low"])
        self.numbers = [n for n in step.takes if n not in program.drops]
        self.over_tensors = []  # (result, how, over how many coordinates of each tensor)
        for k, how in layout.over_tensors:
            counts = np.array([count_reduced(shape, step.domain, how) for shape in plan.shapes], np.float64)
            self.over_tensors.append((reduced[step.gives[k]][0], how, counts))
        self.refresh()

    def refresh(self) -> None:
        for slot, addresses in enumerate(self.sources):
            self.kernel.addresses[:, slot] = addresses

    def run(self, found: dict[int, Any], scale: float, tick: Any, engine: Cpu, chosen: RowSelection | None) -> None:
        rows, kernel = (None, self.kernel) if chosen is None else (chosen.rows, self.kernel)
        chunks = kernel.every if chosen is None else chosen.chunks(kernel)
        kernel.set_numbers([*[found[n] for n in self.numbers], scale, *([tick] if self.ticks else [])], rows)
        kernel.run(chunks)
        if self.columns:
            kernel.fold_columns(self.columns, chunks)
        if self.over_tensors:
            for (result, how, counts), sums in zip(self.over_tensors, kernel.over_tensors(chunks), strict=True):
                counts = counts if rows is None else counts[rows]
                if how.everything:
                    found[result] = engine.finish_reduction(sums.max() if how.largest else sums.sum(), how, counts.sum())
                else:
                    found[result] = engine.finish_reduction(sums, how, counts)


class RowSelection:
    """Some tensors of a plan, and their chunks in each of its kernels."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows
        self.made: dict[Kernel, Chunks] = {}

    def chunks(self, kernel: Kernel) -> Chunks:
        if (found := self.made.get(kernel)) is None:
            found = self.made[kernel] = kernel.choose(self.rows)
        return found

    def of(self, values: Sequence[Any]) -> list[Any]:
        return [values[row] for row in self.rows]


class CompiledProgram:
    """What is kept for a bundle: the addresses of its buffers and of scratch, and the passes of its program, compiled. A step of
    some of its tensors reads a part of the same tables."""

    def __init__(self, bundle: Bundle, engine: Cpu):
        assert bundle.program is not None
        program = self.program = bundle.program
        self.bundle, self.engine, self.shapes = bundle, engine, bundle.shapes
        first = bundle.roundings[0] if bundle.roundings else None
        self.half, self.rounding = half_dtype(bundle), NEAREST if first is None else first.rounding
        self.scratch: dict[int, list[np.ndarray]] = {}
        self.addresses: dict[str | int, np.ndarray] = {}  # by buffer, or by the number of a value that is scratch
        self.storages = {name: kind for name, (kind,) in bundle.storages.items()}
        for name, arrays in bundle.buffers.items():
            parts = list_components(arrays) if name in self.storages else {"": arrays}
            for end, each in parts.items():
                self.addresses[name + end] = np.array(
                    [address(a) for a in each] if name in bundle.slots else [0] * len(self.shapes)
                )
        if self.half and self.rounding == EXACT:
            self.addresses["p low"] = np.array([address(half.low) for half in bundle.roundings if half is not None])
        self.buffer: dict[int, str] = {n: name for name, n in program.inputs.items() if n in program.drops}
        self.buffer |= {n: place for step in program.passes for n, place in step.stores if isinstance(place, str)}
        self.version = -1  # of the pointers whose addresses these are
        self.steps: list[CompiledPass | Each] = []
        for step in program.steps:
            self.steps.append(CompiledPass(self, step, engine) if isinstance(step, Pass) else step)
        self.inputs = [(name, n) for name, n in program.inputs.items() if n not in program.drops and name not in bundle.slots]
        self.kept = [
            (n, bundle.buffers[name]) for name, n in program.inputs.items() if n not in program.drops and name in bundle.slots
        ]
        self.renewed = [(n, bundle.buffers[name]) for name, n in program.buffers.items() if n not in program.drops]
        only = self.steps[0] if len(self.steps) == 1 else None
        self.only = only if isinstance(only, CompiledPass) and not (only.over_tensors or only.columns or self.kept) else None
        by_number = {n: name for name, n in self.inputs}
        self.names = [] if self.only is None else [by_number[n] for n in self.only.numbers]
        self.chosen = Recent(CHOICES)

    def allocate_scratch(self, number: int, drop: Drop, stored: np.dtype) -> None:
        """Scratch for a value, one array per tensor."""
        arrays = self.scratch[number] = [np.empty(without(shape, drop), stored) for shape in self.shapes]
        self.addresses[number] = np.array([address(a) for a in arrays], np.int64)

    def refresh(self) -> None:
        """Take over the addresses of this call's arrays."""
        bundle, pointers = self.bundle, self.bundle.pointers
        for name in ("p", "g"):
            if name in bundle.buffers:
                if pointers is None:
                    self.addresses[name][:] = [address(a) for a in bundle.buffers[name]]
                else:
                    found = pointers.params if name == "p" else pointers.grads
                    self.addresses[name][:] = found if len(bundle.index) == pointers.n else found[bundle.index]
        for step in self.steps:
            if isinstance(step, CompiledPass):
                step.refresh()
        self.version = -1 if pointers is None else pointers.version

    def run(self, numbers: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
        bundle, rows = self.bundle, self.bundle.rows
        if self.half != half_dtype(bundle):  # this one is compiled for others
            return self.engine.compile_bundle(bundle).run(numbers, scale)
        if bundle.pointers is None or bundle.pointers.version != self.version:
            self.refresh()
        chosen = None if rows is None else self.chosen.find(rows.tobytes(), lambda: RowSelection(rows))
        if self.only is not None:  # one pass, and no number but those that are given
            values = [numbers[name] for name in self.names]
            values.append(scale)
            if self.only.ticks:
                values.append(numbers["_rng_step"])
            kernel = self.only.kernel
            if kernel.row is not None:
                kernel.row[:] = values
            else:
                kernel.set_numbers(values, rows)
            kernel.run(None if chosen is None else chosen.chunks(kernel))
            return {}
        found: dict[int, Any] = {n: numbers[name] for name, n in self.inputs}
        kept = self.kept if chosen is None else [(n, chosen.of(each)) for n, each in self.kept]
        found |= {n: np.array(each, np.float64) for n, each in kept}
        for step in self.steps:
            if isinstance(step, CompiledPass):
                step.run(found, scale, numbers.get("_rng_step"), self.engine, chosen)
            else:
                with np.errstate(all="ignore"):
                    self.engine.run_function(step, found)
        for n, each in self.renewed:
            buffers = each if chosen is None else chosen.of(each)
            for buffer, value in zip(buffers, np.broadcast_to(found[n], len(buffers)).tolist(), strict=True):
                buffer[()] = value
        return {name: found[n] for name, n in self.program.given.items()}


def half_dtype(bundle: Bundle) -> str:
    """The type of 16 bits that a bundle's parameters and gradients have, all of them; "" where they are as they are stored."""
    if bundle.pointers is None:
        return ""
    found: str = bundle.pointers.half_dtypes[bundle.index[0 if bundle.rows is None else bundle.rows[0]]]
    return found


def list_components(buffers: Sequence[Any]) -> dict[str, list[np.ndarray]]:
    """The parts of slots in fewer bits, by what is added to their name: one array per tensor."""
    return {end: [each.components[end] for each in buffers] for end in buffers[0].components}


class Cpu(CpuArrays):
    """LLVM for what goes coordinate by coordinate, BLAS and LAPACK for matrices; float32 arithmetic unless asked for more."""

    name = "cpu"

    def __init__(self, precision: str = "float32", stored: str = "float32"):
        """precision: of the arithmetic; stored: of parameters, gradients and state."""
        self.precision, self.dtype = precision, np.dtype(precision)
        self.stored = np.dtype(stored)

    def describe(self, spec: Spec) -> str:
        how = f"cpu: compiled by LLVM, {self.precision} arithmetic, {threads.get_threads()} threads "
        how += f"for passes that move {WORTHWHILE * self.stored.itemsize / 1e6:.1f} MB or more, one thread below"
        return how + ("; matrices through BLAS and LAPACK" if spec.matrix else "")

    # bundles -------------------------------------------------------------------------------------------------------
    def all_finite(self, grads: Sequence[np.ndarray]) -> bool:
        places, sizes = np.array([address(g) for g in grads], np.int64), np.array([g.size for g in grads], np.int64)
        return are_finite(places, sizes, self.stored.name)

    def compiles(self, bundle: Bundle) -> bool:
        """Whether the passes of a bundle are compiled."""
        return bundle.program is not None and bundle.coded_in_passes

    def takes_rows(self, bundle: Bundle) -> bool:
        return self.compiles(bundle)

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        if not self.compiles(bundle):
            with threads.blas():
                return super().run(bundle, move)
        if bundle.plan is None:
            self.compile_bundle(bundle)
        report: Mapping[str, Any] = bundle.plan.run(bundle.numbers, bundle.scale)
        return report

    def compile_bundle(self, bundle: Bundle) -> CompiledProgram:
        plan = bundle.plan = CompiledProgram(bundle, self)
        bundle.runner = plan.run
        return plan

    def values(self, bundle: Bundle) -> Values:
        """With the kernels of a matrix bundle's maps, made once."""
        if bundle.plan is None:
            bundle.plan = {}
        return super().values(bundle).set(_kernels=bundle.plan)

    # the compiled pass ---------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        """A rule on whole stacks: compiled too, into new arrays. What has one number per tensor, row or column is spread out."""
        takes, gives = signature(rule)
        values = [x[name] for name in takes]
        stacks = [v for v in values if isinstance(v, np.ndarray) and v.ndim]
        shape = np.broadcast_shapes(*(v.shape for v in stacks))
        arrays = [np.ascontiguousarray(v if v.shape == shape else np.broadcast_to(v, shape), self.dtype) for v in stacks]
        kinds = tuple("full" if isinstance(v, np.ndarray) and v.ndim else "number" for v in values)
        kept, key = x.get("_kernels", {}), (rule, kinds, shape)
        if (made := kept.get(key)) is None:
            layout = Layout(kinds, ("store",) * len(gives), self.precision, self.precision)
            made = kept[key] = Kernel(rule, layout, [shape])
        out = [np.empty(shape, self.dtype) for _ in gives]
        made.addresses[0] = [address(a) for a in (*arrays, *out)]
        made.numbers[0, :-1] = [v for v, kind in zip(values, kinds, strict=True) if kind == "number"]
        made.every.call.run(made.every.elements, 0)  # on one thread
        return x.set(**self.reduce_results(dict(zip(gives, out, strict=True)), reduce))
