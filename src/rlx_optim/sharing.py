"""Sharing tensors out among ranks: who owns which, and which part of a tensor a rank holds. Pure functions of shapes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def share_out(costs: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each cost: the dearest first, each to the rank with the least to do so far. `loads` is added to."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heap[0]
        owners[i], loads[rank] = rank, load + costs[i]
        heapq.heapreplace(heap, (loads[rank], rank))
    return owners


def extent(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's part of an axis begins and how long it is, as torch.chunk cuts it: the last parts may be short or empty."""
    each = -(-length // ranks)
    start = min(length, rank * each)
    return start, min(length, start + each) - start
