"""Sharing tensors out among ranks: who owns which, which part of a tensor a rank holds, and what a step sends.

Pure functions of shapes and settings: every rank comes to the same result, and so does `rlx-optim plan`, without any rank.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

from .program import measures, trace
from .spec import Shape, Spec

FLAGS = 4  # that go before those of the parameters in the ranks' agreement
WIDE = 8  # bytes of a number that is added up, or that comes with an update


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


# ---- what a step sends ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Traffic:
    """Of one step: bytes that each rank sends to others by all-to-all, the lengths of the buffers that are all-reduced in bytes,
    and what each rank has to compute and to keep for the matrices it owns."""

    sent: list[int]
    all_reduced: list[int]
    work: list[int]
    state: list[int]


def traffic(entries: Sequence[tuple[Shape, Spec]], ranks: int, itemsize: int = 4, dim: int | None = 0) -> Traffic:
    """Of a step on tensors that are cut along `dim` (None: replicated, as under DDP), one (shape, spec) each.

    itemsize: of parameters and gradients; updates and state are float32, or float64 for float64.
    """
    wide = max(itemsize, 4)
    out = Traffic([0] * ranks, [], [0] * ranks, [0] * ranks)
    matrices = [(shape, spec) for shape, spec in entries if spec.matrix]
    measured = [(shape, spec) for shape, spec in entries if dim is not None and measures(spec, shape)]
    if matrices or measured:
        out.all_reduced.append(FLAGS + len(matrices) + len(measured))
    owners = share_out([spec.work(shape) for shape, spec in matrices], out.work)
    for (shape, spec), owner in zip(matrices, owners, strict=True):
        parts = [_part(shape, ranks, rank, dim) for rank in range(ranks)]
        tail = WIDE * (len(spec.committed) + len(spec.counters()))  # numbers that travel with the update
        out.sent[owner] += sum(part * wide + tail for rank, part in enumerate(parts) if rank != owner)
        out.state[owner] += wide * sum(math.prod(slot.shape) for slot in spec.slots(shape).values())
        for rank, part in enumerate(parts):
            out.sent[rank] += part * itemsize if dim is not None and rank != owner else 0
    bundles: dict[Any, list[list[int]]] = {}
    for shape, spec in measured:
        key = (type(spec), tuple(spec.slots(shape)), spec.likeness())
        bundles.setdefault(key, []).append(trace(spec, spec.slots(shape)).sums(shape, dim or 0))
    for sums in bundles.values():
        out.all_reduced += [WIDE * total for total in map(sum, zip(*sums, strict=True)) if total]
    return out


def _part(shape: Shape, ranks: int, rank: int, dim: int | None) -> int:
    if dim is None or not shape:
        return math.prod(shape)
    return math.prod(shape[:dim]) * extent(shape[dim], ranks, rank)[1] * math.prod(shape[dim + 1 :])
