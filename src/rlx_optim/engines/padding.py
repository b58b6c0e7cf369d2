"""Small matrices of many shapes as stacks of few: rows and columns of zeros stay zeros through Newton–Schulz.

A matrix lies in its stack with the smaller side first. What its padded sides are depends on its own alone, so that the others in
a step do not change its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import Shape

LEAST = 16  # what sides are filled up to at least; then to powers of two
SMALL = 128  # the smaller side from which a matrix is better computed by itself


def mixes(shape: Shape) -> bool:
    """Whether a tensor is such a small matrix."""
    return len(shape) == 2 and 0 < min(shape) < SMALL


def padded(shape: Shape) -> tuple[int, int]:
    small, large = (max(LEAST, 1 << (n - 1).bit_length()) for n in sorted(shape))
    return small, large


def stacks(shapes: Sequence[Shape]) -> dict[tuple[int, int], list[int]]:
    """The stacks that these matrices make, and which of them are in each."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        found.setdefault(padded(shape), []).append(i)
    return found
