"""A parameter that is several tensors to its rule: fused matrices, heads, experts.

A split is a number of equal pieces (whole leading axes, or shares of the first), or the lengths of pieces along the first axis;
along the second, where only that has so many. In memory and in files pieces lie one behind the other, each contiguous: which is
the parameter itself, unless its columns are split.
"""

from __future__ import annotations

import dataclasses
import math

from . import storage
from .spec import Shape, Slot, Spec

Split = int | tuple[int, ...]
WHOLE = 1


def checked(split: object) -> Split:
    """A split as it is kept, or ValueError: what it must be."""
    lengths = isinstance(split, (tuple, list))
    several = tuple(split) if isinstance(split, (tuple, list)) else (split,)
    if not several or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in several):
        raise ValueError("the lengths >= 1 of its parts" if lengths else "an integer >= 1")
    return several if lengths else several[0]


def number(split: Split) -> int:
    return split if isinstance(split, int) else len(split)


def columnwise(shape: Shape, split: Split) -> bool:
    """Whether it is the columns that are split."""
    return isinstance(split, tuple) and sum(split) != (shape or (0,))[0]


def shapes_of(shape: Shape, split: Split) -> list[Shape]:
    """The shape of each piece; ValueError where it cannot be."""
    if isinstance(split, int):
        return [inner_shape(shape, split)] * split
    if columnwise(shape, split):
        if len(shape) != 2 or sum(split) != shape[1]:
            raise ValueError(f"shape {shape} cannot be split into parts of {', '.join(map(str, split))}")
        return [(shape[0], n) for n in split]
    return [(n, *shape[1:]) for n in split]


def inner_shape(shape: Shape, split: int) -> Shape:
    """The shape of one of so many equal pieces."""
    if split > 1 and not shape:
        raise ValueError(f"a parameter without dimensions cannot be split into {split} equal matrices")
    kept, left = list(shape), split
    while left > 1 and kept and left % kept[0] == 0 and len(kept) > 2:
        left //= kept.pop(0)
    if left > 1:
        if kept[0] % left:
            raise ValueError(f"shape {shape} cannot be split into {split} equal matrices")
        kept[0] //= left
    return tuple(kept)


def names_in(name: str, split: Split) -> list[str]:
    """What the pieces of a parameter are called."""
    return [name] if split == WHOLE else [f"{name}[{i}]" for i in range(number(split))]


def described(shape: Shape, split: Split) -> str:
    """In words: "3 of 768×768", or "2048+256+256 rows"."""
    if isinstance(split, int) or len(set(split)) == 1:
        return f"{number(split)} of {'×'.join(map(str, shapes_of(shape, split)[0]))}"
    return f"{'+'.join(map(str, split))} {'columns' if columnwise(shape, split) else 'rows'}"


# ---- state ------------------------------------------------------------------------------------------------------------------
def slots_of(spec: Spec, shape: Shape, split: Split) -> dict[str, tuple[Slot, ...]]:
    """Of every slot that of each piece. Pieces of one parameter have slots of the same names."""
    shapes = shapes_of(shape, split)
    known = {each: spec.stored_slots(each) for each in dict.fromkeys(shapes)}
    first = known[shapes[0]]
    if any(slots.keys() != first.keys() for slots in known.values()):
        raise spec.refuse(
            f"parts of {', '.join(map(str, known))} do not have the same state; give them as parameters of their own"
        )
    return {name: _alike(tuple(known[each][name] for each in shapes)) for name in first}


def _alike(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Pieces of one parameter are kept in the same: exact, where one of them is, or where rows differ in length."""
    same = len({(slot.storage, slot.shape[-1:]) for slot in slots}) == 1 or not any(slot.storage for slot in slots)
    return slots if same else exact(slots)


def exact(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """These slots, kept as they are."""
    return tuple(dataclasses.replace(slot, storage=storage.EXACT) for slot in slots)


def part(slots: tuple[Slot, ...], end: str) -> tuple[Slot, ...]:
    """One of the arrays that slots in fewer bits consist of, by what is added to their name (`storage`), as slots of its own."""
    if not slots[0].storage:
        return slots
    return tuple(dataclasses.replace(slot, shape=storage.components(slot)[end][0], storage=storage.EXACT) for slot in slots)


def stored(slots: tuple[Slot, ...], shape: Shape, split: Split) -> Shape:
    """The shape in which the slot of a split parameter is kept: the parameter's where each piece's is the piece's; else one after
    the other, with an axis that counts them where they are equal."""
    shapes = [slot.shape for slot in slots]
    if shapes == shapes_of(shape, split) and not columnwise(shape, split):
        return shape
    return (len(shapes), *shapes[0]) if len(set(shapes)) == 1 else (sum(map(math.prod, shapes)),)
