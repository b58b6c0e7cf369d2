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
    "nadamw": {"decoupled_weight_decay": ("convention", lambda _: "torch", lambda _: True)},
}


#: parts that wrappers put into names, wherever they stand; DistributedDataParallel's "module" counts at the front alone
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare(name: str) -> str:
    """A parameter's name without what wrappers of the model put into it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def outside(rule: str, slot: str) -> str:
    """The name of a slot in a state_dict."""
    return SLOTS[rule].get(slot, slot)


def translated(owner: str, rule: str, group: dict[str, Any]) -> dict[str, Any]:
    """A group of a checkpoint in our names. One without "rule" is torch.optim's."""
    table = FOREIGN.get(rule, {})
    ours = {k: v for k, v in group.items() if k not in table}
    if "rule" in group:
        return ours
    if rule == "nadamw" and group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(f"{owner}: the checkpoint is of a torch.optim.NAdam with coupled weight decay, which is not this rule")
    if rule == "adafactor" and group.get("eps", [0])[0] is None:  # torch's None is the type's own epsilon
        ours["eps"] = (2.0**-23, group["eps"][1])
    if rule in ("adafactor", "radam"):
        ours["convention"] = "torch"
    return ours | {name: read(group[theirs]) for theirs, (name, read, _) in table.items() if theirs in group}


def foreign(rule: str, group: dict[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    table = FOREIGN.get(rule, {})
    said = {theirs: write(group[ours]) for theirs, (ours, _, write) in table.items() if ours in group}
    return {k: v for k, v in said.items() if v is not None}
