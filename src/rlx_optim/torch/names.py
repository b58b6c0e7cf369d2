"""What torch and the authors of optimizers call the state and the settings, beside what our rules call them.

What a slot means gives its name in `state_dict()`, unless the rule's file says another, so that checkpoints travel in both
directions; others keep the rule's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..registry import OURS
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


def translated(owner: str, kind: type[Spec], group: dict[str, Any]) -> dict[str, Any]:
    """A group of a checkpoint in our names. One without "rule" is torch.optim's."""
    there = kind.torch
    said = {"decoupled_weight_decay"} if there.decoupled is not None else set()
    ours = {k: v for k, v in group.items() if k not in there.settings and k not in said}
    if "rule" in group:
        return ours
    if group.get("caution"):
        raise ValueError(f"{owner}: the checkpoint is of timm's cautious variant (caution=True), which is not this rule")
    for setting, why in there.strange.items():
        if setting in group:
            raise ValueError(f"{owner}: {why}")
    decoupled = group.get("decoupled_weight_decay", there.assumed)  # older versions of torch do not say it
    if said and group.get("weight_decay") and decoupled != there.decoupled:
        beside = [k.title for k in OURS if k.torch.decoupled is decoupled and k.fields.keys() == kind.fields.keys()]
        hint = "".join(f"; load it into {title}" for title in beside)
        how = "decoupled" if decoupled else "coupled"
        raise ValueError(
            f"{owner}: the checkpoint has {how} weight decay ({group['weight_decay']!r}), which is not this rule's{hint}"
        )
    if there.like and "convention" in kind.fields and "convention" not in (each.field for each in there.settings.values()):
        ours["convention"] = "torch"
    return ours | {each.field: each.read(group[theirs]) for theirs, each in there.settings.items() if theirs in group}


def counted(group: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A parameter's state, with the group's count where others (Adan's authors, timm) count for the whole group."""
    return {"step": group["step"], **state} if state and "step" in group else dict(state or {})


def foreign(kind: type[Spec], group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    there = kind.torch
    said = {theirs: each.write(group[each.field]) for theirs, each in there.settings.items() if each.field in group}
    said |= {"decoupled_weight_decay": there.decoupled}
    return {k: v for k, v in said.items() if v is not None}


def in_dtype(kind: type[Spec], group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype."""
    return group if kind.torch.in_dtype is None else kind.torch.in_dtype(group, torch.finfo(dtype).eps)
