"""Sums of squares at the speed of memory: 4 bytes a float32, read once.

Chunks are summed apart and their sums added in order, so the bits do not depend on the number of threads.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-untyped-def, attr-defined, call-arg"

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numba import cfunc, njit, types

from ... import threads
from ...pointers import address
from .cache import compiled
from .native import float32_at, float64_at, int64_at, loose_add
from .parallel import alone, may_spread, spread

PIECE = 1 << 15  # elements of a chunk
WORTHWHILE = 1 << 18  # elements from which a second thread pays


@njit(error_model="numpy")
def _sum(x, n):
    found = 0.0
    for i in range(n):
        value = types.float64(x[i])
        found = loose_add(found, value * value if abs(value) < math.inf else 0.0)
    return found


@compiled(cfunc, types.void(*[types.int64] * 7))
def _kernel(table, numbers, chunks, first, last, partial, scratch):
    """Rows of the table: where a chunk starts, its length, its element's bytes."""
    row, out = int64_at(table), float64_at(partial)
    for c in range(first, last):
        place, n = row[3 * c], row[3 * c + 1]
        if row[3 * c + 2] == 4:
            out[c] = _sum(float32_at(place), n)
        else:
            out[c] = _sum(float64_at(place), n)


KERNEL: int = _kernel.address or 0


def square_sum(arrays: Sequence[np.ndarray]) -> float:
    """Of the finite entries of contiguous arrays of float32 and float64."""
    table = np.concatenate([_chunks(array) for array in arrays]) if arrays else np.empty((0, 3), np.int64)
    partial = np.zeros(len(table))
    count = threads.get_threads() if sum(a.size for a in arrays) >= WORTHWHILE and may_spread() else 1
    if count > 1:
        bounds = np.linspace(0, len(table), count + 1).astype(np.int64)
        spread(KERNEL, address(table), 0, 0, address(bounds), count, address(partial), 0, threads=count)
    else:
        arguments = (ctypes.c_int64 * 8)(KERNEL, address(table), 0, 0, 0, len(table), address(partial), 0)
        alone(ctypes.addressof(arguments))
    return math.fsum(partial)


def _chunks(array: np.ndarray) -> np.ndarray:
    starts = np.arange(0, array.size, PIECE, dtype=np.int64)
    places = address(array) + starts * array.itemsize
    return np.stack([places, np.minimum(array.size - starts, PIECE), np.full_like(starts, array.itemsize)], 1)
