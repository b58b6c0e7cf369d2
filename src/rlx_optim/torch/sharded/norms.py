"""Sums over gradients that lie in different ways on different meshes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .council import local_grad
from .layout import Circle, Layout, here


class Way:
    """How gradients are split: the circles to add up over, equal by name."""

    def __init__(self, circles: Iterable[Circle]):
        self.circles = list(circles)
        self.names = tuple(circle.name for circle in self.circles)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def sorted_out(params: Iterable[Any]) -> dict[Way, list[torch.Tensor]]:
    """What is here of every gradient, by the way the parameter is split: a gradient may be missing, the parameter is there."""
    found: dict[Way, list[torch.Tensor]] = {}
    for param in params:
        way = Way(circle for circle in (Layout(param).circles if isinstance(param, DTensor) else []) if circle.size > 1)
        local = found.setdefault(way, [])
        if param.grad is not None:
            spread = isinstance(param, DTensor)
            local.append(local_grad("clip_grad_norm_", "a parameter", param, param.grad) if spread else here(param.grad))
    return found


def total(sums: Mapping[Way, torch.Tensor], largest: bool) -> torch.Tensor:
    """All sums together, each over its own ranks: those that are split in one way by one all-reduce."""
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for way, value in sums.items():
        for circle in way.circles:
            torch.distributed.all_reduce(value, op, group=circle.group)
    each = torch.stack(list(sums.values()))
    return each.max() if largest else each.sum()
