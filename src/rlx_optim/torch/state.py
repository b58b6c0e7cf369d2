"""The state of one parameter as torch keeps it: a flat dict of tensors, by torch's names, in the arithmetic's dtype.

"step" counts the steps; slots have the shapes torch.optim gives them; counters are 0-D; "batch" is there for split parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import storage
from ..spec import Shape, Slot, Spec
from .lanes import ARITHMETIC, inner_shape
from .names import outside, part_names


def piece_shape(param: torch.Tensor, batch: int) -> Shape:
    """The shape that the rule sees."""
    shape = tuple(param.shape)
    return shape if batch == 1 else inner_shape(shape, batch)


def shape_in_state(slot: Slot, param: torch.Tensor, batch: int) -> Shape:
    """The shape of a slot in a state_dict: torch keeps the axes that row and column means lack, with length 1."""
    shape = tuple(param.shape)
    if batch > 1:
        return shape if slot.shape == piece_shape(param, batch) else (batch, *slot.shape)
    if slot.drop == (-1,):
        return (*shape[:-1], 1)
    return (*shape[:-2], 1, shape[-1]) if slot.drop == (-2,) else slot.shape


def layout(slot: Slot, param: torch.Tensor, batch: int) -> dict[str, tuple[Shape, torch.dtype]]:
    """Shape and type of the tensors that a slot is kept in, by what is added to its name."""
    found = storage.parts(slot, shape_in_state(slot, param, batch))
    return {end: (shape, getattr(torch, dtype) if dtype else ARITHMETIC[param.dtype]) for end, (shape, dtype) in found.items()}


def fresh(slot: Slot, param: torch.Tensor, batch: int, end: str = "") -> torch.Tensor:
    """A slot as it starts, or the part of it with this name."""
    shape, dtype = layout(slot, param, batch)[end]
    if slot.eye:
        eye = torch.eye(slot.shape[0], dtype=dtype, device=param.device) * slot.fill
        return eye.expand(batch, *slot.shape).reshape(shape).clone(memory_format=torch.contiguous_format)
    return torch.full(shape, slot.fill, dtype=dtype, device=param.device)


def counter(value: Any) -> torch.Tensor:
    """A number that is kept; on the CPU, whatever the default device is. float32, which torch.optim counts in, ends at 2^24."""
    with _disable_current_modes():  # FakeTensorMode's among them
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def count_of(value: Any) -> float:
    """A number that is kept, read."""
    with _disable_current_modes():
        return float(value)


def room(slot: Slot, param: torch.Tensor, batch: int, home: Any, end: str = "") -> torch.Tensor:
    """A slot as it starts, where it is kept: home is that of a parameter spread over ranks (`sharded.homes`), else None."""
    return fresh(slot, param, batch, end) if home is None else home.room(slot, param, batch)


def furnish(state: dict[str, Any], spec: Spec, param: torch.Tensor, batch: int, home: Any = None) -> None:
    """State from the start, so that nobody needs a hidden first step to learn its shape. What is there stays."""
    state.setdefault("step", counter(0.0))
    if batch > 1:
        state.setdefault("batch", batch)
    slots = spec.kept(piece_shape(param, batch))
    for name, (slot, end) in part_names(spec, slots).items():
        if name not in state:
            state[name] = room(slots[slot], param, batch, home, end)
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


def words(device: torch.device) -> Any:
    """`storage`'s words on a device."""
    from ..engines.torch_ import Torch

    return Torch(device)


def put(buffers: Mapping[str, torch.Tensor], kind: str, given: Any) -> None:
    """Leave in a slot's tensors its parts, as they are, or its values. kind: what it is kept in."""
    first = buffers[""]
    if kind and not isinstance(given, Mapping):
        value = torch.as_tensor(given).to(first.device).reshape(first.shape)
        given = storage.encode(words(first.device), kind, value, 0)
    for end, part in (given if isinstance(given, Mapping) else {"": given}).items():
        buffer, part = buffers[end], torch.as_tensor(part)
        part = part.view(torch.bfloat16) if part.dtype is torch.uint16 else part  # as NumPy has it
        buffer.copy_(part.reshape(buffer.shape))


def taken_over(
    owner: str, spec: Spec, param: torch.Tensor, batch: int, saved: Mapping[str, Any], name: str, home: Any = None
) -> dict[str, Any]:
    """The state of a checkpoint, by value, checked against what the parameter needs."""
    given = dict(saved)
    given.pop("batch", None)
    state: dict[str, Any] = {"step": counter(given.pop("step", 0.0))}
    if batch > 1:
        state["batch"] = batch
    begins = "started" in spec.counters()  # and has no buffers before
    needed, started = bool(saved) and (not begins or bool(given.get("started", 0))), False
    slots = spec.kept(piece_shape(param, batch))
    for slot, key in outside(spec, slots).items():
        expected = slots[slot]
        buffers = {end: room(expected, param, batch, home, end) for end in storage.PARTS[expected.storage]}
        value = given.pop(key, None)
        if value is None:
            if needed:
                raise ValueError(f"{owner}: the checkpoint's state of {name} lacks {key!r}")
        else:
            kind = storage.STORED.get(str(getattr(value, "dtype", "")).removeprefix("torch."), storage.EXACT)
            parts = {"": value} | {end: given.pop(key + end, None) for end in storage.PARTS[kind] if end}
            for end, (shape, _) in storage.parts(replace(expected, storage=kind), shape_in_state(expected, param, batch)).items():
                part = parts[end]
                if not torch.is_tensor(part) or tuple(part.shape) != shape:
                    found = tuple(part.shape) if torch.is_tensor(part) else part
                    raise ValueError(f"{owner}: {key + end!r} of {name} has shape {found} in the checkpoint, needed is {shape}")
                if end and bool((part < 0).any()):
                    raise ValueError(f"{owner}: {key + end!r} of {name} has scales below zero in the checkpoint; it is damaged")
            started = True
            if kind == expected.storage and kind:
                put(buffers, kind, parts)
            else:
                values = storage.decode(words(value.device), storage.Coded(kind, *parts.values())) if kind else value
                put(buffers, expected.storage, values) if home is None else home.put(buffers[""], values)
        state |= {key + end: buffer for end, buffer in buffers.items()}
    for label, first in spec.counters().items():
        state[label] = counter(given.pop(label, float(started) if label == "started" else first))
    return state | {k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()}  # the rest is the user's own
