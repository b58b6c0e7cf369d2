"""What torch and the authors of optimizers call the state and the settings, beside what our rules call them.

What a slot means gives its name in `state_dict()`, unless the rule's file says another, so that checkpoints travel in both
directions; others keep the rule's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..routing import bare
from ..spec import Slot, Spec

#: what torch calls a slot by the first words of its meaning
MEANINGS = {
    "first moment": "exp_avg",
    "second moment": "exp_avg_sq",
    "largest second moment": "max_exp_avg_sq",
    "row": "row_var",
    "column": "col_var",
    "curvature": "hessian",
    "last gradient": "last_grad",
}


def outside(kind: type[Spec] | Spec, slots: Mapping[str, Slot]) -> dict[str, str]:
    """The names of a tensor's slots in a state_dict. Of several with one meaning the first has torch's name."""
    found: dict[str, str] = {}
    for slot, each in slots.items():
        usual = next((name for words, name in MEANINGS.items() if f"{each.meaning} ".startswith(f"{words} ")), slot)
        name = kind.torch.slots.get(slot, usual)
        found[slot] = slot if name in found.values() else name
    return found


def by_name(ours: Mapping[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A saved group in the order of ours, where both have the same names."""
    names, given = ([bare(name) for name in group.get("param_names") or ()] for group in (ours, saved))
    there = dict(zip(given, saved.get("params", ()), strict=False))
    if names == given or sorted(names) != sorted(there) or len(there) != len(given):
        return saved
    return {**saved, "params": [there[name] for name in names], "param_names": list(ours["param_names"])}


def with_names(owner: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group whose names stand beside its parameters (torchtitan's, and those of torch's own groups) with pairs of both."""
    if group.get("param_names") is None:
        return {k: v for k, v in group.items() if k != "param_names"}
    params, names = group["params"], list(group["param_names"])
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if any(isinstance(entry, tuple) for entry in params):
        raise ValueError(f"{owner}: a group has pairs of name and parameter, and param_names too; leave out one of them")
    if len(names) != len(params):
        raise ValueError(f"{owner}: a group has {len(params)} parameters and {len(names)} param_names; give each its name")
    return {k: v for k, v in group.items() if k != "param_names"} | {"params": list(zip(names, params, strict=True))}


def foreign(kind: type[Spec], group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    there = kind.torch
    said = {theirs: each.write(group[each.field]) for theirs, each in there.settings.items() if each.field in group}
    said |= {"decoupled_weight_decay": there.decoupled}
    return {k: v for k, v in said.items() if v is not None}


def in_dtype(kind: type[Spec], group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype."""
    return group if kind.torch.in_dtype is None else kind.torch.in_dtype(group, torch.finfo(dtype).eps)
