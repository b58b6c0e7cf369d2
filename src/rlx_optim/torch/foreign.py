"""State dicts of torch.optim (SGD, Adam, AdamW, NAdam, RAdam, Adafactor, Muon), the authors' SOAP, ours: to and from snapshots.

    snapshot = from_state_dict(torch.load("a.pt", weights_only=True), names=[...])
    state_dict = to_state_dict("b.safetensors")

A state dict holds neither the class nor, unless parameters were given with names, the names: both can be said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import files
from ..checkpoint.format import CheckpointError, saying
from ..checkpoint.snapshot import Group, Member, Parameter, Snapshot, Values
from ..named import spec_class
from ..registry import ALIASES, OPTIMIZERS
from ..routing import bare
from ..spec import Shape, Slot, Spec
from .checkpoint import PLAIN, wrapped
from .lanes import inner_shape
from .names import foreign, in_dtype, outside, translated
from .stepping import plain

#: a setting that only this optimizer's groups have, in the order in which to look
TELLTALE = {
    "precondition_frequency": "soap",
    "beta2_decay": "adafactor",
    "ns_steps": "muon",
    "momentum_decay": "nadamw",
    "dampening": "sgd",
}
#: what to call them in torch.optim
CLASSES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadamw": "NAdam",
    "radam": "RAdam",
    "adafactor": "Adafactor",
    "muon": "Muon",
}
UNCOUNTED = ("sgd", "muon")  # torch.optim keeps no step count for them
AUTHORS_SOAP = {"normalize_grads": False, "correct_bias": True}


# ---- files --------------------------------------------------------------------------------------------------------------
def read_state_dict(path: str | os.PathLike[str]) -> Any:
    """An optimizer's state dict out of a file of torch.save, or out of the training checkpoint in it. No pickle is executed."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as problem:  # torch has many ways to refuse a file
        raise CheckpointError(f"{path}: torch cannot read it with weights_only=True: {str(problem).splitlines()[0]}") from problem
    for key in (None, "optimizer", "optimizer_state_dict", "optim", "optimizer_state"):
        found = loaded if key is None else loaded.get(key) if isinstance(loaded, dict) else None
        if isinstance(found, dict) and {"state", "param_groups"} <= found.keys():
            return found
    raise CheckpointError(f"{path}: there is no optimizer's state dict in it")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    optimizer: str | None = None,
    names: Sequence[str] | None = None,
    allow_nan: bool = False,
) -> Snapshot:
    """`rlx-optim convert`: a file of torch.save to a checkpoint or the other way, as the target's ending says."""
    if Path(target).suffix == files.SUFFIX:
        snapshot = from_state_dict(read_state_dict(source), optimizer, names)
        files.store(snapshot, Path(target), allow_nan)
        return snapshot
    with files.opened(source, allow_nan) as snapshot:
        state_dict = to_state_dict(snapshot, optimizer)
        with saying(Path(target), "cannot be written"):
            torch.save(state_dict, target)
        return snapshot


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def from_state_dict(state_dict: Mapping[str, Any], optimizer: str | None = None, names: Sequence[str] | None = None) -> Snapshot:
    """A snapshot of an optimizer's state dict. Parameters that have no state yet are left out: they start afresh."""
    try:
        return _snapshot(state_dict, optimizer, names)
    except CheckpointError:
        raise
    except ValueError as problem:
        raise CheckpointError(str(problem)) from problem
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError) as problem:
        raise CheckpointError(f"the state dict is not as torch makes it: {type(problem).__name__}: {problem}") from problem


def _snapshot(state_dict: Mapping[str, Any], optimizer: str | None, names: Sequence[str] | None) -> Snapshot:
    groups, states = state_dict["param_groups"], state_dict["state"]
    rules: list[str] = [group.get("rule") or _rule(group, optimizer) for group in groups]
    order = sorted(dict.fromkeys(rules), key=lambda rule: rule != optimizer)
    called = _names(groups, names)
    members: list[Member] = []
    parameters: dict[str, Parameter] = {}
    for rule in order:
        mine = [group for group, its in zip(groups, rules, strict=True) if its == rule]
        values = [_values(rule, group, [states.get(key) or {} for key in group["params"]]) for group in mine]
        first = values[0].hyperparameters
        listed = [Group(each, overrides=[k for k, v in each.hyperparameters.items() if v != first[k]]) for each in values[1:]]
        members.append(Member(rule, values[0], listed))
        for place, group in enumerate(mine):
            spec = members[-1].specs[place - 1 if place else None]
            for key in group["params"]:
                if (states.get(key) or {}).keys() - {"step", "started"}:
                    where = len(members) - 1, place - 1 if place else None
                    parameters[called[key]] = _parameter(called[key], where, rule, spec, states[key])
    iteration = max((p.step for p in parameters.values()), default=0)
    return Snapshot(members, parameters, iteration, front_end="torch")


def _rule(group: Mapping[str, Any], optimizer: str | None) -> str:
    """Which of the fourteen a group of torch.optim is for."""
    if optimizer is not None:
        name = ALIASES.get(optimizer.lower(), optimizer.lower())
        name = {theirs.lower(): ours for ours, theirs in CLASSES.items()}.get(name, name)
        if name not in OPTIMIZERS:
            raise CheckpointError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
        return name
    for key, name in TELLTALE.items():
        if key in group:
            return name
    decoupled = group.get("decoupled_weight_decay")
    if decoupled is None or "betas" not in group:
        raise CheckpointError("the state dict does not show which optimizer it is of; say it (optimizer=…, --optimizer)")
    return "radam" if "amsgrad" not in group else "adamw" if decoupled else "adam"


def _names(groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> dict[Any, str]:
    keys = [key for group in groups for key in group["params"]]
    found = [name for group in groups for name in group.get("param_names") or ()] if names is None else list(names)
    if len(found) != len(keys):
        problem = f"{len(found)} names are given for {len(keys)}" if names is not None else f"it has no names for its {len(keys)}"
        raise CheckpointError(f"{problem} parameters; say them in the order of the optimizer's groups (names=…, --names)")
    stripped = [bare(name) for name in found]
    if len(set(stripped)) != len(stripped):
        raise CheckpointError("two parameters have the same name")
    return dict(zip(keys, stripped, strict=True))


def _values(rule: str, group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Values:
    title, given = OPTIMIZERS[rule][1], dict(group)
    if rule == "soap" and "rule" not in group:
        for key, needed in AUTHORS_SOAP.items():
            if group.get(key, needed) != needed:
                raise CheckpointError(f"SOAP with {key}={group[key]!r} is not this rule")
        given["shampoo_beta"] = None if group["shampoo_beta"] < 0 else group["shampoo_beta"]
    given = translated(title, rule, given)
    if rule == "adafactor":  # torch keeps state in the parameter's dtype, which eps may follow
        kinds = {state[k].dtype for state in states for k in ("row_var", "variance") if torch.is_tensor(state.get(k))}
        given, *others = [in_dtype({**given, "rule": rule}, kind) for kind in kinds or {torch.float32}]
        if any(other["eps"] != given["eps"] for other in others):
            raise CheckpointError("Adafactor's eps of None means another number for each dtype of a group; write numbers there")
    given = plain(given)
    fields = spec_class(rule).fields
    spec = spec_class(rule)(**{name: given[name] for name in fields if name in given})
    extra: dict[str, Any] = {
        k: given[k] for k in ("maximize", "hessian_seed", "initial_lr") if isinstance(given.get(k), PLAIN) and k in given
    }
    return Values(spec.values(), [k for k, v in spec.values().items() if callable(v)], extra)


def _parameter(name: str, where: tuple[int, int | None], rule: str, spec: Spec, state: Mapping[str, Any]) -> Parameter:
    state = _authors_soap(state) if rule == "soap" and "GG" in state else state
    shape = _shape(rule, state)
    pieces = int(state.get("batch", 1))
    piece = shape if pieces == 1 else inner_shape(shape, pieces)
    step = int(state.get("step", 1))  # torch's SGD and Muon do not count, and need not
    counters = {k: float(state[k]) if k in state else float(k == "started") for k in spec.counters()}
    p = Parameter(*where, shape, step, {}, counters, "float32", pieces, piece)
    for slot, each in spec.slots(piece).items():
        value = state.get(outside(rule, slot))
        if torch.is_tensor(value):
            p.dtype = str(value.dtype).removeprefix("torch.")
            p.tensors[slot] = wrapped(value, p.stored(each), f"{slot} of {name!r}")
    return p


def _shape(rule: str, state: Mapping[str, Any]) -> Shape:
    """A parameter's shape, which is that of its moments."""
    if torch.is_tensor(state.get("row_var")):
        return (*state["row_var"].shape[:-1], state["col_var"].shape[-1])
    first = next(state[outside(rule, slot)] for slot in ("m", "v", "h") if torch.is_tensor(state.get(outside(rule, slot))))
    return tuple(first.shape)


def _authors_soap(state: Mapping[str, Any]) -> dict[str, Any]:
    """The authors' state in our names: they count the steps that moved, and keep [] for a dimension without a basis."""
    if state["Q"] is None:
        raise CheckpointError("a state of the authors' SOAP has no basis yet; take a step before saving it")
    ours = {k: state[k] for k in ("exp_avg", "exp_avg_sq")} | {"step": state["step"] + 1}
    for label, matrices in (("L", state["GG"]), ("Q", state["Q"])):
        ours |= {f"{label}{i}": matrix for i, matrix in enumerate(matrices, 1) if torch.is_tensor(matrix)}
    return ours


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def to_state_dict(source: Snapshot | str | os.PathLike[str], optimizer: str | None = None) -> dict[str, Any]:
    """The state dict that torch.optim (or the authors' SOAP) loads. Where an `otherwise` is there too, say which of both."""
    if not isinstance(source, Snapshot):
        with files.opened(source) as snapshot:
            return to_state_dict(snapshot, optimizer)
    known = [member.optimizer for member in source.members]
    wanted = _rule({}, optimizer) if optimizer else known[0]
    if wanted not in known or (optimizer is None and len({p.member for p in source.parameters.values()}) > 1):
        raise CheckpointError(f"it is of {' and '.join(known)}; say which of them (optimizer=…, --optimizer)")
    if wanted not in (*CLASSES, "soap"):
        raise CheckpointError(f"torch.optim has no {OPTIMIZERS[wanted][1]}")
    index = known.index(wanted)
    member = source.members[index]
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    for place in (None, *range(len(member.groups))):
        mine = {name: p for name, p in source.parameters.items() if (p.member, p.group) == (index, place)}
        keys = list(range(len(states), len(states) + len(mine)))
        states |= dict(zip(keys, (_state(wanted, member.specs[place], p) for p in mine.values()), strict=True))
        if mine:
            groups.append(_group(wanted, member.values_of(place)) | {"params": keys, "param_names": list(mine)})
    return {"state": states, "param_groups": groups}


def _group(rule: str, values: Values) -> dict[str, Any]:
    given, title = values.hyperparameters, OPTIMIZERS[rule][1]
    if rule == "soap":
        return {**given, "shampoo_beta": -1 if given["shampoo_beta"] is None else given["shampoo_beta"], **AUTHORS_SOAP}
    known = ("keller", "moonlight") if rule == "muon" else ("torch",)
    if "convention" in given and given["convention"] not in known:
        raise CheckpointError(f"torch.optim has no {title} of the convention {given['convention']!r}")
    make: Any = getattr(torch.optim, CLASSES[rule])
    defaults = make([torch.zeros(1, 1)], lr=1e-3).defaults
    said = {**given, **values.extra, **foreign(rule, dict(given))}
    return {k: said.get(k, default) for k, default in defaults.items()}


def _state(rule: str, spec: Spec, p: Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {} if rule in UNCOUNTED else {"step": torch.tensor(float(p.step))}
    if p.split:
        raise CheckpointError("torch.optim does not split parameters")
    waits = rule == "sgd" and not p.counters.get("started")  # torch's average begins when there is none
    for slot, each in spec.slots(p.shape).items() if not waits else ():
        state[outside(rule, slot)] = torch.from_numpy(p.tensors[slot].read()).reshape(_shape_there(each, p.shape))
    state |= {k: torch.tensor(float(v)) for k, v in p.counters.items() if k == "mu_product"}
    return _to_the_authors(state, spec, p) if rule == "soap" else state


def _shape_there(slot: Slot, shape: Shape) -> Shape:
    """torch keeps the axes that row and column means lack, with length 1."""
    lacking: dict[tuple[int, ...], Shape] = {(-1,): (*shape[:-1], 1), (-2,): (*shape[:-2], 1, *shape[-1:])}
    return lacking.get(slot.drop, slot.shape)


def _to_the_authors(state: dict[str, Any], spec: Any, p: Parameter) -> dict[str, Any]:
    theirs = {"step": max(p.step - 1, 0), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    axes = range(1, len(spec.merged(p.shape)) + 1)
    matrices = {label: [state.get(f"{label}{i}", []) for i in axes] for label in ("L", "Q")}
    beta = spec.betas[1] if spec.shampoo_beta is None else spec.shampoo_beta
    frequency = {"precondition_frequency": spec.precondition_frequency, "shampoo_beta": beta}
    return theirs | {"GG": matrices["L"], "Q": matrices["Q"] if p.step else None} | frequency
