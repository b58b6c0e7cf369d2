"""Matrix rules on the triton engine: stacks known by address, products in half precision or precise ones.

A matrix rule sees its tensors as a `LazyStack`, which is only stacked when somebody needs the stack, or as a `RaggedStack` where
their shapes differ.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ... import basis, linalg
from ...language import REDUCTIONS, Rule, signature, signature_of_numbers
from ...linalg import Coefficients
from ...program import Values, reorder_arguments
from ...spec import KEY
from ..torch_ import TorchEngine
from . import ahead, noise, panels, precise, products, replay
from .kernels import TENSOR
from .lazy_stack import LazyStack, RaggedStack, dense, same
from .tables import LaunchArgs, LaunchPlan, Pointers, Table, pointers_of

MIXED = 1 << 18  # entries of a matrix up to which it is stacked with those of other shapes


def left(u):
    p = u
    return p


def copied(source):
    target = source
    return target


def decided_in(numbers: Mapping[str, Any]) -> dict[str, bool]:
    """What a rule decided (`Spec.decisions`)."""
    return {name: bool(value) for name, value in numbers.items() if isinstance(value, (bool, np.bool_))}


def stacked(parts: list[Any]) -> Any:
    """Of nested tuples alike, one with stacks of what they have at each place."""
    if isinstance(parts[0], tuple):
        return tuple([stacked(list(each)) for each in zip(*parts, strict=True)])
    return dense(parts[0]) if len(parts) == 1 else torch.cat([dense(part) for part in parts])


def unstacked(found: Any, lengths: list[int]) -> list[Any]:
    if isinstance(found, tuple):
        return list(zip(*[unstacked(each, lengths) for each in found], strict=True))
    return list(found.split(lengths))


class TritonArrays(TorchEngine):
    """What `Triton` does with stacks; launches and tables are the engine's."""

    started: Any = None  # what the update that runs began with
    phase: tuple[bool, ...] = ()  # what it decided: each phase has tables of its own, as a graph has

    def _replayed(self, bundle: Any, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """A graph for each combination of decisions; what they and counters are is not read on the device."""
        plan, counts = bundle.plan, bundle.spec.counters().keys()
        self.set_pointers(bundle)
        read = [value for value in bundle.spec.values().values() if type(value) is not float]
        decided = decided_in(numbers)
        sent = {name: value for name, value in numbers.items() if name not in decided and name not in counts}
        if any(slot.meaning == KEY for slot in bundle.slots.values()):  # noise is drawn by the step
            sent["_t"] = bundle.t

        phase = tuple(decided.values())

        def run(now: Mapping[str, Any]) -> dict[str, Any]:
            self._matrices(bundle, {**decided, **now})
            return {}  # the values would keep gradients

        track = plan.cached("track", lambda: self._track(bundle.pointers))
        replayed = plan.cached(("replay", *phase), lambda: replay.Passes(self.device, len(bundle.shapes), bundle.pointers, track))
        replayed((plan.version, read), sent, run, lambda: self._maps(plan, phase), read)
        return {name: numbers[name] for name in counts}

    def _matrices(self, bundle: Any, numbers: Mapping[str, Any], move: bool = True) -> Values:
        """A step of a matrix rule."""
        self.started = start = self.values(bundle, numbers)
        self.phase = tuple(decided_in(numbers).values())
        x, flag = self.run_update(bundle, start, move), start["_flag"]
        self.started = None  # its stacks go
        for name in bundle.outputs():
            if not same(x[name], start[name]):  # what is not by address has been computed apart
                if (where := bundle.plan.where[name]).storage:
                    made = dense(x[name]).to(self.dtype).contiguous()
                    self._copy(bundle.plan, ("close", name, self.phase), pointers_of(made), where, start["_rng_step"], flag)
                    continue
                apart = dense(x[name]).reshape(-1, *bundle.buffers[name][0].shape)
                if flag is not None:
                    apart = torch.where(flag.reshape(()) == 0, apart, torch.stack(list(bundle.buffers[name])).to(apart.dtype))
                torch._foreach_copy_(list(bundle.buffers[name]), list(apart))
        return x

    def _copy(self, plan: LaunchPlan, key: Any, source: Pointers, target: Pointers, tick: Any, flag: Any = None) -> None:
        """From codes or into them."""
        args = LaunchArgs.of([source, target], 1, ((0, 1),))
        plan.mapped[key] = args.arrays
        self._launch(plan, key, copied, args, [tick], (), (), [], 1, 1.0, flag)

    def _opened(self, plan: LaunchPlan, name: str, pile: LazyStack) -> torch.Tensor:
        """The stack of a pile of codes."""
        stack = torch.empty(pile.shape, dtype=self.dtype, device=self.device)
        self._copy(plan, ("open", name, self.phase), pile.pointers, pointers_of(stack), 0)
        return stack

    def _track(self, pointers: Any) -> replay.Track:
        """The next in turn of those that a lane's stacks run on."""
        if len(pointers.tracks) < replay.TRACKS:
            pointers.tracks.insert(0, replay.Track(self.device))
        pointers.tracks.append(pointers.tracks.pop(0))
        return pointers.tracks[-1]

    def _replayable(self, bundle: Any, numbers: Mapping[str, Any]) -> bool:
        """Whether a step of a matrix rule is worth a graph of its own, whose memory stays."""
        can = sum(bundle.plan.sizes) <= replay.most(self.device) and bundle.spec.graph_safe() and self._standing_still(bundle)
        can = can and not any(map(torch.is_tensor, numbers.values())) and not any(numbers[name] for name in bundle.spec.syncs_on)
        decided = decided_in(numbers)
        if not can or not any(decided.values()):
            return can
        made = bundle.plan.made.get(("replay", *decided.values()))  # computes with all of the state
        state = len(bundle.shapes) * sum(math.prod(slot.shape) for slot in bundle.slots.values())
        return (made is not None and made.graph is not None) or replay.spare(self.device, state)

    def mixes(self, shape: Any) -> bool:
        """Small matrices, and those of which one alone leaves most of a device idle."""
        return super().mixes(shape) or (len(shape) == 2 and min(shape) >= products.LEAST and math.prod(shape) <= MIXED)

    def stack_size(self, shape: Any) -> int:
        """As many as a graph is kept for."""
        return max(1, replay.most(self.device) // max(1, math.prod(shape)))

    def _maps(self, plan: LaunchPlan, phase: tuple[bool, ...]) -> list[tuple[Table, list[Pointers]]]:
        """`_tables` of the maps of a matrix rule."""
        own = {key: arrays for key, arrays in plan.mapped.items() if key[-1] == phase}
        return [(self._pass(plan, key, arrays, len(plan.shapes)), arrays) for key, arrays in own.items()]

    def apply_commit(self, spec: Any, x: Values, move: bool = True) -> Values:
        if move:
            return super().apply_commit(spec, x)
        return self.map(left, x) if isinstance(x.u, RaggedStack) else x.set(p=dense(x.u))

    # what rules ask for -------------------------------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        """A rule on tensors of one shape. What is given back under the name of a pile is written where the pile's tensors are.
        Reductions, and rows or columns beside whole tensors or alone, are torch's."""
        plan = x.get("_plan")
        if plan is None:
            return super().map(rule, x, **reduce)
        takes, gives = signature(rule)
        ragged = any(isinstance(x[name], RaggedStack) for name in takes)
        piles = [] if ragged else [x[name] for name in takes if self._is_stack(x[name], plan)]
        sizes = {math.prod(pile.shape[1:]) for pile in piles}
        if not ragged and (reduce or sizes != {math.prod(plan.shapes[0])}):
            given = super().map(rule, Values({name: dense(x[name]) for name in takes}), **reduce)
            return x.set(**{name: given[name] for name in gives})
        n = len(plan.shapes)
        arrays, names, numbers, keep = [], [], [], []
        for name in takes:
            value = x[name]
            if isinstance(value, (LazyStack, RaggedStack)):
                arrays.append(value.pointers)
            elif self._is_stack(value, plan):
                keep.append(value := value.contiguous())
                arrays.append(pointers_of(value))
            else:
                numbers.append(value.reshape(-1) if torch.is_tensor(value) else value)
                continue
            names.append(name)
        out: dict[str, Any] = {}
        apart: dict[str, Pointers] = {}
        exact: dict[str, torch.Tensor] = {}
        for name in gives:
            if isinstance(x.get(name), (LazyStack, RaggedStack)) and x[name].each:  # a buffer of the bundle
                if plan.exact and x[name].pointers.storage:
                    exact[name] = torch.empty(x[name].shape, dtype=self.dtype, device=self.device)
                continue
            if ragged:
                out[name], apart[name] = plan.room(self.dtype)
            else:
                out[name] = torch.empty((n, *piles[0].shape[1:]), dtype=self.dtype, device=self.device)
                apart[name] = pointers_of(out[name])
        only = {name: x[name].pointers for name in gives if name not in out and name not in names} | apart  # are not read
        reads, every = len(arrays), [*arrays, *only.values(), *[pointers_of(stack) for stack in exact.values()]]
        where = {name: j for j, name in enumerate([*names, *only])}
        behind = {name: len(where) + j for j, name in enumerate(exact)}
        stores = [(k, where[name]) for k, name in enumerate(gives)] + [(k, behind[n]) for k, n in enumerate(gives) if n in exact]
        sums = (
            tuple([(k, TENSOR, True, False) for k, name in enumerate(gives) if name in out]) if "u" in out and not ragged else ()
        )
        kinds, key, ordered = [REDUCTIONS["norm"]] * len(sums), (rule, tuple(names), self.phase), self._arrays_first(rule, names)
        args = LaunchArgs.of(every, reads, tuple(stores))
        numbers = [*numbers, x["_rng_step"]] if args.ticks else numbers
        plan.mapped[key] = args.arrays
        found = self._launch(plan, key, ordered, args, numbers, (), sums, kinds, len(gives), x["_scale"], x["_flag"])
        norms = dict(zip(out, found, strict=True)) if sums else {}
        for name in gives:
            if name not in out:
                x[name].written(exact.get(name))
        if ragged:
            return x.set(**{name: RaggedStack((), apart[name], value, plan) for name, value in out.items()})
        return x.set(**{name: LazyStack.of(value, apart[name], norms.get(name), plan) for name, value in out.items()})

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
        return isinstance(value, LazyStack) or (torch.is_tensor(value) and value.ndim > 1 and value.numel() > len(plan.shapes))

    @staticmethod
    def _arrays_first(rule: Rule, arrays: list[str]) -> Rule:
        takes, _ = signature(rule)
        return rule if list(takes[: len(arrays)]) == arrays else reorder_arguments(rule, tuple(arrays))

    def by_shape(self, function: Any, X: Any) -> Any:
        """On the device, where shapes differ: so may be what it is multiplied with."""
        if not isinstance(X, RaggedStack):
            return super().by_shape(function, X)
        found = X.plan.cached(function, lambda: self.sender.send(np.array([function(*shape) for shape in X.plan.shapes])))
        return found

    def _padded(self, X: RaggedStack, steps: int, coefficients: Coefficients, eps: float) -> RaggedStack:
        """TritonArrays of many shapes, in few stacks."""
        room, where = X.plan.room(self.dtype)
        ahead.join(ahead.packing(self.device))
        ahead.join(ahead.shrinking(self.device))
        for small, sides, table in X.plan.stacks():
            if not small:
                ahead.join(ahead.multiplying(self.device))
            stack = torch.empty((len(table), *sides), dtype=self.dtype, device=self.device)
            products.packed(X.room, table, stack)
            orthogonalize = super().orthogonalize if small else self.orthogonalize
            done = orthogonalize(stack, steps, coefficients, eps)
            products.packed(room, table, done.to(self.dtype), out=True)
        return RaggedStack((), where, room, X.plan)

    def _compile_ahead(self, shape: Any) -> list[list[Any]]:
        """Threads that compile what Newton–Schulz on a stack of this shape launches."""
        rows, columns = shape[1], math.prod(shape[2:])
        if min(rows, columns) < products.LEAST or ahead.is_capturing(self.device):
            return []
        large = min(rows, columns) >= products.CONFIGS[0]["LEAST"]
        return [ahead.shrinking(self.device), ahead.multiplying(self.device, large, rows > columns)]

    def orthogonalize(self, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
        if isinstance(X, RaggedStack):
            return self._padded(X, steps, coefficients, eps)
        norm, plan = (X.norm, X.plan) if isinstance(X, LazyStack) else (None, None)
        whole = dense(X)
        X = whole.reshape(*whole.shape[:2], -1)
        if not products.pays(X):
            return super().orthogonalize(whole, steps, coefficients, eps)
        for threads in self._compile_ahead(X.shape):
            ahead.join(threads)
        norm = torch.linalg.vector_norm(X.flatten(1), dim=-1, dtype=torch.float64) if norm is None else norm
        alone = (
            plan is not None and plan.recorded and ("replay",) not in plan.made and replay.pays(X) and not self.sender.capturing()
        )
        if not alone:  # or in a graph already
            return products.orthogonalize(X, norm, steps, coefficients, eps).reshape(whole.shape)
        kept = plan.cached(("replay", X.shape, steps, coefficients), lambda: replay.Replay(X, steps, coefficients))
        return kept(X, norm, eps).reshape(whole.shape)

    def matmul(self, A: Any, B: Any) -> torch.Tensor:
        A, B = dense(A), dense(B)
        with products.rounding(A, B):
            return A @ B

    def matmul_sub(self, X: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        with products.rounding(A, B):
            return torch.baddbmm(X, A, B, alpha=-1)

    def matmul_precise(self, A: Any, B: Any, bound: float | None = None) -> torch.Tensor:
        A, B = dense(A), dense(B)
        return precise.product(A, B, bound) if precise.pays(A, B) else super().matmul_precise(A, B)

    def syrk(self, X: Any, bound: float | None = None) -> torch.Tensor:
        X = dense(X)
        return precise.square(X, bound) if precise.pays(X) and X.shape[1] % precise.SIDE == 0 else super().syrk(X)

    def average_gram(self, L: Any, X: Any, axis: int, beta: float, alpha: float) -> tuple[Any, Any]:
        """Where the matrices are."""
        n, flag = L.shape[-1], self.started["_flag"]
        alike = X.ndim == 3 and precise.pays(L) and n % precise.SIDE == 0 and set(L.pointers.dtypes) == {torch.float32}
        if not alike:
            return linalg.average_gram.default(self, L, X, axis, beta, alpha)
        table = self._pass(self.started["_plan"], ("gram", axis), [L.pointers], L.shape[0])
        ((address, _),) = table.addresses([L.pointers], self.sender)
        precise.average_gram(address, dense(X), axis == 2, beta, alpha, None if flag is None else flag.reshape(()) == 0)
        L.written()
        return L, L

    def column_dots(self, A: Any, B: Any) -> torch.Tensor:
        A, B = dense(A), dense(B)
        return panels.diagonal(A, B) if panels.plain(A, B) else basis.column_dots.default(self, A, B)

    def select_columns(self, X: torch.Tensor, near: torch.Tensor, free: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        if panels.plain(X, near):
            return panels.chosen(X, near, free, order)
        return basis.select_columns.default(self, X, near, free, order)  # type: ignore[no-any-return]

    def eigh(self, L: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first basis; what those after it need is compiled meanwhile."""
        L = dense(L)
        if precise.pays(L) and not ahead.is_capturing(self.device):
            ahead.bases(self.device)
        return super().eigh(L)

    panel_width = panels.WIDTH

    def orthonormalize_panel(self, X: torch.Tensor, noise: torch.Tensor | None = None) -> None:
        panels.orthonormal(X, X.new_zeros(X.shape[0], X.shape[2]) if noise is None else noise)

    def project_out(self, rest: torch.Tensor, first: torch.Tensor, after: Any = None, before: Any = None) -> None:
        if precise.pays(rest, first):
            shares = precise.product(first.mT, rest, 1)
            precise.joined(rest, first, shares, 1, 1.0, -1.0)
            if after is not None:
                panels.follow(after, shares, before)
                with products.tf32():
                    rest.baddbmm_(first, first.mT @ rest, alpha=-1)
        elif panels.takes(rest, first):
            for noise in (None,) if after is None else (after, None):
                panels.without(rest, first, noise, before)
        else:
            basis.project_out.default(self, rest, first, after, before)

    def orthonormalize(self, X: torch.Tensor, near: torch.Tensor, order: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Nothing waits for the device."""
        if precise.pays(X) and not ahead.is_capturing(self.device):
            ahead.join(ahead.bases(self.device))
        return basis.orthonormalize_by_products(self, X, near, order, free)

    def map_by_size(self, function: Any, stacks: Any) -> Any:
        """Axes of one size at once; those of different sizes beside each other, in a graph."""
        out = [{} for _ in stacks]
        sizes: dict[Any, list[tuple[int, int]]] = {}
        for k, stack in enumerate(stacks):
            for axis, Q in stack[0].items():
                sizes.setdefault(Q.shape[1:], []).append((k, axis))
        plan, aside = self.started["_plan"], []
        for n, _ in sizes if replay.recording() else ():
            made = functools.partial(torch.cuda.Stream, self.device, priority=replay.urgency(n))
            aside.append(plan.cached(("aside", n), made))
        with replay.branches(self.device, aside) as branch:
            for chosen in sizes.values():
                with branch():
                    parts = [tuple(of[axis] for of in stacks[k]) for k, axis in chosen]
                    found = function(*stacked(parts))
                for (k, axis), own in zip(chosen, unstacked(found, [part[0].shape[0] for part in parts]), strict=True):
                    out[k][axis] = own
        return [{axis: done[axis] for axis in stack[0]} for done, stack in zip(out, stacks, strict=True)]

    def derive_keys(self, keys: Any, seed: int, names: Any) -> torch.Tensor:
        return super().derive_keys(dense(keys), seed, names)

    def random(self, kind: str, keys: Any, t: Any, shape: Any) -> torch.Tensor:
        """The same words as everywhere, in one launch."""
        if self.dtype is not torch.float32:
            return super().random(kind, dense(keys), t, shape)
        return noise.draw(kind, dense(keys).contiguous(), t, shape)

    def to_float64(self, X: Any) -> torch.Tensor:
        return super().to_float64(dense(X))

    def norm(self, X: Any, order: float = 2) -> torch.Tensor:
        return super().norm(dense(X), order)

    def sum_squares(self, X: Any, axis: int) -> torch.Tensor:
        return super().sum_squares(dense(X), axis)

    def scale(self, X: Any, factors: Any) -> torch.Tensor:
        """What half precision gave is scaled where it is."""
        X = dense(X)
        return X.mul_(factors) if X.dtype is torch.float16 else X * factors

    def where(self, condition: Any, yes: Any, no: Any) -> torch.Tensor:
        return super().where(condition, dense(yes), dense(no))

    def moveaxis(self, X: Any, source: int, target: int) -> torch.Tensor:
        return super().moveaxis(dense(X), source, target)

    def take(self, X: Any, index: torch.Tensor, axis: int) -> torch.Tensor:
        return super().take(dense(X), index, axis)
