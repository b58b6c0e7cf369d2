"""The state of one parameter on its way to and from a `Snapshot`: the one reader of state dicts in our words, the one writer.

`load_state_dict`, files, other libraries' state dicts and replaced parameters all come through `read_parameter`, `make_room` and
`fill`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .. import random, storage
from ..checkpoint.format import CheckpointError, Tensor
from ..checkpoint.snapshot import CORRUPT, Parameter, missing, possible
from ..rounding import LOW
from ..routing import bare
from ..spec import KEY, Shape, Spec
from ..splits import Split, names_in, number, part, slots_of
from ..storage import COMPONENTS, Words
from . import halves
from .state import (
    HOST,
    Slots,
    counter,
    device_of,
    dtype_of,
    kept_slots,
    names_of,
    part_names,
    piece_shape,
    room,
    shape_in_state,
    tensor_of,
)
from .state_errors import check_tensor, described, number_in, restart, state_error, unreadable


# ---- tensors ------------------------------------------------------------------------------------------------------------------
def whole(tensor: Any) -> torch.Tensor:
    """A tensor; a DTensor with its parts from all ranks."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def host(tensor: torch.Tensor, what: str, dtype: str = "") -> np.ndarray:
    """A tensor's values where NumPy sees them; not copied if they are on the CPU already. dtype: of a component of a slot in
    fewer bits, which is given as it is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{what} is a {type(tensor).__name__}; gather the whole of it first")
    tensor = tensor.detach().cpu()
    if dtype == "bfloat16":
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor if dtype or tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


def wrapped(
    tensor: torch.Tensor, shape: Shape, what: str, dtype: str = "", gather: Callable[[], torch.Tensor] | None = None
) -> Tensor:
    """A tensor of state that is fetched from its device when it is written; `gather` brings it together from the ranks."""
    kind: Any = Words.types[dtype] if dtype else np.float64 if tensor.dtype is torch.float64 else np.float32

    def read() -> np.ndarray:
        return host(tensor if gather is None else gather(), what, dtype).reshape(shape)

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
        return ValueError(f"{owner}: {missing(key, name)}{restart(name)}")

    kind, parts = str(param.dtype).removeprefix("torch."), () if isinstance(split, int) else split
    p = Parameter(0, None, tuple(param.shape), 0, {}, {}, kind, number(split), piece_shape(param, split), parts=parts)
    given, first = {k: v for k, v in saved.items() if k != "batch"}, spec.counters()
    if saved and spec.torch.counts and "step" not in saved:
        raise lack("step")
    p.step = int(number_in(owner, "step", name, given.pop("step", 0.0)))
    low, pieces, slots = given.pop(LOW, None), p.slots(spec), kept_slots(spec, param, split, home)
    if live and given.keys() - {*first, *part_names(spec, slots)}:
        pieces, first = possible(spec, p)
        slots = {slot: each * (p.pieces // len(each)) for slot, each in pieces.items()}
    for label in first.keys() & given.keys():
        p.counters[label] = number_in(owner, label, name, given.pop(label), spec.counter_ranges.get(label))
    if low is not None and halves.keeps_low(spec, param):
        check_low(owner, param, low, name)
        gather = low.full_tensor if live and halves.is_spread(low) else None
        p.tensors[LOW] = wrapped(low, (*param.shape, 2), f"{LOW!r} of {name!r}", "uint8", gather)
    begins = "started" in first  # and has no buffers before
    needed = bool(saved) and not live and (not begins or bool(p.counters.get("started")))
    for slot, key in names_of(spec, slots).items():
        value = given.pop(key, None)
        if value is None and needed and slots[slot][0].meaning == KEY:
            value = _key(spec, slots[slot], param, split, name)
        if value is not None:
            kind = storage.STORED.get(str(getattr(value, "dtype", "")).removeprefix("torch."), storage.EXACT)
            kind = storage.EXACT if live and not slots[slot][0].storage else kind  # a parameter of 16 bits, in evaluation mode
            if kind == storage.EXACT and torch.is_tensor(value) and not (unreadable(value) or value.is_floating_point()):
                raise state_error(owner, key, name, value, "a tensor of real numbers")
            there, each = (tuple(replace(one, storage=kind) for one in of[slot]) for of in (slots, pieces))
            for end, dtype in COMPONENTS[kind].items():
                found, shape = given.pop(key + end, None) if end else value, shape_in_state(part(there, end), param, split)
                gather = functools.partial(home.get, found, shape) if live and home is not None else None
                if gather is None:
                    check_component(owner, key + end, name, found, shape, bool(end))
                p.tensors[slot + end] = wrapped(found, p.stored(part(each, end)), f"{key + end!r} of {name!r}", dtype, gather)
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
    check_tensor(owner, key, name, value, shape)
    if scales and bool((whole(value) < 0).any()):
        raise ValueError(f"{owner}: state {key!r} of {name!r} has scales below zero. {CORRUPT}{restart(name)}")


def check_low(owner: str, param: torch.Tensor, value: Any, name: str) -> None:
    """The low half of a parameter, if it is one."""
    shape = (*param.shape, 2)
    if unreadable(value) or value.dtype is not torch.uint8 or tuple(value.shape) != shape:
        raise ValueError(
            f"{owner}: state {LOW!r} of {name!r} is {described(value)}, expected uint8 of shape {shape}. {CORRUPT}; remove "
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
        if len(COMPONENTS[slots[slot][0].storage]) > 1 and not unreadable(value) and value.is_floating_point():
            found = whole(value)
            if bool(found.any()) and torch.equal(found, found.round()):
                raise ValueError(
                    f"{owner}: {key!r} of {name} are codes that were read as numbers: the checkpoint has state_dtype={there!r}, "
                    f"here it is {spec.state_dtype!r}; read it into an optimizer with that one, and load its state_dict here"
                )


# ---- into the optimizer --------------------------------------------------------------------------------------------------------
def slots_here(spec: Spec, p: Parameter, home: Any) -> dict[str, Slots]:
    """The slots of a parameter as they are kept at its home: those of the rule, and those that there is state for."""
    slots = {**p.slots(spec), **p.used(spec)}
    slots = {name: each * (p.pieces // len(each)) for name, each in slots.items()}
    return slots if home is None else home.kept(slots, p.way)


def make_room(
    spec: Spec, p: Parameter, param: torch.Tensor, home: Any = None, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """State for a parameter of a snapshot, to be filled. before: buffers that are used again where they fit."""
    slots, device = slots_here(spec, p, home), device_of(param, home)
    state: dict[str, Any] = {"step": counter(p.step)}
    if p.pieces > 1:
        state["batch"] = p.way
    for key, (slot, end) in part_names(spec, slots).items():
        each, old = slots[slot], (before or {}).get(key) if slot in p.tensors else None
        shape, fits = shape_in_state(part(each, end), param, p.way), False
        if torch.is_tensor(old) and (old.dtype, old.device) == (dtype_of(each, param, end), device) and old.is_contiguous():
            fits = old.shape == shape if home is None else home.fits(old, shape)
        state[key] = old if fits else room(each, param, p.way, home, end)
    state |= {k: counter(v) for k, v in p.counters.items()}
    halves.init_state(state, spec, param, device)
    return state


@torch.no_grad()
def fill(state: dict[str, Any], spec: Spec, p: Parameter, home: Any = None) -> None:
    """Write a snapshot's tensors into the state of a parameter: components of the same format as they are, others by value."""
    if LOW in state and LOW in p.tensors:
        halves.put(state[LOW], tensor_of(p.tensors[LOW].native()))
    slots = slots_here(spec, p, home)
    for slot, key in names_of(spec, slots).items():
        if slot in p.tensors:
            kind, wanted = p.storage_of(slot), slots[slot][0].storage
            found = {end: p.tensors[slot + end].native() for end in COMPONENTS[kind]}
            put({end: state[key + end] for end in COMPONENTS[wanted]}, wanted, kind, found, home)


def put(buffers: Mapping[str, torch.Tensor], wanted: str, kind: str, given: Mapping[str, Any], home: Any) -> None:
    """Leave the components of a slot, in the format `kind`, in buffers that are in the format `wanted`. Those of a parameter that
    is spread over ranks are given whole, or as DTensors."""
    values = {end: tensor_of(value) for end, value in given.items()}
    values = {end: v.view(torch.bfloat16) if v.dtype is torch.uint16 else v for end, v in values.items()}  # as NumPy has it
    if kind != wanted:
        first, value = buffers[""], decoded(kind, values)
        if wanted:
            value = whole(value).to(first.device)
            value = value.reshape(first.shape) if home in (None, HOST) else value
            values = storage.encode(words(first.device), wanted, value, 0)
        else:
            values = {"": value}
    for end, value in values.items():
        if home is None:
            buffers[end].copy_(value.reshape(buffers[end].shape))
        else:
            home.put(buffers[end], value)


def decoded(kind: str, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values of a slot that is kept in these components."""
    if not kind:
        return components[""]
    codes, *scales = map(whole, components.values())
    scales = [each.reshape(*codes.shape[:-1], -1) for each in scales]  # of a split parameter they may have another shape
    found: torch.Tensor = storage.decode(words(codes.device), storage.Quantized(kind, codes, *scales))
    return found


def words(device: torch.device) -> Any:
    """`storage`'s words on a device."""
    from ..engines.torch_ import Torch

    return Torch(device)


def load_state(
    owner: str, spec: Spec, param: torch.Tensor, split: Split, saved: Mapping[str, Any], name: str, home: Any = None
) -> dict[str, Any]:
    """The state of a parameter that a state dict in our words has, by value; as it starts where that is empty."""
    p = read_parameter(owner, spec, param, split, saved, name, home)
    state = make_room(spec, p, param, home)
    fill(state, spec, p, home)
    return state | {k: by_value(v) for k, v in p.extras.items()}


def by_value(found: Any) -> Any:
    """Tensors and what they are in, copied; other objects are what they are."""
    if torch.is_tensor(found):
        return found.clone()
    if type(found) is dict:
        return {k: by_value(v) for k, v in found.items()}
    return type(found)(map(by_value, found)) if type(found) in (list, tuple, set) else found
