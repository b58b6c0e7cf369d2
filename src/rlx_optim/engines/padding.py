"""Matrices of many shapes as stacks of few: rows and columns of zeros stay zeros through Newton–Schulz.

A matrix lies in its stack with the smaller side first. What its padded sides are depends on its own alone, so that the others in
a step do not change its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Shape

LEAST = 16  # what sides of small matrices are filled up to at least; then to powers of two
SMALL = 128  # the smaller side from which a matrix is not small; what its sides are multiples of then


def mixes(shape: Shape) -> bool:
    """Whether a tensor is such a small matrix."""
    return len(shape) == 2 and 0 < min(shape) < SMALL


def padded(shape: Shape) -> tuple[int, int]:
    small, large = (_filled(n, min(shape) < SMALL) for n in sorted(shape))
    return small, large


def _filled(n: int, small: bool) -> int:
    power = 1 << (n - 1).bit_length()
    if small:
        return max(LEAST, power)
    step = max(SMALL, power // 8)  # products are computed in such blocks anyway; above 512 at most a fifth of a side is zeros
    return -(-n // step) * step


def stacks(shapes: Sequence[Shape]) -> dict[tuple[bool, tuple[int, int]], list[int]]:
    """The stacks that these matrices make: whether of small ones, their sides; and which matrices are in each."""
    found: dict[tuple[bool, tuple[int, int]], list[int]] = {}
    for i, shape in enumerate(shapes):
        found.setdefault((min(shape) < SMALL, padded(shape)), []).append(i)
    return found
