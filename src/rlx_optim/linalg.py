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
ROUNDING = {8: 2.0**-20, 4: 2.0**-16}  # what it may leave of a matrix kept in float32, by the bytes of the arithmetic


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


def eigenbasis(E: Any, L: Any, eye: Any) -> Any:
    """Eigenvectors of symmetric L, by descending eigenvalue. Of a null space: the unit vectors whose columns of L depend on those
    before, less what the other eigenvectors span, made orthonormal one by one."""
    L = L / E.floor(E.norm(L, math.inf), TINY)
    Q, order = E.eigh(L), E.counter(L.shape[-1])[None]

    def units() -> Any:
        return permute(E, eye, last(E, dependent(E, E.qr(L, eye), L), order), 2)

    return settled(E, Q, Q, minor(E, (Q * (L @ Q)).sum(-2)), units, order)


def orthonormal(E: Any, X: Any, near: Any, order: Any) -> Any:
    """The Q of X = QR, up to signs. A column that depends on those before is that of orthonormal `near` instead, less what the
    others span, made orthonormal one by one by ascending `order` (B, n)."""
    X = X / E.floor(E.norm(X, math.inf), TINY)
    Q = E.qr(X, near)
    return settled(E, Q, X, dependent(E, Q, X), lambda: near, order)


def settled(E: Any, Q: Any, X: Any, free: Any, near: Callable[[], Any], order: Any) -> Any:
    """Q, or the Q of X where columns are `free`: those of `near` instead, after all others."""

    def settle(Q: Any) -> Any:
        other, behind = near(), last(E, free, order)
        chosen = permute(E, E.where(free[:, None, :], other, X), behind, 2)
        found = permute(E, E.qr(chosen, permute(E, other, behind, 2)), behind.argsort(-1), 2)
        return E.where(free.any(-1)[:, None, None], found, Q)

    return E.cond(free.any(), settle, lambda Q: Q, Q)


def dependent(E: Any, Q: Any, X: Any) -> Any:
    """Which columns of X = QR (B, n) depend on those before, but for rounding."""
    sizes = abs((Q * X).sum(-2))  # the diagonal of R
    bar, top = ROUNDING[sizes.dtype.itemsize], E.norm(sizes, math.inf)
    free, doubtful = sizes <= bar * top, (sizes <= math.sqrt(bar) * top).any(-1)[:, None]

    def examine(free: Any) -> Any:
        places = E.counter(free.shape[-1])
        eye = 0 * Q + (places[:, None] == places)
        R = E.where(free[:, None, :] | free[:, :, None], eye, E.triu(Q.mT @ X))
        inverse = E.solve(R, eye)  # transposed: its rows say how much of X's rounding a column of Q has
        return free | doubtful & (bar * top * E.sqrt((inverse * inverse).sum(-1)) >= 1)

    return E.cond(doubtful.any(), examine, lambda free: free, free)


def minor(E: Any, sizes: Any) -> Any:
    """Which of the sizes (B, n) may be rounding of the largest."""
    return sizes <= ROUNDING[sizes.dtype.itemsize] * E.norm(sizes, math.inf)


def last(E: Any, chosen: Any, order: Any) -> Any:
    """The order (B, n) that puts the chosen at the end, by ascending `order`, and leaves the others as they are."""
    n = chosen.shape[-1]
    return E.where(chosen, order + n, E.counter(n)).argsort(-1)


def descending(E: Any, sizes: Any) -> Any:
    """The order (B, n) of descending sizes; those that may be rounding come last, as they are."""
    return E.where(minor(E, sizes), E.real(E.counter(sizes.shape[-1])), -sizes).argsort(-1)


#: a, b and c of a Newton–Schulz step, or of each: the last go on
Coefficients = tuple[Any, ...]


def of_each_step(coefficients: Coefficients, steps: int) -> list[Any]:
    """a, b and c of every step."""
    several = coefficients if isinstance(coefficients[0], tuple) else (coefficients,)
    return [several[min(k, len(several) - 1)] for k in range(steps)]


def orthogonalize(E: Any, X: Any, steps: int, coefficients: Coefficients, eps: float) -> Any:
    """Newton–Schulz: push the singular values of each matrix of (B, rows, columns) towards 1, on the smaller side. Further axes
    are columns too."""
    shape = X.shape
    X = X.reshape(*shape[:2], -1)
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    X = X / (E.norm(X) + eps)
    for a, b, c in of_each_step(coefficients, steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A.mT)) @ X  # A is symmetric; saying so lets BLAS halve the work
    return (X.mT if tall else X).reshape(shape)
