"""The engine protocol: what a place to run must offer, and what a rule may ask of it.

The optimizer hands an engine *bundles*: tensors that are stepped together, their state, and the numbers of this step. The
engine runs `update(engine, values)` of the bundle's spec once and leaves the results in the bundle's buffers. How it runs it is
its own business. `ArrayEngine` does it with any library that looks like NumPy; a new engine usually starts from that class and
overrides `map`, where the time goes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from . import linalg, random, vocabulary
from .spec import Shape, Slot, Spec

Array = Any
Rule = Callable[..., Any]


# ---- rules ----------------------------------------------------------------------------------------------------------
@functools.cache
def signature(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names a rule takes and the names it returns. A returned name replaces the value it names."""
    code = rule.__code__
    tree = ast.parse(textwrap.dedent(inspect.getsource(rule)))
    returned = next(node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    names = returned.elts if isinstance(returned, ast.Tuple) else [returned]
    if not all(isinstance(name, ast.Name) for name in names):
        raise TypeError(f"{rule.__module__}.{rule.__qualname__} must return names, not expressions")
    return code.co_varnames[: code.co_argcount], tuple(name.id for name in names)  # type: ignore[union-attr]


def bind(function: Rule, words: Mapping[str, Any]) -> Rule:
    """A copy of a rule (or of a spec's `scalars`) whose vocabulary means `words`. The original is untouched."""
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **words}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    return copy


def bind_all(function: Rule, words: Mapping[str, Any]) -> Rule:
    """`bind` for a method of a spec: the words mean the same in the helpers of its file."""
    names = function.__globals__.items()
    helpers = {n: bind(f, words) for n, f in names if inspect.isfunction(f) and f.__module__ == function.__module__}
    return bind(function, {**helpers, **words})


# ---- values ---------------------------------------------------------------------------------------------------------
class Tensors(list[Array]):
    """One array per tensor of a bundle; `drop` names the axes of the parameter that these arrays lack."""

    def __init__(self, arrays: Sequence[Array], drop: tuple[int, ...] = ()):
        super().__init__(arrays)
        self.drop = drop


class Values(dict[str, Any]):
    """Everything an update may name: p, g, the state, the numbers. Never changed in place: `set` gives a new one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def set(self, **values: Any) -> Values:
        return Values({**self, **values})


@dataclasses.dataclass
class Bundle:
    """Tensors stepped together. Engines read `buffers` and write their results back into them.

    buffers: "p" and "g" (the caller's arrays, g never written) and one entry per slot, each a list with an array per tensor.
    numbers: the scalars of this step, a float each, or a float64 array with one per tensor.
    t: the step count of this step; only of matrix bundles is it the same for all.
    watch, index: what the engine's `watch` gave for the call's arrays, and which of them are this bundle's.
    plan: the engine's own, kept from step to step as long as the same tensors come together.
    shot: set by an engine that, given the numbers and the scale, can repeat the update by itself (the watch has the arrays).
    """

    spec: Spec
    names: list[str]
    shapes: list[Shape]
    slots: dict[str, Slot]
    buffers: dict[str, Sequence[np.ndarray]]
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    t: int = 0
    watch: Any = None
    index: Any = None
    plan: Any = None
    shot: Callable[[Mapping[str, Any], float], None] | None = None

    def written(self) -> list[str]:
        return [name for name in self.buffers if name != "g"]


class Watch(Protocol):
    """Remembers arrays that passed every check."""

    def admit(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> bool:
        """True only if these arrays would certainly pass too."""


@runtime_checkable
class Engine(Protocol):
    """A place to run: `run` steps one bundle, the rest is service."""

    name: str

    def allocate(self, slot: Slot) -> np.ndarray:
        """A state buffer."""

    def run(self, bundle: Bundle, update: Callable[[Any, Values], Values]) -> Values:
        """Run update on the bundle and leave the results in its buffers. A failure leaves them as they were."""

    def watch(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> Watch | None:
        """A quick check that later arrays are as good as these, which have been checked; None: check anew each time."""

    def stack(self, shape: Shape) -> int:
        """How many tensors of this shape a matrix rule should be given at once."""

    def finite(self, grads: Sequence[np.ndarray]) -> bool:
        """Whether every entry of every gradient is finite."""

    def live(self, spec: Spec) -> str:
        """In words: what runs this spec here."""


# ---- an engine from any array library -----------------------------------------------------------------------------------
#: rules in each engine's words, as long as the engine lives
BOUND: weakref.WeakKeyDictionary[ArrayEngine, dict[Rule, Rule]] = weakref.WeakKeyDictionary()


class ArrayEngine:
    """Runs every rule with an array library that follows NumPy. `dtype` is that of arithmetic and scratch, `stored` of buffers.

    What rules use beside array syntax (+ - * / < @ .mT .reshape .sum .argmax .argsort) is the methods below.
    """

    name: ClassVar[str] = "array"
    xp: Any = np
    dtype: Any = np.float64
    stored: Any = np.float32

    # the bundle ---------------------------------------------------------------------------------------------------
    def allocate(self, slot: Slot) -> np.ndarray:
        if slot.eye:
            return np.diag(np.full(slot.shape[0], slot.fill, self.stored))
        return np.full(slot.shape, slot.fill, self.stored) if slot.fill else np.zeros(slot.shape, self.stored)

    def load(self, array: np.ndarray) -> Array:
        return self.xp.asarray(array, dtype=self.dtype)

    def store(self, buffer: np.ndarray, value: Array) -> None:
        np.copyto(buffer, np.asarray(value).reshape(buffer.shape), casting="unsafe")

    def values(self, bundle: Bundle) -> Values:
        loaded = {name: [self.load(a) for a in arrays] for name, arrays in bundle.buffers.items()}
        for name in loaded.keys() & {"p", "g"}:  # the caller's may be flat
            loaded[name] = [a.reshape(shape) for a, shape in zip(loaded[name], bundle.shapes, strict=True)]
        if bundle.scale != 1.0:
            loaded["g"] = [g * bundle.scale for g in loaded["g"]]
        if bundle.spec.matrix:
            arrays: dict[str, Any] = {n: a[0][None] if len(a) == 1 else self.xp.stack(a) for n, a in loaded.items()}
            return Values(arrays, **bundle.numbers, t=bundle.t, names=bundle.names, seed=bundle.spec.values().get("seed"))
        slots = bundle.slots
        arrays = {name: Tensors(each, slots[name].drop if name in slots else ()) for name, each in loaded.items()}
        return Values(arrays, **bundle.numbers)

    def run(self, bundle: Bundle, update: Callable[[Any, Values], Values]) -> Values:
        with np.errstate(all="ignore"):  # NaN and inf are the caller's business: see `nonfinite`
            x = update(self, self.values(bundle))
            for name in bundle.written():
                for buffer, value in zip(bundle.buffers[name], x[name], strict=True):
                    self.store(buffer, value)
        return x

    def watch(self, params: Sequence[np.ndarray], grads: Sequence[np.ndarray]) -> Watch | None:
        return None

    def stack(self, shape: Shape) -> int:
        return 1

    def finite(self, grads: Sequence[np.ndarray]) -> bool:
        return all(bool(np.isfinite(g).all()) for g in grads)

    def live(self, spec: Spec) -> str:
        return f"{type(self).__name__}: array by array in {np.dtype(self.dtype).name}"

    # every update -------------------------------------------------------------------------------------------------
    @property
    def words(self) -> dict[str, Any]:
        return {word: getattr(self.xp, word) for word in vocabulary.RULE if word != "rsqrt"} | {"rsqrt": vocabulary.rsqrt}

    def bound(self, rule: Rule) -> Rule:
        """A rule in the words of this engine, made once."""
        mine = BOUND.setdefault(self, {})
        if rule not in mine:
            mine[rule] = bind(rule, self.words)
        return mine[rule]

    def map(self, rule: Rule, x: Values, **reduce: str) -> Values:
        """Run a rule on every coordinate; its returned names replace or join the values.

        A returned name in `reduce` is reduced instead: "norm" or "rms" over the tensor (one number each), "row_mean" and
        "row_sum" over the last axis, "column_mean" over the one before it.
        """
        takes, gives = signature(rule)
        values = [x[name] for name in takes]
        f = self.bound(rule)
        lists = [v for v in values if isinstance(v, Tensors)]
        if not lists:
            result = f(*values)
            return x.set(**dict(zip(gives, result if len(gives) > 1 else (result,), strict=True)))
        domain = tuple(d for d in lists[0].drop if all(d in v.drop for v in lists))
        out: dict[str, list[Any]] = {name: [] for name in gives}
        for i in range(len(lists[0])):
            result = f(*(self.line_up(v, i, domain) for v in values))
            for name, array in zip(gives, result if len(gives) > 1 else (result,), strict=True):
                out[name].append(self.reduced(array, reduce[name]) if name in reduce else array)
        return x.set(**{name: self.collected(each, domain, reduce.get(name)) for name, each in out.items()})

    def line_up(self, value: Any, i: int, domain: tuple[int, ...]) -> Any:
        if isinstance(value, Tensors):
            missing = set(value.drop) - set(domain)
            if missing == {-2} and -1 not in domain:
                return value[i][..., None, :]
            return value[i][(..., *[None] * len(missing))]
        return value if np.ndim(value) == 0 else value[i]

    def reduced(self, array: Array, kind: str) -> Any:
        if kind in ("norm", "rms"):
            norm = self.xp.sqrt((array * array).sum())
            return norm if kind == "norm" else norm / math.sqrt(math.prod(array.shape))
        axis = -2 if kind == "column_mean" else -1
        total = array.sum(axis)
        return total if kind == "row_sum" else total / array.shape[axis]

    def collected(self, each: list[Any], domain: tuple[int, ...], kind: str | None) -> Any:
        if kind in ("norm", "rms"):
            return self.xp.stack(each)
        if kind is None:
            return Tensors(each, domain)
        if kind == "column_mean":
            return Tensors(each, (*domain, -2))
        return Tensors(each, (*domain, -2 if -1 in domain else -1))

    def each(self, function: Rule, x: Values) -> Values:
        """Run a function on numbers, one per tensor; its returned names replace or join the values."""
        takes, gives = signature(function)
        result = self.bound(function)(*(x[name] for name in takes))
        return x.set(**dict(zip(gives, result if len(gives) > 1 else (result,), strict=True)))

    # matrix updates: every array is a stack ---------------------------------------------------------------------------
    def norm(self, X: Array, order: float = 2) -> Array:
        """One number per tensor, broadcastable: 2-norm, or the largest |entry| (NaN if there is one)."""
        flat = X.reshape(X.shape[0], -1)
        norm = self.xp.sqrt((flat * flat).sum(-1)) if order == 2 else abs(flat).max(-1)
        return norm.reshape(-1, *[1] * (X.ndim - 1))

    def floor(self, X: Array, low: float) -> Array:
        return self.xp.maximum(X, low)

    def cap(self, X: Array, high: float) -> Array:
        return self.xp.minimum(X, high)

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        return self.xp.where(condition, yes, no)

    def moveaxis(self, X: Array, source: int, target: int) -> Array:
        return self.xp.moveaxis(X, source, target)

    def triu(self, X: Array) -> Array:
        return self.xp.triu(X)

    def take(self, X: Array, index: Array, axis: int) -> Array:
        """Gather along one axis by an index that broadcasts over the others."""
        return self.xp.take_along_axis(X, index, axis)

    def wide(self, X: Array) -> Array:
        """X in the widest arithmetic that is cheap here, for decisions that rounding would tip."""
        return X

    def narrow(self, X: Array) -> Array:
        """X rounded to what is stored, and back in this engine's arithmetic."""
        return X.astype(self.stored, copy=False).astype(self.dtype, copy=False)

    def eigh(self, L: Array) -> Array:
        """Eigenvectors of symmetric matrices, by descending eigenvalue."""
        return self.xp.linalg.eigh(L)[1][..., ::-1]

    def product(self, A: Array, B: Array) -> Array:
        """A B where rounding does no more than round the step: engines may use fewer bits."""
        return A @ B

    def qr(self, X: Array, near: Array) -> Array:
        """The Q of X = QR, up to signs. In directions that X leaves open it may be any (`linalg.orthonormal` settles them);
        `near` is an orthonormal matrix for engines whose way needs something there."""
        return self.xp.linalg.qr(X)[0]

    def solve(self, R: Array, X: Array) -> Array:
        """R^-T X for upper triangular R."""
        return self.xp.linalg.solve(R.mT, X)

    def upper(self, R: Array, X: Array) -> Array:
        """R X for upper triangular R."""
        return R @ X

    def upper_transposed(self, R: Array, X: Array) -> Array:
        """R^T X for upper triangular R."""
        return R.mT @ X

    def orthogonalize(self, X: Array, steps: int, coefficients: tuple[float, float, float], eps: float) -> Array:
        return linalg.orthogonalize(self, X, steps, coefficients, eps)

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        return yes(*operands) if predicate else no(*operands)

    def random(self, kind: str, x: Values, shape: Shape) -> Array:
        """Noise of a stack's shape, keyed by (seed, name, t): "normal" or "uniform"."""
        keys = [random.key(x.seed, name) for name in x.names]
        draws = [random.draw(self, kind, key, x.t, math.prod(shape[1:])) for key in keys]
        return self.xp.stack(draws).reshape(shape)

    def probe(self, function: Callable[..., Any], x: Values) -> Array:
        """The caller's own noise in place of `random`."""
        return self.xp.stack([self.load(np.asarray(function(name, x.t, x.p.shape[1:]))) for name in x.names])

    # what `random` asks of an array library
    def counter(self, n: int) -> Array:
        return self.xp.arange(n, dtype=self.xp.int64)

    def word(self, n: int) -> Any:
        return n

    def real(self, words: Array) -> Array:
        return words.astype(self.dtype)

    def sqrt(self, X: Array) -> Array:
        return self.xp.sqrt(X)

    def log(self, X: Array) -> Array:
        return self.xp.log(X)

    def cos(self, X: Array) -> Array:
        return self.xp.cos(X)

    def sin(self, X: Array) -> Array:
        return self.xp.sin(X)

    def concatenate(self, arrays: tuple[Array, ...]) -> Array:
        return self.xp.concatenate(arrays)
