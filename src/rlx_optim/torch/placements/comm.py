"""Where a DTensor lies, and the ranks that have a part of it: read from the tensor's mesh and placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate

from ...partition import extent
from ...spec import Shape
from ..memory import local_part


class Comm:
    """Ranks that share parameters out among themselves: a process group, and the place in it."""

    def __init__(self, group: Any):
        self.group, self.name = group, str(group.group_name)
        self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)

    def __reduce__(self) -> Any:
        """Copies and pickles of an optimizer go on in the group of the same name; a process group itself cannot be pickled."""
        return find_comm, (self.name,)


def find_comm(name: str) -> Comm:
    """The group of this name in this process."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return Comm(resolve(name))


class DTensorLayout:
    """A DTensor's mesh, placements and shape. `shards` are (dimension of the mesh, dimension of the tensor)."""

    def __init__(self, tensor: DTensor):
        self.mesh, self.placements, self.shape = tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)
        self.shards = [(i, int(p.dim)) for i, p in enumerate(self.placements) if not p.is_replicate()]  # type: ignore[attr-defined]
        self.local_shape: Shape = tuple(local_part(tensor).shape)
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

    def wrap(self, local: torch.Tensor, shape: Shape, placements: Sequence[Any]) -> DTensor:
        """A DTensor on this mesh from the part that is here."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def cut(self, whole: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
        """The part of a whole tensor that belongs here. Nobody is asked."""
        replica = DTensor.from_local(whole, self.mesh, self.replicas, run_check=False)
        return replica.redistribute(placements=placements).to_local()


class RemoteError(RuntimeError):
    """Another rank has refused, and says why."""


class CommChain:
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
    def raise_together(self, what: str, device: Any = "cpu") -> Iterator[None]:
        """Leave the block on all ranks, or raise on all of them."""
        try:
            yield
        except Exception:
            self.highest([1], device=device)
            raise
        if self.highest([0], device=device)[0]:
            raise RemoteError(f"{what} on another rank, which says why")


def chain_comms(params: Iterable[torch.Tensor], comm: Comm | None) -> CommChain:
    """Everyone who has a part or a replica of these parameters."""
    comms = [] if comm is None else [comm]
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        comms += [Comm(mesh.get_group(i)) for i in range(mesh.ndim)]
    return CommChain(comms)
