"""The state of one parameter as torch keeps it: a flat dict of tensors, by torch's names, in the arithmetic's dtype.

"step" counts the steps; slots have the shapes torch.optim gives them; counters are 0-D; "batch" is there for split parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..pieces import WHOLE, Split, checked, shapes_of, slots_of, stored
from ..spec import Shape, Slot, Spec
from .lanes import ARITHMETIC
from .names import outside

Slots = tuple[Slot, ...]  # of each piece of a parameter


def split_in(state: Mapping[str, Any]) -> Split | None:
    """How a parameter is split, as its state says."""
    given = state.get("batch")
    return None if given is None else checked(given if isinstance(given, (list, tuple)) else int(given))


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


def fresh(slots: Slots, param: torch.Tensor, split: Split) -> torch.Tensor:
    """A slot as it starts."""
    dtype, shape = ARITHMETIC[param.dtype], shape_in_state(slots, param, split)
    if slots[0].eye:
        each = [torch.eye(slot.shape[0], dtype=dtype, device=param.device).mul_(slot.fill).reshape(-1) for slot in slots]
        return torch.cat(each).reshape(shape)
    return torch.full(shape, slots[0].fill, dtype=dtype, device=param.device)


def names_of(spec: Spec, slots: Mapping[str, Slots]) -> dict[str, str]:
    """The names of a parameter's slots in a state_dict."""
    return outside(spec, {name: each[0] for name, each in slots.items()})


def in_pieces(buffer: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
    """The part of a slot's memory that is each piece's."""
    parts = buffer.reshape(-1).split([math.prod(slot.shape) for slot in slots])
    return [part.view(slot.shape) for part, slot in zip(parts, slots, strict=True)]


def counter(value: Any) -> torch.Tensor:
    """A number that is kept; on the CPU, whatever the default device is. float32, which torch.optim counts in, ends at 2^24."""
    with _disable_current_modes():  # FakeTensorMode's among them
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def count_of(value: Any) -> float:
    """A number that is kept, read."""
    with _disable_current_modes():
        return float(value)


def room(slots: Slots, param: torch.Tensor, split: Split, home: Any) -> torch.Tensor:
    """A slot as it starts, where it is kept: home is that of a parameter spread over ranks (`sharded.homes`), else None."""
    return fresh(slots, param, split) if home is None else home.room(slots, param, split)


def furnish(state: dict[str, Any], spec: Spec, param: torch.Tensor, split: Split, home: Any = None) -> None:
    """State from the start, so that nobody needs a hidden first step to learn its shape. What is there stays."""
    state.setdefault("step", counter(0.0))
    if split != WHOLE:
        state.setdefault("batch", split)
    slots = slots_of(spec, tuple(param.shape), split)
    for slot, name in names_of(spec, slots).items():
        if name not in state:
            state[name] = room(slots[slot], param, split, home)
    for name, value in spec.counters().items():
        state.setdefault(name, counter(value))


def settle(state: dict[str, Any], spec: Spec) -> None:
    """Counts as they should be, where others have moved or replaced them."""
    for name in ("step", *spec.counters()):
        value = state[name]
        sound = torch.is_tensor(value) and not value.ndim and value.dtype is torch.float64 and value.device.type == "cpu"
        if not sound or value.is_inference():
            state[name] = counter(value)


def handed_on(group: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """State as torch.optim can go on with it: its SGD begins an average undampened where it finds none, so ours is left out until
    it has begun. Without dampening zeros are as good."""
    if group.get("dampening") and "started" in state and not state["started"]:
        return {k: v for k, v in state.items() if k not in ("momentum_buffer", "started")}
    return state


class Plain:
    """The home of a plain tensor's state: its own memory."""

    @staticmethod
    def put(buffer: torch.Tensor, value: torch.Tensor) -> None:
        buffer.copy_(value)


def taken_over(
    owner: str, spec: Spec, param: torch.Tensor, split: Split, saved: Mapping[str, Any], name: str, home: Any = None
) -> dict[str, Any]:
    """The state of a checkpoint, by value, checked against what the parameter needs."""
    given = dict(saved)
    given.pop("batch", None)
    state: dict[str, Any] = {"step": counter(given.pop("step", 0.0))}
    if split != WHOLE:
        state["batch"] = split
    begins = "started" in spec.counters()  # and has no buffers before
    needed, started = bool(saved) and (not begins or bool(given.get("started", 0))), False
    slots = slots_of(spec, tuple(param.shape), split)
    for slot, key in names_of(spec, slots).items():
        expected = slots[slot]
        buffer, shape = room(expected, param, split, home), shape_in_state(expected, param, split)
        value = given.pop(key, None)
        if value is None:
            if needed:
                raise ValueError(f"{owner}: the checkpoint's state of {name} lacks {key!r}")
        elif not torch.is_tensor(value) or tuple(value.shape) != shape:
            found = tuple(value.shape) if torch.is_tensor(value) else value
            raise ValueError(f"{owner}: {key!r} of {name} has shape {found} in the checkpoint, needed is {shape}")
        else:
            started = True
            (home or Plain).put(buffer, value)
        state[key] = buffer
    for label, first in spec.counters().items():
        state[label] = counter(given.pop(label, float(started) if label == "started" else first))
    return state | {k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()}  # the rest is the user's own
