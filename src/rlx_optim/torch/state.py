"""The state of one parameter as torch keeps it: a flat dict of tensors, by torch's names, in the arithmetic's dtype.

"step" counts the steps; slots have the shapes torch.optim gives them; counters are 0-D; "batch" is there for split parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import storage
from ..spec import Shape, Slot, Spec
from ..splits import WHOLE, Split, checked, part, shapes_of, slots_of, stored
from . import bf16
from .memory import local_part
from .placements.local import ARITHMETIC

Slots = tuple[Slot, ...]  # of each piece of a parameter

#: what torch calls a slot by the first words of its meaning
MEANINGS = {
    "first moment": "exp_avg",
    "second moment": "exp_avg_sq",
    "largest second moment": "max_exp_avg_sq",
    "row": "row_var",
    "column": "col_var",
    "curvature": "hessian",
    "last gradient": "last_grad",
}


def name_slots(kind: type[Spec] | Spec, slots: Mapping[str, Slot]) -> dict[str, str]:
    """The names of a tensor's slots in a state_dict. Of several with one meaning the first has torch's name."""
    found: dict[str, str] = {}
    for slot, each in slots.items():
        usual = next((name for words, name in MEANINGS.items() if f"{each.meaning} ".startswith(f"{words} ")), slot)
        name = kind.torch.slots.get(slot, usual)
        found[slot] = slot if name in found.values() else name
    return found


def read_split(state: Mapping[str, Any]) -> Split | None:
    """How a parameter is split, as its state says."""
    given = state.get("batch")
    return None if given is None else checked(given if isinstance(given, (list, tuple)) else operator.index(given))


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


def start_slot(
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

    def stored_slots(self, slots: dict[str, Slots], split: Split) -> dict[str, Slots]:
        return slots

    def allocate(self, slots: Slots, param: torch.Tensor, split: Split, dtype: torch.dtype) -> torch.Tensor:
        return start_slot(slots, param, split, dtype, self.device)

    def write(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        buffer.copy_(value.reshape(buffer.shape))

    def gather(self, buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
        return buffer

    def accepts(self, buffer: torch.Tensor, shape: Shape) -> bool:
        return tuple(buffer.shape) == shape


HOST = Host()


def device_of(param: torch.Tensor, home: Any) -> torch.device:
    """Where the state of a parameter is."""
    return HOST.device if home is HOST else local_part(param).device


def names_of(spec: Spec, slots: Mapping[str, Slots]) -> dict[str, str]:
    """The names of a parameter's slots in a state_dict."""
    return name_slots(spec, {name: each[0] for name, each in slots.items()})


def kept_slots(spec: Spec, param: torch.Tensor, split: Split, home: Any = None) -> dict[str, Slots]:
    """The slots of a parameter's pieces, with what they are kept in at its home (`placements.homes`, `HOST`; None: beside it)."""
    slots = slots_of(spec, tuple(param.shape), split)
    return slots if home is None else home.stored_slots(slots, split)


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


def view_pieces(buffer: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
    """The part of a slot's memory that is each piece's."""
    each = buffer.reshape(-1).split([math.prod(slot.shape) for slot in slots])
    return [piece.view(slot.shape) for piece, slot in zip(each, slots, strict=True)]


def make_counter(value: Any) -> torch.Tensor:
    """A number that is kept; on the CPU, whatever the default device is. float32, which torch.optim counts in, ends at 2^24."""
    with _disable_current_modes():  # FakeTensorMode's among them
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def read_counter(value: Any) -> float:
    """A number that is kept, read."""
    with _disable_current_modes():
        return float(value)


def room(slots: Slots, param: torch.Tensor, split: Split, home: Any, end: str = "") -> torch.Tensor:
    """A slot as it starts, or the part of it with this name, where it is kept: home is that of a parameter spread over ranks
    (`placements.homes`) or `HOST`, else None."""
    make = start_slot if home is None else home.allocate
    buffer: torch.Tensor = make(part(slots, end), param, split, dtype_of(slots, param, end))
    return buffer


def init_state(state: dict[str, Any], spec: Spec, param: torch.Tensor, split: Split, home: Any = None) -> None:
    """State from the start, so that nobody needs a hidden first step to learn its shape. What is there stays."""
    state.setdefault("step", make_counter(0.0))
    if split != WHOLE:
        state.setdefault("batch", split)
    slots = kept_slots(spec, param, split, home)
    for name, (slot, end) in part_names(spec, slots).items():
        if name not in state:
            state[name] = room(slots[slot], param, split, home, end)
    for name, value in spec.counters().items():
        state.setdefault(name, make_counter(value))
    bf16.init_state(state, spec, param, device_of(param, home))


def export_state(group: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """State as torch.optim can go on with it: its SGD begins an average undampened where it finds none, so ours is left out until
    it has begun. Without dampening zeros are as good."""
    if group.get("dampening") and "started" in state and not state["started"]:
        return {k: v for k, v in state.items() if k not in ("momentum_buffer", "started")}
    return state


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor as it is, and what else there is on the host, whatever the default device."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
