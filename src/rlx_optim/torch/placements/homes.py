"""Where the state of a spread parameter is kept.

`Shards`: beside the parameter, as DTensors placed like it (or, where every rank computes the whole, replicated). `Owned`: whole,
on the rank that owns the parameter; the others hold an empty tensor under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...partition import share_out
from ...program import has_reduction
from ...spec import Shape, Slot, Spec
from ...splits import WHOLE, Split, exact, number, shapes_of
from ...storage import COMPONENTS
from ..memory import local_part
from ..state import Slots, piece_shape, shape_in_state, start_slot
from .comm import Comm, DTensorLayout
from .exchange import Transfer, scatter_parts


class Shards:
    """State placed like the parameter: an axis that a slot lacks is not sharded. With `whole`, replicated."""

    computes = True  # whether this rank computes the parameter, and holds its state
    group_name = None

    def __init__(self, layout: DTensorLayout, whole: bool = False):
        self.layout, self.whole = layout, whole

    def placements(self, slot: Slot) -> list[Any]:
        layout = self.layout
        if self.whole or not layout.shards:
            return layout.replicas
        lacking = lacking_axes(slot, layout.shape)
        return [Replicate() if not p.is_replicate() and p.dim in lacking else p for p in layout.placements]  # type: ignore[attr-defined]

    def stored_slots(self, slots: Mapping[str, Slots], split: Split) -> dict[str, Slots]:
        """Codes that share a scale are never cut: where rows are, or pieces, such slots are exact, on any number of ranks."""
        rows = any(dim == len(self.layout.shape) - 1 for _, dim in self.layout.shards)
        cut = not self.whole and (rows or split != WHOLE)
        return {name: exact(each) if cut and len(COMPONENTS[each[0].storage]) > 1 else each for name, each in slots.items()}

    def first_place(self) -> int:
        """Which place of the whole the part that is here begins at; 0 where it is not one run of places."""
        layout = self.layout
        if self.whole or not layout.shards or not layout.exchangeable or layout.shards[0][1]:
            return 0
        return layout.extent(0)[0] * math.prod(layout.shape[1:])

    def allocate(self, slots: Slots, param: torch.Tensor, split: Split, dtype: torch.dtype) -> torch.Tensor:
        shape, layout, slot = shape_in_state(slots, param, split), self.layout, slots[0]
        placements = self.placements(slot)
        if self.whole or not layout.shards:
            return layout.wrap(start_slot(slots, param, split, dtype), shape, placements)
        lacking = lacking_axes(slot, layout.shape)
        local = [1 if i in lacking else n for i, n in enumerate(layout.local_shape)] if shape else []
        if slot.drop == () and shape:
            local[-1] = layout.local_shape[-1] if shape[-1] == layout.shape[-1] else shape[-1]  # scales have rows of their own
        return layout.wrap(torch.full(local, slot.fill, dtype=dtype, device=local_part(param).device), shape, placements)

    @torch.no_grad()
    def write(self, buffer: Any, value: torch.Tensor) -> None:
        """Take over a value: a DTensor of whatever placement, or the whole tensor, which every rank has."""
        if isinstance(value, DTensor) and value.device_mesh == self.layout.mesh:
            part = value.redistribute(placements=buffer.placements).to_local()
        else:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            part = self.layout.cut(whole.to(buffer.device).reshape(buffer.shape), buffer.placements)
        buffer.to_local().copy_(part)

    @torch.no_grad()
    def gather(self, buffer: Any, shape: Shape) -> torch.Tensor:
        """The whole tensor. Every rank must ask."""
        return buffer.full_tensor()

    def accepts(self, buffer: Any, shape: Shape) -> bool:
        return isinstance(buffer, DTensor) and tuple(buffer.shape) == shape


def lacking_axes(slot: Slot, shape: Shape) -> set[int]:
    """The axes of a parameter that a slot has not."""
    return set(range(len(shape))) if slot.drop is None else {len(shape) + axis for axis in slot.drop}


class Owned:
    """State that lies whole on one rank of a comm."""

    def __init__(self, comm: Comm, owner: int, layout: DTensorLayout | None):
        self.comm, self.owner, self.layout = comm, owner, layout
        self.computes = comm.rank == owner
        self.group_name = comm.name
        self.dim = None if layout is None else layout.shards[0][1]

    def stored_slots(self, slots: dict[str, Slots], split: Split) -> dict[str, Slots]:
        return slots

    def allocate(self, slots: Slots, param: torch.Tensor, split: Split, dtype: torch.dtype) -> torch.Tensor:
        return start_slot(slots, param, split, dtype) if self.computes else torch.empty(0, dtype=dtype, device=param.device)

    def first_place(self) -> int:
        return 0

    def make_transfer(self, shape: Shape, dtype: torch.dtype, like: bool) -> Transfer:
        """How a slot travels: cut like the parameter, or along its first axis."""
        dim = None if self.layout is None or not shape else self.dim if like else 0
        return Transfer(shape, dtype, dim, self.owner)

    def placements(self, item: Transfer) -> list[Any]:
        assert self.layout is not None
        sharded = Replicate() if item.dim is None else Shard(item.dim)
        return [sharded if i == self.layout.shards[0][0] else Replicate() for i in range(len(self.layout.placements))]

    @torch.no_grad()
    def write(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if self.computes:
            buffer.copy_(whole.reshape(buffer.shape))

    @torch.no_grad()
    def gather(self, buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
        item = Transfer(shape, buffer.dtype, None, self.owner)
        return scatter_parts(self.comm, [item], {0: buffer} if self.computes else {}, buffer.device)()[0]

    def accepts(self, buffer: torch.Tensor, shape: Shape) -> bool:
        return tuple(buffer.shape) == (shape if self.computes else (0,))


Home = Shards | Owned


class Homes:
    """The homes of an optimizer's parameters. Owners are shared out group by group, so that none ever changes."""

    def __init__(self, owner: str, comm: Comm | None):
        """comm: of those who share out parameters that all of them have."""
        self.owner, self.comm = owner, comm
        self.owners: dict[torch.Tensor, int] = {}
        self.loads: dict[str, list[int]] = {}

    def find(self, name: str, param: torch.Tensor, spec: Spec, split: Split) -> Home | None:
        """Where a parameter's state is kept; None for a plain tensor that every rank steps by itself."""
        layout = DTensorLayout(param) if isinstance(param, DTensor) else None
        comm = self.comm_of(layout, spec)
        if comm is not None:
            if param not in self.owners:
                self.share_out([(param, spec, split)])
            return Owned(comm, self.owners[param], layout)
        if layout is None:
            return None
        if layout.shards and split != WHOLE and has_reduction(spec, piece_shape(param, split)):
            raise ValueError(
                f"{self.owner}: {name!r} is sharded, and its {number(split)} matrices would be cut anywhere; "
                "split is for rules on whole matrices (Muon, SOAP, KronPSGD) there; split={} leaves them whole"
            )
        if layout.shards and not isinstance(split, int):
            raise ValueError(
                f"{self.owner}: {name!r} is sharded along several dimensions of its mesh, and its parts of {split} would be cut "
                "anywhere; split it into equal parts, or shard it along one"
            )
        return Shards(layout, whole=spec.matrix)

    def comm_of(self, layout: DTensorLayout | None, spec: Spec) -> Comm | None:
        """Among whom a parameter is owned by one."""
        if not spec.matrix:
            return None
        if layout is None:
            return self.comm
        return layout.comms[0] if layout.exchangeable else None

    def share_out(self, newcomers: Iterable[tuple[torch.Tensor, Spec, Split]]) -> None:
        """Give new parameters their owners, by the work they are."""
        comms: dict[str, tuple[Comm, list[tuple[torch.Tensor, int]]]] = {}
        for param, spec, split in newcomers:
            comm = self.comm_of(DTensorLayout(param) if isinstance(param, DTensor) else None, spec)
            if comm is not None and param not in self.owners:
                cost = sum(map(spec.work, shapes_of(tuple(param.shape), split)))
                comms.setdefault(comm.name, (comm, []))[1].append((param, cost))
        for comm, members in comms.values():
            loads = self.loads.setdefault(comm.name, [0] * comm.size)
            owners = share_out([cost for _, cost in members], loads)
            self.owners |= {param: rank for (param, _), rank in zip(members, owners, strict=True)}


def export_owned(
    states: Mapping[Any, dict[str, Any]], owned: Iterable[tuple[torch.Tensor, Owned, Mapping[str, Shape]]]
) -> dict[Any, dict[str, Any]]:
    """The state with what owners hold as DTensors (under DDP: as whole tensors), by one exchange a comm."""
    out = {param: dict(state) if isinstance(state, dict) else state for param, state in states.items()}
    comms: dict[Any, tuple[Comm, list[tuple[torch.Tensor, Owned, str, Transfer]]]] = {}
    for param, home, shapes in owned:
        for key, shape in shapes.items():
            item = home.make_transfer(shape, states[param][key].dtype, shape == tuple(param.shape))
            comms.setdefault((home.comm.name, param.device), (home.comm, []))[1].append((param, home, key, item))
    for (_, device), (comm, entries) in comms.items():
        wholes = {i: states[param][key] for i, (param, home, key, _) in enumerate(entries) if home.computes}
        parts = scatter_parts(comm, [item for *_, item in entries], wholes, device)()
        for (param, home, key, item), part in zip(entries, parts, strict=True):
            own, layout = part.clone(), home.layout
            out[param][key] = own if layout is None else layout.wrap(own, item.shape, home.placements(item))
    return out
