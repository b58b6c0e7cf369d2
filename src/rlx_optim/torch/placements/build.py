"""Placements made from an optimizer's groups and state, which hold the truth."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...buckets import on_the_device
from ...program import trace
from ...rounding import LOW
from ...routing import bare
from ...spec import Spec
from ...splits import WHOLE, Split, part
from ...stepping import check_together
from ...storage import COMPONENTS, Quantized
from .. import bf16
from ..engines import choose_engine
from ..groups import name_params, spec_of, view_index
from ..memory import is_fake, local_part
from ..params import check_param, compute_device, current_split, home_of, is_dormant
from ..replaced_params import list_params
from ..state import HOST, dtype_of, init_state, kept_slots, names_of, part_names, read_counter, shape_in_state, view_pieces
from ..state_dict import canonicalize, read_component
from .captured import Captured, unsupported_reason
from .host import Hosted
from .local import ARITHMETIC, LOCAL, LocalTensors, ParamEntry, Placement

if TYPE_CHECKING:
    from ..optimizer import RuleOptimizer


class Planned(NamedTuple):
    """A parameter that is to be placed, with what decides where."""

    number: int  # among all that groups list
    name: str
    param: torch.Tensor
    group: Mapping[str, Any]
    place: int  # of its settings in `_views`
    spec: Spec
    split: Split
    home: Any
    negated: bool  # it is maximized in a placement that minimizes

    @property
    def spread(self) -> bool:
        """Whether it is spread over ranks, or shared out among them."""
        return self.home is not None and self.home is not HOST

    @property
    def key(self) -> tuple[torch.device, torch.dtype, bool]:
        """What a placement's entries share."""
        return self.param.device, ARITHMETIC[self.param.dtype], self.group["maximize"] and not self.negated


@torch.inference_mode(False)  # what is kept has versions, even if this step is taken in inference mode
@torch.no_grad()
def make_placements(opt: RuleOptimizer) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{opt._owner}: a CUDA graph is being captured; make it with capturable=True and take a step before")
    opt._refresh()
    dormant: list[torch.Tensor] = []
    planned, consensus = plan_params(opt, dormant), None
    if opt._homes is not None:
        from . import sharded

        watched = opt.nonfinite != "propagate" or opt.skip_above is not None
        consensus = sharded.make_consensus(opt._owner, planned, opt._homes.comm, watched)
    if opt._consensus is None:  # what is refused from here on, perhaps on this rank alone, all ranks hear of
        opt._consensus = consensus
    placements: dict[Any, Placement] = {}
    for each in planned:
        add_entry(opt, placements, each)
    for placement in placements.values():
        placement.share_counts()
    # first those in which ranks wait for each other: what a later one raises on one rank keeps nobody waiting
    opt._placements = sorted(placements.values(), key=lambda placement: (not placement.together, placement.waits))
    opt._layout, opt._dormant = list_params(opt.param_groups), dormant
    opt._consensus = consensus
    if consensus is not None:
        consensus.cover(placement for placement in opt._placements if placement.together)
    opt._places = {entry.param: (placement, i) for placement in opt._placements for i, entry in enumerate(placement.entries)}
    times = collections.Counter(id(param) for params in opt._layout for param in params)
    opt._repeated = {each.param: times[id(each.param)] for each in planned if times[id(each.param)] > 1}


def plan_params(opt: RuleOptimizer, dormant: list[torch.Tensor]) -> list[Planned]:
    """What there is to place, once each. dormant: is given the frozen parameters that have no state."""
    found: dict[torch.Tensor, Planned] = {}
    gathering: dict[Any, tuple[Spec, Any, list[str]]] = {}
    mixed = len({group["maximize"] for group in opt.param_groups}) > 1
    number = 0
    for index, group in enumerate(opt.param_groups):
        for name, param in name_params(group, index):
            number += 1
            if param in found or is_dormant(opt, param):  # listed twice: one entry, stepped twice
                dormant += [] if param in found else [param]
                continue
            check_param(opt, name, param, group)
            split, place = current_split(opt, name, param), view_index(opt, index, param.dtype)
            spec = opt._specs.at(place) or spec_of(opt, group, param.dtype)
            home = home_of(opt, name, param, spec, split)
            program = None if spec.matrix else trace(spec, spec.slots(tuple(param.shape)))
            gathers = program is not None and program.reduction_over_all is not None
            negated = mixed and gathers and group["maximize"]  # what is one number for all is one placement's
            found[param] = each = Planned(number, name, param, group, place, spec, split, home, negated)
            if gathers:
                gathering.setdefault((spec.name, home is None, *each.key), (spec, program, [bare(name)]))
    check_together(list(gathering.values()))
    opt._gathering = bool(gathering)
    return list(found.values())


def add_entry(opt: RuleOptimizer, placements: dict[Any, Placement], each: Planned) -> None:
    """Give a parameter an entry in the placement that suits it, made if need be."""
    spec, param, home = each.spec, each.param, each.home
    device, dtype, maximize = each.key
    init_state(opt.state[param], spec, param, each.split, home)
    where = compute_device(opt, param, type(spec))
    engine, why = choose_engine(opt.engine, where, dtype, is_fake(param))
    make: Any = Captured if opt.capturable else LOCAL.get(engine.name, LocalTensors)
    key: tuple[Any, ...] = each.key
    spread = ""
    if each.spread:
        if opt.capturable:
            raise ValueError(f"{opt._owner}: capturable=True is for parameters that are not spread over ranks; {each.name} is")
        from .sharded import find_kind

        make, spread = find_kind(make, each)
        key = (*key, make, home.group_name)
    elif home is HOST:
        key = (*key, where, spec.matrix)
        make = functools.partial(Hosted, where=where, on_device=on_the_device(spec.matrix, opt.engine))
    elif opt.capturable and (problem := unsupported_reason(spec, engine.name, opt.nonfinite)):
        raise ValueError(f"{opt._owner}: {problem}")
    if key not in placements:
        placements[key] = make(engine, why, device, dtype, -1.0 if maximize else 1.0)
        placements[key].spread = spread
    placement = placements[key]
    entry = make_entry(opt, placement, each)
    placement.admit(entry, each)
    entry.negated = each.negated
    if bf16.keeps_low(spec, param):
        read_component(opt._owner, entry.state, LOW, bare(each.name))
    low = bf16.read_low(opt._owner, entry.state, spec, param, bare(each.name), placement.state_device)
    entry.rounding = bf16.find_rounding(spec, param, bare(each.name), low)
    bf16.set_rounding(placement, entry)


def make_entry(opt: RuleOptimizer, placement: Placement, each: Planned) -> ParamEntry:
    """An entry with the views of its state that a placement needs."""
    owner, spec, param, home, name = opt._owner, each.spec, each.param, each.home, bare(each.name)
    state, split = opt.state[param], each.split if spec.matrix or not each.spread else WHOLE
    if not opt.capturable:
        canonicalize(owner, state, spec, name)
    entry = ParamEntry(param, state, name, each.place, split, spec.counters())
    entry.decided = spec.decisions(1, spec.counters()).keys() & spec.counters().keys()
    slots = kept_slots(spec, param, split, home)
    if isinstance(placement, Hosted):
        placement.canonicalize(state, part_names(spec, slots))
    local_slots = placement.cut_to_part(entry, spec, slots) if each.spread else slots
    for i, record in enumerate(entry.records):
        record.slots = {slot: of_pieces[i] for slot, of_pieces in local_slots.items()}
        record.t = int(read_counter(state["step"]))
        record.counters = {counter: read_counter(state[counter]) for counter in spec.counters()}
    for slot, key in names_of(spec, slots).items() if not each.spread or home.computes else ():
        kind, views = slots[slot][0].storage, []
        for end in COMPONENTS[kind]:
            kept = read_component(owner, state, key + end, name)
            buffer, shape = local_part(kept), shape_in_state(part(slots[slot], end), param, split)
            dtype = dtype_of(slots[slot], param, end)
            fits = home.accepts(kept, shape) if each.spread else kept.shape == shape
            if not fits or (buffer.dtype, buffer.device) != (dtype, placement.state_device) or not buffer.is_contiguous():
                where = f"on {placement.state_device}{', spread like the parameter' if each.spread else ''}"
                raise RuntimeError(
                    f"{owner}: {key + end!r} of {name} must be contiguous, of shape {shape}, {dtype} and {where}; it is of shape "
                    f"{tuple(kept.shape)}, {kept.dtype} and on {kept.device}"
                )
            views.append([placement.view(piece) for piece in view_pieces(buffer, part(local_slots[slot], end))])
        first = home.first_place() if each.spread else 0
        for record, *arrays in zip(entry.records, *views, strict=True):
            record.state[slot] = Quantized(kind, *arrays, first=first) if kind else arrays[0]
    return entry
