"""Parameters that are spread over ranks: their entries, and who steps them.

Elementwise rules run on this rank's shards, in the ordinary placements; rules that measure whole tensors do too, with `Reducing`,
which adds their sums up over ranks. Matrix rules are for `Owner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...engine import Engine
from ...program import commit_has_reduction, has_reduction, reduces_over_all
from ...routing import bare
from ...spec import Spec
from ...splits import WHOLE, shapes_of, slots_of
from ...splits import part as part_of
from ...stepping import Grouping, TensorState
from ...storage import COMPONENTS, Quantized
from ..memory import local_part
from ..state import HOST, Slots, dtype_of, in_pieces, kept_slots, names_of, shape_in_state, split_in
from ..state_dict import canonicalize, read_component
from .comm import Comm, DTensorLayout, Together, splitting
from .consensus import Consensus
from .homes import Home, Owned
from .local import LocalTensors, ParamEntry, Placement
from .owner import Owner
from .reducing import Reducing

if TYPE_CHECKING:
    from ..stepping import Stepper
    from .build import Planned


class Sharded(LocalTensors):
    """Shards of rules that measure whole tensors. Empty ones take part: their ranks must be in every all-reduce."""

    together = True

    def group(self) -> Grouping:
        return Grouping(self.engine, self.records, [DTensorLayout(cast(Any, entry.param)) for entry in self.entries])


def make_entry(
    owner: str, placement: Placement, spec: Spec, param: torch.Tensor, name: str, group: int, state: Any, home: Home
) -> ParamEntry:
    """An entry with the views of its state that a placement needs."""
    owned = isinstance(placement, Owner)
    split = (split_in(state) or WHOLE) if spec.matrix else WHOLE
    canonicalize(owner, state, spec, name)
    found = ParamEntry(param, state, name, group, split, spec.counters())
    if not owned:
        shapes = shapes_of(tuple(local_part(param).shape), split)
        whole = found.records[0].size
        found.records = [TensorState(record.name, shape, group) for record, shape in zip(found.records, shapes, strict=True)]
        if isinstance(placement, Sharded):
            found.records[0].size = whole  # an empty shard is stepped, too
    held = not isinstance(home, Owned) or home.is_owner
    slots = kept_slots(spec, param, split, home)
    local_slots = slots if owned else in_part(slots, slots_of(spec, tuple(local_part(param).shape), split))
    for i, record in enumerate(found.records):
        record.slots = {slot: each[i] for slot, each in local_slots.items()}
        record.t = int(state["step"])
        record.counters = {counter: float(state[counter]) for counter in spec.counters()}
    first = 0 if owned or isinstance(home, Owned) else home.first()
    for slot, key in names_of(spec, slots).items() if held else ():
        views = []
        for end in COMPONENTS[slots[slot][0].storage]:
            kept, dtype = read_component(owner, state, key + end, name), dtype_of(slots[slot], param, end)
            buffer, shape = local_part(kept), shape_in_state(part_of(slots[slot], end), param, split)
            if not home.fits(kept, shape) or buffer.dtype is not dtype or not buffer.is_contiguous():
                raise RuntimeError(
                    f"{owner}: {key + end!r} of {name} must be as this optimizer made it: a contiguous {dtype} of shape {shape}, "
                    f"spread like the parameter; it is {kept.dtype} of shape {tuple(kept.shape)}"
                )
            views.append([placement.view(each) for each in in_pieces(buffer, part_of(local_slots[slot], end))])
        for record, *arrays in zip(found.records, *views, strict=True):
            kind = record.slots[slot].storage
            record.state[slot] = Quantized(kind, *arrays, first=first) if kind else arrays[0]
    return found


def in_part(slots: Mapping[str, Slots], local: Mapping[str, Slots]) -> dict[str, Slots]:
    """The slots of what is here of a parameter, kept as those of the whole are."""
    return {name: tuple(replace(slot, storage=slots[name][0].storage) for slot in each) for name, each in local.items()}


def add(
    opt: Stepper, placements: dict[Any, Placement], make: type[Placement], engine: tuple[Engine, str], each: Planned
) -> Placement:
    """Give a parameter an entry in the placement that suits its home, made if need be, and give the placement."""
    spec, home, name = each.spec, each.home, bare(each.name)
    device, dtype, maximize = each.key
    kind, what = kind_of(make, spec, home)
    if kind is Owner and commit_has_reduction(spec):
        whose, instead = "decay='hyperball'", "use decay='decoupled' or 'cautious' there"
        if type(spec).commit is not Spec.commit:
            whose, instead = "its commit", "let `update` take it from p and u, and the commit from numbers"
        raise spec.refuse(f"{whose} needs the norm of a whole matrix, and {name!r} is shared out over ranks ({what}); {instead}")
    place = (*each.key, kind, home.comm.name if isinstance(home, Owned) else None)
    if place not in placements:
        if kind is Sharded:
            reducing: Any = Reducing(device, dtype)
            engine = reducing, "sums over ranks are taken by the torch engine"
        placements[place] = kind(*engine, device, dtype, -1.0 if maximize else 1.0)
        placements[place].spread = what
    placement = placements[place]
    placement.entries.append(make_entry(opt._owner, placement, spec, each.param, name, each.place, opt.state[each.param], home))
    if isinstance(placement, Owner):
        placement.homes.append(home)
        placement.shapes.append({record.shape for record in placement.entries[-1].records if record.size})
    return placement


def kind_of(make: type[Placement], spec: Spec, home: Home) -> tuple[type[Placement], str]:
    """The placement for a home, and what it does in words."""
    if isinstance(home, Owned):
        return Owner, f"each matrix on its owner, one of {home.comm.size} ranks"
    if not home.layout.shards and not reduces_over_all(spec, home.layout.shape):
        return make, "replicated: every rank steps it"
    if spec.matrix:
        return Owner, "gathered whole: its placement is not one plain shard"
    measured = has_reduction(spec, home.layout.shape)
    return (Sharded, "on shards, sums all-reduced") if measured else (make, "on shards")


def make_consensus(owner: str, found: Sequence[Any], comm: Comm | None, watched: bool) -> Consensus | None:
    """The ranks that step some of these parameters together, or (`watched`) must decide together; None where each goes its own
    way. found: of each parameter what it is to be placed by (`placements.build`)."""
    spread = [each for each in found if each.home is not None and each.home is not HOST]
    kinds = [kind_of(LocalTensors, each.spec, each.home)[0] for each in spread]
    working = {i: kind for i, kind in enumerate(kinds) if kind.together}
    deciding = [i for i in range(len(spread)) if watched or i in working]
    together = splitting(spread[i].param for i in deciding)
    owned = [spread[i].home.comm for i in working if isinstance(spread[i].home, Owned)]
    together = Together([*together.comms, *owned])
    if not together.comms:
        return None
    layout = {}
    for i, kind in working.items():
        device, *key = spread[i].key  # of which ranks have several
        layout[spread[i].number] = (kind.__name__, device.type, *map(str, key), spread[i].place)
    return Consensus(owner, together, spread[min(working, default=0)].param.device, layout, comm is not None)
