"""The running average of Gram matrices, in float64, strip by strip: each is rounded and mirrored while it is in the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ...pointers import address
from .codegen import Code, Value, loose_add, smaller

STRIP = 256  # rows of a strip
WHOLE = 1024  # rows up to which a matrix is one strip: NumPy hands X·X^T to BLAS's syrk
TILE = 64  # rows and columns that are mirrored at once: through a copy, since rows of a large matrix lie in each other's way


@functools.cache
def _compile_blend(given: str, kept: str) -> Callable[..., None]:
    """out <- beta·L + alpha·G where the rows of G belong, from `row` on, and at the mirrored places; `nothing` becomes 0
    where all of it is finite. L and out have n columns, G has those it needs."""
    code = Code(f"blend_{given}_{kept}", [*["int64"] * 7, "float64", "float64"])
    *places, rows, row, n, beta, alpha = code.arguments
    L, G, out, nothing = map(code.array, (given, "float64", kept, kept), places)
    end, total = row + rows, code.variable(code.constant(kept, 0))

    def blend(at: Value, value: Value) -> Value:
        return (beta * L[at].to("float64") + alpha * value).to(kept)

    with code.loop(0, rows) as r, code.loop(0, row + r + 1) as c:
        value = blend((row + r) * n + c, G[r * end + c])
        total[0] = loose_add(total[0], value * 0)  # which may be taken in any order
        out[(row + r) * n + c] = value
    tile = code.stack_array("float64", TILE * TILE)
    with code.loop(0, (rows + (TILE - 1)) // TILE) as tall:
        above = tall * TILE
        height, top = smaller(rows - above, TILE), row + above
        with code.loop(0, (top + (TILE - 1)) // TILE) as wide:
            left = wide * TILE
            columns = smaller(top - left, TILE)
            with code.loop(0, height) as r, code.loop(0, columns) as c:
                tile[r * TILE + c] = G[(above + r) * end + left + c]
            with code.loop(0, columns) as c, code.loop(0, height) as r:
                at = (left + c) * n + top + r
                out[at] = blend(at, tile[r * TILE + c])
        with code.loop(0, height) as r, code.loop(0, r) as c:
            at = (top + c) * n + top + r
            out[at] = blend(at, G[(above + r) * end + top + c])
    nothing[0] = total[0]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7, ctypes.c_double, ctypes.c_double)(code.compile())


def average_gram(L: np.ndarray, U: np.ndarray, beta: float, alpha: float, out: np.ndarray) -> None:
    """out <- beta·L + alpha·U·U^T, U in float64; L where that is not finite."""
    height = len(U) if len(U) <= WHOLE else STRIP
    blend, buffer, nothing = _compile_blend(L.dtype.name, out.dtype.name), np.empty(height * len(U)), np.zeros(1, out.dtype)
    sound = True
    for k in range(0, len(U), height):
        strip = U[k : k + height]
        end = k + len(strip)
        G = buffer[: len(strip) * end].reshape(len(strip), end)
        np.matmul(strip, U[:end].T, out=G)
        blend(*map(address, (L, G, out, nothing)), len(strip), k, len(L), beta, alpha)
        sound &= bool(nothing[0] == 0)
    if not sound:
        out[...] = L
