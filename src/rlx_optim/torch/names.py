"""What torch and the authors of optimizers call the state and the settings, beside what our rules call them.

Slots carry the left names in `state_dict()`, so that checkpoints travel in both directions; unlisted slots keep the rule's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ADAM = {"m": "exp_avg", "v": "exp_avg_sq", "vmax": "max_exp_avg_sq"}
MOMENTUM = {"m": "momentum_buffer"}

#: optimizer -> rule's slot -> name in a state_dict
SLOTS: dict[str, dict[str, str]] = {
    "sgd": MOMENTUM,
    "adam": ADAM,
    "adamw": ADAM,
    "nadamw": ADAM,
    "radam": ADAM,
    "qhadamw": ADAM,
    "lamb": ADAM,
    "lion": ADAM,
    "soap": ADAM,
    "adafactor": {"row": "row_var", "col": "col_var", "v": "variance", "m": "exp_avg"},
    "kronpsgd": MOMENTUM,
    "muon": MOMENTUM,
    "sophia": {"m": "exp_avg", "h": "hessian"},
    "mars": {**ADAM, "prev": "last_grad"},
}

#: settings of torch.optim that have another name here, how to read their value and how to write it
FOREIGN: dict[str, dict[str, tuple[str, Any, Any]]] = {
    "adafactor": {"d": ("clip_threshold", float, float)},
    "muon": {
        "adjust_lr_fn": (
            "convention",
            {"match_rms_adamw": "moonlight", "original": "keller", None: "keller"}.get,
            {"moonlight": "match_rms_adamw", "keller": "original"}.get,
        )
    },
}
#: whether weight decay is decoupled, where torch.optim's class can do both and ours one of them
DECOUPLED = {"adam": False, "adamw": True, "nadamw": True}


def outside(rule: str, slot: str) -> str:
    """The name of a slot in a state_dict."""
    return SLOTS[rule].get(slot, slot)


def translated(owner: str, rule: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group of a checkpoint in our names. One without "rule" is torch.optim's."""
    table = FOREIGN.get(rule, {})
    said = {"decoupled_weight_decay"} if rule in DECOUPLED else set()
    ours = {k: v for k, v in group.items() if k not in table and k not in said}
    if "rule" in group:
        return ours
    decoupled = group.get("decoupled_weight_decay", rule == "adamw")  # older versions of torch do not say it
    if rule in DECOUPLED and group.get("weight_decay") and decoupled != DECOUPLED[rule]:
        how, instead = ("decoupled", "AdamW") if decoupled else ("coupled", "Adam")
        hint = f"; load it into {instead}" if rule != "nadamw" else ""
        raise ValueError(
            f"{owner}: the checkpoint has {how} weight decay ({group['weight_decay']!r}), which is not this rule's{hint}"
        )
    if rule in ("adafactor", "nadamw", "radam"):
        ours["convention"] = "torch"
    return ours | {name: read(group[theirs]) for theirs, (name, read, _) in table.items() if theirs in group}


def foreign(rule: str, group: dict[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    table = FOREIGN.get(rule, {})
    said = {theirs: write(group[ours]) for theirs, (ours, _, write) in table.items() if ours in group}
    said |= {"decoupled_weight_decay": DECOUPLED[rule]} if rule in DECOUPLED else {}
    return {k: v for k, v in said.items() if v is not None}


def in_dtype(group: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A group as it is for parameters of a dtype. In Adafactor's eps None is torch's word for the dtype's own epsilon; the other
    conventions, which add eps to squares, have the paper's 1e-30 for it."""
    eps = group["eps"] if group["rule"] == "adafactor" else ()
    if not isinstance(eps, (tuple, list)) or len(eps) != 2 or eps[0] is not None:
        return group
    return {**group, "eps": (torch.finfo(dtype).eps if group["convention"] == "torch" else 1e-30, eps[1])}
