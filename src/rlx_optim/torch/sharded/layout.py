"""Where a DTensor lies: its mesh and placements, read from the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ...partition import extent
from ...spec import Shape


def to_local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that is in this rank's memory; a plain tensor itself."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


class Comm:
    """Ranks that share parameters out among themselves: a process group, and the place in it."""

    def __init__(self, group: Any):
        self.group, self.name = group, str(group.group_name)
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


class Layout:
    """A DTensor's mesh, placements and shape. `shards` are (dimension of the mesh, dimension of the tensor)."""

    def __init__(self, tensor: DTensor):
        self.mesh, self.placements, self.shape = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
        self.shards = [(i, int(p.dim)) for i, p in enumerate(self.placements) if not p.is_replicate()]  # type: ignore[attr-defined]
        self.local_shape: Shape = tuple(to_local(tensor).shape)
        self.comms = [Comm(self.mesh.get_group(i)) for i, _ in self.shards]

    @property
    def exchangeable(self) -> bool:
        """Sharded along one dimension of the mesh, the plain way."""
        if len(self.shards) != 1:
            return False
        ((i, dim),) = self.shards
        comm, placement = self.comms[0], self.placements[i]
        expected = list(self.shape)
        expected[dim] = extent(self.shape[dim], comm.size, comm.rank)[1]
        return not hasattr(placement, "split_factor") and tuple(expected) == self.local_shape

    def extent(self, axis: int) -> tuple[int, int]:
        """From where to where this rank has an axis, of what is exchangeable or not sharded."""
        if not self.shards or self.shards[0][1] != axis:
            return 0, self.shape[axis]
        first, length = extent(self.shape[axis], self.comms[0].size, self.comms[0].rank)
        return first, first + length

    @property
    def replicas(self) -> list[Any]:
        return [Replicate()] * len(self.placements)

    def wrapped(self, local: torch.Tensor, shape: Shape, placements: Sequence[Any]) -> DTensor:
        """A DTensor on this mesh from the part that is here."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def part(self, whole: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
        """The part of a whole tensor that belongs here. Nobody is asked."""
        replica = DTensor.from_local(whole, self.mesh, self.replicas, run_check=False)
        return replica.redistribute(placements=placements).to_local()
