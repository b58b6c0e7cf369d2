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
from ...splits import WHOLE, Split, part, slots_of
from ...stepping import check_together
from ...storage import COMPONENTS, Quantized
from .. import bf16
from ..engines import choose
from ..eval_mode import named
from ..memory import is_fake
from ..replaced_params import list_params
from ..state import (
    HOST,
    count_of,
    dtype_of,
    in_pieces,
    init_state,
    names_of,
    part_names,
    shape_in_state,
    split_in,
)
from ..state_dict import canonicalize, read_component
from .captured import Captured, refusal
from .host import Hosted
from .local import ARITHMETIC, LOCAL, LocalTensors, ParamEntry, Placement

if TYPE_CHECKING:
    from ..stepping import Stepper


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
    turned: bool  # it is maximized in a placement that minimizes

    @property
    def key(self) -> tuple[torch.device, torch.dtype, bool]:
        """What a placement's entries share."""
        return self.param.device, ARITHMETIC[self.param.dtype], self.group["maximize"] and not self.turned


@torch.inference_mode(False)  # what is kept has versions, even if this step is taken in inference mode
@torch.no_grad()
def make_placements(opt: Stepper) -> None:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if capturing:
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


def plan_params(opt: Stepper, dormant: list[torch.Tensor]) -> list[Planned]:
    """What there is to place, once each. dormant: is given the frozen parameters that have no state."""
    found: dict[torch.Tensor, Planned] = {}
    gathering: dict[Any, tuple[Spec, Any, list[str]]] = {}
    mixed = len({group["maximize"] for group in opt.param_groups}) > 1
    number = 0
    for index, group in enumerate(opt.param_groups):
        for name, param in named(group, index):
            number += 1
            if param in found or opt._is_dormant(param):  # listed twice: one entry, stepped twice
                dormant += [] if param in found else [param]
                continue
            opt._check_param(name, param, group)
            split, place = opt._pieces(name, param), opt._place(index, param.dtype)
            spec = (opt._specs[place][1] if opt._specs else None) or opt._spec_of(group, param.dtype)
            home = opt._home(name, param, spec, split)
            program = None if spec.matrix else trace(spec, spec.slots(tuple(param.shape)))
            gathers = program is not None and program.reduction_over_all is not None
            turned = mixed and gathers and group["maximize"]  # what is one number for all is one placement's
            found[param] = each = Planned(number, name, param, group, place, spec, split, home, turned)
            if gathers:
                gathering.setdefault((spec.name, home is None, *each.key), (spec, program, [bare(name)]))
    check_together(list(gathering.values()))
    opt._gathering = bool(gathering)
    return list(found.values())


def add_entry(opt: Stepper, placements: dict[Any, Placement], each: Planned) -> None:
    """Give a parameter an entry in the placement that suits it, made if need be."""
    spec, param, home, key = each.spec, each.param, each.home, each.key
    device, dtype, maximize = key
    init_state(opt.state[param], spec, param, each.split, home)
    where = opt._reached(param, type(spec))
    engine, why = choose(opt.engine, where, dtype, is_fake(param))
    make: Any = Captured if opt.capturable else LOCAL.get(engine.name, LocalTensors)
    if home is not None and home is not HOST:
        if opt.capturable:
            raise ValueError(f"{opt._owner}: capturable=True is for parameters that are not spread over ranks; {each.name} is")
        from . import sharded

        placement = sharded.add(opt, placements, make, (engine, why), each)
    else:
        place: Any = key
        if home is HOST:
            place = (*key, where, spec.matrix)
            make = functools.partial(Hosted, where=where, above=on_the_device(spec.matrix, opt.engine))
        if place not in placements:
            placements[place] = make(engine, why, device, dtype, -1.0 if maximize else 1.0)
        placement = placements[place]
        if opt.capturable and (problem := refusal(spec, engine.name, opt.nonfinite)):
            raise ValueError(f"{opt._owner}: {problem}")
        placement.admit(make_entry(opt, placement, spec, param, each.name, each.place), spec)
    set_rounding(opt, placement, spec, bare(each.name))
    placement.entries[-1].turned = each.turned


def set_rounding(opt: Stepper, placement: Placement, spec: Spec, name: str) -> None:
    """Tell the last entry of a placement how its parameter is rounded. name: by which chance is keyed."""
    entry = placement.entries[-1]
    if bf16.keeps_low(spec, entry.param):
        read_component(opt._owner, entry.state, LOW, name)
    low = bf16.checked(opt._owner, entry.state, spec, entry.param, name, placement.kept)
    entry.rounding = bf16.half_of(spec, entry.param, name, low)
    bf16.tell(placement, entry)


def make_entry(opt: Stepper, placement: Placement, spec: Spec, param: torch.Tensor, name: str, group: int) -> ParamEntry:
    state = opt.state[param]
    split = split_in(state) or WHOLE
    if not opt.capturable:
        canonicalize(opt._owner, state, spec, bare(name))
    entry = ParamEntry(param, state, bare(name), group, split, spec.counters())
    entry.decided = spec.decisions(1, spec.counters()).keys() & spec.counters().keys()
    for record in entry.records:
        record.t = int(count_of(state["step"]))
        record.counters = {counter: count_of(state[counter]) for counter in spec.counters()}
    slots = slots_of(spec, tuple(param.shape), split)
    if isinstance(placement, Hosted):
        placement.canonicalize(state, part_names(spec, slots))
    for slot, key in names_of(spec, slots).items():
        kind, views = slots[slot][0].storage, []
        for end in COMPONENTS[kind]:
            parts = part(slots[slot], end)
            buffer = read_component(opt._owner, state, key + end, bare(name))
            shape, dtype = shape_in_state(parts, param, split), dtype_of(slots[slot], param, end)
            where = (buffer.shape, buffer.dtype, buffer.device)
            if where != (shape, dtype, placement.kept) or not buffer.is_contiguous():
                raise RuntimeError(
                    f"{opt._owner}: {key + end!r} of {name} must be contiguous, of shape {shape}, {dtype} "
                    f"and on {placement.kept}; it is of shape {tuple(buffer.shape)}, {buffer.dtype} and on {buffer.device}"
                )
            views.append([placement.view(each) for each in in_pieces(buffer, parts)])
        for record, each, *views_of in zip(entry.records, slots[slot], *views, strict=True):
            record.slots[slot], record.state[slot] = each, Quantized(kind, *views_of) if kind else views_of[0]
    return entry
