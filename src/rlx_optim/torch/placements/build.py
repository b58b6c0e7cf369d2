"""Placements made from an optimizer's groups and state, which hold the truth."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import torch

from ...buckets import on_the_device
from ...program import trace
from ...rounding import LOW
from ...routing import bare
from ...spec import Spec
from ...splits import WHOLE, part, slots_of
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


@torch.inference_mode(False)  # what is kept has versions, even if this step is taken in inference mode
@torch.no_grad()
def make_placements(opt: Stepper) -> None:
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(f"{opt._owner}: a CUDA graph is being captured; make it with capturable=True and take a step before")
    opt._refresh()
    placements: dict[Any, Placement] = {}
    dormant: list[torch.Tensor] = []
    gathering: dict[Any, tuple[Spec, Any, list[str]]] = {}
    placed: set[torch.Tensor] = set()
    mixed = len({group["maximize"] for group in opt.param_groups}) > 1
    for index, group in enumerate(opt.param_groups):
        for name, param in named(group, index):
            if param in placed:
                continue  # listed twice: one entry, stepped twice
            placed.add(param)
            if opt._is_dormant(param):
                dormant.append(param)
                continue
            opt._check_param(name, param, group)
            dtype, split, place = ARITHMETIC[param.dtype], opt._pieces(name, param), opt._place(index, param.dtype)
            spec = (opt._specs[place][1] if opt._specs else None) or opt._spec_of(group, param.dtype)
            home = opt._home(name, param, spec, split)
            init_state(opt.state[param], spec, param, split, home)
            where = opt._reached(param, type(spec))
            engine, why = choose(opt.engine, where, dtype, is_fake(param))
            make: Any = Captured if opt.capturable else LOCAL.get(engine.name, LocalTensors)
            program = None if spec.matrix else trace(spec, spec.slots(tuple(param.shape)))
            gathers = program is not None and program.reduction_over_all is not None
            turned = mixed and gathers and group["maximize"]  # what is one number for all is one placement's
            key: Any = (param.device, dtype, group["maximize"] and not turned)
            if gathers:
                gathering.setdefault((spec.name, home is None, *key), (spec, program, [bare(name)]))
            if home is HOST:
                key = (*key, where, spec.matrix)
                above = on_the_device(spec.matrix, opt.engine)
                make = functools.partial(Hosted, where=where, above=above)
            elif home is not None:
                if opt.capturable:
                    raise ValueError(f"{opt._owner}: capturable=True is for parameters that are not spread over ranks; {name} is")
                from . import sharded

                placement = sharded.add(
                    opt._owner, placements, key, make, (engine, why), spec, param, bare(name), place, opt.state[param], home
                )
                set_rounding(opt, placement, spec, bare(name))
                placement.entries[-1].turned = turned
                continue
            if key not in placements:
                placements[key] = make(engine, why, param.device, dtype, -1.0 if group["maximize"] and not turned else 1.0)
            if opt.capturable and (problem := refusal(spec, engine.name, opt.nonfinite)):
                raise ValueError(f"{opt._owner}: {problem}")
            placements[key].admit(make_entry(opt, placements[key], spec, param, name, place), spec)
            set_rounding(opt, placements[key], spec, bare(name))
            placements[key].entries[-1].turned = turned
    check_together(list(gathering.values()))
    opt._gathering = bool(gathering)
    for placement in placements.values():
        placement.share_counts()
    opt._placements = sorted(placements.values(), key=lambda placement: placement.waits)
    opt._layout, opt._dormant = list_params(opt.param_groups), dormant
    if opt._homes is not None:
        from .sharded import consensus

        opt._consensus = consensus(opt._placements, opt.nonfinite != "propagate" or opt.skip_above is not None)
    opt._places = {entry.param: (placement, i) for placement in opt._placements for i, entry in enumerate(placement.entries)}
    times = collections.Counter(id(param) for params in opt._layout for param in params)
    opt._repeated = {param: times[id(param)] for param in placed if times[id(param)] > 1}


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
