"""What torch and the authors of optimizers call the state and the settings, beside what our rules call them.

Slots carry the left names in `state_dict()`, so that checkpoints travel in both directions; unlisted slots keep the rule's name.
"""

from __future__ import annotations

from typing import Any

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

#: settings of torch.optim that have another name here, and how to read their value
FOREIGN: dict[str, dict[str, tuple[str, Any]]] = {
    "adafactor": {"d": ("clip_threshold", float)},
    "muon": {"adjust_lr_fn": ("convention", {"match_rms_adamw": "moonlight", "original": "keller", None: "keller"}.get)},
}


def outside(rule: str, slot: str) -> str:
    """The name of a slot in a state_dict."""
    return SLOTS[rule].get(slot, slot)


def translated(rule: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group of a torch.optim checkpoint with our names added for settings that torch calls otherwise."""
    if rule == "adafactor" and group.get("eps", [0])[0] is None:  # torch's None is the type's own epsilon
        group = {**group, "eps": (2.0**-23, group["eps"][1])}
    added = {
        ours: read(group[theirs])
        for theirs, (ours, read) in FOREIGN.get(rule, {}).items()
        if theirs in group and ours not in group
    }
    return {**group, **added}
