"""Products and solves with upper triangular matrices through NumPy's matrix product, half of a full one's work.

Not through SciPy's BLAS: it is a second library with threads of its own, and the two keep each other's cores busy while they wait
for work. Small solves are a compiled loop on the calling thread.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from .cache import compiled

SMALL = 96  # rows below which a solve is not split further
STRIP = 192  # rows of a product that are taken at once


def _substitute(R, X):
    """X <- R^-T X in place, R upper triangular; rows of X contiguous."""
    n, columns = X.shape
    for j in range(n):
        for c in range(columns):
            X[j, c] /= R[j, j]
        for i in range(j + 1, n):
            factor = R[j, i]
            for c in range(columns):
                X[i, c] -= factor * X[j, c]


@functools.cache
def _substitution() -> Any:
    """The loop, compiled when it is first needed."""
    takes = [(types.Array(kind, 2, "C", readonly=True), types.Array(kind, 2, "C")) for kind in (types.float32, types.float64)]
    return compiled(njit, [types.void(*each) for each in takes], error_model="numpy", nogil=True)(_substitute)


def solve_transposed(R: np.ndarray, X: np.ndarray) -> None:
    """X <- R^-T X in place."""
    n = len(R)
    if n <= SMALL:
        _substitution()(np.ascontiguousarray(R), X)
        return
    k = n // 2
    solve_transposed(R[:k, :k], X[:k])
    X[k:] -= R[:k, k:].T @ X[:k]
    solve_transposed(R[k:, k:], X[k:])


def multiply(R: np.ndarray, X: np.ndarray, out: np.ndarray) -> None:
    """out <- R X."""
    for k in range(0, len(R), STRIP):
        np.matmul(R[k : k + STRIP, k:], X[k:], out=out[k : k + STRIP])


def multiply_transposed(R: np.ndarray, X: np.ndarray, out: np.ndarray) -> None:
    """out <- R^T X."""
    for k in range(0, len(R), STRIP):
        end = k + STRIP
        np.matmul(R[:end, k:end].T, X[:end], out=out[k:end])


def multiply_upper(T: np.ndarray, R: np.ndarray, out: np.ndarray) -> None:
    """out <- triu(T) R, a third of a full product's work."""
    for k in range(0, len(R), STRIP):
        rows, end = T[k : k + STRIP, k:].copy(), k + STRIP
        rows[:, :STRIP] = np.triu(rows[:, :STRIP])
        out[k:end, :k] = 0
        for j in range(k, len(R), STRIP):
            last = j + STRIP
            np.matmul(rows[:, : last - k], R[k:last, j:last], out=out[k:end, j:last])
