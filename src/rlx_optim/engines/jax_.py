"""The jax engine: the same rules, traced. Pure, so it has no buffers: `rlx_optim.optax` feeds it values and takes values back.

Bias corrections are taken as −expm1(t·log b), the logarithm on the host, since t is traced: 7e-8 instead of 1e-5 off at t = 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..engine import ArrayEngine, Several, bind_all
from ..language import Rule
from ..linalg import Coefficients, of_each_step

Array = Any


def _log(x: Any) -> Any:
    if isinstance(x, (int, float)):
        return math.log(x) if x > 0 else -math.inf
    return jnp.log(x)


def _less_power(beta: Any, t: Any) -> Any:
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
    "less_power": _less_power,
}


@functools.cache  # outside jit every update would make new functions, and everything cached by function would grow
def traceable(function: Rule) -> Rule:
    """A method of a spec with the vocabulary of jax."""
    return bind_all(function, WORDS)


# One matrix at a time: batched QR inside a jitted step hung on a 2-core CPU (jaxlib 0.10.2, cause not isolated). Jitted here, as
# outside jit a map is compiled anew in every call.
@jax.jit
def _eigenvectors(L: Array) -> Array:
    return jax.lax.map(lambda matrix: jnp.linalg.eigh(matrix)[1][..., ::-1], L)


@jax.jit
def _orthonormal(X: Array) -> Array:
    return jax.lax.map(lambda matrix: jnp.linalg.qr(matrix)[0], X)


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
    for a, b, c in of_each_step(coefficients, steps):
        A = product(X, X.mT) / (scale * scale)
        half = A.astype(jnp.float16)
        P = (a * eye + b * A + c * product(half, half)).astype(jnp.float16)
        X, scale = (product(P, X) / scale).astype(jnp.float16), 1.0
    return X.astype(jnp.float32)


@functools.cache
def engine_in(dtype: Any) -> Jax:
    """The engine of an arithmetic."""
    return Jax(dtype)


class Jax(ArrayEngine):
    """One engine per arithmetic: see `engine_in`."""

    name = "jax"
    xp = jnp
    types: ClassVar[Mapping[str, Any]] = {"bfloat16": jnp.bfloat16, "int8": jnp.int8, "uint8": jnp.uint8, "float32": jnp.float32}

    def __init__(self, dtype: Any = jnp.float32):
        self.dtype = self.stored = jnp.dtype(dtype)

    @property
    def words(self) -> dict[str, Any]:
        return WORDS

    @staticmethod
    def one_number(value: Any, i: int) -> Any:
        return Zero() if type(value) is float and value == 0 else ArrayEngine.one_number(value, i)

    def apart(self, value: Any, given: Any) -> Any:
        return value  # nothing is ever overwritten

    def column(self, values: Any) -> Any:
        return jnp.asarray(values, self.dtype)

    def eigh(self, L: Array) -> Array:
        return _eigenvectors(L)

    def qr(self, X: Array, surely: bool = False) -> Array:
        return _orthonormal(X)

    def solve(self, R: Array, X: Array) -> Array:
        return jax.scipy.linalg.solve_triangular(R, X, trans="T")

    def orthogonalize(self, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
        """Equal shapes in one stack; large ones on a GPU in half precision, unless jax_default_matmul_precision asks for more."""
        if isinstance(X, Several):
            out, alike = Several(X), {}  # type: ignore[var-annotated]
            for i, each in enumerate(X):
                alike.setdefault(each.shape, []).append(i)
            for chosen in alike.values():
                done = self.orthogonalize(jnp.stack([X[i] for i in chosen]), steps, coefficients, eps)
                for k, i in enumerate(chosen):
                    out[i] = done[k]
            return out
        free = jax.config.values["jax_default_matmul_precision"] is None and jax.default_backend() == "gpu"
        flat = X.reshape(*X.shape[:2], -1)
        if not free or X.dtype != jnp.float32 or min(flat.shape[1:]) < LEAST:
            return super().orthogonalize(X, steps, coefficients, eps)
        tall = flat.shape[1] > flat.shape[2]
        done = _half(flat.mT if tall else flat, self.norm(flat) + eps, steps, coefficients)
        return (done.mT if tall else done).reshape(X.shape)

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        if isinstance(predicate, jax.core.Tracer):
            return jax.lax.cond(predicate, yes, no, *operands)
        return super().cond(predicate, yes, no, *operands)  # known: nothing to trace and compile anew in every call

    def narrow(self, X: Array) -> Array:
        return X

    def most(self, X: Array, axis: int | None = None) -> Array:
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
