"""Sums over gradients that lie in different ways on different meshes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .consensus import local_grad
from .layout import Comm, Layout, to_local


class Way:
    """How gradients are split: the comms to add up over, equal by name."""

    def __init__(self, comms: Iterable[Comm]):
        self.comms = list(comms)
        self.names = tuple(comm.name for comm in self.comms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def sorted_out(params: Iterable[Any]) -> dict[Way, list[torch.Tensor]]:
    """What is here of every gradient, by the way the parameter is split: a gradient may be missing, the parameter is there."""
    found: dict[Way, list[torch.Tensor]] = {}
    for param in params:
        way = Way(comm for comm in (Layout(param).comms if isinstance(param, DTensor) else []) if comm.size > 1)
        local = found.setdefault(way, [])
        if param.grad is not None:
            spread = isinstance(param, DTensor)
            local.append(local_grad("clip_grad_norm_", "a parameter", param, param.grad) if spread else to_local(param.grad))
    return found


def total(sums: Mapping[Way, torch.Tensor], largest: bool) -> torch.Tensor:
    """All sums together, each over its own ranks: those that are split in one way by one all-reduce."""
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for way, value in sums.items():
        for comm in way.comms:
            torch.distributed.all_reduce(value, op, group=comm.group)
    each = torch.stack(list(sums.values()))
    return each.max() if largest else each.sum()
