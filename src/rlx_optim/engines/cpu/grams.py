"""The running average of Gram matrices, in float64, strip by strip: each is rounded and mirrored while it is in the cache."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from .cache import compiled

STRIP = 256  # rows of a strip
TILE = 64  # rows and columns that are mirrored at once


def _blend(L, G, row, column, beta, alpha, out):
    """out <- beta·L + alpha·G where G belongs, and at the mirrored place. Whether all of it is finite."""
    rows, columns = G.shape
    sound = True
    for top in range(0, rows, TILE):
        for left in range(0, columns, TILE):
            bottom, right = min(top + TILE, rows), min(left + TILE, columns)
            for r in range(top, bottom):
                for c in range(left, right):
                    value = out.dtype.type(beta * L[row + r, column + c] + alpha * G[r, c])
                    sound &= abs(value) < np.inf
                    out[row + r, column + c] = value
            if row != column:
                for c in range(left, right):
                    for r in range(top, bottom):
                        out[column + c, row + r] = beta * L[column + c, row + r] + alpha * G[r, c]
    return sound


@functools.cache
def _blending() -> Any:
    kinds = [(types.float32, types.float32), (types.float64, types.float32), (types.float64, types.float64)]
    gram, number, place = types.Array(types.float64, 2, "C"), types.float64, types.intp
    arrays = [(types.Array(given, 2, "C", readonly=True), types.Array(kept, 2, "C")) for given, kept in kinds]
    signatures = [types.boolean(L, gram, place, place, number, number, out) for L, out in arrays]
    return compiled(njit, signatures, error_model="numpy", nogil=True)(_blend)


def average(L: np.ndarray, U: np.ndarray, beta: float, alpha: float, out: np.ndarray) -> None:
    """out <- beta·L + alpha·U·U^T, U in float64; L where that is not finite."""
    blend, sound = _blending(), True
    for i in range(0, len(U), STRIP):
        strip = U[i : i + STRIP]
        sound &= blend(L, strip @ strip.T, i, i, beta, alpha, out)
        if i:
            sound &= blend(L, strip @ U[:i].T, i, 0, beta, alpha, out)
    if not sound:
        out[...] = L
