"""The state of one parameter on its way to and from a `Snapshot`: the one reader of state dicts in our words, the one writer.

`load_state_dict`, files, other libraries' state dicts and replaced parameters all come through `read_parameter`, `make_room` and
`fill`.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import random, storage
from ..checkpoint.format import CheckpointError, Tensor
from ..checkpoint.snapshot import CORRUPT, Parameter, describe_missing, describe_wrong_shape, list_possible_state
from ..rounding import LOW
from ..routing import bare
from ..spec import KEY, TRAINED, Field, Shape, Spec
from ..splits import Split, names_in, number, part, shapes_of, slots_of
from ..storage import COMPONENTS, Words
from . import bf16
from .memory import is_dtensor, local_part
from .state import (
    HOST,
    Slots,
    as_tensor,
    device_of,
    dtype_of,
    kept_slots,
    make_counter,
    names_of,
    part_names,
    piece_shape,
    read_split,
    room,
    shape_in_state,
)

# ---- what may be in one, and what is said of something else ----
COUNTABLE = 2**53  # "step" is a float64
#: what no numbers can be copied from, and the way out
CLOSED: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda value: not isinstance(value, torch.Tensor), "The checkpoint is corrupt"),
    (lambda value: value.layout is not torch.strided, "Make it dense (.to_dense())"),
    (lambda value: value.is_quantized, "Make it numbers (.dequantize())"),
    (lambda value: value.is_meta, "It was never filled; read the file onto a device that has memory (map_location=)"),
    (lambda value: value.is_complex(), "The checkpoint is corrupt, or of a complex parameter"),
)


def restart_hint(name: str) -> str:
    return f"; remove the state of {name!r} to restart it with zero state"


def unreadable_reason(value: Any) -> str | None:
    """The way out where no numbers can be copied from a value; None where they can."""
    return next((hint for is_so, hint in CLOSED if is_so(value)), None)


def describe_value(value: Any) -> str:
    """A value, in a message."""
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    if value.numel() < 2 and not unreadable_reason(value):
        return repr(value)
    layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
    return f"{value.dtype}{layout} of shape {tuple(value.shape)} on {value.device}"


def state_error(owner: str, key: str, name: str, value: Any, needed: str) -> ValueError:
    """What is said of a value in a parameter's state."""
    hint = unreadable_reason(value) or CLOSED[0][1]
    hint += restart_hint(name) if hint == CLOSED[0][1] else ""
    return ValueError(f"{owner}: state {key!r} of {name!r} is {describe_value(value)}, expected {needed}. {hint}")


def state_type_error(owner: str, name: str, value: Any) -> ValueError:
    """What is said where the state of a parameter is no dict."""
    found = describe_value(value)
    return ValueError(f"{owner}: the state of {name!r} is {found}, expected a dict of tensors{restart_hint(name)}")


def check_outline(owner: str, given: Any) -> None:
    """That a state dict has parameters in groups, which torch's loader takes for granted."""

    def refuse(what: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{owner}: {what} is {describe_value(value)}, expected {needed}. Give what state_dict() returned")

    if not isinstance(given, Mapping):
        raise refuse("the state dict", given, "a dict")
    state, groups = given.get("state"), given.get("param_groups")
    if not isinstance(state, Mapping):
        raise refuse("'state' of the state dict", state, "a dict, by the places of parameters")
    if not isinstance(groups, (list, tuple)):
        raise refuse("'param_groups' of the state dict", groups, "a list of dicts")
    for i, group in enumerate(groups):
        here = f"group {i} of the state dict"
        if not isinstance(group, Mapping):
            raise refuse(here, group, "a dict")
        params, names = group.get("params"), group.get("param_names")
        if not isinstance(params, (list, tuple)):
            raise refuse(f"'params' of {here}", params, "a list of the places of parameters")
        listed = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        if names is not None and not (listed and len(names) in (0, len(params))):
            raise refuse(f"'param_names' of {here}", names, f"a list of {len(params)}, a name for each of its 'params'")
    places = [key for group in groups for key in group["params"] if isinstance(key, (int, str))]
    strangers = [key for key, value in state.items() if key not in places and isinstance(value, Mapping)]
    misspelled = [key for key in strangers if "step" in state[key] or str(key) in map(str, places)]
    if places and misspelled and not any(key in state for key in places):  # torch would begin anew, and say nothing
        raise ValueError(
            f"{owner}: 'state' of the state dict is by {describe_value(misspelled[0])}, expected the places that 'params' of its "
            f"groups list, as {describe_value(places[0])}. JSON makes texts of numbers: give what state_dict() returned"
        )


def check_number(owner: str, key: str, name: str, value: Any, allowed: Field | None = None) -> float:
    """A number that is kept beside the slots of a parameter; "step" counts. allowed: its range, where the rule says one."""
    try:
        with _disable_current_modes():  # a count is a number, under FakeTensorMode too
            value = value.detach() if isinstance(value, torch.Tensor) else value
            found = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan
    counts = key == "step"
    if not math.isfinite(found) or (counts and (not 0 <= found <= COUNTABLE or found != int(found))):
        raise state_error(owner, key, name, value, "a whole number from 0 to 2^53" if counts else "a finite number")
    if allowed is not None:
        try:
            allowed.check(found)
        except ValueError:
            raise state_error(owner, key, name, value, allowed.expected) from None
    return found


def canonicalize(owner: str, state: dict[str, Any], spec: Spec, name: str) -> None:
    """Counts as they should be, where others have moved or replaced them. name: whose they are."""
    for key in ("step", *spec.counters()):
        value = state[key]
        found = check_number(owner, key, name, value, spec.counter_ranges.get(key))
        sound = torch.is_tensor(value) and not value.ndim and value.dtype is torch.float64 and value.device.type == "cpu"
        if not sound or value.is_inference():
            state[key] = make_counter(found)


def read_component(owner: str, state: Mapping[str, Any], key: str, name: str) -> torch.Tensor:
    """A slot's tensor, or the part of one; what is no tensor with memory is refused."""
    if unreadable_reason(state[key]):
        raise state_error(owner, key, name, state[key], "a tensor")
    return cast(torch.Tensor, state[key])


def split_of(owner: str, param: torch.Tensor, saved: Mapping[str, Any], name: str) -> Split | None:
    """How a parameter is split, as a checkpoint says."""
    try:
        if (split := read_split(saved)) is not None:
            shapes_of(tuple(param.shape), split)
    except (TypeError, ValueError) as problem:
        raise state_error(owner, "batch", name, saved["batch"], f"a split of shape {tuple(param.shape)} ({problem})") from None
    return split


# ---- tensors ------------------------------------------------------------------------------------------------------------------
def gather_whole(tensor: Any) -> torch.Tensor:
    """A tensor; a DTensor with its parts from all ranks."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def copy_to_host(tensor: torch.Tensor, what: str, dtype: str = "") -> np.ndarray:
    """A tensor's values where NumPy sees them; not copied if they are on the CPU already. dtype: of a component of a slot in
    fewer bits, which is given as it is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{what} is a {type(tensor).__name__}; gather the whole of it first")
    tensor = tensor.detach().cpu()
    if dtype == "bfloat16":
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor if dtype or tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


def defer_reading(
    tensor: torch.Tensor, shape: Shape, what: str, dtype: str = "", gather: Callable[[], torch.Tensor] | None = None
) -> Tensor:
    """A tensor of state that is fetched from its device when it is written; `gather` brings it together from the ranks."""
    kind: Any = Words.types[dtype] if dtype else np.float64 if tensor.dtype is torch.float64 else np.float32

    def read() -> np.ndarray:
        return copy_to_host(tensor if gather is None else gather(), what, dtype).reshape(shape)

    return Tensor(shape, np.dtype(kind), read, tensor)


def refuse_repeated(tensor: torch.Tensor, what: str) -> None:
    """Refuse few numbers that a tensor repeats: a file of a hundred bytes can say that it has 10^12."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{what} repeats few numbers {tensor.numel():,} times; give it memory of its own (.contiguous())")


# ---- out of a state dict -------------------------------------------------------------------------------------------------------
def read_parameter(
    owner: str, spec: Spec, param: torch.Tensor, split: Split, saved: Mapping[str, Any], name: str, home: Any = None,
    live: bool = False,
) -> Parameter:  # fmt: skip
    """The state of a parameter as a state dict in our words has it. Every value is checked; what the user keeps there beside ours
    is in `extras`. live: it is the optimizer's own, as its home lays it out, perhaps with slots that a changed setting left."""

    def lack(key: str) -> ValueError:
        return ValueError(f"{owner}: {describe_missing(key, name)}{restart_hint(name)}")

    kind, parts = str(param.dtype).removeprefix("torch."), () if isinstance(split, int) else split
    p = Parameter(0, None, tuple(param.shape), 0, {}, {}, kind, number(split), piece_shape(param, split), parts=parts)
    given, first = {k: v for k, v in saved.items() if k != "batch"}, spec.counters()
    if saved and spec.torch.counts and "step" not in saved:
        raise lack("step")
    p.step = int(check_number(owner, "step", name, given.pop("step", 0.0)))
    low, pieces, slots = given.pop(LOW, None), p.slots(spec), kept_slots(spec, param, split, home)
    if live and given.keys() - {*first, *part_names(spec, slots)}:
        pieces, first = list_possible_state(spec, p)
        slots = {slot: each * (p.pieces // len(each)) for slot, each in pieces.items()}
    for label in first.keys() & given.keys():
        p.counters[label] = check_number(owner, label, name, given.pop(label), spec.counter_ranges.get(label))
    if low is not None and bf16.keeps_low(spec, param):
        check_low(owner, param, low, name)
        gather = low.full_tensor if live and is_dtensor(low) else None
        p.tensors[LOW] = defer_reading(low, (*param.shape, 2), f"{LOW!r} of {name!r}", "uint8", gather)
    begins = "started" in first  # and has no buffers before
    needed = bool(saved) and not live and (not begins or bool(p.counters.get("started")))
    for slot, key in names_of(spec, slots).items():
        value = given.pop(key, None)
        if value is None and needed and slots[slot][0].meaning == KEY:
            value = _key(spec, slots[slot], param, split, name)
        if value is not None:
            kind = storage.STORED.get(str(getattr(value, "dtype", "")).removeprefix("torch."), storage.EXACT)
            kind = storage.EXACT if live and not slots[slot][0].storage else kind  # a parameter of 16 bits, in evaluation mode
            if kind == storage.EXACT and torch.is_tensor(value) and not (unreadable_reason(value) or value.is_floating_point()):
                raise state_error(owner, key, name, value, "a tensor of real numbers")
            there, each = (tuple(replace(one, storage=kind) for one in of[slot]) for of in (slots, pieces))
            for end, dtype in COMPONENTS[kind].items():
                found, shape = given.pop(key + end, None) if end else value, shape_in_state(part(there, end), param, split)
                gather = functools.partial(home.gather, found, shape) if live and home is not None else None
                if gather is None:
                    check_component(owner, key + end, name, found, shape, bool(end))
                elif unreadable_reason(found) or not home.accepts(found, shape):  # ranks would gather what one of them has not
                    raise state_error(owner, key + end, name, found, f"a tensor of shape {shape}, as this optimizer laid it out")
                stored, called = p.stored(part(each, end)), f"{key + end!r} of {name!r}"
                p.tensors[slot + end] = defer_reading(found, stored, called, dtype, gather)
        elif needed:
            raise lack(key)
    if begins:
        p.counters.setdefault("started", float(bool(p.tensors.keys() - {LOW})))
    lacking = [label for label in first if label not in p.counters]
    if lacking and saved and p.step and not live:
        raise lack(lacking[0])
    p.counters, p.extras = {**spec.counters(), **p.counters}, given
    return p


def check_component(owner: str, key: str, name: str, value: Any, shape: Shape, scales: bool) -> None:
    """Refuse what is no tensor of this shape, and scales below zero."""
    if unreadable_reason(value):
        raise state_error(owner, key, name, value, f"a tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{owner}: {describe_wrong_shape(key, name, tuple(value.shape), shape)}{restart_hint(name)}")
    if scales and bool((local_part(value) < 0).any()):
        raise ValueError(f"{owner}: state {key!r} of {name!r} has scales below zero. {CORRUPT}{restart_hint(name)}")


def check_low(owner: str, param: torch.Tensor, value: Any, name: str) -> None:
    """The low half of a parameter, if it is one."""
    shape = (*param.shape, 2)
    if unreadable_reason(value) or value.dtype is not torch.uint8 or tuple(value.shape) != shape:
        raise ValueError(
            f"{owner}: state {LOW!r} of {name!r} is {describe_value(value)}, expected uint8 of shape {shape}. {CORRUPT}; remove "
            "this entry to go on from the parameter's upper half alone"
        )


def _key(spec: Spec, slots: Slots, param: torch.Tensor, split: Split, name: str) -> torch.Tensor:
    """The key of a parameter's noise, which older versions drew by seed and name."""
    keys = [random.key(spec.values()["seed"], each) for each in names_in(bare(name), split)]
    value = torch.tensor(list(map(random.split_key, keys)), dtype=torch.float64, device="cpu")
    return value.reshape(shape_in_state(slots, param, split))


def refuse_codes(
    owner: str, spec: Spec, there: Any, param: torch.Tensor, split: Split, given: Mapping[str, Any], name: str
) -> None:
    """Refuse codes that were read as numbers: torch.distributed.checkpoint copies them into whatever tensor it is given. there:
    the `state_dtype` that the checkpoint was written with."""
    slots = slots_of(spec.replace(state_dtype=there), tuple(param.shape), split)
    for slot, key in names_of(spec, slots).items():
        value: Any = given.get(key)
        if len(COMPONENTS[slots[slot][0].storage]) > 1 and not unreadable_reason(value) and value.is_floating_point():
            found = local_part(value)
            if bool(found.any()) and torch.equal(found, found.round()):
                raise ValueError(
                    f"{owner}: {key!r} of {name} are codes that were read as numbers: the checkpoint has state_dtype={there!r}, "
                    f"here it is {spec.state_dtype!r}; read it into an optimizer with that one, and load its state_dict here"
                )


# ---- into the optimizer --------------------------------------------------------------------------------------------------------
def slots_at_home(spec: Spec, p: Parameter, home: Any) -> dict[str, Slots]:
    """The slots of a parameter as they are kept at its home: those of the rule, and those that there is state for."""
    slots = {**p.slots(spec), **p.used(spec)}
    slots = {name: each * (p.pieces // len(each)) for name, each in slots.items()}
    return slots if home is None else home.stored_slots(slots, p.way)


def make_state(
    spec: Spec, p: Parameter, param: torch.Tensor, home: Any = None, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """State for a parameter of a snapshot, to be filled. before: buffers that are used again where they fit."""
    slots, device = slots_at_home(spec, p, home), device_of(param, home)
    state: dict[str, Any] = {"step": make_counter(p.step)}
    if p.pieces > 1:
        state["batch"] = p.way
    for key, (slot, end) in part_names(spec, slots).items():
        each, old = slots[slot], (before or {}).get(key) if slot in p.tensors else None
        shape, fits = shape_in_state(part(each, end), param, p.way), False
        if torch.is_tensor(old) and (old.dtype, old.device) == (dtype_of(each, param, end), device) and old.is_contiguous():
            fits = old.shape == shape if home is None else home.accepts(old, shape)
        state[key] = old if fits else room(each, param, p.way, home, end)
    state |= {k: make_counter(v) for k, v in p.counters.items()}
    bf16.init_state(state, spec, param, device)
    return state


@torch.no_grad()
def fill_state(state: dict[str, Any], spec: Spec, p: Parameter, home: Any = None) -> None:
    """Write a snapshot's tensors into the state of a parameter: components of the same format as they are, others by value."""
    if LOW in state and LOW in p.tensors:
        bf16.write_low(state[LOW], as_tensor(p.tensors[LOW].native()))
    slots = slots_at_home(spec, p, home)
    for slot, key in names_of(spec, slots).items():
        if slot in p.tensors:
            kind, wanted = p.storage_of(slot), slots[slot][0].storage
            found = {end: p.tensors[slot + end].native() for end in COMPONENTS[kind]}
            write_slot({end: state[key + end] for end in COMPONENTS[wanted]}, wanted, kind, found, home)


def write_slot(buffers: Mapping[str, torch.Tensor], wanted: str, kind: str, given: Mapping[str, Any], home: Any) -> None:
    """Leave the components of a slot, in the format `kind`, in buffers that are in the format `wanted`. Those of a parameter that
    is spread over ranks are given whole, or as DTensors."""
    values = {end: as_tensor(value) for end, value in given.items()}
    values = {end: v.view(torch.bfloat16) if v.dtype is torch.uint16 else v for end, v in values.items()}  # as NumPy has it
    if kind != wanted:
        first, value = buffers[""], decode_slot(kind, values)
        if wanted:
            value = gather_whole(value).to(first.device)
            value = value.reshape(first.shape) if home in (None, HOST) else value
            values = storage.encode(engine_on(first.device), wanted, value, 0)
        else:
            values = {"": value}
    for end, value in values.items():
        if home is None:
            buffers[end].copy_(value.reshape(buffers[end].shape))
        else:
            home.write(buffers[end], value)


def decode_slot(kind: str, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values of a slot that is kept in these components."""
    if not kind:
        return components[""]
    codes, *scales = map(gather_whole, components.values())
    scales = [each.reshape(*codes.shape[:-1], -1) for each in scales]  # of a split parameter they may have another shape
    found: torch.Tensor = storage.decode(engine_on(codes.device), storage.Quantized(kind, codes, *scales))
    return found


def engine_on(device: torch.device) -> Any:
    """`storage`'s words on a device."""
    from ..engines.torch_ import TorchEngine

    return TorchEngine(device)


def begin_state(
    owner: str, spec: Spec, param: torch.Tensor, split: Split, saved: Mapping[str, Any], name: str, home: Any = None
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The state of a parameter that a state dict in our words has, by value, all of it checked; as it starts where that is empty.
    And what is to be called to fill it: ranks may then exchange parts of it."""
    p = read_parameter(owner, spec, param, split, saved, name, home)
    state = make_state(spec, p, param, home) | {k: copy_value(v) for k, v in p.extras.items()}
    trained = p.extras.get(TRAINED) if spec.evaluated else None  # of evaluation mode
    if trained is not None:
        check_component(owner, TRAINED, name, trained, tuple(param.shape), False)
        state[TRAINED] = param.detach().clone().to(device_of(param, home))  # laid out as the parameter is

    def finish() -> None:
        fill_state(state, spec, p, home)
        if trained is not None:
            write_slot({"": state[TRAINED]}, "", "", {"": trained}, home)

    return state, finish


def copy_value(found: Any) -> Any:
    """Tensors and what they are in, copied; other objects are what they are."""
    if torch.is_tensor(found):
        return found.clone()
    if type(found) is dict:
        return {k: copy_value(v) for k, v in found.items()}
    return type(found)(map(copy_value, found)) if type(found) in (list, tuple, set) else found


# ---- groups ----
def order_by_name(ours: Mapping[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A saved group in the order of ours, where both have the same names."""
    names, given = ([bare(name) for name in group.get("param_names") or ()] for group in (ours, saved))
    there = dict(zip(given, saved.get("params", ()), strict=False))
    if names == given or sorted(names) != sorted(there) or len(there) != len(given):
        return saved
    return {**saved, "params": [there[name] for name in names], "param_names": list(ours["param_names"])}


def torch_settings(kind: type[Spec], group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.optim calls the settings of a group, where that is something else."""
    there = kind.torch
    said = {theirs: each.write(group[each.field]) for theirs, each in there.settings.items() if each.field in group}
    said |= {"decoupled_weight_decay": there.decoupled}
    return {k: v for k, v in said.items() if v is not None}
