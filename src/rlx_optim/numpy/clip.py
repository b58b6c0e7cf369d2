"""Norms and clipping over gradients, in float64, that never touch the gradients.

What is large is summed by the cpu engine, where it can run: once through the memory, on all threads.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..engines import no_compiler

LARGE = 1 << 16  # elements from which the compiled sum pays


def _square_sum(arrays: Iterable[Any]) -> float:
    if isinstance(arrays, Mapping):
        raise TypeError("arrays must be arrays of real numbers, got a mapping; pass grads.values()")
    given = [np.asarray(x) for x in arrays]
    for array in given:
        if array.dtype.kind not in "fiu":
            raise TypeError(f"arrays must be arrays of real numbers, got {array.dtype}")
    simple = [a for a in given if a.flags.c_contiguous and a.flags.aligned and a.dtype in (np.float32, np.float64)]
    if sum(a.size for a in simple) < LARGE or no_compiler() is not None:
        simple = []
    rest = given if not simple else [a for a in given if not any(a is b for b in simple)]
    total = math.fsum(map(_in_pieces, rest))
    if simple:
        from ..engines.cpu.norms import square_sum

        total += square_sum(simple)
    return total


def _in_pieces(array: np.ndarray) -> float:
    flat, total = array.reshape(-1), 0.0
    for lo in range(0, flat.size, 1 << 16):  # in pieces, so that nothing the size of x is made
        piece = flat[lo : lo + (1 << 16)].astype(np.float64)
        total += float(np.square(piece[np.isfinite(piece)]).sum())
    return total


def l2_norm(x: Any) -> float:
    """The 2-norm over the finite entries of one array; 0 for an empty one."""
    return math.sqrt(_square_sum([x]))


def global_norm(arrays: Iterable[Any]) -> float:
    """The 2-norm over the finite entries of all arrays together."""
    return math.sqrt(_square_sum(arrays))


def global_grad_clip_scale(arrays: Iterable[Any], max_norm: float) -> float:
    """What to pass as grad_scale so that the gradients together have at most this norm: max_norm/norm, or 1.0.
    `clip_scale` is an alias.

    opt.step_all(params, grads, grad_scale=global_grad_clip_scale(grads.values(), 1.0))
    """
    if not isinstance(max_norm, numbers.Real) or not max_norm > 0:  # NaN too
        raise ValueError(f"max_norm must be a positive number, got {max_norm!r}")
    norm = global_norm(arrays)
    return max_norm / norm if norm > max_norm else 1.0


#: a short name for the same function
clip_scale = global_grad_clip_scale
