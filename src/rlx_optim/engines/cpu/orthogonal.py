"""Newton–Schulz on the small Gram matrix, for wide matrices.

Every matrix of the iteration X ← (aI + bR + cR²)X, R = XXᵀ, is a polynomial in the first R, so they are symmetric and commute:
iterate P = aI + bR + cR², R ← PRP, Q ← PQ on rows × rows and multiply the wide X by Q at the end. For 768×3072 that is 28 % fewer
operations than the plain form. What rounding does to R grows from step to step, so X is multiplied and R rebuilt on the way
(after 2 of 5 steps). The plain form is `linalg.newton_schulz`.
"""

from __future__ import annotations

import numpy as np

from ...linalg import Coefficients, step_coefficients

WIDE = 2.0  # columns over rows from which this form is cheaper
RESTARTS = range(2, 1000, 3)  # before these steps


def orthogonalize_wide(X: np.ndarray, steps: int, coefficients: Coefficients) -> np.ndarray:
    """The iteration on one normalised matrix with rows <= columns."""
    R, Q = X @ X.T, None
    P, square, product = (np.empty_like(R) for _ in range(3))
    diagonal = np.diag_indices_from(R)
    for step, each in enumerate(step_coefficients(coefficients, steps)):
        a, b, c = (X.dtype.type(value) for value in each)
        if step in RESTARTS and Q is not None:
            X = Q @ X
            R, Q = X @ X.T, None
        np.matmul(R, R.T, out=square)  # R is symmetric; saying so lets BLAS halve the work
        np.multiply(square, c, out=P)
        np.multiply(R, b, out=square)
        P += square
        P[diagonal] += a
        if step + 1 < steps and step + 1 not in RESTARTS:
            np.matmul(P, R, out=product)
            np.matmul(product, P, out=R)
        Q = P.copy() if Q is None else P @ Q
    assert Q is not None
    result: np.ndarray = Q @ X
    return result
