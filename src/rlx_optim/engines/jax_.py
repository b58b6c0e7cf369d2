"""The jax engine: the same rules, traced. Pure, so it has no buffers: `rlx_optim.optax` feeds it values and takes values back.

Bias corrections are taken as −expm1(t·log b), the logarithm on the host, since t is traced: 7e-8 instead of 1e-5 off at t = 1.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from .. import linalg, ops
from ..engine import ArrayEngine, MixedShapes
from ..linalg import Coefficients, gram, is_finite, step_coefficients

Array = Any


def _log(x: Any) -> Any:
    if isinstance(x, (int, float)):
        return math.log(x) if x > 0 else -math.inf
    return jnp.log(x)


def _one_minus_power(beta: Any, t: Any) -> Any:
    return 1.0 if isinstance(beta, (int, float)) and beta == 0 else -jnp.expm1(t * _log(beta))


def _rsqrt(x: Array) -> Array:
    return 1 / jnp.sqrt(x)


WORDS: dict[str, Any] = {
    "sqrt": jnp.sqrt,
    "rsqrt": _rsqrt,
    "where": jnp.where,
    "sign": jnp.sign,
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
    "exp": jnp.exp,
    "log": _log,
    "abs": jnp.abs,
    "clamp": lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    "one_minus_power": _one_minus_power,
}


ops.LIBRARIES |= dict.fromkeys(("jax", "jaxlib"), WORDS)


# One matrix at a time: batched QR inside a jitted step hung on a 2-core CPU (jaxlib 0.10.2, cause not isolated). Jitted here, as
# outside jit a map is compiled anew in every call.
@jax.jit
def _eigen(L: Array) -> tuple[Array, Array]:
    values, vectors = _one_by_one(jnp.linalg.eigh, L)
    return values[..., ::-1], vectors[..., ::-1]


@jax.jit
def _orthonormal(X: Array) -> Array:
    return _one_by_one(lambda matrix: jnp.linalg.qr(matrix)[0], X)


def _one_by_one(function: Callable[[Array], Any], X: Array) -> Any:
    return jax.tree.map(lambda one: one[None], function(X[0])) if X.shape[0] == 1 else jax.lax.map(function, X)


LEAST = 128  # the smaller side from which half precision pays


class Zero(float):
    """A number of a rule that is 0 whatever is traced: what it multiplies is not read (XLA must keep 0·x, for 0·∞)."""

    def __mul__(self, other: Any) -> Any:
        return self


def _half(X: Array, norm: Array, steps: int, coefficients: Coefficients) -> Array:
    """Newton–Schulz on wide matrices in float16 with float32 sums. The first X is kept at a power of two that makes its entries
    about 1."""
    scale = 2.0 ** round(math.log2(math.sqrt(math.prod(X.shape[1:]))))
    X = (X * (scale / norm)).astype(jnp.float16)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    eye = jnp.eye(X.shape[1], dtype=jnp.float32)
    for a, b, c in step_coefficients(coefficients, steps):
        A = product(X, X.mT) / (scale * scale)
        half = A.astype(jnp.float16)
        P = (a * eye + b * A + c * product(half, half)).astype(jnp.float16)
        X, scale = (product(P, X) / scale).astype(jnp.float16), 1.0
    return X.astype(jnp.float32)


def precision() -> str | None:
    """What jax_default_matmul_precision asks for."""
    asked: str | None = jax.config.values["jax_default_matmul_precision"]
    return asked


def platform() -> str:
    """Where arrays are computed with, as jax_default_device says; those that were put elsewhere are not known when traced."""
    chosen = jax.config.values["jax_default_device"]
    return chosen if isinstance(chosen, str) else jax.default_backend() if chosen is None else chosen.platform


def _halves(X: Array) -> tuple[Array, Array]:
    """X rounded to what TF32 has of it, and the rest: to the nearest, so that what is lost of the rest has either sign."""
    top = ((X.view(jnp.uint32) + jnp.uint32(0x1000)) & jnp.uint32(0xFFFFE000)).view(jnp.float32)
    return top, X - top


def _product(A: Array, B: Array) -> Array:
    """In TF32. By itself and laid out as always: XLA tries dozens of kernels for every product that differs from others, be it by
    what was fused into it or by the order of its axes."""
    A, B = _isolate(A, B)
    return _isolate(jnp.matmul(A, B, precision=jax.lax.Precision.HIGH))[0]


def _isolate(*arrays: Array) -> Any:
    if not any(isinstance(X, jax.core.Tracer) for X in arrays):
        return arrays
    rows = [with_layout_constraint(X, Layout(tuple(range(X.ndim)))) for X in arrays]  # type: ignore[no-untyped-call]
    return jax.lax.optimization_barrier(rows)  # type: ignore[no-untyped-call]


@jax.tree_util.register_pytree_node_class
class LeafStack:
    """Square matrices of one size, those of a leaf in an array (k, n, n). They become one stack only where that is needed, since
    it is a copy of them all."""

    def __init__(self, each: Iterable[Array]):
        self.each = tuple(each)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(part) for part in self.each), *self.each[0].shape[1:])

    @property
    def dtype(self) -> Any:
        return self.each[0].dtype

    @property
    def stack(self) -> Array:
        return jnp.concatenate(self.each)

    @property
    def mT(self) -> Array:
        return self.stack.mT

    def like(self, stack: Array) -> LeafStack:
        """Split a stack into as many matrices for each leaf."""
        return LeafStack(map(stack.__getitem__, self.slices))

    @property
    def slices(self) -> list[slice]:
        """Where the matrices of each leaf are in the stack."""
        ends = list(itertools.accumulate(map(len, self.each)))
        return list(map(slice, [0, *ends[:-1]], ends))

    def __getitem__(self, leaf: slice) -> Array:
        return self.each[self.slices.index(leaf)]

    def tree_flatten(self) -> tuple[tuple[Array, ...], None]:
        return self.each, None

    @classmethod
    def tree_unflatten(cls, _: None, each: Iterable[Array]) -> LeafStack:
        return cls(each)


def dense(X: Any) -> Any:
    return X.stack if isinstance(X, LeafStack) else X


class Deferred(NamedTuple):
    """An update that waits for what is computed for all of its owner's at once (`ArrayEngine.defer`)."""

    function: Callable[..., Any]
    given: Any
    then: Callable[..., Any]
    precision: str | None

    def followed(self, end: Callable[[Any], Any]) -> Deferred:
        """Do something more with the result."""
        return self._replace(then=lambda *results: end(self.then(*results)))


def resolve_all(updates: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the results of updates, each given with its owner. What an owner's deferred ones wait for is computed at once."""
    results = [update for _, update in updates]
    deferred: dict[Any, list[int]] = {}
    for i, (owner, update) in enumerate(updates):
        if isinstance(update, Deferred):
            deferred.setdefault(owner, []).append(i)
    for indices in deferred.values():
        first = results[indices[0]]
        with jax.default_matmul_precision(first.precision):
            answers = first.function([results[i].given for i in indices])
        for i, answer in zip(indices, answers, strict=True):
            results[i] = results[i].then(*answer)
    return results


@functools.cache
def engine_in(dtype: Any, free: bool = False) -> Jax:
    """The engine of an arithmetic. free: nobody asked for a precision of products."""
    return Jax(dtype, free)


class Jax(ArrayEngine):
    """One engine per arithmetic: see `engine_in`."""

    name = "jax"
    xp = jnp
    types: ClassVar[Mapping[str, Any]] = {"bfloat16": jnp.bfloat16, "int8": jnp.int8, "uint8": jnp.uint8, "float32": jnp.float32}

    def __init__(self, dtype: Any = jnp.float32, free: bool = False):
        self.dtype = self.stored = jnp.dtype(dtype)
        self.free = free and self.dtype == jnp.float32

    @property
    def words(self) -> dict[str, Any]:
        return WORDS

    @staticmethod
    def number_of(value: Any, i: int) -> Any:
        return Zero() if type(value) is float and value == 0 else ArrayEngine.number_of(value, i)

    def copy_if_given(self, value: Any, given: Any) -> Any:
        return value  # nothing is ever overwritten

    def column_of(self, values: Any) -> Any:
        return jnp.asarray(values, self.dtype)

    def argsort(self, X: Array) -> Array:
        """By counting, which is as fast at these lengths: XLA takes long to compile a sort. NaN is last."""
        places = jnp.arange(X.shape[-1])
        X = jnp.where(X == X, X, jnp.inf) if jnp.issubdtype(X.dtype, jnp.floating) else X
        one, other = X[..., :, None], X[..., None, :]
        return self.invert_permutation(((other < one) | (other == one) & (places < places[:, None])).sum(-1))

    def invert_permutation(self, order: Array) -> Array:
        places = jnp.arange(order.shape[-1])
        return jnp.where(order[..., None, :] == places[:, None], places, 0).sum(-1)

    def eigh(self, L: Array) -> tuple[Array, Array]:
        values, vectors = _eigen(L)
        return values, vectors

    def qr(self, X: Array, surely: bool = False) -> Array:
        return _orthonormal(X)

    def solve_triangular(self, R: Array, X: Array) -> Array:
        return jax.scipy.linalg.solve_triangular(R, X, trans="T")

    def orthogonalize(self, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
        """Equal shapes in one stack; large ones on a GPU in half precision, unless jax_default_matmul_precision asks for more."""
        if isinstance(X, MixedShapes):
            out, alike = MixedShapes(X), {}  # type: ignore[var-annotated]
            for i, each in enumerate(X):
                alike.setdefault(each.shape, []).append(i)
            for chosen in alike.values():
                done = self.orthogonalize(jnp.stack([X[i] for i in chosen]), steps, coefficients, eps)
                for k, i in enumerate(chosen):
                    out[i] = done[k]
            return out
        flat = X.reshape(*X.shape[:2], -1)
        if not self.half or X.dtype != jnp.float32 or min(flat.shape[1:]) < LEAST:
            return super().orthogonalize(X, steps, coefficients, eps)
        tall = flat.shape[1] > flat.shape[2]
        done = _half(flat.mT if tall else flat, self.norm(flat) + eps, steps, coefficients)
        return (done.mT if tall else done).reshape(X.shape)

    @property
    def half(self) -> bool:
        """Whether float32 is multiplied on tensor cores of fewer bits."""
        return self.free and platform() == "gpu"

    def matmul(self, A: Any, B: Any) -> Array:
        A, B = dense(A), dense(B)
        if not self.half:
            return A @ B
        square = A.shape[-2] == A.shape[-1]  # those are factors and bases: from the right, as others are multiplied with them
        return _product(B.mT, A.mT).mT if square else _product(A, B)

    def matmul_precise(self, A: Array, B: Array, bound: float | None = None) -> Array:
        if not self.half:
            return A @ B
        (a, b), (c, d) = _halves(A), _halves(B)
        return self.matmul(a, c) + (self.matmul(a, d) + self.matmul(b, c))

    def syrk(self, X: Array, bound: float | None = None) -> Array:
        if not self.half:
            return X @ X.mT
        top, rest = _halves(X)
        mixed = _product(top, rest.mT)
        return _product(top, top.mT) + (mixed + mixed.mT)

    def average_gram(self, L: Any, X: Array, axis: int, beta: Any, alpha: Any) -> tuple[Any, Any]:
        """Each part of a pile by itself, so that it is read and written once."""
        if not isinstance(L, LeafStack):
            return linalg.average_gram.default(self, L, X, axis, beta, alpha)  # type: ignore[no-any-return]
        new = [beta * part + alpha * more for part, more in zip(L.each, L.like(gram(self, X, axis)).each, strict=True)]
        kept = LeafStack(self.where(is_finite(self, some), some, part) for some, part in zip(new, L.each, strict=True))
        return kept, kept

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        if isinstance(predicate, jax.core.Tracer):
            return jax.lax.cond(predicate, yes, no, *operands)
        return super().cond(predicate, yes, no, *operands)  # known: nothing to trace and compile anew in every call

    def either(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        """Both: before a branch the device waits for the host, which reads which one to take."""
        if not isinstance(predicate, jax.core.Tracer):
            return super().either(predicate, yes, no, *operands)
        return jax.tree.map(functools.partial(jnp.where, predicate), yes(*operands), no(*operands))

    def defer(self, function: Callable[..., Any], given: Any, then: Callable[..., Any]) -> Any:
        return Deferred(function, given, then, precision())

    def resolve(self, update: Any) -> Any:
        return resolve_all([("this", update)])[0]

    def map_by_size(self, function: Callable[..., Any], stacks: Sequence[tuple[dict[int, Any], ...]]) -> list[dict[int, Any]]:
        """One text for each size, whatever the shapes of the tensors are: XLA takes seconds for a basis. One matrix at a time, as
        it tries kernels on all that it compiles for."""
        out: list[dict[int, Any]] = [{} for _ in stacks]
        sizes: dict[Any, list[tuple[int, int]]] = {}
        for k, stack in enumerate(stacks):
            for axis, Q in stack[0].items():
                sizes.setdefault((Q.shape[1:], Q.dtype), []).append((k, axis))
        for chosen in sizes.values():
            parts = [self._dense(tuple(of[axis] for of in stacks[k])) for k, axis in chosen]
            whole = self.one_by_one(function, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts))
            first = 0
            for (k, axis), part in zip(chosen, parts, strict=True):
                last = first + part[0].shape[0]
                out[k][axis] = self._stack_like(stacks[k][0][axis], jax.tree.map(operator.itemgetter(slice(first, last)), whole))
                first = last
        return [{axis: done[axis] for axis in stack[0]} for done, stack in zip(out, stacks, strict=True)]

    @staticmethod
    def _dense(values: Any) -> Any:
        return jax.tree.map(dense, values, is_leaf=lambda value: isinstance(value, LeafStack))

    @staticmethod
    def _stack_like(given: Any, made: Any) -> Any:
        """Of what was made, that which takes the place of a pile as one too."""
        if not isinstance(given, LeafStack):
            return made
        return jax.tree.map(lambda value: given.like(value) if value.shape == given.shape else value, made)

    @staticmethod
    def one_by_one(function: Callable[..., Any], stacks: Any) -> Any:
        if not isinstance(jax.tree.leaves(stacks)[0], jax.core.Tracer):
            return function(*stacks)  # a map would be compiled anew in every call

        def one(stack: Any) -> Any:
            return jax.tree.map(lambda x: x[0], function(*jax.tree.map(lambda x: x[None], stack)))

        return jax.lax.map(one, stacks)

    def to_storage_dtype(self, X: Array) -> Array:
        return X

    def amax(self, X: Array, axis: int | None = None) -> Array:
        """XLA's own may lose a NaN on a CPU."""
        return jnp.where(jnp.isnan(X).any(axis), jnp.nan, X.max(axis))

    def row_max(self, X: Array) -> Array:
        """Of magnitudes, by their bits, in whose order NaN is above all: XLA's own may lose it on a CPU."""
        return X.view(jnp.int32).max(-1).view(jnp.float32)

    def to_half(self, X: Array) -> Array:
        return X.astype(jnp.bfloat16)

    def from_half(self, X: Array) -> Array:
        return X.astype(jnp.float32)

    def counter(self, n: int) -> Array:
        return jnp.arange(n, dtype=jnp.uint32)

    def word(self, n: Any) -> Any:
        return jnp.uint32(n) if isinstance(n, int) else n.astype(jnp.uint32)
