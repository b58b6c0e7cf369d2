"""Ranks that have something to decide together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .layout import Comm, Layout


class RemoteError(RuntimeError):
    """Another rank has refused, and says why."""


class Together:
    """Process groups whose ranks must agree. One after the other, so ranks that share none directly agree through a third."""

    def __init__(self, comms: Iterable[Comm]):
        self.comms = list({comm.name: comm for comm in comms if comm.size > 1}.values())

    def highest(self, values: list[int], dtype: torch.dtype = torch.uint8, device: Any = "cpu") -> list[int]:
        """The largest of each value on any rank. device: where these ranks can talk if they cannot on the host."""
        for comm in self.comms:
            on_host = "cpu:" in torch.distributed.get_backend_config(comm.group)
            tensor = torch.tensor(values, dtype=dtype, device="cpu" if on_host else device)
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=comm.group)
            values = tensor.tolist()
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
            raise RemoteError(f"{what} on another rank, which says why")


def sharing(params: Iterable[torch.Tensor], comm: Comm | None) -> Together:
    """Everyone who has a part or a replica of these parameters."""
    comms = [] if comm is None else [comm]
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        comms += [Comm(mesh.get_group(i)) for i in range(mesh.ndim)]
    return Together(comms)


def splitting(params: Iterable[torch.Tensor]) -> Together:
    """Those who have different parts of these parameters, and replicas of such parts: what one refuses, all of them refuse."""
    return sharing([p for p in params if isinstance(p, DTensor) and Layout(p).comms], None)
