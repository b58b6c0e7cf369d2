"""Where to evaluate: parameters are put where the model is to be evaluated, and back where gradients are taken.

`Spec.evaluated` says which slot leads from one point to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..spec import TRAINED
from .groups import name_params, spec_of
from .memory import local_part
from .params import current_split
from .state import name_slots, piece_shape

if TYPE_CHECKING:
    from .optimizer import RuleOptimizer


def dicts_in(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """What is kept of parameters; a user may keep something else beside them."""
    return [each for each in state.values() if isinstance(each, dict)]


def is_evaluating(opt: RuleOptimizer) -> bool:
    """Whether parameters are where to evaluate."""
    if opt._evaluating is None:
        opt._evaluating = any(TRAINED in state for state in dicts_in(opt.state))
    return opt._evaluating


@torch.no_grad()
def start_evaluating(opt: RuleOptimizer) -> None:
    """Put parameters where to evaluate; what they were is kept in the state."""
    if is_evaluating(opt):
        return
    for group in opt.param_groups:
        kind = opt._rules[group["rule"]]
        for name, param in name_params(group) if kind.evaluated else ():
            state = opt.state.get(param) or {}
            slots = spec_of(opt, group).slots(piece_shape(param, current_split(opt, name, param)))
            key = name_slots(kind, slots)[str(kind.evaluated)]
            if TRAINED not in state and key in state:
                value, offset = local_part(param), local_part(state[key])
                away = offset.device != value.device  # on the host
                state[TRAINED] = param.detach().to(offset.device) if away else param.detach().clone()
                value.add_(offset.to(value.device))
                opt._evaluating = True


@torch.no_grad()
def stop_evaluating(opt: RuleOptimizer) -> None:
    """Put parameters back where gradients are taken."""
    for param, state in opt.state.items() if is_evaluating(opt) else ():
        if isinstance(state, dict) and TRAINED in state:
            local_part(param).copy_(local_part(state.pop(TRAINED)))
    opt._evaluating = False
