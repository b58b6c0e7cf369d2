"""State dicts of ours and of other libraries (`layouts`) to snapshots; snapshots to those of torch.optim and the authors' SOAP.

    snapshot = from_state_dict(torch.load("a.pt", weights_only=True), names=[...])
    state_dict = to_state_dict("b.safetensors")

A state dict holds neither the class nor, unless parameters were given with names, the names: both can be said.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import files
from ..checkpoint.format import DTYPES, CheckpointError
from ..checkpoint.snapshot import Parameter, SavedOptimizer, SavedSettings, Snapshot
from ..registry import OURS, known, spec_class
from ..rounding import EXACT, LOW
from ..routing import bare
from ..spec import MODIFIERS, Shape, Spec
from ..splits import WHOLE, inner_shape
from .checkpoint import PLAIN
from .foreign_reader import layout_of, refuse_strangers, settings_of, state_of, unwrap_state
from .foreign_table import Origin
from .groups import read_numbers, settings_in_dtype
from .state import name_slots, names_of, read_split, shape_in_state
from .state_dict import (
    check_outline,
    defer_reading,
    read_parameter,
    refuse_repeated,
    state_error,
    state_type_error,
    torch_settings,
    unreadable_reason,
)

PROBES: tuple[Shape, ...] = ((), (3,), (3, 5), (3, 5, 7))  # shapes whose slots show which are like the parameter
AUTHORS_SOAP = {"normalize_grads": False, "correct_bias": True}  # what their groups have beside ours


# ---- files --------------------------------------------------------------------------------------------------------------
def read_state_dict(path: str | os.PathLike[str]) -> Any:
    """An optimizer's state dict out of a file of torch.save, or out of the training checkpoint in it. No pickle is executed."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path}: not a file")  # of a device or a pipe zipfile would read without end
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            refuse_compressed(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except CheckpointError:
        raise
    except Exception as problem:  # torch has many ways to refuse a file
        raise CheckpointError(f"{path}: torch cannot read it with weights_only=True: {extract_reason(problem)}") from problem
    for key in (None, "optimizer", "optimizer_state_dict", "optim", "optimizer_state"):
        found = loaded if key is None else loaded.get(key) if isinstance(loaded, dict) else None
        if isinstance(found, dict) and {"state", "param_groups"} <= found.keys():
            return found
    raise CheckpointError(f"{path}: there is no optimizer's state dict in it")


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Refuse an archive with compressed members: torch maps tensors into memory as they lie there, and compressed bytes would be
    taken for numbers."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{path}: {member.filename} in it is compressed, as torch.save never does; save it with torch.save"
                )


#: what torch's messages say beside what is wrong: how to run the pickle all the same, mostly
ASIDES = re.compile(r"\x1b\[\d*m|(Weights only load failed|In PyTorch|Please use|Check the documentation).*")


def extract_reason(problem: Exception) -> str:
    """The first line of torch's message that says what is wrong."""
    text = str(problem).rpartition("WeightsUnpickler error:")[2]
    lines = (line.strip() for line in ASIDES.sub("", text).splitlines())
    return next(filter(None, lines), type(problem).__name__)


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
        files.write_checkpoint(snapshot, Path(target), allow_nan)
        return snapshot
    with files.open_checkpoint(source, allow_nan) as snapshot:
        state_dict = to_state_dict(snapshot, optimizer)
    with files.replace_file(Path(target)) as file:
        try:
            torch.save(state_dict, file)
        except RuntimeError as problem:  # torch closes its archive, and says that it is not whole
            if isinstance(problem.__context__, OSError):
                raise problem.__context__ from None
            raise CheckpointError(f"{target}: cannot be written: {extract_reason(problem)}") from None
    return snapshot


# ---- to a snapshot ------------------------------------------------------------------------------------------------------
def from_state_dict(state_dict: Mapping[str, Any], optimizer: str | None = None, names: Sequence[str] | None = None) -> Snapshot:
    """A snapshot of an optimizer's state dict. Parameters that have no state yet are left out: they start afresh."""
    try:
        check_outline("convert", state_dict)
        return _make_snapshot(state_dict, optimizer, names)
    except CheckpointError:
        raise
    except ValueError as problem:
        raise CheckpointError(str(problem)) from problem
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as problem:
        raise CheckpointError(f"the state dict is not as torch makes it: {type(problem).__name__}: {problem}") from problem


def _make_snapshot(state_dict: Mapping[str, Any], optimizer: str | None, names: Sequence[str] | None) -> Snapshot:
    groups, states = state_dict["param_groups"], {key: unwrap_state(state) for key, state in state_dict["state"].items()}
    of = [[{} if states.get(key) is None else states[key] for key in group["params"]] for group in groups]  # each group's
    for group, each in zip(groups, of, strict=True):
        if "rule" not in group:
            refuse_strangers("the state dict", group, [state for state in each if isinstance(state, Mapping)])
    rules: list[str] = [group.get("rule") or _find_rule(group, optimizer) for group in groups]
    order = sorted(dict.fromkeys(rules), key=lambda rule: rule != optimizer)
    called = _find_names(groups, names)
    for key, state in states.items():
        if key in called and not isinstance(state, Mapping | None):
            raise state_type_error("convert", called[key], state)
    members: list[SavedOptimizer] = []
    parameters: dict[str, Parameter] = {}
    for rule in order:
        kind = spec_class(rule)
        mine = [(group, each) for group, each, its in zip(groups, of, rules, strict=True) if its == rule]
        layouts = [layout_of(kind.title, kind, group, each) for group, each in mine]
        values = [_read_settings(kind, layout, *each) for layout, each in zip(layouts, mine, strict=True)]
        members.append(SavedOptimizer.of(rule, values))
        for place, ((group, each), layout) in enumerate(zip(mine, layouts, strict=True)):
            where = len(members) - 1, place - 1 if place else None
            spec = members[-1].specs[where[1]]
            for key, state in zip(group["params"], each, strict=True):
                if state.keys() - {"step", "started"}:
                    parameters[called[key]] = _read_parameter(
                        called[key], where, spec, _translate_state(spec, layout, group, state, called[key])
                    )
    iteration = max((p.step for p in parameters.values()), default=0)
    return Snapshot(members, parameters, iteration, front_end="torch")


def _translate_state(spec: Spec, layout: Origin | None, group: Mapping[str, Any], state: Mapping[str, Any], name: str) -> Any:
    """The state of a parameter whose shape nobody says."""
    if layout is None:
        return state
    shape = _find_foreign_shape(state)
    names = list(name_slots(spec, spec.slots(shape)).values())
    return state_of(spec.title, spec, layout, group, state, names, shape, name)


def _find_rule(group: Mapping[str, Any], optimizer: str | None) -> str:
    """Which optimizer a group of torch.optim is for."""
    if optimizer is not None:
        theirs = {kind.torch.like.lower(): kind.name for kind in OURS if kind.torch.like}
        try:
            return spec_class(theirs.get(optimizer.lower(), optimizer)).name
        except ValueError as problem:
            raise CheckpointError(str(problem)) from None
    for kind in known().values():
        if kind.torch.telltale and kind.torch.telltale in group:
            return kind.name
    decoupled = group.get("decoupled_weight_decay")
    if decoupled is None or "betas" not in group:
        raise CheckpointError("the state dict does not show which optimizer it is of; say it (optimizer=…, --optimizer)")
    return "radam" if "amsgrad" not in group else "adamw" if decoupled else "adam"


def _find_names(groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> dict[Any, str]:
    keys = [key for group in groups for key in group["params"]]
    found = [name for group in groups for name in group.get("param_names") or ()] if names is None else list(names)
    if len(found) != len(keys):
        problem = f"{len(found)} names are given for {len(keys)}" if names is not None else f"it has no names for its {len(keys)}"
        raise CheckpointError(f"{problem} parameters; say them in the order of the optimizer's groups (names=…, --names)")
    stripped = [bare(name) for name in found]
    if twice := [name for name, n in Counter(stripped).items() if n > 1]:
        raise CheckpointError(f"two parameters are called {twice[0]!r}; give each its own name")
    return dict(zip(keys, stripped, strict=True))


def _read_settings(
    kind: type[Spec], layout: Origin | None, group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> SavedSettings:
    given = settings_of(kind.title, kind, layout, dict(group))
    # torch keeps state in the parameter's dtype, which settings may follow
    dtypes = {v.dtype for each in states for k, v in each.items() if k != "step" and torch.is_tensor(v) and v.is_floating_point()}
    given, *others = [read_numbers(settings_in_dtype(kind, given, dtype)) for dtype in dtypes or {torch.float32}]
    if different := [k for other in others for k, v in other.items() if v != given[k]]:
        raise CheckpointError(
            f"{kind.title}'s {different[0]} of None means another number for each dtype of a group; write numbers there"
        )
    try:
        spec = kind(**{name: given[name] for name in kind.fields if name in given})
    except TypeError as problem:
        raise CheckpointError(str(problem)) from None
    extra: dict[str, Any] = {
        k: given[k] for k in ("maximize", "hessian_seed", "initial_lr") if isinstance(given.get(k), PLAIN) and k in given
    }
    return SavedSettings(spec.values(), [k for k, v in spec.values().items() if callable(v)], extra)


def _read_parameter(name: str, where: tuple[int, int | None], spec: Spec, state: Mapping[str, Any]) -> Parameter:
    try:
        split = read_split(state) or WHOLE
    except (TypeError, ValueError) as problem:
        raise state_error("convert", "batch", name, state["batch"], f"how many parts it is split into ({problem})") from None
    if not isinstance(split, int):
        raise CheckpointError(f"{name!r} is split into parts of {split}, which state dicts of others do not have")
    shape = _find_shape(spec, state)
    for key, value in state.items():
        if torch.is_tensor(value) and not unreadable_reason(value):
            refuse_repeated(value, f"state {key!r} of {name!r}")
    slots = spec.stored_slots(inner_shape(shape, split))
    plain_slots = [state.get(key) for slot, key in name_slots(spec, slots).items() if not slots[slot].storage]
    dtypes = [value.dtype for value in plain_slots if torch.is_tensor(value)]
    dtype = torch.bfloat16 if LOW in state and spec.rounding == EXACT else dtypes[-1] if dtypes else torch.float32
    given = state if spec.torch.counts else {"step": 1, **state}  # torch's SGD and Muon do not count, and need not
    p = read_parameter(spec.title, spec, torch.empty(shape, dtype=dtype, device="meta"), split, given, name)
    p.member, p.group = where
    for key, each in p.tensors.items():
        if key in slots and not slots[key].storage and each.dtype == DTYPES["BF16"]:  # torch's, of parameters of 16 bits
            p.tensors[key] = defer_reading(each.value, each.shape, f"{key} of {name!r}")
    return p


def _find_shape(spec: Spec, state: Mapping[str, Any]) -> Shape:
    """A parameter's shape, which is that of its moments."""
    if torch.is_tensor(state.get("row_var")):
        return (*state["row_var"].shape[:-1], state["col_var"].shape[-1])
    for probe in PROBES:
        slots = spec.slots(probe)
        for slot, key in name_slots(spec, slots).items():
            if slots[slot].shape == probe and not slots[slot].factor and torch.is_tensor(state.get(key)):
                return tuple(state[key].shape)
    raise CheckpointError(f"its state ({', '.join(map(str, state))}) is not {spec.title}'s; is it another optimizer's?")


def _find_foreign_shape(state: Mapping[str, Any]) -> Shape:
    """A parameter's shape: of what most numbers are kept of, unless its second moment is factored."""
    row, column = (state.get(f"exp_avg_sq_{each}") for each in ("row", "col"))
    if torch.is_tensor(row) and torch.is_tensor(column):
        return (*row.shape, column.shape[-1])
    tensors = {k: v for k, v in state.items() if torch.is_tensor(v) and not str(k).startswith("qmap")}
    largest = tensors.get("state2", max(tensors.values(), key=torch.numel, default=torch.zeros(())))  # state1 may be two averages
    return tuple(largest.shape)


# ---- from a snapshot ----------------------------------------------------------------------------------------------------
def to_state_dict(source: Snapshot | str | os.PathLike[str], optimizer: str | None = None) -> dict[str, Any]:
    """The state dict that torch.optim (or the authors' SOAP) loads. Where an `otherwise` is there too, say which of both."""
    if not isinstance(source, Snapshot):
        with files.open_checkpoint(source) as snapshot:
            return to_state_dict(snapshot, optimizer)
    known = [member.optimizer for member in source.members]
    wanted = _find_rule({}, optimizer) if optimizer else known[0]
    if wanted not in known or (optimizer is None and len({p.member for p in source.parameters.values()}) > 1):
        raise CheckpointError(f"the checkpoint is of {' and '.join(known)}; say which of them (optimizer=…, --optimizer)")
    if not spec_class(wanted).torch.like and wanted != "soap":
        raise CheckpointError(f"torch.optim has no {spec_class(wanted).title}")
    index = known.index(wanted)
    member = source.members[index]
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    for place in (None, *range(len(member.groups))):
        mine = {name: p for name, p in source.parameters.items() if (p.member, p.group) == (index, place)}
        keys = list(range(len(states), len(states) + len(mine)))
        states |= dict(zip(keys, (_write_state(wanted, member.specs[place], *each) for each in mine.items()), strict=True))
        if mine:
            groups.append(_write_group(wanted, member.values_of(place)) | {"params": keys, "param_names": list(mine)})
    return {"state": states, "param_groups": groups}


#: how things are kept, of which others know nothing: codes are decoded, low halves of parameters dropped
KEPT = ("state_dtype", "rounding")


def _write_group(rule: str, values: SavedSettings) -> dict[str, Any]:
    kind, given = spec_class(rule), {k: v for k, v in values.hyperparameters.items() if k not in MODIFIERS}
    for name, field in MODIFIERS.items():
        if name not in KEPT and values.hyperparameters.get(name, field.default) != field.default:
            raise CheckpointError(f"{name}={values.hyperparameters[name]!r}, which others' {kind.title} does not have")
    if rule == "soap":
        return {**given, "shampoo_beta": -1 if given["shampoo_beta"] is None else given["shampoo_beta"], **AUTHORS_SOAP}
    words = [each.write(given["convention"]) for each in kind.torch.settings.values() if each.field == "convention"]
    if "convention" in given and (None in words or (not words and given["convention"] != "torch")):
        raise CheckpointError(f"torch.optim has no {kind.title} of the convention {given['convention']!r}")
    make: Any = getattr(torch.optim, kind.torch.like)
    defaults = make([torch.zeros(1, 1, device="cpu")], lr=1e-3).defaults
    said = {**given, **values.extra, **torch_settings(kind, given)}
    return {k: said.get(k, default) for k, default in defaults.items()}


def _write_state(rule: str, spec: Spec, name: str, p: Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(float(p.step), device="cpu")} if spec.torch.counts else {}
    if p.split:
        raise CheckpointError(f"{name!r} is split into {p.pieces} of shape {p.piece}, which torch.optim does not do")
    waits = not p.counters.get("started", 1)  # torch's average begins when there is none
    slots, like = p.slots(spec), torch.empty(p.shape, device="meta")
    for slot, key in names_of(spec, slots).items() if not waits else ():
        state[key] = torch.from_numpy(p.values(slot)).reshape(shape_in_state(slots[slot], like, WHOLE))
    state |= {k: torch.tensor(float(v), device="cpu") for k, v in p.counters.items() if k == "mu_product"}
    return _write_authors_state(state, spec, p) if rule == "soap" else state


def _write_authors_state(state: dict[str, Any], spec: Any, p: Parameter) -> dict[str, Any]:
    theirs = {"step": max(p.step - 1, 0), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    axes = range(1, len(spec.merged(p.shape)) + 1)
    matrices = {label: [state.get(f"{label}{i}", []) for i in axes] for label in ("L", "Q")}
    beta = spec.betas[1] if spec.shampoo_beta is None else spec.shampoo_beta
    frequency = {"precondition_frequency": spec.precondition_frequency, "shampoo_beta": beta}
    return theirs | {"GG": matrices["L"], "Q": matrices["Q"] if p.step else None} | frequency
