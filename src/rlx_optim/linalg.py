"""Linear algebra on stacks of tensors, in the words of the engine protocol alone.

Axis 0 of every array counts tensors of equal shape, the other axes are the tensor's own. A *factor* belongs to one axis of
the tensor: a matrix (B, n, n) or, for `gram` and `every`, also a diagonal (B, n).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

TINY = 2.0**-126  # the smallest normal float32


def along(E: Any, f: Callable[[Any], Any], X: Any, axis: int) -> Any:
    """f, which acts on (B, n, rest), applied to one axis of a stack."""
    Y = E.moveaxis(X, axis, 1)
    return E.moveaxis(f(Y.reshape(*Y.shape[:2], -1)).reshape(Y.shape), 1, axis)


def every(E: Any, f: Callable[[Any, Any], Any], factors: Mapping[int, Any], X: Any) -> Any:
    """f(factor, ·) along each axis that has a factor."""
    for axis, q in factors.items():
        X = along(E, functools.partial(f, q), X, axis)
    return X


def gram(E: Any, X: Any, axis: int, diagonal: bool = False) -> Any:
    """X contracted with itself over every axis of the tensor but one."""
    U = E.moveaxis(X, axis, 1).reshape(X.shape[0], X.shape[axis], -1)
    return (U * U).sum(-1) if diagonal else U @ U.mT


def permute(E: Any, X: Any, order: Any, axis: int) -> Any:
    """X with one axis reordered, each tensor of the stack by its own order (B, n)."""
    return E.take(X, order.reshape(order.shape[0], *(-1 if i == axis else 1 for i in range(1, X.ndim))), axis)


def finite(E: Any, X: Any) -> Any:
    """Per tensor, broadcastable: no entry is infinite or NaN."""
    return E.norm(X, math.inf) < math.inf


def spectral_bound(E: Any, T: Any) -> Any:
    """A cheap lower bound on the spectral norm of symmetric T: one power step from its largest column, floored at TINY."""
    top = E.floor(E.norm(T, math.inf), TINY)
    T = T / top
    largest = (T * T).sum(-2).argmax(-1)[:, None, None]
    x = T @ E.take(T, largest, 2)
    return E.floor(E.norm(T @ (x / E.floor(E.norm(x), TINY))) * top, TINY)


def orthonormal(E: Any, X: Any, near: Any) -> Any:
    """The Q of X = QR, up to the signs of its columns, for X in float32. Where that is too few bits it is taken in float64, and a
    little of `near`, about what X is rounded by, settles the directions that rounding would. None where even that fails."""
    found = by_cholesky(E, X)
    if found is None:
        X, near = E.double(X), E.double(near)
        largest = E.norm(E.sqrt((X * X).sum(-2)), math.inf)[..., None]
        found = by_cholesky(E, X + near * (2.0**-19 * largest))
    return found


def by_cholesky(E: Any, X: Any) -> Any:
    """The Q of X = QR from Cholesky factors of Gram matrices: matrix products, where Householder's reflections wait for the
    memory. Twice, since the first leaves an error of the condition number squared; the columns have length 1 before. None where
    this fails."""
    Y = X / E.floor(E.sqrt((X * X).sum(-2)), TINY)[..., None, :]
    n = Y.shape[-1]
    for again in (False, True):
        G = Y.mT @ Y
        if again:
            off = E.norm(G) ** 2 - 2 * E.norm(Y) ** 2 + n  # ‖G − I‖²
            if (off < 1e-10 * n * n).all():  # about what rounding leaves
                return Y
            if not (off < 0.25).all():  # NaN is not less
                return None
        R = E.cholesky(G)
        if R is None:
            return None
        Y = E.solve(R, Y.mT).mT
    return Y


def orthogonalize(E: Any, X: Any, steps: int, coefficients: tuple[float, float, float], eps: float) -> Any:
    """Newton–Schulz: push the singular values of each matrix of (B, rows, columns) towards 1, on the smaller side."""
    a, b, c = coefficients
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    X = X / (E.norm(X) + eps)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A.mT)) @ X  # A is symmetric; saying so lets BLAS halve the work
    return X.mT if tall else X
