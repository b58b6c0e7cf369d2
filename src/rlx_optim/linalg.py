"""Linear algebra on stacks of tensors, in the operations of `arrays` alone: Kronecker factors and Newton–Schulz.

Axis 0 of every array counts tensors of equal shape, the other axes are the tensor's own. A *factor* belongs to one axis of
the tensor: a matrix (B, n, n) or, for `gram` and `apply_factors`, also a diagonal (B, n).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

TINY = 2.0**-126  # the smallest normal float32


def __getattr__(name: str) -> Any:
    """Functions by the names that they had in 0.2, with a warning."""
    from . import renamed

    return renamed.find_function(name)


class Overridable:
    """A function of an engine and arrays that an engine may replace by a method of the same name.

    `default` is the function itself, which such a method may call."""

    def __init__(self, function: Callable[..., Any]):
        self.default = function
        functools.update_wrapper(self, function)

    def __call__(self, E: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(E), self.default.__name__, self.default)(E, *args, **kwargs)


# ---- one axis after the other ---------------------------------------------------------------------------------------------
def apply_along_axis(E: Any, f: Callable[[Any], Any], X: Any, axis: int) -> Any:
    """f, which acts on (B, n, rest), applied to one axis of a stack."""
    Y = E.moveaxis(X, axis, 1)
    return E.moveaxis(f(Y.reshape(*Y.shape[:2], -1)).reshape(Y.shape), 1, axis)


def apply_factors(E: Any, f: Callable[[Any, Any], Any], factors: Mapping[int, Any], X: Any) -> Any:
    """f(factor, ·) along each axis that has a factor."""
    for axis, q in factors.items():
        X = apply_along_axis(E, functools.partial(f, q), X, axis)
    return X


def rotate(E: Any, bases: Mapping[int, Any], X: Any, back: bool = False) -> Any:
    """X in the basis of each axis that has one; back: out of it. The last axis is rotated in place, which moves nothing."""
    for axis, Q in bases.items():
        if axis == X.ndim - 1:
            X = E.matmul(X.reshape(X.shape[0], -1, X.shape[-1]), Q.mT if back else Q).reshape(X.shape)
        else:
            X = apply_along_axis(E, functools.partial(E.matmul, Q if back else Q.mT), X, axis)
    return X


def gram(E: Any, X: Any, axis: int, diagonal: bool = False) -> Any:
    """X contracted with itself over every axis of the tensor but one."""
    U = E.moveaxis(X, axis, 1).reshape(X.shape[0], X.shape[axis], -1)
    return (U * U).sum(-1) if diagonal else E.syrk(U)


@Overridable
def average_gram(E: Any, L: Any, X: Any, axis: int, beta: float, alpha: float) -> tuple[Any, Any]:
    """beta·L + alpha·(Gram matrix of an axis of X), or L where that is not finite: as it is stored, and what `to_float64` makes
    of it before it is rounded."""
    new = beta * E.to_float64(L) + alpha * gram(E, E.to_float64(X), axis)
    sound = is_finite(E, E.to_storage_dtype(new))
    return E.where(sound, E.to_storage_dtype(new), L), E.where(sound, new, E.to_float64(L))


def permute(E: Any, X: Any, order: Any, axis: int) -> Any:
    """X with one axis reordered, each tensor of the stack by its own order (B, n)."""
    return E.take(X, order.reshape(order.shape[0], *(-1 if i == axis else 1 for i in range(1, X.ndim))), axis)


@Overridable
def invert_permutation(E: Any, order: Any) -> Any:
    """The order (B, n) that undoes one."""
    return order.argsort(-1)


def is_finite(E: Any, X: Any) -> Any:
    """Whether no entry of a tensor is infinite or NaN, broadcastable."""
    return E.norm(X, math.inf) < math.inf


def spectral_bound(E: Any, T: Any) -> Any:
    """A cheap lower bound on the spectral norm of symmetric T, which the caller gives up: one power step from its largest
    column, floored at TINY."""
    top = E.floor(E.norm(T, math.inf), TINY)
    T = E.scale(T, 1 / top)
    largest = E.sum_squares(T, -2).argmax(-1)[..., None]
    x = T @ E.take(T, largest, 2)
    return E.floor(E.norm(T @ (x / E.floor(E.norm(x), TINY))) * top, TINY)


# ---- triangular factors ---------------------------------------------------------------------------------------------------
@Overridable
def triangular_matmul(E: Any, R: Any, X: Any, rounds: bool = False) -> Any:
    """R X for upper triangular R. rounds: as `matmul`, else as `matmul_precise`."""
    return E.matmul(R, X) if rounds else E.matmul_precise(R, X)


@Overridable
def triangular_matmul_transposed(E: Any, R: Any, X: Any) -> Any:
    """Rᵀ X for upper triangular R, as `matmul`."""
    return E.matmul(R.mT, X)


@Overridable
def triangular_product(E: Any, T: Any, R: Any) -> Any:
    """triu(T) R for upper triangular R, as `matmul_precise`."""
    return triangular_matmul(E, E.triu(T), R)


# ---- Newton–Schulz --------------------------------------------------------------------------------------------------------
#: a, b and c of a Newton–Schulz step, or of each: the last go on
Coefficients = tuple[Any, ...]


def step_coefficients(coefficients: Coefficients, steps: int) -> list[Any]:
    """a, b and c of every step."""
    several = coefficients if isinstance(coefficients[0], tuple) else (coefficients,)
    return [several[min(k, len(several) - 1)] for k in range(steps)]


def newton_schulz(E: Any, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
    """Push the singular values of each matrix of (B, rows, columns) towards 1, on the smaller side. Further axes are columns
    too."""
    shape = X.shape
    X = X.reshape(*shape[:2], -1)
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    X = X / (E.norm(X) + eps)
    for a, b, c in step_coefficients(coefficients, steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A.mT)) @ X  # A is symmetric; saying so lets BLAS halve the work
    return (X.mT if tall else X).reshape(shape)
