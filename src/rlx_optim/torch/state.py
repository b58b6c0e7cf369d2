"""The state of one parameter as torch keeps it: a flat dict of tensors, by torch's names, in the arithmetic's dtype.

"step" counts the steps; slots have the shapes torch.optim gives them; counters are 0-D; "batch" is there for split parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import random, storage
from ..routing import bare
from ..spec import KEY, Shape, Slot, Spec
from ..splits import WHOLE, Split, checked, names_in, part, shapes_of, slots_of, stored
from . import halves
from .lanes import ARITHMETIC
from .names import outside
from .state_errors import check_tensor, number_in, state_error, unreadable

Slots = tuple[Slot, ...]  # of each piece of a parameter


def split_in(state: Mapping[str, Any]) -> Split | None:
    """How a parameter is split, as its state says."""
    given = state.get("batch")
    return None if given is None else checked(given if isinstance(given, (list, tuple)) else operator.index(given))


def split_of(owner: str, param: torch.Tensor, saved: Mapping[str, Any], name: str) -> Split | None:
    """How a parameter is split, as a checkpoint says."""
    try:
        if (split := split_in(saved)) is not None:
            shapes_of(tuple(param.shape), split)
    except (TypeError, ValueError) as problem:
        raise state_error(owner, "batch", name, saved["batch"], f"a split of shape {tuple(param.shape)} ({problem})") from None
    return split


def piece_shape(param: torch.Tensor, split: Split) -> Shape:
    """The shape that the rule sees, at first."""
    return shapes_of(tuple(param.shape), split)[0]


def shape_in_state(slots: Slots, param: torch.Tensor, split: Split) -> Shape:
    """The shape of a slot in a state_dict: torch keeps the axes that row and column means lack, with length 1."""
    shape, slot = tuple(param.shape), slots[0]
    if split != WHOLE:
        return stored(slots, shape, split)
    if slot.drop == (-1,):
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, shape[-1]) if slot.drop == (-2,) else slot.shape


def shapes_in_state(spec: Spec, param: torch.Tensor, split: Split) -> dict[str, Shape]:
    """The shapes of all tensors of a parameter's state, by their names in a state_dict."""
    slots = slots_of(spec, tuple(param.shape), split)
    names = part_names(spec, slots)
    return {key: shape_in_state(part(slots[slot], end), param, split) for key, (slot, end) in names.items()}


def is_frozen(param: torch.Tensor) -> bool:
    """Whether a parameter is not being trained: it has no gradient, and none will come."""
    return not param.requires_grad and param.grad is None


def fresh(
    slots: Slots, param: torch.Tensor, split: Split, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A slot as it starts, or a part of one in fewer bits; beside the parameter, if nothing else is said."""
    shape, device = shape_in_state(slots, param, split), device or param.device
    if slots[0].eye:
        each = [torch.eye(slot.shape[0], dtype=dtype, device=device).mul_(slot.fill).reshape(-1) for slot in slots]
        return torch.cat(each).reshape(shape)
    return torch.full(shape, slots[0].fill, dtype=dtype, device=device)


class Host:
    """The home of state that is kept in the host's memory (`offload`)."""

    device = torch.device("cpu")

    def kept(self, slots: dict[str, Slots], split: Split) -> dict[str, Slots]:
        return slots

    def room(self, slots: Slots, param: torch.Tensor, split: Split, dtype: torch.dtype) -> torch.Tensor:
        return fresh(slots, param, split, dtype, self.device)

    def put(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        buffer.copy_(value.reshape(buffer.shape))

    def get(self, buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
        return buffer

    def fits(self, buffer: torch.Tensor, shape: Shape) -> bool:
        return tuple(buffer.shape) == shape


HOST = Host()


def device_of(param: torch.Tensor, home: Any) -> torch.device:
    """Where the state of a parameter is."""
    return HOST.device if home is HOST else halves.local(param).device


def names_of(spec: Spec, slots: Mapping[str, Slots]) -> dict[str, str]:
    """The names of a parameter's slots in a state_dict."""
    return outside(spec, {name: each[0] for name, each in slots.items()})


def kept_slots(spec: Spec, param: torch.Tensor, split: Split, home: Any = None) -> dict[str, Slots]:
    """The slots of a parameter's pieces, with what they are kept in at its home (`sharded.homes`, `HOST`; None: beside it)."""
    slots = slots_of(spec, tuple(param.shape), split)
    return slots if home is None else home.kept(slots, split)


def part_names(spec: Spec, slots: Mapping[str, Slots]) -> dict[str, tuple[str, str]]:
    """By the names of all tensors of a parameter's state: the slot, and which part of it (`storage.COMPONENTS`)."""
    return {
        key + end: (slot, end)
        for slot, key in names_of(spec, slots).items()
        for end in storage.COMPONENTS[slots[slot][0].storage]
    }


def dtype_of(slots: Slots, param: torch.Tensor, end: str) -> torch.dtype:
    """The type of a slot's tensor, or of the part of it with this name."""
    dtype = storage.COMPONENTS[slots[0].storage][end]
    return getattr(torch, dtype) if dtype else ARITHMETIC[param.dtype]


def in_pieces(buffer: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
    """The part of a slot's memory that is each piece's."""
    each = buffer.reshape(-1).split([math.prod(slot.shape) for slot in slots])
    return [piece.view(slot.shape) for piece, slot in zip(each, slots, strict=True)]


def counter(value: Any) -> torch.Tensor:
    """A number that is kept; on the CPU, whatever the default device is. float32, which torch.optim counts in, ends at 2^24."""
    with _disable_current_modes():  # FakeTensorMode's among them
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def count_of(value: Any) -> float:
    """A number that is kept, read."""
    with _disable_current_modes():
        return float(value)


def room(slots: Slots, param: torch.Tensor, split: Split, home: Any, end: str = "") -> torch.Tensor:
    """A slot as it starts, or the part of it with this name, where it is kept: home is that of a parameter spread over ranks
    (`sharded.homes`) or `HOST`, else None."""
    make = fresh if home is None else home.room
    buffer: torch.Tensor = make(part(slots, end), param, split, dtype_of(slots, param, end))
    return buffer


def init_state(state: dict[str, Any], spec: Spec, param: torch.Tensor, split: Split, home: Any = None) -> None:
    """State from the start, so that nobody needs a hidden first step to learn its shape. What is there stays."""
    state.setdefault("step", counter(0.0))
    if split != WHOLE:
        state.setdefault("batch", split)
    slots = kept_slots(spec, param, split, home)
    for name, (slot, end) in part_names(spec, slots).items():
        if name not in state:
            state[name] = room(slots[slot], param, split, home, end)
    for name, value in spec.counters().items():
        state.setdefault(name, counter(value))
    halves.init_state(state, spec, param, device_of(param, home))


def canonicalize(state: dict[str, Any], spec: Spec) -> None:
    """Counts as they should be, where others have moved or replaced them."""
    for name in ("step", *spec.counters()):
        value = state[name]
        sound = torch.is_tensor(value) and not value.ndim and value.dtype is torch.float64 and value.device.type == "cpu"
        if not sound or value.is_inference():
            state[name] = counter(value)


def export_state(group: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """State as torch.optim can go on with it: its SGD begins an average undampened where it finds none, so ours is left out until
    it has begun. Without dampening zeros are as good."""
    if group.get("dampening") and "started" in state and not state["started"]:
        return {k: v for k, v in state.items() if k not in ("momentum_buffer", "started")}
    return state


def words(device: torch.device) -> Any:
    """`storage`'s words on a device."""
    from ..engines.torch_ import Torch

    return Torch(device)


def decoded(kind: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values of a slot that is kept in these parts."""
    codes, *scales = map(whole, parts.values())
    scales = [each.reshape(*codes.shape[:-1], -1) for each in scales]  # of a split parameter they may have another shape
    found: torch.Tensor = storage.decode(words(codes.device), storage.Quantized(kind, codes, *scales)) if kind else codes
    return found


def put(buffers: Mapping[str, torch.Tensor], kind: str, given: Any, home: Any = None) -> None:
    """Leave in a slot's tensors its parts, as they are, or its values. kind: what it is kept in. Of a parameter that is spread
    over ranks they are given whole, or as DTensors."""
    first = buffers[""]
    if kind and not isinstance(given, Mapping):
        value = whole(tensor_of(given)).to(first.device)
        given = storage.encode(words(first.device), kind, value.reshape(first.shape) if home in (None, HOST) else value, 0)
    for end, found in (given if isinstance(given, Mapping) else {"": given}).items():
        buffer, value = buffers[end], tensor_of(found)
        value = value.view(torch.bfloat16) if value.dtype is torch.uint16 else value  # as NumPy has it
        if home is None:
            buffer.copy_(value.reshape(buffer.shape))
        else:
            home.put(buffer, value)


def tensor_of(value: Any) -> torch.Tensor:
    """A tensor as it is, and what else there is on the host, whatever the default device."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def whole(tensor: Any) -> torch.Tensor:
    """A tensor; a DTensor with its parts from all ranks."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def refuse_codes(
    owner: str, spec: Spec, there: Any, param: torch.Tensor, split: Split, given: Mapping[str, Any], name: str
) -> None:
    """Refuse codes that were read as numbers: torch.distributed.checkpoint copies them into whatever tensor it is given. there:
    the `state_dtype` that the checkpoint was written with."""
    slots = slots_of(spec.replace(state_dtype=there), tuple(param.shape), split)
    for slot, key in names_of(spec, slots).items():
        value: Any = given.get(key)
        if len(storage.COMPONENTS[slots[slot][0].storage]) > 1 and not unreadable(value) and value.is_floating_point():
            found = whole(value)
            if bool(found.any()) and torch.equal(found, found.round()):
                raise ValueError(
                    f"{owner}: {key!r} of {name} are codes that were read as numbers: the checkpoint has state_dtype={there!r}, "
                    f"here it is {spec.state_dtype!r}; read it into an optimizer with that one, and load its state_dict here"
                )


def load_state(
    owner: str, spec: Spec, param: torch.Tensor, split: Split, saved: Mapping[str, Any], name: str, home: Any = None
) -> dict[str, Any]:
    """The state of a checkpoint, by value, checked against what the parameter needs."""
    given = dict(saved)
    given.pop("batch", None)
    if saved and spec.torch.counts and "step" not in saved:
        raise ValueError(f"{owner}: the checkpoint's state of {name} lacks 'step'")
    state: dict[str, Any] = {"step": counter(number_in(owner, "step", name, given.pop("step", 0.0)))}
    state |= halves.load_state(owner, spec, param, given, name, device_of(param, home))
    if split != WHOLE:
        state["batch"] = split
    found = {label: given.pop(label) for label in spec.counters() if label in given}
    counters = {label: number_in(owner, label, name, value, spec.counter_ranges.get(label)) for label, value in found.items()}
    begins = "started" in spec.counters()  # and has no buffers before
    needed, started = bool(saved) and (not begins or bool(counters.get("started", 0))), False
    slots = kept_slots(spec, param, split, home)
    names = names_of(spec, slots)
    for slot, key in names.items():
        expected = slots[slot]
        wanted = expected[0].storage
        buffers = {end: room(expected, param, split, home, end) for end in storage.COMPONENTS[wanted]}
        value = given.pop(key, None)
        if value is None and needed and expected[0].meaning == KEY:  # older versions drew by seed and name
            keys = [random.key(spec.values()["seed"], each) for each in names_in(bare(name), split)]
            value = torch.tensor(list(map(random.halves, keys)), dtype=torch.float64, device="cpu")
            value = value.reshape(shape_in_state(expected, param, split))
        if value is None:
            if needed:
                raise ValueError(f"{owner}: the checkpoint's state of {name} lacks {key!r}")
        else:
            kind = storage.STORED.get(str(getattr(value, "dtype", "")).removeprefix("torch."), storage.EXACT)
            parts = {"": value} | {end: given.pop(key + end, None) for end in storage.COMPONENTS[kind] if end}
            there = tuple(replace(each, storage=kind) for each in expected)
            if kind == storage.EXACT and torch.is_tensor(value) and not (unreadable(value) or value.is_floating_point()):
                raise state_error(owner, key, name, value, "a tensor of real numbers")
            for end, found in parts.items():
                check_tensor(owner, key + end, name, found, shape_in_state(part(there, end), param, split))
                if end and bool((whole(found) < 0).any()):
                    raise ValueError(f"{owner}: {key + end!r} of {name} has scales below zero in the checkpoint; it is damaged")
            started = True
            put(buffers, wanted, parts if kind == wanted else decoded(kind, parts), home)
        state |= {key + end: buffer for end, buffer in buffers.items()}
    lacking = [label for label in spec.counters() if label not in counters and label != "started"]
    if lacking and saved and count_of(state["step"]):
        raise ValueError(f"{owner}: the checkpoint's state of {name} lacks {lacking[0]!r}")
    for label, first in spec.counters().items():
        state[label] = counter(counters.get(label, float(started) if label == "started" else first))
    return state | {k: by_value(v) for k, v in given.items()}  # the rest is the user's own


def by_value(found: Any) -> Any:
    """Tensors and what they are in, copied; other objects are what they are."""
    if torch.is_tensor(found):
        return found.clone()
    if type(found) is dict:
        return {k: by_value(v) for k, v in found.items()}
    return type(found)(map(by_value, found)) if type(found) in (list, tuple, set) else found
