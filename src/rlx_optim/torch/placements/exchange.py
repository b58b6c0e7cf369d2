"""Shards to owners and back, each by one all_to_all_single over bytes.

Bytes, so that one exchange carries every dtype and the numbers beside the tensors. An exchange is begun and goes on beside what
the caller computes; what it gives back waits for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ...partition import extent
from ...spec import Shape
from .comm import Comm


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that one rank has whole and every rank has a part of: along `dim`, or (None) all of it."""

    shape: Shape
    dtype: torch.dtype
    dim: int | None
    owner: int

    def part(self, comm: Comm, rank: int) -> Shape:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], extent(self.shape[self.dim], comm.size, rank)[1], *self.shape[self.dim + 1 :])

    def cut(self, comm: Comm, whole: torch.Tensor, rank: int) -> torch.Tensor:
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, *extent(self.shape[self.dim], comm.size, rank))


def gather_wholes(
    comm: Comm, items: Sequence[Transfer], parts: Sequence[torch.Tensor], device: torch.device
) -> Callable[[], dict[int, torch.Tensor]]:
    """Every rank gives its parts; an owner gets its tensors whole, by their place in `items`."""
    own = [i for i, item in enumerate(items) if item.owner == comm.rank]
    receive = _exchange(
        comm,
        [[parts[i] for i, item in enumerate(items) if item.owner == rank] for rank in range(comm.size)],
        [[(items[i].part(comm, rank), items[i].dtype) for i in own] for rank in range(comm.size)],
        device,
    )

    def wholes() -> dict[int, torch.Tensor]:
        parts = receive()
        return {i: torch.cat([parts[rank][k] for rank in range(comm.size)], items[i].dim or 0) for k, i in enumerate(own)}

    return wholes


def scatter_parts(
    comm: Comm, items: Sequence[Transfer], wholes: Mapping[int, torch.Tensor], device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    """Owners give their tensors whole; every rank gets its part of each."""
    owned = [[i for i, item in enumerate(items) if item.owner == rank] for rank in range(comm.size)]
    own = owned[comm.rank]
    receive = _exchange(
        comm,
        [[items[i].cut(comm, wholes[i], rank) for i in own] for rank in range(comm.size)],
        [[(items[i].part(comm, comm.rank), items[i].dtype) for i in owned[rank]] for rank in range(comm.size)],
        device,
    )

    def parts() -> list[torch.Tensor]:
        each = receive()
        place = {i: each[rank][k] for rank in range(comm.size) for k, i in enumerate(owned[rank])}
        return [place[i] for i in range(len(items))]

    return parts


def _exchange(
    comm: Comm, gives: list[list[torch.Tensor]], wants: list[list[tuple[Shape, torch.dtype]]], device: torch.device
) -> Callable[[], list[list[torch.Tensor]]]:
    """Give lists of tensors to each rank, get tensors of known shapes from each."""
    sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in each] for each in wants]
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for each in gives for tensor in each]
    send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    receive = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=device)
    given = [sum(t.numel() * t.element_size() for t in each) for each in gives]
    work = torch.distributed.all_to_all_single(receive, send, list(map(sum, sizes)), given, group=comm.group, async_op=True)

    def receive_pieces() -> list[list[torch.Tensor]]:
        work.wait()
        pieces = iter(receive.split([size for each in sizes for size in each]))
        return [[_typed(next(pieces), shape, dtype) for shape, dtype in each] for each in wants]

    return receive_pieces


def _typed(piece: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    aligned = piece.storage_offset() % dtype.itemsize == 0
    return (piece if aligned else piece.clone()).view(dtype).reshape(shape)
