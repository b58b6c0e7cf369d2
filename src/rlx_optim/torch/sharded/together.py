"""Ranks that have something to decide together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .layout import Circle, Layout


class Elsewhere(RuntimeError):
    """Another rank has refused, and says why."""


class Together:
    """Process groups whose ranks must agree. One after the other, so ranks that share none directly agree through a third."""

    def __init__(self, circles: Iterable[Circle]):
        self.circles = list({circle.name: circle for circle in circles if circle.size > 1}.values())

    def highest(self, values: list[int], dtype: torch.dtype = torch.uint8, device: Any = "cpu") -> list[int]:
        """The largest of each value on any rank. device: where these ranks can talk if they cannot on the host."""
        for circle in self.circles:
            on_host = "cpu:" in torch.distributed.get_backend_config(circle.group)
            told = torch.tensor(values, dtype=dtype, device="cpu" if on_host else device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=circle.group)
            values = told.tolist()
        return values

    @contextmanager
    def agreed(self, what: str, device: Any = "cpu") -> Iterator[None]:
        """Leave the block on all ranks, or raise on all of them."""
        try:
            yield
        except Exception:
            self.highest([1], device=device)
            raise
        if self.highest([0], device=device)[0]:
            raise Elsewhere(f"{what} on another rank, which says why")


def sharing(params: Iterable[torch.Tensor], circle: Circle | None) -> Together:
    """Everyone who has a part or a replica of these parameters."""
    circles = [] if circle is None else [circle]
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        circles += [Circle(mesh.get_group(i)) for i in range(mesh.ndim)]
    return Together(circles)


def splitting(params: Iterable[torch.Tensor]) -> Together:
    """Those who have different parts of these parameters, and replicas of such parts: what one refuses, all of them refuse."""
    return sharing([p for p in params if isinstance(p, DTensor) and Layout(p).circles], None)
