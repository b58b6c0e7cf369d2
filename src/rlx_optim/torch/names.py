"""What torch and the authors of optimizers call the state and the settings, beside what our rules call them.

What a slot means gives its name in `state_dict()`, unless the rule's file says another, so that checkpoints travel in both
directions; others keep the rule's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..registry import OURS
from ..routing import bare
from ..spec import Slot, Spec
from .damaged import closed, refused

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


def counted(group: Mapping[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A parameter's state, with the group's count where others (Adan's authors, timm) count for the whole group."""
    return {"step": group["step"], **state} if state and "step" in group else dict(state or {})


#: what bitsandbytes wraps its state in, what is in it beside "state1" and "state2", and how many neighbours may share an absmax
WRAPPED = "__bnb_optimizer_quant_state__"
BESIDE = ("qmap1", "qmap2", "absmax1", "absmax2", "gnorm_vec", "unorm_vec")
BLOCKS = (256, 2048, 4096, 1024, 512, 128, 64)


def unwrapped(state: Any) -> Any:
    """A parameter's state as one flat dict."""
    if not isinstance(state, Mapping) or not isinstance(state.get(WRAPPED), Mapping):
        return state
    return {**{k: v for k, v in state.items() if k != WRAPPED}, **state[WRAPPED]}


def in_numbers(owner: str, state: dict[str, Any], names: list[str], what: str) -> dict[str, Any]:
    """State of the 8-bit optimizers of bitsandbytes (codes, a table of what they mean, the largest of each block of neighbours)
    and of torchao (tensors that decode themselves), in numbers and under torch's names."""
    state = {k: v.dequantize() if hasattr(v, "codes") and hasattr(v, "dequantize") else v for k, v in state.items()}
    for n, name in enumerate(names, 1):
        if f"state{n}" not in state:
            continue
        for key in (f"{label}{n}" for label in ("state", "qmap", "absmax") if f"{label}{n}" in state):
            if closed(state[key]):
                raise refused(owner, key, what, state[key], "a tensor")
        value = state.pop(f"state{n}")
        if f"qmap{n}" in state:
            table, largest = (state.get(each) for each in (f"qmap{n}", f"absmax{n}"))
            block = None if largest is None else next((b for b in BLOCKS if -(-value.numel() // b) == largest.numel()), None)
            if table is None or largest is None or block is None:
                raise ValueError(
                    f"{owner}: the checkpoint has bitsandbytes' 8-bit state of {what} without blocks (block_wise=False), which "
                    "is not read; load it there, train a step with block_wise=True or optim_bits=32, and save it again"
                )
            each = largest.float().repeat_interleave(block)[: value.numel()]
            value = (table.float()[value.reshape(-1).long()] * each).reshape(value.shape)
        state[name] = value
    return {k: v for k, v in state.items() if k not in BESIDE}


def foreign(kind: type[Spec], group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    there = kind.torch
    said = {theirs: each.write(group[each.field]) for theirs, each in there.settings.items() if each.field in group}
    said |= {"decoupled_weight_decay": there.decoupled}
    return {k: v for k, v in said.items() if v is not None}


def in_dtype(kind: type[Spec], group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype."""
    return group if kind.torch.in_dtype is None else kind.torch.in_dtype(group, torch.finfo(dtype).eps)
