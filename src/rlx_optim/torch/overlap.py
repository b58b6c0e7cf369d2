"""Tensors that share memory: parameters tied by `.data`, views that overlap, one listed twice, a gradient inside a parameter.

Engines step what they are given at once, on several threads; so what shares memory must come to them one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .headers import is_fake
from .lanes import Bucket

Work = list[tuple[Bucket, list[int], list[torch.Tensor]]]  # lanes, which of their seats, and those seats' gradients
Entry = tuple[Bucket, int, int]  # a lane, a seat, its place among the chosen


def span(tensor: Any) -> tuple[int, int]:
    """From where to where a tensor's memory reaches, of a DTensor what is here; (0, 0) where it has no address."""
    t: Any = getattr(tensor, "_local_tensor", tensor)
    if not t.numel() or is_fake(t) or not (start := t.data_ptr()):
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def rounds(owner: str, work: Work, groups: Sequence[Mapping[str, Any]], repeated: Mapping[torch.Tensor, int]) -> list[Work]:
    """What may be stepped at once, in turn: parameters over one memory go one after the other, in the order of the groups, as
    torch steps them. A gradient that lies in a parameter is copied. repeated: parameters that groups list more than once."""
    entries = [(lane, i, k) for lane, chosen, _ in work for k, i in enumerate(chosen)]
    if len(entries) == 1 and not repeated:
        return [work]
    grads = {id(lane): each for lane, _, each in work}
    reach = np.array([span(lane.seats[i].param) for lane, i, _ in entries], np.int64).reshape(-1, 2)
    order = np.argsort(reach[:, 0], kind="stable")
    starts, ends = reach[order, 0], np.maximum.accumulate(reach[order, 1])
    theirs = np.array([span(grads[id(lane)][k]) for lane, _, k in entries], np.int64).reshape(-1, 2)
    inside = np.searchsorted(ends, theirs[:, 0], "right") < np.searchsorted(starts, theirs[:, 1], "left")
    for at in np.flatnonzero(inside & (theirs[:, 1] > theirs[:, 0])):
        lane, _, k = entries[at]
        grads[id(lane)][k] = grads[id(lane)][k].clone()
    if not (starts[1:] < ends[:-1]).any() and not repeated:
        return [work]
    return _in_turn(work, _turns(owner, entries, reach, groups, repeated))


def _turns(
    owner: str, entries: list[Entry], reach: np.ndarray, groups: Sequence[Mapping[str, Any]], repeated: Mapping[Any, int]
) -> list[tuple[int, Entry]]:
    """The round of each entry: after all before it whose memory it shares."""
    place = {param: i for i, param in enumerate(p for group in groups for p in group["params"])}
    params = [lane.seats[i].param for lane, i, _ in entries]
    turns: list[tuple[int, int]] = []
    for at in sorted(range(len(entries)), key=lambda at: place[params[at]]):
        lane, i, _ = entries[at]
        meets = [r for r, other in turns if reach[at, 0] < reach[other, 1] and reach[other, 0] < reach[at, 1]]
        times = repeated.get(params[at], 1)
        if lane.spread and (meets or times > 1):
            raise ValueError(
                f"{owner}: {lane.seats[i].records[0].name} shares memory with another parameter, and ranks step it together; "
                "tie the modules' parameters themselves (a.weight = b.weight)"
            )
        first = max(meets, default=-1) + 1
        turns += [(first + n, at) for n in range(times)]
    return [(number, entries[at]) for number, at in turns]


def _in_turn(work: Work, turns: list[tuple[int, Entry]]) -> list[Work]:
    out: list[Work] = []
    for number in range(max(r for r, _ in turns) + 1):
        now = [entry for r, entry in turns if r == number]
        mine = [(lane, chosen, grads, sorted(k for each, _, k in now if each is lane)) for lane, chosen, grads in work]
        out.append([(lane, [chosen[k] for k in ks], [grads[k] for k in ks]) for lane, chosen, grads, ks in mine if ks])
    return out
