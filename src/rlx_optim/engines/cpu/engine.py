"""The cpu engine itself: bundles become address tables, `map` becomes one compiled pass over them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import threads
from ...engine import ArrayEngine, Bundle, Rule, Values, signature
from ...spec import Shape, Spec
from .kernels import CHUNK, Layout, compiled
from .orthogonal import WIDE, orthogonalize_wide
from .parallel import alone, alone_briefly, description, may_spread, spread
from .triangular import multiply, multiply_transposed, solve_transposed
from .watch import HeaderWatch, address, trusted

GRAIN = 16384  # elements of a chunk: fixed, so that sums do not depend on the number of threads
WORTHWHILE = 16384  # elements from which a second thread pays
LARGE = 512  # rows from which SciPy's QR is the faster one


class Handle:
    """One buffer per tensor of a bundle, by address. `drop` names the axes of the parameter that the buffers lack."""

    def __init__(self, plan: Plan, addresses: np.ndarray, drop: tuple[int, ...] = (), scaled: bool = False, owned: Any = None):
        self.plan, self.addresses, self.drop, self.scaled = plan, addresses, drop, scaled
        self.owned = owned  # keeps scratch alive


class Pass:
    """A kernel with its tables, ready to run on a set of tensors of given domain shapes."""

    def __init__(self, rule: Rule, layout: Layout, shapes: Sequence[Shape]):
        self.layout = layout
        self.kernel = compiled(rule, layout).address
        rows, starts = chunk_table(shapes, layout)
        self.chunks = np.array(rows, np.int64).reshape(-1, len(CHUNK))
        self.starts = np.array(starts, np.int64)
        self.sizes = np.array([math.prod(shape) for shape in shapes], np.float64)
        self.elements = int(self.sizes.sum())
        norms, columns = layout.count("norm", "rms"), layout.count("column_mean")
        width = len(layout.takes) - layout.takes.count("number") + len(layout.gives) - layout.count("norm", "rms", "update")
        self.addresses = np.zeros((len(shapes), width), np.int64)
        self.numbers = np.ones((len(shapes), layout.takes.count("number") + 1))
        self.partial = np.zeros((len(self.chunks), norms))
        self.scratch = np.empty(int((self.chunks[:, 4]).sum()) * columns if columns else 0)
        self.bounds, self.pieces = np.zeros(0, np.int64), 0
        self.tables = [address(a) for a in (self.addresses, self.numbers, self.chunks)]
        self.results = [address(a) for a in (self.partial, self.scratch)]
        self.whole = np.array([self.kernel, *self.tables, 0, len(self.chunks), *self.results], np.int64)
        self.where = address(self.whole)
        self.row = (ctypes.c_double * self.numbers.shape[1]).from_buffer(self.numbers.data) if len(shapes) == 1 else None

    def set_numbers(self, values: list[Any]) -> None:
        """Fill the table of numbers: each value a float, or an array with one per tensor."""
        for j, value in enumerate(values):
            self.numbers[:, j] = value

    def run(self) -> None:
        if self.elements < WORTHWHILE:
            alone_briefly(self.where)
            return
        count = threads.get_threads()
        if count < 2 or not may_spread():
            alone(self.where)
            return
        if count != self.pieces:
            self.pieces, self.bounds = count, even_bounds(self.chunks, self.layout, count)
        spread(self.kernel, *self.tables, address(self.bounds), count, *self.results, threads=count)

    def norms(self) -> np.ndarray:
        """Per tensor and reduction: the root of the sum of squares, summed in a fixed order."""
        return np.sqrt(np.add.reduceat(self.partial, self.starts, axis=0))

    def fold_columns(self, out: list[list[np.ndarray]]) -> None:
        """Finish column means: add up the chunks of each matrix, in order."""
        for k, arrays in enumerate(out):
            total = self.scratch[:0]
            for tensor, first, last, rows, columns, offset in self.chunks.tolist():
                sums = self.scratch[offset + k * columns : offset + (k + 1) * columns]
                if first % rows == 0:
                    total = sums
                else:
                    total += sums
                if last % rows == 0:
                    begin = first // rows * columns
                    arrays[tensor].reshape(-1)[begin : begin + columns] = total / rows


def chunk_table(shapes: Sequence[Shape], layout: Layout) -> tuple[list[tuple[int, ...]], list[int]]:
    """Chunks of about GRAIN elements, and the first chunk of each tensor. A chunk of rows stays within one matrix."""
    table: list[tuple[int, ...]] = []
    starts, scratch, columns_out = [], 0, layout.count("column_mean")
    for tensor, shape in enumerate(shapes):
        starts.append(len(table))
        if not layout.by_row:
            size = math.prod(shape)
            table += [(tensor, lo, min(lo + GRAIN, size), 1, 1, 0) for lo in range(0, size, GRAIN)]
            continue
        columns = shape[-1]
        rows = shape[-2] if len(shape) > 1 else 1
        # a chunk that sums columns has a row of scratch of its own: keep those few
        height = max(1, GRAIN // columns, min(rows, 64) if columns_out else 1)
        for matrix in range(math.prod(shape[:-2])):
            for lo in range(0, rows, height):
                table.append((tensor, matrix * rows + lo, matrix * rows + min(lo + height, rows), rows, columns, scratch))
                scratch += columns * columns_out
    return table, starts


def even_bounds(chunks: np.ndarray, layout: Layout, pieces: int) -> np.ndarray:
    """Where to cut the list of chunks so that each thread has about the same number of elements."""
    work = np.cumsum((chunks[:, 2] - chunks[:, 1]) * (chunks[:, 4] if layout.by_row else 1))
    cuts = np.searchsorted(work, work[-1] * np.arange(1, pieces) / pieces)
    return np.array([0, *np.maximum.accumulate(cuts), len(chunks)], np.int64)


class Plan:
    """What is kept for a bundle: handles of its buffers and the passes its update has made so far."""

    def __init__(self, bundle: Bundle):
        n = len(bundle.names)
        self.shapes = bundle.shapes
        self.handles: dict[str, Handle] = {}
        for name, arrays in bundle.buffers.items():
            own = name not in ("p", "g")
            addresses = np.array([address(a) for a in arrays], np.int64) if own else np.zeros(n, np.int64)
            drop = bundle.slots[name].drop if own else ()
            self.handles[name] = Handle(self, addresses, drop, scaled=name == "g")
        self.steps: dict[Rule, Step] = {}
        self.taken: list[Step | None] = []  # by the update now running; None for what is not a pass
        self.version = -1  # of the watch whose addresses these are

    def refresh(self, watch: Any, bundle: Bundle) -> None:
        """Take over the addresses of this call's arrays."""
        if watch is not None and watch.version == self.version:
            return
        for name in ("p", "g"):
            if name in self.handles:
                if watch is None:
                    self.handles[name].addresses[:] = [address(a) for a in bundle.buffers[name]]
                else:
                    found = watch.params if name == "p" else watch.grads
                    self.handles[name].addresses[:] = found if len(bundle.index) == watch.n else found[bundle.index]
        for step in self.steps.values():
            step.refresh()
        self.version = -1 if watch is None else watch.version


class Step:
    """A pass of an update: where its addresses and numbers come from, and what it makes anew."""

    def __init__(self, made: Pass, numbers: list[str], sources: list[tuple[int, Handle]], fresh: dict[str, Handle]):
        self.made, self.numbers, self.sources, self.fresh = made, numbers, sources, fresh
        self.reduces = made.layout.count("norm", "rms", "column_mean") > 0
        self.refresh()

    def refresh(self) -> None:
        for slot, handle in self.sources:
            self.made.addresses[:, slot] = handle.addresses

    def repeat(self, plan: Plan, bundle: Bundle) -> Callable[[Mapping[str, Any], float], None]:
        """The update as a function of its numbers, where it is this pass alone: no need to walk through it again."""
        names, watch, run, row, table = self.numbers, bundle.watch, self.made.run, self.made.row, self.made.numbers

        def shot(numbers: Mapping[str, Any], scale: float) -> None:
            if watch.version != plan.version:
                plan.refresh(watch, bundle)
            values = [numbers[name] for name in names]
            values.append(scale)
            if row is not None:
                row[:] = values
            else:
                table[:] = values
            run()

        return shot


class Cpu(ArrayEngine):
    """numba for what goes coordinate by coordinate, BLAS and LAPACK for matrices; float32 arithmetic unless asked for more."""

    name = "cpu"

    def __init__(self, precision: str = "float32", stored: str = "float32"):
        """precision: of the arithmetic; stored: of parameters, gradients and state."""
        self.precision, self.dtype = precision, np.dtype(precision)
        self.stored = np.dtype(stored)

    def live(self, spec: Spec) -> str:
        how = f"cpu: compiled by numba, {self.precision} arithmetic, {threads.get_threads()} threads ({description()})"
        return how + ("; matrices through BLAS and LAPACK" if spec.matrix else "")

    # bundles -------------------------------------------------------------------------------------------------------
    def watch(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> HeaderWatch | None:
        return HeaderWatch(params, grads) if trusted() else None

    def finite(self, grads: Sequence[np.ndarray]) -> bool:
        arrays = [g for g in grads if g.size]
        if not arrays:
            return True
        check = Pass(vanishing, Layout(("full",), ("norm",), self.stored.name), [g.shape for g in arrays])
        check.addresses[:, 0] = [address(g) for g in arrays]
        check.run()
        return bool(np.isfinite(check.partial).all())

    def run(self, bundle: Bundle, update: Callable[[Any, Values], Values]) -> Values:
        if bundle.spec.matrix:
            with threads.blas():
                return super().run(bundle, update)
        plan = bundle.plan
        if plan is None:
            plan = bundle.plan = Plan(bundle)
        plan.refresh(bundle.watch, bundle)
        plan.taken = []
        x = update(self, Values(plan.handles, **bundle.numbers, scale=bundle.scale, plan=plan))
        if len(plan.taken) == 1 and plan.taken[0] is not None and not plan.taken[0].reduces and bundle.watch is not None:
            bundle.shot = plan.taken[0].repeat(plan, bundle)
        return x

    def wide(self, X: np.ndarray) -> np.ndarray:
        return X.astype(np.float64)

    def norm(self, X: np.ndarray, order: float = 2) -> np.ndarray:
        """Without a copy of X."""
        flat = X.reshape(X.shape[0], -1)
        norm: np.ndarray = np.sqrt(np.vecdot(flat, flat)) if order == 2 else np.maximum(flat.max(-1), -flat.min(-1))
        return norm.reshape(-1, *[1] * (X.ndim - 1))

    def where(self, condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
        whole = condition.all() and np.shape(yes) == np.broadcast_shapes(np.shape(condition), np.shape(no))
        return yes if whole else np.where(condition, yes, no)  # a copy less, nearly always

    def qr(self, X: np.ndarray, near: np.ndarray) -> np.ndarray:
        if X.shape[-1] < LARGE:
            return np.linalg.qr(X)[0]
        from scipy.linalg import qr

        return np.stack([qr(x, mode="economic", check_finite=False)[0] for x in X])

    def solve(self, R: np.ndarray, X: np.ndarray) -> np.ndarray:
        out = np.array(X, order="C")
        for r, x in zip(np.asarray(R, out.dtype), out, strict=True):
            solve_transposed(r, x)
        return out

    def upper(self, R: np.ndarray, X: np.ndarray) -> np.ndarray:
        out = np.empty(X.shape, self.dtype)
        for r, x, y in zip(R, X, out, strict=True):
            multiply(r, x, y)
        return out

    def upper_transposed(self, R: np.ndarray, X: np.ndarray) -> np.ndarray:
        out = np.empty(X.shape, self.dtype)
        for r, x, y in zip(R, X, out, strict=True):
            multiply_transposed(r, x, y)
        return out

    def orthogonalize(self, X: np.ndarray, steps: int, coefficients: tuple[float, float, float], eps: float) -> np.ndarray:
        tall = X.shape[1] > X.shape[2]
        wide = X.mT if tall else X
        if wide.shape[2] < WIDE * wide.shape[1]:
            plain: np.ndarray = super().orthogonalize(X, steps, coefficients, eps)
            return plain
        start = wide / (self.norm(wide) + eps)
        done = np.stack([orthogonalize_wide(matrix, steps, coefficients) for matrix in start])
        return done.mT if tall else done

    # the compiled pass -----------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        plan = x.get("plan")
        if plan is None:
            return self._map_stack(rule, x)
        step = plan.steps.get(rule)
        if step is None:
            step = plan.steps[rule] = self._prepare(plan, rule, x, reduce)
        plan.taken.append(step)
        made = step.made
        made.set_numbers([*[x[name] for name in step.numbers], x.scale])
        made.run()
        result: dict[str, Any] = dict(step.fresh)
        if step.reduces:
            _, gives = signature(rule)
            norms = iter(made.norms().T)
            for name, kind in zip(gives, made.layout.gives, strict=True):
                if kind in ("norm", "rms"):
                    norm = next(norms)
                    result[name] = norm if kind == "norm" else norm / np.sqrt(made.sizes)
            made.fold_columns([h.owned for n, h in step.fresh.items() if reduce.get(n) == "column_mean"])
        return x.set(**result)

    def each(self, function: Rule, x: Values) -> Values:
        x.plan.taken.append(None)
        with np.errstate(all="ignore"):
            return super().each(function, x)

    def _prepare(self, plan: Plan, rule: Rule, x: Values, reduce: dict[str, str]) -> Step:
        """A pass for this rule over the plan's tensors."""
        takes, gives = signature(rule)
        handles = [x[name] for name in takes if isinstance(x[name], Handle)]
        domain = tuple(d for d in handles[0].drop if all(d in h.drop for h in handles))

        def kind(value: Any) -> str:
            if not isinstance(value, Handle):
                return "number"
            missing = set(value.drop) - set(domain)
            if not missing:
                return "scaled" if value.scaled else "full"
            return "column" if missing == {-2} and -1 not in domain else "row"

        kinds = tuple(kind(x[name]) for name in takes)
        outcome = tuple(reduce.get(name, "update" if name in takes else "store") for name in gives)
        layout = Layout(kinds, outcome, self.stored.name, self.precision)
        shapes = [without(shape, domain) for shape in plan.shapes]
        made = Pass(rule, layout, shapes)
        sources = [(slot, h) for slot, h in enumerate(handles)]
        fresh: dict[str, Handle] = {}
        slot = len(handles)
        for name, how in zip(gives, layout.gives, strict=True):
            if how in ("norm", "rms", "update"):
                continue
            drop = (*domain, -2) if how == "column_mean" else domain if how == "store" else (*domain, -2 if -1 in domain else -1)
            arrays = [np.empty(without(shape, drop), self.stored) for shape in plan.shapes]
            handle = fresh[name] = Handle(plan, np.array([address(a) for a in arrays], np.int64), drop, owned=arrays)
            sources.append((slot, handle))
            slot += 1
        numbers = [name for name, each in zip(takes, kinds, strict=True) if each == "number"]
        return Step(made, numbers, sources, fresh)

    def _map_stack(self, rule: Rule, x: Values) -> Values:
        """A rule on whole stacks: compiled too, into new arrays."""
        takes, gives = signature(rule)
        values = [x[name] for name in takes]
        arrays = [np.ascontiguousarray(v, self.dtype) for v in values if isinstance(v, np.ndarray) and v.ndim]
        kinds = tuple("full" if isinstance(v, np.ndarray) and v.ndim else "number" for v in values)
        made = Pass(rule, Layout(kinds, ("store",) * len(gives), self.precision, self.precision), [arrays[0].shape])
        out = [np.empty(arrays[0].shape, self.dtype) for _ in gives]
        made.addresses[0] = [address(a) for a in (*arrays, *out)]
        made.numbers[0, :-1] = [v for v, kind in zip(values, kinds, strict=True) if kind == "number"]
        alone(made.where)  # on one thread: ours would go on spinning beside those of the matrix products that follow
        return x.set(**dict(zip(gives, out, strict=True)))


def without(shape: Shape, drop: tuple[int, ...]) -> Shape:
    """A shape less some of its last two axes."""
    kept = range(-len(shape), 0)
    return tuple(shape[axis] for axis in kept if axis not in drop)


def vanishing(g):  # type: ignore[no-untyped-def]
    zero = g - g  # NaN where g is not finite
    return zero
