"""Tensors that share memory: parameters tied by `.data`, views that overlap, one listed twice, a gradient inside a parameter.

Engines step what they are given at once, on several threads; so what shares memory must come to them one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .memory import is_fake, local_part
from .placements.local import Batch, Placement

Work = list[Batch]
Entry = tuple[Placement, int, int]  # a placement, an entry, its place among the chosen


def span(tensor: Any) -> tuple[int, int]:
    """From where to where a tensor's memory reaches, of a DTensor what is here; (0, 0) where it has no address."""
    t: Any = local_part(tensor)
    if not t.numel() or is_fake(t) or not (start := t.data_ptr()):
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def batch_spans(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """From where to where the memory of a batch's parameters reaches, and that of its gradients."""
    entries = batch.placement.select(batch.chosen).entries
    found = batch.addresses
    if found is None or found.odd:
        each = [span(entry.param) for entry in entries], [span(grad) for grad in batch.grads]
        return np.array(each[0], np.int64).reshape(-1, 2), np.array(each[1], np.int64).reshape(-1, 2)
    expected = batch.placement.select(batch.chosen).expected
    itemsizes = [expected.itemsizes] * 2
    if found.grad_types != expected.dtypes:
        itemsizes[1] = np.array([each.itemsize for each in found.grad_types], np.int64)
    starts = found.params, found.grads
    ends = (start + expected.sizes * each for start, each in zip(starts, itemsizes, strict=True))
    params, grads = (np.array(side).T for side in zip(starts, ends, strict=True))
    return params, grads


def split_rounds(owner: str, work: Work, groups: Sequence[Mapping[str, Any]], repeated: Mapping[torch.Tensor, int]) -> list[Work]:
    """What may be stepped at once, in turn: parameters over one memory go one after the other, in the order of the groups, as
    torch steps them. A gradient that lies in a parameter is copied. repeated: parameters that groups list more than once."""
    if sum(len(batch.chosen) for batch in work) <= 1 and not repeated:
        return [work]
    sides = [batch_spans(batch) for batch in work]
    reach, of_grads = (np.concatenate([side[k] for side in sides]) if sides else np.zeros((0, 2), np.int64) for k in (0, 1))
    order = np.argsort(reach[:, 0], kind="stable")
    starts, ends = reach[order, 0], np.maximum.accumulate(reach[order, 1])
    inside = np.searchsorted(ends, of_grads[:, 0], "right") < np.searchsorted(starts, of_grads[:, 1], "left")
    inside &= of_grads[:, 1] > of_grads[:, 0]
    overlapping = (starts[1:] < ends[:-1]).any()
    if not overlapping and not repeated and not inside.any():
        return [work]
    entries = [(i, k) for i, batch in enumerate(work) for k in range(len(batch.chosen))]
    for at in np.flatnonzero(inside):
        i, k = entries[at]
        work[i].grads[k] = work[i].grads[k].clone()
        work[i] = work[i]._replace(addresses=None)
    if not overlapping and not repeated:
        return [work]
    places = [(work[i].placement, work[i].chosen[k], k) for i, k in entries]
    return _batch_rounds(work, _order_rounds(owner, places, reach, groups, repeated))


def _order_rounds(
    owner: str, entries: list[Entry], reach: np.ndarray, groups: Sequence[Mapping[str, Any]], repeated: Mapping[Any, int]
) -> list[tuple[int, Entry]]:
    """The round of each entry: after all before it whose memory it shares."""
    place = {param: i for i, param in enumerate(p for group in groups for p in group["params"])}
    params = [placement.entries[i].param for placement, i, _ in entries]
    turns: list[tuple[int, int]] = []
    for at in sorted(range(len(entries)), key=lambda at: place[params[at]]):
        placement, i, _ = entries[at]
        meets = [r for r, other in turns if reach[at, 0] < reach[other, 1] and reach[other, 0] < reach[at, 1]]
        times = repeated.get(params[at], 1)
        if placement.spread and (meets or times > 1):
            raise ValueError(
                f"{owner}: {placement.entries[i].records[0].name} shares memory with another parameter, and ranks step it "
                "together; "
                "tie the modules' parameters themselves (a.weight = b.weight)"
            )
        first = max(meets, default=-1) + 1
        turns += [(first + n, at) for n in range(times)]
    return [(number, entries[at]) for number, at in turns]


def _batch_rounds(work: Work, turns: list[tuple[int, Entry]]) -> list[Work]:
    out: list[Work] = []
    for number in range(max(r for r, _ in turns) + 1):
        entries = [entry for r, entry in turns if r == number]
        taken = [(batch, sorted(k for placement, _, k in entries if placement is batch.placement)) for batch in work]
        out.append([Batch(b.placement, [b.chosen[k] for k in ks], [b.grads[k] for k in ks]) for b, ks in taken if ks])
    return out
