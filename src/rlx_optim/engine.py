"""The engine protocol: what a place to run must offer, and what a rule may ask of it.

The optimizer hands an engine *bundles*: tensors that are stepped together, their state, the program of their update and the
numbers of this step. The engine executes the program and leaves the results in the bundle's buffers; how is its own business.
`ArrayEngine` does it with any library that looks like NumPy; a new engine usually starts from that class and overrides `apply`,
where the time goes. Matrix rules have no program: their `update` is called with the engine itself, and stacks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from . import ops, random, stats, storage
from .arrays import Arrays
from .language import REDUCTIONS, LanguageError, Reduction, Rule, signature, signature_of_numbers
from .program import Drop, Each, Pass, Program, Unsent, Values, reduced_axis, subtract, trace
from .rounding import ParamRounding
from .spec import Shape, Slot, Spec

Array = Any


# ---- rules in an engine's words -----------------------------------------------------------------------------------------
def bind(function: Rule, words: Mapping[str, Any]) -> Rule:
    """A copy of a rule (or of a spec's `scalars`) whose vocabulary means `words`. The original is untouched."""
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **words}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    return copy


def as_tuple(results: Any, names: Sequence[Any]) -> tuple[Any, ...]:
    """What a function of several results gave, or of one."""
    return results if len(names) > 1 else (results,)


def without(shape: Shape, drop: Drop) -> Shape:
    """A shape less some of its last two axes."""
    return tuple(n for axis, n in zip(range(-len(shape), 0), shape, strict=True) if axis not in drop)


def decomposition_error(bundle: Bundle, problem: Exception) -> ValueError:
    """Name the state in which LAPACK found no eigenvectors or no solution."""
    kept = [(slot, name, array) for slot in bundle.slots for name, array in zip(bundle.names, bundle.buffers[slot], strict=True)]
    lost = [(slot, name) for slot, name, array in kept if hasattr(array, "sum") and float((array * 0).sum()) != 0]
    which = "{!r} of {!r} holds NaN or infinity".format(*lost[0]) if lost else f"{', '.join(map(repr, bundle.names))}: {problem}"
    return bundle.spec.refuse(f"the state cannot be decomposed: {which}; load a good checkpoint, or start with new state")


# ---- bundles ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Bundle:
    """Tensors stepped together. Engines read `buffers` and write their results back into them.

    buffers: "p" and "g" (the caller's arrays, g never written) and one entry per slot, each a list with an array per tensor.
    program: what is to be done; None for matrix rules, whose spec is asked.
    numbers: the scalars of this step, a float each, or a float64 array with one per tensor.
    t: the step count of this step, of a captured one on the device; only of matrix bundles is it the same for all.
    pointers, index: the front end's table of addresses, if it has one, and which of its rows are this bundle's.
    rows: which tensors this step is of, None for all; others than all are for engines that take rows.
    plan: the engine's own, kept from step to step as long as the same tensors come together.
    runner: set by an engine that, given the numbers and the scale, can repeat the program by itself.
    with_stats: whether this step is to say what it did, by `stats`; then `run` gives that too.
    roundings: how each tensor is rounded, where parameters have 16 bits and are not rounded to nearest; an engine that is given
    them as they are does it.
    without_p: whether "p" is but where a matrix rule's direction is left: its `update` gets a stand-in that refuses to be read.
    """

    spec: Spec
    names: list[str]
    shapes: list[Shape]
    slots: dict[str, Slot]
    buffers: dict[str, Sequence[np.ndarray]]
    program: Program | None = None
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    t: Any = 0
    pointers: Any = None
    index: Any = None
    rows: Any = None
    plan: Any = None
    runner: Callable[[Mapping[str, Any], float], Any] | None = None
    with_stats: bool = False
    roundings: Sequence[ParamRounding | None] = ()
    without_p: bool = False

    def outputs(self) -> list[str]:
        return [name for name in self.buffers if name != "g"]

    def rng_steps(self) -> list[int]:
        """The step of each tensor, where chance may round."""
        steps: Any = self.numbers.get("_rng_step", 0)
        return [steps] * len(self.shapes) if np.ndim(steps) == 0 else steps.astype(np.int64).tolist()

    @functools.cached_property
    def firsts(self) -> list[int]:
        """Which place of a whole tensor each begins at, where its state may be coded (`storage.Quantized`)."""
        coded = next(each for name, each in self.buffers.items() if name in self.storages)
        return [each.first if isinstance(each, storage.Quantized) else 0 for each in coded]

    @functools.cached_property
    def storages(self) -> dict[str, set[str]]:
        """What its slots are kept in, those in fewer bits; several where tensors differ."""
        if self.spec.state_dtype == "float32":
            return {}
        found = {
            name: {each.storage if isinstance(each, storage.Quantized) else storage.EXACT for each in self.buffers[name]}
            for name in self.buffers.keys() & self.slots.keys()
        }
        return {name: kinds for name, kinds in found.items() if kinds != {storage.EXACT}}

    @functools.cached_property
    def coded_in_passes(self) -> bool:
        """Whether the passes of its program may decode what they read and encode what they write, where state is in fewer bits:
        it is the same for all tensors, read before it is written and not after, and beside no rows or columns. Else it is
        decoded before the program and encoded after."""
        program, coded = self.program, self.storages
        if program is None or not coded:
            return True
        read = {program.inputs[name] for name in coded}
        made = {n for step in program.passes for n, place in step.stores if place in coded}
        for step in program.passes:
            if not (read | made) & {*step.arrays, *step.gives}:
                continue
            lines = any(program.drops[n] for n in step.arrays) or any(how.axis is not None for _, _, how in step.reduces)
            blind = any(place in coded and program.inputs[place] not in step.arrays for _, place in step.stores)
            if lines or blind or made & {*step.arrays}:
                return False
        return all(len(kinds) == 1 for kinds in coded.values())


@runtime_checkable
class Engine(Protocol):
    """A place to run: `run` steps one bundle, the rest is service."""

    name: str

    def allocate(self, slot: Slot) -> Any:
        """A state buffer: an array, or `storage.Quantized` where the slot says so."""

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        """Do the bundle's step and leave the results in its buffers. A failure leaves them as they were. Of a matrix rule it
        gives the values at the end, by name, its counters among them; move=False leaves the direction u where p would be."""

    def stack_size(self, shape: Shape) -> int:
        """How many tensors of this shape a matrix rule should be given at once."""

    def all_finite(self, grads: Sequence[np.ndarray]) -> bool:
        """Whether every entry of every gradient is finite."""

    def describe(self, spec: Spec) -> str:
        """In words: what runs this spec here."""


@runtime_checkable
class Mixing(Protocol):
    """An engine that takes tensors of unequal shapes at once, for rules that do (`Spec.mixed_shapes`)."""

    def mixes(self, shape: Shape) -> bool:
        """Whether it should be given such a one together with others."""


@runtime_checkable
class TakingRows(Protocol):
    """An engine that steps some tensors of a bundle and leaves the others alone."""

    def takes_rows(self, bundle: Bundle) -> bool:
        """Whether it does so for this bundle, whose arrays it knows by address."""


class MixedShapes(list[Any]):
    """Tensors of unequal shapes, as a rule that takes such sees them (`Spec.mixed_shapes`)."""


# ---- an engine from any array library -----------------------------------------------------------------------------------
#: rules in each engine's words, as long as the engine lives
BOUND: weakref.WeakKeyDictionary[ArrayEngine, dict[Rule, Rule]] = weakref.WeakKeyDictionary()


class ArrayEngine(Arrays):
    """Runs every rule with an array library that follows NumPy."""

    name: ClassVar[str] = "array"
    copying: ClassVar[str] = "copy"  # the method of an array

    # the bundle ---------------------------------------------------------------------------------------------------
    def allocate(self, slot: Slot) -> Any:
        if slot.storage:
            return storage.Quantized(
                slot.storage, *(np.zeros(shape, self.types[dtype]) for shape, dtype in storage.components(slot).values())
            )
        if slot.eye:
            return np.diag(np.full(slot.shape[0], slot.fill, self.stored))
        return np.full(slot.shape, slot.fill, self.stored) if slot.fill else np.zeros(slot.shape, self.stored)

    def load(self, array: np.ndarray) -> Array:
        return self.xp.asarray(array, dtype=self.dtype)

    def store(self, buffer: np.ndarray, value: Array) -> None:
        np.copyto(buffer, np.asarray(value).reshape(buffer.shape), casting="unsafe")

    def load_decoded(self, buffer: Any) -> Array:
        """A buffer in this engine's arithmetic, decoded where it is kept in fewer bits."""
        return self.load(storage.decode(self, buffer) if isinstance(buffer, storage.Quantized) else buffer)

    def store_encoded(self, buffer: Any, value: Array, t: int) -> None:
        """Leave a value in a buffer, encoded where it is kept in fewer bits. t: the step."""
        if not isinstance(buffer, storage.Quantized):
            return self.store(buffer, value)
        made = storage.encode(self, buffer.storage, value.reshape(buffer.shape), t, buffer.first)
        for end, part in buffer.components.items():
            self.store(part, made[end])

    def load_buffers(self, bundle: Bundle) -> dict[str, list[Array]]:
        """The buffers in this engine's arithmetic."""
        loaded = {name: [self.load_decoded(a) for a in arrays] for name, arrays in bundle.buffers.items()}
        for name in loaded.keys() & {"p", "g"}:  # the caller's may be flat
            loaded[name] = [a.reshape(shape) for a, shape in zip(loaded[name], bundle.shapes, strict=True)]
        if bundle.scale != 1.0:
            loaded["g"] = [g * bundle.scale for g in loaded["g"]]
        return loaded

    def values(self, bundle: Bundle) -> Values:
        """What a matrix rule sees."""
        arrays: dict[str, Any] = {
            n: a[0][None] if len(a) == 1 else self.xp.stack(a) for n, a in self.load_buffers(bundle).items()
        }
        return Values(arrays, **bundle.numbers, t=bundle.t, names=bundle.names, seed=bundle.spec.values().get("seed"))

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        with np.errstate(all="ignore"):  # NaN and inf are the caller's business: see `nonfinite`
            x: Mapping[str, Any]
            if bundle.program is None:
                x = self.run_update(bundle, self.values(bundle), move)
                results = {name: x[name] for name in bundle.outputs()}
            else:
                program = bundle.program
                found = self.run_program(program, bundle.shapes, self.load_buffers(bundle), bundle.numbers)
                x = {name: found[number] for name, number in program.given.items()}
                results = self.collect_buffers(program, found, len(bundle.shapes))
            ticks = bundle.rng_steps()
            for name, values in results.items():
                for buffer, value, t in zip(bundle.buffers[name], values, ticks, strict=True):
                    self.store_encoded(buffer, value, t)
        return x

    def run_update(self, bundle: Bundle, start: Values, move: bool) -> Values:
        """The values of a matrix rule at the end, and what the step did where that was asked."""
        spec, p = bundle.spec, start["p"]
        x = start.set(p=Unsent(type(spec).__name__, start["g"])) if bundle.without_p else start
        try:
            x = spec.mask(self, self.resolve(spec.update(self, x)))
        except Exception as problem:
            if type(problem).__name__.strip("_") == "LinAlgError":  # NumPy's or torch's
                raise decomposition_error(bundle, problem) from problem
            raise
        x = x.set(p=p) if bundle.without_p else x
        report = stats.measure_stack(self, start, x, spec.commit(self, x).change) if bundle.with_stats else {}
        return self.apply_commit(spec, x, move).set(**report)

    def apply_commit(self, spec: Spec, x: Values, move: bool = True) -> Values:
        """The values of a matrix rule after its commit; or with u in the place of p."""
        if not move:
            return x.set(p=x.u)
        whole = trace_commit(spec, x)
        return self.map(subtract, spec.commit(self, x)) if whole is None else self.map(whole, x)

    def stack_size(self, shape: Shape) -> int:
        return 1

    def all_finite(self, grads: Sequence[np.ndarray]) -> bool:
        return all(bool(np.isfinite(g).all()) for g in grads)

    def describe(self, spec: Spec) -> str:
        return f"{type(self).__name__}: array by array in {np.dtype(self.dtype).name}"

    # programs -----------------------------------------------------------------------------------------------------
    @property
    def words(self) -> dict[str, Any]:
        shared_words = ("rsqrt", "abs", "clamp")
        return {word: getattr(ops if word in shared_words else self.xp, word) for word in ops.RULE}

    def bind_rule(self, rule: Rule) -> Rule:
        """A rule in the words of this engine, made once."""
        known = BOUND.setdefault(self, {})
        if rule not in known:
            known[rule] = bind(rule, self.words)
        return known[rule]

    def run_program(
        self, program: Program, shapes: Sequence[Shape], arrays: Mapping[str, Sequence[Array]], numbers: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Every value of a program by its number: of an array a list with one per tensor, of a number one for all or one each."""
        found: dict[int, Any] = {}
        for name, number in program.inputs.items():
            if name in arrays:
                found[number] = arrays[name] if number in program.drops else self.xp.stack(list(arrays[name]))
            elif name in numbers:
                found[number] = numbers[name]
        for step in program.steps:
            if isinstance(step, Pass):
                self.apply(program, step, shapes, found)
            else:
                self.run_function(step, found)
        return found

    def collect_buffers(self, program: Program, found: Mapping[int, Any], n: int) -> dict[str, Sequence[Array]]:
        """What p and the slots are at the end, by name: one for each of n tensors."""
        return {
            name: found[k]
            if k in program.drops
            else [self.broadcast_to(ArrayEngine.number_of(found[k], i), ()) for i in range(n)]
            for name, k in program.buffers.items()
        }

    def run_function(self, step: Each, found: dict[int, Any]) -> None:
        """A function on numbers, one per tensor."""
        self.keep_numbers(step, as_tuple(self.bind_rule(step.function)(*(found[n] for n in step.takes)), step.gives), found)

    def keep_numbers(self, step: Each, results: Sequence[Any], found: dict[int, Any]) -> None:
        found.update(zip(step.gives, results, strict=True))
        for n, how in step.reductions:
            if getattr(found[n], "ndim", 0):
                found[n] = self.amax(found[n]) if how.largest else found[n].mean()

    def apply(self, program: Program, step: Pass, shapes: Sequence[Shape], found: dict[int, Any]) -> None:
        """A pass over every coordinate of every tensor."""
        stored: dict[int, list[Array]] = {n: [] for n, _ in step.stores}
        raw: list[list[Array]] = [[] for _ in step.reduces]
        for i, shape in enumerate(shapes):
            local = {n: self.align_axes(found[n][i], program.drops[n], step.domain) for n in step.arrays}
            local |= {n: self.number_of(found[n], i) for n in step.numbers}
            given = [local[n] for n in step.takes]
            results = as_tuple(self.bind_rule(step.rule)(*given), step.gives)
            local |= {n: self.copy_if_given(value, given) for n, value in zip(step.gives, results, strict=True)}
            over = without(shape, step.domain)
            for n in stored:
                stored[n].append(self.broadcast_to(local[n], over))
            for sums, (_, n, how) in zip(raw, step.reduces, strict=True):
                sums.append(self.reduce_array(self.broadcast_to(local[n], over), how))
        found |= stored
        found |= self.finish_reductions(step, shapes, raw)

    @staticmethod
    def align_axes(array: Array, drop: Drop, domain: Drop) -> Array:
        """An array that lacks axes beside those that have them."""
        missing = set(drop) - set(domain)
        if missing == {-2} and -1 not in domain:
            return array[..., None, :]
        return array[(..., *[None] * len(missing))]

    def copy_if_given(self, value: Any, given: Sequence[Any]) -> Any:
        """A result, in memory of its own where it is an argument itself, which the step may overwrite."""
        return getattr(value, self.copying)() if hasattr(value, self.copying) and any(value is v for v in given) else value

    @staticmethod
    def number_of(value: Any, i: int) -> Any:
        return value if np.ndim(value) == 0 else value[i]

    def broadcast_to(self, value: Any, shape: Shape) -> Array:
        """A result over all coordinates, where a rule gave one for many."""
        return value if getattr(value, "shape", None) == shape else self.xp.broadcast_to(self.xp.asarray(value), shape)

    def reduce_array(self, array: Array, how: Reduction) -> Array:
        """A reduction before it is finished: the largest, or the sum of values or squares."""
        array = array * array if how.squared else array
        if how.largest:
            return self.amax(array, how.axis)
        return array.sum() if how.axis is None else array.sum(how.axis)

    def finish_reductions(self, step: Pass, shapes: Sequence[Shape], raw: Sequence[Sequence[Array]]) -> dict[int, Any]:
        """Reductions by the number of their result: of rows and columns a list, of tensors one each, of all tensors one."""
        out: dict[int, Any] = {}
        for (result, _, how), sums in zip(step.reduces, raw, strict=True):
            counts = [count_reduced(shape, step.domain, how) for shape in shapes]
            if how.everything:
                together = self.xp.stack(list(sums))
                out[result] = self.finish_reduction(self.amax(together) if how.largest else together.sum(), how, sum(counts))
            elif how.axis is None:
                out[result] = self.finish_reduction(self.xp.stack(list(sums)), how, self.column_of(counts))
            else:
                out[result] = [self.finish_reduction(each, how, n) for each, n in zip(sums, counts, strict=True)]
        return out

    def column_of(self, values: Sequence[float]) -> Any:
        """One number per tensor."""
        return np.asarray(values, np.float64)

    def finish_reduction(self, value: Any, how: Reduction, count: Any) -> Any:
        value = value / count if how.mean else value
        return self.xp.sqrt(value) if how.root else value

    # matrix updates: every array is a stack ---------------------------------------------------------------------------
    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        """Run a rule on every coordinate of stacks; its returned names replace or join the values. One that is reduced is left
        with axes of length 1, so that it lines up with the stack."""
        takes, gives = signature(rule)
        given = [x[name] for name in takes]
        if several := next((value for value in given if isinstance(value, MixedShapes)), None):
            rows = [[v[i] if isinstance(v, MixedShapes) else self.number_of(v, i) for v in given] for i in range(len(several))]
            found = [[self.copy_if_given(value, row) for value in as_tuple(self.bind_rule(rule)(*row), gives)] for row in rows]
            return x.set(**{name: MixedShapes(each) for name, each in zip(gives, zip(*found, strict=True), strict=True)})
        shape = np.broadcast_shapes(*(tuple(v.shape) for v in given if hasattr(v, "shape")))
        results = as_tuple(self.bind_rule(rule)(*given), gives)
        for k, name in enumerate(gives):
            fits = getattr(results[k], "shape", None) == shape
            x = x.set(**{name: self.copy_if_given(results[k], given) if fits else self.broadcast_to(results[k], shape)})
        return x.set(**self.reduce_results({name: x[name] for name in gives}, reduce))

    def reduce_results(self, results: dict[str, Any], reduce: Mapping[str, str]) -> dict[str, Any]:
        for name, kind in reduce.items():
            if kind not in REDUCTIONS or name not in results or REDUCTIONS[kind].everything:
                known = [each for each, how in REDUCTIONS.items() if not how.everything]
                raise LanguageError(f"{name}={kind!r}: a rule's result may be reduced by {', '.join(known)}")
            X, how = results[name], REDUCTIONS[kind]
            if how.axis is None:
                each, count = (
                    self.reduce_array(X.reshape(X.shape[0], -1), dataclasses.replace(how, axis=-1)),
                    math.prod(X.shape[1:]),
                )
                results[name] = self.finish_reduction(each, how, count).reshape(-1, *[1] * (X.ndim - 1))
            else:
                each = self.finish_reduction(self.reduce_array(X, how), how, X.shape[how.axis])
                results[name] = each[..., None] if how.axis == -1 else each[..., None, :]
        return results

    def each(self, function: Rule, x: Values) -> Values:
        """Run a function on numbers; its returned names replace or join the values."""
        takes, gives = signature_of_numbers(function)
        return x.set(**dict(zip(gives, as_tuple(self.bind_rule(function)(*(x[name] for name in takes)), gives), strict=True)))

    def by_shape(self, function: Callable[[int, int], float], X: Array) -> Any:
        """A number that follows from the rows and columns of the tensors of X, further axes being columns too. One per tensor
        where shapes differ."""
        if isinstance(X, MixedShapes):
            return self.column_of([function(each.shape[0], math.prod(each.shape[1:])) for each in X])
        return function(X.shape[1], math.prod(X.shape[2:]))

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        return yes(*operands) if predicate else no(*operands)

    def either(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        """`cond` where `yes` costs little and is seldom called for: an engine may compute both."""
        return self.cond(predicate, yes, no, *operands)

    def defer(self, function: Callable[..., Any], given: Any, then: Callable[..., Any]) -> Any:
        """then(*function([given])[0]), the last thing that an update does: an engine may call the function once for what several
        bundles of a rule give."""
        return then(*function([given])[0])

    def resolve(self, update: Any) -> Any:
        """An update with what it deferred, where no other bundle is waited for."""
        return update

    def derive_keys(self, keys: Array, seed: int, names: Sequence[str]) -> Array:
        """Keys of noise (B, 4), those of (seed, name) in place of zeros."""
        drawn = self.load(np.array([random.split_key(random.key(seed, name)) for name in names]))
        return self.where((keys == 0).all(-1)[:, None], drawn, keys)

    def random(self, kind: str, keys: Array, t: Any, shape: Shape) -> Array:
        """Noise of a stack's shape, drawn by each tensor's key and the step: "normal" or "uniform"."""
        return random.draw(self, kind, keys, t, math.prod(shape[1:])).reshape(shape)

    def probe(self, function: Callable[..., Any], x: Values) -> Array:
        """The caller's own noise in place of `random`."""
        return self.xp.stack([self.load(np.asarray(function(name, x.t, x.p.shape[1:]))) for name in x.names])


def count_reduced(shape: Shape, domain: Drop, how: Reduction) -> int:
    """How many coordinates a reduction is over."""
    if how.axis is None:
        return math.prod(without(shape, domain))
    return shape[reduced_axis(domain, how)]


def trace_commit(spec: Spec, x: Mapping[str, Any]) -> Rule | None:
    """The commit of a matrix rule as one rule of p, u and numbers; None where it measures in between."""
    steps = trace(spec, {}, "move", {name: x.get(name) for name in (*spec.committed, "rate")}).steps
    return steps[0].rule if len(steps) == 1 and isinstance(steps[0], Pass) else None
