"""Triangular solves: a compiled loop for small systems, BLAS for large ones.

BLAS hands even a 64×64 solve to several threads and then waits for them, which on a busy machine costs a scheduler's slice
(milliseconds). Below SMALL the loop on the calling thread is faster anyway.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import njit

SMALL = 128**3  # n·n·columns


@njit(error_model="numpy", cache=True, nogil=True)
def _substitute(R, X):
    """X <- R^-T X in place, R upper triangular, both C-contiguous."""
    n, columns = X.shape
    for j in range(n):
        for c in range(columns):
            X[j, c] /= R[j, j]
        for i in range(j + 1, n):
            factor = R[j, i]
            for c in range(columns):
                X[i, c] -= factor * X[j, c]


def solve_transposed(R: np.ndarray, X: np.ndarray) -> None:
    """X <- R^-T X in place, R upper triangular, both C-contiguous and of one type."""
    if X.size * len(X) <= SMALL:
        _substitute(R, X)
        return
    from scipy.linalg.blas import dtrsm, strsm

    # In BLAS's column-major eyes C-contiguous arrays are their own transposes, and what is wanted is Xᵀ R⁻¹.
    (strsm if X.dtype == np.float32 else dtrsm)(1.0, R.T, X.T, side=1, lower=1, trans_a=1, overwrite_b=1)
