"""Tensors dealt out into buckets that are brought to where they are computed with, and taken back (`torch.offload`)."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET = 64 << 20  # bytes that a bucket brings along at most; one tensor, or one row, at the least
#: times that: where the host computes, whose threads wait for each other at the end of each; of matrices, which are stacked
HOST, MATRICES = 4, 2
SLOTS = 3  # buckets at once: one is computed, one comes, one goes
ALIGNED = 256  # bytes: what a tensor in a bucket takes is a multiple


def on_the_device(matrix: bool, engine: str) -> bool:
    """Whether it computes what is offloaded, by the kind of rule and the engine asked for: then state goes up and down."""
    return engine == "triton" or (matrix and engine != "cpu")


def most(above: bool, matrix: bool) -> int:
    """Bytes of a bucket. above: it is brought to the device."""
    return BUCKET * (MATRICES if matrix else 1) if above else BUCKET * HOST


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def runs(rows: int, row: int, most: int) -> list[slice]:
    """Rows of so many bytes each, in runs that are for a bucket each."""
    many = max(1, most // max(row, 1))
    return [slice(first, min(first + many, rows)) for first in range(0, rows, many)] or [slice(0, 0)]


def dealt(sizes: Sequence[int], most: int, together: bool = False) -> list[list[int]]:
    """The places of what is of these sizes, bucket by bucket; in one, where all must be together."""
    found: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not found or (filled + size > most and not together):
            found.append([])
            filled = 0
        found[-1].append(place)
        filled += size
    return found


def rooms(sizes: Sequence[int], most: int, together: bool = False) -> list[int]:
    """The bytes of the rooms that such buckets use in turn."""
    filled = [sum(sizes[place] for place in places) for places in dealt(sizes, most, together)]
    return [max(filled[slot::SLOTS]) for slot in range(min(SLOTS, len(filled)))]
