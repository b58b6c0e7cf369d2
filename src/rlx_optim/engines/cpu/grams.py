"""The running average of Gram matrices, in float64, strip by strip: each is rounded and mirrored while it is in the cache."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from .cache import compiled

STRIP = 256  # rows of a strip
WHOLE = 1024  # rows up to which a matrix is one strip: NumPy hands X·X^T to BLAS's syrk
TILE = 64  # rows and columns that are mirrored at once: through a copy, since rows of a large matrix lie in each other's way


def _blend(L, G, row, beta, alpha, out):
    """out <- beta·L + alpha·G where the rows of G belong, and at the mirrored places. Whether all of it is finite."""
    kind, nothing = out.dtype.type, 0.0
    for r in range(len(G)):
        for c in range(row + r + 1):
            value = kind(beta * L[row + r, c] + alpha * G[r, c])
            nothing += 0 * value
            out[row + r, c] = value
    tile = np.empty((TILE, TILE), G.dtype)
    for above in range(0, len(G), TILE):
        rows, top = min(TILE, len(G) - above), row + above
        for left in range(0, top, TILE):
            columns = min(TILE, top - left)
            for r in range(rows):
                for c in range(columns):
                    tile[r, c] = G[above + r, left + c]
            for c in range(columns):
                for r in range(rows):
                    out[left + c, top + r] = beta * L[left + c, top + r] + alpha * tile[r, c]
        for r in range(rows):
            for c in range(r):
                out[top + c, top + r] = beta * L[top + c, top + r] + alpha * G[above + r, top + c]
    return nothing == 0


@functools.cache
def _blending() -> Any:
    kinds = [(types.float32, types.float32), (types.float64, types.float32), (types.float64, types.float64)]
    gram, number, place = types.Array(types.float64, 2, "C"), types.float64, types.intp
    arrays = [(types.Array(given, 2, "C", readonly=True), types.Array(kept, 2, "C")) for given, kept in kinds]
    signatures = [types.boolean(L, gram, place, number, number, out) for L, out in arrays]
    # the sum that tells what is not finite may be taken in any order
    return compiled(njit, signatures, error_model="numpy", nogil=True, fastmath={"reassoc"})(_blend)


def average(L: np.ndarray, U: np.ndarray, beta: float, alpha: float, out: np.ndarray) -> None:
    """out <- beta·L + alpha·U·U^T, U in float64; L where that is not finite."""
    height = len(U) if len(U) <= WHOLE else STRIP
    blend, sound, buffer = _blending(), True, np.empty(height * len(U))
    for k in range(0, len(U), height):
        strip = U[k : k + height]
        end = k + len(strip)
        G = buffer[: len(strip) * end].reshape(len(strip), end)
        sound &= blend(L, np.matmul(strip, U[:end].T, out=G), k, beta, alpha, out)
    if not sound:
        out[...] = L
