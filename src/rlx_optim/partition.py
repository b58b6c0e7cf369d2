"""Sharing tensors out among ranks: who owns which, which part of a tensor a rank holds, and what a step sends.

Pure functions of shapes and settings: every rank comes to the same result, and so does `rlx-optim plan`, without any rank.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

from .program import has_reduction, trace
from .reading import reads_p
from .rounding import EXACT
from .spec import Shape, Spec
from .storage import count_bytes

FLAGS, DIGEST = 12, 4  # bytes before those of the parameters in the ranks' agreement: verdicts, then a digest and its complement
STAGES, STAGE = 4, 1 << 20  # how many there are at most, and how many elements a rank should have in each
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


def staged(work: Sequence[int], owners: Sequence[int], shapes: Sequence[Shape], ranks: int) -> list[list[int]]:
    """Matrices in stages, so that what one sends goes beside what another computes: each owner's by shape, cut where equal shares
    of its work end. Few where there is little to send."""
    count = max(1, min(STAGES, sum(map(math.prod, shapes)) // ranks // STAGE))
    stages: list[list[int]] = [[] for _ in range(count)]
    loads, done = [0] * ranks, [0] * ranks
    for cost, owner in zip(work, owners, strict=True):
        loads[owner] += cost
    for i in sorted(range(len(work)), key=lambda i: (shapes[i], i)):
        owner = owners[i]
        stages[min(count - 1, count * (2 * done[owner] + work[i]) // max(2 * loads[owner], 1))].append(i)  # by its middle
        done[owner] += work[i]
    return [sorted(stage) for stage in stages if stage]


# ---- what a step sends ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Traffic:
    """Of one step: bytes that each rank sends to others by all-to-all, those of them that go while their owner computes (all
    gradients, and p where it is read, but those of its first stage, all updates but those of its last), the lengths of the
    buffers that are all-reduced in bytes, and what each rank has to compute and to keep for the matrices it owns."""

    sent: list[int]
    hidden: list[int]
    stages: int
    all_reduced: list[int]
    work: list[int]
    state: list[int]


def traffic(entries: Sequence[tuple[Shape, Spec]], ranks: int, itemsize: int = 4, dim: int | None = 0) -> Traffic:
    """Of a step on tensors that are cut along `dim` (None: replicated, as under DDP), one (shape, spec) each.

    itemsize: of parameters and gradients; updates are float32, or float64 for float64, and so is state that is not coded, and p,
    where it has a low half and is read.
    """
    wide = max(itemsize, 4)
    out = Traffic([0] * ranks, [0] * ranks, 0, [], [0] * ranks, [0] * ranks)
    matrices = [(shape, spec) for shape, spec in entries if spec.matrix]
    measured = [(shape, spec) for shape, spec in entries if dim is not None and has_reduction(spec, shape)]
    if matrices or measured:
        out.all_reduced.append(FLAGS + len(entries))
    work = [spec.work(shape) for shape, spec in matrices]
    owners = share_out(work, out.work)
    stages = staged(work, owners, [shape for shape, _ in matrices], ranks) if matrices else []
    out.stages = len(stages)
    turns = [[place for place, stage in enumerate(stages) if any(owners[i] == rank for i in stage)] for rank in range(ranks)]
    for place, stage in enumerate(stages):
        for i in stage:
            (shape, spec), owner = matrices[i], owners[i]
            parts = [_part(shape, ranks, rank, dim) for rank in range(ranks)]
            tail = WIDE * (1 + len(spec.committed) + len(spec.counters()))  # what became of the update, and numbers beside it
            given = itemsize
            if reads_p(spec, shape):
                given += wide if spec.rounding == EXACT else itemsize
            updates = sum(part * wide + tail for rank, part in enumerate(parts) if rank != owner)
            out.state[owner] += sum(count_bytes(slot, wide) for slot in spec.stored_slots(shape).values())
            out.sent[owner] += updates
            out.hidden[owner] += updates if place < turns[owner][-1] else 0
            for rank, part in enumerate(parts):
                sent = part * given if dim is not None and rank != owner else 0
                out.sent[rank] += sent
                out.hidden[rank] += sent if place > turns[owner][0] else 0
    bundles: dict[Any, list[list[int]]] = {}
    for shape, spec in measured:
        key = (type(spec), tuple(spec.slots(shape)), spec.fusion_key())
        bundles.setdefault(key, []).append(trace(spec, spec.slots(shape)).sums(shape, dim or 0))
    for sums in bundles.values():
        out.all_reduced += [WIDE * total for total in map(sum, zip(*sums, strict=True)) if total]
    return out


def _part(shape: Shape, ranks: int, rank: int, dim: int | None) -> int:
    if dim is None or not shape:
        return math.prod(shape)
    return math.prod(shape[:dim]) * extent(shape[dim], ranks, rank)[1] * math.prod(shape[dim + 1 :])
