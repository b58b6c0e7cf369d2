"""Orthonormal bases of large matrices through NumPy's matrix products, with less work where a matrix leaves directions open.

Not through SciPy's LAPACK: see `triangular`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ...pointers import address
from .codegen import Code
from .triangular import solve_transposed

PANEL = 128  # columns whose reflections are applied at once
NOTHING = 4096  # times the rounding of the largest entry: what is left of columns that others span
STRIP = 256  # rows or columns that are taken at once
QUARTERS = 4  # parts of a basis that are looked at one by one


def find_householder_q(X: np.ndarray) -> tuple[np.ndarray, int]:
    """The Q of X = QR by Householder's reflections, and how many columns they took: fewer than all where those span the rest."""
    A, n = X.copy(), len(X)
    nothing = NOTHING * np.finfo(A.dtype).eps * max_abs(A)
    blocks = []
    for k in range(0, n, PANEL):
        panel = A[k:, k : k + PANEL]
        if not max_abs(panel) > nothing and not max_abs(A[k:, k:]) > nothing:
            break
        h, tau = np.linalg.qr(panel, mode="raw")
        V = np.where(tau != 0, np.tril(h.T, -1) + np.eye(*panel.shape, dtype=A.dtype), 0)
        T = np.linalg.inv(np.triu(V.T @ V, 1) + np.diag(1 / np.where(tau != 0, tau, 1)))  # their product is I − V T V^T
        rest = A[k:, k + PANEL :]
        subtract_product(rest, V, T.T @ (V.T @ rest))
        blocks.append((k, V, T))
    Q = A  # not needed any more
    Q[...] = 0
    np.fill_diagonal(Q, 1)
    for k, V, T in reversed(blocks):
        corner = Q[k:, k:]
        subtract_product(corner, V, T @ (V.T @ corner))
    return Q, min(n, PANEL * len(blocks))


def max_abs(X: np.ndarray) -> float:
    """The largest size of an entry; NaN where one is."""
    return float(max(X.max(initial=0), -X.min(initial=0)))


def solve_symmetric(L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of symmetric L, descending, and eigenvectors: within its range, where a part of its columns spans it. Those of
    eigenvalue 0 are any then, and come last."""
    Q, rank = find_householder_q(L)
    if 2 * rank > len(L):
        values, Q = np.linalg.eigh(L)
        return values[::-1], Q[:, ::-1]
    values, inside = np.zeros(len(L), L.dtype), Q[:, :rank]
    values[:rank], V = np.linalg.eigh(inside.T @ (L @ inside))
    values[:rank], Q[:, :rank] = values[:rank][::-1], inside @ V[:, ::-1]
    order = np.argsort(-values, kind="stable")
    return values[order], Q[:, order]


def probe_orthogonality(Q: np.ndarray) -> float:
    """How far a vector that knows nothing of Q is turned by Q'Q: little where its columns are orthonormal."""
    probe = np.random.default_rng(0).standard_normal(Q.shape[1])
    return max_abs(Q.T @ (Q @ probe) - probe)


def subtract_product(X: np.ndarray, A: np.ndarray, B: np.ndarray) -> None:
    """X <- X − A·B, strip by strip, which takes no new memory of its size."""
    for i in range(0, len(X), STRIP):
        X[i : i + STRIP] -= A[i : i + STRIP] @ B


def multiply_gram(L: np.ndarray, Q: np.ndarray, X: np.ndarray, share: float) -> None:
    """X <- L·Q, L symmetric and nowhere negative, Q orthonormal but for rounding. A column becomes 0 where q'Lq is surely at most
    a share of the largest: all that are left, once they are found to have no more together."""
    n, trace, sizes = len(L), L.trace(dtype=Q.dtype), np.zeros(len(L))
    buffer, width = np.empty((STRIP, n), Q.dtype), -(-n // QUARTERS)
    for k in range(0, n, width):
        end = min(k + width, n)
        for i in range(0, n, STRIP):
            wide = buffer[: len(L[i : i + STRIP])]
            wide[...] = L[i : i + STRIP]
            np.matmul(wide, Q[:, k:end], out=X[i : i + STRIP, k:end])
        sizes[k:end] = np.einsum("ij,ij->j", Q[:, k:end], X[:, k:end])
        low, left = share * sizes.max(), trace - sizes.sum()
        if (
            4 * end <= 3 * n
            and abs(left) <= low + 2.0**-22 * trace
            and abs(left + excess_trace(Q[:, :end], X[:, :end])) < low / 2
        ):
            X[:, end:] = 0
            break


def excess_trace(Q: np.ndarray, X: np.ndarray) -> float:
    """By how much tr(Q'X) exceeds that of X's part in what Q spans, (Q'Q)^-1 Q'X, Q being nearly orthonormal."""
    D = Q.T @ Q
    D[np.diag_indices_from(D)] -= 1
    return float(np.vdot(D, Q.astype(np.float32).T @ X.astype(np.float32)))  # which weighs what is next to nothing


def find_inv_r_norms(Q: np.ndarray, X: np.ndarray) -> np.ndarray:
    """The lengths of the columns of R^-1, X = QR."""
    inverse = np.eye(Q.shape[1], dtype=X.dtype)
    solve_transposed(np.triu(Q.T @ X), inverse)
    lengths: np.ndarray = np.sqrt(np.vecdot(inverse, inverse))
    return lengths


@functools.cache
def _compile_reorder() -> Callable[[int, int, int, int, int], None]:
    """X <- its columns in another order, row by row through a row of memory beside it."""
    code = Code("reorder", ["int64"] * 5)
    at, order, beside, rows, n = code.arguments
    X, places, row = code.array("float64", at), code.array("int64", order), code.array("float64", beside)
    with code.loop(0, rows) as r:
        with code.loop(0, n) as c:
            row[c] = X[r * n + places[c]]
        with code.loop(0, n) as c:
            X[r * n + c] = row[c]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(code.compile())


def reorder_columns(X: np.ndarray, order: np.ndarray) -> None:
    """X <- its columns in another order, without memory of its size."""
    if (order != np.arange(len(order))).any():
        order, row = np.ascontiguousarray(order, np.int64), np.empty(len(order))
        _compile_reorder()(address(X), address(order), address(row), *X.shape)
