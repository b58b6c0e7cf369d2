"""Products and solves with upper triangular matrices through NumPy's matrix product, half of a full one's work.

Not through SciPy's BLAS: it is a second library with threads of its own, and the two keep each other's cores busy while they wait
for work. Small solves are a compiled loop on the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ...pointers import address
from .codegen import Code

SMALL = 96  # rows below which a solve is not split further
STRIP = 192  # rows of a product that are taken at once


@functools.cache
def _compile_substitution(kind: str) -> Callable[[int, int, int, int], None]:
    """X <- R^-T X in place, for the address of R, its rows, the address of X and its columns; both are contiguous."""
    code = Code(f"substitute_{kind}", ["int64"] * 4)
    at, n, into, columns = code.arguments
    R, X = code.array(kind, at), code.array(kind, into)
    with code.loop(0, n) as j:
        pivot = R[j * n + j]
        with code.loop(0, columns) as c:
            X[j * columns + c] = X[j * columns + c] / pivot
        with code.loop(j + 1, n) as i:
            factor = R[j * n + i]
            with code.loop(0, columns) as c:
                X[i * columns + c] = X[i * columns + c] - factor * X[j * columns + c]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(code.compile())


def solve_transposed(R: np.ndarray, X: np.ndarray) -> None:
    """X <- R^-T X in place."""
    n = len(R)
    if n <= SMALL:
        R = np.ascontiguousarray(R)
        _compile_substitution(X.dtype.name)(address(R), n, address(X), X.shape[1])
        return
    k = n // 2
    solve_transposed(R[:k, :k], X[:k])
    X[k:] -= R[:k, k:].T @ X[:k]
    solve_transposed(R[k:, k:], X[k:])


def matmul_upper(R: np.ndarray, X: np.ndarray, out: np.ndarray) -> None:
    """out <- R X."""
    for k in range(0, len(R), STRIP):
        np.matmul(R[k : k + STRIP, k:], X[k:], out=out[k : k + STRIP])


def matmul_upper_transposed(R: np.ndarray, X: np.ndarray, out: np.ndarray) -> None:
    """out <- R^T X."""
    for k in range(0, len(R), STRIP):
        end = k + STRIP
        np.matmul(R[:end, k:end].T, X[:end], out=out[k:end])


def matmul_two_upper(T: np.ndarray, R: np.ndarray, out: np.ndarray) -> None:
    """out <- triu(T) R, a third of a full product's work."""
    for k in range(0, len(R), STRIP):
        rows, end = T[k : k + STRIP, k:].copy(), k + STRIP
        rows[:, :STRIP] = np.triu(rows[:, :STRIP])
        out[k:end, :k] = 0
        for j in range(k, len(R), STRIP):
            last = j + STRIP
            np.matmul(rows[:, : last - k], R[k:last, j:last], out=out[k:end, j:last])
