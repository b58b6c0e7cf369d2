"""The torch engine on shards: what a rule measures over whole tensors is summed here and all-reduced.

All tensors of a bundle and all results of one map travel in one flat float64 buffer per process group, so a step costs as many
all-reduces as the rule has dependent measurements, however many tensors there are. An empty shard adds nothing and takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...engine import Bundle
from ...engines.torch_ import Torch
from ...language import Reduction
from ...program import Pass, reduced_axis
from ...spec import Shape
from ..memory import local_part
from .comm import Comm, DTensorLayout
from .consensus import local_grad


class Reducing(Torch):
    """`bundle.pointers` holds the layouts of a step's tensors, `bundle.index` says which of them are in the bundle."""

    def run(self, bundle: Bundle, move: bool = True) -> Mapping[str, Any]:
        self.layouts: list[DTensorLayout] = [bundle.pointers[i] for i in bundle.index]
        return super().run(bundle, move)

    def reduce_array(self, array: torch.Tensor, how: Reduction) -> torch.Tensor:
        """The sum over what is here, in float64."""
        if how.largest and not array.numel():
            return torch.full_like(array.double().sum(how.axis), -math.inf)
        return super().reduce_array(array.double(), how)

    def finish_reductions(self, step: Pass, shapes: Sequence[Shape], raw: Sequence[Sequence[torch.Tensor]]) -> dict[int, Any]:
        sums = [list(each) for each in raw]
        self._add_up([
            (layout, None if how.axis is None else reduced_axis(step.domain, how), how.largest, each, i)
            for (_, _, how), each in zip(step.reduces, sums, strict=True)
            for i, layout in enumerate(self.layouts)
        ])  # fmt: skip
        found = super().finish_reductions(step, [layout.shape for layout in self.layouts], sums)
        return {n: [t.to(self.dtype) for t in value] if isinstance(value, list) else value for n, value in found.items()}

    @staticmethod
    def _add_up(entries: list[tuple[DTensorLayout, int | None, bool, list[torch.Tensor], int]]) -> None:
        """Make the sums of this rank those of all ranks that share what was summed over."""
        shared: dict[tuple[str, bool], tuple[Comm, list[tuple[list[torch.Tensor], int]]]] = {}
        for layout, axis, largest, sums, i in entries:
            for (_, dim), comm in zip(layout.shards, layout.comms, strict=True):
                if comm.size > 1 and axis in (None, dim - len(layout.shape)):
                    shared.setdefault((comm.name, largest), (comm, []))[1].append((sums, i))
        for (_, largest), (comm, members) in shared.items():
            flat = torch.cat([sums[i].reshape(-1) for sums, i in members])
            op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(flat, op, group=comm.group)
            for (sums, i), total in zip(members, flat.split([sums[i].numel() for sums, i in members]), strict=True):
                sums[i] = total.reshape(sums[i].shape)


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
        way = Way(comm for comm in (DTensorLayout(param).comms if isinstance(param, DTensor) else []) if comm.size > 1)
        local = found.setdefault(way, [])
        if param.grad is not None:
            spread = isinstance(param, DTensor)
            local.append(local_grad("clip_grad_norm_", "a parameter", param, param.grad) if spread else local_part(param.grad))
    return found


def total(sums: Mapping[Way, torch.Tensor], largest: bool) -> torch.Tensor:
    """All sums together, each over its own ranks: those that are split in one way by one all-reduce."""
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    for way, value in sums.items():
        for comm in way.comms:
            torch.distributed.all_reduce(value, op, group=comm.group)
    each = torch.stack(list(sums.values()))
    return each.max() if largest else each.sum()
