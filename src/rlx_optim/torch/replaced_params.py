"""Parameters that others put into `param_groups` in place of those the optimizer was made with.

accelerate's FSDP2 puts DTensors there, pruning smaller tensors, ZeRO its partitions. State follows its place, the same index of
the same group: it is laid out anew as the new parameter is, or dropped where the shapes differ. A parameter that is in no group
any more is forgotten.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..routing import quote
from .groups import name_params, spec_of
from .memory import is_dtensor
from .params import check_param, current_split, home_of, share_out, wanted_split
from .state import HOST, is_frozen, read_split, shapes_in_state
from .state_dict import begin_state, gather_whole

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer

Groups = Sequence[Mapping[str, Any]]


def list_params(groups: Groups) -> list[list[torch.Tensor]]:
    """The parameters of each group."""
    return [list(group["params"]) for group in groups]


def pair_replaced(before: Sequence[Sequence[torch.Tensor]], groups: Groups) -> dict[torch.Tensor, torch.Tensor | None]:
    """By parameter that is in no group any more: the newcomer in its place, or None."""
    present = {param for group in groups for param in group["params"]}
    known = {param for params in before for param in params}
    pairs: dict[torch.Tensor, torch.Tensor | None] = {}
    for was, group in itertools.zip_longest(before, groups, fillvalue=()):
        params = group["params"] if isinstance(group, Mapping) else ()
        for old, new in itertools.zip_longest(was, params):
            if old is not None and old not in present:
                pairs[old] = new if new is not None and new not in known else pairs.get(old)
    return pairs


@torch.no_grad()
def carry_state_over(opt: RuleOptimizer, pairs: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Give what is known of replaced parameters to those that took their places, and forget the others."""
    names = {param: (name, group) for i, group in enumerate(opt.param_groups) for name, param in name_params(group, i)}
    kept = {old: new for old, new in pairs.items() if new is not None and old.shape == new.shape}
    stepped = {old for old in pairs if float((opt.state.get(old) or {}).get("step", 0)) > 0}
    lost = [names[new][0] for old, new in pairs.items() if new is not None and old not in kept and old in stepped]
    with opt._agreed("a setting or a parameter was refused"):  # before anything changes, and before ranks exchange state
        opt._specs.update(opt)
        for param in kept.values():
            if not is_frozen(param):
                check_param(opt, names[param][0], param, names[param][1])
    states = {new: (old, export_state_of(opt, old, *names[new])) for old, new in kept.items() if opt.state.get(old)}
    for old, new in pairs.items():
        opt.state.pop(old, None)
        if opt._homes is not None:
            opt._homes.owners.pop(old, None)
        if old in opt._hosted and new is not None:
            opt._hosted.add(new)
        opt._hosted.discard(old)
        tables: list[dict[torch.Tensor, Any]] = [opt._why, opt._kinds, opt._known_split]
        for table in tables:
            known = table.pop(old, None)
            if known is not None and new is not None and (old in kept or table is not opt._known_split):
                table[new] = known
    opt._consolidated = (None, None)
    opt._forget()
    opt._specs.update(opt)
    for group in opt.param_groups:
        share_out(opt, [(name, param) for name, param in name_params(group) if param in states], spec_of(opt, group))
    for new, (old, state) in states.items():
        opt.state[new] = lay_out_state(opt, old, new, *names[new], state)
    if lost:
        warnings.warn(
            f"{opt._owner}: the state of {quote(lost)} was dropped: parameters of other shapes took their places in "
            "param_groups; they start with zero state",
            stacklevel=2,
        )


def export_state_of(opt: RuleOptimizer, old: torch.Tensor, name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a replaced parameter, free of the owner that held it."""
    spec, state, split = spec_of(opt, group, old.dtype), opt.state[old], current_split(opt, name, old)
    home = home_of(opt, name, old, spec, split)
    if home in (None, HOST):
        return state
    from .placements.homes import Owned, export_owned

    return export_owned({old: state}, [(old, home, shapes_in_state(spec, old, split))])[old] if isinstance(home, Owned) else state


def lay_out_state(
    opt: RuleOptimizer, old: torch.Tensor, new: torch.Tensor, name: str, group: Mapping[str, Any], state: dict[str, Any]
) -> dict[str, Any]:
    """State that is laid out as the new parameter is; the same tensors where that is as the old one was."""
    spec = spec_of(opt, group, new.dtype)
    split = read_split(state) or wanted_split(opt, name, new)
    home = home_of(opt, name, new, spec, split)
    alike = not is_dtensor(old) and not is_dtensor(new) and (old.dtype, old.device) == (new.dtype, new.device)
    if alike and home in (None, HOST):
        return state
    if not is_dtensor(new):
        state = {key: gather_whole(value) if torch.is_tensor(value) else value for key, value in state.items()}
    state, finish = begin_state(opt._owner, spec, new, split, state, name, home)
    finish()
    return state
